"""`Journal.once` does a thing once, whatever died where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from state.journal import Journal
from state.store import Store
from tests.state.test_store import opened

pytestmark = pytest.mark.anyio


class World:
    """Counts what was done to it and remembers it, as a host would."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}

    async def act(self) -> dict[str, object]:
        self.done["x"] = self.done.get("x", 0) + 1
        return {"pid": 7}

    async def observe(self) -> dict[str, object] | None:
        return {"pid": 7} if "x" in self.done else None


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.write(tmp_path / "state.db") as opened_store:
        opened_store.append("s", opened())
        yield opened_store


async def test_a_closed_effect_is_not_done_again(store: Store) -> None:
    world = World()
    for _ in range(3):
        assert await Journal(store, "s").once("k", {}, world.act, world.observe) == {"pid": 7}
    assert world.done == {"x": 1}


@pytest.mark.parametrize("point", ["before-intent", "after-intent", "after-act", "after-outcome"])
async def test_dying_anywhere_and_coming_back_does_it_once(store: Store, point: str) -> None:
    world = World()

    def die(name: str) -> None:
        if name == f"k:{point}":
            raise Killed

    with pytest.raises(Killed):
        await Journal(store, "s", die).once("k", {"why": "test"}, world.act, world.observe)
    assert await Journal(store, "s").once("k", {"why": "test"}, world.act, world.observe) == {"pid": 7}
    assert world.done == {"x": 1}
    effect = store.effect("s/k")
    assert effect is not None and effect.outcome == {"pid": 7}


async def test_the_journal_says_whether_it_acted_or_observed(store: Store) -> None:
    world = World()
    await world.act()

    def die(name: str) -> None:
        if name.endswith("after-intent"):
            raise Killed

    with pytest.raises(Killed):
        await Journal(store, "s", die).once("k", {}, world.act, world.observe)
    await Journal(store, "s").once("k", {}, world.act, world.observe)
    assert store.db.execute("SELECT closed_by FROM effects").fetchone()[0] == "observe"
    assert world.done == {"x": 1}


async def test_an_effect_that_nobody_wants_any_more_is_closed_as_such(store: Store) -> None:
    world = World()

    def die(name: str) -> None:
        if name.endswith("after-intent"):
            raise Killed

    with pytest.raises(Killed):
        await Journal(store, "s", die).once("k", {}, world.act, world.observe)
    journal = Journal(store, "s")
    store.append("s", *journal.abandoned("k", "another one was wanted"))
    effect = store.effect("s/k")
    assert effect is not None and effect.outcome == {"abandoned": "another one was wanted"}
    assert store.db.execute("SELECT closed_by FROM effects").fetchone()[0] == "abandon"
    assert journal.abandoned("k", "again") == journal.abandoned("never begun", "x") == []
    assert world.done == {}
