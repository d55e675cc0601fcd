"""Runs that must not count: each disturbed for real, on a real server behind a real sshd, and called what it is."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.validity import COLLAPSED, TRAFFIC, invalid_reasons
from benchmarks.planted import nights
from benchmarks.planted.server import VARIABLE
from state.models import Arm, LoadPoint, Outcome, ProcessId, ValidityRule, Workload
from tests.e2e import runs
from tests.e2e.rig import Rig, rig
from tools.remote import RemoteTarget
from tools.target import RunResult

pytestmark = [pytest.mark.real, pytest.mark.anyio]

COUNT = itertools.count(1)
ANY_NEIGHBOUR = ValidityRule(max_foreign_cpu_cores=1000, max_steal_share=1.0, min_concurrency_share=0.0)
"""Whoever else uses this machine must not decide how a test ends."""
BOTTLENECK = "the client was the bottleneck"
POINT = LoadPoint(name="few", concurrency=2, requests=6, prompt_tokens=16, output_tokens=8)
CONTEXT = 256
"""Tokens of a slot."""
FLAGS = f"--threads 1 --parallel 2 --ctx-size {2 * CONTEXT} --flash-attn off --metrics".split()
STARVED_S = 6
"""Starved for the whole of its life the client would hardly ever end."""
STARVING = """\
#!/bin/sh
case "$1" in *stream_client.py)
  spin='until [ -s progress.json ]; do sleep 0.05; done; exec timeout {seconds} /bin/sh -c "while :; do :; done"'
  for neighbour in 1 2; do taskset -c {core} /bin/sh -c "$spin" & done
  exec chrt --idle 0 taskset -c {core} "{python}" "$@" ;;
esac
exec "{python}" "$@"
"""
"""A python whose client shares one core with two neighbours; in its own session, which the kernel schedules as one."""


COLLAPSING = f"""
[[experiments]]
id = "held-still"
title = "Held still for nine tenths of the time"
hypothesis = "ten times slower"
changes = [{{ kind = "env", name = "{VARIABLE}", value = "0.9" }}]
"""


class Cutter:
    """A TCP proxy on loopback that resets every `each`th connection once the server has begun to answer it."""

    def __init__(self, port: int, each: int) -> None:
        self.target_port, self.each = port, each
        self.cut = 0
        self._numbers = itertools.count(1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop listening; connections under way are carried to their end."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._carry, args=(client, next(self._numbers))))
            self._threads[-1].start()

    def _carry(self, client: socket.socket, number: int) -> None:
        with client, socket.create_connection(("127.0.0.1", self.target_port)) as server:
            up = threading.Thread(target=_pump, args=(client, server))
            up.start()
            with contextlib.suppress(OSError):
                while data := server.recv(1 << 16):
                    client.sendall(data)
                    if number % self.each == 0 and b"data: " in data:
                        self.cut += 1
                        break
            for one in (client, server):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            up.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


@contextlib.contextmanager
def cutter(port: int, each: int) -> Iterator[Cutter]:
    """A proxy to the server that is gone after the block."""
    made = Cutter(port, each)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("void"), demo_model) as host:
        host.start_server(*FLAGS)
        yield host


def name() -> str:
    """Unique in the world."""
    return f"v{next(COUNT)}"


def workload(**fields: object) -> Workload:
    return runs.workload_of(POINT.model_copy(update=fields))


async def measured(target: RemoteTarget, key: str, asked: Workload, process: ProcessId | None = None) -> RunResult:
    return await runs.ran(target, key, process or await runs.serving(target), asked, seed=7)


def reasons(result: RunResult, asked: Workload) -> list[str]:
    """All but what a busy machine does to the client, which is a test of its own."""
    return [reason for reason in all_reasons(result, asked) if not reason.startswith(BOTTLENECK)]


def all_reasons(result: RunResult, asked: Workload) -> tuple[str, ...]:
    return invalid_reasons(result.metrics, result.telemetry, asked.load_points[0], ANY_NEIGHBOUR)


async def test_an_undisturbed_run_counts(world: Rig) -> None:
    asked, run = workload(), name()
    async with runs.held(world, run) as target:
        result = await measured(target, f"{run}-M1", asked)
    assert reasons(result, asked) == []
    assert result.metrics.completed == POINT.requests


async def test_answers_that_are_cut_on_the_way_void_the_run(world: Rig) -> None:
    asked, run = workload(requests=8), name()
    with cutter(world.port, each=4) as proxy:
        async with runs.held(world, run, url=f"http://127.0.0.1:{proxy.port}") as target:
            result = await measured(target, f"{run}-M1", asked)
    assert proxy.cut > 0
    assert result.metrics.failures == {"connection_closed": proxy.cut}
    assert result.metrics.completed == 8 - proxy.cut
    said = f"{proxy.cut} of 8 requests failed ({proxy.cut} × connection_closed)"
    assert said in reasons(result, asked)


async def test_a_server_that_dies_in_the_middle_voids_the_run(world: Rig) -> None:
    """The streams under way break off, the next ones are refused, and soon that is a storm of errors."""
    asked, run = workload(requests=400, output_tokens=24), name()
    async with runs.held(world, run) as target:
        spec = (await target.adopt()).spec
        process = await runs.serving(target)
        await target.begin_run(f"{run}-M1", runs.request_of(asked, process, seed=7))
        world.until(lambda: world.client_at_work() is not None)
        os.kill(process.pid, signal.SIGKILL)
        result = await runs.over(target, f"{run}-M1")
        assert await target.serving() is None
        await runs.launched(target, f"{run}-T1", spec)
    lost = result.metrics.failures
    assert lost["connection_closed"] >= 1
    assert lost["connect_refused"] >= 1
    assert result.metrics.completed + result.metrics.failed < 400
    said = reasons(result, asked)
    assert said[0] == "stopped early: error storm"
    assert f"{result.metrics.failed} of 400 requests failed" in said[1]


async def test_prompts_that_do_not_fit_are_a_storm_of_errors_and_end_the_run_early(world: Rig) -> None:
    asked, run = workload(requests=400, prompt_tokens=CONTEXT + 100, warmup_requests=0), name()
    async with runs.held(world, run) as target:
        result = await measured(target, f"{run}-M1", asked)
    metrics = result.metrics
    assert metrics.completed == 0
    assert set(metrics.failures) <= {"http_status_400", "stopped"}
    assert metrics.failed < 400
    said = reasons(result, asked)
    assert said[0] == "stopped early: error storm"
    assert f"{metrics.failed} of 400 requests failed" in said[1]
    assert "no positive duration and throughput" in said


async def test_a_storm_in_the_warm_up_ends_the_run_before_anything_is_measured(world: Rig) -> None:
    asked, run = workload(requests=400, prompt_tokens=CONTEXT + 100), name()
    async with runs.held(world, run) as target:
        result = await measured(target, f"{run}-M1", asked)
    assert result.raw["requests"] == []
    assert reasons(result, asked)[0] == "stopped early: error storm"


async def test_a_run_that_is_far_too_slow_is_ended_at_its_deadline(world: Rig) -> None:
    """What is not answered by then is told as such; nothing is left that asks the server."""
    point = POINT.model_copy(update={"requests": 400, "output_tokens": 100, "warmup_requests": 0})
    asked, run = runs.workload_of(point, run_deadline_s=2.0), name()
    async with runs.held(world, run) as target:
        result = await measured(target, f"{run}-M1", asked)
        assert await target.foreign_traffic() is None
    assert set(result.metrics.failures) <= {"run_deadline"}  # none if it falls between two requests
    assert result.metrics.completed < 400
    assert reasons(result, asked)[0] == "stopped early: run deadline"


async def test_a_server_that_ends_its_answers_early_voids_the_run(world: Rig) -> None:
    """A slot's context is full before the answer is: no request fails, and the server only looks fast."""
    asked, run = workload(requests=2, prompt_tokens=CONTEXT - 4, warmup_requests=0), name()
    async with runs.held(world, run) as target:
        result = await measured(target, f"{run}-M1", asked)
    assert result.metrics.failed == 0
    assert 0 < result.metrics.output_tokens < 2 * POINT.output_tokens
    assert reasons(result, asked) == ["2 answers were shorter than the 8 tokens asked"]


