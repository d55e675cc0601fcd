"""Sessions from outside: open one, take one up again, end it in a known state; it must not know how to measure."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from agent.config import SessionConfig
from agent.evidence import RESTORE
from agent.graph import run as run_graph
from agent.hands import Hands
from agent.inbox import stop_file
from agent.nodes import Nodes, restore
from agent.planners.base import Planner
from agent.policy import broken_constraints
from agent.progress import Progress
from state import events as ev
from state.errors import (
    ConfigError,
    HostError,
    NeedsHuman,
    OutcomeUnknown,
    RatchetError,
    RefusedForSafety,
    ServerError,
    StoppedByOperator,
)
from state.journal import FaultPoint, Journal, no_fault
from state.models import Adoption, DecisionKind, Disruption, Role, SessionStatus, Trial, TrialStatus
from state.store import SessionRow, Store
from tools.target import Target

RENEWALS_PER_LEASE = 6


def new_session_id(now: float) -> str:
    """Readable, sortable, and never used twice on a host: date, time and four random hex digits."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + secrets.token_hex(2)


def holder_of(session_id: str, pid: int) -> str:
    """How an agent process names itself on the host."""
    return f"session {session_id}, agent process {pid}"


def refuse_unfinished(store: Store) -> None:
    """A session whose agent died may have left an experiment serving: it is taken up again before a new one."""
    for row in store.sessions():
        if row.status is SessionStatus.RUNNING:
            raise ConfigError(
                f"session {row.id} is unfinished: its agent (process {row.agent_pid}) died",
                do="`resume` goes on with it; after `restore` a new one can be started",
            )


def refuse_ended(row: SessionRow) -> None:
    """Only a session that is not over can be resumed."""
    if row.status in (SessionStatus.DONE, SessionStatus.FAILED):
        raise ConfigError(f"session {row.id} is over: {row.reason}", do="`start` begins a new one")


def refuse_unusable(config: SessionConfig, adoption: Adoption, trouble: str | None) -> None:
    """Refuse a server that is no known-good to return to, or that must not be stopped, before anything is touched."""
    if trouble is not None:
        raise ServerError(
            f"the server does not generate: {trouble}",
            where={"target": config.target.name, "url": config.server.url, "process": adoption.process.pid},
            do="a server that does not work is no known-good to return to; mend it first",
        )
    if not adoption.reproducible and config.policy.max_disruption > Disruption.HOT:
        raise RefusedForSafety(
            "the running server could not be started again as it is, so it must not be stopped",
            where={"target": config.target.name, "obstacles": "; ".join(adoption.obstacles)},
            do='start it in a reproducible way, or set policy.max_disruption = "hot"',
        )
    broken = broken_constraints(adoption.spec, config.policy)
    if broken:
        raise RefusedForSafety(
            "the running server does not meet the session file's own constraints",
            where={"target": config.target.name, "constraints": "; ".join(broken)},
            do="correct policy.keep_env or the server",
        )


def open_session(store: Store, session_id: str, config: SessionConfig, adoption: Adoption) -> None:
    """Write the session's first events: what was found is the original and, until a keep, the known-good."""
    refuse_unusable(config, adoption, None)
    fingerprint = adoption.spec.fingerprint
    trial = Trial(
        id=store.next_id("trials", "T"),
        experiment_id="adopted",
        fingerprint=fingerprint,
        status=TrialStatus.READY,
        adopted=True,
        process=adoption.process,
    )
    opened = ev.SessionOpened(
        target=config.target.name,
        config=config.model_dump(mode="json"),
        config_revision=config.revision,
        workload_revision=config.workload.revision,
        adoption=adoption,
    )
    reason = "what was found running"
    decision = store.decide(
        session_id,
        kind=DecisionKind.START,
        subject=session_id,
        what=f"tune {adoption.spec.engine} on {config.target.name}",
        reason=f"adopted process {adoption.process.pid}: {' '.join(adoption.spec.argv)}",
        evidence=(trial.id,),
    )
    store.append(
        session_id,
        opened,
        ev.SpecSeen(fingerprint=fingerprint, spec=adoption.spec),
        ev.RoleSet(role=Role.ORIGINAL, fingerprint=fingerprint, reason=reason),
        ev.RoleSet(role=Role.KNOWN_GOOD, fingerprint=fingerprint, reason=reason),
        ev.TrialOpened(trial=trial),
        ev.TrialClosed(trial=trial),
        ev.DecisionMade(decision=decision),
    )


