"""Reads the store and lays out what the pure functions judge by; it decides nothing and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from agent.chooser import Situation, share_level
from agent.config import SessionConfig
from agent.judge import Comparison, Prices, Seen, figures, log_of
from agent.known import AGAIN, BLAMES, Known, failed_start, told, under_load
from agent.policy import Costs, Spent, left_s, needed_disruption, unaffordable
from agent.relatives import all_lost
from agent.validity import noisy
from agent.window import closes_in, later, window_from
from state.models import (
    Answer,
    Arm,
    DecisionKind,
    Disruption,
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
from state.tables import (
    ANSWERS,
    DECISIONS,
    EXPERIMENT,
    FINGERPRINT,
    LAUNCHED,
    MEASUREMENTS,
    PURPOSE,
    STATUS,
    TODOS,
    TRIALS,
    TRIED,
    VERDICTS,
    Judged,
    Listed,
)

CLOSE_OUT = "close-out"
BASELINE = "baseline"
RESTORE = "restore"
CONFIRM = "confirm"
"""The runs with which a session confirms what it leaves; they belong to no comparison."""
ENDING = frozenset({Purpose.WITHOUT, Purpose.CLOSE_OUT})
ANYTHING = Experiment(title="any", hypothesis="any", changes=(FlagChange(name="--any"),))
BUILT_IN = frozenset({CLOSE_OUT, BASELINE, RESTORE, CONFIRM})
RECORD_RUNS = 100
LOOKED_BACK = 1000
"""So many of the parent's newest earlier runs at a load point stand beside an experiment's own, looked for in so many
of the session's newest runs. What is believed of level and noise rests on all of them."""
NEWEST = 100
"""So many of the newest launches, and of the newest runs at a load point, tell what one costs now."""
FORESEEN = 8
"""So many experiments the list may still grow by: each that is judged leaves them their part of the night's error."""
LEARNED_FROM = (TODOS, TRIALS, MEASUREMENTS, VERDICTS)
WAITING = (TodoStatus.PENDING, TodoStatus.IN_PROGRESS)
BEGUN = (TodoStatus.DONE, TodoStatus.BLOCKED, TodoStatus.IN_PROGRESS)
TAUGHT = frozenset({DecisionKind.KEEP.value, DecisionKind.REVERT.value, DecisionKind.BLOCK.value})
"""Decisions after which it is known more of what the changes do."""
Kept = TypeVar("Kept")


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
        foreseen=FORESEEN if adds(config) else 0,
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
        repeats=bool(row.experiment.again),
        parent_answers=_passes(store, session_id, row.parent) if compares else (),
        candidate_answers=_passes(store, session_id, row.candidate) if compares else (),
    )


def _before(store: Store, session_id: str, config: SessionConfig, row: ComparisonRow) -> Before:
    experiment_id, purpose = row.experiment.id, row.experiment.purpose
    trials, runs = store.before(session_id, experiment_id)
    last = _number(runs[-1]) if runs else 0

    def measured(launch: str) -> bool:
        taken = store.measured_on(session_id, launch)
        return any(run.experiment_id != CONFIRM and _number(run) <= last for run in taken)

    return Before(
        record=() if purpose is Purpose.CLOSE_OUT else _record(store, session_id, config, row),
        night=_night(store, session_id, config, experiment_id),
        left=_left(store, session_id, experiment_id),
        earlier=_earlier(store, session_id, experiment_id),
        prices=_prices(store, session_id, config, experiment_id),
        fresh=purpose is Purpose.TRY and fresh(trials, measured, row.parent),
    )


def adds(config: SessionConfig) -> bool:
    """Whether what is learned may put experiments on the list."""
    allowed = config.planner.refine and config.planner.kind != "selftest"
    return allowed and config.policy.max_disruption >= Disruption.RESTART


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
    missing = dict.fromkeys((point.name for point in config.workload.load_points), RECORD_RUNS)
    found: list[Measurement] = []
    others = (
        m for m in reversed(store.measurements(session_id)) if m.experiment_id not in (row.experiment.id, CONFIRM)
    )
    for taken in islice(others, LOOKED_BACK):
        if not any(missing.values()):
            break
        if not missing.get(taken.load_point) or taken.status is not MeasurementStatus.VALID:
            continue
        if store.comparison(session_id, taken.experiment_id).epoch != row.epoch:
            continue
        if store.trial(session_id, taken.trial_id).fingerprint == row.parent:
            missing[taken.load_point] -= 1
            found.append(taken)
    return tuple(reversed(found))


