"""What a failure calls for in its situation: whose it is, how often it came, what was tried; pure, it does nothing.

A diagnosis names an action for a candidate's first failure. What comes after depends on more than the log: a baseline
cannot be rejected, a second time is no accident, and advice to use more memory and to use less needs a middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from state.models import Failure
from tools.diagnose import Action, rule_named

ADJUSTMENTS = frozenset({Action.ADJUST_UP, Action.ADJUST_DOWN})
RETRIES = frozenset({Action.RETRY_ONCE, Action.CLEAN_AND_RETRY_ONCE, Action.RESTORE})
FINAL = frozenset({Action.ABORT, Action.ESCALATE})


def next_step(failure: Failure, times: int, *, known_good: bool = False) -> Action:
    """The action for the `times`-th failure (1 is the first) of a candidate, or of the known-good configuration.

    Known-good is never rejected or adjusted: nothing of ours is to blame, so a person must look, or the session stops
    when a retry did not help. A failure that was never diagnosed is treated as an unknown one.
    """
    first = Action(failure.action or Action.RETRY_ONCE)
    if known_good:
        if first in FINAL:
            return first
        if first not in RETRIES and first is not Action.INVALIDATE:
            return Action.ESCALATE
        return first if times < 2 else Action.ABORT
    if times < 2 or first in ADJUSTMENTS or first in FINAL:
        return first
    rule = rule_named(failure.rule)
    second = None if rule is None else rule.again
    return second or (Action.REJECT if first in RETRIES or first is Action.INVALIDATE else first)


class Attempt(NamedTuple):
    """A value of the knob that was tried and what it led to; `asked` is None when the server started.

    `bound` is a value that the server itself named as too small (asked up) or too large (asked down).
    """

    value: float
    asked: Action | None = None
    bound: float | None = None


class Span(NamedTuple):
    """What is sensible for a knob: least and greatest value, first step, and the nearest that two tries may lie."""

    low: float
    high: float
    step: float
    resolution: float


class Bracket(NamedTuple):
    """The next value to try, or None to stop, and why; a working value may lie between `low` and `high`."""

    value: float | None
    reason: str
    low: float
    high: float


def bracket(history: Sequence[Attempt], span: Span) -> Bracket:
    """Where a memory knob goes next, by all attempts so far, oldest first; only the knob of one fingerprint else equal.

    Failures that ask for more raise the floor, failures that ask for less lower the ceiling. With one of them known the
    value moves away from it, in steps that double; with both the middle is tried. It ends when a value started, when
    nothing is left between the two, and when they contradict each other: then no value of this knob helps.
    """
    ups = [attempt for attempt in history if attempt.asked is Action.ADJUST_UP]
    downs = [attempt for attempt in history if attempt.asked is Action.ADJUST_DOWN]
    floor = max((max(one.value, _bound(one)) for one in ups), default=span.low)
    ceiling = min((min(one.value, _bound(one)) for one in downs), default=span.high)
    if not ups and not downs:
        return Bracket(None, "no failure asks for another value", floor, ceiling)
    started = [attempt.value for attempt in history if attempt.asked not in ADJUSTMENTS]
    if started:
        return Bracket(None, f"it starts with {started[-1]:g}", floor, ceiling)
    if ups and downs:
        wanted, reason = (floor + ceiling) / 2, f"between {floor:g}, too little, and {ceiling:g}, too much"
    elif ups:
        wanted, reason = min(span.high, floor + span.step * 2 ** (len(ups) - 1)), f"{floor:g} is too little"
    else:
        wanted, reason = max(span.low, ceiling - span.step * 2 ** (len(downs) - 1)), f"{ceiling:g} is too much"
    value = round(round(wanted / span.resolution) * span.resolution, 10)
    above = value > floor or (not ups and value == floor)
    below = value < ceiling or (not downs and value == ceiling)
    if not (above and below):
        return Bracket(None, f"no value is left: {reason}", floor, ceiling)
    return Bracket(value, reason, floor, ceiling)


def _bound(attempt: Attempt) -> float:
    return attempt.value if attempt.bound is None else attempt.bound
