"""What a language model is told of a session, as one compact table of text; pure, and it never holds a secret.

Of the command line and the environment only what may be changed is shown: no path, address or key stands there. Words
that come from logs and help texts are quoted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.planners.look_ups import quoted
from state.models import Frozen, LaunchSpec, Policy, Workload
from tools.servers.base import KnownFlag
from tools.servers.checks import expected
from tools.target import TargetFacts

FLAGS = 80
"""So many flags are shown with their help; of all others the names are."""
HELP = 110
ROWS = 60
CAUSE = 200


class Tried(Frozen):
    """One experiment with what came of it."""

    id: str
    changes: str
    outcome: str
    effect: str = ""
    hoped: float = 0.0
    why: str = ""


class Briefing(Frozen):
    """All that the table is made of."""

    engine: str
    version: str
    hardware: str
    traits: tuple[str, ...] = ()
    facts: TargetFacts
    spec: LaunchSpec
    first: frozenset[str] = frozenset()
    """Names that are shown before all others: what the catalogue knows."""
    variables: tuple[str, ...] = ()
    closed: frozenset[str] = frozenset()
    """Names that the session's rules close, whatever the server says of them."""
    workload: Workload
    policy: Policy
    levels: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    waiting: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    look_ups: tuple[str, ...] = ()


def table(briefing: Briefing) -> str:
    """The whole text."""
    sections = (
        ("Server", _server(briefing)),
        ("What is measured", _workload(briefing)),
        ("Flags that may be changed", _flags(briefing)),
        ("Variables that may be changed", _variables(briefing)),
        ("Rules of this session", _rules(briefing.policy)),
        ("Tried (changes; outcome; effect with 95 % interval; hoped; why)", map(_tried, briefing.tried[-ROWS:])),
        ("Waits on the list already", briefing.waiting[:ROWS]),
        ("Learned", quoted(briefing.findings[-ROWS:])),
        ("May be looked up", briefing.look_ups),
        ("Left", briefing.left),
    )
    return "\n".join(line for title, lines in sections for line in _section(title, lines))


def names(briefing: Briefing) -> tuple[str, ...]:
    """Flags and variables that may be changed."""
    return tuple(flag.name for flag in open_flags(briefing)) + open_variables(briefing)


def open_flags(briefing: Briefing) -> list[KnownFlag]:
    """Those that are set or known to matter first, else in the order of the help."""
    closed = {*briefing.policy.keep_flags, *briefing.closed}
    listed = [flag for flag in briefing.facts.knobs if flag.name not in closed]
    return sorted(listed, key=lambda flag: flag.name not in briefing.spec.flags and flag.name not in briefing.first)


def open_variables(briefing: Briefing) -> tuple[str, ...]:
    """In the order in which they were given."""
    return tuple(name for name in briefing.variables if name not in briefing.closed)


def _section(title: str, lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    yield f"## {title}"
    yield from [f"- {line}" for line in lines] or ["- nothing"]
    yield ""


def _server(briefing: Briefing) -> Iterator[str]:
    facts = briefing.facts
    yield f"{briefing.engine}, version {briefing.version or 'unknown'}"
    yield f"{facts.cores} cores, {facts.mem_available_mb:.0f} MiB of memory free, {facts.gpus} GPUs"
    if briefing.hardware:
        yield f"hardware: {briefing.hardware}"
    if briefing.traits:
        yield f"the model: {', '.join(briefing.traits)}"


def _workload(briefing: Briefing) -> Iterator[str]:
    workload = briefing.workload
    yield f"maximise output tokens per second at {', '.join(workload.objective.at)}"
    for point in workload.load_points:
        shape = f"{point.prompt_tokens} tokens in ({point.prompt}), {point.output_tokens} out"
        yield f"{point.name}: {point.concurrency} requests at once, {shape}"
    tolerance = workload.guards.other_points_tolerance
    yield f"elsewhere at most {tolerance:.0%} may be lost; answers must stay: {workload.guards.answers}"
    for ceiling in workload.guards.ceilings:
        yield f"{ceiling.series} must stay below {ceiling.max_ms:g} ms at {', '.join(ceiling.at) or 'every load point'}"
    yield from briefing.levels


def _flags(briefing: Briefing) -> Iterator[str]:
    listed = open_flags(briefing)
    for flag in listed[:FLAGS]:
        value = briefing.spec.flags.get(flag.name)
        now = "not set" if value is None else f"now {' '.join(value) or 'set'}"
        default = f", default {flag.default}" if flag.default else ""
        takes = expected(flag) if flag.takes_value else "no value"
        (text,) = quoted([" ".join(flag.text.split())[:HELP]])
        yield f"{flag.name}: {now}; takes {takes}{default}; {text}"
    if listed[FLAGS:]:
        yield f"and, help on request: {', '.join(flag.name for flag in listed[FLAGS:])}"


def _variables(briefing: Briefing) -> Iterator[str]:
    for name in open_variables(briefing):
        yield f"{name}: {f'now {briefing.spec.env[name]}' if name in briefing.spec.env else 'not set'}"


def _rules(policy: Policy) -> Iterator[str]:
    yield from (f"{name} must stay {value}" for name, value in sorted(policy.keep_env.items()))
    if policy.drop:
        yield f"nothing about {', '.join(policy.drop)} is tried"


def _tried(one: Tried) -> str:
    (why,) = quoted([one.why[:CAUSE]])
    hoped = f"{one.hoped:+.0%}" if one.hoped else "–"
    return f"{one.id}: {one.changes}; {one.outcome}; {one.effect or '–'}; {hoped}; {why}"
