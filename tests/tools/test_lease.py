"""The lease: one holder, fenced epochs, and a watcher that fires when renewals stop and never while they arrive."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from state.errors import RefusedForSafety, TargetLocked
from tests.local_host import LocalHost
from tools import jobs, lease
from tools.lease import FencedHost, Lease

pytestmark = pytest.mark.anyio

LONG_S, SHORT_S = 600, 2


@pytest.fixture
async def root(tmp_path: Path) -> AsyncIterator[str]:
    yield str(tmp_path)
    for folder in sorted((tmp_path / "jobs").glob("watcher-*")):
        await jobs.stop(LocalHost(), str(tmp_path), folder.name, 0.1)


def touching(root: str, code: int = 0) -> str:
    """A restore script that only notes that it ran."""
    return f"echo restoring\necho ran >>{shlex.quote(root)}/fired\nexit {code}\n"


async def ended(root: str, held: Lease) -> jobs.JobState:
    state = await jobs.look(LocalHost(), root, held.watcher_key)
    while not state.over:
        await asyncio.sleep(0.1)
        state = await jobs.look(LocalHost(), root, held.watcher_key)
    return state


async def test_one_holder_at_a_time_and_the_refusal_names_it(root: str) -> None:
    first = await lease.take(LocalHost(), root, "session a, process 1", LONG_S)
    with pytest.raises(TargetLocked) as refused:
        await lease.take(LocalHost(), root, "session b, process 2", LONG_S)
    assert "session a, process 1, since 20" in refused.value.where["held by"]
    await lease.release(FencedHost(LocalHost(), first))
    second = await lease.take(LocalHost(), root, "session b, process 2", LONG_S)
    assert second.epoch == first.epoch + 1


async def test_many_takers_at_once_and_one_wins(root: str) -> None:
    takers = [lease.take(LocalHost(), root, f"taker {n}", LONG_S) for n in range(6)]
    results = await asyncio.gather(*takers, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Lease"] + ["TargetLocked"] * 5


async def test_a_holder_known_to_be_dead_is_succeeded_at_once_and_fenced(root: str) -> None:
    dead = await lease.take(LocalHost(), root, "session a", LONG_S)
    alive = await lease.take(LocalHost(), root, "session a again", LONG_S, predecessor="session a")
    await FencedHost(LocalHost(), alive).check(f"echo alive >{root}/who")
    with pytest.raises(RefusedForSafety, match="passed on"):
        await FencedHost(LocalHost(), dead).check(f"echo dead >{root}/who")
    assert Path(root, "who").read_text() == "alive\n"


async def test_an_epoch_of_another_boot_is_over(root: str) -> None:
    held = await lease.take(LocalHost(), root, "before the reboot", LONG_S)
    epoch = Path(root, "lease", "epochs", str(held.epoch))
    lines = epoch.read_text().splitlines()
    epoch.write_text("\n".join([*lines[:3], "another-boot"]) + "\n")
    assert (await lease.take(LocalHost(), root, "after it", LONG_S)).epoch == held.epoch + 1


async def test_the_watcher_restores_once_when_renewals_stop_and_the_late_agent_is_refused(root: str) -> None:
    held = await lease.take(LocalHost(), root, "an agent that dies", SHORT_S)
    fenced = FencedHost(LocalHost(), held)
    await lease.watch(fenced, touching(root))
    assert (await ended(root, held)).exit == 0
    assert Path(root, "fired").read_text() == "ran\n"
    found = await lease.marker(LocalHost(), root)
    assert found is not None and (found.epoch, found.result, found.detail) == (held.epoch + 1, "restored", "restoring")
    with pytest.raises(RefusedForSafety) as refused:
        await lease.renew(fenced)
    assert lease.WATCHER in refused.value.where["now"]
    assert (await lease.take(LocalHost(), root, "resumed", LONG_S)).epoch == held.epoch + 2


@pytest.mark.parametrize(("code", "result"), [(10, "already serving"), (11, "foreign"), (1, "failed")])
async def test_the_marker_says_what_the_restore_came_to(root: str, code: int, result: str) -> None:
    held = await lease.take(LocalHost(), root, "an agent that dies", 1)
    await lease.watch(FencedHost(LocalHost(), held), touching(root, code))
    await ended(root, held)
    found = await lease.marker(LocalHost(), root)
    assert found is not None and found.result == result
    later = await lease.take(LocalHost(), root, "one who comes later", LONG_S)
    assert later.epoch > found.epoch
    assert await lease.marker(LocalHost(), root, holder="one who") is None


async def test_it_never_fires_while_renewals_arrive(root: str) -> None:
    held = await lease.take(LocalHost(), root, "a slow but living agent", SHORT_S)
    fenced = FencedHost(LocalHost(), held)
    await lease.watch(fenced, touching(root))
    for _ in range(4 * SHORT_S):
        assert await lease.renew(fenced)
        await asyncio.sleep(0.5)
    assert not Path(root, "fired").exists()
    await lease.release(fenced)
    assert (await ended(root, held)).over
    assert not Path(root, "fired").exists()


async def test_a_clean_end_leaves_no_watcher_and_a_new_epoch_ends_the_old_one(root: str) -> None:
    first = await lease.take(LocalHost(), root, "one", LONG_S)
    await lease.watch(FencedHost(LocalHost(), first), touching(root))
    second = await lease.take(LocalHost(), root, "two", LONG_S, predecessor="one")
    await lease.watch(FencedHost(LocalHost(), second), touching(root))
    assert (await ended(root, first)).exit == 0
    await lease.release(FencedHost(LocalHost(), second))
    assert (await ended(root, second)).over
    assert not Path(root, "fired").exists()


async def test_a_missing_watcher_is_noticed_at_the_next_renewal(root: str) -> None:
    held = await lease.take(LocalHost(), root, "one", LONG_S)
    fenced = FencedHost(LocalHost(), held)
    assert not await lease.renew(fenced)
    await lease.watch(fenced, touching(root))
    assert await lease.renew(fenced)
    await jobs.stop(LocalHost(), root, held.watcher_key, 0.1)
    assert not await lease.renew(fenced)


async def test_a_renewed_restore_script_is_the_one_that_runs(root: str) -> None:
    held = await lease.take(LocalHost(), root, "one", SHORT_S)
    fenced = FencedHost(LocalHost(), held)
    await lease.watch(fenced, "exit 1\n")
    await lease.watch(fenced, touching(root))
    await ended(root, held)
    assert Path(root, "fired").read_text() == "ran\n"
