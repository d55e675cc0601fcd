"""Ratchet's own sessions on a recorded surface, in virtual time: the real loop, store, judge and catalogue planner.

Nothing of the agent is replaced but the target, which plays the recording. It must not help the planner: a session
knows of the surface what its session file says, the same knobs and values that the rivals are given. What the
catalogue has under its own name is left to it, every other value is an idea of the person who wrote the file.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.catalogue import CatalogueFacts, experiments
from agent.config import SessionConfig
from agent.connect import planner_for
from agent.progress import Silent
from agent.session import Runner, open_session
from searching.models import MODELS, Stub
from searching.outcome import Moment, Search
from searching.pooling import Setting
from searching.surfaces import Knob, Surface
from state import events as ev
from state.errors import StoppedByOperator
from state.models import Change, LaunchSpec, Role, TrialStatus
from state.store import Store
from tools.benches.builtin import fixed_prompts
from tools.servers.base import KnownFlag
from tools.simulated import RecordedRun, RecordedStart, Scenario, SimulatedTarget
from tools.target import RunRequest

SHORT_NIGHT_S = 3600
SHORT = {"baseline_runs": 3, "max_blocks": 3, "max_runs": 1}
"""What a person who has less than an hour asks of the judge; the demo's session file says the same."""
MODEL = {"kind": "model", "model": {"base_url": "http://stub.invalid/v1", "model": "stub"}}
MEAN_COUNTS = 0.9
"""A load point may lose as much as others gain, as for the rivals: the mean over all of them is what counts."""
OFF_GRID_S = 0.9
"""How soon what was never recorded is refused: nothing is made up for it."""
OFF_GRID = "error while handling argument: this combination was not recorded"
SHARED_MEMORY = Path("/dev/shm")


class Played:
    """A surface as the server of a simulated target, with the luck of one seed."""

    def __init__(self, surface: Surface, seed: str) -> None:
        self.surface = surface
        self.seed = seed

    def start(self, launch: str, spec: LaunchSpec) -> RecordedStart:
        """As the setting's own launches went."""
        setting = setting_of(self.surface, spec)
        if setting is None or setting not in self.surface.starts:
            return RecordedStart(seconds=OFF_GRID_S, refused=OFF_GRID)
        start = self.surface.launch(setting, f"{self.seed}/{launch}")
        return RecordedStart(seconds=start.seconds, refused=start.failure)

    def run(self, launch: str, run: str, spec: LaunchSpec, request: RunRequest) -> RecordedRun:
        """As the setting's own runs went; the fixed prompts are answered one after the other at the speed of one."""
        setting = setting_of(self.surface, spec)
        assert setting is not None, "what serves was recorded"
        ran = self.surface.run(setting, request.point.name, f"{self.seed}/{launch}", run)
        asked_s = sum(int(one["max_tokens"]) for one in fixed_prompts()) / ran.tok_s if request.answers else 0.0
        return RecordedRun(tok_s=ran.tok_s, measured_s=ran.measured_s, idle_s=ran.idle_s + asked_s)


def setting_of(surface: Surface, spec: LaunchSpec) -> Setting | None:
    """Where on the grid a configuration lies, None beside it."""
    found = [next((v for v, c in knob.values.items() if _shows(spec, c)), None) for knob in surface.knobs]
    known = {name for knob in surface.knobs for changes in knob.values.values() for name in _names(changes)}
    known |= set(_base(surface))
    strange = (set(spec.flags) | set(spec.env)) - known
    return None if None in found or strange else tuple(value for value in found if value is not None)


def _shows(spec: LaunchSpec, changes: Sequence[Change]) -> bool:
    for change in changes:
        if change.kind == "flag":
            wanted = None if change.remove else (() if change.value is None else (change.value,))
            if spec.flags.get(change.name) != wanted:
                return False
        elif change.kind == "env" and spec.env.get(change.name) != change.value:
            return False
    return True


def _names(changes: Sequence[Change]) -> list[str]:
    return [change.name for change in changes if change.kind in ("flag", "env")]


def _base(surface: Surface) -> dict[str, tuple[str, ...]]:
    """The flags that every setting has."""
    flags: dict[str, tuple[str, ...]] = {}
    for word in surface.base:
        if word.startswith("--"):
            flags[word] = ()
        else:
            last = next(reversed(flags))
            flags[last] = (*flags[last], word)
    return flags


