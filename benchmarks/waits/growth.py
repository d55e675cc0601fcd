"""What a step of the loop costs late in a long session against early, on a simulated target whose own time is left out.

A long session is grown once and kept; then both ends are measured in turns, each from a copy, so that a machine that
slows down slows down both. The list is as long at either end: for every experiment that is judged another one comes in.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from agent.nodes import LoopState, Nodes
from agent.progress import Silent
from agent.session import Runner
from state import events as ev
from state.models import Experiment
from tests.agent.sim import CONFIG, SCENARIO, flag, sim_session
from tools.simulated import SimulatedTarget

Figures = dict[str, Any]
WAITING = 10
"""Experiments on the list at any time."""
WARM = 5
"""Experiments at the begin of each measurement that are left out: files are opened, modules loaded, caches filled, and
what is kept of a long session is read at once, which Python's collector of garbage would go through in what follows."""
MEASURED = 15
POLICY = CONFIG.policy.model_copy(
    update={
        "budget": CONFIG.policy.budget.model_copy(
            update={"experiments": 1_000_000, "restarts": 1_000_000, "time_s": 1e9}
        )
    }
)
ENDLESS = CONFIG.model_copy(update={"policy": POLICY})


class Meter:
    """CPU time of the agent alone, step by step; what passes inside the target is taken out."""

    def __init__(self) -> None:
        self.inside_s = 0.0
        self.steps: list[tuple[str, float]] = []
        self._entered: tuple[str, float] | None = None

    def now(self) -> float:
        """CPU seconds of this process so far, the target's own left out."""
        return time.process_time() - self.inside_s

    def enter(self, node: str) -> None:
        """A step begins, and so the one before has ended, with all that the graph did in between."""
        now = self.now()
        if self._entered is not None:
            self.steps.append((self._entered[0], now - self._entered[1]))
        self._entered = (node, now)


