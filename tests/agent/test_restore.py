"""`restore` after a death at any point: the original serves, nothing stays half told, and the session can go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from state.models import Role, SessionStatus
from tests.agent.killing import died_at
from tests.agent.sim import flag, sim_session
from tests.agent.test_loop import assert_consistent

pytestmark = pytest.mark.anyio

EXPERIMENTS = (flag("--threads", "2"), flag("--cache", "q8_0"))


async def test_killed_anywhere_restored_and_resumed(tmp_path: Path) -> None:
    point = 0
    while await died_at(folder := tmp_path / str(point), point, *EXPERIMENTS):
        with sim_session(folder, *EXPERIMENTS) as runner:
            await runner.put_back(original=True)
            serving = await runner.target.serving()
            assert serving is not None
            assert serving.spec.fingerprint == runner.store.role(runner.session_id, Role.ORIGINAL)
        with sim_session(folder, *EXPERIMENTS) as runner:
            assert await runner.run() == 0
            assert runner.store.session(runner.session_id).status is SessionStatus.DONE
            assert_consistent(runner)
        point += 17
    assert point > 60
