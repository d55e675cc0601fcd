"""Disks that fill up under a real session, the agent's and the host's: real mounts, real servers, real ends."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.models import Role
from tests.disks import disk
from tests.e2e.rig import FASTER, Agent, Rig, assert_at_most_one_server, rig
from tests.e2e.test_real_session import candidate_at_work, database, spec_words, words_of

pytestmark = pytest.mark.real

LEASE_S = 5


@pytest.fixture
def host(tmp_path: Path, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path / "rig", demo_model) as one:
        one.start_server()
        yield one


def said_clearly(agent: Agent, code: int, *words: str) -> None:
    """One message for a person, with the right exit code and without a traceback."""
    said = agent.err.read_text()
    assert agent.process.returncode == code, agent.said
    assert "Traceback" not in agent.said
    assert said.count("ratchet: ") == 1 and "what you can do: " in said
    assert [word for word in words if word not in said] == []


def restored(host: Rig) -> bool:
    markers = sorted((host.root / "lease").glob("marker-*"))
    return bool(markers) and markers[-1].read_text().splitlines()[0] in ("restored", "already serving")


def events(host: Rig) -> list[tuple[int, str]]:
    connection = sqlite3.connect(f"{host.database.as_uri()}?mode=ro", uri=True)
    rows = connection.execute("SELECT seq, body FROM events ORDER BY seq").fetchall()
    connection.close()
    return [(seq, body) for seq, body in rows]


def goes_on_after_a_resume(host: Rig, before: list[tuple[int, str]]) -> None:
    """With space again it measures on: what was written is still there, and nothing is done a second time."""
    runs = len(host.runs())
    agent = host.agent("resume", *database(host))
    host.until(lambda: len(host.runs()) > runs, agent)
    agent.process.terminate()  # a drain, which is quicker than the whole night
    assert agent.wait() == 4, agent.said
    now = events(host)
    assert now[: len(before)] == before
    assert [seq for seq, _ in now] == list(range(1, len(now) + 1))
    assert set(Counter(host.runs()).values()) == {1}
    assert set(Counter(start.launch for start in host.starts()).values()) == {1}
    with host.store() as store:
        assert words_of(host.argv()) == spec_words(store, Role.KNOWN_GOOD)
        assert store.db.execute("SELECT count(*) FROM effects WHERE outcome IS NULL").fetchone()[0] == 0
    assert host.generates()
    assert_at_most_one_server(host)


@pytest.mark.slow
def test_the_agents_disk_fills_up_in_the_middle(host: Rig) -> None:
    original = host.argv()
    with disk(host.database.parent, 128 << 10) as small:
        agent = host.agent("start", str(host.write_session(FASTER, lease_s=LEASE_S, requests=2)), *database(host))
        host.until(lambda: candidate_at_work(host), agent)
        small.fill()
        agent.wait()
        said_clearly(agent, 3, "no space is left for", str(host.database), "free some space there")
        host.until(lambda: restored(host))
        assert host.argv() == original and host.generates()

        before = events(host)
        launches, runs = host.starts(), host.runs()
        again = host.command("resume", *database(host))
        said_clearly(again, 3, "no space is left for")
        assert (host.starts(), host.runs()) == (launches, runs)
        small.grow()
        goes_on_after_a_resume(host, before)


@pytest.mark.slow
def test_the_hosts_disk_fills_up_in_the_middle(host: Rig) -> None:
    original = host.argv()
    with disk(host.root, 512 << 10) as small:
        agent = host.agent("start", str(host.write_session(FASTER, lease_s=LEASE_S, requests=2)), *database(host))
        host.until(lambda: candidate_at_work(host), agent)
        small.fill()
        agent.wait()
        said_clearly(agent, 3, "No space left on device", "the disk is not full")
        host.until(lambda: restored(host))
        assert host.argv() == original and host.generates()
        before = events(host)
        small.grow()
        goes_on_after_a_resume(host, before)


def test_without_room_neither_side_is_touched(host: Rig) -> None:
    operator, session = host.listener(), str(host.write_session(FASTER))

    def refused(*words: str) -> None:
        said_clearly(host.command("start", session, *database(host)), 3, *words)

    host.root.write_text("somebody's file")
    refused("is no folder", "target.directory")
    assert host.root.read_text() == "somebody's file"
    host.root.unlink()
    with disk(host.root, 2 << 10) as small:
        small.read_only()
        told = host.command("doctor", "--json", session)
        assert told.process.returncode == 3, told.said
        (failed,) = [c for c in json.loads(told.out.read_text())["checks"] if c["name"] == "host's folder"]
        assert failed["status"] == "failed" and "cannot be written by this login" in failed["text"]
        assert "another folder" in failed["do"]
    with disk(host.database.parent, 2 << 10) as small:
        refused("MiB are free for the session's database")
        assert list(small.path.iterdir()) == []
    assert host.listener() == operator and host.runs() == []
