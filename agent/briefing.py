"""Lays out from the store what a language model is told, may look up, and is held against; it decides nothing."""

from __future__ import annotations

from agent.catalogue.knowledge import PlainChange, knowledge, known_names, known_values
from agent.catalogue.model import traits
from agent.config import SessionConfig
from agent.evidence import costs, spent
from agent.planners.catalogue import NUMERICS
from agent.planners.dials import Hint
from agent.planners.look_ups import Shelf
from agent.planners.screen import OWN, Bounds
from agent.planners.table import Briefing, Tried, names
from agent.policy import left_s
from state.errors import RatchetError
from state.models import (
    Change,
    EnvChange,
    FlagChange,
    LaunchSpec,
    Measurement,
    MeasurementStatus,
    Purpose,
    Role,
    Telemetry,
    Todo,
    TodoStatus,
    TrialStatus,
    Verdict,
)
from state.replay import measurement_line
from state.store import Store
from tools.servers.base import names_secret
from tools.servers.checks import expected
from tools.target import Target, TargetFacts

WAITS = (TodoStatus.PENDING, TodoStatus.IN_PROGRESS)


def briefing(store: Store, session_id: str, config: SessionConfig, facts: TargetFacts) -> Briefing:
    """What the model is told before its first answer."""
    row, todos = store.session(session_id), store.todos(session_id)
    spec, engine = _parent(store, session_id), row.adoption.spec.engine
    verdicts = store.verdicts(session_id)
    model = facts.model or {}
    variables = _variables(engine, spec, config, facts)
    return Briefing(
        engine=engine,
        version=facts.engine_version,
        hardware=row.adoption.hardware,
        traits=(*((str(model["model_type"]),) if "model_type" in model else ()), *sorted(traits(model))),
        facts=facts,
        spec=spec,
        first=frozenset(known_names(engine, facts.gpus)),
        variables=variables,
        closed=_closed(engine, spec, config, facts, variables),
        workload=config.workload,
        policy=config.policy,
        levels=_levels(store, session_id, spec.fingerprint),
        tried=tuple(_tried(todo, verdicts.get(todo.id)) for todo in todos if _was_tried(todo)),
        waiting=tuple(f"{t.id}: {_changes(t)}" for t in todos if t.status in WAITS and t.experiment.changes),
        findings=tuple(finding.statement for finding in store.findings(session_id)),
        left=_left(store, session_id, config),
        look_ups=_look_ups(config),
    )


def hints(told: Briefing, todos: list[Todo]) -> dict[str, Hint]:
    """What the engine's catalogue thinks sensible for what may be changed, and what is on the list of it alone."""
    tried: dict[str, list[str | None]] = {}
    for todo in todos:
        (change,) = todo.experiment.changes if len(todo.experiment.changes) == 1 else (None,)
        if isinstance(change, FlagChange | EnvChange):
            tried.setdefault(change.name, []).append(change.value)
    found = {name: known_values(told.engine, name, told.facts.cores) for name in names(told)}
    return {
        name: Hint(values=values, span=span, tried=tuple(tried.get(name, ()))) for name, (values, span) in found.items()
    }


def proposals_made(store: Store, session_id: str) -> int:
    """How many experiments of a language model the session has put on its list, those of an earlier night apart."""
    carried = store.carried_over(session_id)
    before = () if carried is None else carried.todos
    return sum(todo.experiment.source.kind == "model" and todo.id not in before for todo in store.todos(session_id))


def bounds(store: Store, session_id: str, config: SessionConfig, facts: TargetFacts, target: Target) -> Bounds:
    """What its proposals are held against."""
    parent, todos = _parent(store, session_id), store.todos(session_id)

    def derive(changes: tuple[PlainChange, ...]) -> LaunchSpec:
        return target.derive(parent, changes)

    section, made = config.planner.model, proposals_made(store, session_id)
    return Bounds(
        engine=store.session(session_id).adoption.spec.engine,
        parent=parent,
        derive=derive,
        flags=frozenset(flag.name for flag in facts.knobs),
        prefixes=facts.env_prefixes,
        known=_known(store, session_id, todos, target, parent),
        policy=config.policy,
        only=frozenset(config.planner.only),
        skip=frozenset(config.planner.skip),
        model=None if facts.model is None else traits(facts.model),
        made=sum(todo.id.startswith(OWN) for todo in todos),
        room=0 if section is None else section.max_proposals - made,
    )


def shelf(store: Store, session_id: str, facts: TargetFacts) -> Shelf:
    """What it may look up."""
    logs = {}
    for trial in store.trials(session_id):
        if trial.status is TrialStatus.FAILED and trial.failure is not None:
            said = f"{trial.failure.failure_class}: {trial.failure.cause}"
            logs[trial.experiment_id] = f"{said}\n{trial.failure.tail}".strip()
    readings: dict[str, list[str]] = {}
    for taken in store.measurements(session_id):
        readings.setdefault(taken.experiment_id, []).append(f"{measurement_line(taken)}{_telemetry(taken.telemetry)}")
    help_texts = {flag.name: f"takes {expected(flag)}\n{flag.text}" for flag in facts.knobs}
    return Shelf(help=help_texts, log=logs, telemetry={name: "\n".join(lines) for name, lines in readings.items()})


# --- parts -------------------------------------------------------------------------------------------------


