"""From what was noted to a table: for each experiment, what its time went to; pure, it runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.waits.record import KINDS, Record, Sample, Span
from state import events as ev
from state.store import Store

Figures = dict[str, Any]


def boundaries(database: Path) -> list[tuple[str, float, float]]:
    """Each experiment's name, begin and end: from verdict to verdict, and what is left as the session's end."""
    with Store.read(database) as store:
        session = store.latest_session().id
        stored = [one for one in store.events(session) if one.session_id == session]
    begun = next(one.at for one in stored if isinstance(one.event, ev.AgentAttached))
    judged = [(one.event.verdict.experiment_id, one.at) for one in stored if isinstance(one.event, ev.VerdictReached)]
    ends = [*judged, ("end", stored[-1].at)]
    return [(name, before, at) for (_, before), (name, at) in pairwise([("", begun), *ends])]


def rows(database: Path, record: Record) -> list[Figures]:
    """What the time of each experiment went to."""
    return [_row(name, begin, end, record) for name, begin, end in boundaries(database)]


def summed(table: Sequence[Figures]) -> Figures:
    """All experiments together."""
    wall = sum(row["wall_s"] for row in table)
    sums = {key: round(sum(row[key] for row in table), 3) for key in ("wall_s", *KINDS, "own_s", "cpu_s", "trips")}
    return {
        **sums,
        "waited_share": 1 - sums["own_s"] / wall,
        "seen_share": 1 - (sums["own_s"] + sums["noticing"]) / wall,
        "cpu_s_per_experiment": sums["cpu_s"] / max(1, len(table) - 1),
        "trips_per_experiment": sums["trips"] / max(1, len(table) - 1),
    }


def shown(table: Sequence[Figures]) -> str:
    """The table in Markdown; seconds."""
    keys = ("experiment", "wall_s", *KINDS, "own_s", "cpu_s", "trips")
    lines = ["| " + " | ".join(key.removesuffix("_s") for key in keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(_cell(row[key]) for key in keys) + " |" for row in table]
    return "\n".join(lines)


def covered(spans: Sequence[Span], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that lie in any of the spans, each counted once."""
    total, reached = 0.0, begin
    for span in sorted(spans, key=lambda span: span.begin):
        first, last = max(span.begin, reached), min(span.end, end)
        total += max(0.0, last - first)
        reached = max(reached, last)
    return total


def cpu_until(samples: Sequence[Sample], at: float) -> float:
    """CPU time used until then, as of the last sample before."""
    return max((sample.cpu_s for sample in samples if sample.at <= at), default=samples[0].cpu_s if samples else 0.0)


def _row(name: str, begin: float, end: float, record: Record) -> Figures:
    by_kind = {}
    counted: list[Span] = []
    for kind in KINDS:
        before = covered(counted, begin, end)
        counted += [span for span in record.spans if span.kind == kind]
        by_kind[kind] = round(covered(counted, begin, end) - before, 3)
    return {
        "experiment": name,
        "wall_s": round(end - begin, 3),
        **by_kind,
        "own_s": round(end - begin - covered(counted, begin, end), 3),
        "cpu_s": round(cpu_until(record.samples, end) - cpu_until(record.samples, begin), 3),
        "trips": sum(1 for trip in record.trips if begin <= trip.begin < end),
    }


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
