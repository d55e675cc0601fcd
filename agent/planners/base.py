"""The planners' seam: a view of the session in, a proposal out; no planner sees a shell or a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from state.exchanges import Ask, Reply
from state.models import Experiment, Frozen, LaunchSpec, Verdict
from tools.target import TargetFacts


class View(Frozen):
    """What a planner sees: the parent's configuration, the host, what was tried and what came of it."""

    engine: str
    spec: LaunchSpec
    facts: TargetFacts
    tried: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


class Proposal(Frozen):
    """What to put on the list, what was left out and why, and the reason for it all."""

    experiments: tuple[Experiment, ...]
    dropped: tuple[tuple[str, str], ...] = ()
    reason: str


class Planner(Protocol):
    """Proposes experiments."""

    def propose(self, view: View) -> Proposal:
        """Experiments for the list; those already tried are not proposed again."""
        ...


class Endpoint(Protocol):
    """A language model behind an API: it is sent messages and sends text, and nothing else passes between us."""

    async def reply(self, ask: Ask, schema: Mapping[str, Any], within_s: float) -> Reply:
        """What came back within the time, or why nothing did; never raises for anything that the endpoint does.

        `schema` is that of the ask's form, and empty for a form without one.
        """
        ...
