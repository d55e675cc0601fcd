"""Benchmark clients on the demo's real server: our own always, others where the environment says how to start them.

`RATCHET_BENCH_SGLANG`, `_VLLM`, `_GUIDELLM` and `_AIPERF` hold the words that start a client, `RATCHET_BENCH_TOKENIZER`
the folder of a tokenizer of the demo's model. docs/how-to/benchmark-clients.md says how each client is installed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.validity import QUIET, invalid_reasons
from state.models import ValidityRule
from tests.contracts.bench_contract import KEY, BenchCase, BenchContract, request
from tests.tools.test_benches import builtin_case, point
from tests.tools.test_stream_client import CLIENT, demo_server
from tools.benches.base import RESULT, BenchClient, Place
from tools.benches.builtin import Builtin
from tools.benches.choice import EXTERNAL

pytestmark = pytest.mark.real
AT = point(2, 4, 32, 8)


@pytest.fixture(scope="module")
def url(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo_server(demo_model, tmp_path_factory.mktemp("server") / "log", "--metrics") as listening:
        yield listening


def run(client: BenchClient, url: str, folder: Path, answers: bool = False) -> dict[str, bytes]:
    """One run as a target makes it; the files that the client left."""
    place = Place(python=sys.executable, client=str(CLIENT), url=url, model="smollm2", api_key_file=None)
    script = client.script(KEY, request(AT, answers=answers), place)
    subprocess.run(["sh", "-c", script], cwd=folder, check=True)
    return {name: (folder / name).read_bytes() for name in client.leaves if (folder / name).exists()}


@pytest.fixture(scope="module")
def raw(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    told = json.loads(run(Builtin(), url, tmp_path_factory.mktemp("run"))[RESULT])
    return {**told, "client": {**told["client"], "bottleneck_reason": None}}  # no test needs a quiet machine


class TestBuiltinForReal(BenchContract):
    @pytest.fixture
    def case(self, raw: dict[str, Any]) -> BenchCase:
        return builtin_case(raw, AT, {"server_output_tokens": 32, "peak_concurrency": 2, "retokenized_tokens": None})


@pytest.mark.parametrize("name", EXTERNAL)
def test_an_external_client_measures_a_real_server(name: str, url: str, tmp_path: Path) -> None:
    words = os.environ.get(f"RATCHET_BENCH_{name.upper()}")
    tokenizer = os.environ.get("RATCHET_BENCH_TOKENIZER")
    if not words or not tokenizer:
        pytest.skip(f"RATCHET_BENCH_{name.upper()} or _TOKENIZER is not set; docs/how-to/benchmark-clients.md says how")
    client = EXTERNAL[name](shlex.split(words), (), tokenizer)
    result = client.parse(run(client, url, tmp_path, answers=True), KEY)
    reasons = invalid_reasons(result.metrics, result.telemetry, AT, ValidityRule())
    assert [reason for reason in reasons if not reason.startswith(QUIET)] == []
    assert result.metrics.output_tokens == AT.requests * AT.output_tokens
    assert result.metrics.server_output_tokens == result.metrics.output_tokens
    assert len(result.answers) == 12
