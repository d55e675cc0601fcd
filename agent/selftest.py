"""What the judge would do on this server's own noise: nights rehearsed with what was measured; it touches no host.

A self-test is a session of the unchanged server. From its runs follows what is believed of the noise: each rehearsed
night draws its own run spread, launch spread and drift from that belief. Where nothing was relaunched the belief about
launches is the judge's prior, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

from agent.config import SessionConfig
from agent.evidence import costs, night_comparison
from agent.judge import noise
from agent.judge.course import Ruling
from agent.judge.noise import Belief, Floats, Indices
from agent.judge.rehearsal import Played, Rehearsal, Script
from agent.judge.series import night_belief
from agent.policy import close_out_s, whole_s
from state.models import Disruption, Frozen, TrialStatus
from state.store import Store

Play = Callable[[Floats], Played]
GAINS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
ENOUGH = 0.8
"""A gain counts as findable when it is kept in this share of nights: the usual power of a study."""


class Found(Frozen):
    """How a planted gain fared: share of nights in which it was kept, and what it cost the candidate."""

    gain: float
    share: float
    runs: float
    launches: float


class Spread(Frozen):
    """A log-spread: median and 90 % interval of what is believed."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.1%} [{self.low:.1%}, {self.high:.1%}]"


class SelfTest(Frozen):
    """The judge's chances on this server. Shares are of nights; `low` and `high` bound the false ones at 95 %."""

    experiments: int
    nights: int
    runs: int
    launches: int
    run_spread: Spread
    launch_spread: Spread
    launch_s: float
    run_s: float
    budget_s: float
    false_nights: float
    false_low: float
    false_high: float
    judged: float
    null_runs: float
    found: tuple[Found, ...]

    @property
    def smallest(self) -> float | None:
        """The smallest gain from which on every larger one is found often enough; None when none is."""
        answer = None
        for one in reversed(self.found):
            if one.share < ENOUGH:
                break
            answer = one.gain
        return answer


def session_config(config: SessionConfig, relaunches: int, runs: int) -> SessionConfig:
    """The session of a self-test: nothing is tried, and without relaunches nothing is restarted."""
    most = min(config.policy.max_disruption, Disruption.RESTART) if relaunches else Disruption.LOAD
    return config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"max_disruption": most}),
            "judge": config.judge.model_copy(
                update={"baseline_runs": max(runs, config.judge.baseline_runs), "sentinel_every": 0}
            ),
            "planner": config.planner.model_copy(update={"kind": "selftest", "relaunches": relaunches}),
            "experiments": (),
        }
    )


def rehearse(
    store: Store, session_id: str, config: SessionConfig, experiments: int, nights: int, rng: np.random.Generator
) -> SelfTest:
    """Play nights of `experiments` with this session's noise, under the rule and the budget of `config`."""
    belief = night_belief(night_comparison(store, session_id, config), config.workload.objective.at)
    price = costs(store, session_id, config)
    run_s = price.objective_run_s(config.workload)
    time_s = whole_s(config.policy) - close_out_s(config.workload, config.judge, price)

    def play(effects: Floats) -> Played:
        script = Script(effects, launch_s=price.launch_s, run_s=run_s, time_s=time_s, rule=config.judge)
        return Rehearsal(script, Believed(belief, nights, rng)).play()

    nothing = np.zeros((nights, experiments))
    told = play(nothing)
    false = int((told.rulings == Ruling.KEEP).any(axis=1).sum())
    sample = Believed(belief, 4000, rng)
    launched = [t for t in store.trials(session_id) if t.status is TrialStatus.READY]
    valid = [m for m in store.measurements(session_id) if not m.reasons and m.metrics is not None]
    return SelfTest(
        experiments=experiments,
        nights=nights,
        runs=sum(1 for m in valid if m.load_point in config.workload.objective.at),
        launches=len({m.trial_id for m in valid} & {t.id for t in launched}),
        run_spread=_spread(sample.run_sd),
        launch_spread=_spread(sample.launch_sd),
        launch_s=price.launch_s,
        run_s=run_s,
        budget_s=whole_s(config.policy),
        false_nights=false / nights,
        false_low=float(stats.beta.ppf(0.025, false, nights - false + 1)) if false else 0.0,
        false_high=float(stats.beta.ppf(0.975, false + 1, nights - false)) if false < nights else 1.0,
        judged=float((told.rulings >= 0).sum(axis=1).mean()),
        null_runs=float(told.runs[told.rulings >= 0].mean()) if (told.rulings >= 0).any() else 0.0,
        found=tuple(_found(gain, nothing, play, rng) for gain in GAINS),
    )


def _found(gain: float, nothing: Floats, play: Play, rng: np.random.Generator) -> Found:
    """One planted gain in each night, at a random place of the list."""
    nights, experiments = nothing.shape
    place = rng.integers(0, experiments, nights)
    effects = nothing.copy()
    effects[np.arange(nights), place] = np.log1p(gain)
    told = play(effects)
    ruling = told.rulings[np.arange(nights), place]
    tried = ruling >= 0
    runs, launches = (row[np.arange(nights), place][tried] for row in (told.runs, told.launches))
    return Found(
        gain=gain,
        share=float((ruling == Ruling.KEEP).mean()),
        runs=float(runs.mean()) if tried.any() else 0.0,
        launches=float(launches.mean()) if tried.any() else 0.0,
    )


def _spread(values: Floats) -> Spread:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return Spread(low=float(low), middle=float(middle), high=float(high))


class Believed:
    """A server as it may be after what was seen: every night draws its own noise from the belief."""

    def __init__(self, belief: Belief, nights: int, rng: np.random.Generator) -> None:
        grid, weight = noise.models(), noise.weights(belief)[0]
        model = rng.choice(len(weight), nights, p=weight)
        freedom = float(belief.freedom[0])
        self.run_sd = np.sqrt(belief.fields[noise.SQUARES, 0, model] / rng.chisquare(freedom, nights))
        self.launch_sd = self.run_sd * np.sqrt(grid.launch[model])
        self.step_sd = self.run_sd * np.sqrt(grid.step[model])
        self.slope = self.run_sd * np.sqrt(grid.slope[model]) * rng.standard_normal(nights)
        self.rng = rng
        self.level = np.zeros(nights)
        self.luck = np.zeros(nights)

    def launch(self, nights: Indices) -> None:
        """The level drifts on, and the launch has luck of its own."""
        self.level[nights] += self.slope[nights] + self.step_sd[nights] * self._draw(nights)
        self.luck[nights] = self.launch_sd[nights] * self._draw(nights)

    def run(self, nights: Indices, effect: Floats) -> Floats:
        """Log tok/s of one run, but for a constant."""
        drawn: Floats = self.level[nights] + self.luck[nights] + effect + self.run_sd[nights] * self._draw(nights)
        return drawn

    def _draw(self, nights: Indices) -> Floats:
        return self.rng.standard_normal(len(nights))
