"""From stored runs to launches and to what is believed of one series of them; pure, it decides nothing.

A series is one figure (tok/s, or a latency with a ceiling) at one load point, or the objective: the mean over its
load points, run by run, so that luck which the points share is not taken for independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from agent.judge import noise
from agent.judge.comparison import RATE, Comparison, Seen, log_of
from agent.judge.course import Launches
from agent.judge.noise import Belief
from state.models import Arm, JudgeRule, Purpose


def launch_of(arm: Arm, values: Sequence[float]) -> Launches:
    """A launch of the one night that a session has."""
    runs = np.array(values, dtype=float)
    mean = float(runs.mean()) if len(runs) else 0.0
    return Launches(
        candidate=np.array([arm is Arm.CANDIDATE]),
        mean=np.array([mean]),
        runs=np.array([float(len(runs))]),
        squares=np.array([float(np.sum((runs - mean) ** 2))]),
    )


def rounds(by_point: dict[str, list[float]], points: Sequence[str]) -> list[float]:
    """Mean over the points of the first run at each, of the second, …, as far as every point has one."""
    columns = [by_point.get(point, []) for point in points]
    return [float(np.mean(column)) for column in zip(*columns, strict=False)]


def own_launches(
    comparison: Comparison, points: Sequence[str], figure: str = RATE
) -> list[tuple[Arm, int, list[float]]]:
    """The experiment's launches in the order in which they were first measured: arm, block, runs of the series."""
    blocks: dict[tuple[Arm, int], dict[str, list[float]]] = {}
    for taken in comparison.own:
        value = log_of(taken, figure)
        if value is not None:
            blocks.setdefault((taken.arm, taken.block), {}).setdefault(taken.load_point, []).append(value)
    return [(arm, block, rounds(by_point, points)) for (arm, block), by_point in blocks.items()]


def night_belief(comparison: Comparison, points: Sequence[str], figure: str = RATE) -> Belief:
    """What the runs before this experiment say about the series."""
    walked = _walked(comparison.night, tuple(points), figure, comparison.rule)
    if comparison.purpose is Purpose.CLOSE_OUT or walked.epoch != comparison.epoch:
        return noise.new_parent(walked.belief)
    return walked.belief


def knows_parent(belief: Belief) -> bool:
    """Whether the parent was measured at all since it became the parent."""
    return bool(belief.fields[noise.LEVEL_LEVEL, 0, 0] < noise.UNKNOWN / 100)


@dataclass(frozen=True)
class Walked:
    """How far a series was followed through a night: the experiments that were passed, and what is believed there."""

    night: tuple[Seen, ...]
    passed: frozenset[str]
    belief: Belief
    epoch: int
    last: str


@dataclass
class Way:
    """The newest walk along one series, from which a longer night goes on."""

    walked: Walked


@lru_cache(maxsize=64)
def _way(points: tuple[str, ...], figure: str, rule: JudgeRule) -> Way:
    nothing = noise.nothing_seen(1, rule.noise_prior, rule.noise_prior_df)
    return Way(Walked((), frozenset(), nothing, 0, ""))


def _walked(night: tuple[Seen, ...], points: tuple[str, ...], figure: str, rule: JudgeRule) -> Walked:
    """To the end of the night, from where the last walk ended if this night begins like that one.

    It must not add to an experiment that was passed: the runs of a launch are seen together.
    """
    way = _way(points, figure, rule)
    before = way.walked
    if night is before.night:
        return before
    more = night[len(before.night) :]
    if night[: len(before.night)] != before.night or any(run.experiment_id in before.passed for run in more):
        before = Walked((), frozenset(), noise.nothing_seen(1, rule.noise_prior, rule.noise_prior_df), 0, "")
        more = night
    belief, epoch, last = _further(before, more, points, figure)
    passed = before.passed | {run.experiment_id for run in more}
    way.walked = Walked(night, passed, belief, epoch, last)
    return way.walked


def _further(before: Walked, more: Sequence[Seen], points: Sequence[str], figure: str) -> tuple[Belief, int, str]:
    """Launch by launch; the belief at the end, epoch and experiment of the last launch."""
    found: dict[tuple[int, str, bool, str], dict[str, list[float]]] = {}
    for run in more:
        if figure in run.logs:
            key = (run.epoch, run.experiment_id, run.arm is Arm.CANDIDATE, run.launch)
            found.setdefault(key, {}).setdefault(run.load_point, []).append(run.logs[figure])
    belief, epoch, last = before.belief, before.epoch, before.last
    for (now, experiment, candidate, _), by_point in found.items():
        if now != epoch:
            belief, epoch = noise.new_parent(belief), now
        if experiment != last:
            belief, last = noise.new_candidate(belief), experiment
        launch = launch_of(Arm.CANDIDATE if candidate else Arm.BASELINE, rounds(by_point, points))
        belief = noise.after_launch(belief, launch.candidate, launch.mean, launch.runs, launch.squares)
    return belief, epoch, last
