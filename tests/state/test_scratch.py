"""Stored events played again: a scratch store is at each moment what the real one was, which is left alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from state import events as ev
from state.differences import Difference, changed_rows, differences
from state.projection import TABLES
from state.scratch import Scratch
from state.store import Store
from tests.state.test_store import dump, fill


def test_each_event_leaves_what_it_left_then(tmp_path: Path) -> None:
    now = 100.0
    with Store.write(tmp_path / "state.db", clock=lambda: now) as store, Scratch(store.path) as scratch:
        fill(store)
        now = 160.0
        store.append("s", ev.AgentAttached(pid=1, version="1"))
        before = dump(store.db, "events")
        for stored in store.events("s"):
            scratch.put(stored)
            assert scratch.store.clock() == stored.at
        assert [changed_rows(store, scratch.store, table, "s") for table in TABLES] == [[]] * len(TABLES)
        assert scratch.store.active_s("s") == store.active_s("s") == 0.0
        assert dump(scratch.store.db, "events") == before == dump(store.db, "events")


def test_another_event_can_stand_in_for_a_stored_one(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as store, Scratch(store.path) as scratch:
        fill(store)
        for stored in store.events("s"):
            mine = stored.event
            if isinstance(mine, ev.SessionOpened):
                mine = mine.model_copy(update={"target": "other"})
            scratch.put(stored, mine)
        (found,) = changed_rows(store, scratch.store, "sessions", "s")
        assert found == Difference(where="sessions.s.target", stored="t", recomputed="other")
        assert str(found) == "sessions.s.target: stored t, recomputed other"


def test_a_whole_log_lacks_nothing_and_a_gap_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with Store.write(path) as store:
        fill(store)
        assert store.missing_events() == []
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TRIGGER events_are_never_deleted")
        connection.execute("DELETE FROM events WHERE seq IN (1, 4, 5)")
    with Store.read(path) as store:
        last = store.db.execute("SELECT max(seq) FROM events").fetchone()[0]
        assert store.missing_events() == [1, 4]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM events WHERE seq = ?", [last])
    with Store.read(path) as store:
        assert store.missing_events() == [1, 4, last]


def test_a_snapshot_does_not_see_what_is_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with Store.write(path) as store, Store.read(path) as reader:
        fill(store)
        with reader.snapshot():
            before = len(reader.events("s"))
            store.append("s", ev.Noted(text="later"))
            assert len(reader.events("s")) == before
        assert len(reader.events("s")) == before + 1


def test_only_floating_point_numbers_are_tolerated_and_only_where_asked() -> None:
    assert differences({"a": 1.0, "b": [1.0]}, {"a": 1.0 + 1e-12, "b": [1.0]}, tolerant=True) == []
    assert len(differences({"a": 1.0}, {"a": 1.0 + 1e-12})) == 1
    assert len(differences({"a": 1.0}, {"a": 1.0001}, tolerant=True)) == 1
    assert len(differences({"a": 1}, {"a": 2}, tolerant=True)) == 1
    (lost,) = differences({"a": {"b": 1}}, {"a": {"b": 1, "c": None}})
    assert (lost.where, lost.stored, lost.recomputed) == ("a.c", "absent", None)
