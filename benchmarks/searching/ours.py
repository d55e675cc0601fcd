"""Ratchet's own sessions on a recorded surface, in virtual time: the real loop, store, judge and catalogue planner.

Nothing of the agent is replaced but the target, which plays the recording; what was not recorded is refused at start,
as soon as the recorded refusals came, so that nothing is made up.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from agent.config import SessionConfig
from agent.connect import planner_for
from agent.progress import Silent
from agent.session import Runner, open_session
from benchmarks.searching.models import MODELS, Stub
from benchmarks.searching.outcome import Moment, Search
from benchmarks.searching.sessions import scenario, session_config
from benchmarks.searching.spaces import Setting, Space
from benchmarks.searching.surfaces import Surface
from state import events as ev
from state.errors import StoppedByOperator
from state.models import LaunchSpec, Role, TrialStatus
from state.store import Store
from tools.benches.builtin import fixed_prompts
from tools.simulated import RecordedRun, RecordedStart, SimulatedTarget
from tools.target import RunRequest

OFF_GRID_S = 0.9
OFF_GRID = "error while handling argument: this combination was not recorded"
SHARED_MEMORY = Path("/dev/shm")


class Played:
    """A surface as the server of a simulated target, with the luck of one seed."""

    def __init__(self, surface: Surface, seed: str) -> None:
        self.surface = surface
        self.seed = seed

    def start(self, launch: str, spec: LaunchSpec) -> RecordedStart:
        """As the setting's own launches went."""
        setting = self.surface.setting_of(spec)
        if setting is None:
            return RecordedStart(seconds=OFF_GRID_S, refused=OFF_GRID)
        start = self.surface.launch(setting, f"{self.seed}/{launch}")
        return RecordedStart(seconds=start.seconds, refused=start.failure)

    def run(self, launch: str, run: str, spec: LaunchSpec, request: RunRequest) -> RecordedRun:
        """As the setting's own runs went; the fixed prompts are answered one after the other at the speed of one."""
        setting = self.surface.setting_of(spec)
        assert setting is not None, "what serves was recorded"
        ran = self.surface.run(setting, request.point.name, f"{self.seed}/{launch}", run)
        asked_s = sum(int(one["max_tokens"]) for one in fixed_prompts()) / ran.tok_s if request.answers else 0.0
        return RecordedRun(tok_s=ran.tok_s, measured_s=ran.measured_s, idle_s=ran.idle_s + asked_s)


def searched(surface: Surface, seed: int, budget_s: float, model: str | None = None) -> Search:
    """A whole session within the budget, with one of the made-up language models beside the catalogue or without."""
    where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="search-", dir=where) as folder:
        config = session_config(surface, seed, budget_s, surface.slowest_start_s, model is not None)
        return asyncio.run(_session(Path(folder), surface, config, str(seed), model))


async def _session(folder: Path, surface: Surface, config: SessionConfig, seed: str, model: str | None) -> Search:
    target = SimulatedTarget(folder / "world", scenario(surface), Played(surface, seed))
    endpoint = None if model is None else Stub(MODELS[model](surface), target.pause)
    with Store.write(folder / "state.db", lambda: target.passed_s) as store:
        session_id = f"seed-{seed}"
        open_session(store, session_id, config, await target.adopt())
        runner = Runner(store, session_id, target, config, planner_for(config), Silent(), endpoint=endpoint)
        code = await runner.run()
        if code == StoppedByOperator.exit_code:
            raise KeyboardInterrupt  # the session takes the signals that end this program
        assert code == 0, f"the session of seed {seed} ended with {code}"
        return told(store, session_id, surface)


def told(store: Store, session_id: str, space: Space) -> Search:
    """What the store says of a session that is over; flags that were found and belong to no knob don't count."""
    row = store.session(session_id)
    besides = {*row.adoption.spec.flags, *row.adoption.spec.env}

    def setting(fingerprint: str) -> Setting:
        found = space.setting_of(store.spec(fingerprint), besides)
        assert found is not None, "what is kept lies on the grid"
        return found

    final = store.role(session_id, Role.FINAL)
    assert final is not None, "a session that is over has a final configuration"
    moments = [
        Moment(stored.at - row.started_at, setting(stored.event.fingerprint))
        for stored in store.events(session_id)
        if isinstance(stored.event, ev.RoleSet) and stored.event.role is Role.KNOWN_GOOD
    ]
    trials = [trial for trial in store.trials(session_id) if not trial.adopted]
    verdicts = store.verdicts(session_id)
    return Search(
        final=setting(final),
        incumbents=tuple(moments),
        seconds=store.last_event_at(session_id) - row.started_at,
        restarts=len(trials),
        down_s=sum(trial.down_s for trial in trials),
        experiments=sum(todo.experiment.tries and todo.id in verdicts for todo in store.todos(session_id)),
        failed=sum(trial.status is TrialStatus.FAILED for trial in trials),
    )
