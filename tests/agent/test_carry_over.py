"""What comes over to the next session on the same target, rule by rule, and two nights in a row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.carry_over import Earlier, Ground, carried_over
from agent.continuing import session_to_continue, take_over
from agent.decisions import Ids
from agent.evidence import known as known_of
from agent.evidence import spent
from agent.identity import identity
from agent.known import Known
from agent.progress import Silent
from agent.relatives import all_lost
from agent.session import Runner, new_session_id, open_session
from agent.todo_list import history
from state import events as ev
from state.errors import ConfigError
from state.models import (
    Adoption,
    DecisionKind,
    Experiment,
    Finding,
    FlagChange,
    LaunchSpec,
    Outcome,
    Policy,
    ProcessId,
    Purpose,
    Role,
    Todo,
    TodoStatus,
    Verdict,
    Who,
)
from state.store import Store
from tests.agent.sim import ONE_POINT, SCENARIO, Listed, flag, sim_session
from tests.agent.test_loop import assert_consistent
from tools.simulated import SimulatedTarget


def spec(**flags: str) -> LaunchSpec:
    named = {f"--{name}": (value,) for name, value in flags.items()}
    return LaunchSpec(engine="llamacpp", program=("p",), flags=named, argv=("p",), cwd="/", user="u")


def adoption(of: LaunchSpec, **fields: Any) -> Adoption:
    process = ProcessId(pid=1, start_ticks=1, boot_id="b")
    return Adoption.model_validate({"process": process, "spec": of, "engine_version": "1", "hardware": "box"} | fields)


FOUND = spec(threads="1")
KEPT = spec(threads="2")


def experiment(name: str, **fields: Any) -> Experiment:
    flag_name, _, value = name.partition("-")
    changes = (FlagChange(name=f"--{flag_name}", value=value),)
    base = {"id": name, "title": name, "hypothesis": "h", "changes": changes, "tags": (flag_name,)}
    return Experiment.model_validate(base | fields)


def would_be(parent: LaunchSpec, changes: Any) -> str:
    flags = {**parent.flags, **{change.name: (change.value,) for change in changes}}
    return parent.model_copy(update={"flags": flags}).fingerprint


def todo(name: str, status: TodoStatus, parent: LaunchSpec | None = None, **fields: Any) -> Todo:
    """A todo that was tried on `parent`, or whose turn never came."""
    made = experiment(name, **fields)
    tried = "" if parent is None else identity(would_be(parent, made.changes), "w", adoption(parent))
    return Todo(experiment=made, status=status, priority=0.3, reason="its reason", identity=tried)


def carried(
    *todos: Todo,
    now: Adoption | None = None,
    left: LaunchSpec = FOUND,
    policy: dict[str, Any] | None = None,
    own: tuple[Experiment, ...] = (),
    movers: dict[str, tuple[tuple[Who, TodoStatus], ...]] | None = None,
    method: str = "w",
    lost: dict[str, tuple[str, ...]] | None = None,
    findings: tuple[Finding, ...] = (),
    **verdicts: Outcome,
) -> list[ev.Event]:
    said = {name.replace("_", "-"): outcome for name, outcome in verdicts.items()}
    earlier = Earlier(
        id="S1",
        known=Known(
            todos=todos,
            verdicts={name: Verdict(experiment_id=name, outcome=word, reason="r") for name, word in said.items()},
            trials=(),
            specs={},
            candidates={},
            complaints=(),
            lost_before=lost or {},
        ),
        findings=findings,
        workload_revision="w",
        adoption=adoption(FOUND),
        known_good=left.fingerprint,
        movers=movers or {},
    )
    here = now or adoption(left)
    ground = Ground(
        workload_revision=method,
        adoption=here,
        policy=Policy.model_validate(policy or {}),
        own={one.id: one for one in own},
        would_be=lambda changes: would_be(here.spec, changes),
    )
    return carried_over(earlier, ground, Ids(decision="D2", finding="F7", scope=""))


def listed(happened: list[ev.Event]) -> dict[str, tuple[TodoStatus, str]]:
    return {e.experiment.id: (e.status, e.reason) for e in happened if isinstance(e, ev.TodoAdded)}


def only(happened: list[ev.Event]) -> tuple[TodoStatus, str]:
    (found,) = listed(happened).values()
    return found


def decision(happened: list[ev.Event]) -> str:
    (made,) = [e.decision for e in happened if isinstance(e, ev.DecisionMade)]
    assert (made.id, made.kind, made.subject) == ("D2", DecisionKind.CARRY, "S1")
    return made.reason


@pytest.mark.parametrize("status", [TodoStatus.PENDING, TodoStatus.IN_PROGRESS, TodoStatus.SKIPPED])
def test_what_had_no_turn_or_was_not_settled_is_pending(status: TodoStatus) -> None:
    happened = carried(todo("poll-0", status), movers={"poll-0": ((Who.BUDGET, status),)})
    assert only(happened) == (TodoStatus.PENDING, "not settled in session S1: its reason")
    (added,) = [e for e in happened if isinstance(e, ev.TodoAdded)]
    assert (added.origin, added.experiment.priority) == ("S1", 0.3)
    assert decision(happened) == "1 pending, 0 findings"
    assert [e.todos for e in happened if isinstance(e, ev.CarriedOver)] == [("poll-0",)]


def test_what_a_person_dropped_stays_dropped_also_the_night_after() -> None:
    happened = carried(todo("poll-0", TodoStatus.SKIPPED), movers={"poll-0": ((Who.PERSON, TodoStatus.SKIPPED),)})
    assert only(happened)[0] is TodoStatus.SKIPPED
    (moved,) = [e for e in happened if isinstance(e, ev.TodoChanged)]
    assert (moved.by, moved.status) == (Who.PERSON, TodoStatus.SKIPPED)


def test_an_approval_stands_and_a_gate_is_looked_at_again() -> None:
    gate = {"gate": ("poll",)}
    waits = todo("poll-0", TodoStatus.GATED)
    assert only(carried(waits, policy=gate))[0] is TodoStatus.GATED
    assert only(carried(waits))[0] is TodoStatus.PENDING
    assert only(carried(waits, policy={"drop": ("poll",)}))[0] is TodoStatus.SKIPPED
    approved = carried(
        todo("poll-0", TodoStatus.PENDING), policy=gate, movers={"poll-0": ((Who.PERSON, TodoStatus.PENDING),)}
    )
    assert only(approved)[0] is TodoStatus.PENDING and "approved then" in only(approved)[1]
    assert [e.by for e in approved if isinstance(e, ev.TodoChanged)] == [Who.PERSON]


def test_what_was_tried_counts_where_the_same_would_come_of_it() -> None:
    tried = todo("poll-0", TodoStatus.DONE, FOUND)
    happened = carried(tried, poll_0=Outcome.WORSE)
    assert only(happened) == (TodoStatus.SKIPPED, "tried in session S1: worse, r")
    assert [e.identity for e in happened if isinstance(e, ev.TodoChanged)] == [tried.identity]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"now": adoption(FOUND, engine_version="2")}, "the engine was 1 and is 2"),
        ({"now": adoption(FOUND, hardware="other")}, "the hardware was box and is other"),
        ({"method": "w2"}, "it is measured in another way"),
    ],
)
def test_on_other_ground_it_is_tried_again(changed: dict[str, Any], said: str) -> None:
    status, reason = only(carried(todo("poll-0", TodoStatus.DONE, FOUND), poll_0=Outcome.WORSE, **changed))
    assert status is TodoStatus.PENDING and said in reason


def test_after_a_keep_only_its_relatives_are_tried_again() -> None:
    happened = carried(
        todo("poll-0", TodoStatus.DONE, FOUND),
        todo("batch-8", TodoStatus.DONE, FOUND, tags=("threads",)),
        todo("threads-2", TodoStatus.DONE, FOUND),
        todo("late-1", TodoStatus.DONE, KEPT, tags=("threads",)),
        left=KEPT,
        poll_0=Outcome.WORSE,
        batch_8=Outcome.NO_DIFFERENCE,
        threads_2=Outcome.BETTER,
        late_1=Outcome.WORSE,
    )
    found = listed(happened)
    assert found["poll-0"][0] is TodoStatus.SKIPPED and "nothing that was kept since shares a tag" in found["poll-0"][1]
    assert found["batch-8"][0] is TodoStatus.PENDING and "threads-2 kept since" in found["batch-8"][1]
    assert found["late-1"][0] is TodoStatus.SKIPPED
    assert "threads-2" not in found and "threads-2: it is part of what runs now" in decision(happened)


def test_a_winner_that_did_not_last_is_tried_again() -> None:
    status, reason = only(
        carried(todo("threads-2", TodoStatus.DONE, FOUND), left=KEPT, now=adoption(FOUND), threads_2=Outcome.BETTER)
    )
    assert status is TodoStatus.PENDING and "what runs now is without it" in reason


def test_what_was_tried_two_nights_ago_is_not_forgotten() -> None:
    """It stands on last night's list as skipped, by nobody of that night."""
    happened = carried(todo("poll-0", TodoStatus.SKIPPED, FOUND))
    assert only(happened)[0] is TodoStatus.SKIPPED
    void = carried(todo("poll-0", TodoStatus.SKIPPED, FOUND), movers={"poll-0": ((Who.EVIDENCE, TodoStatus.SKIPPED),)})
    assert only(void)[0] is TodoStatus.PENDING


