"""What somebody who watches sees: plain lines in a log, a picture on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from agent.live import LINE, LivePicture, PlainLines, decision_table, shortened, story, todo_table
from state import events as ev
from state.models import (
    Arm,
    Decision,
    DecisionKind,
    Failure,
    MeasurementStatus,
    SessionStatus,
    TodoStatus,
    Trial,
)
from state.replay import decision_log
from state.store import Store
from tests.agent.judging import taken
from tests.agent.sessions import finished
from tests.agent.sim import flag, sim_session
from tests.agent.test_loop import Killed


def made(kind: DecisionKind = DecisionKind.KEEP, reason: str = "it is faster") -> ev.DecisionMade:
    return ev.DecisionMade(decision=Decision(id="D1", kind=kind, subject="x", what="two threads", reason=reason))


RUN = taken(Arm.CANDIDATE, 0, "high", 123.46)
VOID = RUN.model_copy(update={"status": MeasurementStatus.INVALID, "reasons": ("noisy host: 1 core", "late")})
READY = Trial(id="T2", experiment_id="x", fingerprint="f", load_s=1.24)
BROKEN = READY.model_copy(update={"failure": Failure(failure_class="oom", cause="out of memory")})

STORIES = [
    pytest.param(made(), "keep        two threads — it is faster", id="decision"),
    pytest.param(
        ev.MeasurementClosed(measurement=RUN), f"run         {RUN.id} x candidate at high: 123.5 tok/s", id="run"
    ),
    pytest.param(
        ev.MeasurementClosed(measurement=VOID),
        f"run         {RUN.id} x candidate at high: 123.5 tok/s (invalid: noisy host: 1 core; late)",
        id="void run",
    ),
    pytest.param(
        ev.MeasurementClosed(measurement=RUN.model_copy(update={"metrics": None})),
        f"run         {RUN.id} x candidate at high: no figures",
        id="run without figures",
    ),
    pytest.param(ev.TrialClosed(trial=READY), "launch      T2 generates after 1.2 s", id="launch"),
    pytest.param(ev.TrialClosed(trial=BROKEN), "launch      T2 failed: out of memory", id="failed launch"),
    pytest.param(ev.Noted(text="odd"), "note        odd", id="note"),
    pytest.param(ev.SessionMoved(status=SessionStatus.DONE, reason="all"), "session     done: all", id="session"),
]


@pytest.mark.parametrize(("event", "line"), STORIES)
def test_a_line_for_each_thing_worth_reading(event: ev.Event, line: str) -> None:
    said: list[str] = []
    PlainLines(said.append, clock=lambda: 0.0).happened(event)
    ((stamp, text),) = [one.split(" ", 1) for one in said]
    assert text == line
    assert [len(part) for part in stamp.split(":")] == [2, 2, 2]


def test_what_only_matters_to_the_store_is_no_line() -> None:
    said: list[str] = []
    lines = PlainLines(said.append)
    lines.happened(ev.EffectIntended(key="k", intent={}))
    lines.phase("measuring")
    lines.tick("measuring", 1.0, 2.0)
    assert said == []
    assert story(ev.AgentAttached(pid=1, version="1")) is None


def test_a_long_line_is_cut_and_says_where_all_of_it_is() -> None:
    whole = story(made(reason="because " * 100))
    assert whole is not None
    assert len(whole[0]) < LINE + 40
    assert whole[0].endswith("… (all of it: replay)")
    assert shortened("x" * LINE) == "x" * LINE


# --- the picture ---


def paper(width: int = 200) -> Console:
    return Console(file=io.StringIO(), record=True, width=width, height=60, force_terminal=True)


def printed(table: Table) -> list[str]:
    console = paper()
    console.print(table)
    return console.export_text().splitlines()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("improved"))


@pytest.fixture
def store(database: Path) -> Iterator[Store]:
    with Store.read(database) as opened:
        yield opened


async def killed_in_its_second_experiment(folder: Path) -> None:
    def die(name: str) -> None:
        if name == "node:apply" and "threads-2" in runner.store.verdicts(runner.session_id):
            raise Killed(name)

    experiments = (flag("--threads", "2"), flag("--poll", "0", tier=2))
    with sim_session(folder, *experiments, fault=die) as runner, pytest.raises(Killed):
        await runner.run()


@pytest.mark.anyio
async def test_the_picture_shows_phase_bar_list_and_what_came_of_it(tmp_path: Path) -> None:
    await killed_in_its_second_experiment(tmp_path)
    console = paper()
    with Store.read(tmp_path / "state.db") as store:
        session = store.latest_session().id
        picture = LivePicture(store, session, console)
        with picture.shown():
            assert picture.live is not None
            picture.tick("measuring --poll 0", 3.0, 4.0)
            picture.live.refresh()
            picture.happened(made())
            picture.happened(ev.EffectIntended(key="k", intent={}))
        effect = store.verdicts(session)["threads-2"].objective
    shown = console.export_text()
    assert effect is not None
    for text in ("Ratchet", f"session {session}", "of 480 min", "measuring --poll 0", "━━━", "▶  --poll 0"):
        assert text in shown
    (row,) = {line for line in shown.splitlines() if "✓  --threads 2" in line}
    assert "better" in row and effect.percent in row
    assert "keep        two threads — it is faster" in shown
    assert "EffectIntended" not in shown


def test_before_it_is_shown_the_picture_takes_news_without_drawing(store: Store) -> None:
    console = paper()
    picture = LivePicture(store, store.latest_session().id, console)
    picture.phase("planning")
    picture.tick("planning", 1.0, 2.0)
    picture.happened(made())
    assert console.export_text() == ""


def test_the_list_has_every_todo_with_its_outcome(store: Store) -> None:
    session = store.latest_session().id
    rows = printed(todo_table(store, session))
    for todo in store.todos(session):
        verdict = store.verdicts(session).get(todo.id)
        outcome = verdict.outcome if verdict is not None else todo.status
        assert any(todo.experiment.title in row and outcome in row for row in rows)


def test_a_list_that_must_be_cut_says_how_much_is_missing(store: Store) -> None:
    session = store.latest_session().id
    rows = printed(todo_table(store, session, limit=3))
    own = [todo for todo in store.todos(session) if todo.experiment.changes]
    titles = [todo.experiment.title for todo in own if todo.status is TodoStatus.DONE]
    assert [row for row in rows if any(title in row for title in titles)] == rows[1:4]
    assert f"… and {len(own) - 3} more" in rows[4]


def test_the_decision_table_has_every_decision(store: Store) -> None:
    log = decision_log(store, store.latest_session().id)
    first_words = [row.split()[0] for row in printed(decision_table(log)) if row.startswith(" D")]
    assert first_words == [entry["id"] for entry in log]


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    what = {"id": "D1", "at": "2026-01-01T00:00:00+00:00", "kind": "block", "evidence": []}
    rows = printed(decision_table([{**what, "what": "template [bold]", "reason": "the log says [/INST] and [0, 1]"}]))
    assert "template [bold]" in rows[1] and "the log says [/INST] and [0, 1]" in rows[1]
