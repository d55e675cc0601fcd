"""One run of a candidate beside the runs of its parent: is it believable, was the machine in the same state; pure.

It must not judge: whoever wins, a run that cannot be believed is measured again. What a run shows by itself is checked
in `agent.validity`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from agent.judge import Comparison, parent_runs
from state.conditions import throttled
from state.models import Arm, Measurement, MeasurementStatus, Metrics, ValidityRule

IMPLAUSIBLE = "implausible"
AGREEMENT = 1.25
"""A second run confirms a leap when the two differ by no more than this factor."""
TELLING = (0.5, 1.5)
"""Where the parent's own text has fewer or more tokens for each that is claimed, the client's tokenizer is not the
model's, and the line tells nothing."""


def doubts(taken: Measurement, comparison: Comparison, rule: ValidityRule) -> tuple[str, ...]:
    """Why a candidate's run, which is good by itself, must not count; empty for the parent's own runs."""
    parent = [run.metrics for run in parent_runs(comparison, taken.load_point) if run.metrics is not None]
    if taken.arm is not Arm.CANDIDATE or taken.metrics is None or not parent:
        return ()
    found = (_other_text(taken.metrics, parent, rule), _leap(taken, taken.metrics, parent, comparison, rule))
    return tuple(doubt for doubt in found if doubt is not None)


def otherwise(taken: Measurement, comparison: Comparison) -> str | None:
    """What slowed the machine down in a candidate's run and in none of its parent's; a note, no reason against it."""
    parent = [run.telemetry for run in parent_runs(comparison, taken.load_point) if run.telemetry is not None]
    if taken.arm is not Arm.CANDIDATE or taken.telemetry is None or not any(one.gpu for one in parent):
        return None
    known = throttled(*parent)
    fresh = [word for word in throttled(taken.telemetry) if word not in known]
    if not fresh:
        return None
    return f"its GPUs were slowed by {', '.join(fresh)}, in no run of the parent at {taken.load_point}"


def _other_text(metrics: Metrics, parent: Sequence[Metrics], rule: ValidityRule) -> str | None:
    """A model that talks nonsense makes other tokens of its text than before; the parent's own spread must be small."""
    mine, theirs = _share(metrics), [share for one in parent if (share := _share(one)) is not None]
    if mine is None or len(theirs) < 2:
        return None
    usual = statistics.median(theirs)
    steady = max(theirs) - min(theirs) <= rule.retokenized_tolerance * usual
    if not (TELLING[0] <= usual <= TELLING[1] and steady) or abs(mine / usual - 1) <= rule.retokenized_tolerance:
        return None
    return f"the text that came has {mine:.2f} tokens for each that is claimed, the parent's has {usual:.2f}"


def _share(metrics: Metrics) -> float | None:
    if metrics.retokenized_tokens is None or not metrics.output_tokens:
        return None
    return metrics.retokenized_tokens / metrics.output_tokens


def _leap(
    taken: Measurement, metrics: Metrics, parent: Sequence[Metrics], comparison: Comparison, rule: ValidityRule
) -> str | None:
    """A gain that large is more often a fault of the measurement; a second run that says the same is believed."""
    rate = metrics.output_tok_s
    usual = statistics.median(one.output_tok_s or 0.0 for one in parent)
    if not rate or rate <= rule.implausible_ratio * usual:
        return None
    if any(max(rate, other) <= AGREEMENT * min(rate, other) for other in _other_rates(taken, comparison)):
        return None
    return f"{IMPLAUSIBLE}: {rate:.1f} tok/s are {rate / usual:.1f} times the parent's, measured again before it counts"


def _other_rates(taken: Measurement, comparison: Comparison) -> list[float]:
    """The candidate's other runs at the load point: those that count, and those that were too good to be believed."""
    return [
        run.metrics.output_tok_s
        for run in comparison.own
        if (run.arm, run.load_point) == (taken.arm, taken.load_point)
        and run.id != taken.id
        and run.metrics is not None
        and run.metrics.output_tok_s
        and (run.status is MeasurementStatus.VALID or _only_implausible(run))
    ]


def _only_implausible(run: Measurement) -> bool:
    return bool(run.reasons) and all(reason.startswith(IMPLAUSIBLE) for reason in run.reasons)
