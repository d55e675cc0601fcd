"""From stored runs to launches and to what is believed of one series of them; pure, it decides nothing.

A series is one figure (tok/s, or a latency with a ceiling) at one load point, or the objective: the mean over its
load points, run by run, so that luck which the points share is not taken for independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from agent.judge import noise
from agent.judge.comparison import RATE, Comparison, log_of
from agent.judge.course import Launches
from agent.judge.noise import Belief
from state.models import Arm, JudgeRule, Purpose

Past = tuple[int, str, bool, tuple[float, ...]]
"""An earlier launch: epoch, experiment, whether it was the candidate's, its runs."""


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
    found: dict[tuple[int, str, bool, str], dict[str, list[float]]] = {}
    for run in comparison.night:
        key = (run.epoch, run.experiment_id, run.arm is Arm.CANDIDATE, run.launch)
        if figure in run.logs:
            found.setdefault(key, {}).setdefault(run.load_point, []).append(run.logs[figure])
    past = tuple((*key[:3], tuple(rounds(by_point, points))) for key, by_point in found.items())
    belief, epoch = _walk(past, comparison.rule)
    if comparison.purpose is Purpose.CLOSE_OUT or epoch != comparison.epoch:
        return noise.new_parent(belief)
    return belief


def knows_parent(belief: Belief) -> bool:
    """Whether the parent was measured at all since it became the parent."""
    return bool(belief.fields[noise.LEVEL_LEVEL, 0, 0] < noise.UNKNOWN / 100)


@lru_cache(maxsize=64)
def _walk(past: tuple[Past, ...], rule: JudgeRule) -> tuple[Belief, int]:
    """Through the night launch by launch; the belief at its end and the epoch of the last launch."""
    belief, epoch, before = noise.nothing_seen(1, rule.noise_prior, rule.noise_prior_df), 0, ""
    for now, experiment, candidate, values in past:
        if now != epoch:
            belief, epoch = noise.new_parent(belief), now
        if experiment != before:
            belief, before = noise.new_candidate(belief), experiment
        launch = launch_of(Arm.CANDIDATE if candidate else Arm.BASELINE, values)
        belief = noise.after_launch(belief, launch.candidate, launch.mean, launch.runs, launch.squares)
    return belief, epoch
