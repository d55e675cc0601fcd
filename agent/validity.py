"""Does a benchmark run count: pure checks of one run's figures and telemetry; it must not compare two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from state.models import LoadPoint, Measurement, MeasurementStatus, Metrics, Telemetry, ValidityRule

QUIET = "noisy host"
TRAFFIC = "foreign traffic"
COLLAPSED = "collapsed"
AFTERWARDS = "right after the run"
GONE = "the server that was measured no longer serves"
COMPLAINED = "the server itself says"


def invalid_reasons(
    metrics: Metrics, telemetry: Telemetry, point: LoadPoint, rule: ValidityRule, max_foreign_rps: float = 0.0
) -> tuple[str, ...]:
    """Why this run must not be judged, empty when it counts. Surroundings begin with QUIET or TRAFFIC.

    `max_foreign_rps` is how many requests of others a second are tolerated beside a run.
    """
    return tuple([*_figures(metrics, point, rule), *_surroundings(metrics, telemetry, rule, max_foreign_rps)])


def foreign_requests(metrics: Metrics) -> float | None:
    """Requests of others in the run's own window, by the server's count; None where it counts nothing.

    Of a server that counts tokens alone it is the tokens beyond ours, in requests of our own size.
    """
    if metrics.server_requests is not None:
        return max(0.0, metrics.server_requests - metrics.completed - metrics.failed)
    if metrics.server_output_tokens is None or not metrics.output_tokens:
        return None
    return max(0.0, metrics.server_output_tokens / metrics.output_tokens - 1) * metrics.completed


def seen_outside(reason: str) -> bool:
    """Whether a reason was seen on the host beside the run: no figure of the run can tell it again."""
    if reason == GONE or reason.startswith(COMPLAINED):
        return True
    return reason.startswith(TRAFFIC) and reason.endswith(AFTERWARDS)


def noisy(reasons: tuple[str, ...]) -> bool:
    """Whether a run was void only because of the surroundings, so that waiting may help."""
    return bool(reasons) and all(reason.startswith((QUIET, TRAFFIC)) for reason in reasons)


def void_streak(own: tuple[Measurement, ...]) -> list[Measurement]:
    """The newest runs in a row that do not count; a collapse counts, it is a result."""
    streak: list[Measurement] = []
    for taken in reversed(own):
        if taken.status is MeasurementStatus.VALID:
            break
        if taken.status is MeasurementStatus.INVALID and taken.reasons[:1] != (COLLAPSED,):
            streak.insert(0, taken)
    return streak


def hopelessly_void(own: tuple[Measurement, ...], rule: ValidityRule) -> str | None:
    """Why the runs of an experiment will not become valid by another try, None while one is worth it."""
    streak = void_streak(own)
    if streak and (len(streak) > rule.retries or streak[-1].metrics is None):
        return f"{len(streak)} runs in a row do not count: {'; '.join(streak[-1].reasons)}"
    return None


def errs(taken: Measurement, rule: ValidityRule) -> bool:
    """Whether a run is void because requests failed or answers were cut: what the server did, not its surroundings."""
    metrics = taken.metrics
    if metrics is None or taken.status is MeasurementStatus.VALID:
        return False
    return bool(metrics.short_outputs) or metrics.failed > rule.max_failed_share * metrics.requested


def _figures(metrics: Metrics, point: LoadPoint, rule: ValidityRule) -> Iterator[str]:
    if metrics.stopped_early:
        yield f"stopped early: {metrics.stopped_early}"
    if metrics.requested != point.requests:
        yield f"{metrics.requested} requests were sent where {point.requests} were asked"
    if metrics.failed > rule.max_failed_share * metrics.requested:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(metrics.failures.items()))
        yield f"{metrics.failed} of {metrics.requested} requests failed ({kinds})"
    if metrics.completed + metrics.failed != metrics.requested:
        yield f"{metrics.completed} completed and {metrics.failed} failed of {metrics.requested}: some are missing"
    if metrics.short_outputs:
        yield f"{metrics.short_outputs} answers were shorter than the {point.output_tokens} tokens asked"
    if not _positive(metrics.duration_s) or not _positive(metrics.output_tok_s):
        yield "no positive duration and throughput"
    if not _positive(metrics.ttft_ms.mean):
        yield "no TTFT above zero"
    if metrics.unusable:
        yield f"these figures measure nothing: {', '.join(metrics.unusable)}"
    yield from _text(metrics, rule)
    wanted = min(point.concurrency, point.requests)
    if metrics.peak_concurrency is not None and metrics.peak_concurrency < wanted:
        yield f"only {metrics.peak_concurrency} of {wanted} streams were ever in flight"
    if metrics.mean_concurrency is not None and metrics.mean_concurrency < rule.min_concurrency_share * wanted:
        yield f"{metrics.mean_concurrency:.1f} streams in flight on average, {wanted} asked"


def _text(metrics: Metrics, rule: ValidityRule) -> Iterator[str]:
    """Clients that count the tokens they asked for are held against the text that came; more of it proves nothing."""
    found, claimed = metrics.retokenized_tokens, metrics.output_tokens
    if found is not None and found < rule.min_retokenized_share * claimed:
        yield f"the text that came has {found} tokens, the client claims {claimed}"


def _counted(metrics: Metrics, rule: ValidityRule, max_foreign_rps: float) -> Iterator[str]:
    """Where the server's counters do not fit the client's claims, beyond what others may ask of it."""
    foreign = foreign_requests(metrics) if max_foreign_rps else None
    if foreign is not None and _positive(metrics.duration_s) and foreign / metrics.duration_s > max_foreign_rps:
        seen = f"about {foreign / metrics.duration_s:.2f} requests a second of others"
        yield f"{TRAFFIC}: {seen}, {max_foreign_rps:g} allowed"
    counted = metrics.server_output_tokens
    if counted is not None and metrics.output_tokens:
        off = counted / metrics.output_tokens - 1
        if off > rule.counter_tolerance and not max_foreign_rps:
            yield f"{TRAFFIC}: the server counted {counted} output tokens, we received {metrics.output_tokens}"
        elif off < -rule.counter_tolerance:
            yield f"the server counted {counted} output tokens, the client claims {metrics.output_tokens}"


def _surroundings(metrics: Metrics, telemetry: Telemetry, rule: ValidityRule, max_foreign_rps: float) -> Iterator[str]:
    if metrics.client_bottleneck:
        yield f"the client was the bottleneck: {metrics.client_bottleneck}"
    yield from _counted(metrics, rule, max_foreign_rps)
    foreign = telemetry.foreign_cpu_cores
    if foreign is not None and foreign > rule.max_foreign_cpu_cores:
        yield f"{QUIET}: {foreign:.2f} cores were busy with other work, {rule.max_foreign_cpu_cores:.2f} allowed"
    if telemetry.steal_share is not None and telemetry.steal_share > rule.max_steal_share:
        yield f"{QUIET}: {telemetry.steal_share:.1%} of CPU time was stolen, {rule.max_steal_share:.1%} allowed"


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0
