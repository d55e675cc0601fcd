"""What the host does when nobody is there any more: real SIGKILL, a real watcher, a real server put back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.models import Role
from tests.e2e.rig import FASTER, Rig, rig
from tests.e2e.test_real_session import candidate_at_work, database, spec_words, words_of

pytestmark = pytest.mark.real

LEASE_S = 5


@pytest.fixture
def host(tmp_path: Path, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path / "silent", demo_model) as one:
        one.start_server()
        yield one


def markers(host: Rig) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted((host.root / "lease").glob("marker-*"))]


def watchers(host: Rig) -> list[str]:
    return [key for key, folder in host.jobs().items() if key.startswith("watcher") and not (folder / "exit").exists()]


def test_killed_and_never_resumed_the_host_itself_puts_known_good_back(host: Rig) -> None:
    original = host.argv()
    agent = host.agent("start", str(host.write_session(FASTER, lease_s=LEASE_S)), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    host.until(lambda: bool(markers(host)))
    assert [marker[0] for marker in markers(host)] == ["restored"]
    assert host.argv() == original
    assert host.generates()
    assert watchers(host) == []
    assert host.client_at_work() is None

    resumed = host.command("resume", *database(host))
    assert resumed.process.returncode == 0, resumed.said
    with host.store() as store:
        session = store.latest_session().id
        told = [d for d in store.decisions(session) if d["kind"] == "restore"]
        assert words_of(host.argv()) == spec_words(store, Role.FINAL)
    assert len(told) == 1 and "no agent renewed the lease; restored" in told[0]["reason"]
    assert watchers(host) == []


@pytest.mark.slow
def test_resumed_within_the_lease_the_watcher_never_acts(host: Rig) -> None:
    agent = host.agent("start", str(host.write_session(FASTER, lease_s=60)), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    resumed = host.command("resume", *database(host))
    assert resumed.process.returncode == 0, resumed.said
    assert markers(host) == []
    assert watchers(host) == []


@pytest.mark.slow
def test_a_second_agent_with_a_database_of_its_own_is_refused_by_the_host(host: Rig) -> None:
    session = str(host.write_session(FASTER, lease_s=60))
    first = host.agent("start", session, *database(host))
    host.until(lambda: candidate_at_work(host), first)
    before = len(host.starts())
    second = host.command("start", session, "--db", str(host.folder / "another" / "state.db"))
    assert second.process.returncode == 5, second.said
    assert "another agent holds this target" in second.said
    assert f"agent process {first.process.pid}" in second.said
    assert all(start.launch != "unknown" for start in host.starts()[before:])
    first.process.terminate()  # a drain, which is quicker than the whole night
    assert first.wait() == 4, first.said


def test_a_late_agent_is_fenced_by_the_host(host: Rig) -> None:
    """Frozen for longer than the lease, it wakes up to a host that has moved on, and changes nothing any more."""
    original = host.argv()
    agent = host.agent("start", str(host.write_session(FASTER, lease_s=LEASE_S)), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    os.kill(agent.process.pid, 19)  # SIGSTOP
    host.until(lambda: bool(markers(host)))
    os.kill(agent.process.pid, 18)  # SIGCONT
    assert agent.wait() == 5, agent.said
    assert "passed on" in agent.said
    assert host.argv() == original
    told = json.loads(host.command("status", "--json", *database(host)).out.read_text())
    assert told["exit_code"] == 5
