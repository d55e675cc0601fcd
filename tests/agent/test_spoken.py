"""A person's words in a running session, and what waits for approval: obeyed once, or said why not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import telling
from agent.config import SessionConfig
from agent.inbox import leave_word, waiting
from agent.report import markdown
from agent.session import Runner
from agent.spoken import obstacle
from agent.status import summary
from agent.todo_list import history, listing
from state.errors import ConfigError
from state.models import Disruption, Experiment, FlagChange, Outcome, Purpose, SessionStatus, Todo, TodoStatus
from state.replay import decision_log
from state.words import AddWord, ApproveWord, DropWord, PriorityWord, Word
from tests.agent.sim import ONE_POINT, flag, sim_session
from tests.agent.test_changes_in_sessions import COMMAND, WORLD
from tests.agent.test_loop import Killed, assert_consistent

CLOCKS = Experiment(
    id="clocks", title="Clocks", hypothesis="h", changes=(COMMAND,), disruption=Disruption.HOST, expected_gain=0.1
)
LIST = (flag("--poll", "0"), flag("--parallel", "4", priority=0.1), flag("--spec", "ngram"), CLOCKS)
ALLOWED: SessionConfig = ONE_POINT.model_copy(
    update={"policy": ONE_POINT.policy.model_copy(update={"max_disruption": Disruption.HOST})}
)
Say = Callable[[Path], object]


def lived(folder: Path, say: Say | None = None, at: str = "node:settle", dies: str = "") -> Runner:
    """A session in which a person speaks when it passes a point for the first time; it may die at another one."""
    spoken: list[str] = []

    def point(name: str) -> None:
        if say is not None and name == at and not spoken:
            spoken.append(name)
            say(folder / "state.db")
        if spoken and dies and name.startswith(dies):
            raise Killed(name)

    with sim_session(folder, *LIST, scenario=WORLD, config=ALLOWED, fault=point) as runner:
        if dies:
            with pytest.raises(Killed):
                asyncio.run(runner.run())
        else:
            assert asyncio.run(runner.run()) == 0
            assert_consistent(runner)
            check(runner)
        return runner


def check(runner: Runner) -> None:
    """Whatever was said: the words are all known, and none waits."""
    assert waiting(runner.store.path, runner.session_id) == []


def person(runner: Runner) -> list[dict[str, Any]]:
    return [entry for entry in decision_log(runner.store, runner.session_id) if entry["kind"] == "person"]


def todo(runner: Runner, name: str) -> Todo:
    (found,) = [one for one in runner.store.todos(runner.session_id) if one.id == name]
    return found


def everything(database: Path) -> None:
    telling.drop(database, None, "spec-ngram", "we tried it by hand")
    telling.reprioritise(database, None, "parallel-4", 1.0, "")
    telling.approve(database, None, "clocks", "the users know")
    said = telling.add(database, None, ["flag:--threads=2"], None, {"title": "Two"}, "a hunch")
    assert said.startswith("add threads-2: Two\n") and said.endswith("picks it up at its next choice")


def reopened(folder: Path, look: Callable[[Runner], None]) -> None:
    with sim_session(folder, *LIST, scenario=WORLD, config=ALLOWED) as runner:
        look(runner)


def test_words_change_the_list_before_the_next_choice(tmp_path: Path) -> None:
    lived(tmp_path, everything)

    def look(runner: Runner) -> None:
        verdicts = runner.store.verdicts(runner.session_id)
        assert [*verdicts][:2] == ["baseline", "parallel-4"]
        assert "spec-ngram" not in verdicts and todo(runner, "spec-ngram").status is TodoStatus.SKIPPED
        assert verdicts["threads-2"].outcome is Outcome.BETTER and "clocks" in verdicts
        assert [entry["what"] for entry in person(runner)] == [
            "drop spec-ngram",
            "priority of parallel-4: 1.00",
            "approve clocks",
            "add threads-2: Two",
        ]
        assert "we tried it by hand" in person(runner)[0]["reason"]
        assert all(entry["evidence"] for entry in person(runner))
        steps = [
            (step["who"], step["status_before"], step["status"])
            for step in history(runner.store, runner.session_id, "clocks")
        ]
        assert steps[:3] == [
            ("built-in", None, "gated"),
            ("person", "gated", "pending"),
            ("agent", "pending", "in_progress"),
        ]
        moved = history(runner.store, runner.session_id, "parallel-4")[1]
        assert (moved["who"], moved["priority_before"], moved["priority"]) == ("person", 0.1, 1.0)
        assert history(runner.store, runner.session_id, "threads-2")[0]["who"] == "person"

    reopened(tmp_path, look)


@pytest.mark.parametrize("dies", ["node:observe", "wrote:word-heard", "node:apply"])
def test_a_word_is_obeyed_once_whatever_dies(dies: str, tmp_path: Path) -> None:
    """Between file and event, between event and removal of the file, and after both."""
    lived(tmp_path, everything, dies=dies)
    lived(tmp_path)

    def look(runner: Runner) -> None:
        assert len(person(runner)) == len(runner.store.words(runner.session_id)) == 4
        assert "threads-2" in runner.store.verdicts(runner.session_id)
        assert not [entry for entry in person(runner) if "cannot be obeyed" in entry["reason"]]

    reopened(tmp_path, look)


def late(database: Path) -> None:
    telling.add(database, None, ["flag:--threads=2"], None, {"title": "Two"}, "a hunch")


@pytest.mark.parametrize("dies", ["finish:proven", "wrote:word-heard"])
def test_what_is_added_after_the_close_out_is_not_tried_by_the_next_agent_either(dies: str, tmp_path: Path) -> None:
    """The final comparison would not be made again, so a keep after it would be confirmed by nothing."""
    lived(tmp_path, late, at="finish:guarded", dies=dies)
    lived(tmp_path)

    def look(runner: Runner) -> None:
        assert "close-out" in runner.store.verdicts(runner.session_id)
        assert "threads-2" not in runner.store.verdicts(runner.session_id)
        assert todo(runner, "threads-2").status is TodoStatus.PENDING
        (said,) = person(runner)
        assert "it is for the next one" in said["reason"]

    reopened(tmp_path, look)


def test_what_nobody_approved_is_not_tried_and_nothing_waits_for_it(tmp_path: Path) -> None:
    lived(tmp_path)

    def look(runner: Runner) -> None:
        assert todo(runner, "clocks").status is TodoStatus.GATED
        assert "close-out" in runner.store.verdicts(runner.session_id)
        assert runner.store.session(runner.session_id).status is SessionStatus.DONE
        assert summary(runner.store, runner.session_id)["waits_for_approval"] == ["clocks"]
        assert "## Waiting for approval" in markdown(runner.store, runner.session_id)
        end = decision_log(runner.store, runner.session_id)[-1]
        assert end["kind"] == "end" and end["reason"].endswith("never approved, so not tried: clocks")

    reopened(tmp_path, look)


def test_a_word_that_comes_too_late_is_written_down(tmp_path: Path) -> None:
    """It was said in time and is heard when its todo is done already, or when the session is ending."""
    words: list[Word] = [
        PriorityWord(id="W1", at=1.0, todo="baseline", priority=0.2),
        DropWord(id="W2", at=2.0, todo="poll-0"),
        DropWord(id="W3", at=3.0, todo="nobody"),
        ApproveWord(id="W4", at=4.0, todo="clocks"),
    ]

    def say(database: Path) -> None:
        (database.parent / "inbox").mkdir()
        (database.parent / "inbox" / f"word-{runner_id(database)}-0-broken.json").write_text("{")
        for word in words:
            leave_word(database, runner_id(database), word)

    lived(tmp_path, say, at="finish:proven")

    def look(runner: Runner) -> None:
        first, second, third, fourth = person(runner)
        assert "baseline is a check that the session makes for itself" in first["reason"]
        assert "cannot be obeyed: poll-0 is done" in second["reason"]
        assert "there is no todo nobody" in third["reason"]
        assert "it is for the next one" in fourth["reason"]
        assert todo(runner, "clocks").status is TodoStatus.PENDING
        assert "clocks" not in runner.store.verdicts(runner.session_id)
        (kept,) = (tmp_path / "inbox").iterdir()
        assert kept.name.startswith("unreadable-") and kept.name.endswith("broken.json")
        assert [text for text in runner.store.notes(runner.session_id, runner.session_id) if "broken.json" in text]

    reopened(tmp_path, look)


def runner_id(database: Path) -> str:
    from state.store import Store  # noqa: PLC0415

    with Store.read(database) as store:
        return store.latest_session().id


def test_what_can_be_seen_at_once_is_said_at_once(tmp_path: Path) -> None:
    lived(
        tmp_path, lambda database: telling.add(database, None, ["flag:--threads=2"], None, {}, ""), dies="node:observe"
    )
    database = tmp_path / "state.db"
    for ask, said in (
        (lambda: telling.drop(database, None, "thread-2", ""), "there is no todo thread-2"),
        (lambda: telling.drop(database, None, "baseline", ""), "a check that the session makes for itself"),
        (lambda: telling.approve(database, None, "poll-0", ""), "needs no approval"),
        (lambda: telling.reprioritise(database, None, "poll-0", 1.5, ""), "1.5 is no priority"),
        (lambda: telling.add(database, None, ["flag:--x=1"], None, {"id": "poll-0"}, ""), "a todo poll-0 already"),
    ):
        with pytest.raises(ConfigError, match=said):
            ask()
    # What was said before and is not heard yet counts.
    assert "threads-2" in telling.drop(database, None, "threads-2", "")
    with pytest.raises(ConfigError, match="threads-2 is skipped"):
        telling.drop(database, None, "threads-2", "")
    assert telling.add(database, None, ["flag:--threads=2"], None, {}, "").startswith("add threads-2-2")


def test_a_session_that_is_over_hears_nothing_more(tmp_path: Path) -> None:
    lived(tmp_path)
    with pytest.raises(ConfigError, match="is over"):
        telling.drop(tmp_path / "state.db", None, "poll-0", "")
    assert not (tmp_path / "inbox").exists()


def test_the_list_stands_in_the_order_of_choice(tmp_path: Path) -> None:
    lived(tmp_path, everything, dies="node:observe")

    def look(runner: Runner) -> None:
        found = listing(runner.store, runner.session_id)
        pending = [one for one in found["todos"] if one["status"] == "pending"]
        assert [one["turn"] for one in pending] == [1, 2, 3]
        assert [one["status"] for one in found["todos"]] == ["pending"] * 3 + ["gated", "done"]
        assert found["waiting"][0] == "drop spec-ngram" and len(found["waiting"]) == 4
        assert pending[0]["cost_min"] > 0 and pending[0]["confidence"] == 0.5

    reopened(tmp_path, look)


def a_todo(status: TodoStatus, **fields: Any) -> Todo:
    base = {"id": "e", "title": "t", "hypothesis": "h", "changes": (FlagChange(name="--a"),)}
    return Todo(experiment=Experiment.model_validate(base | fields), status=status, priority=0.5)


@pytest.mark.parametrize("status", [*TodoStatus])
def test_only_what_still_has_its_turn_can_be_changed(status: TodoStatus) -> None:
    listed = [a_todo(status)]
    said = {"id": "W", "at": 0.0, "todo": "e"}
    free = status in (TodoStatus.PENDING, TodoStatus.GATED)
    assert (obstacle(DropWord.model_validate(said), listed) is None) is free
    assert (obstacle(PriorityWord.model_validate({**said, "priority": 0.2}), listed) is None) is free
    assert (obstacle(ApproveWord.model_validate(said), listed) is None) is (status is TodoStatus.GATED)
    assert obstacle(AddWord(id="W", at=0.0, experiment=listed[0].experiment), listed) is not None
    assert obstacle(AddWord(id="W", at=0.0, experiment=listed[0].experiment), []) is None


def test_what_the_session_makes_for_itself_is_left_alone() -> None:
    listed = [a_todo(TodoStatus.PENDING, purpose=Purpose.SENTINEL)]
    said = obstacle(DropWord(id="W", at=0.0, todo="e"), listed)
    assert said is not None and "for itself" in said


def test_words_are_heard_in_the_order_in_which_they_were_said(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        leave_word(tmp_path / "state.db", "s", DropWord(id=f"W{number}", at=float(number), todo="e"))
    assert [word.id for word in waiting(tmp_path / "state.db", "s")] == ["W1", "W2", "W3"]
    assert waiting(tmp_path / "state.db", "other") == []
    assert not [name for name in os.listdir(tmp_path / "inbox") if name.startswith(".")]
