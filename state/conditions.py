"""Under which conditions runs were made, in words, from what the sampler saw; pure, and it judges nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from state.models import Span, Telemetry

THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}
"""Bits of the driver's mask (nvml.h, nvmlClocksThrottleReason) that take speed away; the others tell of idleness or
of clocks that somebody set."""


def machine(*seen: Telemetry) -> str:
    """`330 W of 700 W, 98 %, 2300 MHz, 71.0 GiB, 61 °C`: means over runs and boards, of memory and heat the most.

    Without a GPU that could be seen the cores that the server used; empty where neither was observed.
    """
    boards = [board for one in seen for board in one.gpu or ()]
    if not boards:
        cores = [one.server_cpu_cores for one in seen if one.server_cpu_cores is not None]
        return f"server on {statistics.fmean(cores):.1f} cores" if cores else ""
    limit = _mean(board.power_limit_w for board in boards)
    power, use = _mean(board.power_w for board in boards), _mean(board.util_pct for board in boards)
    clock, memory = _mean(board.sm_mhz for board in boards), _most(board.memory_mb for board in boards)
    heat = _most(board.temperature_c for board in boards)
    slowed = throttled(*seen)
    parts = (
        None if power is None else f"{power:.0f} W" + ("" if limit is None else f" of {limit:.0f} W"),
        None if use is None else f"{use:.0f} %",
        None if clock is None else f"{clock:.0f} MHz",
        None if memory is None else f"{memory / 1024:.1f} GiB",
        None if heat is None else f"{heat:.0f} °C",
        f"slowed by {', '.join(slowed)}" if slowed else None,
    )
    count = max(len(one.gpu or ()) for one in seen)
    return (f"{count} GPUs, each " if count > 1 else "") + ", ".join(part for part in parts if part)


def throttled(*seen: Telemetry) -> tuple[str, ...]:
    """What held clocks down at any time of these runs, in words."""
    masks = [_mask(text) for one in seen for board in one.gpu or () for text in board.throttle_reasons]
    return tuple(word for bit, word in THROTTLES.items() if any(mask & bit for mask in masks))


def preemptions(seen: Sequence[Telemetry]) -> float | None:
    """How often a run had requests set aside by the server, on average; None where no server told."""
    told = [one.preemptions for one in seen if one.preemptions is not None]
    return statistics.fmean(told) if told else None


def _mask(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _mean(spans: Iterable[Span | None]) -> float | None:
    known = [span.mean for span in spans if span is not None]
    return statistics.fmean(known) if known else None


def _most(spans: Iterable[Span | None]) -> float | None:
    return max((span.max for span in spans if span is not None), default=None)
