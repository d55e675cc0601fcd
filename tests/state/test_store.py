"""The store keeps its word: one transaction, append-only, folds to its tables, refuses what it does not know."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from state import events as ev
from state.errors import ConfigError, StoreError, TargetLocked
from state.models import Adoption, Decision, DecisionKind, Experiment, LaunchSpec, ProcessId, Role, Trial
from state.projection import TABLES, fold
from state.store import Store, steady_clock


def a_spec(**flags: str) -> LaunchSpec:
    values = {f"--{name.replace('_', '-')}": (value,) for name, value in flags.items()}
    argv = ("server", *(token for name, (value,) in values.items() for token in (name, value)))
    return LaunchSpec(engine="llamacpp", program=("server",), flags=values, argv=argv, cwd="/", user="u")


def opened() -> ev.SessionOpened:
    process = ProcessId(pid=1, start_ticks=2, boot_id="b")
    return ev.SessionOpened(
        target="t",
        config={},
        config_revision="c",
        workload_revision="w",
        adoption=Adoption(process=process, spec=a_spec(threads="1")),
    )


def fill(store: Store) -> None:
    spec = a_spec(threads="2")
    trial = Trial(id="T1", experiment_id="e", fingerprint=spec.fingerprint)
    decision = Decision(id="D1", kind=DecisionKind.CHOOSE, subject="e", what="w", reason="r", evidence=("M1",))
    store.append("s", opened(), ev.SpecSeen(fingerprint=spec.fingerprint, spec=spec))
    store.append("s", ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint="f0", reason="found"))
    store.append("s", ev.TodoAdded(experiment=Experiment(id="e", title="t", hypothesis="h")))
    store.append("s", ev.ComparisonOpened(experiment_id="e", parent="f0", candidate=spec.fingerprint))
    store.append("s", ev.TrialOpened(trial=trial), ev.DecisionMade(decision=decision))
    store.append("s", ev.EffectIntended(key="s/T1/launch", intent={"a": 1}))
    store.append("s", ev.EffectClosed(key="s/T1/launch", by="act", outcome={"b": 2}))
    store.append("s", ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint="f1", reason="kept"))


def dump(db: object, table: str) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = db.execute(f"SELECT * FROM {table}").fetchall()  # type: ignore[attr-defined]
    return sorted(rows, key=str)


def test_the_tables_are_the_fold_of_the_events(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as store:
        fill(store)
        again = fold(store.db)
        filled = 0
        for table in TABLES:
            assert dump(again, table) == dump(store.db, table)
            filled += len(dump(store.db, table))
        assert filled == 7
        again.close()


def test_a_keep_opens_a_new_epoch_and_the_first_known_good_does_not(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as store:
        fill(store)
        assert store.session("s").epoch == 1
        assert store.open_comparison("s").epoch == 0  # type: ignore[union-attr]


def test_an_append_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as store:
        fill(store)
        before = store.db.execute("SELECT count(*) FROM events").fetchone()
        twice = ev.TodoAdded(experiment=Experiment(id="e", title="again", hypothesis="same id"))
        with pytest.raises(StoreError):
            store.append("s", ev.Noted(text="first"), twice)
        assert store.db.execute("SELECT count(*) FROM events").fetchone() == before


@pytest.mark.parametrize("sql", ["UPDATE events SET kind = 'x'", "DELETE FROM events"])
def test_events_cannot_be_changed(tmp_path: Path, sql: str) -> None:
    with Store.write(tmp_path / "state.db") as store:
        fill(store)
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store.db.execute(sql)


def test_views_answer_in_plain_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with Store.write(path) as store:
        fill(store)
    plain = sqlite3.connect(path)
    views = ("v_timeline", "v_decisions", "v_experiments", "v_measurements", "v_findings", "v_downtime")
    rows = {view: plain.execute(f"SELECT * FROM {view}").fetchall() for view in views}
    plain.close()
    assert [row[3] for row in rows["v_decisions"]] == ["choose"]
    assert any("known-good is now f1" in str(row) for row in rows["v_timeline"])
    assert len(rows["v_experiments"]) == 1 and len(rows["v_downtime"]) == 1


def _hold(path: str, ready: str) -> None:
    with Store.write(Path(path)):
        Path(ready).touch()
        signal.pause()


def test_one_writer_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    path, ready = tmp_path / "state.db", tmp_path / "ready"
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(str(path), str(ready)))
    holder.start()
    while not ready.exists():
        holder.join(0.02)
    with pytest.raises(TargetLocked, match="another agent") as refused, Store.write(path):
        pass
    assert str(holder.pid) in str(refused.value)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with Store.write(path) as store:
        assert store.sessions() == []


def test_a_reader_sees_the_writers_last_commit(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as writer:
        fill(writer)
        with Store.read(tmp_path / "state.db") as reader:
            assert reader.session("s").target == "t"
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                reader.db.execute("DELETE FROM todos")


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough to be read as one" * 40])
def test_foreign_and_empty_files_are_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with pytest.raises(StoreError), Store.write(path):
        pass
    assert path.read_bytes() == content


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with Store.write(path) as store:
        store.db.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('ratchet','m999','')"
        )
    with pytest.raises(StoreError, match="newer version"), Store.write(path):
        pass


def test_a_damaged_page_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with Store.write(path) as store:
        fill(store)
    shutil.copy(path, tmp_path / "copy.db")
    with (tmp_path / "copy.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096 * 3)
    with pytest.raises(StoreError, match="damaged"), Store.write(tmp_path / "copy.db"):
        pass


def test_a_missing_database_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `start` first"), Store.read(tmp_path / "none.db"):
        pass


def test_time_without_an_agent_is_not_active_time(tmp_path: Path) -> None:
    now = [100.0]
    with Store.write(tmp_path / "state.db", clock=lambda: now[0]) as store:
        store.append("s", opened(), ev.AgentAttached(pid=1, version="1"))
        now[0] = 110.0
        store.append("s", ev.Noted(text="died after this"))
        now[0] = 500.0
        store.append("s", ev.AgentAttached(pid=2, version="1"))
        now[0] = 505.0
        assert store.active_s("s") == pytest.approx(15.0)


def test_a_jump_of_the_machines_clock_moves_no_time_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: before + 36_000.0)
    assert 0 <= clock() - before < 3600
