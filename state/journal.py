"""Exactly-once effects: intent before, outcome after, observation between; it must not know what an effect is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from state import events as ev
from state.store import Store

Outcome = dict[str, Any]
FaultPoint = Callable[[str], None]
"""Called with the name of each step; the crash suite makes it kill the process. In normal runs it does nothing."""


def no_fault(point: str) -> None:
    """The fault point of normal runs."""


class Journal:
    """Runs effects of one session so that each happens once, whatever dies in between."""

    def __init__(self, store: Store, session_id: str, fault: FaultPoint = no_fault) -> None:
        self.store = store
        self.session_id = session_id
        self.fault = fault

    async def once(
        self,
        key: str,
        intent: Outcome,
        act: Callable[[], Awaitable[Outcome]],
        observe: Callable[[], Awaitable[Outcome | None]],
    ) -> Outcome:
        """Make the effect `key` happen exactly once and return its stored outcome.

        Closed: the stored outcome. Absent: write the intent, act, write the outcome. Open (we died in between):
        observe first, and act only if the world shows that it never happened (`observe` returns None).
        """
        name, key = key, f"{self.session_id}/{key}"
        known = self.store.effect(key)
        if known is not None and known.outcome is not None:
            return known.outcome
        if known is None:
            self.fault(f"{name}:before-intent")
            self.store.append(self.session_id, ev.EffectIntended(key=key, intent=intent))
            self.fault(f"{name}:after-intent")
            seen = None
        else:
            seen = await observe()
        outcome = seen if seen is not None else await act()
        self.fault(f"{name}:after-act")
        closed = ev.EffectClosed(key=key, by="act" if seen is None else "observe", outcome=outcome)
        self.store.append(self.session_id, closed)
        self.fault(f"{name}:after-outcome")
        return outcome

    def abandoned(self, key: str, why: str) -> list[ev.Event]:
        """The end of the effect `key` if it is still open, to be written beside what makes it pointless."""
        key = f"{self.session_id}/{key}"
        known = self.store.effect(key)
        if known is None or known.outcome is not None:
            return []
        return [ev.EffectClosed(key=key, by="abandon", outcome={"abandoned": why})]
