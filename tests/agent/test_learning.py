"""What a session learns from failures, without a session: brackets, blocked relatives, what a failure calls for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent import evidence
from agent.brackets import follow_up, span_of
from agent.known import Known, Trouble, blamed, failed_start, in_a_row, under_load
from agent.relatives import all_lost, blocked_with, freed, lost, proven_to_work
from state import events as ev
from state.models import (
    Arm,
    EnvChange,
    Experiment,
    Failure,
    FlagChange,
    LaunchSpec,
    Measurement,
    MeasurementStatus,
    Outcome,
    ProcessId,
    SessionStatus,
    Source,
    Todo,
    TodoStatus,
    Trial,
    TrialStatus,
    Verdict,
)
from tests.agent.sessions import moved
from tools.diagnose import Action, diagnose
from tools.next_step import Span

KNOB = "--mem-fraction-static"
TOO_MUCH = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB.\n"
TOO_LITTLE = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n"
TILE = "OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376.\n"
UNTRACEABLE = "torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped\n"


def spec(**flags: str) -> LaunchSpec:
    named = {f"--{name.replace('_', '-')}": (value,) for name, value in flags.items()}
    return LaunchSpec(engine="sglang", program=("p",), flags=named, argv=("p",), cwd="/", user="u")


def experiment(name: str, *needs: str, **fields: Any) -> Experiment:
    base = {"id": name, "title": name, "hypothesis": "It may help.", "changes": (FlagChange(name="--graphs"),)}
    return Experiment.model_validate(base | {"needs": needs} | fields)


def todo(name: str, *needs: str, status: TodoStatus = TodoStatus.PENDING, **fields: Any) -> Todo:
    return Todo(experiment=experiment(name, *needs, **fields), status=status, priority=0.5)


def trial(name: str, of: str, launched: LaunchSpec, log: str | None = None) -> Trial:
    """A launch that ended with a log, or generates."""
    failure = None if log is None else diagnose("sglang", log, 1)
    status = TrialStatus.READY if log is None else TrialStatus.FAILED
    return Trial(id=name, experiment_id=of, fingerprint=launched.fingerprint, status=status, failure=failure)


def known(*todos: Todo, launches: list[tuple[Trial, LaunchSpec]] | None = None, **verdicts: Outcome) -> Known:
    """What is known when each experiment's candidate is the configuration of its newest launch."""
    made = launches or []
    return Known(
        todos=todos,
        verdicts={
            name.replace("_", "-"): Verdict(experiment_id=name.replace("_", "-"), outcome=outcome, reason="r")
            for name, outcome in verdicts.items()
        },
        trials=tuple(one for one, _ in made),
        specs={launched.fingerprint: launched for _, launched in made},
        candidates={one.experiment_id: one.fingerprint for one, _ in made},
        complaints=(),
    )


def trouble(log: str, times: int = 1) -> Trouble:
    failure = diagnose("sglang", log, 1)
    return Trouble(failure, times, Action(failure.action))


# --- what a failure calls for ---


def test_retries_are_counted_for_the_configuration_that_failed() -> None:
    here, there = spec(cache="q8"), spec(cache="q4")
    launches = [trial("T1", "e", there, "KeyError: 1\n"), trial("T2", "e", here, "KeyError: 1\n")]
    assert failed_start(launches, "e", here.fingerprint) == Trouble(launches[1].failure, 1, Action.RETRY_ONCE)
    again = [*launches, trial("T3", "e", here, "KeyError: 1\n")]
    found = failed_start(again, "e", here.fingerprint)
    assert found is not None and (found.times, found.step) == (2, Action.REJECT)
    assert failed_start(again, "other", here.fingerprint) is None


def test_a_launch_that_nobody_wants_any_more_says_nothing() -> None:
    here = spec()
    failure = Failure(failure_class="abandoned", cause="another one was wanted")
    gone = Trial(id="T1", experiment_id="e", fingerprint=here.fingerprint, status=TrialStatus.FAILED, failure=failure)
    assert failed_start([gone], "e", here.fingerprint) is None


def run(name: str, launch: str, arm: Arm = Arm.CANDIDATE, complaint: Failure | None = None) -> Measurement:
    return Measurement(
        id=name, experiment_id="e", trial_id=launch, arm=arm, block=0, load_point="c8", seed=1, complaint=complaint
    )