def test_a_block_holds_with_its_capability_until_engine_or_hardware_change() -> None:
    blocked = todo("cache-q8", TodoStatus.BLOCKED, FOUND, needs=("kv8",))
    happened = carried(blocked, lost={"cache-q8": ("kv8",)}, cache_q8=Outcome.FAILED)
    assert only(happened) == (TodoStatus.BLOCKED, "blocked in session S1: its reason")
    (over,) = [e for e in happened if isinstance(e, ev.CarriedOver)]
    assert over.lost == {"cache-q8": ("cache-q8", "kv8")}
    assert only(carried(blocked, method="w2"))[0] is TodoStatus.BLOCKED
    status, reason = only(carried(blocked, now=adoption(FOUND, engine_version="2")))
    assert status is TodoStatus.PENDING and "the engine was 1 and is 2" in reason


def test_what_is_not_carried_over_is_said() -> None:
    here = todo("poll-0", TodoStatus.PENDING)
    anew = experiment("poll-0", changes=(FlagChange(name="--poll", value="9"),))
    assert "poll-0: the session file has another experiment of that name" in decision(carried(here, own=(anew,)))
    assert listed(carried(here, own=(here.experiment,)))
    other = FOUND.model_copy(update={"engine": "vllm"})
    assert "poll-0: the engine is vllm now" in decision(carried(here, now=adoption(other)))
    own_check = todo("sentinel-1", TodoStatus.DONE, purpose=Purpose.SENTINEL)
    assert listed(carried(own_check, todo("baseline", TodoStatus.DONE))) == {}