class Passed:
    """Runs from the begin of a session on whose experiments are over, those experiments, and what the runs tell."""

    def __init__(self) -> None:
        self.runs: list[Measurement] = []
        self.names: set[str] = set()
        self.night: list[Seen] = []

    def forget(self) -> None:
        """Begin anew."""
        self.runs, self.names, self.night = [], set(), []


def _night(store: Store, session_id: str, config: SessionConfig, experiment_id: str) -> tuple[Seen, ...]:
    """Valid runs of earlier experiments, oldest first.

    What was once read of a run is the same object the next time, as long as nothing that it rests on was written: a
    longer night then begins like the shorter one, and nobody has to look at all of it again.
    """
    passed = store.derived(session_id, "passed", (), Passed, given=(config,))
    runs = store.measurements(session_id)
    if experiment_id in passed.names or runs[: len(passed.runs)] != passed.runs:
        passed.forget()
    verdicts = store.verdicts(session_id)
    over, more = True, list[Seen]()
    for taken in runs[len(passed.runs) :]:
        name = taken.experiment_id
        over = over and name != experiment_id and (name in verdicts or name == CONFIRM)
        seen = None
        if name not in (experiment_id, CONFIRM):
            seen = _seen(taken, store.comparison(session_id, name), verdicts.get(name), config)
        if over:
            passed.runs.append(taken)
            passed.names.add(name)
        if seen is not None:
            (passed.night if over else more).append(seen)
    return (*passed.night, *more)


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
    waiting = store.count(session_id, TODOS, *((TRIED, status) for status in WAITING))
    own = store.todo(session_id, experiment_id)
    counts = own is not None and own.experiment.tries and own.status not in WAITING
    return max(1, waiting + counts)


class Shares:
    """Share of the night's error and what came back of it, by judged experiment, and what is spent of it by all."""

    def __init__(self) -> None:
        self.each: dict[str, tuple[float, float]] = {}
        self.spent = 0.0

    def add(self, name: str, share: float, back: float) -> None:
        """Another verdict; the second one on an experiment stands for both."""
        again = self.each.pop(name, None) is not None
        self.each[name] = share, back
        self.spent = 0.0 if again else self.spent
        for one, returned in [*self.each.values()] if again else [(share, back)]:
            self.spent += one - returned


def _earlier(store: Store, session_id: str, experiment_id: str) -> tuple[tuple[float, float], ...]:
    """Share of the night's error and what came back of it: of all experiments judged before together."""

    def take(shares: Shares, judged: Judged) -> None:
        name, rule = judged.verdict.experiment_id, judged.verdict.rule
        todo = store.todo(session_id, name)
        if todo is not None and todo.experiment.tries:
            shares.add(name, float(rule.get("share", 0)), float(rule.get("given_back", 0)))

    shares = store.folded(session_id, "shares", VERDICTS, Shares, take)
    if experiment_id in shares.each:
        return tuple(share for name, share in shares.each.items() if name != experiment_id)
    return ((shares.spent, 0.0),)


def _prices(store: Store, session_id: str, config: SessionConfig, experiment_id: str) -> Prices:
    """Launch and run as seen on this host before the experiment, and the time left then: its plan must not move."""
    now = costs(store, session_id, config, before=experiment_id)
    begun = [made["at"] for made in store.decisions(session_id, experiment_id) if made["kind"] in _BEGIN]
    then = begun[-1] if begun else None
    used = Spent(
        elapsed_s=store.active_s(session_id, then), experiments=0, restarts=0, open_s=open_s(store, session_id, then)
    )
    left = left_s(config.policy, used, config.workload, config.judge, now)
    return Prices(launch_s=now.launch_s, run_s=now.objective_run_s(config.workload), left_s=max(0.0, left))


_BEGIN = (DecisionKind.CHOOSE.value, DecisionKind.CLOSE_OUT.value)


def fresh(trials: Sequence[Trial], measured: Callable[[str], bool], parent: str) -> bool:
    """Whether an experiment finds a launch of the parent serving that was not measured yet, by all that came before."""
    serving = next((trial for trial in reversed(trials) if trial.status is TrialStatus.READY), None)
    return serving is not None and serving.fingerprint == parent and not measured(serving.id)


def _number(taken: Measurement) -> int:
    return int(taken.id[1:])


def known(store: Store, session_id: str) -> Known:
    """What the session has learned so far; a launch whose configuration is not on record stays without one."""
    return store.derived(session_id, "known", LEARNED_FROM, lambda: _known(store, session_id))


