"""Whole sessions on real parts: OpenSSH, llama.cpp, the agent as a process that is really killed.

Two nights are lived through once and then looked at by many tests. What is asserted are invariants: nothing depends on
how quiet the machine is or on what an experiment yields.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.verify import Kind, Result, verify
from state.models import MeasurementStatus, Role, SessionStatus, TodoStatus
from state.store import Store
from tests.e2e.rig import (
    CANARY,
    FASTER,
    PROJECT,
    TALKATIVE,
    WITNESSED,
    Agent,
    Rig,
    assert_at_most_one_server,
    rig,
)
from tests.e2e.witness import start_ticks
from tests.ssh_servers import free_port, make_key
from tools.benches.builtin import fixed_prompts

pytestmark = pytest.mark.real

REFUSED = """
[[experiments]]
id = "refused"
title = "Values in 8 bits without flash attention"
hypothesis = "the server refuses to start like this"
changes = [{ kind = "flag", name = "--cache-type-v", value = "q8_0" }]
priority = 0.1
"""


def words_of(argv: list[str] | tuple[str, ...]) -> list[str]:
    """A command line without the API key, which the store holds as a placeholder only."""
    return [word for at, word in enumerate(argv) if at == 0 or argv[at - 1] != "--api-key"]


def spec_words(store: Store, role: Role) -> list[str]:
    fingerprint = store.role(store.latest_session().id, role)
    assert fingerprint is not None
    return words_of(store.spec(fingerprint).argv)


def database(host: Rig) -> tuple[str, str]:
    return ("--db", str(host.database))


def candidate_at_work(host: Rig) -> bool:
    """A benchmark runs, on a server that is not the original."""
    with contextlib.suppress(AssertionError, FileNotFoundError):  # between two servers nobody listens
        return host.run_under_way() and "256" in host.argv()
    return False


def clients(host: Rig) -> list[int]:
    """Living benchmark clients."""
    found = []
    for pid in host.ours():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"stream_client.py") for word in words):
            found.append(pid)
    return found


# --- a night in which the agent is killed, twice --------------------------------------------------------------------


class Killed(NamedTuple):
    """What was seen from outside in the first night."""

    host: Rig
    original: list[str]
    operator_pid: int
    job: Path
    job_was_running: bool
    status: dict[str, Any]
    restored: list[str]
    restored_pid: int | None
    restore: Agent
    end: Agent
    final: list[str]
    final_environ: dict[str, str]
    clients_left: list[int]
    restored_at_last: list[str]
    generated_at_last: bool


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Killed]:
    with rig(tmp_path_factory.mktemp("killed"), demo_model, TALKATIVE) as host:
        operator_pid = host.start_server()
        original = host.argv()
        agent = host.agent("start", str(host.write_session(FASTER + REFUSED, answers="close")), *database(host))
        host.until(host.client_at_work, agent)
        job = host.client_at_work()
        agent.kill()
        assert job is not None
        was_running = not (job / "exit").exists() and bool(clients(host))
        status = host.status()
        host.until((job / "exit").exists)
        agent = host.agent("resume", *database(host))
        host.until(lambda: candidate_at_work(host), agent)
        agent.kill()
        restore = host.command("restore", "--original", *database(host))
        restored, restored_pid = host.argv(), host.listener()
        end = host.command("resume", *database(host))
        final, final_environ, left = host.argv(), host.environ(), clients(host)
        host.command("restore", "--original", *database(host))
        yield Killed(
            host,
            original,
            operator_pid,
            job,
            was_running,
            status,
            restored,
            restored_pid,
            restore,
            end,
            final,
            final_environ,
            left,
            host.argv(),
            host.generates(),
        )


def test_a_benchmark_goes_on_without_its_agent(killed: Killed) -> None:
    assert killed.job_was_running
    assert killed.status["status"] == "running"
    assert killed.job.name == f"{killed.status['session']}-{killed.status['measuring']}"
    assert (killed.job / "exit").read_text() == "0\n"
    assert json.loads((killed.job / "result.json").read_text())["completed"] == 4


def test_the_server_was_asked_the_fixed_prompts_and_what_it_said_is_stored(killed: Killed) -> None:
    with killed.host.store() as store:
        launches = {trial.id for trial in store.trials(killed.status["session"])}
        passes = store.answers(killed.status["session"], launches)
    assert len(passes) >= 2
    for _, answers in passes:
        assert [answer.error for answer in answers] == [None] * len(fixed_prompts())
        assert all(answer.tokens and answer.tops for answer in answers)


def test_resume_takes_up_the_very_run_that_was_under_way(killed: Killed) -> None:
    with killed.host.store() as store:
        (taken,) = [m for m in store.measurements(killed.status["session"]) if m.id == killed.status["measuring"]]
    assert taken.status is MeasurementStatus.VALID
    assert taken.metrics is not None
    told = json.loads((killed.job / "result.json").read_text())
    assert taken.metrics.output_tok_s == told["output_tok_s"]
    assert killed.host.runs().count(killed.job.name) == 1


def test_every_verdict_is_computed_again_from_the_clients_own_results(killed: Killed) -> None:
    with killed.host.store() as store:
        audit = verify(store, killed.status["session"])
        known = store.verdicts(killed.status["session"])
    assert [check for check in audit.checks if check.result is not Result.SAME] == []
    assert {check.subject for check in audit.checks if check.kind is Kind.VERDICT} == set(known)
    assert [check for check in audit.checks if check.kind is Kind.RUN and not check.trusted] != []


def test_nothing_is_run_or_launched_twice_and_nothing_is_forgotten(killed: Killed) -> None:
    host, session = killed.host, killed.status["session"]
    runs, launches = Counter(host.runs()), Counter(start.launch for start in host.starts())
    assert set(runs.values()) == set(launches.values()) == {1}
    with host.store() as store:
        begun = {f"{session}-{m.id}" for m in store.measurements(session)}
        launched = {f"{session}-{t.id}" for t in store.trials(session) if not t.adopted}
        unfinished = store.db.execute("SELECT count(*) FROM effects WHERE outcome IS NULL").fetchone()[0]
    watchers = {key for key in host.jobs() if key.startswith("watcher-")}
    assert set(host.jobs()) == begun | launched | watchers
    assert watchers and all((host.jobs()[key] / "exit").exists() for key in watchers)
    assert set(runs) == begun
    assert set(launches) == launched | {"operator"}
    assert unfinished == 0


def test_the_log_tells_of_both_interruptions(killed: Killed) -> None:
    with killed.host.store() as store:
        decisions = store.decisions(killed.status["session"])
    resumed = [decision["reason"] for decision in decisions if decision["kind"] == "resume"]
    assert len(resumed) == 2
    assert resumed[0].startswith("the agent died in the middle of baseline")
    assert resumed[1].startswith("the session had stopped in the middle of faster")
    assert [d["reason"] for d in decisions if d["kind"] == "restore"] == ["a person asked for it"] * 2


def test_the_session_ends_done_and_serves_what_it_says(killed: Killed) -> None:
    assert killed.end.process.returncode == 0, killed.end.said
    with killed.host.store() as store:
        row = store.latest_session()
        assert (row.status, row.exit_code) == (SessionStatus.DONE, 0)
        assert words_of(killed.final) == spec_words(store, Role.FINAL)
        assert words_of(killed.original) == spec_words(store, Role.ORIGINAL)


def test_restore_brings_the_original_back_from_an_experiment(killed: Killed) -> None:
    assert killed.restore.process.returncode == 0, killed.restore.said
    assert killed.restored == killed.original
    assert killed.restored_pid != killed.operator_pid
    assert f"serves as process {killed.restored_pid}" in killed.restore.said


def test_restore_brings_the_original_back_after_the_end(killed: Killed) -> None:
    assert killed.restored_at_last == killed.original
    assert killed.generated_at_last


def test_a_configuration_that_refuses_to_start_is_blocked_with_its_cause(killed: Killed) -> None:
    with killed.host.store() as store:
        session = store.latest_session().id
        (todo,) = [todo for todo in store.todos(session) if todo.id == "refused"]
        failed = [t for t in store.trials(session) if t.failure is not None and t.experiment_id == "refused"]
        after = store.trials(session)[store.trials(session).index(failed[-1]) + 1]
    assert todo.status is TodoStatus.BLOCKED
    assert failed[0].failure is not None
    assert "flash_attn" in failed[0].failure.cause.replace(" ", "_").lower()
    assert failed[0].failure.cause in todo.reason
    assert after.failure is None
    assert "--cache-type-v" not in killed.final


def test_secrets_stay_on_the_host_and_come_back_with_each_launch(killed: Killed) -> None:
    host = killed.host
    for words in (("report",), ("replay", "--json"), ("status", "--json")):
        assert host.command(*words, *database(host)).process.returncode == 0
    told = [agent.out for agent in host.agents] + [agent.err for agent in host.agents]
    stored = [path for path in host.database.parent.rglob("*") if path.is_file()]
    assert host.database in stored
    assert any(path.name.startswith("report-") for path in stored)
    assert [
        path for path in (*told, *stored, host.folder / "session.toml") if CANARY.encode() in path.read_bytes()
    ] == []
    assert killed.final_environ["SECRET_CANARY"] == f"{CANARY}-env"
    assert killed.final[killed.final.index("--api-key") + 1] == f"{CANARY}-key"


def test_secrets_on_the_host_are_for_our_user_alone(killed: Killed) -> None:
    root = killed.host.root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    holders = [path for path in root.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert root / "secrets.json" in holders
    assert {stat.S_IMODE(path.stat().st_mode) for path in holders} == {0o600}
    assert {path.name for path in holders} == {"secrets.json", "run.sh", "restore.sh", "stdout", "stderr"}
    assert {path.parent.name.rpartition("-")[2][0] for path in holders if path.name.startswith("std")} == {"T"}


def test_two_servers_never_live_at_once_and_no_client_is_left(killed: Killed) -> None:
    assert_at_most_one_server(killed.host)
    assert killed.clients_left == []


# --- a night in which people say stop -------------------------------------------------------------------------------


class Moment(NamedTuple):
    """What was seen right after an agent had ended."""

    code: int
    said: str
    argv: list[str]
    known_good: list[str]
    generates: bool
    clients: list[int]
    status: dict[str, Any]


class Stopped(NamedTuple):
    """What was seen from outside in the second night."""

    host: Rig
    original: list[str]
    interrupted: Moment
    asked: Moment
    end: Moment


def moment(host: Rig, agent: Agent) -> Moment:
    code = agent.wait()
    with host.store() as store:
        known_good = spec_words(store, Role.KNOWN_GOOD)
    return Moment(code, agent.said, host.argv(), known_good, host.generates(), clients(host), host.status())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Stopped]:
    with rig(tmp_path_factory.mktemp("stopped"), demo_model) as host:
        host.start_server()
        original = host.argv()
        agent = host.agent("start", str(host.write_session(FASTER)), *database(host))
        host.until(lambda: candidate_at_work(host), agent)
        os.kill(agent.process.pid, signal.SIGINT)
        interrupted = moment(host, agent)
        agent = host.agent("resume", *database(host))
        host.until(lambda: candidate_at_work(host), agent)
        assert host.command("stop", *database(host)).process.returncode == 0
        asked = moment(host, agent)
        end = moment(host, host.agent("resume", *database(host)))
        yield Stopped(host, original, interrupted, asked, end)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["interrupted", "asked"])
def test_ctrl_c_and_stop_bring_known_good_back_first(stopped: Stopped, when: str) -> None:
    seen: Moment = getattr(stopped, when)
    assert seen.code == 4, seen.said
    assert words_of(seen.argv) == seen.known_good
    assert seen.generates
    assert seen.clients == []
    assert seen.status["status"] == "stopped"
    assert "ratchet resume" in seen.said
    assert "Traceback" not in seen.said


@pytest.mark.slow
def test_in_the_middle_of_the_first_experiment_known_good_is_the_original(stopped: Stopped) -> None:
    assert stopped.interrupted.argv == stopped.original
    assert stopped.interrupted.status["experiment"] == "faster"


@pytest.mark.slow
def test_a_stopped_session_goes_on_to_its_end(stopped: Stopped) -> None:
    assert stopped.end.code == 0, stopped.end.said
    assert stopped.end.status["status"] == "done"
    with stopped.host.store() as store:
        session = store.latest_session().id
        assert words_of(stopped.end.argv) == spec_words(store, Role.FINAL)
        kinds = Counter(decision["kind"] for decision in store.decisions(session))
        lost = [m for m in store.measurements(session) if m.status is MeasurementStatus.LOST]
    assert kinds["interrupted"] == kinds["resume"] == 2
    assert kinds["end"] == 1
    assert lost and {m.reasons for m in lost} == {("stopped on request",)}


@pytest.mark.slow
def test_after_each_stop_only_one_server_lives_and_nothing_runs_twice(stopped: Stopped) -> None:
    assert_at_most_one_server(stopped.host)
    launches = Counter(start.launch for start in stopped.host.starts())
    assert set(Counter(stopped.host.runs()).values()) == set(launches.values()) == {1}


# --- before anything is touched -------------------------------------------------------------------------------------


class Live(NamedTuple):
    """A serving server that nobody may touch."""

    host: Rig
    pid: int
    ticks: int


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Live]:
    with rig(tmp_path_factory.mktemp("live"), demo_model) as host:
        pid = host.start_server()
        ticks = start_ticks(pid)
        assert ticks is not None
        yield Live(host, pid, ticks)


def assert_untouched(live: Live) -> None:
    assert live.host.listener() == live.pid
    assert start_ticks(live.pid) == live.ticks
    assert [start.launch for start in live.host.starts() if start.launch != "operator"] == []
    assert not live.host.root.exists()
    assert live.host.runs() == []


def assert_one_message(agent: Agent, code: int, phrase: str) -> None:
    said = agent.err.read_text()
    assert agent.process.returncode == code, agent.said
    assert said.startswith("ratchet: ")
    assert said.count("ratchet: ") == 1
    assert phrase in said
    assert "Traceback" not in agent.said


def other_host_key(host: Rig) -> Path:
    return host.sshd.write_known_hosts(host.folder / "known-another", make_key(host.folder / "another-key"))


def no_host_key(host: Rig) -> Path:
    path = host.folder / "known-nobody"
    path.write_text("")
    return path


MISUSES = {
    "config": (2, "requets", lambda host: {"requests": "4\nrequets = 5"}),
    "unreachable": (3, "Connection refused", lambda host: {"ssh_port": free_port()}),
    "changed-host-key": (3, "has CHANGED", lambda host: {"known_hosts": other_host_key(host)}),
    "unknown-host-key": (3, "is unknown", lambda host: {"known_hosts": no_host_key(host)}),
    "login": (3, "refused our key", lambda host: {"identity": make_key(host.folder / "stranger")}),
    "no-server": (3, "nothing listens on port", lambda host: {"port": free_port()}),
    "no-python": (3, "as no-such-python", lambda host: {"python": "no-such-python"}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_cannot_work_is_told_before_anything_is_touched(live: Live, name: str) -> None:
    code, phrase, fields = MISUSES[name]
    session = live.host.write_session(**fields(live.host))
    assert_one_message(live.host.command("start", str(session), *database(live.host)), code, phrase)
    assert_untouched(live)


def test_a_server_that_never_generates_is_no_known_good(live: Live) -> None:
    port = free_port()
    liar = (sys.executable, str(PROJECT / "tests" / "e2e" / "liar.py"))
    pid = live.host.start_server(program=liar, port=port)
    session = live.host.write_session(port=port)
    assert_one_message(live.host.command("start", str(session), *database(live.host)), 3, "does not generate")
    assert live.host.listener(port) == pid
    assert_untouched(live)


@pytest.mark.parametrize("command", ["doctor", "start"])
def test_a_server_on_a_terminal_is_not_stopped(live: Live, tmp_path: Path, command: str) -> None:
    port = free_port()
    master, slave = pty.openpty()
    try:
        pid = live.host.start_server(port=port, program=(*WITNESSED,), stdin=os.ttyname(slave))
        session = live.host.write_session(port=port)
        words = [command, str(session)] + (["--db", str(tmp_path / "state.db")] if command == "start" else [])
        agent = live.host.command(*words)
        assert agent.process.returncode == 5, agent.said
        assert "attached to a terminal" in " ".join(agent.said.split())
        assert "Traceback" not in agent.said
        assert live.host.listener(port) == pid
        assert_untouched(live)
    finally:
        os.close(master)
        os.close(slave)


def test_doctor_looks_and_touches_nothing(live: Live) -> None:
    session = live.host.write_session(FASTER + REFUSED)
    told = live.host.command("doctor", str(session), "--json")
    assert told.process.returncode == 0, told.said
    diagnosis = json.loads(told.out.read_text())
    checks = {check["name"]: check["status"] for check in diagnosis["checks"]}
    assert (checks["server"], checks["generates"], checks["restorable"]) == ("ok", "ok", "ok")
    assert checks["open files"] in ("ok", "warning"), "a load of two streams fits everywhere"
    assert [item["id"] for item in diagnosis["plan"]] == ["faster", "refused"]
    assert CANARY not in told.said
    readable = live.host.command("doctor", str(session))
    assert readable.process.returncode == 0
    assert f"process {live.pid}" in readable.said
    assert_untouched(live)


def test_a_dry_run_plans_and_touches_nothing(live: Live) -> None:
    told = live.host.command("start", "--dry-run", str(live.host.write_session(FASTER)))
    assert told.process.returncode == 0, told.said
    assert "Two threads and larger batches" in told.said
    assert_untouched(live)


# --- the native binary ----------------------------------------------------------------------------------------------


@pytest.mark.skipif("RATCHET_LLAMA_SERVER" not in os.environ, reason="RATCHET_LLAMA_SERVER names no llama-server")
def test_a_native_llama_server_is_tuned_by_the_same_adapter(tmp_path: Path, demo_model: Path) -> None:
    binary = str(Path(os.environ["RATCHET_LLAMA_SERVER"]).resolve())
    with rig(tmp_path / "native", demo_model, (binary,)) as host:
        host.start_server()
        original = host.argv()
        end = host.command("start", str(host.write_session(FASTER + REFUSED)), *database(host))
        assert end.process.returncode == 0, end.said
        with host.store() as store:
            session = store.latest_session().id
            statuses = {todo.id: todo.status for todo in store.todos(session)}
            assert words_of(host.argv()) == spec_words(store, Role.FINAL)
        assert statuses["baseline"] is TodoStatus.DONE
        assert statuses["faster"] is TodoStatus.DONE
        assert statuses["refused"] is TodoStatus.BLOCKED
        assert host.argv()[0] == binary
        assert set(Counter(host.runs()).values()) == {1}
        assert host.command("restore", "--original", *database(host)).process.returncode == 0
        assert host.argv() == original
        assert host.generates()
