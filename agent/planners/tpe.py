"""The only door to Optuna: further points of a search space, by the points that are known; it runs and judges nothing.

Optuna takes a second to import, so that happens where it is used: most commands never need it.

The space is categorical where only written-down settings are known and numeric where a range is. Every known point is
told first, what never started as a broken constraint, and then it is asked: the tree-structured Parzen estimator
(Bergstra et al. 2011) puts its points where the better of the known ones lie closer than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.levers import Range
from agent.refine import Choices, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def asked(space: Space, told: Sequence[tuple[Choices, float | None]], count: int, seed: int) -> list[Choices]:
    """`count` points to try next: for each dimension one of its choices, or a number in its range. See `Asker`."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    dimensions = {name: _distribution(choices) for name, choices in space.items()}
    worst = min((value for _, value in told if value is not None), default=0.0)
    for choices, value in told:
        study.enqueue_trial({**choices})
        trial = study.ask(dimensions)
        trial.set_constraint("starts", 1.0 if value is None else 0.0)
        study.tell(trial, worst if value is None else value)
    return [dict(study.ask(dimensions).params) for _ in range(count)]


def _distribution(choices: tuple[str, ...] | Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(choices, Range):
        return CategoricalDistribution(choices)
    if choices.whole:
        return IntDistribution(int(choices.low), int(choices.high), log=choices.logarithmic)
    return FloatDistribution(choices.low, choices.high, log=choices.logarithmic)
