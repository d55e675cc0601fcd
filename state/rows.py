"""Rows of one table and session as they were parsed, in order and found by what they say; it reads no database.

A store that alone writes a session keeps them from one question to the next, since it knows which rows its events
touched. So a question costs the same late in a session as early: what did not change is neither read nor parsed again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from state import events as ev

Row = TypeVar("Row")
Label = tuple[str, Hashable]
"""What a row says that it is looked for by: the name of it, and its value."""


class Rows(Generic[Row]):
    """Parsed rows by id in the table's order; `labels` tells what a row can be found by.

    Every row that was written is noted, and so is the count of writes under each of the row's labels.
    """

    def __init__(self, labels: Callable[[Row], Iterable[Label]]) -> None:
        self.labels = labels
        self.ids: list[str] = []
        self.items: list[Row] = []
        self.log: list[str] = []
        self._order: list[Any] = []
        self._place: dict[str, int] = {}
        self._labelled: dict[str, dict[Hashable, dict[str, None]]] = {}
        self._writes: dict[Label, int] = {}

    def put(self, row_id: str, order: Any, row: Row) -> None:
        """A row as it is now, at its place in the order."""
        known = self._place.get(row_id)
        if known is not None:
            self._forget_labels(row_id, self.items[known])
        if known is not None and self._order[known] == order:
            self.items[known] = row
        else:
            self._move(row_id, known, order, row)
        self.log.append(row_id)
        for name, value in self.labels(row):
            self._labelled.setdefault(name, {}).setdefault(value, {})[row_id] = None
            self._writes[name, value] = self._writes.get((name, value), 0) + 1

    def get(self, row_id: str) -> Row:
        """One row (KeyError when there is none of that id)."""
        return self.items[self._place[row_id]]

    def first_of(self, label: Label) -> int:
        """Place of the first row with a label; the number of all rows when there is none."""
        return min(self._places(label), default=len(self.items))

    def with_label(self, label: Label) -> list[Row]:
        """All rows with a label, in the table's order."""
        return [self.items[place] for place in sorted(self._places(label))]

    def count(self, label: Label) -> int:
        """How many rows have a label."""
        name, value = label
        return len(self._labelled.get(name, {}).get(value, ()))

    def since(self, writes: int) -> list[Row]:
        """The rows that were written after the first so many writes, as they are now, in the table's order."""
        places = {self._place[row_id] for row_id in self.log[writes:]}
        return [self.items[place] for place in sorted(places)]

    def written(self, but: Label | None = None) -> int:
        """How many rows were written so far, those under a label left out."""
        return len(self.log) - (0 if but is None else self._writes.get(but, 0))

    def _places(self, label: Label) -> list[int]:
        name, value = label
        return [self._place[row_id] for row_id in self._labelled.get(name, {}).get(value, ())]

    def _move(self, row_id: str, known: int | None, order: Any, row: Row) -> None:
        """Rows mostly come in their order; one that does not costs all of them new places."""
        if known is not None:
            for column in (self.ids, self.items, self._order):
                del column[known]
        at = len(self.items)
        if self._order and order < self._order[-1]:
            at = bisect_right(self._order, order)
        self.ids.insert(at, row_id)
        self.items.insert(at, row)
        self._order.insert(at, order)
        if at == len(self.items) - 1 and known is None:
            self._place[row_id] = at
        else:
            self._place = {name: place for place, name in enumerate(self.ids)}

    def _forget_labels(self, row_id: str, before: Row) -> None:
        for name, value in self.labels(before):
            self._labelled[name][value].pop(row_id, None)


def touched(session_id: str, event: ev.Event) -> tuple[tuple[str, str], ...]:
    """Which rows an event writes, as (table, id), of those that a store keeps."""
    match event:
        case ev.TodoAdded():
            return (("todos", event.experiment.id),)
        case ev.TodoChanged() | ev.ComparisonOpened():
            return (("todos", event.experiment_id),)
        case ev.TrialOpened() | ev.TrialClosed():
            return (("trials", event.trial.id),)
        case ev.MeasurementOpened() | ev.MeasurementClosed():
            return (("measurements", event.measurement.id), ("answers", event.measurement.id))
        case ev.VerdictReached():
            return (("verdicts", event.verdict.experiment_id),)
        case ev.DecisionMade():
            return (("decisions", event.decision.id),)
        case ev.SessionOpened() | ev.SessionMoved() | ev.AgentAttached() | ev.RoleSet():
            return (("sessions", session_id),)
    return ()