class Runner:
    """Runs one session in this process, and leaves known-good behind however it ends."""

    def __init__(
        self,
        store: Store,
        session_id: str,
        target: Target,
        config: SessionConfig,
        planner: Planner,
        progress: Progress,
        fault: FaultPoint = no_fault,
    ) -> None:
        self.store = store
        self.session_id = session_id
        self.target = target
        self.progress = progress
        self.lease_s = config.target.lease_s
        self.stop = asyncio.Event()
        journal = Journal(store, session_id, fault)
        self.hands = Hands(store, session_id, target, config, journal, progress, self.stop, self._asked_by_file)
        self.nodes = Nodes(self.hands, planner)

    async def run(self) -> int:
        """Attach, run to an end, and return the exit code. Errors that an operator must see are raised after the
        session's own record of them is written.
        """
        self._attach()
        await self._after_silence()
        renewing = asyncio.create_task(self._renew())
        try:
            with _signals(self.stop.set):
                code = await self._to_an_end()
            await self.target.release()
            return code
        except (NeedsHuman, RefusedForSafety) as error:
            needs = isinstance(error, NeedsHuman)
            self._moved(SessionStatus.NEEDS_HUMAN if needs else SessionStatus.REFUSED, error)
            with suppress(RefusedForSafety):  # a lease that passed on is not ours to end
                await self.target.release()
            raise
        except (HostError, ServerError, OutcomeUnknown) as error:
            # The lease is left to run out: what we cannot reach any more, the host's watcher puts right.
            self._moved(SessionStatus.STOPPED, error)
            raise
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _to_an_end(self) -> int:
        try:
            await run_graph(self.nodes, self.session_id, self.store.path.with_name("graph.db"))
        except StoppedByOperator as stopped:
            return await self._drain(stopped.what)
        row = self.store.session(self.session_id)
        return row.exit_code if row.exit_code is not None else 1

    async def _renew(self) -> None:
        """Say to the host, often enough, that somebody is here; no step of the loop can hold this up for long."""
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE)
            try:
                await self.target.renew()
            except RefusedForSafety as passed_on:
                self.hands.refused = passed_on
                return
            except (HostError, OutcomeUnknown) as silent:
                self.progress.phase(f"the lease could not be renewed: {silent.what}")

    async def _after_silence(self) -> None:
        """If the host's watcher acted while no agent was there: say so, and know its launch as one of ours."""
        what = await self.target.restored_meanwhile()
        if what is None:
            return
        known_good = self.hands.role(Role.KNOWN_GOOD)
        serving = await self.target.serving()
        happened: list[ev.Event] = []
        if serving is not None and serving.spec.fingerprint == known_good and serving.key is not None:
            trial = Trial(
                id=self.store.next_id("trials", "T"),
                experiment_id=RESTORE,
                fingerprint=known_good,
                status=TrialStatus.READY,
                process=serving.process,
            )
            happened += [ev.TrialOpened(trial=trial), ev.TrialClosed(trial=trial)]
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.RESTORE,
            subject=self.session_id,
            what="the host's watcher had put known-good back",
            reason=f"no agent renewed the lease; {what}",
        )
        self.hands.write(*happened, ev.DecisionMade(decision=decision))

    def _attach(self) -> None:
        """Note that an agent is here; on a resume, say what the last one left open."""
        row = self.store.session(self.session_id)
        happened: list[ev.Event] = [ev.AgentAttached(pid=os.getpid(), version=version("ratchet-tuner"))]
        if row.attached:
            happened += self._interruption(row.status)
        self.hands.write(*happened)
        self._stop_file().unlink(missing_ok=True)

    def _interruption(self, status: SessionStatus) -> list[ev.Event]:
        comparison = self.store.open_comparison(self.session_id)
        left = f"in the middle of {comparison.experiment.id}" if comparison is not None else "between experiments"
        died = status is SessionStatus.RUNNING
        what = f"the agent died {left}" if died else f"the session had stopped {left}"
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.RESUME,
            subject=self.session_id,
            what="go on",
            reason=f"{what}; the host is observed first, nothing finished is repeated",
        )
        moved = ev.SessionMoved(status=SessionStatus.RUNNING, reason="resumed")
        return [ev.DecisionMade(decision=decision), moved]

    async def _drain(self, reason: str) -> int:
        """Ctrl-C, SIGTERM or `stop`: end the run under way, bring known-good back, stay resumable."""
        self.progress.phase("stopping: known-good comes back first")
        await self.hands.abandon_runs()
        known_good = self.hands.role(Role.KNOWN_GOOD)
        trial = await self._known_good(known_good)
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.INTERRUPTED,
            subject=trial.id,
            what="known-good serves, the session can be resumed",
            reason=reason,
            evidence=(trial.id,),
        )
        moved = ev.SessionMoved(status=SessionStatus.STOPPED, reason=reason, exit_code=StoppedByOperator.exit_code)
        self.hands.write(ev.DecisionMade(decision=decision), moved)
        self._stop_file().unlink(missing_ok=True)
        return StoppedByOperator.exit_code

    async def _known_good(self, fingerprint: str) -> Trial:
        position = await self.hands.where()
        trial = position.trial
        if trial is not None and trial.fingerprint == fingerprint and trial.status is TrialStatus.READY:
            return trial
        return await restore(self.hands, fingerprint)

    async def put_back(self, original: bool) -> Trial:
        """The `restore` command: bring known-good (or the original) up if it does not serve already."""
        role = Role.ORIGINAL if original else Role.KNOWN_GOOD
        fingerprint = self.hands.role(role)
        self.hands.write(ev.AgentAttached(pid=os.getpid(), version=version("ratchet-tuner")))
        await self._after_silence()
        await self.hands.abandon_runs()
        trial = await self._known_good(fingerprint)
        what = f"the {role.value} configuration serves"
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.RESTORE,
            subject=trial.id,
            what=what,
            reason="a person asked for it",
            evidence=(trial.id,),
        )
        happened: list[ev.Event] = [ev.DecisionMade(decision=decision)]
        if self.store.session(self.session_id).status is SessionStatus.RUNNING:
            happened.append(ev.SessionMoved(status=SessionStatus.STOPPED, reason=what, exit_code=4))
        self.hands.write(*happened)
        await self.target.release()
        return trial

    def _moved(self, status: SessionStatus, error: RatchetError) -> None:
        self.hands.write(ev.SessionMoved(status=status, reason=str(error), exit_code=error.exit_code))

    def _stop_file(self) -> Path:
        return stop_file(self.store.path, self.session_id)

    def _asked_by_file(self) -> bool:
        return self._stop_file().exists()


@contextmanager
def _signals(call: Callable[[], object]) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a drain; a second one changes nothing, because the drain is what they want."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
