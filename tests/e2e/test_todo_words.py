"""A session in one process, a person at the command line in others; the session's process is really killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.faults import die
from agent.todo_list import history
from agent.verify import verify
from state.errors import RatchetError
from state.models import Disruption, Experiment, TodoStatus
from tests.agent.sim import ONE_POINT, flag, sim_session
from tests.agent.test_changes_in_sessions import COMMAND, WORLD
from tests.e2e.rig import FASTER, MODEST, rig

PROJECT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
"""After which something hangs; no test asserts a time."""
CLOCKS = Experiment(id="clocks", title="Clocks", hypothesis="h", changes=(COMMAND,), disruption=Disruption.HOST)
LIST = (flag("--poll", "0"), flag("--parallel", "4", priority=0.1), flag("--spec", "ngram"), CLOCKS)
ALLOWED = ONE_POINT.model_copy(
    update={"policy": ONE_POINT.policy.model_copy(update={"max_disruption": Disruption.HOST})}
)


def session(folder: Path, stops_at: str, kills_at: str = "") -> int:
    """A session in a process of its own, which waits at one point until the file `go` is there; its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with sim_session(
                folder, *LIST, scenario=WORLD, config=ALLOWED, fault=_point(folder, stops_at, kills_at)
            ) as r:
                code = asyncio.run(r.run())
        except RatchetError as error:
            (folder / "said").write_text(str(error))
            code = error.exit_code
        finally:
            os._exit(code)
    return pid


def _point(folder: Path, stops_at: str, kills_at: str) -> Callable[[str], None]:
    def point(name: str) -> None:
        if name == stops_at and not (folder / "go").exists():
            (folder / "there").touch()
            until(lambda: (folder / "go").exists())
        if kills_at and name.startswith(kills_at) and (folder / "go").exists():
            die()

    return point


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ratchet(folder: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, str(PROJECT / "run_agent.py"), *words, "--db", str(folder / "state.db")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "COLUMNS": "240"}
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def say_everything(folder: Path) -> None:
    assert "at its next choice" in ratchet(folder, "todo", "drop", "spec-ngram", "--reason", "tried by hand")
    ratchet(folder, "todo", "priority", "parallel-4", "1.0")
    ratchet(folder, "todo", "add", "--change", "flag:--threads=2", "--title", "Two threads")
    ratchet(folder, "approve", "clocks", "--reason", "the users know")
    assert "todos here: " in ratchet(folder, "todo", "drop", "nobody", code=2)
    assert "is no change" in ratchet(folder, "todo", "add", "--change", "threads=2", code=2)


def rows(folder: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder / 'state.db'}?mode=ro", uri=True)) as database:
        return database.execute(sql).fetchall()


@pytest.mark.parametrize("kills_at", ["", "node:observe", "wrote:word-heard"])
def test_words_from_another_process_are_obeyed_once(kills_at: str, tmp_path: Path) -> None:
    """Killed with the words still in the inbox, or between the first one's event and the removal of its file."""
    pid = session(tmp_path, "node:settle", kills_at)
    until(lambda: (tmp_path / "there").exists())
    say_everything(tmp_path)
    listed = json.loads(ratchet(tmp_path, "todo", "list", "--json"))
    assert [word.split()[0] for word in listed["waiting"]] == ["drop", "priority", "add", "approve"]
    (tmp_path / "go").touch()
    if kills_at:
        assert ended(pid) == -signal.SIGKILL
        assert len(list((tmp_path / "inbox").glob("word-*"))) == 4
        pid = session(tmp_path, "node:settle")
    assert ended(pid) == 0, (tmp_path / "said").read_text()
    assert list((tmp_path / "inbox").glob("word-*")) == []
    said = rows(tmp_path, "SELECT what FROM v_decisions WHERE kind = 'person'")
    assert [what.split()[0] for (what,) in said] == ["drop", "priority", "add", "approve"]
    judged = [name for (name,) in rows(tmp_path, "SELECT experiment_id FROM verdicts ORDER BY at")]
    assert judged[:2] == ["baseline", "parallel-4"] and "spec-ngram" not in judged
    assert {"threads-2", "clocks"} < {*judged}
    assert "person" in ratchet(tmp_path, "todo", "show", "clocks")
    assert "tried by hand" in ratchet(tmp_path, "todo", "list")


REFUSED = """
[[experiments]]
id = "refused"
title = "Values in 8 bits without flash attention"
hypothesis = "the server refuses to start like this"
changes = [{ kind = "flag", name = "--cache-type-v", value = "q8_0" }]
"""
WAITS = """
[policy]
gate = ["waits"]

[[experiments]]
id = "waits"
title = "One thread"
hypothesis = "nobody approves it"
changes = [{ kind = "flag", name = "--threads-batch", value = "1" }]
"""


@pytest.mark.real
@pytest.mark.slow
def test_a_second_real_night_goes_on_with_the_list_of_the_first(tmp_path: Path, demo_model: Path) -> None:
    with rig(tmp_path, demo_model) as host:
        host.start_server(*MODEST.split())
        session, database = str(host.write_session(FASTER + REFUSED + WAITS)), ("--db", str(host.database))
        assert host.command("start", session, *database).process.returncode == 0
        second = host.command("start", session, *database, "--continue-from", "latest")
        assert second.process.returncode == 0, second.said
        with host.store() as store:
            before, now = store.sessions()
            (carry,) = [one for one in store.decisions(now.id) if one["kind"] == "carry"]
            assert carry["subject"] == before.id and "1 blocked" in carry["reason"]
            listed = {todo.id: todo.status for todo in store.todos(now.id)}
            assert (listed["refused"], listed["waits"]) == (TodoStatus.BLOCKED, TodoStatus.GATED)
            tried = {trial.experiment_id for trial in store.trials(now.id)}
            assert not {"refused", "waits"} & tried
            assert {one.statement for one in store.findings(before.id)} <= {f.statement for f in store.findings(now.id)}
            assert verify(store, now.id).clean
            told = [(step["session_id"], step["who"]) for step in history(store, now.id, "refused")]
            assert told[0] == (before.id, "person") and told[-1] == (now.id, "carry-over")