def test_findings_come_over_under_new_ids() -> None:
    old = Finding(id="F1", statement="s", evidence=("M1",), scope="w")
    older = old.model_copy(update={"scope": "w, found in session S0"})
    happened = carried(findings=(old, older))
    found = [e.finding for e in happened if isinstance(e, ev.FindingMade)]
    assert [(one.id, one.scope) for one in found] == [
        ("F7", "w, found in session S1"),
        ("F8", "w, found in session S0"),
    ]


# --- two nights ---


@contextmanager
def second_night(folder: Path, *experiments: Experiment) -> Iterator[Runner]:
    """A session that goes on with the list of the one in `folder`."""
    target = SimulatedTarget(folder / "world", SCENARIO)
    with Store.write(folder / "state.db") as store:
        earlier = session_to_continue(store, "latest", ONE_POINT.target.name)
        session_id = new_session_id(store.clock())
        found = asyncio.run(target.adopt())
        carried = asyncio.run(take_over(store, earlier, ONE_POINT, found, target))
        open_session(store, session_id, ONE_POINT, found, carried=carried)
        yield Runner(store, session_id, target, ONE_POINT, Listed(*experiments), Silent())


FIRST = (
    flag("--poll", "0", priority=0.9, tags=("threads",)),
    flag("--threads", "2"),
    flag("--threads", "8"),
    flag("--cache", "q8_0"),
    flag("--parallel", "4", priority=0.05),
)


def test_a_second_night_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    budget = ONE_POINT.policy.budget.model_copy(update={"experiments": 4})
    policy = ONE_POINT.policy.model_copy(update={"budget": budget})
    with sim_session(tmp_path, *FIRST, config=ONE_POINT.model_copy(update={"policy": policy})) as first:
        assert asyncio.run(first.run()) == 0
        assert "parallel-4" not in first.store.verdicts(first.session_id)
        before = first.session_id
        lost = all_lost(known_of(first.store, before))
    with second_night(tmp_path, *FIRST, flag("--poll", "1")) as runner:
        store, sid = runner.store, runner.session_id
        assert {todo.id: todo.status for todo in store.todos(sid)} == {
            "poll-0": TodoStatus.PENDING,  # a relative was kept since
            "threads-8": TodoStatus.SKIPPED,  # on whatever parent, the same would come of it
            "cache-q8_0": TodoStatus.BLOCKED,
            "parallel-4": TodoStatus.PENDING,
        }
        assert spent(store, sid).experiments == 0
        assert all_lost(known_of(store, sid)) == lost
        assert asyncio.run(runner.run()) == 0
        assert_consistent(runner)
        verdicts = store.verdicts(sid)
        assert verdicts["parallel-4"].outcome is Outcome.BETTER
        assert {"baseline", "poll-0", "poll-1"} < {*verdicts} and not {"threads-8", "cache-q8_0"} & {*verdicts}
        # What was proposed again and is on the list already, or is part of what runs, is no experiment.
        (now,) = [todo for todo in store.todos(sid) if todo.id == "threads-2"]
        assert (now.status, now.reason) == (TodoStatus.SKIPPED, "the server already runs like this")
        told = history(store, sid, "parallel-4")
        assert [step["who"] for step in told[:3]] == ["built-in", "budget", "carry-over"]
        assert store.role(sid, Role.ORIGINAL) == store.role(before, Role.FINAL)


def test_a_session_to_continue_must_be_of_this_target(tmp_path: Path) -> None:
    with Store.write(tmp_path / "state.db") as store, pytest.raises(ConfigError, match="no earlier session on sim"):
        session_to_continue(store, "latest", "sim")
    with sim_session(tmp_path) as runner:
        found = session_to_continue(runner.store, "latest", "sim")
        assert session_to_continue(runner.store, found.id, "sim") == found
        with pytest.raises(ConfigError, match="was on sim, not on other"):
            session_to_continue(runner.store, found.id, "other")
