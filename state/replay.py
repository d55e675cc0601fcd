"""The decision log, told again from the store alone; it must not touch a host, a model or the clock."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from state.conditions import machine
from state.exchanges import Exchange
from state.models import Measurement, Trial
from state.store import Store
from state.waits import Wait, waits


def decision_log(store: Store, session_id: str) -> list[dict[str, Any]]:
    """Every decision in order, with its reason and what each piece of evidence says.

    Each entry: id, at (ISO 8601, UTC), kind, subject, what, reason, evidence (a list of {id, says}).
    """
    measurements = {taken.id: taken for taken in store.measurements(session_id)}
    trials = {trial.id: trial for trial in store.trials(session_id)}
    exchanges = {exchange.id: exchange for exchange in store.exchanges(session_id)}
    words = {word.id: word for word in store.words(session_id)}
    loading = {name: wait for wait in waits(store, session_id) for name in wait.exchanges}
    log = []
    for row in store.decisions(session_id):
        says = []
        for name in row["evidence"]:
            if name in measurements:
                says.append({"id": name, "says": measurement_line(measurements[name])})
            elif name in trials:
                says.append({"id": name, "says": trial_line(trials[name])})
            elif name in exchanges:
                says.append({"id": name, "says": exchange_line(exchanges[name]) + _while(loading.get(name))})
            elif name in words:
                says.append({"id": name, "says": f"said at {iso(words[name].at)}: {words[name]}"})
        entry = {key: row[key] for key in ("id", "kind", "subject", "what", "reason")}
        log.append({**entry, "at": iso(row["at"]), "evidence": says})
    return log


def measurement_line(taken: Measurement) -> str:
    """One run in one line."""
    head = f"{taken.arm} at {taken.load_point}, launch {taken.trial_id}, seed {taken.seed}"
    if taken.metrics is not None and taken.metrics.output_tok_s is not None:
        figures = f"{taken.metrics.output_tok_s:.1f} output tok/s"
        if taken.metrics.ttft_ms.p50 is not None and taken.metrics.tpot_ms.p50 is not None:
            figures += f", TTFT p50 {taken.metrics.ttft_ms.p50:.0f} ms, TPOT p50 {taken.metrics.tpot_ms.p50:.1f} ms"
        head += f": {figures}"
    under = machine(taken.telemetry) if taken.telemetry is not None else ""
    if under:
        head += f"; {under}"
    if taken.reasons:
        head += f" ({taken.status}: {'; '.join(taken.reasons)})"
    return head


def trial_line(trial: Trial) -> str:
    """One launch in one line."""
    failure = trial.failure
    if failure is not None:
        asked = f" ({failure.action}{f' {failure.knob}' if failure.knob else ''})" if failure.action else ""
        return f"{trial.kind} of {trial.fingerprint} failed, {failure.failure_class}: {failure.cause}{asked}"
    if trial.adopted:
        return f"the adopted process runs {trial.fingerprint}"
    if trial.kind == "adjust":
        return f"the running process was brought into {trial.fingerprint}"
    return f"launch of {trial.fingerprint} generated after {trial.load_s or 0.0:.1f} s"


def exchange_line(exchange: Exchange) -> str:
    """One request to a language model in one line."""
    head, reply = f"{exchange.ask.model} asked with {exchange.ask.prompt}", exchange.reply
    if reply is None:
        return f"{head}: no answer yet"
    if reply.silence is not None:
        return f"{head}: {reply.silence} after {reply.seconds:.1f} s ({reply.detail})"
    return f"{head}: answered after {reply.seconds:.1f} s, {reply.tokens} tokens, ended by {reply.finish or 'nothing'}"


def _while(wait: Wait | None) -> str:
    """Which launch was waited for meanwhile, and how much of that wait was used."""
    return "" if wait is None else f"; while {wait.trial_id} loaded ({wait.used_s:.0f} of {wait.seconds:.0f} s used)"


def iso(at: float) -> str:
    """Unix seconds as ISO 8601 in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
