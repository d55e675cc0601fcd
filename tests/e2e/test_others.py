"""Nights in which others act too: a person restarts or uses the server, the host is booted. All of it is real."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.models import MeasurementStatus, Role
from tests.e2e.rig import FASTER, Rig, assert_at_most_one_server, rig
from tests.e2e.test_real_session import candidate_at_work, database, spec_words, words_of
from tests.e2e.test_silence import watchers
from tests.e2e.witness import start_ticks

pytestmark = pytest.mark.real


@pytest.fixture
def host(tmp_path: Path, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path / "shared", demo_model) as one:
        one.start_server()
        yield one


def end_server(host: Rig) -> None:
    """As an operator ends it: by pid."""
    pid = host.listener()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    host.until(lambda: start_ticks(pid) is None or host.listener() != pid)


@contextlib.contextmanager
def somebody_uses(host: Rig) -> Iterator[None]:
    """One request after another, from somebody who is not Ratchet."""
    over = threading.Event()

    def use() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, ValueError):
                host.generates(tokens=48)

    users = [threading.Thread(target=use) for _ in range(2)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        over.set()
        for user in users:
            user.join()


@pytest.mark.slow
def test_a_person_who_restarts_the_server_has_the_last_word(host: Rig) -> None:
    """The agent is held for the moment of the restart, so that it cannot have known-good up before the person does."""
    agent = host.agent("start", str(host.write_session(FASTER)), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    os.kill(agent.process.pid, signal.SIGSTOP)
    end_server(host)
    theirs = host.start_server("--threads", "1", "--parallel", "1", "--ctx-size", "512", "--metrics")
    os.kill(agent.process.pid, signal.SIGCONT)
    assert agent.wait() == 5, agent.said
    assert "neither the adopted one nor one that this session launched" in agent.said
    assert "Traceback" not in agent.said
    assert host.listener() == theirs
    assert host.generates()
    assert watchers(host) == []
    assert host.status()["exit_code"] == 5


@pytest.mark.slow
def test_a_person_who_benchmarks_at_the_same_time_pauses_the_session(host: Rig) -> None:
    original = host.argv()
    agent = host.agent("start", str(host.write_session(FASTER, quiet_wait_s=3)), *database(host))
    host.until(host.client_at_work, agent)
    with somebody_uses(host):
        assert agent.wait() == 5, agent.said
    assert "somebody else keeps using the server" in agent.said
    assert host.argv() == original
    assert watchers(host) == []
    with host.store() as store:
        session = store.latest_session().id
        void = [m for m in store.measurements(session) if m.status is MeasurementStatus.INVALID]
    assert void and "foreign traffic" in " ".join(void[0].reasons)
    resumed = host.agent("resume", *database(host))
    host.until(host.client_at_work, resumed)
    resumed.process.terminate()  # it measures again; a drain is quicker than the whole night
    assert resumed.wait() == 4, resumed.said


@pytest.mark.slow  # the next test has the same reboot, met by a living agent
def test_after_a_reboot_resume_brings_known_good_back_and_the_log_says_so(host: Rig) -> None:
    agent = host.agent("start", str(host.write_session(FASTER, close_out_blocks=1)), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    host.reboot()
    assert host.listener() is None
    resumed = host.command("resume", *database(host))
    assert resumed.process.returncode == 0, resumed.said
    with host.store() as store:
        session = store.latest_session().id
        told = [d["reason"] for d in store.decisions(session) if d["what"] == "the host was rebooted"]
        assert words_of(host.argv()) == spec_words(store, Role.FINAL)
    assert len(told) == 1 and "brings known-good up again" in told[0]
    assert_at_most_one_server(host)


@pytest.mark.slow
def test_an_agent_that_lives_through_a_reboot_goes_on_by_itself(host: Rig) -> None:
    agent = host.agent("start", str(host.write_session(FASTER, close_out_blocks=1)), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    host.reboot()
    host.start_server()  # as the host's own start-up would
    assert agent.wait() == 0, agent.said
    with host.store() as store:
        session = store.latest_session().id
        told = [d["reason"] for d in store.decisions(session) if d["what"] == "the host was rebooted"]
        assert words_of(host.argv()) == spec_words(store, Role.FINAL)
    assert len(told) == 1
    assert_at_most_one_server(host)
    assert watchers(host) == ["watcher-1"]  # which the power failure ended, before it could note its end