class QuickTarget(SimulatedTarget):
    """A simulated target that keeps its world in memory, and whose own time is taken out of the agent's."""

    def __init__(self, path: Path, meter: Meter) -> None:
        self.meter = meter
        self.world: dict[str, Any] = {}
        super().__init__(path, SCENARIO)
        self.world = json.loads(self._file.read_text())

    def _load(self) -> dict[str, Any]:
        return self.world

    def _save(self, world: dict[str, Any]) -> None:
        if not self.world:
            super()._save(world)
        self.world = world

    def put_away(self) -> None:
        """Leave the world to whoever goes on with it."""
        self._file.write_text(json.dumps(self.world))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not asyncio.iscoroutinefunction(found):
            return found
        meter: Meter = super().__getattribute__("meter")

        async def timed(*words: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return await found(*words, **named)
            finally:
                meter.inside_s += time.process_time() - begin

        return timed


class MeteredNodes:
    """The steps of the loop, each announced to a meter."""

    def __init__(self, nodes: Nodes, meter: Meter) -> None:
        self.nodes, self.meter = nodes, meter

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.nodes, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        step: Callable[[LoopState], Awaitable[LoopState]] = found

        async def announced(state: LoopState) -> LoopState:
            self.meter.enter(name)
            return await step(state)

        return announced


class Feeder(Silent):
    """Puts another experiment on the list for every one that is judged, and ends the session after so many verdicts."""

    def __init__(self, runner: Runner, until: int, judged: Callable[[], None]) -> None:
        self.runner, self.until, self.judged = runner, until, judged
        self.count = len(runner.store.verdicts(runner.session_id))
        self.number = itertools.count(len(runner.store.todos(runner.session_id)) + WAITING)

    def happened(self, event: ev.Event) -> None:
        """Of all events only verdicts matter."""
        if not isinstance(event, ev.VerdictReached):
            return
        self.count += 1
        store, session_id = self.runner.store, self.runner.session_id
        judged = store.todo(session_id, event.verdict.experiment_id)
        assert judged is not None, "what is judged is on the list"
        if judged.experiment.tries:  # a check of the loop's own leaves the list as long as it was
            store.append(session_id, ev.TodoAdded(experiment=another(next(self.number))))
        self.judged()
        if self.count >= self.until:
            self.runner.stop.set()


def another(number: int) -> Experiment:
    """An experiment like any other, which does nothing on this target."""
    return flag("--poll", str(number), tags=(f"topic-{number % 40}",))


def play(folder: Path, until: int) -> list[list[tuple[str, float]]]:
    """Go on with the session in `folder` until so many experiments are judged; the steps of each as (node, CPU s)."""
    meter, experiments = Meter(), [another(number) for number in range(WAITING)]
    with sim_session(folder, *experiments, config=ENDLESS) as runner:
        target = QuickTarget(folder / "world", meter)
        runner.target = runner.hands.target = runner.tenure.target = target
        runner.nodes = MeteredNodes(runner.nodes, meter)  # type: ignore[assignment]
        ends: list[int] = []

        def judged() -> None:
            ends.append(len(meter.steps))
            if len(ends) == WARM:
                gc.collect()  # what was read on opening is as old as it would be in a session that never ended

        feeder = Feeder(runner, until, judged)
        runner.progress = runner.hands.progress = feeder
        asyncio.run(runner.run())
        target.put_away()
    return [meter.steps[begin:end] for begin, end in itertools.pairwise(ends)]


def grown(folder: Path, experiments: int) -> Path:
    """A session that is ready for its last experiments; made once."""
    ready = folder / f"grown-{experiments}"
    if not ready.exists():
        part = folder / "growing"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        play(part, experiments - WARM - MEASURED)
        part.rename(ready)
    return ready


def round_of(folder: Path, experiments: int, number: int) -> Figures:
    """Both ends once, in turned order: mean CPU milliseconds of a step, by node and of all."""
    ends: dict[str, Figures] = {}
    for end in ("early", "late") if number % 2 else ("late", "early"):
        place = folder / f"round-{end}"
        shutil.rmtree(place, ignore_errors=True)
        if end == "late":
            shutil.copytree(grown(folder, experiments), place)
        played = play(place, experiments if end == "late" else WARM + MEASURED)
        ends[end] = by_node([step for one in played[-MEASURED + 1 :] for step in one])
        shutil.rmtree(place)
    return ends


def by_node(steps: Sequence[tuple[str, float]]) -> Figures:
    """Mean milliseconds by node, and of all steps."""
    nodes = sorted({name for name, _ in steps})
    found = {name: 1000 * statistics.mean(s for node, s in steps if node == name) for name in nodes}
    return {**found, "all": 1000 * statistics.mean(s for _, s in steps)}


def ratios(rounds: Sequence[Figures]) -> dict[str, Figures]:
    """Late over early, by node: the mean of the rounds' ratios on the log scale with its 95 % interval."""
    names = [name for name in rounds[0]["early"] if all(name in one[end] for one in rounds for end in one)]
    return {name: _ratio(name, rounds) for name in names}


def _ratio(name: str, rounds: Sequence[Figures]) -> Figures:
    logs = [math.log(one["late"][name] / one["early"][name]) for one in rounds]
    middle = statistics.mean(logs)
    reach = math.inf
    if len(logs) > 1:
        reach = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "early_ms": statistics.mean(one["early"][name] for one in rounds),
        "late_ms": statistics.mean(one["late"][name] for one in rounds),
        "ratio": math.exp(middle),
        "low": math.exp(middle - reach),
        "high": math.exp(middle + reach) if reach < 50 else math.inf,
    }


def shown(found: dict[str, Figures]) -> str:
    """The ratios as a table in Markdown."""
    lines = ["| step | early ms | late ms | late / early | 95 % interval |", "|---|---|---|---|---|"]
    for name, row in found.items():
        interval = f"{row['low']:.2f} to {row['high']:.2f}"
        lines.append(f"| {name} | {row['early_ms']:.2f} | {row['late_ms']:.2f} | {row['ratio']:.2f} | {interval} |")
    return "\n".join(lines)