def _parent(store: Store, session_id: str) -> LaunchSpec:
    fingerprint = store.role(session_id, Role.KNOWN_GOOD)
    assert fingerprint is not None, "known-good is set when a session opens"
    return store.spec(fingerprint)


def _variables(engine: str, spec: LaunchSpec, config: SessionConfig, facts: TargetFacts) -> tuple[str, ...]:
    """The engine's own variables that are set or that its catalogue knows."""
    names = [
        name
        for name in (*spec.env, *known_names(engine, facts.gpus))
        if not name.startswith("-") and not names_secret(name)
    ]
    own = [name for name in dict.fromkeys(names) if facts.env_prefixes and f"{name}=".startswith(facts.env_prefixes)]
    return tuple(name for name in own if name not in config.policy.keep_env)


def _closed(
    engine: str, spec: LaunchSpec, config: SessionConfig, facts: TargetFacts, variables: tuple[str, ...]
) -> frozenset[str]:
    """Flags and variables of which the session file tries nothing, by the topics that the catalogue gives them."""
    only, out = set(config.planner.only), {*config.planner.skip, *config.policy.drop}
    if not only and not out:
        return frozenset()
    known = None if facts.model is None else traits(facts.model)
    changes: list[PlainChange] = [FlagChange(name=flag.name) for flag in facts.knobs]
    changes += [EnvChange(name=name, value="") for name in variables]
    closed = set()
    for change in changes:
        told = knowledge(engine, (change,), spec, known)
        topics = {*told.tags, *((NUMERICS,) if told.numerics else ())}
        if topics & out or (only and not topics & only):
            closed.add(change.name)
    return frozenset(closed)


def _was_tried(todo: Todo) -> bool:
    ended = (TodoStatus.DONE, TodoStatus.BLOCKED, TodoStatus.SKIPPED)
    return todo.experiment.purpose is Purpose.TRY and bool(todo.experiment.changes) and todo.status in ended


def _tried(todo: Todo, verdict: Verdict | None) -> Tried:
    return Tried(
        id=todo.id,
        changes=_changes(todo),
        outcome=verdict.outcome.value if verdict is not None else todo.status.value,
        effect=verdict.objective.percent if verdict is not None and verdict.objective is not None else "",
        hoped=todo.experiment.expected_gain,
        why=verdict.reason if verdict is not None else todo.reason,
    )


def _changes(todo: Todo) -> str:
    return ", ".join(map(str, todo.experiment.changes))


def _levels(store: Store, session_id: str, fingerprint: str) -> tuple[str, ...]:
    """The last valid run of what is known-good now, at each load point."""
    launches = {trial.id for trial in store.trials(session_id) if trial.fingerprint == fingerprint}
    last: dict[str, Measurement] = {
        taken.load_point: taken
        for taken in store.measurements(session_id)
        if taken.trial_id in launches and taken.status is MeasurementStatus.VALID
    }
    return tuple(f"measured: {measurement_line(taken)}{_telemetry(taken.telemetry)}" for taken in last.values())


def _telemetry(seen: Telemetry | None) -> str:
    if seen is None:
        return ""
    readings = (
        ("server {:.1f} cores", seen.server_cpu_cores),
        ("others {:.2f} cores", seen.foreign_cpu_cores),
        ("{:.0f} MiB free", seen.mem_available_mb),
        ("server {:.0f} MiB", seen.server_rss_mb),
    )
    told = [words.format(value) for words, value in readings if value is not None]
    if seen.gpu:
        told.append(f"GPU {seen.gpu}")
    return f"; {', '.join(told)}" if told else ""


def _look_ups(config: SessionConfig) -> tuple[str, ...]:
    section = config.planner.model
    if section is None or not section.look_ups:
        return ()
    source = f"lines of source files, in {len(section.source_roots)} folders" if section.source_roots else ""
    return tuple(filter(None, ("help texts, ends of logs, readings", source)))


def _left(store: Store, session_id: str, config: SessionConfig) -> tuple[str, ...]:
    used, prices, budget = spent(store, session_id), costs(store, session_id, config), config.policy.budget
    free_s = left_s(config.policy, used, config.workload, config.judge, prices)
    section, made = config.planner.model, proposals_made(store, session_id)
    return (
        f"{max(0.0, free_s) / 60:.0f} min, {max(0, budget.experiments - used.experiments)} experiments and "
        f"{max(0, budget.restarts - used.restarts)} restarts; a launch takes about {prices.launch_s:.0f} s",
        f"you may add {0 if section is None else max(0, section.max_proposals - made)} experiments more",
    )


def _known(store: Store, session_id: str, todos: list[Todo], target: Target, parent: LaunchSpec) -> dict[str, str]:
    """Fingerprint → id of every configuration that was tried or waits."""
    found: dict[str, str] = {}
    for todo in todos:
        begun = _candidate(store, session_id, todo.id)
        fingerprint = begun or _would_be(target, parent, todo.experiment.changes)
        if fingerprint is not None and todo.experiment.changes:
            found.setdefault(fingerprint, todo.id)
    return found


def _candidate(store: Store, session_id: str, name: str) -> str | None:
    try:
        return store.comparison(session_id, name).candidate
    except KeyError:
        return None


def _would_be(target: Target, parent: LaunchSpec, changes: tuple[Change, ...]) -> str | None:
    try:
        return target.derive(parent, changes).fingerprint
    except RatchetError:
        return None