def test_complaints_are_counted_for_the_candidate_and_in_a_row() -> None:
    parent, candidate = spec(), spec(cache="q8")
    launches = [trial("T1", "restore", parent), trial("T2", "e", candidate)]
    full = diagnose("sglang", "KV cache pool is full. Retract requests. #retracted_reqs: 1\n", None)
    runs = [run("M1", "T1", Arm.BASELINE, full), run("M2", "T2", complaint=full)]
    first = under_load(runs, launches, "e", candidate.fingerprint)
    assert first is not None and (first.times, first.step) == (1, Action.INVALIDATE)
    second = under_load([*runs, run("M3", "T2", complaint=full)], launches, "e", candidate.fingerprint)
    assert second is not None and (second.times, second.step) == (2, Action.ADJUST_DOWN)
    assert in_a_row(runs, launches, parent.fingerprint) == 1
    assert in_a_row([*runs, run("M4", "T1", Arm.BASELINE)], launches, parent.fingerprint) == 0


def test_a_verdict_that_its_figures_explain_is_due_to_no_trouble() -> None:
    candidate = spec(cache="q8")
    here = known(todo("e"), launches=[(trial("T1", "e", candidate), candidate)])
    assert blamed(here, "e", Outcome.WORSE) is None
    assert blamed(here, "e", Outcome.BETTER) is None


# --- brackets ---


def bracketed(*tried: tuple[str, str | None], own: Experiment | None = None) -> tuple[Known, str]:
    """Launches of one experiment and its followers, oldest first: value of the knob, and the log of a failure."""
    root = own or experiment("graphs")
    todos, launches = [], []
    for number, (value, log) in enumerate(tried):
        name = root.id if number == 0 else f"{root.id}-mem-fraction-static-{value}"
        follower = {"source": {"kind": "built-in", "ref": root.id}} if number else {}
        changes = (*root.changes, FlagChange(name=KNOB, value=value)) if number else root.changes
        todos.append(todo(name, *root.needs, changes=changes, tags=("graphs",), title=root.title, **follower))
        launched = spec(graphs="on", mem_fraction_static=value)
        launches.append((trial(f"T{number + 1}", name, launched, log), launched))
    return known(*todos, launches=launches), todos[-1].id


def test_the_experiment_goes_on_with_its_own_changes_and_the_value_that_was_asked_for() -> None:
    here, name = bracketed(("0.88", TOO_MUCH), own=experiment("graphs", "piecewise"))
    last = here.todos[-1].experiment
    found = follow_up(last, trouble(TOO_MUCH), here)
    assert found.experiment is not None
    assert found.experiment.id == "graphs-mem-fraction-static-0.84"
    assert found.experiment.title == "graphs, with --mem-fraction-static 0.84 since 0.88 is too much"
    assert [str(change) for change in found.experiment.changes] == ["--graphs", "--mem-fraction-static 0.84"]
    assert (found.experiment.tags, found.experiment.needs) == (("graphs",), ("piecewise",))
    assert (found.experiment.source.kind, found.experiment.source.ref) == ("built-in", name)


def test_opposite_advice_meets_in_the_middle_and_closes() -> None:
    here, _ = bracketed(("0.88", TOO_MUCH), ("0.84", TOO_LITTLE))
    middle = follow_up(here.todos[-1].experiment, trouble(TOO_LITTLE), here)
    assert middle.experiment is not None
    assert [str(change) for change in middle.experiment.changes] == ["--graphs", "--mem-fraction-static 0.86"]
    assert middle.experiment.title.startswith("graphs, with --mem-fraction-static 0.86")
    here, _ = bracketed(("0.88", TOO_MUCH), ("0.84", TOO_LITTLE), ("0.86", TOO_LITTLE), ("0.87", TOO_MUCH))
    closed = follow_up(here.todos[-1].experiment, trouble(TOO_MUCH), here)
    assert closed.experiment is None
    assert (closed.bracket.low, closed.bracket.high) == (0.86, 0.87)
    assert "no value is left" in closed.bracket.reason