def _known(store: Store, session_id: str) -> Known:
    def launched(specs: dict[str, LaunchSpec], trial: Trial) -> None:
        if trial.fingerprint not in specs:
            with suppress(KeyError):
                specs[trial.fingerprint] = store.spec(trial.fingerprint)

    def begun(candidates: dict[str, str], listed: Listed) -> None:
        if listed.comparison is not None:
            candidates[listed.todo.id] = listed.comparison.candidate

    carried = store.carried_over(session_id)
    return Known(
        todos=tuple(store.todos(session_id)),
        verdicts=store.verdicts(session_id),
        trials=tuple(store.trials(session_id)),
        specs=store.folded(session_id, "launched specs", TRIALS, dict[str, LaunchSpec], launched),
        candidates=store.folded(session_id, "candidates", TODOS, dict[str, str], begun),
        complaints=tuple(store.complaints(session_id)),
        lost_before={} if carried is None else carried.lost,
    )


def learned_since(store: Store, session_id: str, kind: DecisionKind) -> frozenset[str] | None:
    """What kinds of decisions taught something since the last one of a kind; None before the first of that kind."""

    def take(found: list[set[str]], decision: dict[str, Any]) -> None:
        if decision["kind"] == kind.value:
            found[:] = [set()]
        elif found and decision["kind"] in TAUGHT:
            found[0].add(decision["kind"])

    since = store.folded(session_id, ("learned since", kind), DECISIONS, list[set[str]], take)
    return frozenset(since[0]) if since else None


def anything_live(store: Store, session_id: str) -> bool:
    """Whether a configuration was launched that has live state beside its command line."""

    def take(live: set[str], trial: Trial) -> None:
        if trial.fingerprint not in live and store.spec(trial.fingerprint).live:
            live.add(trial.fingerprint)

    return bool(store.folded(session_id, "live", TRIALS, set[str], take))


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
    carried, verdicts = store.carried_over(session_id), store.verdicts(session_id)
    before = [] if carried is None else [store.todo(session_id, name) for name in carried.lost if name not in verdicts]
    not_ours = sum(1 for todo in before if todo is not None and todo.experiment.tries and todo.status in BEGUN)
    experiments = store.count(session_id, TODOS, *((TRIED, status) for status in BEGUN)) - not_ours
    restarts = store.count(session_id, TRIALS, LAUNCHED)
    return Spent(
        elapsed_s=store.active_s(session_id),
        experiments=experiments,
        restarts=restarts,
        open_s=open_s(store, session_id),
    )


def open_s(store: Store, session_id: str, at: float | None = None) -> float | None:
    """Seconds until the window closes (as known at a time), 0 while it is closed; None where none is kept."""
    read = store.clock_read(session_id, at)
    if read is None:
        return None
    then, seen = read
    since_s = (store.clock() if at is None else at) - then
    return closes_in(window_from(seen.window), later(seen.clock, since_s))


class Used:
    """Seconds by judged experiment with its level, and what they come to by level."""

    def __init__(self) -> None:
        self.each: dict[str, tuple[Disruption, float]] = {}
        self.by_level: dict[Disruption, float] = {}

    def add(self, name: str, level: Disruption, seconds: float) -> None:
        """What an experiment took; the second verdict on it stands for both."""
        again = self.each.pop(name, None) is not None
        self.each[name] = level, seconds
        if again:
            self.by_level = {}
        for one, took_s in [*self.each.values()] if again else [(level, seconds)]:
            self.by_level[one] = self.by_level.get(one, 0.0) + took_s


def used_by_level(store: Store, session_id: str) -> dict[Disruption, float]:
    """Seconds from choice to verdict of all experiments so far, by level; the loop's own checks belong to none."""

    def take(used: Used, judged: Judged) -> None:
        name, ended = judged.verdict.experiment_id, judged.at
        todo = store.todo(session_id, name)
        chosen = [made["at"] for made in store.decisions(session_id, name) if made["kind"] == DecisionKind.CHOOSE.value]
        begun = max((at for at in chosen if at <= ended), default=None)
        if todo is None or begun is None or todo.experiment.purpose is not Purpose.TRY:
            return
        away = store.away(session_id)
        lost_s = sum(back - gone for gone, back in away if begun <= gone and back <= ended)
        used.add(name, share_level(todo.experiment), max(0.0, ended - begun - lost_s))

    return dict(store.folded(session_id, "used", VERDICTS, Used, take).by_level)