def scenario(surface: Surface) -> Scenario:
    """The simulated host: what serves is what the recording found; it knows the recorded flags and values."""
    found = [knob.values[value] for knob, value in zip(surface.knobs, surface.found, strict=True)]
    flags, env = _base(surface), dict[str, str]()
    for change in (change for changes in found for change in changes):
        if change.kind == "flag" and not change.remove:
            flags[change.name] = () if change.value is None else (change.value,)
        elif change.kind == "env" and change.value is not None:
            env[change.name] = change.value
    knobs = [known for knob in surface.knobs for known in _known(knob)]
    return Scenario(
        engine=surface.engine,
        flags=flags,
        env=env,
        known_flags=frozenset(flags) | {known.name for known in knobs},
        knobs=tuple(knobs),
        env_prefixes=tuple({c.name for k in surface.knobs for v in k.values.values() for c in v if c.kind == "env"}),
        cores=surface.cores,
        gpus=surface.gpus,
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


def session_config(surface: Surface, seed: int, budget_s: float, model: bool = False) -> SessionConfig:
    """The session file that a person would write for this surface; `model`: with a language model beside."""
    known = _catalogued(surface)
    own: list[dict[str, Any]] = []
    only: list[str] = []
    for knob in surface.knobs:
        for value, changes in list(knob.values.items())[1:]:
            name = known.get(frozenset(map(str, changes)))
            only += [] if name is None else [name]
            own += [] if name is not None else [_idea(knob, value, changes)]
    points = [point.model_dump() for point in surface.points]
    slowest_s = max(launched.seconds for launches in surface.starts.values() for launched in launches)
    return SessionConfig.model_validate(
        {
            "seed": seed,
            "target": {"name": surface.name, "host": "nowhere", "user": "nobody"},
            "server": {"engine": surface.engine, "start_deadline_s": 3 * slowest_s},
            "judge": SHORT if budget_s < SHORT_NIGHT_S else {},
            "workload": {
                "load_points": points,
                "objective": {"at": [point.name for point in surface.points]},
                "guards": {"other_points_tolerance": MEAN_COUNTS},
            },
            "policy": {"budget": {"time_s": budget_s, "experiments": 1000, "restarts": 10000}},
            "planner": {"only": only or ["nothing-of-the-catalogue"], **(MODEL if model else {})},
            "experiments": own,
        }
    )


def _catalogued(surface: Surface) -> dict[frozenset[str], str]:
    """Ids of the catalogue's experiments on this host, by their changes."""
    host = scenario(surface)
    facts = CatalogueFacts(
        cores=host.cores,
        known_flags=host.known_flags,
        flags=host.flags,
        env=host.env,
        mem_available_mb=8192,
        gpus=host.gpus,
        engine_version="",
    )
    found = experiments(surface.engine, facts).experiments
    return {frozenset(map(str, one.changes)): one.id for one in found if one.changes}


def _idea(knob: Knob, value: str, changes: Sequence[Change]) -> dict[str, Any]:
    return {
        "id": f"{knob.name}-{value}".lower().replace("_", "-"),
        "title": f"{knob.name} {value}",
        "hypothesis": f"{knob.name} may be better at {value}",
        "changes": [change.model_dump() for change in changes],
        "tags": list(knob.tags),
        "expected_gain": 0.05,
    }


def searched(surface: Surface, seed: int, budget_s: float, model: str | None = None) -> Search:
    """A whole session within the budget, with one of the made-up language models beside the catalogue or without."""
    where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="search-", dir=where) as folder:
        config = session_config(surface, seed, budget_s, model is not None)
        return asyncio.run(_session(Path(folder), surface, config, str(seed), model))


async def _session(folder: Path, surface: Surface, config: SessionConfig, seed: str, model: str | None) -> Search:
    target = SimulatedTarget(folder / "world", scenario(surface), Played(surface, seed))
    endpoint = None if model is None else Stub(MODELS[model](surface), target.pause)
    with Store.write(folder / "state.db", lambda: target.clock) as store:
        session_id = f"seed-{seed}"
        open_session(store, session_id, config, await target.adopt())
        runner = Runner(store, session_id, target, config, planner_for(config), Silent(), endpoint=endpoint)
        code = await runner.run()
        if code == StoppedByOperator.exit_code:
            raise KeyboardInterrupt  # the session takes the signals that end this program
        assert code == 0, f"the session of seed {seed} ended with {code}"
        return _told(store, session_id, surface, target.clock)


def _told(store: Store, session_id: str, surface: Surface, seconds: float) -> Search:
    """What the store says of a session that is over."""
    final = store.role(session_id, Role.FINAL)
    assert final is not None, "a session that is over has a final configuration"
    moments = [
        Moment(stored.at, _setting(store, surface, stored.event.fingerprint))
        for stored in store.events(session_id)
        if isinstance(stored.event, ev.RoleSet) and stored.event.role is Role.KNOWN_GOOD
    ]
    trials = [trial for trial in store.trials(session_id) if not trial.adopted]
    verdicts = store.verdicts(session_id)
    return Search(
        final=_setting(store, surface, final),
        incumbents=tuple(moments),
        seconds=seconds,
        restarts=len(trials),
        down_s=sum(trial.down_s or 0.0 for trial in trials),
        experiments=sum(todo.experiment.tries and todo.id in verdicts for todo in store.todos(session_id)),
        failed=sum(trial.status is TrialStatus.FAILED for trial in trials),
    )


def _setting(store: Store, surface: Surface, fingerprint: str) -> Setting:
    found = setting_of(surface, store.spec(fingerprint))
    assert found is not None, "what is kept was recorded"
    return found
