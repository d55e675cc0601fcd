"""Sessions from outside: open one, take one up again, end it in a known state; it must not know how to measure."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from agent.config import SessionConfig
from agent.counsel import Counsel
from agent.ending import SHUT, Proof, bring_back, proven
from agent.graph import run as run_graph
from agent.hands import Hands
from agent.hours import WindowClosing
from agent.inbox import stop_file
from agent.manners import UNMEASURED
from agent.nodes import Nodes
from agent.planners.base import Endpoint, Planner
from agent.policy import broken_constraints
from agent.progress import Progress
from agent.spare_time import SpareTime
from agent.tenure import Tenure
from state import events as ev
from state.errors import (
    ConfigError,
    DrainFailed,
    ForeignTraffic,
    HostRebooted,
    HostUnreachable,
    LeasePassedOn,
    NeedsHuman,
    OutcomeUnknown,
    RatchetError,
    RefusedForSafety,
    ServerError,
    StoppedByFailure,
    StoppedByOperator,
    StoreError,
)
from state.journal import FaultPoint, Journal, no_fault
from state.models import Adoption, DecisionKind, Disruption, Role, SessionStatus, Trial, TrialStatus
from state.store import SessionRow, Store
from tools.target import Target


def new_session_id(now: float) -> str:
    """Readable, sortable, and never used twice on a host: date, time and four random hex digits."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + secrets.token_hex(2)


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
    if row.status is SessionStatus.DONE:
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


def adopted_now(store: Store, row: SessionRow) -> Adoption:
    """What was adopted, as the process that it is now: after a boot of the host it may be another one."""
    processes = [trial.process for trial in store.trials(row.id) if trial.adopted and trial.process is not None]
    return row.adoption.model_copy(update={"process": processes[-1]})


