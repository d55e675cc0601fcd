"""What is said to a language model is stored like everything else: events, a table that is their fold, two views."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlite_utils import Database

from state import events as ev
from state.exchanges import Ask, Exchange, Message, Reply, Silence
from state.migrations import migrations
from state.projection import TABLES, fold
from state.store import Store
from tests.state.test_store import dump, fill


def ask(number: int, words: str = "hello") -> Ask:
    messages = (Message(role="user", content=words),)
    return Ask(
        id=f"X{number}", round=1, model="m", prompt="planner 1", form="schema", messages=messages, answer_tokens=10,
        reserved_tokens=50, reserved_cost=0.5,
    )  # fmt: skip


ANSWER = Reply(text='{"reason": "ünïcode 🦙"}', finish="stop", prompt_tokens=3, output_tokens=4, tokens=7, seconds=1.25)


def test_an_exchange_is_open_until_its_reply_is_written_and_ids_count_on(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as store:
        fill(store)
        for number in range(1, 12):
            assert store.next_id("exchanges", "X") == f"X{number}"
            store.append("s", ev.ExchangeOpened(ask=ask(number)))
        store.append("s", ev.ExchangeClosed(exchange_id="X2", reply=ANSWER))
        found = store.exchanges("s")
        assert [exchange.id for exchange in found] == [f"X{number}" for number in range(1, 12)]
        assert found[:2] == [Exchange(ask=ask(1)), Exchange(ask=ask(2), reply=ANSWER)]
        assert store.exchanges("another") == []


def test_the_table_is_the_fold_and_the_views_tell(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as store:
        fill(store)
        store.append("s", ev.ExchangeOpened(ask=ask(1)), ev.ExchangeClosed(exchange_id="X1", reply=ANSWER))
        store.append("s", ev.ExchangeOpened(ask=ask(2)))
        silent = Reply(silence=Silence.TIMEOUT, detail="nothing within 3 s", tokens=50)
        store.append("s", ev.ExchangeClosed(exchange_id="X2", reply=silent))
        again = fold(store.db)
        assert [dump(again, table) for table in TABLES] == [dump(store.db, table) for table in TABLES]
        again.close()
        told = [row["story"] for row in store.timeline("s") if row["kind"].startswith("exchange")]
        assert told == ["X1 asks m", "X1 answered, 7 tokens", "X2 asks m", "X2 no answer in time"]
        assert any("known-good is now f1" in row["story"] for row in store.timeline("s"))
        answers = [(row["id"], row["silence"], row["answer"]) for row in store.db.query("SELECT * FROM v_exchanges")]
        assert answers == [("X1", None, ANSWER.text), ("X2", "no answer in time", "")]


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A database of the schema that knew no language models."""
    path = tmp_path / "state.db"
    connection = sqlite3.connect(path, isolation_level=None)
    migrations.apply(Database(connection), stop_before="m004_exchanges")
    connection.execute("PRAGMA journal_mode = WAL")
    fill(Store(Database(connection), path, lambda: 1.0))
    connection.close()
    return path


def test_a_database_of_an_older_schema_is_read_without_them_and_brought_forward(older: Path) -> None:
    with Store.read(older) as store:
        assert store.exchanges("s") == []
        assert store.rows("exchanges", "s") == {}
    with Store.write(older) as store:
        store.append("s", ev.ExchangeOpened(ask=ask(1)))
        assert [exchange.id for exchange in store.exchanges("s")] == ["X1"]
        assert store.timeline("s")[-1]["story"] == "X1 asks m"