def test_a_value_that_starts_with_the_same_other_settings_ends_it() -> None:
    own = experiment("mem", changes=(FlagChange(name=KNOB, value="0.95"),))
    parent, candidate = spec(mem_fraction_static="0.88"), spec(mem_fraction_static="0.95")
    here = known(
        Todo(experiment=own, priority=0.5),
        launches=[(trial("T1", "adopted", parent), parent), (trial("T2", "mem", candidate, TOO_MUCH), candidate)],
    )
    found = follow_up(own, trouble(TOO_MUCH), here)
    assert found.experiment is None
    assert found.bracket.reason == "it starts with 0.88"


def test_launches_with_other_settings_are_no_part_of_it() -> None:
    other, candidate = spec(mem_fraction_static="0.6", graphs="off"), spec(mem_fraction_static="0.88", graphs="on")
    here = known(
        todo("graphs"),
        launches=[
            (trial("T1", "x", other, TOO_LITTLE), other),
            (trial("T2", "graphs", candidate, TOO_MUCH), candidate),
        ],
    )
    found = follow_up(here.todos[0].experiment, trouble(TOO_MUCH), here)
    assert found.experiment is not None and found.experiment.id.endswith("0.84")


def test_a_value_that_nobody_states_is_looked_for_from_the_far_end() -> None:
    candidate = spec(graphs="on")
    here = known(todo("graphs"), launches=[(trial("T1", "graphs", candidate, TOO_MUCH), candidate)])
    found = follow_up(here.todos[0].experiment, trouble(TOO_MUCH), here)
    assert found.experiment is not None
    assert found.experiment.changes[-1] == FlagChange(name=KNOB, value="0.93")


def test_a_smaller_context_is_for_a_person_to_decide() -> None:
    own = experiment("slots", changes=(FlagChange(name="--ctx-size", value="65536"),))
    candidate = spec(ctx_size="65536")
    log = "ggml_aligned_malloc: insufficient memory (attempted to allocate 90000.00 MB)\n"
    failure = diagnose("llamacpp", log, 1)
    launched = trial("T1", "slots", candidate).model_copy(update={"status": TrialStatus.FAILED, "failure": failure})
    here = known(Todo(experiment=own, priority=0.5), launches=[(launched, candidate)])
    found = follow_up(own, Trouble(failure, 1, Action.ADJUST_DOWN), here)
    assert found.experiment is None
    assert "would refuse requests" in found.bracket.reason


def test_a_variable_is_bracketed_as_well_and_an_id_is_never_given_twice() -> None:
    own = experiment("sequences")
    candidate = LaunchSpec(
        engine="vllm",
        program=("p",),
        flags={},
        argv=("p",),
        cwd="/",
        user="u",
        env={"VLLM_CPU_KVCACHE_SPACE": "40"},
    )
    log = "Available memory on node 0 (17/20 GiB) on kv cache allocation is less than requested memory for kv (40)\n"
    failure = diagnose("vllm", log, 1)
    launched = trial("T1", "sequences", candidate).model_copy(update={"status": TrialStatus.FAILED, "failure": failure})
    taken = todo("sequences-vllm-cpu-kvcache-space-35")
    here = known(Todo(experiment=own, priority=0.5), taken, launches=[(launched, candidate)])
    found = follow_up(own, Trouble(failure, 1, Action.ADJUST_DOWN), here)
    assert found.experiment is not None
    assert found.experiment.changes[-1] == EnvChange(name="VLLM_CPU_KVCACHE_SPACE", value="35")
    assert found.experiment.id == "sequences-vllm-cpu-kvcache-space-35-2"


@pytest.mark.parametrize(
    ("engine", "knob", "value", "span"),
    [
        ("sglang", KNOB, 0.88, Span(0.3, 0.97, 0.04, 0.01)),
        ("vllm", "--gpu-memory-utilization", None, Span(0.3, 0.98, 0.04, 0.01)),
        ("sglang", "--max-running-requests", 2048.0, Span(1, 8192, 256.0, 16.0)),
        ("generic", "--share", 0.5, Span(0.05, 0.99, 0.04, 0.01)),
        ("generic", "--buffers", 4.0, Span(1.0, 256.0, 1.0, 1.0)),
    ],
)
def test_the_span_is_the_catalogues_else_a_stated_one(engine: str, knob: str, value: float | None, span: Span) -> None:
    assert span_of(engine, knob, value) == span


# --- relatives ---


def test_a_rule_that_names_the_capability_takes_just_that() -> None:
    pieces = experiment("pieces", "piecewise-graphs", "torch-compile")
    assert lost(pieces, trouble(UNTRACEABLE), frozenset()) == {"pieces", "torch-compile"}


