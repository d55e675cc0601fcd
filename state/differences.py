"""What is stored against what follows from the rest: values, and tables against the fold of events; no judgement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from state.exchanges import Ask, Reply
from state.models import (
    Adoption,
    Experiment,
    Frozen,
    LaunchSpec,
    Measurement,
    Trial,
    Verdict,
)
from state.store import Store

ABSENT = "absent"
RELATIVE, NEAR_ZERO = 1e-6, 1e-8
"""How far two floating-point results of one computation may lie apart: relative, and near zero absolute.

On one machine they are equal to the last bit. Another processor or numpy may round otherwise, and the bounds of an
interval are searched for to 1e-9.
"""


class Difference(Frozen):
    """One value that is not what it should be; `where` is its place, such as `objective.low`."""

    where: str
    stored: Any
    recomputed: Any

    def __str__(self) -> str:
        return f"{self.where}: stored {_shown(self.stored)}, recomputed {_shown(self.recomputed)}"


def differences(stored: Any, recomputed: Any, where: str = "", tolerant: bool = False) -> list[Difference]:
    """Every place at which two JSON values differ; `tolerant` allows for the rounding of floating-point numbers."""
    return list(_walk(stored, recomputed, where, tolerant))


def changed_rows(stored: Store, recomputed: Store, table: str, session_id: str) -> list[Difference]:
    """Every value in a session's rows of a table that the events do not say."""
    ours, theirs = (
        {key: _read(table, row) for key, row in store.rows(table, session_id).items()} for store in (stored, recomputed)
    )
    return differences(ours, theirs, table)


def _walk(stored: Any, recomputed: Any, where: str, tolerant: bool) -> Iterator[Difference]:
    if isinstance(stored, Mapping) and isinstance(recomputed, Mapping):
        for key in dict.fromkeys((*stored, *recomputed)):
            inside = f"{where}.{key}" if where else str(key)
            yield from _walk(stored.get(key, ABSENT), recomputed.get(key, ABSENT), inside, tolerant)
    elif not _equal(stored, recomputed, tolerant):
        yield Difference(where=where, stored=stored, recomputed=recomputed)


def _equal(left: Any, right: Any, tolerant: bool) -> bool:
    if tolerant and isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=RELATIVE, abs_tol=NEAR_ZERO)
    return bool(left == right)


def _read(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its JSON read, so that only what it says counts; text that can't be read stays text."""
    return {name: _value(table, name, value) for name, value in row.items()}


def _value(table: str, column: str, value: Any) -> Any:
    read = _MODELS.get((table, column)) or (json.loads if column in _PLAIN else None)
    if read is None or value is None:
        return value
    try:
        return read(value)
    except ValueError:
        return value


def _dumped(model: type[Frozen]) -> Callable[[str], Any]:
    """Through the model, so that a field which an older version did not write has its default."""
    return lambda text: model.model_validate_json(text).model_dump(mode="json")


_PLAIN = frozenset({"config", "intent", "outcome", "evidence", "raw"})
_MODELS: dict[tuple[str, str], Callable[[str], Any]] = {
    ("sessions", "adoption"): _dumped(Adoption),
    ("specs", "body"): _dumped(LaunchSpec),
    ("todos", "body"): _dumped(Experiment),
    ("trials", "body"): _dumped(Trial),
    ("measurements", "body"): _dumped(Measurement),
    ("verdicts", "body"): _dumped(Verdict),
    ("exchanges", "ask"): _dumped(Ask),
    ("exchanges", "reply"): _dumped(Reply),
}


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:119]}…"
