"""Reads the store and lays out what the pure functions judge by; it decides nothing and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from agent.chooser import Situation
from agent.config import SessionConfig
from agent.judge import Comparison, Prices, Seen, figures, log_of
from agent.known import AGAIN, BLAMES, Known, failed_start, told, under_load
from agent.policy import Costs, Spent, close_out_s, unaffordable
from agent.relatives import all_lost
from agent.validity import noisy
from state.models import (
    Answer,
    Arm,
    DecisionKind,
    Experiment,
    FlagChange,
    LaunchSpec,
    Measurement,
    MeasurementStatus,
    Outcome,
    Purpose,
    Role,
    TodoStatus,
    Trial,
    TrialStatus,
)
from state.store import Store

CLOSE_OUT = "close-out"
BASELINE = "baseline"
RESTORE = "restore"
CONFIRM = "confirm"
"""The runs with which a session confirms what it leaves; they belong to no comparison."""
ANYTHING = Experiment(title="any", hypothesis="any", changes=(FlagChange(name="--any"),))
BUILT_IN = frozenset({CLOSE_OUT, BASELINE, RESTORE, CONFIRM})


def comparison_of(store: Store, session_id: str, config: SessionConfig, experiment_id: str) -> Comparison:
    """Everything the judge may look at for one experiment."""
    row = store.comparison(session_id, experiment_id)
    trials = {trial.id: trial for trial in store.trials(session_id)}
    everything = [m for m in store.measurements(session_id) if m.experiment_id != CONFIRM]
    launches = list(trials.values())
    start = failed_start(launches, experiment_id, row.candidate)
    load = under_load(everything, launches, experiment_id, row.candidate)
    other = row.candidate != row.parent
    purpose = row.experiment.purpose
    compares = row.experiment.numerics or config.workload.guards.answers != "off"
    epochs = {name: store.comparison(session_id, name).epoch for name in {m.experiment_id for m in everything}}
    return Comparison(
        experiment_id=experiment_id,
        workload=config.workload,
        rule=config.judge,
        own=tuple(m for m in everything if m.experiment_id == experiment_id),
        record=()
        if purpose is Purpose.CLOSE_OUT
        else tuple(
            m
            for m in everything
            if m.experiment_id != experiment_id
            and epochs[m.experiment_id] == row.epoch
            and trials[m.trial_id].fingerprint == row.parent
            and m.status is MeasurementStatus.VALID
        ),
        night=_night(store, session_id, config, experiment_id, everything, epochs),
        epoch=row.epoch,
        left=_left(store, session_id, experiment_id),
        earlier=_earlier(store, session_id, experiment_id),
        prices=_prices(store, session_id, config, experiment_id),
        fresh=purpose is Purpose.TRY and fresh(launches, everything, experiment_id, row.parent),
        start_failure=told(start.failure) if other and start is not None and start.step not in AGAIN else None,
        complaint=told(load.failure) if other and load is not None and load.step in BLAMES else None,
        failed_launches=tuple(
            trial.id
            for trial in trials.values()
            if trial.experiment_id == experiment_id
            and trial.fingerprint == row.candidate
            and trial.status is TrialStatus.FAILED
        ),
        purpose=purpose,
        observes=row.experiment.observes,
        numerics=row.experiment.numerics,
        parent_answers=_passes(store, session_id, trials, row.parent) if compares else (),
        candidate_answers=_passes(store, session_id, trials, row.candidate) if compares else (),
    )


def comparison_with(store: Store, session_id: str, config: SessionConfig, taken: Measurement) -> Comparison | None:
    """What a candidate's run is held against; None for the parent's runs and for those that belong to no comparison."""
    if taken.arm is not Arm.CANDIDATE:
        return None
    try:
        return comparison_of(store, session_id, config, taken.experiment_id)
    except KeyError:
        return None


PASSES = 4
"""So many of a configuration's newest passes over the fixed prompts are compared; more would tell nothing new."""


def _passes(
    store: Store, session_id: str, trials: Mapping[str, Trial], fingerprint: str
) -> tuple[tuple[Answer, ...], ...]:
    """What launches of a configuration answered to the fixed prompts, whatever they were measured for."""
    launches = {trial.id for trial in trials.values() if trial.fingerprint == fingerprint}
    return tuple(answers for _, answers in store.answers(session_id, launches)[-PASSES:])


