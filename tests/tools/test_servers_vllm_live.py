"""The vLLM adapter against a real vLLM, on CPU or GPU, where there is one; skipped, with how to get it, where not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from state.models import FlagChange, LaunchSpec
from tests import real_vllm
from tests.contracts.server_contract import ServerCase, ServerContract, keyed
from tests.contracts.target_contract import over, request
from tests.local_host import LocalHost
from tests.real_vllm import MODEL, START_S, environ, vllm_server
from tools.remote import RemoteSettings, RemoteTarget
from tools.servers.base import FlagTable, make_spec
from tools.servers.probe import generates, http
from tools.servers.vllm import Vllm
from tools.services.base import StopJobs
from tools.target import Ready

ADAPTER = Vllm()
pytestmark = [pytest.mark.real, real_vllm.needed]


class Served(NamedTuple):
    """A running server with its command line as the kernel shows it, its log, and what its program prints."""

    process: subprocess.Popen[bytes]
    argv: tuple[str, ...]
    base: str
    log: Path
    help_text: str
    version_text: str
    known: FlagTable


def printed(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S)
    return done.stdout + done.stderr


def arguments(pid: int) -> tuple[str, ...]:
    return tuple(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ("--served-model-name", "small", "tiny",
             "--max_model_len", "2k", "--max-num-se", "8", "--enforce-eager", "--block-size=32",
             "--no-enable-prefix-caching", "--attention-backend", "FLASHINFER", "-cc.mode=0")  # fmt: skip
    with vllm_server(tmp_path_factory.mktemp("vllm") / "log", *words) as running:
        argv = arguments(running.process.pid)
        program = ADAPTER.program(argv)
        help_text, version_text = printed(ADAPTER.help_command(program)), printed(ADAPTER.version_command(program))
        known = ADAPTER.parse_help(help_text)
        yield Served(running.process, argv, running.url, running.log, help_text, version_text, known)


def spec(served: Served) -> LaunchSpec:
    declared = make_spec(
        ADAPTER, served.known, argv=served.argv, cwd="/", user="any", environ=environ(), limits={}, keyed=keyed
    )
    return declared.spec


class TestContract(ServerContract):
    @pytest.fixture
    def case(self, served: Served) -> ServerCase:
        return ServerCase(
            adapter=ADAPTER,
            help_text=served.help_text,
            version_text=served.version_text,
            version=ADAPTER.parse_version(served.version_text),
            argv=(*ADAPTER.program(served.argv), MODEL, "--port", "8201"),
            program=ADAPTER.program(served.argv),
            number="--tensor-parallel-size",
            switch="--enable-prefix-caching",
            secret="--api-key",
            own_variable=("VLLM_CPU_KVCACHE_SPACE", "2"),
        )


def test_the_command_line_of_the_process_is_read(served: Served) -> None:
    assert ADAPTER.program(served.argv)[-1] == "serve"
    flags = spec(served).flags
    assert flags["--model"] == (MODEL,)
    assert (flags["--max-model-len"], flags["--max-num-seqs"]) == (("2000",), ("8",))
    assert flags["--compilation-config"] == ('{"mode":0}',)
    assert ADAPTER.base_url(spec(served)) == served.base


def test_an_experiment_is_one_edit(served: Served) -> None:
    changed = ADAPTER.apply(spec(served), (FlagChange(name="--max-num-seqs", value="16"),), served.known)
    assert changed.argv[:4] == served.argv[:4]
    assert changed.flags == spec(served).flags | {"--max-num-seqs": ("16",)}


@pytest.mark.anyio
async def test_it_generates_and_shows_what_it_runs(served: Served) -> None:
    host = LocalHost()
    alive = await generates(host, sys.executable, ADAPTER, served.base, prompt=[1000, 2000], max_tokens=3)
    assert (alive.state, alive.tokens) == ("alive", 3), alive
    looks = await http(host, sys.executable, ADAPTER.health_requests(served.base))
    answers = {answer.id: answer for answer in looks}
    assert [answer.status for answer in looks] == [200] * len(looks)
    assert ADAPTER.model_name(answers) == "small"
    assert ADAPTER.in_flight(answers) == 0
    assert ADAPTER.counters(answers)["vllm:generation_tokens_total"] >= 3
    shown = ADAPTER.effective(answers, served.log.read_text())
    assert ADAPTER.parse_version(served.version_text).startswith(shown["info:version"])
    assert (shown["--max-model-len"], shown["--enforce-eager"], shown["--enable-prefix-caching"]) == (
        "2000",
        "on",
        "off",
    )
    found = ADAPTER.mismatches(spec(served), shown)
    assert [text for text in found if not text.startswith(("--block-size", "--attention-backend"))] == []


@pytest.mark.anyio
async def test_requests_in_flight_are_seen(served: Served) -> None:
    host, seen = LocalHost(), set[int | None]()

    async def ask() -> None:
        await generates(host, sys.executable, ADAPTER, served.base, max_tokens=400, timeout_s=120)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while 1 not in seen:
            looks = await http(host, sys.executable, ADAPTER.health_requests(served.base))
            seen.add(ADAPTER.in_flight({answer.id: answer for answer in looks}))


@pytest.mark.anyio
async def test_a_stopped_engine_is_dead_whatever_health_says(served: Served) -> None:
    """Last, since the engine does not come back."""
    children = printed(("ps", "-o", "pid=", "--ppid", str(served.process.pid))).split()
    for pid in children:
        os.kill(int(pid), signal.SIGSTOP)
    try:
        seen = await generates(LocalHost(), sys.executable, ADAPTER, served.base, timeout_s=3)
    finally:
        for pid in children:
            os.kill(int(pid), signal.SIGCONT)
    assert seen.state == "dead", seen


@pytest.mark.anyio
async def test_a_target_adopts_relaunches_and_measures_it(served: Served, tmp_path: Path) -> None:
    """The very last: what was started here is stopped, and what Ratchet started serves in its place."""
    threading.Thread(target=served.process.wait, daemon=True).start()
    port = int(served.base.rpartition(":")[2])
    target = RemoteTarget(LocalHost(), ADAPTER, settings(tmp_path / "ratchet", served.base, port))
    found = await target.adopt()
    assert (found.spec.flags["--max-num-seqs"], found.engine_version) == (("8",), target.version)
    await target.prepare()
    await target.adopt()
    await target.acquire("s1", f"session s1, agent process {os.getpid()}")
    try:
        assert await target.trouble() is None
        changed = target.derive(found.spec, (FlagChange(name="--max-num-seqs", value="16"),))
        await target.launch("s1-T1", changed)
        ready = await target.await_ready("s1-T1")
        assert isinstance(ready, Ready), ready
        assert not any(text.startswith("--max-num-seqs") for text in ready.mismatches), ready.mismatches
        serving = await target.serving()
        assert serving is not None and serving.spec.fingerprint == changed.fingerprint
        await target.begin_run("s1-M1", request(ready.process))
        assert (await over(target, "s1-M1")).phase == "ended"
        result = await target.collect_run("s1-M1")
        assert result.metrics.output_tok_s > 0
        await target.release()
    finally:
        stop = StopJobs(root=str(tmp_path / "ratchet"), shape="*-T*", grace_s=30.0)
        await LocalHost().check(stop.render(), timeout_s=120)


def settings(root: Path, url: str, port: int) -> RemoteSettings:
    return RemoteSettings(
        name="vllm",
        directory=str(root),
        python=sys.executable,
        url=url,
        port=port,
        model=None,
        start_deadline_s=START_S,
        stop_grace_s=30.0,
        lease_s=600,
        pid=None,
        api_key_file=None,
    )
