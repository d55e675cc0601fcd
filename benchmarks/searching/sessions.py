"""What a person would tell Ratchet about a space: the session file, and the host that it is about.

It must not help the planner: a session knows of the space the same knobs and values that the rivals are given. What the
catalogue has under its own name is left to it, every other value is an idea of the person who wrote the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.catalogue import CatalogueFacts, experiments
from agent.config import SessionConfig
from benchmarks.searching.spaces import Knob, Space
from state.models import Change
from tools.servers.base import KnownFlag
from tools.simulated import Scenario

SHORT_S = 3600
SHORT = {"baseline_runs": 3, "max_runs": 1, "max_blocks": 12}
"""What a person who has less than an hour asks of the judge: few runs of each, and launches as needed."""
HALF_IN_FLIGHT = {"min_concurrency_share": 0.5}
"""With as many requests as streams and one slot they end one after the other: half are in flight on average."""
MODEL = {"kind": "model", "model": {"base_url": "http://stub.invalid/v1", "model": "stub"}}
MEAN_COUNTS = 0.9
"""A load point may lose as much as others gain, as for the rivals: the mean over all of them is what counts."""


def session_config(
    space: Space, seed: int, budget_s: float, slowest_start_s: float, model: bool = False, **more: Any
) -> SessionConfig:
    """The session file; `model`: with a language model beside the catalogue. `more` are whole sections of the file."""
    known = _catalogued(space)
    own: list[dict[str, Any]] = []
    only: list[str] = []
    for knob in space.knobs:
        for value, changes in list(knob.values.items())[1:]:
            name = known.get(frozenset(map(str, changes)))
            only += [] if name is None else [name]
            own += [] if name is not None else [_idea(knob, value, changes)]
    workload = {
        "load_points": [point.model_dump() for point in space.points],
        "objective": {"at": [point.name for point in space.points]},
        "guards": {"other_points_tolerance": MEAN_COUNTS},
    }
    sections: dict[str, Any] = {
        "seed": seed,
        "target": {"name": space.name, "host": "nowhere", "user": "nobody"},
        "server": {"engine": space.engine, "start_deadline_s": 3 * slowest_start_s},
        "judge": SHORT if budget_s < SHORT_S else {},
        "workload": workload,
        "validity": HALF_IN_FLIGHT,
        "policy": {"budget": {"time_s": budget_s, "experiments": 1000, "restarts": 10000}},
        "planner": {"only": only or ["nothing-of-the-catalogue"], **(MODEL if model else {})},
        "experiments": own,
    }
    for name, section in more.items():
        sections[name] = {**sections.get(name, {}), **section}
    return SessionConfig.model_validate(sections)


def scenario(space: Space) -> Scenario:
    """The simulated host: what serves is what the recording found; it knows the recorded flags and values."""
    flags, env = space.command_line(space.found)
    knobs = tuple(known for knob in space.knobs for known in _known(knob))
    return Scenario(
        engine=space.engine,
        flags=flags,
        env=env,
        known_flags=frozenset(flags) | {known.name for known in knobs},
        knobs=knobs,
        env_prefixes=tuple(sorted({change.name for change in space.changes if change.kind == "env"})),
        cores=space.cores,
        gpus=space.gpus,
        base_tok_s={},
    )


def _known(knob: Knob) -> list[KnownFlag]:
    """The knob's flags as a help text would list them: with the recorded values."""
    values: dict[str, list[str]] = {}
    for change in (change for changes in knob.values.values() for change in changes if change.kind == "flag"):
        values.setdefault(change.name, []).extend([change.value] if change.value is not None else [])
    return [
        KnownFlag(name=name, takes_value=True, type="choice", choices=tuple(dict.fromkeys(found)), text=knob.name)
        if found
        else KnownFlag(name=name, text=knob.name)
        for name, found in values.items()
    ]


def _catalogued(space: Space) -> dict[frozenset[str], str]:
    """Ids of the catalogue's experiments on this host, by their changes."""
    host = scenario(space)
    facts = CatalogueFacts(
        cores=host.cores,
        known_flags=host.known_flags,
        flags=host.flags,
        env=host.env,
        mem_available_mb=8192,
        gpus=host.gpus,
        engine_version="",
    )
    found = experiments(space.engine, facts).experiments
    return {frozenset(map(str, one.changes)): one.id for one in found if one.changes}


def _idea(knob: Knob, value: str, changes: Sequence[Change]) -> dict[str, Any]:
    return {
        "id": f"{knob.name}-{value}".lower().replace("_", "-"),
        "title": f"{knob.name} {value}",
        "hypothesis": f"{knob.name} may be better at {value}",
        "changes": [change.model_dump() for change in changes],
        "tags": list(knob.tags),
    }