def night_comparison(store: Store, session_id: str, config: SessionConfig) -> Comparison:
    """No experiment at all, with everything that the session measured as its past: what is known of the noise now."""
    everything = [m for m in store.measurements(session_id) if m.experiment_id != CONFIRM]
    epochs = {name: store.comparison(session_id, name).epoch for name in {m.experiment_id for m in everything}}
    return Comparison(
        experiment_id="",
        workload=config.workload,
        rule=config.judge,
        own=(),
        night=_night(store, session_id, config, "", everything, epochs),
        epoch=store.session(session_id).epoch,
    )


def _night(
    store: Store,
    session_id: str,
    config: SessionConfig,
    experiment_id: str,
    everything: list[Measurement],
    epochs: dict[str, int],
) -> tuple[Seen, ...]:
    """Valid runs of earlier experiments; those of a candidate that collapsed say nothing about this server's noise.

    Both sides of a sentinel are the parent, and are learned from as such: one that looked like a gain thereby raises
    what is believed of the noise.
    """
    collapsed = {n for n, v in store.verdicts(session_id).items() if v.outcome is Outcome.COLLAPSED}
    sentinels = {todo.id for todo in store.todos(session_id) if todo.experiment.purpose is Purpose.SENTINEL}
    wanted = figures(config.workload)
    return tuple(
        Seen(
            experiment_id=m.experiment_id,
            epoch=epochs[m.experiment_id],
            launch=m.trial_id,
            arm=Arm.BASELINE if m.experiment_id in sentinels else m.arm,
            load_point=m.load_point,
            logs=logs,
        )
        for m in everything
        if m.experiment_id != experiment_id
        and (logs := {name: value for name in wanted if (value := log_of(m, name)) is not None})
        and not (m.arm is Arm.CANDIDATE and m.experiment_id in collapsed - sentinels)
    )


def _left(store: Store, session_id: str, experiment_id: str) -> int:
    """How many experiments may still be judged, the one under way included."""
    waiting = (TodoStatus.PENDING, TodoStatus.IN_PROGRESS)
    todos = [t for t in store.todos(session_id) if t.experiment.tries]
    return max(1, sum(1 for t in todos if t.status in waiting or t.id == experiment_id))


def _earlier(store: Store, session_id: str, experiment_id: str) -> tuple[tuple[float, float], ...]:
    """Share of the night's error and what came back of it, of every experiment judged before."""
    verdicts = store.verdicts(session_id)
    tried = {todo.id for todo in store.todos(session_id) if todo.experiment.tries}
    names = [name for name in verdicts if name in tried and name != experiment_id]
    return tuple((float(verdicts[n].rule.get("share", 0)), float(verdicts[n].rule.get("given_back", 0))) for n in names)


def _prices(store: Store, session_id: str, config: SessionConfig, experiment_id: str) -> Prices:
    """Launch and run as seen on this host before the experiment, and the time left then: its plan must not move."""
    now = costs(store, session_id, config, before=experiment_id)
    reserve_s = close_out_s(config.workload, config.judge, now)
    chosen = [d["at"] for d in store.decisions(session_id) if d["subject"] == experiment_id and d["kind"] in _BEGIN]
    left_s = config.policy.budget.time_s - store.active_s(session_id, chosen[-1] if chosen else None) - reserve_s
    return Prices(launch_s=now.launch_s, run_s=now.objective_run_s(config.workload), left_s=max(0.0, left_s))


_BEGIN = (DecisionKind.CHOOSE.value, DecisionKind.CLOSE_OUT.value)


def fresh(trials: list[Trial], everything: list[Measurement], experiment_id: str | None, parent: str) -> bool:
    """Whether the experiment (None: the next one) found a launch of the parent serving that was not measured yet."""
    known = {m.trial_id for m in _before(everything, experiment_id)}
    ready = [t for t in _before(trials, experiment_id) if t.status is TrialStatus.READY]
    return bool(ready) and ready[-1].fingerprint == parent and ready[-1].id not in known


Item = TypeVar("Item", Trial, Measurement)


def _before(items: list[Item], experiment_id: str | None) -> list[Item]:
    """Those that came before the experiment's first one; all when it has none, or None is asked."""
    own = [place for place, item in enumerate(items) if item.experiment_id == experiment_id]
    return items[: own[0]] if own else items


