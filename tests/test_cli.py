"""The command line as a person or a script meets it: help, JSON, exit codes, and what a reading command loads."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

import run_agent
from state.models import SessionStatus
from state.store import Store
from tests.agent.sessions import finished, moved

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(typer.main.get_group(run_agent.app).commands)
TODO = sorted(f"todo {name}" for name in typer.main.get_group(run_agent.todo_app).commands)
READING = ("status", "sessions", "replay", "report", "stop", "todo list", "todo show baseline")
SAYING = ("todo drop e", "todo priority e 0.5", "todo add --change flag:--x=1", "approve e")
WITH_JSON = ("status", "sessions", "replay", "doctor", "selftest", "todo list", "todo show")
HEAVY = ("langgraph", "openai", "asyncssh")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("improved"))


@pytest.fixture
def own(database: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copy2(database, tmp_path / "state.db"))


class Ended(NamedTuple):
    """How a command ended, in this process or in one of its own."""

    code: int
    stdout: str
    stderr: str


def variables(**more: str) -> dict[str, str]:
    """An environment that names no database and has no home of its own."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {**kept, "HOME": "/nonexistent", "XDG_STATE_HOME": "/nonexistent", "COLUMNS": "200", **more}


def process(*words: str | Path, cwd: Path = ROOT) -> Ended:
    """Run the command line as a shell would."""
    command = [sys.executable, str(ROOT / "run_agent.py"), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=variables(), capture_output=True, text=True, timeout=60)
    return Ended(done.returncode, done.stdout, done.stderr)


