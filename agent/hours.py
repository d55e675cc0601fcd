"""Keeping a session within its window: reads the host's clock, waits, and calls an end in time; it judges nothing.

Every reading that says something new is an event, so that verdicts follow from the log. In between, the session's own
steady clock carries the last reading on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from agent.evidence import costs, open_s
from agent.spoken import listen
from agent.window import is_open, later, opens_in, spoken, time_of_day, window_from
from state import events as ev
from state.errors import RatchetError
from state.models import DecisionKind, HostClock, Role

if TYPE_CHECKING:
    from agent.hands import Hands

Awaited = TypeVar("Awaited")
LOOK_S = 5.0
"""A wish to stop is seen this often while the session waits for its window."""
READ_S = 60.0
"""The host's clock is read this often meanwhile."""
TOLERANCE_S = 2.0
"""A clock read by the second over a network may differ so much from what its last reading led to expect."""
POLL_S = 0.5


class WindowClosing(Exception):
    """What is under way has to be left now, so that known-good is back before the window closes; the loop ends it."""


class Hours:
    """The window of one session on one target; without one it is always open."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands
        self.been_open = False
        self.away = False
        """Whether something else than known-good serves or starts."""
        self.closes_at = math.inf
        self.way_back_s = 0.0

    @property
    def text(self) -> str | None:
        """The session file's word on it."""
        return self.hands.config.policy.window

    async def look(self) -> float:
        """Seconds until the window closes, by a new reading of the host's clock; 0 while it is closed."""
        if self.text is None:
            return math.inf
        clock = await self.hands.target.clock()
        store, sid = self.hands.store, self.hands.session_id
        if self._news(clock, self.text):
            self.hands.write(ev.ClockRead(clock=clock, window=self.text))
        left = open_s(store, sid) or 0.0
        self.closes_at = store.clock() + left
        self.way_back_s = costs(store, sid, self.hands.config).way_back_s
        self.been_open = self.been_open or left > 0
        return left

    async def ahead(self) -> bool:
        """Whether this agent has to wait for the window; once it was open, its end is the session's end."""
        return await self.look() <= 0 and not self.been_open

    async def wait(self) -> None:
        """Touch nothing until the window opens; the lease goes on, and a stop is heeded."""
        text = self.text
        assert text is not None, "only a session with a window waits for it"
        hands, store, sid = self.hands, self.hands.store, self.hands.session_id
        left = self._announced(text)
        whole, since, read_at = left, store.clock(), store.clock()
        try:
            while left > 0:
                hands.check_stop()
                listen(hands)
                hands.progress.tick(f"waiting for the window {text}: {spoken(left)}", whole - left, whole)
                await hands.target.pause(min(LOOK_S, max(left, POLL_S)))
                if store.last_event_at(sid) > since:  # a person's word came in between, and is no waiting
                    since = self._waited(since)
                if store.clock() - read_at >= READ_S or left <= READ_S:
                    await self.look()
                    read_at = store.clock()
                left = opens_in(window_from(text), self._now())
        except RatchetError:
            self._waited(since)
            raise
        self._waited(since)

    def check(self) -> None:
        """Raise WindowClosing when known-good, or the way back to it, has just the time that is left."""
        needed = self.way_back_s if self.away else 0.0
        if self.been_open and self.hands.store.clock() >= self.closes_at - needed:
            raise WindowClosing

    async def in_time(self, waiting: Awaitable[Awaited]) -> Awaited:
        """Wait for something, but no longer than known-good can still be back before the window closes."""
        if self.text is None or not self.away:
            return await waiting
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                self.check()
                pause = asyncio.ensure_future(self.hands.target.pause(POLL_S))
                both: set[asyncio.Future[Any]] = {task, pause}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def serves(self, fingerprint: str | None) -> None:
        """Note what serves or is about to: known-good needs no time to be brought back."""
        self.away = fingerprint is not None and fingerprint != self.hands.role(Role.KNOWN_GOOD)

    # --- parts ---------------------------------------------------------------------------------------------

    def _now(self) -> HostClock:
        read = self.hands.store.clock_read(self.hands.session_id)
        assert read is not None, "the clock is read before anybody waits by it"
        at, seen = read
        return later(seen.clock, self.hands.store.clock() - at)

    def _news(self, clock: HostClock, text: str) -> bool:
        read = self.hands.store.clock_read(self.hands.session_id)
        if read is None or read[1].window != text:
            return True
        expected = self._now()
        same = {"unix": clock.unix}
        return abs(expected.unix - clock.unix) > TOLERANCE_S or expected.model_copy(update=same) != clock

    def _announced(self, text: str) -> float:
        """The decision to wait, and for how long."""
        clock, window = self._now(), window_from(text)
        left = opens_in(window, clock)
        if is_open(window, clock):
            return left
        self.hands.progress.phase(f"waiting for the window {text}: it opens in {spoken(left)}")
        decision = self.hands.store.decide(
            self.hands.session_id,
            kind=DecisionKind.WAIT,
            subject=self.hands.session_id,
            what=f"nothing is touched before the window {text} opens, in {spoken(left)}",
            reason=f"the host's clock shows {time_of_day(clock)}",
        )
        self.hands.write(ev.DecisionMade(decision=decision))
        return left

    def _waited(self, since: float) -> float:
        """Write down how long was only waited, up to now."""
        now = self.hands.store.clock()
        self.hands.write(ev.WindowAwaited(seconds=max(0.0, now - since)))
        return self.hands.store.clock()
