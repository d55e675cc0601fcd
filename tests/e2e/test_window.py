"""A night within hours: a real server behind real SSH is touched only while its own clock is in the window.

The experiments are sure to lose, and there are more of them than any window of a few minutes holds. When something
happened on the host is told by the kernel (start times) and the file system, not by Ratchet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.models import DecisionKind, Role, SessionStatus, TodoStatus
from tests.e2e.rig import Rig, assert_at_most_one_server, rig
from tests.e2e.test_real_session import database, spec_words, words_of
from tests.e2e.test_silence import watchers

pytestmark = pytest.mark.real

BRISK = ("--threads", "1", "--parallel", "2", "--ctx-size", "1024", "--ubatch-size", "256", "--metrics")
AHEAD_S = 40
"""So long before the window opens the agent is started at least: a busy machine takes its time to connect."""
OPEN_MIN = 4
"""For a baseline, some experiments and the way back, also on a busy machine."""
BRIEF = {"close_out_blocks": 1, "start_deadline_s": 30}
"""What is not known yet is reckoned from deadlines; a dear guess would leave no time for anything."""
MANY = 80
"""More experiments than could be made in that time, were each over in three seconds."""
SLOWER = """
[[experiments]]
id = "slower-{number}"
title = "Batches of one token, variant {number}"
hypothesis = "every token of a prompt is a step of its own"
changes = [
    {{ kind = "flag", name = "--ubatch-size", value = "1" }},
    {{ kind = "flag", name = "--batch-size", value = "{size}" }},
]
expected_gain = 0.5
"""


def began(ticks: int) -> float:
    """When a process with these ticks began, by the clock on the wall."""
    return time.time() - float(Path("/proc/uptime").read_text().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def host(tmp_path: Path, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path / "window", demo_model) as one:
        one.start_server(*BRISK)
        yield one


@pytest.mark.slow  # waits for a window and works until it closes
def test_a_real_night_waits_for_its_window_and_has_the_original_back_before_it_closes(host: Rig) -> None:
    original, operator = host.argv(), host.listener()
    opens = -(-(time.time() + AHEAD_S) // 60) * 60
    closes = opens + 60 * OPEN_MIN
    window = "-".join(time.strftime("%H:%M", time.localtime(at)) for at in (opens, closes))
    experiments = "".join(SLOWER.format(number=number, size=512 + number) for number in range(MANY))
    session = host.write_session(f'\n[policy]\nwindow = "{window}"\n{experiments}', **BRIEF)
    agent = host.agent("start", str(session), *database(host))

    host.until(lambda: host.database.exists() and waits(host), agent)
    assert time.time() < opens, "the machine is too busy for this test"
    assert (host.listener(), host.runs()) == (operator, [])
    assert agent.wait(closes - time.time() + 300) == 0, agent.said
    assert host.argv() == original
    assert host.generates()

    starts = [began(start.ticks) for start in host.starts()[1:]]
    runs = [(folder / "begun").stat().st_mtime for key, folder in host.jobs().items() if "-M" in key]
    assert len(starts) >= 2 and len(runs) >= 3, "at least one experiment, and the way back"
    assert all(opens <= at < closes for at in (*starts, *runs)), (opens, starts, runs, closes)
    assert_at_most_one_server(host)
    assert watchers(host) == []
    assert_the_log_says_so(host, window, closes)
    report = host.command("report", *database(host))
    assert report.process.returncode == 0, report.said
    assert f"of the window {window} are left" in report.said


def waits(host: Rig) -> list[dict[str, object]]:
    """The decisions to wait so far."""
    with host.store() as store:
        decisions = [one for session in store.sessions() for one in store.decisions(session.id)]
    return [one for one in decisions if one["kind"] == DecisionKind.WAIT]


def assert_the_log_says_so(host: Rig, window: str, closes: float) -> None:
    """It waited, it worked, it left what did not fit, and it had proven the original before the window closed."""
    with host.store() as store:
        session = store.latest_session()
        assert session.status is SessionStatus.DONE
        todos = [todo for todo in store.todos(session.id) if todo.id.startswith("slower-")]
        log = store.decisions(session.id)
        assert store.role(session.id, Role.FINAL) == store.role(session.id, Role.ORIGINAL)
        assert words_of(host.argv()) == spec_words(store, Role.ORIGINAL)
        last = [trial for trial in store.trials(session.id) if not trial.adopted][-1]
    (wait,) = [entry for entry in log if entry["kind"] == "wait"]
    assert f"before the window {window} opens" in wait["what"] and "the host's clock shows" in wait["reason"]
    left = [todo for todo in todos if todo.status is TodoStatus.SKIPPED]
    assert [todo for todo in todos if todo.status is TodoStatus.DONE] and left
    assert all(f"of the window {window} are left" in todo.reason for todo in left), {todo.reason for todo in left}
    end = log[-1]
    assert end["kind"] == "end" and "the original configuration serves" in end["what"]
    assert last.fingerprint == session.adoption.spec.fingerprint
    assert float(end["at"]) < closes
