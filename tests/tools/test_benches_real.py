"""Benchmark clients for real: each against a llama.cpp server, a vLLM, and servers that die, cut short and refuse.

Our own client always runs, the others where the environment says how they are started: `RATCHET_BENCH_SGLANG`, `_VLLM`,
`_GUIDELLM` and `_AIPERF` hold their words, `RATCHET_BENCH_TOKENIZER` the folder of a tokenizer of the demo's model.
`make real` installs and sets all of it; docs/how-to/benchmark-clients.md says how it is done by hand.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.validity import QUIET, invalid_reasons
from state.models import LoadPoint, ValidityRule
from tests import real_vllm
from tests.contracts.bench_contract import KEY, Bad, BenchCase, BenchContract, Files, request, verdict
from tests.tools.test_benches import ANSWERS, builtin_case, counters, point
from tests.tools.test_stream_client import CLIENT, demo_process, demo_server, stub_server
from tools.benches.base import RESULT, BenchClient, Place
from tools.benches.builtin import Builtin, fixed_prompts
from tools.benches.choice import EXTERNAL
from tools.benches.escorted import EscortedClient

pytestmark = pytest.mark.real
AT = point(2, 12, 32, 16)
TOKENS = AT.requests * AT.output_tokens
LONG = point(2, 200, 32, 16)
"""Far from over when its server dies."""
DIES_AFTER = 100
"""Tokens."""
NOT_WHOLE = r"requests failed|wrote no|exit code|contradicts itself|does not tell|some are missing|stopped early"
FAULTS = {
    "quarter": (("quarter_tokens", 0.95), r"answers were shorter|the text that came has|requests failed"),
    "zero": (("zero_tokens", 0.95), rf"no TTFT above zero|no positive|answers were shorter|{NOT_WHOLE}"),
    "refuses_half": (("http_503", 0.5), NOT_WHOLE),
    "refuses_all": (("http_503", 0.95), NOT_WHOLE),
    "hangs_up": (("close_midstream", 0.5), rf"answers were shorter|the text that came has|{NOT_WHOLE}"),
}
"""What the stub server does to a share of the requests, the warm-up aside, and what is then said of the run."""


class Installed(NamedTuple):
    """An external client that can be started here."""

    kind: type[EscortedClient]
    words: tuple[str, ...]
    tokenizer: str

    def client(self) -> EscortedClient:
        return self.kind(self.words, (), self.tokenizer)


def installed(name: str) -> Installed:
    """The client as the environment names it; skips where it does not."""
    variable = f"RATCHET_BENCH_{name.upper()}"
    words, tokenizer = os.environ.get(variable), real_vllm.named("RATCHET_BENCH_TOKENIZER")
    if not words or not tokenizer:
        pytest.skip(f"{variable} or RATCHET_BENCH_TOKENIZER is not set; docs/how-to/benchmark-clients.md says how")
    return Installed(EXTERNAL[name], tuple(shlex.split(words)), tokenizer)


def run(
    client: BenchClient, url: str, folder: Path, at: LoadPoint = AT, model: str = "smollm2", answers: bool = False
) -> dict[str, bytes]:
    """One run as a target makes it; the files that the client left."""
    folder.mkdir(exist_ok=True)
    place = Place(python=sys.executable, client=str(CLIENT), url=url, model=model, api_key_file=None)
    script = client.script(KEY, request(at, answers=answers), place)
    subprocess.run(["sh", "-c", script], cwd=folder, check=True)
    return {name: (folder / name).read_bytes() for name in client.leaves if (folder / name).exists()}


def beside(files: Files, **changes: Any) -> dict[str, bytes]:
    """The files with other readings beside the client's result; no test needs a quiet machine, so none of its CPU."""
    seen = {**json.loads(files[RESULT]), "telemetry": None, **changes}
    return {**files, RESULT: json.dumps(seen).encode()}


# --- against llama.cpp: the whole contract ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo_server(demo_model, tmp_path_factory.mktemp("server") / "log", "--metrics") as listening:
        yield listening


