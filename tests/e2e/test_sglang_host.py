"""The made-up host of the campaigns is like the real thing where Ratchet looks: refusals, help, answers, GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.sglang_host.host import DATA, SglangHost, scenario, sglang_host
from tests.e2e.witness import start_ticks
from tools.facts.machine import GPU_FIELDS, GpuFact, GpuFacts
from tools.servers.sglang import Sglang


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangHost]:
    with sglang_host(tmp_path_factory.mktemp("host"), scenario("campaign-a")) as made:
        made.start_server()
        yield made


def launched(host: SglangHost, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(host.interpreter), "-m", "sglang.launch_server", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def asked(host: SglangHost, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{host.port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def gpus(host: SglangHost) -> GpuFacts:
    """As the fact sees them."""
    query = [str(host.folder / "stand-ins" / "nvidia-smi"), f"--query-gpu={','.join(GPU_FIELDS)}"]
    said = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, check=True)
    return GpuFact().parse(b"exit 0\n" + said.stdout)


def test_an_unknown_flag_is_refused_in_the_words_of_the_real_one(host: SglangHost) -> None:
    refused = launched(host, "--model-path", "m", "--enable-turbo-mode")
    recorded = (DATA / "sglang" / "fail_unknownflag.log").read_text().splitlines()[-1]
    assert (refused.returncode, refused.stderr.splitlines()[-1]) == (2, recorded)


def test_its_help_is_read_as_the_recorded_one(host: SglangHost) -> None:
    shown = launched(host, "--help")
    recorded = (DATA / "sglang" / "help_0.5.17.txt").read_text()
    assert Sglang().parse_help(shown.stderr + shown.stdout) == Sglang().parse_help(recorded)


def test_a_prompt_is_always_answered_alike_and_counted(host: SglangHost) -> None:
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    first, second = (json.loads(asked(host, "/v1/completions", body)) for _ in range(2))
    other = json.loads(asked(host, "/v1/completions", body | {"prompt": [8, 9]}))
    assert first["choices"] == second["choices"] != other["choices"]
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    counted = [
        line for line in asked(host, "/metrics").splitlines() if line.startswith("sglang:generation_tokens_total")
    ]
    assert float(counted[0].split()[-1]) == 12


def test_what_runs_is_told_in_the_shape_of_the_recorded_account(host: SglangHost) -> None:
    told = json.loads(asked(host, "/server_info"))
    recorded = json.loads((DATA / "sglang" / "server_info_0.5.17.json").read_text())
    assert told.keys() == recorded.keys()
    assert (told["tp_size"], told["quantization"], told["version"]) == (8, "modelopt_fp4", "0.5.17")


def test_the_gpus_hold_a_server_as_long_as_it_lives(host: SglangHost) -> None:
    seen = gpus(host)
    assert [gpu.index for gpu in seen.gpus] == list(range(8))
    assert {gpu.memory_used_mb for gpu in seen.gpus} == {90_000}
    assert {gpu.power_w for gpu in seen.gpus} == {31.4}
    pid = host.listener()
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    host.until(lambda: start_ticks(pid) is None)
    assert {gpu.memory_used_mb for gpu in gpus(host).gpus} == {4}
    assert [line["pid"] for line in host.seen("stop")] == [pid]
