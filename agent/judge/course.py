"""The course of one experiment: after each launch, keep, dismiss, or launch again, and which side; pure array rules.

It knows nothing of load points, guards or words: one series of launches goes in, a ruling comes out. Like the noise
model it holds any number of nights side by side, so that the benchmark simulates exactly what a session runs.

A keep needs three things at a look: a chance of no gain below the look's level, the same after a launch of the parent
that follows the last one of the candidate (so that drift can't pass for a gain), and that no single launch carries it:
with any one launch left out, no gain is still unlikely. Everything else is a dismissal or a wish for another launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from agent.judge import boundary, noise
from agent.judge.boundary import Looks
from agent.judge.noise import Belief, Bools, Floats, Indices

LEFT_OUT = 0.33
"""With any one launch left out, the chance of no gain must still be below this multiple of the share's square root."""

BASELINE_SHARE = 0.25
"""The parent is launched again when its level is less certain than this share of the candidate's own spread."""

OUT_OF_REACH = 0.15
"""A candidate is given up when its chance of a keep at the last look is below this, were its effect what it seems."""

CLEAR = 0.01
"""No gain this many times less likely than a keep asks for: each launch that is still due gets one run."""

HARM_LEVEL = 0.025
"""A chance of a gain below this is called harm."""


class Ruling(IntEnum):
    """What follows from a launch."""

    CANDIDATE = 0
    BASELINE = 1
    KEEP = 2
    HOPELESS = 3
    HARM = 4
    UNDECIDED = 5


@dataclass(frozen=True)
class Stakes:
    """What an experiment may spend: its share of the error, its looks, when it is hopeless; one entry per night."""

    share: Floats
    looks: Looks
    minimal_effect: float
    hopeless: Floats


@dataclass(frozen=True)
class Launches:
    """One launch in each night: whose it was, mean of its runs, their number (0: none), their squared deviations."""

    candidate: Bools
    mean: Floats
    runs: Floats
    squares: Floats

    def __getitem__(self, where: Indices | Bools) -> Launches:
        return Launches(self.candidate[where], self.mean[where], self.runs[where], self.squares[where])


@dataclass(frozen=True)
class Course:
    """Where the experiment stands in each night: what was believed before it, its launches, what is believed now."""

    before: Belief
    now: Belief
    launches: tuple[Launches, ...]
    confirming: Bools

    def __getitem__(self, where: Indices | Bools) -> Course:
        launches = tuple(launch[where] for launch in self.launches)
        return Course(self.before[where], self.now[where], launches, self.confirming[where])


@dataclass(frozen=True)
class Verdicts:
    """The ruling per night, the chances behind it (no gain; the minimal effect), what a dismissal gives back.

    `clear`: what is still due only confirms it, so that one run of a launch is enough.
    """

    ruling: Indices
    no_gain: Floats
    worth: Floats
    given_back: Floats
    clear: Bools


def begin(belief: Belief) -> Course:
    """An experiment about to begin."""
    start = noise.new_candidate(belief)
    return Course(start, start, (), np.zeros(len(belief.freedom), dtype=bool))


def after(course: Course, launch: Launches) -> Course:
    """One launch further."""
    return replace(course, now=_seen(course.now, launch), launches=(*course.launches, launch))


def rule(course: Course, stakes: Stakes) -> tuple[Course, Verdicts]:
    """Judge after the last launch; the course returned remembers which nights wait for their confirming launch."""
    weight = noise.weights(course.now)
    no_gain = noise.chance_below(course.now, 0.0, weight)
    worth = 1 - noise.chance_below(course.now, float(np.log1p(stakes.minimal_effect)), weight)
    candidates, baselines = _counts(course)
    last = course.launches[-1]
    of_candidate = last.candidate & (last.runs > 0)
    level = boundary.look_level(stakes.share, stakes.looks)

    look = (of_candidate & (candidates >= stakes.looks.first) & (baselines >= 1)) | course.confirming
    passed = look & (no_gain < level)
    if passed.any():
        passed[passed] = chance_without_one(course[passed]) < LEFT_OUT * np.sqrt(stakes.share[passed])
    keep = passed & course.confirming
    confirm = passed & ~course.confirming
    judged = candidates >= 1
    harm = judged & ~passed & (1 - no_gain < HARM_LEVEL)
    hopeless = judged & ~passed & ~harm & (worth < stakes.hopeless)
    reach = boundary.chance_of_keep(no_gain, candidates, level, stakes.looks)
    undecided = look & ~passed & ~harm & ~hopeless & ((candidates >= stakes.looks.last) | (reach < OUT_OF_REACH))

    relaunch = of_candidate & ((baselines == 0) | _baseline_is_vague(course, weight, candidates))
    ruling = np.where(confirm | relaunch, Ruling.BASELINE, Ruling.CANDIDATE)
    for where, word in (
        (keep, Ruling.KEEP),
        (harm, Ruling.HARM),
        (hopeless, Ruling.HOPELESS),
        (undecided, Ruling.UNDECIDED),
    ):
        ruling = np.where(where, word, ruling)
    unspent = boundary.still_to_err(no_gain, candidates, level, stakes.share, stakes.looks)
    back = np.where(keep, stakes.share, np.where(harm | hopeless | undecided, unspent, 0.0))
    clear = judged & (no_gain < CLEAR * level)
    return replace(course, confirming=confirm), Verdicts(ruling.astype(np.intp), no_gain, worth, back, clear)


def chance_without_one(course: Course) -> Floats:
    """The highest chance of no gain when any one launch of the experiment is left out (the candidate must keep one)."""
    worst = np.zeros(len(course.now.freedom))
    candidates, _ = _counts(course)
    for left_out, dropped in enumerate(course.launches):
        belief = course.before
        for number, launch in enumerate(course.launches):
            runs = np.zeros_like(launch.runs) if number == left_out else launch.runs
            belief = _seen(belief, replace(launch, runs=runs))
        chance = noise.chance_below(belief, 0.0, noise.weights(belief))
        told = (dropped.runs > 0) & (candidates - dropped.candidate >= 1)
        worst = np.where(told, np.maximum(worst, chance), worst)
    return worst


def _seen(belief: Belief, launch: Launches) -> Belief:
    return noise.after_launch(belief, launch.candidate, launch.mean, launch.runs, launch.squares)


def _counts(course: Course) -> tuple[Floats, Floats]:
    """Launches of the candidate, and of the parent after the candidate's first."""
    candidates = np.zeros(len(course.now.freedom))
    baselines = np.zeros(len(course.now.freedom))
    for launch in course.launches:
        candidates = candidates + (launch.candidate & (launch.runs > 0))
        baselines = baselines + (~launch.candidate & (launch.runs > 0) & (candidates > 0))
    return candidates, baselines


def _baseline_is_vague(course: Course, weight: Floats, candidates: Floats) -> Bools:
    """Whether another launch of the parent sharpens the comparison more than one of the candidate."""
    runs = np.maximum(course.launches[-1].runs, 1)[:, None]
    level = (weight * course.now.fields[noise.LEVEL_LEVEL]).sum(axis=1)
    own = (weight * (noise.models().launch + 1 / runs)).sum(axis=1) / np.maximum(candidates, 1)
    vague: Bools = level > BASELINE_SHARE * own
    return vague
