"""The loop's checkpoint file holds no truth: whatever becomes of it, the session ends alike and does nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.session import Runner
from state.errors import StoreFull
from state.models import Outcome, Role, SessionStatus
from tests.agent.sim import flag, sim_session
from tests.agent.test_loop import ONE_POINT, assert_consistent, outcomes, world_log
from tests.disks import disk

pytestmark = pytest.mark.anyio

TWO = (flag("--threads", "2"), flag("--cache", "q8_0"))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def overwritten(path: Path) -> None:
    """Every page but the name of the format, in the file and in its log."""
    for name in ("graph.db", "graph.db-wal"):
        one = path.with_name(name)
        size = one.stat().st_size if one.exists() else 0
        if size > 100:
            with one.open("r+b") as file:
                file.seek(100)
                file.write(b"\xa5" * (size - 100))


def a_letter(path: Path) -> None:
    path.write_text("not a database\n" * 1000)


def a_folder(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        (path / "in the way").mkdir(parents=True)


def ends_as_undisturbed(runner: Runner) -> None:
    store, session = runner.store, runner.session_id
    assert outcomes(runner)["threads-2"] is Outcome.BETTER
    assert outcomes(runner)["cache-q8_0"] is Outcome.FAILED
    assert store.role(session, Role.FINAL) == store.role(session, Role.KNOWN_GOOD) != store.role(session, Role.ORIGINAL)
    assert_consistent(runner)


@pytest.mark.parametrize("spoil", [overwritten, a_letter])
async def test_a_checkpoint_file_that_is_spoilt_at_any_node_changes_nothing(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    def at_nodes(name: str) -> None:
        if name.startswith("node:"):
            spoil(tmp_path / "graph.db")

    with sim_session(tmp_path, *TWO, config=ONE_POINT, fault=at_nodes) as runner:
        assert await runner.run() == 0
        ends_as_undisturbed(runner)


@pytest.mark.parametrize("spoil", [emptied, a_folder])
async def test_a_checkpoint_file_that_is_spoilt_before_the_start_changes_nothing(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    spoil(tmp_path / "graph.db")
    with sim_session(tmp_path, *TWO, config=ONE_POINT) as runner:
        assert await runner.run() == 0
        ends_as_undisturbed(runner)


@pytest.mark.parametrize("nth", [1, 6])
async def test_a_disk_that_fills_up_in_the_middle_ends_the_session_and_a_resume_repeats_nothing(
    tmp_path: Path, nth: int
) -> None:
    """The simulated world lies on another disk: only the agent's own fills up."""
    (tmp_path / "world").mkdir()
    nodes = []
    with disk(tmp_path / "small", 64 << 10) as small:
        (small.path / "world").symlink_to(tmp_path / "world")

        def fill_up(name: str) -> None:
            nodes.append(name)
            if name == "node:measure" and nodes.count(name) == nth:
                small.fill()

        with sim_session(small.path, *TWO, config=ONE_POINT, fault=fill_up) as runner:
            with pytest.raises(StoreFull):
                await runner.run()
            before = runner.store.decisions(runner.session_id)
            done = len(world_log(tmp_path))
            assert runner.store.session(runner.session_id).status is SessionStatus.RUNNING
        with pytest.raises(StoreFull), sim_session(small.path, *TWO, config=ONE_POINT) as runner:
            await runner.run()
        assert len(world_log(tmp_path)) == done
        small.grow()
        with sim_session(small.path, *TWO, config=ONE_POINT) as runner:
            assert await runner.run() == 0
            assert runner.store.decisions(runner.session_id)[: len(before)] == before
            ends_as_undisturbed(runner)
