"""One agent's life on the simulated target, as a process of its own that is really killed; it must not judge.

Everything is imported once; each life is a fork, so that it begins in a few ms. The forking process may have neither
threads nor an event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from agent.faults import VARIABLE, fault_point
from agent.session import refuse_ended
from state.errors import RatchetError
from state.journal import FaultPoint
from tests.agent.sim import sim_session
from tests.crash.nights import Night

KILLED = -signal.SIGKILL
BUG = 1


def life(folder: Path, night: Night, command: str = "resume", fault: str = "") -> int:
    """Run `command` (resume, restore, restore --original) in a process of its own; its exit code, -9 when killed.

    A session begins if there is none. `fault` is what RATCHET_FAULT would say, or `term:N` for a SIGTERM at the N-th
    node; in `term:N,FAULT` the fault is for the points of the drain that follows. What the process had to say is left
    in the file `said`.
    """
    pid = os.fork()
    if pid == 0:
        code = BUG
        try:
            code = asyncio.run(_act(folder, night, command, _fault(fault)))
        except RatchetError as error:
            (folder / "said").write_text(str(error))
            code = error.exit_code
        except BaseException:
            (folder / "said").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def _act(folder: Path, night: Night, command: str, fault: FaultPoint) -> int:
    how = {"config": night.config, "scenario": night.scenario, "session_id": night.name}
    heard = _spoken(folder, night, fault) if night.speech else fault
    with sim_session(folder, *night.experiments, fault=heard, **how) as runner:
        if night.own_time:
            began = runner.store.session(runner.session_id).started_at
            runner.store.clock = lambda: began + passed_s(folder)
        if command != "resume":
            await runner.put_back(original=command.endswith("--original"))
            return 0
        refuse_ended(runner.store.session(runner.session_id))
        return await runner.run()


def passed_s(folder: Path) -> float:
    """Seconds that have passed in the world."""
    return float(json.loads((folder / "world" / "world.json").read_text())["clock"])


def _spoken(folder: Path, night: Night, fault: FaultPoint) -> FaultPoint:
    """At some points a person speaks before anything else happens, but at each only once."""
    said = folder / "spoken"

    def point(passed: str) -> None:
        before = said.read_text().splitlines() if said.exists() else []
        if passed in night.speech and passed not in before:
            night.speech[passed](folder / "state.db")
            said.write_text("\n".join((*before, passed)))
        fault(passed)

    return point


def _fault(wish: str) -> FaultPoint:
    if wish.startswith("term:"):
        number, _, then = wish.removeprefix("term:").partition(",")
        return _term(int(number), _fault(then))
    return fault_point({VARIABLE: wish} if wish else {})


def _term(number: int, draining: FaultPoint) -> FaultPoint:
    """SIGTERM at the `number`-th node, as a service manager sends it; points of the drain are passed on."""
    left, drains = number, False

    def point(passed: str) -> None:
        nonlocal left, drains
        drains = drains or passed == "drain:begun"
        if drains:
            draining(passed)
        left -= passed.startswith("node:")
        if left == 0 and passed.startswith("node:"):
            os.kill(os.getpid(), signal.SIGTERM)

    return point


def two_at_a_time(tasks: list[Callable[[], None]]) -> None:
    """Run each task in a fork and a session of its own; a task that fails fails the whole. Ctrl-C ends all of them."""
    running: set[int] = set()
    try:
        for task in tasks:
            if len(running) == 2:
                _reap(running)
            running.add(_spawn(task))
        while running:
            _reap(running)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _spawn(task: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = BUG
        try:
            os.setsid()
            task()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def _reap(running: set[int]) -> None:
    pid, status = os.wait()
    running.discard(pid)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"a task of the crash suite ended with {os.waitstatus_to_exitcode(status)}")
