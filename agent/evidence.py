"""Reads the store and lays out what the pure functions judge by; it decides nothing and writes nothing."""

from __future__ import annotations

from agent.chooser import Situation
from agent.config import SessionConfig
from agent.judge import Comparison, log_tok_s
from agent.policy import Costs, Spent
from agent.validity import noisy
from state.models import (
    Failure,
    Measurement,
    MeasurementStatus,
    Outcome,
    Role,
    TodoStatus,
    Trial,
    TrialStatus,
)
from state.store import Store
from tools.diagnose import Action

CLOSE_OUT = "close-out"
BASELINE = "baseline"
RESTORE = "restore"
CONFIRM = "confirm"
"""The runs with which a session confirms what it leaves; they belong to no comparison."""
ABANDONED = "abandoned"
BUILT_IN = frozenset({CLOSE_OUT, BASELINE, RESTORE, CONFIRM})

RETRY_ONCE = frozenset({Action.RETRY_ONCE.value, Action.CLEAN_AND_RETRY_ONCE.value})


def comparison_of(store: Store, session_id: str, config: SessionConfig, experiment_id: str) -> Comparison:
    """Everything the judge may look at for one experiment."""
    row = store.comparison(session_id, experiment_id)
    trials = {trial.id: trial for trial in store.trials(session_id)}
    everything = [m for m in store.measurements(session_id) if m.experiment_id != CONFIRM]
    failure = start_failure(list(trials.values()), experiment_id, row.candidate)
    closing = experiment_id == CLOSE_OUT
    epochs = {name: store.comparison(session_id, name).epoch for name in {m.experiment_id for m in everything}}
    return Comparison(
        experiment_id=experiment_id,
        workload=config.workload,
        rule=config.judge,
        share=sum(1 for todo in store.todos(session_id) if todo.experiment.changes),
        own=tuple(m for m in everything if m.experiment_id == experiment_id),
        record=()
        if closing
        else tuple(
            m
            for m in everything
            if m.experiment_id != experiment_id
            and epochs[m.experiment_id] == row.epoch
            and trials[m.trial_id].fingerprint == row.parent
            and m.status is MeasurementStatus.VALID
        ),
        groups=tuple(
            (m.load_point, trials[m.trial_id].fingerprint, value)
            for m in everything
            if (value := log_tok_s(m)) is not None
        ),
        start_failure=None if failure is None or row.candidate == row.parent else _failure_text(failure),
        failed_launches=tuple(
            trial.id
            for trial in trials.values()
            if trial.experiment_id == experiment_id
            and trial.fingerprint == row.candidate
            and trial.status is TrialStatus.FAILED
        ),
        observation=not row.experiment.changes and not closing,
        close_out=closing,
    )


def start_failure(trials: list[Trial], experiment_id: str, fingerprint: str) -> Failure | None:
    """Why the candidate cannot start, once it had the tries that its class of failure deserves."""
    failures = [
        trial.failure
        for trial in trials
        if trial.experiment_id == experiment_id
        and trial.fingerprint == fingerprint
        and trial.status is TrialStatus.FAILED
        and trial.failure is not None
        and trial.failure.failure_class != ABANDONED
    ]
    if not failures:
        return None
    tries = 2 if failures[-1].action in RETRY_ONCE else 1
    return failures[-1] if len(failures) >= tries else None


def spent(store: Store, session_id: str) -> Spent:
    """What the budgets have paid so far; time in which no agent was attached is not counted."""
    judged = [
        t
        for t in store.todos(session_id)
        if t.experiment.changes and t.status in (TodoStatus.DONE, TodoStatus.BLOCKED, TodoStatus.IN_PROGRESS)
    ]
    launches = [trial for trial in store.trials(session_id) if not trial.adopted]
    return Spent(elapsed_s=store.active_s(session_id), experiments=len(judged), restarts=len(launches))


def costs(store: Store, session_id: str, config: SessionConfig) -> Costs:
    """Prices as measured in this session: medians of load times and of run times by load point."""
    guesses = Costs()
    loads = sorted(t.load_s for t in store.trials(session_id) if t.load_s is not None and not t.adopted)
    run_s: dict[str, float] = {}
    for point in config.workload.load_points:
        seen = sorted(m.seconds for m in _finished(store, session_id) if m.load_point == point.name and m.seconds)
        if seen:
            run_s[point.name] = seen[len(seen) // 2]
    # Before any launch was seen: a deadline is set with room to spare, a load takes a third of it at most.
    launch_s = loads[len(loads) // 2] if loads else min(guesses.launch_s, config.server.start_deadline_s / 3)
    return Costs(launch_s=launch_s, run_s=run_s)


def situation(store: Store, session_id: str, config: SessionConfig) -> Situation:
    """What the chooser chooses by."""
    todos = store.todos(session_id)
    return Situation(
        todos=tuple(todos),
        policy=config.policy,
        rule=config.judge,
        workload=config.workload,
        spent=spent(store, session_id),
        costs=costs(store, session_id, config),
        blocked_capabilities=frozenset(todo.id for todo in todos if todo.status is TodoStatus.BLOCKED),
    )


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


def _finished(store: Store, session_id: str) -> list[Measurement]:
    return [m for m in store.measurements(session_id) if m.status is MeasurementStatus.VALID]


def _failure_text(failure: Failure) -> str:
    return f"{failure.failure_class}: {failure.cause}"
