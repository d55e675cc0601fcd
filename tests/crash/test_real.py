"""A real agent on real parts, killed at named points; the walk over all points is `python -m tests.crash --real`.

One night is lived through and killed seven times in it; each test looks at one of the kills, and at what the resume
after it made of what it found.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from state.models import Role
from tests.crash import witness
from tests.crash.lives import KILLED
from tests.crash.real import live, repeated, strays, wrong_end
from tests.e2e.rig import FASTER, Agent, Rig, rig
from tests.e2e.test_real_session import candidate_at_work, clients, database, spec_words, words_of
from tests.e2e.test_silence import markers, watchers

pytestmark = pytest.mark.real

SHORT_LEASE_S = 10
CANDIDATE = "T2"
"""The first launch of the night: the adopted server is T1."""
FIRST_RUN = "M3"
"""The candidate's first run: the baseline has two."""


class Moment(NamedTuple):
    """What was seen from outside right after a kill."""

    code: int | None
    said: str
    events: list[witness.Event]
    launches: list[str]
    runs: list[str]
    serves: list[str]
    """The command line of whoever listens; nobody's is empty."""
    clients: int


class Night(NamedTuple):
    """A session that was killed at named points, and its end."""

    host: Rig
    original: list[str]
    killed: dict[str, Moment]
    end: Agent
    last: list[witness.Event]


def moment(host: Rig, agent: Agent) -> Moment:
    serves: list[str] = []
    with contextlib.suppress(AssertionError, FileNotFoundError):
        serves = host.argv()
    return Moment(
        agent.process.returncode,
        agent.said,
        witness.committed(host.database),
        [start.launch.rpartition("-")[2] for start in host.starts()],
        [run.rpartition("-")[2] for run in host.runs()],
        serves,
        len(clients(host)),
    )


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Night]:
    with rig(tmp_path_factory.mktemp("night"), demo_model) as host:
        host.start_server()
        # So many requests that a run lasts some seconds: it has to be caught in the middle.
        original, session = host.argv(), str(host.write_session(FASTER, lease_s=60, requests=10))
        killed: dict[str, Moment] = {}

        def kill(point: str) -> None:
            killed[point] = moment(host, live(host, session, f"at:{point}"))

        for step in ("after-intent", "stopped", "after-act"):
            kill(f"{CANDIDATE}/launch:{step}")
        agent = host.agent("resume", *database(host))
        host.until(host.client_at_work, agent)
        agent.kill()
        killed["in mid-benchmark"] = moment(host, agent)
        for point in (f"{FIRST_RUN}:collected", "node:settle", "node:finish"):
            kill(point)
        end = live(host, session)
        yield Night(host, original, killed, end, witness.committed(host.database))


def test_the_agent_died_of_sigkill_at_each_point(night: Night) -> None:
    assert {point: seen.code for point, seen in night.killed.items()} == dict.fromkeys(night.killed, KILLED), [
        seen.said for seen in night.killed.values() if seen.code != KILLED
    ]


def test_after_the_intent_of_a_launch_nothing_was_stopped_and_it_begins_once(night: Night) -> None:
    seen, then = night.killed["T2/launch:after-intent"], night.killed["T2/launch:stopped"]
    assert seen.serves == night.original
    assert seen.launches == then.launches == ["operator"]
    assert launches(night).count(CANDIDATE) == 1


def test_between_two_servers_nobody_serves_and_the_launch_begins_once(night: Night) -> None:
    seen, then = night.killed["T2/launch:stopped"], night.killed["T2/launch:after-act"]
    assert seen.serves == []
    assert then.launches == ["operator", CANDIDATE]
    assert launches(night).count(CANDIDATE) == 1


def test_while_the_new_server_loads_its_launch_is_not_repeated(night: Night) -> None:
    seen, then = night.killed["T2/launch:after-act"], night.killed["in mid-benchmark"]
    assert seen.launches == then.launches == ["operator", CANDIDATE]
    assert "256" in then.serves


def test_in_mid_benchmark_the_client_goes_on_and_its_run_is_collected(night: Night) -> None:
    seen, then = night.killed["in mid-benchmark"], night.killed[f"{FIRST_RUN}:collected"]
    assert seen.clients >= 1
    assert seen.runs == then.runs == ["M1", "M2", FIRST_RUN]
    assert then.clients == 0


def test_collected_but_not_written_a_run_gives_the_same_figures_once(night: Night) -> None:
    seen, then = night.killed[f"{FIRST_RUN}:collected"], night.killed["node:settle"]
    assert measured(seen.events).count(FIRST_RUN) == 0
    assert measured(then.events).count(FIRST_RUN) == measured(night.last).count(FIRST_RUN) == 1
    assert runs(night).count(FIRST_RUN) == 1


def test_before_the_verdict_is_written_the_stored_runs_give_it(night: Night) -> None:
    seen, then = night.killed["node:settle"], night.killed["node:finish"]
    assert "faster" not in judged(seen.events)
    assert judged(then.events).count("faster") == 1
    assert set(measured(seen.events)) <= set(measured(then.events))


def test_before_the_end_is_written_the_next_resume_ends_the_session(night: Night) -> None:
    seen = night.killed["node:finish"]
    assert [event for event in seen.events if '"kind":"end"' in event[4]] == []
    assert night.end.process.returncode == 0, night.end.said
    assert list(wrong_end(night.host, night.end)) == []


def test_seven_kills_repeat_nothing_lose_nothing_and_leave_no_process(night: Night) -> None:
    assert list(repeated(night.host)) == []
    assert [witness.lost(seen.events, night.last) for seen in night.killed.values()] == [()] * len(night.killed)
    assert strays(night.host) == []


def launches(night: Night) -> list[str]:
    return [start.launch.rpartition("-")[2] for start in night.host.starts()]


def runs(night: Night) -> list[str]:
    return [run.rpartition("-")[2] for run in night.host.runs()]


def measured(events: list[witness.Event]) -> list[str]:
    """Runs whose figures are in the log."""
    closed = [json.loads(body)["measurement"] for _, _, _, kind, body in events if kind == "measurement-closed"]
    return [run["id"] for run in closed if run["metrics"] is not None]


def judged(events: list[witness.Event]) -> list[str]:
    """Experiments with a verdict in the log."""
    return [json.loads(body)["verdict"]["experiment_id"] for _, _, _, kind, body in events if kind == "verdict-reached"]


@pytest.fixture
def host(tmp_path: Path, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path / "crash", demo_model) as one:
        one.start_server()
        yield one


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "agent:took-over",
        "wrote:agent-attached+decision-made+session-moved",
    ],
)
def test_what_the_watcher_did_is_told_by_the_next_resume_if_one_dies_before_it_looks(host: Rig, point: str) -> None:
    session = str(host.write_session(FASTER, lease_s=SHORT_LEASE_S))
    agent = host.agent("start", session, *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    host.until(lambda: "restored" in [marker[0] for marker in markers(host)] and not watchers(host))
    assert live(host, session, f"at:{point}").process.returncode == KILLED
    end = host.command("restore", *database(host))  # looks back like a resume, and is over sooner
    assert end.process.returncode == 0, end.said
    with host.store() as store:
        told = [d["reason"] for d in store.decisions(store.latest_session().id) if d["kind"] == "restore"]
        assert words_of(host.argv()) == spec_words(store, Role.KNOWN_GOOD)
    assert [reason.partition(":")[0] for reason in told][-2:] == [  # a busy machine may have fired a watcher before
        "no agent renewed the lease; restored",
        "a person asked for it",
    ]
