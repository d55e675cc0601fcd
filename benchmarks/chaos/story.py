"""One round as it happens: the agent, the faults, and `resume` until the session ends; it says what was seen, no more.

The operator that is played here knows little: a session that is not over is resumed after a moment, a bounded number
of times, and a `start` that came to nothing is tried again.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos import faults, record
from benchmarks.chaos.faults import Fault, Plan
from benchmarks.chaos.ground import LEASE_S, Ground
from tests.e2e.rig import Agent

STEP_S = 0.05
AGENTS = 14
"""Starts and resumes of one round, at most."""
AGENT_S = 500.0
"""After which an agent hangs."""
ROUND_S = 900.0
AGAIN_S = 3.0
"""Between an agent that could not go on and the next."""
RESTORED_WITHIN_S = LEASE_S + 100.0


@dataclass
class Run:
    """One agent process from its start to its end."""

    agent: Agent
    words: tuple[str, ...]
    began_s: float
    began_at: float = field(default_factory=time.monotonic)
    exit: int | None = None
    seconds: float = 0.0
    killed: bool = False


@dataclass
class Story:
    """What happened in a round, and what was noticed on the way."""

    runs: list[Run] = field(default_factory=list)
    snapshots: list[list[dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0
    noticed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def resumes(self) -> int:
        """How often the agent had to be started again."""
        return len(self.runs) - 1


def words_of(argv: list[str]) -> list[str]:
    """A command line without the API key, which is stored as a placeholder only."""
    return [word for at, word in enumerate(argv) if at == 0 or argv[at - 1] != "--api-key"]


def not_serving(ground: Ground, expected: list[str]) -> str | None:
    """Why the server is not the one that is expected, running and generating; None when it is."""
    try:
        serving = ground.host.argv()
    except (AssertionError, OSError) as nobody:
        return str(nobody)
    if words_of(serving) != words_of(expected):
        return f"serves {' '.join(words_of(serving)[2:])} instead of {' '.join(words_of(expected)[2:])}"
    try:
        return None if ground.host.generates() else "the server sends no token"
    except OSError as silent:
        return f"the server does not generate: {silent}"


class Round:
    """Plays a plan on a ground."""

    def __init__(self, plan: Plan, ground: Ground) -> None:
        self.plan, self.ground, self.host = plan, ground, ground.host
        self.original = self.host.argv()
        self.story = Story()
        self.began_at = time.monotonic()
        self.running: Run | None = None
        self.next_at = self.began_at
        self.pauses_s = list(plan.pauses_s)

    def play(self) -> Story:
        """Until the session is over, or the limits are."""
        while not self._over():
            now = time.monotonic()
            for fault in self.plan.faults:
                if fault.mend_at is not None and now >= fault.mend_at:
                    faults.mend(fault, self.ground, self.running.agent if self.running else None)
            if self.running is None:
                if now >= self.next_at:
                    self._begin()
            elif self.running.agent.process.poll() is not None:
                self._ended(self.running)
            elif now - self.running.began_at > AGENT_S:
                self.story.noticed.append(("I8", f"an agent was still running after {AGENT_S:.0f} s"))
                self.running.agent.kill()
            else:
                self._disturb(self.running)
            time.sleep(STEP_S)
        for fault in self.plan.faults:
            if fault.mend_at is not None:
                faults.mend(fault, self.ground, None)
        self.story.seconds = time.monotonic() - self.began_at
        return self.story

    def _over(self) -> bool:
        if self.running is not None:
            return False
        seen = record.read(self.host.database)
        if self.story.runs and seen is not None and seen.ended:
            return True
        if len(self.story.runs) >= AGENTS or time.monotonic() - self.began_at > ROUND_S:
            self.story.noticed.append(("I8", f"the session is not over after {len(self.story.runs)} agents"))
            return True
        return False

    def _begin(self) -> None:
        seen = record.read(self.host.database)
        database = ("--db", str(self.host.database))
        fresh = seen is None or seen.session is None
        words = ("start", str(self.ground.session), *database) if fresh else ("resume", *database)
        self.running = Run(self.host.agent(*words), words[:1], time.monotonic() - self.began_at)
        self.story.runs.append(self.running)

    def _ended(self, run: Run) -> None:
        run.exit = run.agent.process.returncode
        run.seconds = time.monotonic() - run.began_at
        self.running = None
        seen = record.read(self.host.database)
        if seen is not None:
            self.story.snapshots.append(seen.events)
        self.next_at = time.monotonic() + (AGAIN_S if run.exit != 0 else 0.0)
        if run.killed:
            self.next_at = time.monotonic() + (self.pauses_s.pop(0) if self.pauses_s else 0.0)
        asked = seen is not None and seen.session is not None and "stopped on request" in seen.session["reason"]
        if run.exit == 4 and asked and len(self._hit()) == 1:
            self._expect_known_good(seen, "I1", "after a stop")

    def _hit(self) -> list[Fault]:
        return [fault for fault in self.plan.faults if fault.hit_s is not None]

    def _disturb(self, run: Run) -> None:
        """Bring about the fault that is due."""
        waiting = [fault for fault in self.plan.faults if fault.hit_s is None]
        if not waiting:
            return
        fault, now = waiting[0], time.monotonic()
        if self._hit():
            last_s = max(one.hit_s or 0.0 for one in self._hit())
            fault.due_at = max(self.began_at + last_s, run.began_at) + fault.delay_s
        elif fault.due_at is None:
            if self._events() < fault.after_events:
                return
            fault.due_at = now + fault.delay_s
        if now < fault.due_at or (fault.kind.at_benchmark and self.host.client_at_work() is None):
            return
        seen = record.read(self.host.database)
        if fault.kind.name == "two-agents" and (seen is None or seen.session is None):
            return
        fault.phase = "before a session was opened" if seen is None else seen.phase()
        fault.hit_s = now - self.began_at
        run.killed |= fault.kind.name in ("agent-kill", "silence")
        faults.hit(fault, self.ground, run.agent)
        if fault.kind.name == "silence":
            self._await_restore()

    def _events(self) -> int:
        """What the witnesses have seen, but for the server's very first start."""
        return len(self.host.starts()) - 1 + len(self.host.runs())

    def _await_restore(self) -> None:
        """Nobody resumes: the host has to come back to known-good by itself, and to be left alone then."""
        seen = record.read(self.host.database)
        deadline = time.monotonic() + RESTORED_WITHIN_S
        time.sleep(2.0)  # what the dead agent had sent may still be under way on the host
        while self._watchers() and time.monotonic() < deadline:
            time.sleep(STEP_S)
        if self._watchers():
            self.story.noticed.append(("I1", f"the watcher is not done {RESTORED_WITHIN_S:.0f} s after the kill"))
        self._expect_known_good(seen, "I1", "after the watcher")

    def _watchers(self) -> list[str]:
        jobs = self.host.jobs().items()
        return [key for key, folder in jobs if key.startswith("watcher-") and not (folder / "exit").exists()]

    def _expect_known_good(self, seen: record.Record | None, invariant: str, when: str) -> None:
        expected = self.original
        if seen is not None and seen.session is not None:
            with contextlib.suppress(KeyError):
                expected = seen.argv("known-good")
        wrong = not_serving(self.ground, expected)
        if wrong is not None:
            self.story.noticed.append((invariant, f"{when}: {wrong}"))