def test_an_unnamed_crash_takes_what_the_experiment_is_about_unless_that_is_proven_to_work() -> None:
    mode = experiment("mode", "deepep", "expert-parallel")
    assert lost(mode, trouble(TILE), frozenset()) == {"mode", "deepep"}
    assert lost(mode, trouble(TILE), frozenset({"deepep"})) == {"mode"}
    changes = (FlagChange(name="--a", value="1"), FlagChange(name="--b", value="1"))
    both = mode.model_copy(update={"changes": changes, "source": Source(kind="refinement")})
    assert lost(both, trouble(TILE), frozenset()) == {"mode"}


@pytest.mark.parametrize(
    "log", ["x: error: unrecognized arguments: --y\n", TOO_MUCH, "KeyError: 'model.layers.0.mlp.gate'\n"]
)
def test_a_refused_value_a_size_and_the_unknown_take_nothing_else(log: str) -> None:
    assert lost(experiment("ep", "expert-parallel"), trouble(log), frozenset()) == {"ep"}


def test_a_capability_works_if_something_that_needs_it_came_up() -> None:
    todos = (
        todo("ran", "a", status=TodoStatus.DONE),
        todo("failed", "b", status=TodoStatus.DONE),
        todo("broke", "c", status=TodoStatus.BLOCKED),
        todo("waits", "d"),
    )
    here = known(*todos, ran=Outcome.NO_DIFFERENCE, failed=Outcome.FAILED, broke=Outcome.WORSE)
    assert proven_to_work(here.todos, here.verdicts) == {"a"}


def test_what_depends_on_a_blocked_one_is_blocked_with_it() -> None:
    todos = (
        todo("overlap", "overlap", "expert-parallel"),
        todo("threshold", "overlap"),
        todo("free", "graphs"),
        todo("over", "expert-parallel", status=TodoStatus.DONE),
        todo("of-overlap", "overlap-depth", "overlap"),
    )
    found = {one.id: lacks for one, lacks in blocked_with(frozenset({"expert-parallel"}), todos)}
    assert found == {"overlap": ("expert-parallel",), "threshold": ("overlap",), "of-overlap": ("overlap",)}


def test_what_is_lost_holds_for_todos_that_come_later() -> None:
    candidate = spec(ep="8")
    blocked = todo("ep", "expert-parallel", status=TodoStatus.BLOCKED)
    here = known(blocked, todo("x"), launches=[(trial("T1", "ep", candidate, TILE), candidate)], ep=Outcome.FAILED)
    assert all_lost(here) == {"ep", "expert-parallel"}
    refused = known(todo("odd", "graphs", status=TodoStatus.BLOCKED))
    assert all_lost(refused) == {"odd"}


def test_only_another_version_opens_the_question_again() -> None:
    todos = (todo("ep", status=TodoStatus.BLOCKED), todo("odd", status=TodoStatus.SKIPPED), todo("next"))
    assert freed(["flag", "env", "patch"], todos) == []
    assert [one.id for one in freed(["checkout"], todos)] == ["ep"]
    assert [one.id for one in freed(["flag", "package"], todos)] == ["ep"]


# --- what a complaint spoils ---


def test_a_complaint_spoils_the_process_in_every_live_state(tmp_path: Path) -> None:
    served, other = (ProcessId(pid=pid, start_ticks=pid, boot_id="b") for pid in (7, 8))
    first, second, third = (
        trial(name, "e", spec()).model_copy(update={"process": process, "kind": kind})
        for name, process, kind in (("T2", served, "launch"), ("T3", served, "adjust"), ("T4", other, "launch"))
    )
    said = diagnose("sglang", "KV cache pool is full. Retract requests. #retracted_reqs: 1\n", None)
    complained = run("M1", "T3", complaint=said).model_copy(update={"status": MeasurementStatus.INVALID})
    happened: list[ev.Event] = [ev.TrialOpened(trial=one) for one in (first, second, third)]
    happened += [ev.MeasurementOpened(measurement=run("M1", "T3")), ev.MeasurementClosed(measurement=complained)]
    with moved(tmp_path, SessionStatus.RUNNING, "", *happened) as (store, session):
        assert evidence.spoilt(store, session) == {"T2", "T3"}
        assert [taken.id for taken in evidence.known(store, session).complaints] == ["M1"]
