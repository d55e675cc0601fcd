"""One run's figures and status once more, from the client's stored result; pure, and it must not judge."""

from __future__ import annotations

from typing import Any

from agent.beside_parent import doubts
from agent.judge import Comparison
from agent.validity import COLLAPSED, invalid_reasons, seen_outside
from state.errors import CommandFailed
from state.models import Frozen, Measurement, MeasurementStatus, ValidityRule, Workload
from tools.benches.choice import bench_client


class Remeasured(Frozen):
    """A run as its raw result tells it, what had to be taken on trust, and why it could not be read (else empty)."""

    measurement: Measurement
    trusted: tuple[str, ...] = ()
    unread: str = ""


def remeasured(
    taken: Measurement,
    raw: dict[str, Any] | None,
    key: str,
    workload: Workload,
    rule: ValidityRule,
    comparison: Comparison | None = None,
    max_foreign_rps: float = 0.0,
) -> Remeasured:
    """The run as the raw result and the rule have it; `key` is the run's name on the host.

    `comparison` is the experiment as it stood while the run was made, None for a run that belongs to none. Reasons that
    no figure tells (who used the server after the run, that a candidate was seen collapsing, why there is no result)
    stay as they were written. A result that cannot be read leaves the run as it was written.
    """
    if raw is None and taken.metrics is None:
        # Without figures a run can't count, whatever is written.
        lost = taken.status is MeasurementStatus.LOST
        status = MeasurementStatus.LOST if lost else MeasurementStatus.INVALID
        return Remeasured(measurement=taken.model_copy(update={"status": status}), trusted=taken.reasons)
    if raw is None:
        return Remeasured(measurement=taken, unread="the client's own result was not stored")
    if taken.load_point not in {point.name for point in workload.load_points}:
        return Remeasured(measurement=taken, unread=f"the session has no load point {taken.load_point}")
    try:
        result = bench_client(workload).again(raw, key)
    except CommandFailed as error:
        return Remeasured(measurement=taken, unread=error.what)
    again = taken.model_copy(update={"metrics": result.metrics, "telemetry": result.telemetry})
    if taken.reasons[:1] == (COLLAPSED,):
        reasons = trusted = taken.reasons
    else:
        trusted = tuple(reason for reason in taken.reasons if seen_outside(reason))
        point = workload.point(taken.load_point)
        reasons = invalid_reasons(result.metrics, result.telemetry, point, rule, max_foreign_rps)
        if comparison is not None and not reasons:
            reasons = doubts(again, comparison, rule)
        reasons = (*reasons, *trusted)
    status = MeasurementStatus.INVALID if reasons else MeasurementStatus.VALID
    return Remeasured(measurement=again.model_copy(update={"status": status, "reasons": reasons}), trusted=trusted)