def ratchet(*words: str | Path, cwd: Path = ROOT, **more: str) -> Ended:
    """Run the command line in this process, which spares the start of an interpreter; whatever escapes, escapes."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["run_agent.py", *map(str, words)])
        for name in set(os.environ) - set(variables()):
            patch.delenv(name)
        for name, value in variables(**more).items():
            patch.setenv(name, value)
        patch.chdir(cwd)
        try:
            run_agent.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    return Ended(code, out.getvalue(), err.getvalue())


def refused(done: Ended, code: int) -> str:
    """What was said on stderr by a command that ended with `code`, as a message for a person."""
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("ratchet: ")
    assert "what you can do: " in done.stderr
    return done.stderr


def told(*words: str | Path) -> Any:
    """The JSON of a reading command."""
    done = ratchet(*words, "--json")
    assert (done.code, done.stderr) == (0, "")
    return json.loads(done.stdout)


# --- help ---


def test_the_overview_names_every_command() -> None:
    done = process("--help")
    assert done.code == 0
    assert all(f" {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", [*COMMANDS, *TODO])
def test_every_command_and_every_option_has_a_help_text(name: str) -> None:
    done = ratchet(*name.split(), "--help")
    group, _, last = name.rpartition(" ")
    command = typer.main.get_group(run_agent.todo_app if group else run_agent.app).commands[last]
    assert done.code == 0
    assert command.help and command.help.split(":")[0].split(",")[0] in done.stdout
    assert [parameter.name for parameter in command.params if not getattr(parameter, "help", None)] == []
    assert ("--json" in done.stdout) == (name in WITH_JSON)


def test_no_command_shows_the_help() -> None:
    done = ratchet()
    assert "Usage:" in done.stdout + done.stderr
    assert done.code == 2


# --- what reading commands tell ---


def test_a_shell_gets_what_this_process_gets(database: Path, tmp_path: Path) -> None:
    wrong = ROOT / "tests" / "data" / "config" / "wrong_keys.toml"
    for words in (("status", "--json", "--db", database), ("doctor", wrong), ("replay", "--db", tmp_path / "none.db")):
        assert process(*words) == ratchet(*words)


def test_status_as_json_and_as_text(database: Path) -> None:
    found = told("status", "--db", database)
    assert (found["target"], found["status"], found["exit_code"]) == ("sim", "done", 0)
    done = ratchet("status", "--db", database)
    assert done.code == 0
    assert found["headline"] in done.stdout
    assert all(todo["title"] in done.stdout for todo in found["todos"])


def test_the_todo_list_as_json_and_as_text(database: Path) -> None:
    found = told("todo", "list", "--db", database)
    assert found["waiting"] == [] and {todo["status"] for todo in found["todos"]} == {"done", "blocked"}
    done = ratchet("todo", "list", "--db", database)
    assert all(todo["id"] in done.stdout for todo in found["todos"])
    one = told("todo", "show", "threads-2", "--db", database)
    assert [step["status"] for step in one["history"]] == ["pending", "in_progress", "done"]
    shown = ratchet("todo", "show", "threads-2", "--db", database)
    assert "pending → in progress" in shown.stdout and "threads-2" in shown.stdout


@pytest.mark.parametrize("words", SAYING)
def test_a_session_that_is_over_is_told_nothing(words: str, own: Path) -> None:
    said = refused(ratchet(*words.split(), "--db", own), 2)
    assert "is over" in said and "--continue-from" in said
    assert not (own.parent / "inbox").exists()


def test_a_word_for_a_session_that_stopped_waits_for_resume(tmp_path: Path) -> None:
    with moved(tmp_path, SessionStatus.STOPPED, "a person asked"):
        pass
    database = tmp_path / "state.db"
    done = ratchet("todo", "add", "--change", "flag:--threads=4", "--priority", "0.9", "--db", database)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith("is stopped: it is picked up by the next `resume`")
    assert told("todo", "list", "--db", database)["waiting"] == ["add threads-4: --threads 4"]
    assert "there is no todo nobody" in refused(ratchet("todo", "drop", "nobody", "--db", database), 2)
    assert "todos here: threads-4" in refused(ratchet("approve", "nobody", "--db", database), 2)
    assert "there is no todo nobody" in refused(ratchet("todo", "show", "nobody", "--db", database), 2)


def test_what_an_earlier_session_knew_takes_a_real_start(tmp_path: Path) -> None:
    words = ("start", ROOT / "tests" / "data" / "config" / "least.toml", "--dry-run", "--continue-from", "latest")
    assert "--dry-run knows nothing of earlier sessions" in refused(ratchet(*words, cwd=tmp_path), 2)


def test_sessions_as_json_and_as_text(database: Path) -> None:
    (found,) = told("sessions", "--db", database)
    assert found["ended"] is not None
    (line,) = ratchet("sessions", "--db", database).stdout.splitlines()
    assert all(text in line for text in (found["session"], "sim", "done", found["headline"]))


def test_replay_as_json_and_as_text(database: Path) -> None:
    log = told("replay", "--db", database)
    assert [entry["id"] for entry in log] == [f"D{n + 1}" for n in range(len(log))]
    done = ratchet("replay", "--db", database)
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith(" D")] == [e["id"] for e in log]


def test_replay_computes_a_session_again(database: Path) -> None:
    audit = told("replay", "--verify", "--db", database)
    assert audit["clean"] is True
    assert {check["result"] for check in audit["checks"]} == {"same"}
    done = ratchet("replay", "--verify", "--db", database)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == audit["summary"]
    verdicts = [check for check in audit["checks"] if check["kind"] == "verdict"]
    assert verdicts and all(f" {check['subject']} " in done.stdout for check in verdicts)


def test_replay_ends_with_1_where_something_differs(own: Path) -> None:
    with closing(sqlite3.connect(own)) as connection, connection:
        connection.execute("UPDATE verdicts SET outcome = 'better' WHERE experiment_id = 'threads-8'")
    done = ratchet("replay", "--verify", "--db", own)
    assert (done.code, done.stderr) == (1, "")
    assert "verdicts.threads-8.outcome: stored better, recomputed collapsed" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(": 1 different")
    as_json = ratchet("replay", "--verify", "--json", "--db", own)
    assert as_json.code == 1
    (check,) = [check for check in json.loads(as_json.stdout)["checks"] if check["result"] == "different"]
    assert (check["kind"], check["subject"]) == ("table", "verdicts")


def test_replay_judges_under_another_rule(database: Path) -> None:
    words = ("--what-if", "judge.minimal_effect=0.9", "--what-if", "judge.min_blocks = 3")
    found = told("replay", *words, "--db", database)
    assert found["changed"] == {"judge.minimal_effect": 0.9, "judge.min_blocks": 3}
    would_be = {one["experiment"]: one["would_be"] for one in found["alternatives"]}
    assert would_be["threads-2"] == "no relevant difference"
    done = ratchet("replay", *words, "--db", database)
    assert (done.code, done.stdout.splitlines()[-1]) == (0, found["summary"])
    assert all(f" {name} " in done.stdout for name in would_be)


def test_a_rule_that_misses_a_run_gets_no_verdict(database: Path) -> None:
    done = ratchet("replay", "--what-if", "judge.baseline_runs=5", "--db", database)
    assert "no verdict yet" in done.stdout
    assert "would have gone on: baseline, launch 1, run 4, at c8" in done.stdout


def test_the_report_goes_to_the_screen_or_to_a_file(database: Path, tmp_path: Path) -> None:
    shown = ratchet("report", "--db", database)
    written = ratchet("report", "--db", database, "--output", tmp_path / "report.md")
    assert (shown.code, written.code) == (0, 0)
    assert shown.stdout.startswith("# Tuning report: sim\n")
    assert (tmp_path / "report.md").read_text() == shown.stdout


def test_sqlite_alone_tells_the_story_of_replay(database: Path) -> None:
    log = told("replay", "--db", database)
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    rows = connection.execute("SELECT story FROM v_timeline WHERE kind = 'decision-made' ORDER BY seq").fetchall()
    decisions = connection.execute("SELECT id, kind, what, reason FROM v_decisions").fetchall()
    connection.close()
    assert [row[0] for row in rows] == [f"{e['id']} {e['kind']} {e['what']} because {e['reason']}" for e in log]
    assert decisions == [(e["id"], e["kind"], e["what"], e["reason"]) for e in log]


def test_a_session_is_found_by_its_id_and_a_database_by_its_folder_or_variable(database: Path) -> None:
    session = told("sessions", "--db", database.parent)[0]["session"]
    assert told("status", session, "--db", database)["session"] == session
    done = ratchet("status", "--json", RATCHET_STATE=str(database))
    assert json.loads(done.stdout)["session"] == session


def test_stop_leaves_a_session_that_is_over_alone(database: Path) -> None:
    done = ratchet("stop", "--db", database)
    assert done.code == 0
    assert "is not running: done" in done.stdout
    assert not (database.parent / "inbox").exists()


def test_reading_loads_nothing_heavy(database: Path) -> None:
    """In one fresh interpreter, one command after another: what one loads stays loaded."""
    program = f"""
