"""Refinement by what was learned: pairs on purpose, numbers around what worked, nothing where no server starts."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence

from agent.levers import Setting, plain
from agent.planners.tpe import asked
from agent.refine import (
    MOST_AT_ONCE,
    RECENT,
    STAYS,
    Choices,
    Learned,
    Space,
    Tried,
    all_at_once,
    refinements,
    reweighed,
)
from agent.surrogate import ALONE, RELATED, UNRELATED, Seen, guesses
from state.models import Disruption, Effect, EnvChange, Experiment, FlagChange, LaunchSpec, Outcome, Source
from tests.agent.sim import flag


def spec(**flags: str) -> LaunchSpec:
    held = {f"--{name.replace('_', '-')}": (value,) for name, value in flags.items()}
    return LaunchSpec(engine="llamacpp", program=("s",), flags=held, argv=("s",), cwd="/", user="u")


def effect(gain: float, error: float = 0.01) -> Effect:
    return Effect(
        estimate=math.log1p(gain),
        low=math.log1p(gain) - 1.96 * error,
        high=math.log1p(gain) + 1.96 * error,
        n_baseline=4,
        n_candidate=4,
        launches_baseline=2,
        launches_candidate=2,
    )


def tried(idea: Experiment, parent: LaunchSpec, outcome: Outcome, gain: float | None = None, cause: str = "") -> Tried:
    changes = {change.name: (change.value or "",) for change in idea.changes if isinstance(change, FlagChange)}
    candidate = parent.model_copy(update={"flags": {**parent.flags, **changes}})
    told = None if gain is None else effect(gain)
    return Tried(experiment=idea, parent=parent, candidate=candidate, outcome=outcome, effect=told, cause=cause)


def learned(found: LaunchSpec, *told: Tried, ideas: tuple[Experiment, ...] = (), **fields: object) -> Learned:
    every = tuple(dict.fromkeys((*(one.experiment for one in told), *ideas)))
    known_good = next((one.candidate for one in reversed(told) if one.outcome is Outcome.BETTER), found)
    known = {"engine": "llamacpp", "found": found, "known_good": known_good, "ideas": every, "pending": ()}
    return Learned.model_validate({**known, "tried": told, "minimal_effect": 0.02} | fields)


def nobody_objects(setting: Setting) -> bool:
    return False


def made(one: Experiment) -> set[str]:
    return {str(change) for change in one.changes}


def test_two_settings_of_one_topic_that_did_nothing_apart_are_tried_together() -> None:
    here = spec(threads="1", poll="50")
    more_threads = flag("--threads", "2", tags=("threads",))
    spin = flag("--poll", "100", tags=("threads",))
    know = learned(
        here,
        tried(more_threads, here, Outcome.INCONCLUSIVE, 0.0),
        tried(spin, here, Outcome.NO_DIFFERENCE, 0.0),
    )
    found = refinements(know, asked, nobody_objects)
    assert [made(one) for one in found] == [{"--threads 2", "--poll 100"}]
    assert "never tried together" in found[0].hypothesis
    assert found[0].source.kind == "refinement"
    assert found[0].tags == ("threads",)


def test_what_was_tried_does_not_come_back_until_something_alike_was_kept() -> None:
    here = spec(threads="1", slots="1", spec="none")
    slots = flag("--slots", "4", tags=("batching",), expected_gain=0.4)
    threads = flag("--threads", "2", tags=("threads",))
    alone = flag("--spec", "ngram", tags=("speculation",))
    before = (
        tried(slots, here, Outcome.NO_DIFFERENCE, 0.01),
        tried(alone, here, Outcome.NO_DIFFERENCE, 0.0),
    )
    unlike = learned(here, *before, tried(threads, here, Outcome.BETTER, 0.5))
    assert {"--slots 4"} not in [made(one) for one in refinements(unlike, asked, nobody_objects)]
    batching = threads.model_copy(update={"tags": ("threads", "batching")})
    alike = learned(here, *before, tried(batching, here, Outcome.BETTER, 0.5))
    assert any("--slots 4" in made(one) for one in refinements(alike, asked, nobody_objects))


def test_no_point_of_a_region_that_never_starts_is_tried_but_its_way_out_is() -> None:
    here = spec(flash_attn="off", cache_type_v="f16", threads="1")
    values = flag("--cache-type-v", "q8_0", tags=("kv-type", "attention"), expected_gain=0.3)
    attention = flag("--flash-attn", "on", tags=("attention",))
    threads = flag("--threads", "2", tags=("threads",), expected_gain=0.3)
    know = learned(
        here,
        tried(values, here, Outcome.FAILED, cause="quantized V cache requires flash_attn to be enabled"),
        tried(attention, here, Outcome.NO_DIFFERENCE, 0.0),
        tried(threads, here, Outcome.BETTER, 0.4),
    )
    offered = [made(one) for one in refinements(know, asked, nobody_objects)]
    assert {"--cache-type-v q8_0", "--flash-attn on"} in offered
    assert all("--flash-attn on" in one for one in offered if "--cache-type-v q8_0" in one)


def test_a_number_that_worked_is_refined_within_its_span() -> None:
    here = spec(ubatch_size="32")
    steps = [flag("--ubatch-size", value, tags=("batch-size",)) for value in ("128", "512")]
    know = learned(
        here,
        tried(steps[0], here, Outcome.BETTER, 0.4),
        tried(steps[1], here, Outcome.NO_DIFFERENCE, 0.1),
    )
    numbers = {int(change.value or 0) for one in refinements(know, asked, nobody_objects) for change in one.changes}
    assert numbers
    assert all(32 < value < 512 for value in numbers)
    assert not numbers & {32, 128, 512}


def test_nothing_is_offered_when_nothing_promises_a_relevant_gain() -> None:
    here = spec(threads="1", slots="1")
    worse = (flag("--threads", "2", tags=("a",)), flag("--slots", "4", tags=("b",)))
    know = learned(here, *(tried(one, here, Outcome.WORSE, -0.3) for one in worse))
    assert refinements(know, asked, nobody_objects) == []


def test_what_the_server_or_the_session_objects_to_is_left_out() -> None:
    here = spec(threads="1", poll="50")
    ideas = (flag("--threads", "2", tags=("threads",)), flag("--poll", "100", tags=("threads",)))
    know = learned(here, *(tried(one, here, Outcome.NO_DIFFERENCE, 0.0) for one in ideas))
    assert refinements(know, asked, lambda setting: len(setting) > 1) == []


def test_the_same_knowledge_and_seed_give_the_same_list() -> None:
    here = spec(ubatch_size="32", threads="1")
    ideas = (flag("--ubatch-size", "128", tags=("b",)), flag("--threads", "4", tags=("b",)))
    know = learned(here, *(tried(one, here, Outcome.BETTER, 0.2) for one in ideas), seed=7)
    assert refinements(know, asked, nobody_objects) == refinements(know, asked, nobody_objects)


def test_variables_and_flags_are_combined_and_known_refinements_are_numbered_on() -> None:
    here = spec(threads="1")
    wait = Experiment(
        id="wait",
        title="wait",
        hypothesis="h",
        changes=(EnvChange(name="OMP_WAIT_POLICY", value="active"),),
        tags=("threads",),
        source=Source(kind="catalogue"),
    )
    threads = flag("--threads", "2", tags=("threads",))
    told = (tried(threads, here, Outcome.INCONCLUSIVE, 0.0),)
    know = learned(here, *told, ideas=(wait,), pending=(wait,), made=4)
    (first, *_) = refinements(know, asked, nobody_objects)
    assert first.id == "refine-5"
    assert made(first) == {"--threads 2", "OMP_WAIT_POLICY=active"}


def test_the_first_experiment_makes_what_promises_most_at_once() -> None:
    here = spec(threads="1", slots="1", poll="50")
    ideas = (
        flag("--threads", "2", expected_gain=0.3),
        flag("--slots", "4", expected_gain=0.25),
        flag("--slots", "8", expected_gain=0.3),
        flag("--poll", "0", expected_gain=0.01),
        flag("--cache", "q8_0", expected_gain=0.2, numerics=True),
    )
    (first,) = all_at_once(learned(here, ideas=ideas, pending=ideas), nobody_objects)
    assert made(first) == {"--threads 2", "--slots 8", "--cache q8_0"}
    assert first.priority == 1.0 and first.numerics
    worse = tried(first, here, Outcome.WORSE, 0.4)  # its answers were others
    (second,) = all_at_once(learned(here, worse, ideas=ideas, pending=ideas, made=1), nobody_objects)
    assert made(second) == {"--threads 2", "--slots 8"} and not second.numerics
    assert all_at_once(learned(here, ideas=ideas[:1], pending=ideas[:1]), nobody_objects) == []


def test_a_kept_bundle_is_taken_apart_where_a_part_may_do_harm() -> None:
    here = spec(threads="1", slots="1")
    ideas = (flag("--threads", "2", expected_gain=0.3), flag("--slots", "4", expected_gain=0.3))
    bundle = Experiment(
        id="refine-1",
        title="both",
        hypothesis="h",
        changes=(*ideas[0].changes, *ideas[1].changes),
        tags=("threads", "slots"),
        source=Source(kind="refinement"),
    )
    know = learned(here, tried(bundle, here, Outcome.BETTER, 0.1), ideas=ideas)
    offered = [made(one) for one in refinements(know, asked, nobody_objects)]
    assert {"--threads 1"} in offered or {"--slots 1"} in offered


def test_what_did_not_start_all_at_once_is_tried_without_what_the_refusal_speaks_of() -> None:
    here = spec(threads="1", slots="1", flash_attn="off", cache_type_v="f16")
    ideas = (
        flag("--threads", "2", expected_gain=0.3),
        flag("--slots", "4", expected_gain=0.25),
        flag("--cache-type-v", "q8_0", expected_gain=0.2),
    )
    (first,) = all_at_once(learned(here, ideas=ideas, pending=ideas), nobody_objects)
    failed = tried(first, here, Outcome.FAILED, cause="quantized V cache requires flash_attn to be enabled")
    (second,) = all_at_once(learned(here, failed, ideas=ideas, pending=ideas, made=1), nobody_objects)
    assert made(second) == {"--threads 2", "--slots 4"}
    silent = tried(first, here, Outcome.FAILED, cause="exit code 139")
    assert all_at_once(learned(here, silent, ideas=ideas, pending=ideas, made=1), nobody_objects) == []


def test_what_waits_is_weighed_anew_by_what_was_measured_of_its_settings() -> None:
    here = spec(threads="1", slots="1", poll="50")
    eight, four = flag("--slots", "8", tags=("slots",)), flag("--slots", "4", tags=("slots",), priority=0.9)
    unknown = flag("--poll", "0", tags=("waiting",), priority=0.9)
    before = learned(here, tried(eight, here, Outcome.BETTER, 0.8), ideas=(four, unknown), pending=(four, unknown))
    know = before.model_copy(update={"priorities": {four.id: 0.9, unknown.id: 0.9}})
    (moved,) = reweighed(know)
    assert moved.id == four.id
    assert moved.priority < 0.9
    assert "by what was measured it does -" in moved.reason
    assert reweighed(know.model_copy(update={"priorities": {unknown.id: 0.9}})) == []


def test_a_start_that_failed_where_no_setting_was_changed_closes_nothing() -> None:
    here = spec(threads="1")
    threads = flag("--threads", "2", tags=("threads",), expected_gain=0.4)
    elsewhere = Experiment(id="other", title="other", hypothesis="h", changes=())
    failed = Tried(experiment=elsewhere, parent=here, candidate=here, outcome=Outcome.FAILED, cause="boom")
    know = learned(here, failed, ideas=(threads,))
    assert {"--threads 2"} in [made(one) for one in refinements(know, asked, nobody_objects)]


def test_no_more_is_made_together_than_a_failure_could_be_told_from() -> None:
    names = [f"--n{place}" for place in range(MOST_AT_ONCE + 1)]
    here = LaunchSpec(
        engine="llamacpp", program=("s",), flags=dict.fromkeys(names, ("0",)), argv=("s",), cwd="/", user="u"
    )
    ideas = tuple(flag(name, "1", tags=(name,), expected_gain=0.5) for name in names)

    def everything(space: Space, told: Sequence[tuple[Choices, float | None]], count: int, seed: int) -> list[Choices]:
        return [{name: choices[1] for name, choices in space.items() if isinstance(choices, tuple)}]

    offered = refinements(learned(here, ideas=ideas), everything, nobody_objects)
    assert offered
    assert all(len(one.changes) <= MOST_AT_ONCE for one in offered)


def test_what_a_person_dropped_or_has_not_approved_is_in_nothing_that_is_offered() -> None:
    here = spec(threads="1", poll="50", slots="1")
    ideas = (
        flag("--threads", "2", tags=("threads",), expected_gain=0.3),
        flag("--poll", "100", tags=("threads",), expected_gain=0.3),
        flag("--slots", "4", tags=("slots",), expected_gain=0.3),
    )
    pair = (*ideas[0].changes, *ideas[1].changes)
    told = tuple(tried(one, here, Outcome.INCONCLUSIVE, 0.0) for one in ideas)
    know = learned(here, *told)
    assert any(made(one) >= {"--threads 2", "--poll 100"} for one in refinements(know, asked, nobody_objects))
    barred = know.model_copy(update={"barred": (pair,)})
    offered = [made(one) for one in refinements(barred, asked, nobody_objects)]
    assert offered
    assert not any(one >= {"--threads 2", "--poll 100"} for one in offered)
    (first,) = all_at_once(learned(here, ideas=ideas, pending=ideas, barred=(pair,)), nobody_objects)
    assert not made(first) >= {"--threads 2", "--poll 100"}


def test_a_number_that_waits_for_an_approval_is_not_reached_by_the_way_of_a_range() -> None:
    here = spec(slots="1")
    small, large = flag("--slots", "2", tags=("slots",)), flag("--slots", "9", tags=("slots",))
    told = (tried(small, here, Outcome.BETTER, 0.4), tried(large, here, Outcome.NO_DIFFERENCE, 0.5))

    def five(space: Space, told: Sequence[tuple[Choices, float | None]], count: int, seed: int) -> list[Choices]:
        return [dict.fromkeys(space, 5)]

    know = learned(here, *told)
    assert {"--slots 5"} in [made(one) for one in refinements(know, five, nobody_objects)]
    gated = know.model_copy(update={"barred": (flag("--slots", "5").changes,)})
    assert {"--slots 5"} not in [made(one) for one in refinements(gated, five, nobody_objects)]


def test_a_refinement_needs_and_disrupts_what_its_parts_do() -> None:
    here = spec(slots="1", poll="50")
    needs = {"needs": ("batching",), "tags": ("slots",), "disruption": Disruption.PATCH}
    small, large = flag("--slots", "2", **needs), flag("--slots", "9", **needs)
    spin = flag("--poll", "100", tags=("waiting",), expected_gain=0.3)
    told = (tried(small, here, Outcome.BETTER, 0.4), tried(large, here, Outcome.NO_DIFFERENCE, 0.5))

    def five(space: Space, told: Sequence[tuple[Choices, float | None]], count: int, seed: int) -> list[Choices]:
        return [{name: STAYS if isinstance(choices, tuple) else 5 for name, choices in space.items()}]

    offered = refinements(learned(here, *told, ideas=(spin,)), five, nobody_objects)
    assert {str(change) for one in offered for change in one.changes} >= {"--slots 5", "--poll 100"}
    for one in offered:
        moves_slots = any(change.name == "--slots" and change.value != "1" for change in plain(one))
        assert one.needs == (("batching",) if moves_slots else ())
        assert one.disruption is (Disruption.PATCH if moves_slots else Disruption.RESTART)


def test_a_large_catalogue_s_pairs_are_weighed_in_little_memory() -> None:
    names = [f"--n{place}" for place in range(20)]
    topics = {name: frozenset({f"t{place % 5}"}) for place, name in enumerate(names)}
    base = dict.fromkeys(names, "1")
    points = [{**base, one: "2", other: str(value)} for one in names for other in names for value in range(2, 12)]
    seen = [Seen(base=base, to=point, effect=0.01, error=0.02) for point in points[:40]]
    tracemalloc.start()
    told = guesses(points, base, seen, lambda at: 0.0, topics)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(told) == len(points) == 4000
    assert most < 8 * len(points) ** 2 / 2, "no matrix of all points with all points"


def test_the_guess_is_that_of_the_kernel_as_it_is_written() -> None:
    topics = {"--a": frozenset({"t"}), "--b": frozenset({"t"}), "--c": frozenset({"u"})}
    base = {"--a": "1", "--b": "x", "--c": "1"}
    (told,) = guesses([{**base, "--a": "4", "--b": "y"}], base, [], lambda at: 0.0, topics)
    near = math.exp(-1.0)
    alone, related, unrelated = ALONE**2, RELATED**2, UNRELATED**2
    itself = 3 * alone + related + 2 * unrelated
    other = alone * (near + 1.0) + unrelated * near
    assert told.mean == 0.0
    assert math.isclose(told.spread, math.sqrt(2 * (itself - other)))


def test_what_is_weighed_does_not_grow_with_the_night() -> None:
    here = spec(slots="1")
    values = (flag("--slots", str(value), tags=("slots",)) for value in range(2, RECENT + 12))
    told = [tried(one, here, Outcome.NO_DIFFERENCE, 0.0) for one in values]
    sizes: list[int] = []

    def count(space: Space, known: Sequence[tuple[Choices, float | None]], count: int, seed: int) -> list[Choices]:
        sizes.append(len(known))
        return []

    assert refinements(learned(here, *told), count, nobody_objects) == []
    assert sizes == [RECENT + 1]


def test_what_came_to_no_clear_end_is_measured_again_and_at_most_twice() -> None:
    here, idea = spec(threads="1"), flag("--threads", "2", tags=("threads",))
    told: list[Tried] = []
    for _ in range(3):
        told.append(tried(idea, here, Outcome.INCONCLUSIVE, 0.1))
        again = [one for one in refinements(learned(here, *told, made=7), asked, nobody_objects) if one.again]
        assert [(one.again, made(one), one.source.kind) for one in again] == (
            [(idea.id, {"--threads 2"}, "refinement")] if len(told) <= 2 else []
        )
    assert "came to no clear end" in refinements(learned(here, told[0]), asked, nobody_objects)[0].hypothesis


def test_a_clear_end_another_parent_or_a_turn_still_to_come_is_no_reason_to_measure_again() -> None:
    here, idea = spec(threads="1"), flag("--threads", "2", tags=("threads",))
    unclear = tried(idea, here, Outcome.INCONCLUSIVE, 0.1)
    other = tried(flag("--poll", "100"), here, Outcome.BETTER, 0.3)
    for know in (
        learned(here, tried(idea, here, Outcome.NO_DIFFERENCE, 0.1)),
        learned(here, unclear, other),
        learned(here, unclear, pending=(idea,)),
    ):
        assert not [one for one in refinements(know, asked, nobody_objects) if one.again]


def test_two_settings_that_never_ran_here_are_not_made_together() -> None:
    here = spec(threads="1", poll="50")
    threads, poll = flag("--threads", "2", tags=("cpu",)), flag("--poll", "100", tags=("cpu",))
    other = flag("--ubatch-size", "128", tags=("cpu",))
    nothing_ran = learned(here, tried(other, here, Outcome.BETTER, 0.3), ideas=(threads, poll))
    assert not [one for one in refinements(nothing_ran, asked, nobody_objects) if len(one.changes) > 1]
    one_ran = learned(
        here,
        tried(other, here, Outcome.BETTER, 0.3),
        tried(threads, tried(other, here, Outcome.BETTER).candidate, Outcome.NO_DIFFERENCE, 0.0),
        ideas=(threads, poll),
        known_good=tried(other, here, Outcome.BETTER).candidate,
    )
    assert {"--threads 2", "--poll 100"} in [made(one) for one in refinements(one_ran, asked, nobody_objects)]


def test_all_at_once_leaves_out_what_promises_far_less_than_the_best() -> None:
    here = spec(threads="1", poll="50")
    ideas = tuple(
        flag(name, value).model_copy(update={"expected_gain": gain})
        for name, value, gain in (("--threads", "2", 0.3), ("--ubatch-size", "128", 0.1), ("--poll", "100", 0.03))
    )
    (first,) = all_at_once(learned(here, ideas=ideas, pending=ideas), nobody_objects)
    assert made(first) == {"--threads 2", "--ubatch-size 128"}
