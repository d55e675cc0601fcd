"""Planners that publish their trials one by one, each as its users run it; they see only what they measured.

An evaluation is a launch and one run at every load point. A rival ends with the best setting that it observed, as
published tuning loops do. It must not look at the truth: `searched` notes that beside it, for the score.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Protocol

import optuna

from benchmarks.searching.outcome import Moment, Search
from benchmarks.searching.spaces import Setting, Space
from benchmarks.searching.surfaces import Surface

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Rival(Protocol):
    """What to try next, and what came of it (None: it did not start); no more to try is None."""

    def ask(self) -> Setting | None:
        """The next setting."""
        ...

    def tell(self, setting: Setting, value: float | None) -> None:
        """The observed objective of what was asked last."""
        ...


class Tpe:
    """Optuna's default sampler over categorical knobs; a launch that fails is told as a failed trial."""

    def __init__(self, space: Space, seed: int) -> None:
        self.knobs = space.knobs
        sampler = optuna.samplers.TPESampler(seed=seed)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self.study.enqueue_trial(dict(zip((knob.name for knob in self.knobs), space.found, strict=True)))

    def ask(self) -> Setting:
        """The sampler's suggestion; the first is what was found."""
        self.trial = self.study.ask()
        return tuple(self.trial.suggest_categorical(knob.name, list(knob.values)) for knob in self.knobs)

    def tell(self, setting: Setting, value: float | None) -> None:
        """As an Optuna user would."""
        failed = optuna.trial.TrialState.FAIL if value is None else None
        self.study.tell(self.trial, value, state=failed)


class Listed:
    """Settings in a given order, after what was found."""

    def __init__(self, space: Space, order: list[Setting]) -> None:
        self.left = iter([space.found, *(one for one in order if one != space.found)])

    def ask(self) -> Setting | None:
        """The next of the list."""
        return next(self.left, None)

    def tell(self, setting: Setting, value: float | None) -> None:
        """Nothing is learned."""


def random_search(space: Space, seed: int) -> Listed:
    """Every setting in random order, none twice."""
    order = space.settings
    random.Random(seed).shuffle(order)
    return Listed(space, order)


def grid(space: Space, seed: int) -> Listed:
    """All combinations one knob after the other; which knob turns fastest depends on the seed."""
    knobs = list(range(len(space.knobs)))
    random.Random(seed).shuffle(knobs)
    order = []
    for values in itertools.product(*(space.knobs[knob].values for knob in knobs)):
        turned = dict(zip(knobs, values, strict=True))
        order.append(tuple(turned[knob] for knob in sorted(turned)))
    return Listed(space, order)


class Greedy:
    """One knob's value at a time from the best so far, one run, kept if it is higher; ends after a round without."""

    def __init__(self, space: Space, seed: int) -> None:
        self.knobs = space.knobs
        self.order = [(at, value) for at, knob in enumerate(space.knobs) for value in knob.values]
        random.Random(seed).shuffle(self.order)
        self.best, self.value = space.found, float("-inf")
        self.steps = self._steps()

    def ask(self) -> Setting | None:
        """The best so far with one knob turned."""
        return next(self.steps, None)

    def tell(self, setting: Setting, value: float | None) -> None:
        """Keep what is higher."""
        if value is not None and value > self.value:
            self.best, self.value = setting, value

    def _steps(self) -> Iterator[Setting]:
        yield self.best
        before: Setting | None = None
        while before != self.best:
            before = self.best
            for at, value in self.order:
                if self.best[at] != value:
                    yield (*self.best[:at], value, *self.best[at + 1 :])


RIVALS: dict[str, Callable[[Space, int], Rival]] = {
    "tpe": Tpe,
    "random": random_search,
    "grid": grid,
    "greedy": Greedy,
}


def searched(surface: Surface, rival: Rival, seed: str, budget_s: float) -> Search:
    """A whole search within the budget; what the budget cuts off is not known to the rival."""
    clock, down_s, launches, failed = 0.0, 0.0, 0, 0
    best: tuple[float, Setting] | None = None
    serving, incumbents = surface.found, [Moment(0.0, surface.found)]
    launch = f"{seed}/found"
    while clock < budget_s and (setting := rival.ask()) is not None:
        if launches or setting != serving:
            launches += 1
            launch = f"{seed}/{launches}"
            start = surface.launch(setting, launch)
            clock, down_s, serving = clock + start.seconds, down_s + start.seconds, setting
            if start.failure is not None:
                failed += 1
                rival.tell(setting, None)
                continue
        logs = []
        for point in surface.points:
            ran = surface.run(setting, point.name, launch, "run")
            clock += ran.seconds
            logs.append(ran.log_tok_s)
        if clock > budget_s:
            break
        value = sum(logs) / len(logs)
        rival.tell(setting, value)
        if best is None or value > best[0]:
            best = (value, setting)
            incumbents.append(Moment(clock, setting))
    final = best[1] if best is not None else surface.found
    if serving != final:
        launches += 1
        down_s += surface.launch(final, f"{seed}/final").seconds
    return Search(
        final=final,
        incumbents=tuple(incumbents),
        seconds=clock,
        restarts=launches,
        down_s=down_s,
        experiments=launches,
        failed=failed,
    )
