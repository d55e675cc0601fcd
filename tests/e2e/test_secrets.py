"""Canaries in every place that can hold a secret, and whole sessions on real parts after which each is looked for.

The server prints its arguments and its environment whenever it starts or fails. What may hold a canary is named here;
every other file of either side, every word of the command line and every command line of ours must hold none.
"""

from __future__ import annotations

import contextlib
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from state.models import TodoStatus
from tests.e2e.rig import CANARY, FASTER, MODEST, TALKATIVE, Rig, rig
from tests.e2e.test_real_session import REFUSED, candidate_at_work, database
from tests.inbox import inbox

pytestmark = [pytest.mark.real, pytest.mark.slow]

MARK = CANARY[:14].encode()
"""How all canaries begin: a part of one is a leak as well."""
AROUND = {
    "LLAMA_CANARY_TOKEN": f"{CANARY}-own-variable",
    "HF_TOKEN": f"{CANARY}-hub",
    "DATABASE_URL": f"postgres://me:{CANARY}-url@127.0.0.1/x",
}
READING = (
    ("report",),
    ("replay",),
    ("replay", "--json"),
    ("replay", "--verify", "--json"),
    ("replay", "--what-if", "judge.minimal_effect=0.05"),
    ("status",),
    ("status", "--json"),
    ("sessions", "--json"),
)
SAMPLE_S = 0.05


class CommandLines:
    """Everybody's command lines on this rig but the server's own, looked at again and again."""

    def __init__(self, host: Rig) -> None:
        self.host = host
        self.seen: set[bytes] = set()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look)

    def __enter__(self) -> CommandLines:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.is_set():
            for pid in self.host.ours():
                with contextlib.suppress(OSError):
                    self.seen.add(Path(f"/proc/{pid}/cmdline").read_bytes())
            time.sleep(SAMPLE_S)

    @property
    def telling(self) -> list[bytes]:
        """Those with a canary that are not the server."""
        return [line for line in self.seen if MARK in line and b"talkative.py" not in line]


class Lived(NamedTuple):
    """What was seen from outside."""

    host: Rig
    lines: CommandLines
    said: dict[str, str]
    messages: list[dict[str, str]]
    environ: dict[str, str]
    restored: list[str]
    original: list[str]
    needs: int
    word: Path


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Lived]:
    with (
        rig(tmp_path_factory.mktemp("secrets"), demo_model, TALKATIVE) as host,
        inbox(f"me:{CANARY}-notify@") as (url, messages),
    ):
        host.key_file.write_text(f"{CANARY}-client\n")
        host.around_server = AROUND | {"BROKEN": str(host.folder / "broken")}
        host.start_server(*MODEST.split(), "--api-key", f"{CANARY}-key,{CANARY}-client")
        (host.folder / "urls").write_text(f"{url}\n")
        notify = f'\n[notify]\nurls_file = "{host.folder}/urls"\nwhen = "always"\n'
        with CommandLines(host) as lines:
            yield lived_through(host, lines, messages, notify)


def lived_through(host: Rig, lines: CommandLines, messages: list[dict[str, str]], notify: str) -> Lived:
    original, said = host.argv(), {}
    short = {"prompt_tokens": 16, "close_out_blocks": 1}
    session = str(host.write_session(FASTER + REFUSED + notify, **short))
    for words in (("doctor", session), ("doctor", session, "--json"), ("start", "--dry-run", session)):
        told = host.command(*words)
        assert told.process.returncode == 0, told.said
    agent = host.agent("start", session, *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    end = host.command("resume", *database(host))
    assert end.process.returncode == 0, end.said
    environ = host.environ()
    assert host.command("restore", "--original", *database(host)).process.returncode == 0
    restored = host.argv()
    agent = host.agent("start", str(host.write_session(FASTER + notify, **short)), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    (host.folder / "broken").touch()
    needs = agent.wait()
    said["needs"] = agent.said
    for words in READING:
        said[" ".join(words)] = host.command(*words, *database(host)).said
    host.command("report", "--output", str(host.folder / "written.md"), *database(host))
    word = host.root / "NEEDS-HUMAN"
    return Lived(host, lines, said, messages, environ, restored, original, needs, word)


def holders(folder: Path) -> list[Path]:
    """Files with a canary, or with a part of one."""
    return [path for path in folder.rglob("*") if path.is_file() and MARK in path.read_bytes()]


def test_the_sessions_went_through_what_they_should(lived: Lived) -> None:
    """Else nothing is shown by what is missing."""
    with lived.host.store() as store:
        first = store.sessions()[0].id
        todos = {todo.id: todo.status for todo in store.todos(first)}
        failures = [trial.failure for trial in store.trials(first) if trial.failure is not None]
        kinds = {decision["kind"] for decision in store.decisions(first)}
    assert todos["refused"] is TodoStatus.BLOCKED
    assert {"resume", "block", "end", "restore"} <= kinds
    assert {"keep", "revert", "void"} & kinds, "which of them depends on how busy this machine is"
    assert any("«secret:" in failure.tail for failure in failures), "the log did print them"
    assert lived.needs == 6, lived.said["needs"]
    assert "RuntimeError: cannot log in with" in lived.said["needs"]


def test_the_server_had_its_secrets_at_each_launch(lived: Lived) -> None:
    assert {name: lived.environ[name] for name in AROUND} == AROUND
    assert lived.environ["SECRET_CANARY"] == f"{CANARY}-env"
    assert lived.restored == lived.original
    assert f"{CANARY}-key,{CANARY}-client" in lived.restored


def test_no_file_of_the_agents_side_holds_a_secret(lived: Lived) -> None:
    host = lived.host
    operators = {host.key_file, host.folder / "server.log", host.folder / "urls"}
    found = [path for path in holders(host.folder) if host.root not in path.parents and path not in operators]
    assert found == []
    assert host.database in [path for path in host.folder.rglob("*") if path.is_file()]
    assert list(host.database.parent.glob("report-*")), "a report lies beside the database"


def test_on_the_host_only_scripts_that_need_them_and_the_servers_own_output_hold_secrets(lived: Lived) -> None:
    root = lived.host.root
    found = holders(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert {path.name for path in found} == {"secrets.json", "run.sh", "restore.sh", "stdout", "stderr"}
    jobs = {path.parent.name for path in found if path.parent.parent.name == "jobs"}
    assert jobs and all("-T" in name for name in jobs), "launches, never a benchmark or a watcher"


def test_no_command_line_of_ours_holds_a_secret(lived: Lived) -> None:
    assert any(b"stream_client.py" in line for line in lived.lines.seen), "clients were seen"
    assert lived.lines.telling == []


def test_no_word_to_a_person_holds_a_secret(lived: Lived) -> None:
    assert lived.word.read_text().startswith("the known-good configuration does not start any more")
    assert stat.S_IMODE(lived.word.stat().st_mode) == 0o600
    assert len(lived.messages) >= 2
    told: dict[str, Any] = {**lived.said, "word": lived.word.read_text(), "messages": json.dumps(lived.messages)}
    assert [name for name, text in told.items() if MARK.decode() in text] == []
