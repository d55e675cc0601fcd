"""The documentation is true as far as a program can tell: links, commands, SQL, session files and lists of names."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import anyio
import pytest
import typer

import run_agent
from agent.config import SessionConfig, load
from state import errors
from state.events import EVENT
from state.models import DecisionKind, MeasurementStatus, Outcome, SessionStatus, TodoStatus, TrialStatus
from state.projection import TABLES
from tests.agent.sim import flag, sim_session

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
PAGES = sorted([*PROJECT.glob("*.md"), *DOCS.rglob("*.md")])
REFERENCE = DOCS / "reference"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LONGEST_DECISION = 40


def blocks(language: str) -> list[tuple[str, str]]:
    """All fenced blocks of a language, each with the page that it stands on."""
    return [(page.name, text) for page in PAGES for kind, text in FENCE.findall(page.read_text()) if kind == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_has_help_and_stands_in_the_reference() -> None:
    text = (REFERENCE / "cli.md").read_text()
    for name, command in vars(typer.main.get_command(run_agent.app))["commands"].items():
        assert command.help
        assert f"## {name}\n" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(PROJECT), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_pages_hold_no_paths_of_a_machine(page: Path) -> None:
    assert re.findall(r"(?:/home|/root|/tmp|/work)/\S+", page.read_text()) == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), [PROJECT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(prose(page)) if "://" not in link]
        todo += [(page.parent / link).resolve() for link in links if link.endswith(".md")]
    assert set(PAGES) - reached == set()


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(text for _, text in blocks("sh"))
    inline = "\n".join(re.findall(r"`[^`\n]+`", "\n".join(map(prose, PAGES))))
    named = set(re.findall(r"\bmake ([a-z-]+)", shell + "\n" + inline))
    assert {"install", "demo", "test"} <= named
    assert named <= targets


def test_ratchet_commands_exist() -> None:
    commands = vars(typer.main.get_command(run_agent.app))["commands"]
    shell = "\n".join(text for _, text in blocks("sh"))
    inline = "\n".join(re.findall(r"`[^`\n]+`", "\n".join(map(prose, PAGES))))
    named = set(re.findall(r"\bratchet ([a-z]+)", shell + "\n" + inline))
    assert {"doctor", "start", "resume", "restore"} <= named
    assert named <= set(commands)


def test_session_files_in_the_docs_load(tmp_path: Path) -> None:
    examples = blocks("toml")
    whole = [text for _, text in examples if "[target]" in text]
    parts = [text for _, text in examples if "[target]" not in text]
    assert whole and parts
    for number, text in enumerate([*whole, *(whole[0] + part for part in parts)]):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        assert load(path).target.name == tomllib.loads(text)["target"]["name"]


@pytest.mark.anyio
async def test_sql_in_the_docs_runs_on_a_real_session(tmp_path: Path) -> None:
    with sim_session(tmp_path) as runner:
        await runner.run()
    database = sqlite3.connect(f"file:{tmp_path / 'state.db'}?mode=ro", uri=True)
    here = "\n".join(text for _, text in blocks("sql")).replace("'prompts'", "'c8'")
    queries = [statement for statement in here.split(";") if statement.strip()]
    unanswered = [statement for statement in queries if not database.execute(statement).fetchall()]
    database.close()
    assert len(queries) >= 6
    # Nothing was void and nothing is open in a session that ran undisturbed.
    assert [one for one in unanswered if "<> 'valid'" not in one and "outcome IS NULL" not in one] == []


@pytest.fixture(scope="module")
def database_page() -> str:
    return (REFERENCE / "database.md").read_text()


@pytest.mark.anyio
async def test_every_table_and_view_stands_in_the_reference_with_its_columns(
    tmp_path: Path, database_page: str
) -> None:
    with sim_session(tmp_path):
        pass
    database = sqlite3.connect(tmp_path / "state.db")
    names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'view'")]
    for name in (*TABLES, *names):
        columns = ", ".join(row[1] for row in database.execute(f"PRAGMA table_info({name})"))
        (row,) = [line for line in database_page.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"`{columns}`" in row
    database.close()
    assert len(names) >= 6


def test_every_kind_of_event_and_decision_stands_in_the_reference(database_page: str) -> None:
    mapping = EVENT.json_schema()["discriminator"]["mapping"]
    words = [*mapping, *DecisionKind, *Outcome, *SessionStatus, *TodoStatus, *TrialStatus, *MeasurementStatus]
    assert [str(word) for word in words if f"`{word}`" not in database_page] == []


def test_every_error_and_exit_code_stands_in_the_reference() -> None:
    page = (REFERENCE / "exit-codes.md").read_text()
    readme = (PROJECT / "README.md").read_text()
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.RatchetError):
            rows = [line for line in page.splitlines() if f"`{name}`" in line]
            assert rows, name
            assert re.search(rf"^\| {error.exit_code} \|", page, re.MULTILINE), name
            assert re.search(rf"^\| {error.exit_code} \|", readme, re.MULTILINE), name
            if rows[0].startswith("|"):
                assert rows[0].startswith(f"| {error.exit_code} |"), name


def test_every_section_of_the_session_file_stands_in_the_reference() -> None:
    page = (REFERENCE / "session-file.md").read_text()
    for name in set(SessionConfig.model_fields) - {"seed"}:
        assert f"`[{name}]`" in page or f"`[[{name}]]`" in page


def test_decisions_are_short_and_numbered_without_a_gap() -> None:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:04d}" for number in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text()
        assert len(text.splitlines()) <= LONGEST_DECISION, page.name
        assert [line for line in text.splitlines() if line.startswith("## ")] == [
            "## Context",
            "## Decision",
            "## Consequence",
        ], page.name


@pytest.mark.anyio
async def test_the_picture_is_drawn_from_a_database(tmp_path: Path) -> None:
    with sim_session(tmp_path, flag("--threads", "2")) as runner:
        await runner.run()
    image = tmp_path / "picture.svg"
    command = [sys.executable, str(DOCS / "picture.py"), str(tmp_path / "state.db"), "--output", str(image)]
    await anyio.run_process(command)
    drawn = image.read_text()
    assert drawn.startswith("<svg")
    assert "--threads&#160;2" in drawn
    assert "@font-face" not in drawn


def test_tests_that_the_docs_name_exist() -> None:
    named = {found for page in PAGES for found in re.findall(r"`(tests/\S+\.py)::(\w+)`", page.read_text())}
    assert named
    missing = [
        (path, name) for path, name in named if not re.search(rf"\b(def|class) {name}\b", (PROJECT / path).read_text())
    ]
    assert missing == []
