"""What refinement goes by, as the store has it: persons' words, what is lost, and ids that are given once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent import refiner
from agent.levers import Setting
from state import events as ev
from state.models import Experiment, Source, TodoStatus, Who
from state.store import Store
from state.words import DropWord
from tests.agent.sim import CONFIG, flag, sim_session

REFINED = {"source": Source(kind="refinement")}
THREADS, SLOTS = flag("--threads", "2", expected_gain=0.3), flag("--parallel", "4", expected_gain=0.3)
BOTH = THREADS.model_copy(update={"id": "refine-1", "changes": (*THREADS.changes, *SLOTS.changes), **REFINED})


@contextmanager
def opened(folder: Path, *happened: ev.Event) -> Iterator[tuple[Store, str]]:
    """A session of which nothing is known but this."""
    with sim_session(folder) as runner:
        runner.store.append(runner.session_id, *happened)
        yield runner.store, runner.session_id


def no_objection(setting: Setting) -> str | None:
    return None


def added(happened: list[ev.Event]) -> dict[str, Experiment]:
    return {event.experiment.id: event.experiment for event in happened if isinstance(event, ev.TodoAdded)}


def test_a_refinement_that_a_person_dropped_does_not_come_back_under_another_name(tmp_path: Path) -> None:
    listed = [ev.TodoAdded(experiment=one) for one in (THREADS, SLOTS)]
    said = ev.WordHeard(word=DropWord(id="w1", at=1.0, todo="refine-1"))
    out = ev.TodoChanged(experiment_id="refine-1", status=TodoStatus.SKIPPED, reason="dropped", by=Who.PERSON)
    with opened(tmp_path, *listed) as (store, session):
        (first,) = added(refiner.refine(store, session, CONFIG, (), no_objection)).values()
        assert {*first.changes} == {*BOTH.changes}
        store.append(session, ev.TodoAdded(experiment=BOTH), said, out)
        assert refiner.learned(store, session, CONFIG, ()).barred == (BOTH.changes,)
        assert added(refiner.refine(store, session, CONFIG, (), no_objection)) == {}


def test_the_next_refinement_has_an_id_that_no_carried_one_has(tmp_path: Path) -> None:
    ideas = [ev.TodoAdded(experiment=one) for one in (THREADS, SLOTS)]
    third = flag("--poll", "0", id="refine-3", **REFINED)
    carried = ev.TodoAdded(experiment=third, status=TodoStatus.SKIPPED, reason="tried then", origin="before")
    with opened(tmp_path, *ideas, carried) as (store, session):
        happened = refiner.refine(store, session, CONFIG, (), no_objection)
        assert [*added(happened)] == ["refine-4"]
        store.append(session, *happened)


def test_what_lacks_a_lost_capability_is_no_part_of_anything(tmp_path: Path) -> None:
    broken = flag("--spec", "ngram", needs=("speculation",))
    more = flag("--poll", "0", needs=("speculation",), expected_gain=0.4)
    with opened(
        tmp_path,
        ev.CarriedOver(origin="before", todos=(broken.id,), lost={broken.id: ("speculation",)}),
        ev.TodoAdded(experiment=broken, status=TodoStatus.BLOCKED, reason="crashed then", origin="before"),
        *(ev.TodoAdded(experiment=one) for one in (more, THREADS, SLOTS)),
    ) as (store, session):
        known = refiner.learned(store, session, CONFIG, ())
        assert [one.id for one in known.ideas] == [THREADS.id, SLOTS.id]
        (first,) = added(refiner.refine(store, session, CONFIG, (), no_objection)).values()
        assert {*first.changes} == {*BOTH.changes}


def test_what_was_objected_to_stands_beside_the_decision(tmp_path: Path) -> None:
    listed = [ev.TodoAdded(experiment=one) for one in (THREADS, SLOTS)]

    def no_threads(setting: Setting) -> str | None:
        return "kept as it is" if any(change.name == "--threads" for change in setting) else None

    with opened(tmp_path, *listed) as (store, session):
        decision = refiner.refine(store, session, CONFIG, (), no_threads)[0]
        assert isinstance(decision, ev.DecisionMade)
        assert decision.objections == {"--parallel 4, --threads 2": "kept as it is"}
