"""Draining and giving back, as sh on this machine: done once, undone by whoever did it, and never believed unproven."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from state.errors import CommandFailed
from tests.balancer import LATER, Balancer
from tests.e2e.witness import start_ticks
from tests.local_host import LocalHost
from tools.facts import ask
from tools.manners import Drain, DrainedFact, Draining, Undrain
from tools.target import Drained

pytestmark = pytest.mark.anyio

HOST = LocalHost()


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "root").mkdir()
    return str(tmp_path / "root")


@pytest.fixture
def balancer(tmp_path: Path) -> Balancer:
    return Balancer(tmp_path)


async def drain(root: str, how: Draining) -> str:
    return (await HOST.check(Drain(root=root, draining=how).render(), timeout_s=60)).text


async def undrain(root: str, how: Draining) -> str:
    return (await HOST.check(Undrain(root=root, draining=how).render(), timeout_s=60)).text


async def seen(root: str, how: Draining) -> Drained:
    return await ask(HOST, DrainedFact(root, how))


def words(balancer: Balancer) -> list[str]:
    return [told.word for told in balancer.told]


async def test_it_is_drained_once_and_given_back_once(root: str, balancer: Balancer) -> None:
    how = balancer.draining()
    assert await seen(root, how) == Drained(ours=False, seen=False)
    for _ in range(2):
        assert await drain(root, how) == ""
        assert balancer.out
    assert await seen(root, how) == Drained(ours=True, seen=True)
    for _ in range(2):
        await undrain(root, how)
        assert not balancer.out
    assert await seen(root, how) == Drained(ours=False, seen=False)
    assert words(balancer) == ["out", "in"]


async def test_what_somebody_else_drained_stays_drained(root: str, balancer: Balancer) -> None:
    how = balancer.draining()
    await HOST.check(f"{balancer.program} out")
    assert "by somebody else" in await drain(root, how)
    await undrain(root, how)
    assert await seen(root, how) == Drained(ours=False, seen=True)
    assert words(balancer) == ["out"]


async def test_what_somebody_gave_back_meanwhile_is_not_given_back_twice(root: str, balancer: Balancer) -> None:
    how = balancer.draining()
    await drain(root, how)
    await HOST.check(f"{balancer.program} in")
    assert await seen(root, how) == Drained(ours=True, seen=False)
    await undrain(root, how)
    assert await seen(root, how) == Drained(ours=False, seen=False)
    assert words(balancer) == ["out", "in"]


async def test_a_command_that_fails_is_told_with_its_last_words(root: str, balancer: Balancer) -> None:
    how = balancer.draining()
    balancer.spoil("fail-out")
    with pytest.raises(CommandFailed) as failed:
        await drain(root, how)
    assert "exit 3" in failed.value.tail and "no such pool" in failed.value.tail
    await undrain(root, how)
    assert words(balancer) == []
    assert await seen(root, how) == Drained(ours=False, seen=False)


async def test_a_command_that_hangs_is_ended_with_all_that_it_started(root: str, balancer: Balancer) -> None:
    balancer.spoil("hang-out")
    with pytest.raises(CommandFailed, match="failed") as failed:
        await drain(root, balancer.draining(deadline_s=1))
    assert "ended, since it took more than 1 s" in failed.value.tail
    hung = int((balancer.folder / "hung").read_text())
    for _ in range(100):
        if start_ticks(hung) is None:
            break
        await asyncio.sleep(0.05)
    assert start_ticks(hung) is None


async def test_one_that_ends_well_and_did_nothing_is_not_believed(root: str, tmp_path: Path) -> None:
    how = Balancer(tmp_path, out="true").draining(deadline_s=2)
    with pytest.raises(CommandFailed) as failed:
        await drain(root, how)
    assert "the probe does not say" in failed.value.tail


async def test_a_balancer_may_take_a_moment(root: str, tmp_path: Path) -> None:
    balancer = Balancer(tmp_path, out=LATER)
    await drain(root, balancer.draining())
    assert balancer.out


async def test_a_probe_that_cannot_be_run_drains_nothing(root: str, balancer: Balancer) -> None:
    how = balancer.draining().model_copy(update={"drained": ("/no/such/probe",)})
    found = await seen(root, how)
    assert (found.ours, found.seen) == (False, None)
    assert "cannot be run (exit 127)" in found.trouble
    with pytest.raises(CommandFailed) as failed:
        await drain(root, how)
    assert "the probe cannot be run" in failed.value.tail
    assert words(balancer) == []


async def test_without_a_probe_our_mark_is_all_that_is_known(root: str, balancer: Balancer) -> None:
    how = balancer.draining(probe=False)
    await undrain(root, how)
    await drain(root, how)
    await drain(root, how)
    assert await seen(root, how) == Drained(ours=True, seen=None)
    await undrain(root, how)
    await undrain(root, how)
    assert words(balancer) == ["out", "out", "in"]


async def test_what_a_command_leaves_running_is_no_part_of_our_job(root: str, tmp_path: Path) -> None:
    noting = ("/bin/sh", "-c", f'echo "${{RATCHET_JOB:-none}}" >>{tmp_path}/seen')
    how = Draining(drain=noting, undrain=noting, deadline_s=20)
    script = f"export RATCHET_JOB={root}/jobs/watcher-1/\n"
    await HOST.check(script + Drain(root=root, draining=how).render())
    await HOST.check(script + Undrain(root=root, draining=how).render())
    assert (tmp_path / "seen").read_text() == "none\nnone\n"


@pytest.mark.parametrize("operation", [Drain, Undrain])
def test_operations_are_data_that_render_the_same_script(
    root: str, balancer: Balancer, operation: type[Drain] | type[Undrain]
) -> None:
    one = operation(root=root, draining=balancer.draining())
    assert operation.model_validate_json(one.model_dump_json()).render() == one.render()
