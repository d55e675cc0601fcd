"""Rows that are kept: in order, found by what they say, and never other than the database has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agent.built_in import sentinels
from agent.evidence import anything_live, costs, known, learned_since, spent, used_by_level
from state import events as ev
from state.models import DecisionKind, Purpose, TodoStatus
from state.rows import Rows
from state.store import Store
from state.tables import EXPERIMENT, FINGERPRINT, IDENTITY, MEASUREMENTS, PROCESS, PURPOSE, STATUS, TODOS, TRIALS
from tests.agent.sim import CONFIG, flag, sim_session


def words() -> Rows[str]:
    """Words, found by their first letter and by their length."""
    return Rows(lambda word: (("first", word[0]), ("length", len(word))))


def test_rows_stand_in_their_order_however_they_come() -> None:
    rows = words()
    for place, word in ((2, "pear"), (1, "fig"), (3, "plum")):
        rows.put(word, place, word)
    assert rows.items == ["fig", "pear", "plum"]
    assert rows.with_label(("first", "p")) == ["pear", "plum"]
    assert rows.first_of(("first", "p")) == 1
    assert rows.first_of(("first", "x")) == 3


def test_a_row_that_is_written_again_changes_its_labels_and_its_place() -> None:
    rows = words()
    rows.put("a", 1, "fig")
    rows.put("b", 2, "pear")
    rows.put("a", 3, "plum")
    assert rows.items == ["pear", "plum"]
    assert rows.with_label(("first", "f")) == []
    assert rows.get("a") == "plum"


def test_writes_are_counted_and_those_of_a_label_can_be_left_out() -> None:
    rows = words()
    rows.put("a", 1, "fig")
    rows.put("b", 2, "pear")
    rows.put("b", 2, "plum")
    assert rows.written() == 3
    assert rows.written(but=("first", "p")) == 1


def test_rows_written_since_come_once_each_as_they_are_now() -> None:
    rows = words()
    rows.put("a", 1, "fig")
    rows.put("b", 2, "pear")
    seen = rows.written()
    assert rows.since(seen) == []
    rows.put("c", 3, "plum")
    rows.put("b", 2, "date")
    rows.put("c", 3, "lime")
    assert rows.since(seen) == ["date", "lime"]
    assert rows.since(0) == ["fig", "date", "lime"]
    assert (rows.count(("first", "p")), rows.count(("length", 4))) == (0, 2)


def everything(store: Store, session: str) -> dict[str, Any]:
    """What a store says of a session, whatever it may be asked."""
    todos, trials = store.todos(session), store.trials(session)
    names = sorted({todo.id for todo in todos})
    return {
        "session": store.session(session),
        "todos": todos,
        "open": store.open_comparison(session),
        "comparisons": {name: store.comparison(session, name) for name in known(store, session).candidates},
        "trials": trials,
        "specs": [store.spec(trial.fingerprint) for trial in trials],
        "by process": [store.trials(session, (PROCESS, trial.process)) for trial in trials],
        "by spec": [store.trials(session, (FINGERPRINT, trial.fingerprint)) for trial in trials],
        "of experiments": [store.trials(session, (EXPERIMENT, name)) for name in names],
        "waiting": store.todos(session, (STATUS, TodoStatus.PENDING)),
        "found": [store.todo(session, name) for name in (*names, "none")],
        "alike": [store.todos(session, (IDENTITY, todo.identity)) for todo in todos],
        "for what": [store.count(session, TODOS, (PURPOSE, purpose)) for purpose in Purpose],
        "spent": [spent(store, session).experiments, spent(store, session).restarts],
        "used": used_by_level(store, session),
        "costs": costs(store, session, CONFIG),
        "known": known(store, session),
        "sentinels": sentinels(store, session),
        "learned": learned_since(store, session, DecisionKind.KEEP),
        "live": anything_live(store, session),
        "measured on": [store.measured_on(session, trial.id) for trial in trials],
        "measurements": store.measurements(session),
        "measured": [store.measurements(session, name) for name in names],
        "before": [store.before(session, name) for name in names],
        "running": store.open_measurement(session),
        "complaints": store.complaints(session),
        "answers": store.answers(session, [trial.id for trial in trials]),
        "verdicts": list(store.verdicts(session).items()),
        "decisions": store.decisions(session),
        "decided": [store.decisions(session, name) for name in names],
        "active": store.active_s(session, until=2e9),
    }


def test_a_store_that_keeps_says_at_every_event_what_the_database_says(tmp_path: Path) -> None:
    """A whole session with keeps, crashes and answers, and a reader that asks anew beside it all the time."""
    differing: list[str] = []
    seen: set[str] = set()

    def compare(point: str) -> None:
        if not point.startswith("wrote:"):
            return
        seen.update(point.removeprefix("wrote:").split("+"))
        with Store.read(runner.store.path) as reader:
            ours, theirs = (everything(store, runner.session_id) for store in (runner.store, reader))
        differing.extend(f"{point}: {name}" for name in ours if ours[name] != theirs[name])

    with sim_session(tmp_path, flag("--threads", "2"), flag("--cache", "q8_0"), fault=compare) as runner:
        assert asyncio.run(runner.run()) == 0
        last = everything(runner.store, runner.session_id)
    assert differing == []
    assert {"trial-closed", "measurement-closed", "verdict-reached", "role-set", "comparison-opened"} <= seen
    assert last["answers"] and last["running"] is None
    assert last["used"] and last["learned"] == frozenset() and last["spent"][0] == 2


def test_what_is_derived_is_computed_again_only_when_a_row_of_its_ground_is_written(tmp_path: Path) -> None:
    with sim_session(tmp_path, flag("--threads", "2")) as runner:
        store, session = runner.store, runner.session_id
        store.append(
            session, ev.TodoAdded(experiment=flag("--poll", "0")), ev.TodoAdded(experiment=flag("--poll", "1"))
        )
        asked: list[int] = []

        def count() -> int:
            asked.append(len(store.todos(session)))
            return asked[-1]

        def of_others() -> int:
            return store.derived(session, "count", (TODOS, TRIALS, MEASUREMENTS), count, but="poll-0")

        assert (of_others(), of_others(), len(asked)) == (2, 2, 1)
        store.append(session, ev.TodoChanged(experiment_id="poll-0", status=TodoStatus.SKIPPED, reason="own"))
        assert (of_others(), len(asked)) == (2, 1)
        store.append(session, ev.TodoChanged(experiment_id="poll-1", status=TodoStatus.SKIPPED, reason="another's"))
        assert (of_others(), len(asked)) == (2, 2)
        skipped = [listed.todo.id for listed in store._table(session, TODOS).with_label((STATUS, TodoStatus.SKIPPED))]
        assert skipped == ["poll-0", "poll-1"]
