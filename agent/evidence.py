"""Reads the store and lays out what the pure functions judge by; it decides nothing and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

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
    Verdict,
)
from state.store import ComparisonRow, Store
from state.tables import ANSWERS, DECISIONS, EXPERIMENT, FINGERPRINT, MEASUREMENTS, TODOS, TRIALS, VERDICTS

CLOSE_OUT = "close-out"
BASELINE = "baseline"
RESTORE = "restore"
CONFIRM = "confirm"
"""The runs with which a session confirms what it leaves; they belong to no comparison."""
ANYTHING = Experiment(title="any", hypothesis="any", changes=(FlagChange(name="--any"),))
BUILT_IN = frozenset({CLOSE_OUT, BASELINE, RESTORE, CONFIRM})
RECORD_RUNS = 100
LOOKED_BACK = 1000
"""So many of the parent's newest earlier runs at a load point stand beside an experiment's own, looked for in so many
of the session's newest runs. What is believed of level and noise rests on all of them."""
NEWEST = 100
"""So many of the newest launches, and of the newest runs at a load point, tell what one costs now; it is looked for in
the newest LOOKED_BACK."""
LEARNED_FROM = (TODOS, TRIALS, MEASUREMENTS, VERDICTS)


class Before(NamedTuple):
    """What stands beside an experiment from its begin to its verdict, whatever itself is measured meanwhile."""

    record: tuple[Measurement, ...]
    night: tuple[Seen, ...]
    left: int
    earlier: tuple[tuple[float, float], ...]
    prices: Prices
    fresh: bool


def comparison_of(store: Store, session_id: str, config: SessionConfig, experiment_id: str) -> Comparison:
    """Everything the judge may look at for one experiment."""
    return store.derived(
        session_id,
        "comparison",
        (*LEARNED_FROM, DECISIONS, ANSWERS),
        lambda: _comparison(store, session_id, config, store.comparison(session_id, experiment_id)),
        given=(config, store.comparison(session_id, experiment_id)),
    )


def _comparison(store: Store, session_id: str, config: SessionConfig, row: ComparisonRow) -> Comparison:
    experiment_id, purpose = row.experiment.id, row.experiment.purpose
    before = store.derived(
        session_id,
        "before",
        (*LEARNED_FROM, DECISIONS),
        lambda: _before(store, session_id, config, row),
        but=experiment_id,
        given=(config, row),
    )
    own = store.measurements(session_id, experiment_id)
    launches = store.trials(session_id, (EXPERIMENT, experiment_id))
    start = failed_start(launches, experiment_id, row.candidate)
    tried = store.trials(session_id, (FINGERPRINT, row.candidate))
    load = under_load(own, tried, experiment_id, row.candidate)
    other = row.candidate != row.parent
    compares = row.experiment.numerics or config.workload.guards.answers != "off"
    return Comparison(
        experiment_id=experiment_id,
        workload=config.workload,
        rule=config.judge,
        own=tuple(own),
        record=before.record,
        night=before.night,
        epoch=row.epoch,
        left=before.left,
        earlier=before.earlier,
        prices=before.prices,
        fresh=before.fresh,
        start_failure=told(start.failure) if other and start is not None and start.step not in AGAIN else None,
        complaint=told(load.failure) if other and load is not None and load.step in BLAMES else None,
        failed_launches=tuple(
            trial.id for trial in launches if trial.fingerprint == row.candidate and trial.status is TrialStatus.FAILED
        ),
        purpose=purpose,
        observes=row.experiment.observes,
        numerics=row.experiment.numerics,
        parent_answers=_passes(store, session_id, row.parent) if compares else (),
        candidate_answers=_passes(store, session_id, row.candidate) if compares else (),
    )


