"""Between which values a knob makes sense, as an engine's catalogue states it; pure, and it guesses nothing."""

from __future__ import annotations

from agent.catalogue.entries import VALUE, book, engines

SERVES_LESS = frozenset({"--ctx-size", "--max-model-len"})
"""Knobs whose smaller value refuses requests that are served now: no speed is worth that, so a person has to say it."""


def span_of_knob(engine: str, knob: str) -> tuple[float, float] | None:
    """The least and the greatest sensible value, None where the catalogue states none."""
    if engine not in engines():
        return None
    for entry in book(engine).experiments:
        of = [change for change in entry.changes if change.value == f"{{{VALUE}}}"]
        if entry.span is not None and any(knob in (change.flag, change.env) for change in of):
            return entry.span
    return None