def known(store: Store, session_id: str) -> Known:
    """What the session has learned so far; a launch whose configuration is not on record stays without one."""
    todos, verdicts = store.todos(session_id), store.verdicts(session_id)
    trials = store.trials(session_id)
    specs: dict[str, LaunchSpec] = {}
    for fingerprint in dict.fromkeys(trial.fingerprint for trial in trials):
        with suppress(KeyError):
            specs[fingerprint] = store.spec(fingerprint)
    begun: dict[str, str] = {}
    for todo in todos:
        with suppress(KeyError):
            begun[todo.id] = store.comparison(session_id, todo.id).candidate
    carried = store.carried_over(session_id)
    return Known(
        todos=tuple(todos),
        verdicts=verdicts,
        trials=tuple(trials),
        specs=specs,
        candidates=begun,
        complaints=tuple(taken for taken in store.measurements(session_id) if taken.complaint is not None),
        lost_before={} if carried is None else carried.lost,
    )


def spoilt(store: Store, session_id: str) -> frozenset[str]:
    """Trials of servers that have complained under load: their figures are worth nothing from then on."""
    trials = store.trials(session_id)
    complained = {taken.trial_id for taken in store.measurements(session_id) if taken.complaint is not None}
    processes = [trial.process for trial in trials if trial.id in complained and trial.process is not None]
    return frozenset(trial.id for trial in trials if trial.id in complained or trial.process in processes)


def spent(store: Store, session_id: str) -> Spent:
    """What the budgets have paid so far; time in which no agent was attached is not counted."""
    carried = store.carried_over(session_id)
    before = set() if carried is None else {*carried.lost} - {*store.verdicts(session_id)}
    judged = [
        t
        for t in store.todos(session_id)
        if t.experiment.tries
        and t.status in (TodoStatus.DONE, TodoStatus.BLOCKED, TodoStatus.IN_PROGRESS)
        and t.id not in before
    ]
    launches = [trial for trial in store.trials(session_id) if not trial.adopted and trial.kind == "launch"]
    return Spent(elapsed_s=store.active_s(session_id), experiments=len(judged), restarts=len(launches))


def costs(store: Store, session_id: str, config: SessionConfig, before: str | None = None) -> Costs:
    """Prices as measured in this session (before an experiment): medians of load and of run times by load point."""
    guesses = Costs()
    trials = _before(store.trials(session_id), before)
    loads = sorted(t.load_s for t in trials if t.load_s is not None and not t.adopted)
    done = [m for m in _before(store.measurements(session_id), before) if m.status is MeasurementStatus.VALID]
    run_s: dict[str, float] = {}
    for point in config.workload.load_points:
        seen = sorted(m.seconds for m in done if m.load_point == point.name and m.seconds)
        if seen:
            run_s[point.name] = seen[len(seen) // 2]
    # Before any launch was seen: a deadline is set with room to spare, a load takes a third of it at most.
    launch_s = loads[len(loads) // 2] if loads else min(guesses.launch_s, config.server.start_deadline_s / 3)
    return Costs(launch_s=launch_s, run_s=run_s)


def situation(store: Store, session_id: str, config: SessionConfig) -> Situation:
    """What the chooser chooses by."""
    learned = known(store, session_id)
    return Situation(
        todos=learned.todos,
        policy=config.policy,
        rule=config.judge,
        workload=config.workload,
        spent=spent(store, session_id),
        costs=costs(store, session_id, config),
        blocked_capabilities=all_lost(learned),
    )


def affordable(store: Store, session_id: str, config: SessionConfig) -> bool:
    """Whether a comparison of one more launched candidate still fits before the close-out."""
    now = situation(store, session_id, config)
    return unaffordable(ANYTHING, now.policy, now.spent, now.workload, now.rule, now.costs) is None


def kept_anything(store: Store, session_id: str) -> bool:
    """Whether the known-good configuration is another than the original."""
    return store.role(session_id, Role.KNOWN_GOOD) != store.role(session_id, Role.ORIGINAL)


def too_noisy(store: Store, session_id: str) -> str | None:
    """Why the host is too noisy to go on: the baseline was void, or the last two experiments were."""
    void: list[str | None] = []
    for name, verdict in store.verdicts(session_id).items():
        own = store.measurements(session_id, name)
        noise = verdict.outcome is Outcome.INVALID and bool(own) and noisy(own[-1].reasons)
        void.append(f"too noisy to judge: {own[-1].reasons[0]}" if noise else None)
        if noise and name == BASELINE:
            return void[-1]
    return void[-1] if len(void) >= 2 and None not in void[-2:] else None
