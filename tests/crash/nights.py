"""The sessions on the simulated target that are killed at every point; it must not run or judge them.

They are so quiet, by their ids and the world's own clock, that each one takes the same steps whenever it is lived.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from agent import telling
from agent.config import SessionConfig
from state.models import CommandChange, Disruption, Experiment, HostClock, HotCall, PatchChange
from tests.agent.sim import ONE_POINT, SCENARIO, flag
from tools.simulated import Scenario, SimEffect

Speech = Callable[[Path], object]
"""What a person says, given the session's database."""
DAY_S, HOUR_S = 86_400.0, 3600.0
MIDNIGHT = 20_000 * DAY_S


class Night(NamedTuple):
    """A session: what it tries, on which server, by which rules, and what a person says in it."""

    name: str
    experiments: tuple[Experiment, ...]
    config: SessionConfig
    scenario: Scenario
    own_time: bool = True
    """Whether its time is the world's, which passes only by launches and pauses."""
    speech: dict[str, Speech] = {}  # noqa: RUF012 - nobody writes into it
    """What is said when the session passes a point for the first time, whichever life that is in."""
    open_s: tuple[float, float] | None = None
    """The world's time at which the server may be disturbed, from and to; None for always."""


def _quiet(scenario: Scenario, *effects: SimEffect, **fields: object) -> Scenario:
    quiet = {"run_noise": 0.0005, "launch_noise": 0.0005, "effects": (*scenario.effects, *effects)}
    return scenario.model_copy(update=quiet | fields)


def _ruled(**policy: object) -> SessionConfig:
    return ONE_POINT.model_copy(update={"policy": ONE_POINT.policy.model_copy(update=policy)})


# --- whatever can be done to a server ----------------------------------------------------------------------------

LIVE = HotCall(name="beat", value="2", undo="1")
PATCH = PatchChange(directory="/srv/engine", diff="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
_CHECKED = _ruled(max_disruption=Disruption.PATCH)
CHANGES = Night(
    "changes",
    (
        flag("--threads", "2"),
        flag("--poll", "0", id="live", changes=(LIVE,), tags=("live",), disruption="hot"),
        flag("--cache", "q8_0"),
        flag("--poll", "0", id="patch", changes=(PATCH,), tags=("patch",)),
        flag("--threads", "64"),
    ),
    _CHECKED.model_copy(update={"judge": _CHECKED.judge.model_copy(update={"sentinel_every": 4})}),
    _quiet(
        SCENARIO,
        SimEffect(name=LIVE.subject, value=LIVE.value, ratio={"*": 1.3}),
        SimEffect(name=PATCH.subject, value="*", ratio={"*": 1.4}),
    ),
    own_time=False,
)
"""Two that are kept, the second without a restart; one that does not start; a patch that is kept; one that
collapses and is taken back. Then a sentinel's turn has come.
"""

# --- within a window ---------------------------------------------------------------------------------------------

_OPENS_S, _CLOSES_S = 60.0, 720.0
WINDOW = Night(
    "window",
    (flag("--threads", "2", priority=0.9), flag("--poll", "0", priority=0.7), flag("--parallel", "4", priority=0.1)),
    _ruled(window="01:01-01:12"),
    _quiet(
        SCENARIO,
        SimEffect(name="--poll", value="0", slow_s=DAY_S),
        launch_s=30.0,
        polls_per_run=8,
        clock=HostClock(unix=MIDNIGHT + HOUR_S),
    ),
    open_s=(_OPENS_S, _CLOSES_S),
)
"""It begins a minute early and waits. One is kept; the second loads for so long that it is left in time; what is
last does not fit any more, nor does a final comparison, so the original returns.
"""

# --- refined by what is learned ----------------------------------------------------------------------------------

_REFINING = ONE_POINT.model_copy(update={"planner": ONE_POINT.planner.model_copy(update={"refine": True})})
REFINED = Night(
    "refined",
    (
        flag("--cache", "f16", tags=("memory",), expected_gain=0.3),
        flag("--spec", "ngram", tags=("speculation",), expected_gain=0.2),
    ),
    _REFINING,
    _quiet(
        SCENARIO.model_copy(update={"effects": ()}),
        SimEffect(name="--cache", value="f16", ratio={"*": 1.5}),
        SimEffect(name="--spec", value="ngram", ratio={"*": 0.8}),
    ),
)
"""The two that promise most come first and at once, and are kept; what follows are refinements of that, and what is
left on the list is weighed anew.
"""

# --- a person speaks ---------------------------------------------------------------------------------------------

_CLOCKS = Experiment(
    id="clocks",
    title="Clocks",
    hypothesis="h",
    changes=(CommandChange(name="clocks", do=("do",), undo=("undo",), probe=("probe",)),),
    disruption=Disruption.HOST,
    expected_gain=0.1,
)


def _at_work(database: Path) -> None:
    telling.drop(database, None, "spec-ngram", "we tried it by hand")
    telling.reprioritise(database, None, "parallel-4", 1.0, "")


def _at_a_verdict(database: Path) -> None:
    telling.approve(database, None, "clocks", "the users know")
    telling.add(database, None, ["flag:--threads=2"], None, {"title": "Two"}, "a hunch")


def _too_late(database: Path) -> None:
    telling.add(database, None, ["flag:--threads=8"], None, {"title": "Eight"}, "for tomorrow")


SPOKEN = Night(
    "spoken",
    (flag("--poll", "0"), flag("--parallel", "4", priority=0.1), flag("--spec", "ngram"), _CLOCKS),
    _ruled(max_disruption=Disruption.HOST),
    _quiet(
        SCENARIO.model_copy(update={"effects": ()}),
        SimEffect(name="--parallel", value="4", ratio={"*": 0.7}),
        SimEffect(name="--threads", value="2", ratio={"*": 1.8}),
        SimEffect(name="command:clocks", value="*", ratio={"*": 0.7}),
    ),
    speech={"T2/launch:after-act": _at_work, "node:settle": _at_a_verdict, "finish:guarded": _too_late},
)
"""Said while an experiment is under way, as it ends, and when the session is at its end."""

NIGHTS = {night.name: night for night in (CHANGES, WINDOW, REFINED, SPOKEN)}


def shortened(night: Night) -> Night:
    """The same with less to do, where that leaves what it is about."""
    return night._replace(experiments=night.experiments[1:3]) if night is CHANGES else night
