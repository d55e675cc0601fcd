"""The report's table of what machine and server counters showed beside each experiment; it judges nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from state.conditions import machine, preemptions
from state.models import Arm, Measurement, MeasurementStatus, Todo
from state.store import SessionRow, Store

SAME_SHARE = 0.01
"""Requests by the server's count for each completed one: up to here two sides count alike."""


def machine_section(store: Store, row: SessionRow) -> Iterator[str]:
    """Parent beside candidate, at the objective's load points; nothing where nothing was observed."""
    rows = [line for todo in store.todos(row.id) if (line := _row(store, row, todo)) is not None]
    if not rows:
        return
    yield from ("## Machine", "", "| experiment | parent | candidate |", "|---|---|---|", *rows, "")


def _row(store: Store, row: SessionRow, todo: Todo) -> str | None:
    try:
        comparison = store.comparison(row.id, todo.id)
    except KeyError:
        return None  # it was never begun
    points, trials = row.config["workload"]["objective"]["at"], {trial.id: trial for trial in store.trials(row.id)}
    runs = [run for run in store.measurements(row.id) if run.telemetry is not None and run.load_point in points]
    parent = [
        run
        for run in runs
        if trials[run.trial_id].fingerprint == comparison.parent and run.status is MeasurementStatus.VALID
    ]
    candidate = [run for run in runs if run.experiment_id == todo.id and run.arm is Arm.CANDIDATE]
    before, after = _words(parent), _words(candidate)
    for theirs, ours in (_preempted(parent, candidate), _served(parent, candidate)):
        before, after = before + theirs, after + ours
    if not before and not after:
        return None
    return f"| {todo.experiment.title} | {', '.join(before) or '–'} | {', '.join(after) or '–'} |"


def _words(runs: Sequence[Measurement]) -> list[str]:
    said = machine(*(run.telemetry for run in runs if run.telemetry is not None)) if runs else ""
    return [said] if said else []


def _preempted(parent: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[list[str], list[str]]:
    """How often requests were set aside, where the two sides differ."""
    counts = [preemptions([run.telemetry for run in runs if run.telemetry is not None]) for runs in (parent, candidate)]
    if None in counts or counts[0] == counts[1]:
        return [], []
    before, after = ([f"{count:.3g} preemptions a run"] for count in counts)
    return before, after


def _served(parent: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[list[str], list[str]]:
    """Requests that the server itself counted for each that the client calls complete, where the two sides differ."""
    shares = [_share(runs) for runs in (parent, candidate)]
    if shares[0] is None or shares[1] is None or abs(shares[0] - shares[1]) <= SAME_SHARE:
        return [], []
    before, after = ([f"{share:.2f} requests counted for each completed"] for share in shares)
    return before, after


def _share(runs: Sequence[Measurement]) -> float | None:
    known = [
        run.metrics.server_requests / run.metrics.completed
        for run in runs
        if run.metrics is not None and run.metrics.server_requests is not None and run.metrics.completed
    ]
    return statistics.fmean(known) if known else None
