"""Whole nights played with made-up or resampled noise: how often the judge errs, finds, and what it spends.

No statistics of its own: every launch goes through `noise` and every ruling through `course`, the functions that judge
a session. Thousands of nights are played side by side. Randomness comes in through the generator that is passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from agent.judge import course, noise, spending
from agent.judge.boundary import Looks
from agent.judge.course import Launches, Ruling, Stakes
from agent.judge.noise import Belief, Floats, Indices
from state.models import JudgeRule


class World(Protocol):
    """Where launches and runs come from; `nights` are indices, effects and drift are log-ratios."""

    def launch(self, nights: Indices) -> None:
        """Draw the luck of a new launch."""

    def run(self, nights: Indices, effect: Floats) -> Floats:
        """Log tok/s of one run on the serving launch."""


@dataclass(frozen=True)
class Script:
    """What a rehearsal plays: true effects (nights × experiments), prices, and the time there is."""

    effects: Floats
    launch_s: float = 30.0
    run_s: float = 20.0
    time_s: float = np.inf
    rule: JudgeRule = field(default_factory=JudgeRule)


@dataclass(frozen=True)
class Played:
    """What came of it, nights × experiments; `rulings` is -1 where the time was over before."""

    rulings: Indices
    runs: Floats
    launches: Floats
    night_runs: Floats
    night_launches: Floats
    night_s: Floats


class Rehearsal:
    """The state of all nights while they are played."""

    def __init__(self, script: Script, world: World) -> None:
        self.script = script
        self.world = world
        nights, experiments = script.effects.shape
        self.belief = noise.nothing_seen(nights, script.rule.noise_prior, script.rule.noise_prior_df)
        self.level = np.zeros(nights)
        self.spent = np.zeros(nights)
        self.clock_s = np.zeros(nights)
        self.total_runs = np.zeros(nights)
        self.total_launches = np.zeros(nights)
        self.fresh = np.zeros(nights, dtype=bool)
        self.unknown = np.zeros(nights, dtype=bool)
        self.rulings = np.full((nights, experiments), -1)
        self.runs = np.zeros((nights, experiments))
        self.launches = np.zeros((nights, experiments))
        self.per_launch = spending.runs_per_launch(script.launch_s, script.run_s, script.rule.max_runs)
        self.pair_s = 2 * script.launch_s + sum(self.per_launch) * script.run_s

    def play(self) -> Played:
        """All experiments of all nights in turn."""
        nights, experiments = self.script.effects.shape
        everyone = np.arange(nights)
        self.world.launch(everyone)
        first = self._measured(
            everyone, np.zeros(nights, dtype=bool), np.full(nights, self.script.rule.baseline_runs), 0
        )
        self.belief = noise.after_launch(self.belief, first.candidate, first.mean, first.runs, first.squares)
        for number in range(experiments):
            ready = self.clock_s + self.pair_s <= self.script.time_s
            for runs, group in (
                (self.script.rule.baseline_runs, self.unknown),
                (self.per_launch[1], self.fresh & ~self.unknown),
                (0, ~self.fresh & ~self.unknown),
            ):
                members = np.flatnonzero(ready & group)
                if len(members):
                    self._experiment(members, number, runs)
        return Played(self.rulings, self.runs, self.launches, self.total_runs, self.total_launches, self.clock_s)

    def _experiment(self, nights: Indices, number: int, parent_first: int) -> None:
        left = self.script.effects.shape[1] - number
        share = np.maximum(0.0, self.script.rule.false_keep_budget - self.spent[nights]) / left
        hopeless = spending.hopeless_below(self.script.time_s - self.clock_s[nights], left, self.pair_s)
        looks = Looks(self.script.rule.min_blocks, self.script.rule.max_blocks)
        state = course.begin(self.belief[nights])
        if parent_first:
            no = np.zeros(len(nights), dtype=bool)
            state = course.after(state, self._measured(nights, no, np.full(len(nights), parent_first), number))
            self.fresh[nights] = self.unknown[nights] = False
        wants = np.full(len(nights), int(Ruling.CANDIDATE))
        clear = np.zeros(len(nights), dtype=bool)
        while len(nights):
            candidate = wants == Ruling.CANDIDATE
            self._launched(nights)
            runs = np.where(clear, 1, np.where(candidate, *self.per_launch))
            state = course.after(state, self._measured(nights, candidate, runs, number))
            self.runs[nights[candidate], number] += runs[candidate]
            self.launches[nights[candidate], number] += 1
            self.fresh[nights] = candidate
            stakes = Stakes(share, looks, self.script.rule.minimal_effect, hopeless)
            state, said = course.rule(state, stakes)
            wants = said.ruling
            over = self.clock_s[nights] > self.script.time_s
            wants = np.where(over & (wants <= Ruling.BASELINE), Ruling.UNDECIDED, wants)
            done = wants > Ruling.BASELINE
            if done.any():
                self._settle(nights[done], number, wants[done], share[done] - said.given_back[done], state.now[done])
            nights, state, wants = nights[~done], state[~done], wants[~done]
            share, hopeless, clear = share[~done], hopeless[~done], said.clear[~done]

    def _settle(self, nights: Indices, number: int, ruling: Indices, spent: Floats, belief: Belief) -> None:
        """Keep or take back; whatever has to serve now and doesn't is launched."""
        self.rulings[nights, number] = ruling
        self.spent[nights] += spent
        self.belief = self.belief.put(nights, belief)
        kept = ruling == Ruling.KEEP
        self._launched(nights[kept | self.fresh[nights]])
        winners = nights[kept]
        if len(winners):
            self.belief = self.belief.put(winners, noise.new_parent(self.belief[winners]))
            self.level[winners] += self.script.effects[winners, number]
            self.unknown[winners] = True

    def _launched(self, nights: Indices) -> None:
        self.world.launch(nights)
        self.clock_s[nights] += self.script.launch_s
        self.total_launches[nights] += 1

    def _measured(self, nights: Indices, candidate: noise.Bools, runs: Indices, number: int) -> Launches:
        most = int(runs.max())
        values = np.zeros((most, len(nights)))
        for run in range(most):
            on = np.flatnonzero(run < runs)
            effect = self.level[nights[on]] + np.where(candidate[on], self.script.effects[nights[on], number], 0.0)
            values[run, on] = self.world.run(nights[on], effect)
        taken = np.arange(most)[:, None] < runs
        mean = np.where(taken, values, 0).sum(axis=0) / runs
        squares = np.where(taken, (values - mean) ** 2, 0).sum(axis=0)
        self.clock_s[nights] += runs * self.script.run_s
        self.total_runs[nights] += runs
        return Launches(candidate, mean, runs.astype(float), squares)