class Launched(NamedTuple):
    """What one launch took, of which configuration, and the level of the experiment that it was made for, if any."""

    seconds: float
    fingerprint: str
    level: Disruption | None


def costs(store: Store, session_id: str, config: SessionConfig, before: str | None = None) -> Costs:
    """Prices as measured in this session (before an experiment): medians of the newest launches and runs.

    A launch took what its process needed to generate, or, where that was longer, what we waited for it with all that
    belongs to it: the old server's end, patched files, packages.
    """
    guesses = Costs()
    launches, runs = _newest(store, session_id, before)
    loads = sorted(one.seconds for one in launches)
    known_good = store.role(session_id, Role.KNOWN_GOOD)
    back = [one.seconds for one in launches if one.fingerprint == known_good]
    run_s = {point.name: _median(runs[point.name]) for point in config.workload.load_points if runs.get(point.name)}
    levels = {one.level for one in launches if one.level is not None}
    # Before any launch was seen: a deadline is set with room to spare, a load takes a third of it at most. The way
    # back into a window is reserved for that worst case, anything else planned with the usual one.
    dearest_s = config.server.start_deadline_s / 3
    launch_s = loads[len(loads) // 2] if loads else min(guesses.launch_s, dearest_s)
    return Costs(
        launch_s=launch_s,
        # Either side of a comparison: what a change needs, its undoing needs as well.
        level_s={level: _median([one.seconds for one in launches if one.level is level]) for level in levels},
        restore_s=max(back, default=None if loads or config.policy.window is None else dearest_s),
        wait_s=config.manners.wait_inflight_s,
        run_s=run_s,
    )


def _newest(store: Store, session_id: str, before: str | None) -> tuple[list[Launched], dict[str, list[float]]]:
    """The newest launches, and how long the newest valid runs at each load point took."""

    def launched(found: dict[str, Launched], trial: Trial) -> None:
        if trial.load_s is not None and not trial.adopted:
            todo = store.todo(session_id, trial.experiment_id)
            level = needed_disruption(todo.experiment) if todo is not None and todo.experiment.tries else None
            _put(found, trial.id, Launched(max(trial.load_s or 0.0, trial.down_s), trial.fingerprint, level))

    def ran(found: dict[str, dict[str, float]], taken: Measurement) -> None:
        if taken.status is MeasurementStatus.VALID and taken.seconds:
            _put(found.setdefault(taken.load_point, {}), taken.id, taken.seconds)

    own = (EXPERIMENT, before)
    if before is None or not store.count(session_id, TRIALS, own) + store.count(session_id, MEASUREMENTS, own):
        launches = store.folded(session_id, "newest launches", TRIALS, dict[str, Launched], launched)
        runs = store.folded(session_id, "newest runs", MEASUREMENTS, dict[str, dict[str, float]], ran)
    else:
        launches, runs = {}, {}
        trials, measured = store.before(session_id, before)
        for trial in trials:
            launched(launches, trial)
        for taken in measured:
            ran(runs, taken)
    return [*launches.values()], {point: [*seconds.values()] for point, seconds in runs.items()}


def _put(found: dict[str, Kept], name: str, one: Kept) -> None:
    """The newest so many by name."""
    found[name] = one
    if len(found) > NEWEST:
        del found[next(iter(found))]


def _median(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def situation(store: Store, session_id: str, config: SessionConfig) -> Situation:
    """What the chooser chooses by."""
    blocked = store.count(session_id, TODOS, (STATUS, TodoStatus.BLOCKED))
    return Situation(
        todos=tuple(store.todos(session_id, (STATUS, TodoStatus.PENDING))),
        policy=config.policy,
        rule=config.judge,
        workload=config.workload,
        spent=spent(store, session_id),
        costs=costs(store, session_id, config),
        blocked_capabilities=all_lost(known(store, session_id)) if blocked else frozenset(),
        used_s=used_by_level(store, session_id),
    )


def takes_more(store: Store, session_id: str, config: SessionConfig) -> bool:
    """Whether one more launched candidate may be tried: the end has not begun, and it fits before the close-out."""
    ending = store.count(session_id, TODOS, *((PURPOSE, purpose) for purpose in ENDING))
    if ending or config.policy.max_disruption < Disruption.RESTART:
        return False
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
    newest = [void(name) for name in reversed([*islice(reversed(verdicts), 2)])]
    return newest[-1] if len(newest) == 2 and None not in newest else None