def open_session(
    store: Store,
    session_id: str,
    config: SessionConfig,
    adoption: Adoption,
    unmeasured: str = "",
    carried: Sequence[ev.Event] = (),
) -> None:
    """Write the session's first events: what was found is the original and, until a keep, the known-good.

    `unmeasured` says which load points of the session file are left out, `carried` is what comes over from an earlier
    session (its decision is the second one).
    """
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
        *([ev.Noted(text=unmeasured, subject=UNMEASURED)] if unmeasured else []),
        *carried,
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
        endpoint: Endpoint | None = None,
    ) -> None:
        self.store = store
        self.session_id = session_id
        self.target = target
        self.progress = progress
        self.stop = asyncio.Event()
        self.fault = fault
        journal = Journal(store, session_id, fault)
        self.hands = Hands(store, session_id, target, config, journal, progress, self.stop, self._asked_by_file)
        counsel = Counsel(self.hands, endpoint)
        self.hands.spare = SpareTime(self.hands, counsel)
        self.nodes = Nodes(self.hands, planner, counsel)
        self.tenure = Tenure(self.hands)

    async def run(self) -> int:
        """Attach, run to an end, and return the exit code. Errors that an operator must see are raised after the
        session's own record of them is written.
        """
        try:
            resumed = self._attach()
            self.tenure.begin()
            if resumed:
                await self.tenure.look_back()
            self.fault("agent:attached")
            with _signals(self.stop.set):
                code = await self._to_an_end()
            self.fault("end:closed")
            await self.target.release()
            self.fault("end:released")
            return code
        except (NeedsHuman, RefusedForSafety) as error:
            needs = isinstance(error, NeedsHuman)
            if undrain := self.hands.manners.still_drained():
                error.where["still drained by us; to end that"] = undrain
            if needs:
                with suppress(RatchetError):
                    await self.target.leave_word(str(error))
            self._moved(SessionStatus.NEEDS_HUMAN if needs else SessionStatus.REFUSED, error)
            with suppress(LeasePassedOn):  # a lease that passed on is not ours to end
                await self.target.release()
            raise
        except Exception as error:
            await self._hand_over(error)
            raise
        finally:
            await self.tenure.end()

    async def _to_an_end(self) -> int:
        lost: RatchetError | None = None
        closing = False
        while True:
            try:
                if lost is not None:
                    await self.tenure.regain(lost)
                    lost = None
                if closing:
                    await self.hands.abandon_runs("the window closes")
                    closing = False
                await run_graph(self.nodes, self.session_id, self.store.path.with_name("graph.db"))
            except (StoppedByOperator, StoppedByFailure) as stopped:
                return await self._drain(stopped.what)
            except (ForeignTraffic, DrainFailed):
                await self._leave_known_good()
                await self.hands.manners.at_rest()
                raise
            except (HostUnreachable, HostRebooted, OutcomeUnknown) as error:
                if error is lost:
                    raise
                lost = error
                continue
            except WindowClosing:  # seen again from the beginning, the loop ends what was under way
                closing = True
                continue
            row = self.store.session(self.session_id)
            return row.exit_code if row.exit_code is not None else 1

    async def _hand_over(self, error: Exception) -> None:
        """Something that no step can answer: the host's watcher puts known-good back now, or when the lease runs out.

        Nothing in here may hide the error itself, whatever the host and the database still can do.
        """
        await self.tenure.end()
        with suppress(RatchetError):
            await self.target.hand_over()
        code = error.exit_code if isinstance(error, RatchetError) else 1
        why = str(error) if isinstance(error, RatchetError) else f"unexpected error: {type(error).__name__}: {error}"
        with suppress(StoreError):
            self.hands.write(ev.SessionMoved(status=SessionStatus.STOPPED, reason=why, exit_code=code))

    def _attach(self) -> bool:
        """Note that an agent is here; on a resume (then True), say what the last one left open."""
        row = self.store.session(self.session_id)
        happened: list[ev.Event] = [ev.AgentAttached(pid=os.getpid(), version=version("ratchet-tuner"))]
        if row.attached:
            happened += [*self.nodes.counsel.lost(), *self._interruption(row.status)]
        self.hands.write(*happened)
        self._stop_file().unlink(missing_ok=True)
        return row.attached > 0

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
        """Ctrl-C, SIGTERM or `stop`: end the run under way, bring known-good back, confirm it, stay resumable."""
        trial = await self._leave_known_good()
        confirmed = await self._confirmed(trial)
        await self.hands.manners.at_rest()
        decision = self.store.decide(
            self.session_id,
            kind=DecisionKind.INTERRUPTED,
            subject=trial.id,
            what="known-good serves, the session can be resumed",
            reason=f"{reason}; {confirmed.words}",
            evidence=confirmed.evidence,
        )
        moved = ev.SessionMoved(status=SessionStatus.STOPPED, reason=reason, exit_code=StoppedByOperator.exit_code)
        self.hands.write(ev.DecisionMade(decision=decision), moved)
        self._stop_file().unlink(missing_ok=True)
        return StoppedByOperator.exit_code

    async def _leave_known_good(self) -> Trial:
        self.progress.phase("stopping: known-good comes back first")
        self.fault("drain:begun")
        await self.hands.abandon_runs()
        self.fault("drain:runs-ended")
        trial = await bring_back(self.hands, self.hands.role(Role.KNOWN_GOOD))
        self.fault("drain:restored")
        return trial

    async def _confirmed(self, trial: Trial) -> Proof:
        """The confirming run of a stop; who asks a second time does not want to wait for it."""
        self.stop.clear()
        self._stop_file().unlink(missing_ok=True)
        self.progress.phase("stopping: known-good serves; one run confirms it (stop again to skip it)")
        try:
            return await proven(self.hands, trial.fingerprint)
        except StoppedByOperator:
            await self.hands.abandon_runs()
            return Proof(trial=trial, runs=(), words="not confirmed by a run: asked to stop at once")
        except WindowClosing:
            await self.hands.abandon_runs("the window closes")
            return Proof(trial=trial, runs=(), words=SHUT)
        except DrainFailed as failed:
            return Proof(trial=trial, runs=(), words=f"not confirmed by a run: {failed.what}")

    async def put_back(self, original: bool) -> Trial:
        """The `restore` command: bring known-good (or the original) up if it does not serve already."""
        role = Role.ORIGINAL if original else Role.KNOWN_GOOD
        fingerprint = self.hands.role(role)
        self.hands.write(ev.AgentAttached(pid=os.getpid(), version=version("ratchet-tuner")))
        await self.tenure.look_back()
        self.fault("restore:attached")
        await self.hands.abandon_runs()
        self.fault("restore:runs-ended")
        if original:
            await self.target.unpersist()
        trial = await bring_back(self.hands, fingerprint)
        await self.hands.manners.at_rest()
        self.fault("restore:served")
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
        self.fault("restore:closed")
        await self.target.release()
        self.fault("restore:released")
        return trial

    def _moved(self, status: SessionStatus, error: RatchetError) -> None:
        self.hands.write(ev.SessionMoved(status=status, reason=str(error), exit_code=error.exit_code))

    def _stop_file(self) -> Path:
        return stop_file(self.store.path, self.session_id)

    def _asked_by_file(self) -> bool:
        return self._stop_file().exists()


@contextmanager
def _signals(call: Callable[[], object]) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a drain; a second one skips its confirming run, never the restore."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
