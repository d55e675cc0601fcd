"""A session on the simulated target that dies at one of its fault points; no other point is told from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from state.models import Experiment
from tests.agent.sim import sim_session
from tests.agent.test_loop import Killed


async def died_at(folder: Path, point: int, *experiments: Experiment, **how: Any) -> bool:
    """Run until the `point`-th fault point and die there; False when the session ended before it."""
    left = point

    def die(name: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed(name)

    try:
        with sim_session(folder, *experiments, fault=die, **how) as runner:
            await runner.run()
    except Killed:
        return True
    return False
