"""Databases of sessions on the simulated target that are over, or that ended in any other way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.session import Runner
from state import events as ev
from state.models import Experiment, SessionStatus
from state.store import Store
from tests.agent.sim import CONFIG, ONE_POINT, SCENARIO, flag, sim_session
from tools.simulated import Scenario

FASTER = flag("--threads", "2")


def finished(folder: Path, *experiments: Experiment, scenario: Scenario = SCENARIO) -> Path:
    """Run a whole session in `folder`; the path of its database."""
    with sim_session(folder, *experiments, scenario=scenario) as runner:
        assert asyncio.run(runner.run()) == 0
        return runner.store.path


@contextmanager
def moved(folder: Path, status: SessionStatus, reason: str, *before: ev.Event) -> Iterator[tuple[Store, str]]:
    """A session that was opened and then took a status; the store and the session's id."""
    with sim_session(folder) as runner:
        runner.store.append(runner.session_id, *before, ev.SessionMoved(status=status, reason=reason))
        yield runner.store, runner.session_id


def disturbed(folder: Path, begin: str, end: str, change: Callable[[Runner, bool], None]) -> Path:
    """A session on one experiment in which something is wrong between two points; the path of its database."""

    def point(name: str) -> None:
        if name in (begin, end):
            change(runner, name == begin)

    with sim_session(folder, FASTER, config=ONE_POINT, fault=point) as runner:
        assert asyncio.run(runner.run()) == 0
        return runner.store.path


def noise(runner: Runner, on: bool) -> None:
    """Somebody else's work on the host."""
    runner.target.scenario = SCENARIO.model_copy(update={"foreign_cores": 1.0 if on else 0.0})  # type: ignore[attr-defined]


def traffic(runner: Runner, on: bool) -> None:
    """Somebody else's requests on the server."""
    path = runner.store.path.parent / "world" / "world.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "traffic": int(on)}))


def late(runner: Runner, on: bool) -> None:
    """A whole night passes at once."""
    before = runner.store.clock
    runner.store.clock = lambda: before() + CONFIG.policy.budget.time_s * on
