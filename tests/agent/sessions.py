"""Databases of sessions on the simulated target that are over, or that ended in any other way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from state import events as ev
from state.models import Experiment, SessionStatus
from state.store import Store
from tests.agent.sim import SCENARIO, sim_session
from tools.simulated import Scenario


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