import sys, run_agent
for name in {READING!r}:
    sys.argv = ["ratchet", *name.split(), "--db", {str(database)!r}]
    try:
        run_agent.main()
    except SystemExit as ended:
        assert not ended.code, (name, ended.code)
    loaded = set(sys.modules) & set({HEAVY!r})
    assert not loaded, (name, loaded)
print("all", len({READING!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"all {len(READING)}"


# --- mistakes ---


@pytest.mark.parametrize("words", [("doctor",), ("start",), ("start", "--dry-run")])
def test_a_missing_session_file_is_a_configuration_mistake(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "there is no session file session.toml" in refused(ratchet(*words, cwd=tmp_path), 2)


@pytest.mark.parametrize("words", [("doctor",), ("doctor", "--json"), ("start",)])
def test_a_wrong_session_file_is_named_with_its_lines(words: tuple[str, ...]) -> None:
    wrong = ROOT / "tests" / "data" / "config" / "wrong_keys.toml"
    done = ratchet(*words, wrong)
    assert "line 6: target.hots: unknown key" in refused(done, 2)
    assert done.stdout == ""


@pytest.mark.parametrize("name", [*READING, *SAYING, "resume", "restore"])
def test_no_database_is_a_configuration_mistake(name: str, tmp_path: Path) -> None:
    assert "there is no session database yet" in refused(ratchet(*name.split(), cwd=tmp_path), 2)


@pytest.mark.parametrize("name", [*READING, *SAYING])
def test_a_database_that_is_not_there_is_not_made(name: str, tmp_path: Path) -> None:
    said = refused(ratchet(*name.split(), "--db", tmp_path / "none.db"), 2)
    assert f"there is no session database at {tmp_path / 'none.db'}" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["resume", "restore"])
def test_nothing_can_be_taken_up_where_there_is_no_session(name: str, tmp_path: Path) -> None:
    refused(ratchet(name, "--db", tmp_path / "none.db"), 2)


def test_an_unknown_session_is_answered_with_those_there_are(database: Path) -> None:
    session = told("sessions", "--db", database)[0]["session"]
    said = refused(ratchet("status", "nosuch", "--db", database), 2)
    assert "there is no session nosuch" in said and session in said


def test_a_session_that_is_over_is_not_resumed(own: Path) -> None:
    assert "is over" in refused(ratchet("resume", "--db", own), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--what-if", "judge.minimal_efect=1"), 'did you mean "judge.minimal_effect"?'),
        (("--what-if", "judge.minimal_effect"), "--what-if judge.minimal_effect names no value"),
        (("--what-if", "judge.minimal_effect=0.1", "--verify"), "--verify and --what-if are two questions"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(words: tuple[str, ...], said: str, database: Path) -> None:
    done = ratchet("replay", *words, "--db", database)
    assert said in refused(done, 2)
    assert done.stdout == ""


@pytest.mark.parametrize("words", [("nosuch",), ("status", "--nosuch"), ("status", "a", "b")])
def test_what_the_command_line_does_not_know_is_a_usage_mistake(words: tuple[str, ...]) -> None:
    done = ratchet(*words)
    assert done.code == 2
    assert "Usage:" in done.stderr and "Traceback" not in done.stderr


# --- databases that must not be touched ---


def newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('ratchet', 'm999_ahead', '2030')"
        )
    connection.close()


def foreign(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("CREATE TABLE somebody (n)")
    connection.close()


def not_sqlite(path: Path) -> None:
    path.write_text("this is a letter, not a database\n" * 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def damaged(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


SPOILED = [
    pytest.param(newer, "was written by a newer version of Ratchet (m999_ahead)", id="newer"),
    pytest.param(foreign, "is not a Ratchet database", id="foreign"),
    pytest.param(not_sqlite, "is damaged or not a database", id="no database"),
    pytest.param(empty, "is not a Ratchet database", id="empty"),
    pytest.param(damaged, "damaged", id="damaged"),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILED)
@pytest.mark.parametrize("name", [*READING, "resume", "restore"])
def test_a_database_that_is_not_ours_to_read_is_refused_and_left_as_it_is(
    name: str, spoil: Any, said: str, own: Path
) -> None:
    spoil(own)
    before = own.read_bytes()
    assert said in refused(ratchet(*name.split(), "--db", own), 3)
    assert own.read_bytes() == before


def test_readers_never_wait_for_the_writer(own: Path) -> None:
    with Store.write(own):
        assert ratchet("status", "--db", own).code == 0


def test_a_second_agent_is_refused_while_one_writes(own: Path) -> None:
    with Store.write(own):
        said = refused(ratchet("resume", "--db", own), 5)
    assert "another agent is writing" in said
    assert f"process {os.getpid()}" in said


def test_ctrl_c_while_connecting_is_an_orderly_stop(tmp_path: Path) -> None:
    """Nobody answers on the port: the agent waits for the SSH server's first word when the signal comes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        session = tmp_path / "session.toml"
        text = (ROOT / "tests" / "data" / "config" / "least.toml").read_text()
        session.write_text(
            re.sub(r'host = ".*"', f'host = "127.0.0.1"\nport = {silent.getsockname()[1]}', text, count=1)
        )
        words = [sys.executable, str(ROOT / "run_agent.py"), "start", str(session), "--db", str(tmp_path / "state.db")]
        with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as agent:
            answering, _ = silent.accept()
            agent.send_signal(signal.SIGINT)
            said = agent.communicate(timeout=60)[1]
            answering.close()
    assert agent.returncode == 4
    assert said.startswith("ratchet: stopped on request")
    assert "Traceback" not in said
