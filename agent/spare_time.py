"""What is done while a server is waited for: the conversation that is due, and flag checks; it changes no server.

Never in a measured window: a wait is over before a measurement begins, and a request that is still under way then is
waited for, or given up, first. The list changes only at the next choice, so that nothing moves under a comparison.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from agent.counsel import Counsel, Over
from agent.hands import Hands
from agent.policy import broken_constraints
from state import events as ev
from state.errors import PolicyRefused, RatchetError, StoreError
from state.models import DecisionKind, EnvChange, Experiment, FlagChange, LaunchSpec, Role, Todo, TodoStatus, Who
from state.tables import TRIED
from state.waits import WAITING

Awaited = TypeVar("Awaited")
GRACE_S = 3.0
"""A shorter wait is not worth a request that would then be waited for itself."""
LINGER_S = 60.0
"""So long the answer to a request under way is waited for when the server is ready before it."""
FEW = 3
"""With fewer ideas left a conversation is held before the list is empty."""


class SpareTime:
    """The waits of one session."""

    def __init__(self, hands: Hands, counsel: Counsel, grace_s: float = GRACE_S) -> None:
        self.hands = hands
        self.counsel = counsel
        self.grace_s = grace_s
        self.refused: dict[str, str] = {}
        """Why experiments on the list can't be run, whatever becomes of the one under way."""

    async def beside(self, what: str, waiting: Awaitable[Awaited]) -> Awaited:
        """The result of what is waited for, `what` in words; a longer wait is used until it ends."""
        began = self.hands.store.clock()
        awaited = asyncio.ensure_future(waiting)
        work: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({awaited}, timeout=self.grace_s)
            if not awaited.done():
                work = asyncio.create_task(self._use(awaited.done))
                await self._both(awaited, work, what, began)
            return await awaited
        finally:
            await _end(awaited, work)

    def heed(self) -> None:
        """Set aside what was found to be impossible, before its turn."""
        for todo in self._pending():
            if todo.id in self.refused:
                reason = self.refused[todo.id]
                set_aside(self.hands, todo.experiment, DecisionKind.BLOCK, TodoStatus.BLOCKED, reason)
        self.refused = {}

    # --- parts ---------------------------------------------------------------------------------------------

    async def _both(self, awaited: asyncio.Future[Awaited], work: asyncio.Task[None], what: str, began: float) -> None:
        """Until both are over and the use of the wait is noted; a defect of the work shows at once."""
        before, used_from = self._asked(), self.hands.store.clock()
        known = set(self.refused)
        both: set[asyncio.Future[Any]] = {awaited, work}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        used_s = self.hands.store.clock() - used_from
        if work.done():
            work.result()
        await asyncio.wait({awaited})
        ready_at = self.hands.store.clock()
        await asyncio.wait({work}, timeout=LINGER_S if awaited.exception() is None else 0.0)
        if work.done():
            work.result()
        asked = self._asked()[len(before) :]
        did = [f"asked the language model ({', '.join(asked)})"] if asked else []
        did += [f"{name} can't be run: {reason}" for name, reason in self.refused.items() if name not in known]
        if did:
            longer_s = self.hands.store.clock() - ready_at
            longer = f", and {longer_s:.0f} s longer" if longer_s >= 1 else ""
            said = f"{what}: {used_s:.0f} of {ready_at - began:.0f} s used{longer}; {'; '.join(did)}"
            self.hands.write(ev.Noted(text=said, subject=WAITING))

    async def _use(self, over: Over) -> None:
        """Everything that only reads; what goes wrong with the host meanwhile, whoever waits for it meets as well."""
        self._check_flags()
        try:
            if self.counsel.due(idle=len(self._pending()) < FEW):
                await self.counsel.go_on(over)
        except StoreError:
            raise
        except RatchetError as obstacle:
            self.hands.progress.phase(f"the wait was not used further: {obstacle.what}")

    def _check_flags(self) -> None:
        """Derive what each pending experiment would start, from either configuration that may be the next parent."""
        store, sid = self.hands.store, self.hands.session_id
        under_way = store.open_comparison(sid)
        parents = {self.hands.role(Role.KNOWN_GOOD), *([] if under_way is None else [under_way.candidate])}
        specs = [store.spec(fingerprint) for fingerprint in sorted(parents)]
        for todo in self._pending():
            reasons = [self._refusal(todo.experiment, spec) for spec in specs]
            if reasons and None not in reasons:
                self.refused[todo.id] = str(reasons[0])

    def _refusal(self, experiment: Experiment, parent: LaunchSpec) -> str | None:
        """Why a change of flags and variables could not be made; others are only known once they are made ready."""
        if not all(isinstance(change, FlagChange | EnvChange) for change in experiment.changes):
            return None
        try:
            derived = self.hands.target.derive(parent, experiment.changes)
        except PolicyRefused as refused:
            return refused.what
        return "; ".join(broken_constraints(derived, self.hands.config.policy)) or None

    def _pending(self) -> list[Todo]:
        return self.hands.store.todos(self.hands.session_id, (TRIED, TodoStatus.PENDING))

    def _asked(self) -> list[str]:
        return [exchange.id for exchange in self.hands.store.exchanges(self.hands.session_id)]


def set_aside(hands: Hands, experiment: Experiment, kind: DecisionKind, status: TodoStatus, reason: str) -> None:
    """Decide against an experiment without having touched the server for it."""
    decision = hands.store.decide(
        hands.session_id, kind=kind, subject=experiment.id, what=experiment.title, reason=reason
    )
    hands.write(
        ev.TodoChanged(experiment_id=experiment.id, status=status, reason=reason, by=Who.AGENT),
        ev.DecisionMade(decision=decision),
    )


async def _end(*tasks: asyncio.Future[Any] | None) -> None:
    """Nothing of it goes on; what was under way has said so in the log when this returns."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