async def test_a_client_that_is_starved_of_cpu_voids_the_run(world: Rig) -> None:
    """Its one core is busy with neighbours that go first, from the moment on when it measures."""
    program = world.folder / "python-of-a-poor-client"
    program.write_text(STARVING.format(core=min(os.sched_getaffinity(0)), seconds=STARVED_S, python=sys.executable))
    program.chmod(0o755)
    asked, run = workload(requests=2, output_tokens=200), name()
    async with runs.held(world, run, python=str(program)) as target:
        result = await measured(target, f"{run}-M1", asked)
    said = [reason for reason in all_reasons(result, asked) if reason.startswith(BOTTLENECK)]
    assert said, result.raw["client"]
    assert "waited for a core" in said[0] or "wake_wait_ms" in said[0]


async def test_a_second_client_on_the_server_voids_the_run(world: Rig) -> None:
    asked, run = workload(requests=8, output_tokens=32), name()
    over = threading.Event()

    def use() -> None:
        while not over.is_set():
            assert world.generates(tokens=16)

    somebody = threading.Thread(target=use)
    async with runs.held(world, run) as target:
        process = await runs.serving(target)
        somebody.start()
        try:
            result = await measured(target, f"{run}-M1", asked, process)
        finally:
            over.set()
            somebody.join()
    counted, received = result.metrics.server_output_tokens, result.metrics.output_tokens
    assert counted is not None and counted > received == 8 * 32
    assert f"{TRAFFIC}: the server counted {counted} output tokens, we received {received}" in reasons(result, asked)


@pytest.mark.slow
def test_a_candidate_that_is_ten_times_slower_is_ended_early_and_called_a_collapse(
    tmp_path: Path, demo_model: Path
) -> None:
    """The server itself is held still for nine tenths of the time; the run would last ten times as long."""
    with rig(tmp_path / "collapse", demo_model, program=nights.program()) as host:
        host.start_server(*FLAGS)
        original = host.argv()
        agent = host.command("start", str(host.write_session(COLLAPSING, requests=12)), "--db", str(host.database))
        assert agent.process.returncode == 0, agent.said
        assert host.argv() == original
        assert VARIABLE not in host.environ()
        with host.store() as store:
            session = store.latest_session().id
            verdict = store.verdicts(session)["held-still"]
            own = [m for m in store.measurements(session, "held-still") if m.arm is Arm.CANDIDATE]
        assert verdict.outcome is Outcome.COLLAPSED, verdict
        (taken,) = own
        assert taken.reasons[0] == COLLAPSED
        assert taken.metrics is not None
        assert taken.metrics.stopped_early == "terminated"
        assert taken.metrics.completed < 12