class TestBuiltinForReal(BenchContract):
    @pytest.fixture(scope="class")
    @classmethod
    def raw(cls, url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        told = json.loads(run(Builtin(), url, tmp_path_factory.mktemp("run"))[RESULT])
        return {**told, "client": {**told["client"], "bottleneck_reason": None}}

    @pytest.fixture
    def case(self, raw: dict[str, Any]) -> BenchCase:
        return builtin_case(
            raw, AT, {"server_output_tokens": TOKENS, "peak_concurrency": 2, "retokenized_tokens": None}
        )


@pytest.fixture(scope="module", params=list(EXTERNAL))
def external(request: pytest.FixtureRequest) -> Installed:
    return installed(request.param)


@pytest.fixture(scope="module")
def measured(external: Installed, url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return run(external.client(), url, tmp_path_factory.mktemp("run"), answers=True)


@pytest.fixture(scope="module")
def broken(external: Installed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bad]:
    """What the client leaves of servers that are not as they should be, each with what is said of it."""
    folder, found = tmp_path_factory.mktemp("broken"), {}
    for name, ((fault, share), said) in FAULTS.items():
        with stub_server("--fault", fault, "--share", str(share)) as stub:
            left = run(external.client(), stub.url, folder / name, model="stub")
        found[name] = Bad(beside(left), said)
    return found


def run_until_it_dies(client: BenchClient, model: Path, folder: Path) -> dict[str, bytes]:
    """A run under which a real server is killed once it has answered for a while."""
    folder.mkdir()
    over = threading.Event()
    with demo_process(model, folder / "server.log", "--metrics") as (url, process):

        def kill() -> None:
            while not over.is_set() and generated(url) < DIES_AFTER:
                time.sleep(0.1)
            process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            return run(client, url, folder, LONG)
        finally:
            over.set()
            killer.join()


def generated(url: str) -> float:
    """Tokens that the server has generated so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total "))


class TestExternalForReal(BenchContract):
    """All that recordings must pass, with real runs in their place."""

    @pytest.fixture
    def case(self, external: Installed, measured: dict[str, bytes], broken: dict[str, Bad]) -> BenchCase:
        return BenchCase(
            client=external.client(),
            point=AT,
            files=beside(measured, answers=None),
            expected={"server_output_tokens": TOKENS, "output_tokens": TOKENS, "failed": 0, "short_outputs": 0},
            words=(external.words[0], external.tokenizer),
            bad=broken,
            counted=lambda count: beside(measured, answers=None, counters=counters(count)),
            answered=beside(measured, answers=ANSWERS),
        )


def test_a_run_counts_and_the_fixed_prompts_are_answered(external: Installed, measured: dict[str, bytes]) -> None:
    result = external.client().parse(measured, KEY)
    reasons = invalid_reasons(result.metrics, result.telemetry, AT, ValidityRule())
    assert [reason for reason in reasons if not reason.startswith((QUIET, "the client was the bottleneck"))] == []
    assert [answer.prompt for answer in result.answers] == [prompt["id"] for prompt in fixed_prompts()]
    assert all(answer.text and answer.error is None for answer in result.answers)


def test_when_it_measures_is_seen_from_outside(external: Installed, measured: dict[str, bytes]) -> None:
    """By the words that it prints: without them its own loading would be taken for load on the server."""
    seen = json.loads(measured[RESULT])
    assert seen["marks"] == ["begin", "end"]
    assert seen["counters"]["begin"] is not None


def test_a_server_that_dies_under_it_loses(external: Installed, demo_model: Path, tmp_path: Path) -> None:
    files = beside(run_until_it_dies(external.client(), demo_model, tmp_path / "dies"))
    case = BenchCase(external.client(), LONG, files, {}, (), {}, lambda count: files, files)
    reasons = verdict(case, files)
    assert any(re.search(NOT_WHOLE, reason) for reason in reasons), reasons


def test_it_tells_its_version(external: Installed) -> None:
    done = subprocess.run(external.client().version_command(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


# --- against vLLM ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--served-model-name", "smollm2", "--max-model-len", "1024", "--max-num-seqs", "2", "--enforce-eager")
    with real_vllm.vllm_server(tmp_path_factory.mktemp("vllm") / "log", *flags) as server:
        yield server.url


@real_vllm.needed
@pytest.mark.parametrize("name", ["builtin", *EXTERNAL])
def test_every_client_measures_a_real_vllm_alike(name: str, vllm_url: str, tmp_path: Path) -> None:
    client: BenchClient = Builtin() if name == "builtin" else installed(name).client()
    result = client.parse(run(client, vllm_url, tmp_path / "run", answers=True), KEY)
    metrics = result.metrics
    reasons = invalid_reasons(metrics, result.telemetry, AT, ValidityRule())
    assert [reason for reason in reasons if not reason.startswith((QUIET, "the client was the bottleneck"))] == []
    assert (metrics.requested, metrics.completed, metrics.output_tokens) == (AT.requests, AT.requests, TOKENS)
    assert metrics.server_output_tokens == TOKENS
    assert metrics.ttft_ms.mean and metrics.tpot_ms.mean and metrics.e2e_ms.mean
    assert metrics.tpot_ms.mean == pytest.approx((metrics.e2e_ms.mean - metrics.ttft_ms.mean) / 15, rel=0.02)
    assert len(result.answers) == len(fixed_prompts())
