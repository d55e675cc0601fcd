"""What a person can say to a session, as typed data; nothing here reads, writes or obeys.

A word waits as a file beside the database until the session hears it. Its id makes sure that it is obeyed once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from state.models import Experiment, Frozen


class Said(Frozen):
    """What all words have: an id of their own, when they were said (Unix seconds), and a reason if one was given."""

    id: str
    at: float
    reason: str = ""


class AddWord(Said):
    """Put an experiment on the list."""

    kind: Literal["add"] = "add"
    experiment: Experiment

    @property
    def todo(self) -> str:
        """Id of the todo that it is about."""
        return self.experiment.id

    def __str__(self) -> str:
        return f"add {self.todo}: {self.experiment.title}"


class DropWord(Said):
    """Do not try a todo."""

    kind: Literal["drop"] = "drop"
    todo: str

    def __str__(self) -> str:
        return f"drop {self.todo}"


class PriorityWord(Said):
    """Give a todo another priority."""

    kind: Literal["priority"] = "priority"
    todo: str
    priority: float = Field(ge=0, le=1)

    def __str__(self) -> str:
        return f"priority of {self.todo}: {self.priority:.2f}"


class ApproveWord(Said):
    """Let a gated todo have its turn."""

    kind: Literal["approve"] = "approve"
    todo: str

    def __str__(self) -> str:
        return f"approve {self.todo}"


Word = Annotated[AddWord | DropWord | PriorityWord | ApproveWord, Field(discriminator="kind")]

WORD: TypeAdapter[Word] = TypeAdapter(Word)
