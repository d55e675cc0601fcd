"""Room for a night is looked for before anything is touched, and what cannot be written later harms no session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.doctor import examine
from agent.inbox import ask_to_stop
from agent.room import HERE_FREE_MB, HOST_FREE_MB, refuse_no_room_here, refuse_no_room_there
from state.errors import HostError, StoreFull, StoreUnwritable
from tests.agent.sim import CONFIG, SCENARIO, Listed
from tests.disks import Disk, disk
from tools.simulated import SimulatedTarget
from tools.target import Room

pytestmark = pytest.mark.anyio


class Cramped(SimulatedTarget):
    """A simulated host with less room."""

    offers = Room(path="/there", free_mb=HOST_FREE_MB)

    async def room(self) -> Room:
        return self.offers


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "small", int(HERE_FREE_MB + 8) << 10) as one:
        yield one


def test_room_here_is_looked_for_where_the_database_will_lie_and_nothing_is_made(small: Disk, tmp_path: Path) -> None:
    database = small.path / "a" / "b" / "state.db"
    assert refuse_no_room_here(database) >= HERE_FREE_MB
    small.fill(int(HERE_FREE_MB - 1) << 10)
    with pytest.raises(StoreFull, match="MiB are free for the session's database"):
        refuse_no_room_here(database)
    small.read_only()
    with pytest.raises(StoreUnwritable, match="cannot be written") as refused:
        refuse_no_room_here(database)
    assert refused.value.exit_code == 3 and "--db" in refused.value.do
    assert list(small.path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreUnwritable, match="file"):
        refuse_no_room_here(tmp_path / "file" / "state.db")


async def test_room_on_the_host_is_refused_with_the_reason(tmp_path: Path) -> None:
    target = Cramped(tmp_path / "world", SCENARIO)
    assert await refuse_no_room_there(target) == HOST_FREE_MB
    target.offers = Room(path="/there", free_mb=HOST_FREE_MB - 1)
    with pytest.raises(HostError, match="MiB are free on the host"):
        await refuse_no_room_there(target)
    target.offers = Room(path="/there", free_mb=1e6, obstacle="/there is no folder")
    with pytest.raises(HostError, match="/there is no folder") as refused:
        await refuse_no_room_there(target)
    assert refused.value.where["directory"] == "/there" and refused.value.do


async def test_the_preflight_names_both_and_ends_as_start_would(small: Disk, tmp_path: Path) -> None:
    target = Cramped(tmp_path / "world", SCENARIO)
    seen = await examine(target, CONFIG, Listed(), small.path / "state.db")
    assert [c.status for c in seen.checks if c.name in ("database", "host's folder")] == ["ok", "ok"]
    assert seen.exit_code == 0
    small.fill()
    target.offers = Room(path="/there", free_mb=0)
    seen = await examine(target, CONFIG, Listed(), small.path / "state.db")
    failed = {check.name: check for check in seen.checks if check.status == "failed"}
    assert set(failed) == {"database", "host's folder"}
    assert all(check.do for check in failed.values())
    assert seen.exit_code == 3
    assert list(small.path.iterdir()) == []


def test_a_request_to_stop_that_cannot_be_left_says_what_means_the_same(small: Disk) -> None:
    small.read_only()
    with pytest.raises(StoreUnwritable, match="Read-only file system") as refused:
        ask_to_stop(small.path / "state.db", "s")
    assert "SIGTERM" in refused.value.do
