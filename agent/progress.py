"""What the loop tells whoever watches; a seam without an opinion on how it is shown."""

from __future__ import annotations

from typing import Protocol

from state import events as ev


class Progress(Protocol):
    """Receives what happens, as it happens."""

    def phase(self, text: str) -> None:
        """What the agent does from now on, in a few words."""
        ...

    def tick(self, text: str, done: float, of: float) -> None:
        """How far the present phase is."""
        ...

    def happened(self, event: ev.Event) -> None:
        """An event that is in the database now."""
        ...


class Silent:
    """Nobody watches."""

    def phase(self, text: str) -> None:
        """Not shown."""

    def tick(self, text: str, done: float, of: float) -> None:
        """Not shown."""

    def happened(self, event: ev.Event) -> None:
        """Not shown."""