def _before(store: Store, session_id: str, config: SessionConfig, row: ComparisonRow) -> Before:
    experiment_id, purpose = row.experiment.id, row.experiment.purpose
    trials, runs = store.before(session_id, experiment_id)
    taken = [run for run in runs if run.experiment_id != CONFIRM]
    return Before(
        record=() if purpose is Purpose.CLOSE_OUT else _record(store, session_id, config, row),
        night=_night(store, session_id, config, experiment_id),
        left=_left(store, session_id, experiment_id),
        earlier=_earlier(store, session_id, experiment_id),
        prices=_prices(store, session_id, config, experiment_id),
        fresh=purpose is Purpose.TRY and fresh(trials, taken, row.parent),
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


def _passes(store: Store, session_id: str, fingerprint: str) -> tuple[tuple[Answer, ...], ...]:
    """What launches of a configuration answered to the fixed prompts, whatever they were measured for."""

    def newest() -> tuple[tuple[Answer, ...], ...]:
        launches = [trial.id for trial in store.trials(session_id, (FINGERPRINT, fingerprint))]
        return tuple(answers for _, answers in store.answers(session_id, launches)[-PASSES:])

    # A launch is on record before its first answer.
    return store.derived(session_id, ("passes", fingerprint), (ANSWERS,), newest)


def night_comparison(store: Store, session_id: str, config: SessionConfig) -> Comparison:
    """No experiment at all, with everything that the session measured as its past: what is known of the noise now."""
    return Comparison(
        experiment_id="",
        workload=config.workload,
        rule=config.judge,
        own=(),
        night=_night(store, session_id, config, ""),
        epoch=store.session(session_id).epoch,
    )


def _record(store: Store, session_id: str, config: SessionConfig, row: ComparisonRow) -> tuple[Measurement, ...]:
    """The newest valid runs of the parent in this epoch before the experiment, oldest first."""
    begun = store.comparisons(session_id)
    missing = dict.fromkeys((point.name for point in config.workload.load_points), RECORD_RUNS)
    found: list[Measurement] = []
    others = (
        m for m in reversed(store.measurements(session_id)) if m.experiment_id not in (row.experiment.id, CONFIRM)
    )
    for taken in islice(others, LOOKED_BACK):
        if not missing.get(taken.load_point) or taken.status is not MeasurementStatus.VALID:
            continue
        if begun[taken.experiment_id].epoch != row.epoch:
            continue
        if store.trial(session_id, taken.trial_id).fingerprint == row.parent:
            missing[taken.load_point] -= 1
            found.append(taken)
    return tuple(reversed(found))


def _night(store: Store, session_id: str, config: SessionConfig, experiment_id: str) -> tuple[Seen, ...]:
    """Valid runs of earlier experiments, oldest first.

    What was once read of a run is the same object the next time, as long as nothing that it rests on was written: a
    longer night then begins like the shorter one, and nobody has to look at all of it again.
    """
    begun, verdicts = store.comparisons(session_id), store.verdicts(session_id)
    known: dict[str, tuple[Measurement, ComparisonRow, Verdict | None, Seen | None]]
    known = store.derived(session_id, "seen", (), dict, given=(config,))
    night: list[Seen] = []
    for taken in store.measurements(session_id):
        name = taken.experiment_id
        if name in (experiment_id, CONFIRM):
            continue
        row, verdict = begun[name], verdicts.get(name)
        found = known.get(taken.id)
        if found is None or found[0] is not taken or found[1] is not row or found[2] is not verdict:
            found = known[taken.id] = (taken, row, verdict, _seen(taken, row, verdict, config))
        if found[3] is not None:
            night.append(found[3])
    return tuple(night)


def _seen(taken: Measurement, row: ComparisonRow, verdict: Verdict | None, config: SessionConfig) -> Seen | None:
    """What a run tells of the noise: nothing if it is void, or a candidate's that collapsed.

    Both sides of a sentinel are the parent, and are learned from as such: one that looked like a gain thereby raises
    what is believed of the noise.
    """
    sentinel = row.experiment.purpose is Purpose.SENTINEL
    collapsed = verdict is not None and verdict.outcome is Outcome.COLLAPSED and not sentinel
    logs = {name: value for name in figures(config.workload) if (value := log_of(taken, name)) is not None}
    if not logs or (taken.arm is Arm.CANDIDATE and collapsed):
        return None
    return Seen(
        experiment_id=taken.experiment_id,
        epoch=row.epoch,
        launch=taken.trial_id,
        arm=Arm.BASELINE if sentinel else taken.arm,
        load_point=taken.load_point,
        logs=logs,
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
    chosen = [made["at"] for made in store.decisions(session_id, experiment_id) if made["kind"] in _BEGIN]
    left_s = config.policy.budget.time_s - store.active_s(session_id, chosen[-1] if chosen else None) - reserve_s
    return Prices(launch_s=now.launch_s, run_s=now.objective_run_s(config.workload), left_s=max(0.0, left_s))


_BEGIN = (DecisionKind.CHOOSE.value, DecisionKind.CLOSE_OUT.value)


def fresh(trials: Sequence[Trial], before: Sequence[Measurement], parent: str) -> bool:
    """Whether an experiment finds a launch of the parent serving that was not measured yet, by all that came before."""
    serving = next((trial for trial in reversed(trials) if trial.status is TrialStatus.READY), None)
    if serving is None or serving.fingerprint != parent:
        return False
    return all(taken.trial_id != serving.id for taken in before)


def known(store: Store, session_id: str) -> Known:
    """What the session has learned so far; a launch whose configuration is not on record stays without one."""
    return store.derived(session_id, "known", LEARNED_FROM, lambda: _known(store, session_id))


def _known(store: Store, session_id: str) -> Known:
    specs: dict[str, LaunchSpec] = {}
    for fingerprint in store.launched(session_id):
        with suppress(KeyError):
            specs[fingerprint] = store.spec(fingerprint)
    return Known(
        todos=tuple(store.todos(session_id)),
        verdicts=store.verdicts(session_id),
        trials=tuple(store.trials(session_id)),
        specs=specs,
        candidates={name: row.candidate for name, row in store.comparisons(session_id).items()},
        complaints=tuple(store.complaints(session_id)),
    )


def spoilt(store: Store, session_id: str) -> frozenset[str]:
    """Trials of servers that have complained under load: their figures are worth nothing from then on."""
    return store.derived(session_id, "spoilt", (TRIALS, MEASUREMENTS), lambda: _spoilt(store, session_id))


def _spoilt(store: Store, session_id: str) -> frozenset[str]:
    complained = {taken.trial_id for taken in store.complaints(session_id)}
    if not complained:
        return frozenset()
    trials = store.trials(session_id)
    processes = {trial.process for trial in trials if trial.id in complained and trial.process is not None}
    return frozenset(trial.id for trial in trials if trial.id in complained or trial.process in processes)


def spent(store: Store, session_id: str) -> Spent:
    """What the budgets have paid so far; time in which no agent was attached is not counted."""

    def counted() -> tuple[int, int]:
        judged = [
            t
            for t in store.todos(session_id)
            if t.experiment.tries and t.status in (TodoStatus.DONE, TodoStatus.BLOCKED, TodoStatus.IN_PROGRESS)
        ]
        launches = [trial for trial in store.trials(session_id) if not trial.adopted and trial.kind == "launch"]
        return len(judged), len(launches)

    experiments, restarts = store.derived(session_id, "spent", (TODOS, TRIALS), counted)
    return Spent(elapsed_s=store.active_s(session_id), experiments=experiments, restarts=restarts)


def costs(store: Store, session_id: str, config: SessionConfig, before: str | None = None) -> Costs:
    """Prices as measured in this session (before an experiment): medians of the newest launches and runs."""
    guesses = Costs()
    trials, taken = store.before(session_id, before)
    launched = islice(reversed(trials), LOOKED_BACK)
    loads = sorted(islice((t.load_s for t in launched if t.load_s is not None and not t.adopted), NEWEST))
    run_s: dict[str, float] = {}
    for point in config.workload.load_points:
        seen = sorted(islice(_seconds(islice(reversed(taken), LOOKED_BACK), point.name), NEWEST))
        if seen:
            run_s[point.name] = seen[len(seen) // 2]
    # Before any launch was seen: a deadline is set with room to spare, a load takes a third of it at most.
    launch_s = loads[len(loads) // 2] if loads else min(guesses.launch_s, config.server.start_deadline_s / 3)
    return Costs(launch_s=launch_s, run_s=run_s)


def _seconds(runs: Iterable[Measurement], point: str) -> Iterator[float]:
    """How long valid runs at a load point took."""
    return (m.seconds for m in runs if m.load_point == point and m.status is MeasurementStatus.VALID and m.seconds)


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

    def void(name: str) -> str | None:
        verdict, own = verdicts[name], store.measurements(session_id, name)
        noise = verdict.outcome is Outcome.INVALID and bool(own) and noisy(own[-1].reasons)
        return f"too noisy to judge: {own[-1].reasons[0]}" if noise else None

    verdicts = store.verdicts(session_id)
    if BASELINE in verdicts and void(BASELINE) is not None:
        return void(BASELINE)
    newest = [void(name) for name in list(verdicts)[-2:]]
    return newest[-1] if len(newest) == 2 and None not in newest else None
