"""The loop's two journalled effects: bring a configuration up, and run one benchmark; it must not judge either.

Revert, restore, relaunch and resume all go through `bring_up`: there is no second way to change the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agent.beside_parent import doubts, otherwise
from agent.config import SessionConfig
from agent.evidence import RESTORE, anything_live, spoilt
from agent.hours import Hours
from agent.judge import Comparison, Need, collapsing, pace
from agent.known import ABANDONED, told
from agent.manners import Manners
from agent.progress import Progress
from agent.validity import AFTERWARDS, COLLAPSED, COMPLAINED, GONE, TRAFFIC, foreign_requests, invalid_reasons
from state import events as ev
from state.errors import CommandFailed, ForeignChange, HostRebooted, RefusedForSafety, StoppedByOperator
from state.journal import Journal
from state.models import (
    Arm,
    Failure,
    Frozen,
    LaunchSpec,
    Measurement,
    MeasurementStatus,
    ProcessId,
    Role,
    Trial,
    TrialStatus,
    digest,
)
from state.store import Store
from state.tables import PROCESS, STATUS
from tools.diagnose import complaint
from tools.target import Ready, RunRequest, RunResult, RunState, Serving, Target

if TYPE_CHECKING:
    from agent.spare_time import SpareTime

Awaited = TypeVar("Awaited")
POLL_S = 0.5


class Position(Frozen):
    """Who serves now: one of our trials, or nobody. Anybody else raises ForeignChange before this is made.

    `astray`: the trial's process serves, but what is live of it is no trial's of that process; it shows as open.
    """

    trial: Trial | None
    serving: Serving | None
    astray: bool = False


class Hands:
    """Journalled effects of one session on one target."""

    def __init__(
        self,
        store: Store,
        session_id: str,
        target: Target,
        config: SessionConfig,
        journal: Journal,
        progress: Progress,
        stop: asyncio.Event,
        stop_asked: Callable[[], bool],
    ) -> None:
        self.store = store
        self.session_id = session_id
        self.target = target
        self.config = config
        self.journal = journal
        self.progress = progress
        self.stop = stop
        self.stop_asked = stop_asked
        self.refused: RefusedForSafety | None = None
        self.guarded = ""
        self.boots_noted: set[str] = set()
        self.manners = Manners(self)
        self.hours = Hours(self)
        self.spare: SpareTime | None = None

    def write(self, *happened: ev.Event) -> None:
        """Append events and tell whoever watches."""
        self.store.append(self.session_id, *happened)
        self.journal.fault(f"wrote:{'+'.join(dict.fromkeys(event.kind for event in happened))}")
        for event in happened:
            self.progress.happened(event)

    def check_stop(self) -> None:
        """Raise StoppedByOperator as soon as a person or a signal asked for it, or what ended our lease."""
        if self.refused is not None:
            raise self.refused
        if self.stop.is_set() or self.stop_asked():
            raise StoppedByOperator("stopped on request", do="`resume` goes on from here")

    def check(self) -> None:
        """`check_stop`, and the same for the window: raises WindowClosing when what is under way must be left."""
        self.check_stop()
        self.hours.check()

    def role(self, role: Role) -> str:
        """Fingerprint of the spec in a role that every session has from its opening on."""
        fingerprint = self.store.role(self.session_id, role)
        assert fingerprint is not None, f"role {role} is set when a session opens"
        return fingerprint

    async def waited(self, what: str, waiting: Awaitable[Awaited]) -> Awaited:
        """Wait for something on the host, `what` in words; whoever can use the time does."""
        return await (waiting if self.spare is None else self.spare.beside(what, waiting))

    async def guard(self) -> None:
        """See that the host's watcher would restore what is known-good now."""
        known_good = self.role(Role.KNOWN_GOOD)
        if known_good != self.guarded:
            await self.target.guard(self.store.spec(known_good))
            self.guarded = known_good

    async def where(self) -> Position:
        """Match the serving process with the trials that we know. Raises ForeignChange, HostRebooted."""
        serving = await self.target.serving()
        if serving is None:
            await self._refuse_reboot()
            return Position(trial=None, serving=None)
        position = self._known(serving)
        if position is not None:
            self.hours.serves(None if position.trial is None else position.trial.fingerprint)
            return position
        await self._refuse_reboot()
        await self.target.renew()  # if the host's watcher or another agent took over, this says so
        raise ForeignChange(
            "the server on the port is neither the adopted one nor one that this session launched",
            where={"target": self.target.name, "process": serving.process.pid, "argv": " ".join(serving.spec.argv)},
            do="find out who started it; `resume` once the original or our last launch serves again, or start anew",
        )

    async def bring_up(self, fingerprint: str, experiment_id: str, relaunch: bool = True) -> Trial:
        """See that a spec serves: launch it, or adjust the serving process where that is enough; the trial is closed.

        A trial left open by a crash is taken up again when it is the wanted one, else closed as abandoned. Without
        `relaunch` a process that runs the spec already gets a trial of its own and goes on.
        """
        await self.guard()
        spec = self.store.spec(fingerprint)
        process = await self._to_adjust(spec, relaunch)
        trial = self._reopened(fingerprint, experiment_id, process)
        return await (self._launched(trial, spec) if process is None else self._adjusted(trial, spec))

    async def stage(self, spec: LaunchSpec) -> None:
        """Make ready what a spec needs beside its command line; a stop is noticed meanwhile. Raises PolicyRefused."""
        self.progress.phase("getting changes ready")
        staging = asyncio.ensure_future(self.target.stage(spec))
        try:
            while not (await asyncio.wait({staging}, timeout=POLL_S))[0]:
                self.check()
            await staging
        finally:
            staging.cancel()
            await asyncio.gather(staging, return_exceptions=True)

    async def _launched(self, trial: Trial, spec: LaunchSpec) -> Trial:
        """Launch, wait until it generates or fails, and bring what is live of the spec into effect."""
        self.progress.phase(f"launching {trial.id} for {trial.experiment_id}")
        up = self._up(trial, spec)
        # What must serve is waited for alone: nothing beside it may go wrong.
        done, ready = await (up if trial.experiment_id == RESTORE else self.waited(f"{trial.id} was loading", up))
        if isinstance(ready, Ready) and self._anything_live(spec):
            ready = await self.target.adjust(self.key(trial.id), spec) or ready
        self.journal.fault(f"{trial.id}:ready")
        down_s = self._since(self.store.opened_at("trials", trial.id))
        if isinstance(ready, Failure):
            changes = {"status": TrialStatus.FAILED, "failure": ready, "down_s": down_s}
            self.write(ev.TrialClosed(trial=trial.model_copy(update=changes)))
            return trial.model_copy(update=changes)
        remarks = [*done.get("told", "").splitlines(), *(f"it runs differently: {text}" for text in ready.mismatches)]
        notes = [ev.Noted(text=f"{trial.id}: {text}", subject=trial.id) for text in remarks]
        closed = trial.model_copy(
            update={"status": TrialStatus.READY, "process": ready.process, "load_s": ready.load_s, "down_s": down_s}
        )
        self.write(ev.TrialClosed(trial=closed), *notes)
        return closed

    async def _up(self, trial: Trial, spec: LaunchSpec) -> tuple[dict[str, Any], Ready | Failure]:
        """The launch as an effect, with what was told of it, and what became of the server."""
        key = self.key(trial.id)

        async def act() -> dict[str, str]:
            told = await self.target.launch(key, spec, lambda: self.journal.fault(f"{trial.id}/launch:stopped"))
            return {"launch": key, "told": told}

        async def observe() -> dict[str, str] | None:
            return {"launch": key} if await self.target.launched(key) else None

        done = await self.journal.once(
            f"{trial.id}/launch", {"fingerprint": trial.fingerprint, "key": key}, act, observe
        )
        self.hours.serves(trial.fingerprint)
        return done, await self.hours.in_time(self.target.await_ready(key))

    async def _adjusted(self, trial: Trial, spec: LaunchSpec) -> Trial:
        """Bring the process that serves into the live state of the spec."""
        self.progress.phase(f"adjusting {trial.id} for {trial.experiment_id}")
        key = self.key(trial.id)

        async def act() -> dict[str, Any]:
            failure = await self.target.adjust(key, spec)
            return {"adjust": key, "failure": None if failure is None else failure.model_dump(mode="json")}

        async def observe() -> dict[str, Any] | None:
            return None  # it looks before each step and does nothing twice

        intent = {"fingerprint": trial.fingerprint, "key": key}
        done = await self.journal.once(f"{trial.id}/adjust", intent, act, observe)
        failure = None if done["failure"] is None else Failure.model_validate(done["failure"])
        status = TrialStatus.READY if failure is None else TrialStatus.FAILED
        closed = trial.model_copy(update={"status": status, "failure": failure})
        self.write(ev.TrialClosed(trial=closed))
        return closed

    async def measure(self, need: Need, comparison: Comparison, trial: Trial, answers: bool = False) -> Measurement:
        """Make the wanted run on the serving trial, or go on with the one that was under way.

        `answers`: a run that begins now also asks the fixed prompts once it is measured.
        """
        assert trial.process is not None
        taken = await self._taken_up(need, comparison, trial) or self._new_measurement(need, comparison, trial)
        point = self.config.workload.point(taken.load_point)
        key = self.key(taken.id)
        request = RunRequest(
            point=point,
            workload=self.config.workload,
            seed=taken.seed,
            process=trial.process,
            launch=self._launch_of(trial),
            answers=answers,
        )
        self.progress.phase(f"measuring {taken.id}: {taken.experiment_id}, {taken.arm}, {point.name}")

        async def act() -> dict[str, str]:
            await self.target.begin_run(key, request)
            return {"run": key}

        async def observe() -> dict[str, str] | None:
            return {"run": key} if (await self.target.look_run(key)).phase != "absent" else None

        await self.journal.once(f"{taken.id}/run", request.model_dump(mode="json"), act, observe)
        closed, result = await self._finish_run(taken, key, comparison, trial)
        self.journal.fault(f"{taken.id}:collected")
        raw, given = (None, ()) if result is None else (result.raw, result.answers)
        note = otherwise(closed, comparison)
        notes = () if note is None else (ev.Noted(text=f"{closed.id}: {note}", subject=closed.id),)
        self.write(ev.MeasurementClosed(measurement=closed, raw=raw, answers=given), *notes)
        return closed

    def void(self, need: Need, comparison: Comparison, trial: Trial, reason: str) -> None:
        """Record a run that could not even be begun, so that the reason is evidence like any other."""
        taken = self._new_measurement(need, comparison, trial)
        closed = taken.model_copy(update={"status": MeasurementStatus.INVALID, "reasons": (reason,)})
        self.write(ev.MeasurementClosed(measurement=closed))

    async def abandon_runs(self, why: str = "stopped on request") -> None:
        """End the benchmark that is under way, if any, so that a restore does not have to share the host with it."""
        taken = self.store.open_measurement(self.session_id)
        if taken is not None:
            await self._lose(taken, why)

    @property
    def engine(self) -> str:
        """Which kind of server it is: whose rules read its log."""
        return self.store.session(self.session_id).adoption.spec.engine

    @property
    def run_under_way(self) -> bool:
        """Whether a benchmark was begun, by this agent process or an earlier one, and its end was not written yet."""
        return self.store.open_measurement(self.session_id) is not None

    @property
    def spoilt(self) -> frozenset[str]:
        """Trials of servers that complained under load; what these do from then on is worth nothing."""
        return spoilt(self.store, self.session_id)

    def key(self, item_id: str) -> str:
        """Name of a launch or a run on the host."""
        return f"{self.session_id}-{item_id}"

    def last_boot(self) -> str | None:
        """The boot of the host in which the newest process that we know was started."""
        trials = reversed(self.store.trials(self.session_id))
        return next((trial.process.boot_id for trial in trials if trial.process is not None), None)

    # --- parts ---------------------------------------------------------------------------------------------

    def _since(self, at: float) -> float:
        """Seconds since `at`; an earlier agent's clock may have been ahead of ours."""
        return max(0.0, self.store.clock() - at)

    async def _refuse_reboot(self) -> None:
        now = await self.target.boot_id()
        if now != self.last_boot() and now not in self.boots_noted:
            raise HostRebooted("the host was rebooted", where={"target": self.target.name}, do="`resume` goes on")

    def _known(self, serving: Serving) -> Position | None:
        """The newest trial of the process in whose live state it is, which can come and go without a launch."""
        launched = self._launched_as(serving.key)
        of_process = self.store.trials(self.session_id, (PROCESS, serving.process))
        others = [trial for trial in of_process if trial not in launched]
        newest_first = [trial for trial in reversed((*launched, *others)) if not _given_up(trial)]
        if not newest_first:
            return None
        live = serving.spec.live
        alike = next((trial for trial in newest_first if self.store.spec(trial.fingerprint).live == live), None)
        if alike is not None or newest_first[0].status is TrialStatus.OPEN:
            return Position(trial=alike or newest_first[0], serving=serving)
        astray = newest_first[0].model_copy(update={"status": TrialStatus.OPEN})
        return Position(trial=astray, serving=serving, astray=True)

    def _launched_as(self, key: str | None) -> list[Trial]:
        """The trial whose launch has this name on the host."""
        try:
            return [self.store.trial(self.session_id, (key or "").removeprefix(self.key("")))]
        except KeyError:
            return []

    async def _to_adjust(self, spec: LaunchSpec, relaunch: bool) -> ProcessId | None:
        """The serving process if it can be brought into the spec as it runs; None when a launch is needed or wanted."""
        if relaunch and not self._anything_live(spec):
            return None
        position = await self.where()
        trial, serving = position.trial, position.serving
        if trial is None or serving is None or trial.id in self.spoilt:
            return None
        ready = trial.status is TrialStatus.READY
        under_way = trial.status is TrialStatus.OPEN and (position.astray or trial.kind == "adjust")
        same = self.store.spec(trial.fingerprint).process_fingerprint == spec.process_fingerprint
        if not same or not (ready or under_way) or (relaunch and ready and trial.fingerprint == spec.fingerprint):
            return None
        return serving.process

    def _launch_of(self, trial: Trial) -> str | None:
        """Key of the launch that began the trial's process, beside which its log lies; None for the adopted one."""
        begun = next(iter(self.store.trials(self.session_id, (PROCESS, trial.process))), trial)
        return None if begun.adopted else self.key(begun.id)

    def _anything_live(self, spec: LaunchSpec) -> bool:
        return bool(spec.live) or anything_live(self.store, self.session_id)

    def _reopened(self, fingerprint: str, experiment_id: str, process: ProcessId | None) -> Trial:
        kind: Literal["launch", "adjust"] = "launch" if process is None else "adjust"
        for trial in self.store.trials(self.session_id, (STATUS, TrialStatus.OPEN)):
            wanted = (trial.fingerprint, trial.experiment_id, trial.kind) == (fingerprint, experiment_id, kind)
            if wanted and (process is None or trial.process == process):
                return trial
            failure = Failure(failure_class=ABANDONED, cause="another configuration was wanted after an interruption")
            closed = trial.model_copy(update={"status": TrialStatus.FAILED, "failure": failure})
            effect = f"{trial.id}/{trial.kind}"
            self.write(*self.journal.abandoned(effect, failure.cause), ev.TrialClosed(trial=closed))
        trial = Trial(
            id=self.store.next_id("trials", "T"),
            experiment_id=experiment_id,
            fingerprint=fingerprint,
            kind=kind,
            process=process,
        )
        self.write(ev.TrialOpened(trial=trial))
        return trial

    async def _taken_up(self, need: Need, comparison: Comparison, trial: Trial) -> Measurement | None:
        """The run that is under way if it is the wanted one on this very launch; any other one is ended."""
        taken = self.store.open_measurement(self.session_id)
        if taken is None:
            return None
        wanted = (comparison.experiment_id, trial.id, need.arm, need.block, need.load_point)
        if (taken.experiment_id, taken.trial_id, taken.arm, taken.block, taken.load_point) == wanted:
            return taken
        await self._lose(taken, "another run was wanted after an interruption")
        return None

    async def _lose(self, taken: Measurement, why: str) -> None:
        """End a run that nobody waits for any more, and close it as lost."""
        await self.target.stop_run(self.key(taken.id))
        lost = taken.model_copy(update={"status": MeasurementStatus.LOST, "reasons": (why,)})
        self.write(*self.journal.abandoned(f"{taken.id}/run", why), ev.MeasurementClosed(measurement=lost))

    def _new_measurement(self, need: Need, comparison: Comparison, trial: Trial) -> Measurement:
        taken = Measurement(
            id=self.store.next_id("measurements", "M"),
            experiment_id=comparison.experiment_id,
            trial_id=trial.id,
            arm=need.arm,
            block=need.block,
            run=need.run,
            load_point=need.load_point,
            seed=run_seed(self.config.seed, comparison.experiment_id, need, self._retries(need, comparison)),
        )
        self.write(ev.MeasurementOpened(measurement=taken))
        return taken

    def _retries(self, need: Need, comparison: Comparison) -> int:
        return sum(
            1
            for m in comparison.own
            if (m.arm, m.block, m.load_point, m.run) == (need.arm, need.block, need.load_point, need.run)
        )

    async def _finish_run(
        self, taken: Measurement, key: str, comparison: Comparison, trial: Trial
    ) -> tuple[Measurement, RunResult | None]:
        state, collapse = await self._follow(taken, key, comparison)
        if state.phase in ("vanished", "absent"):
            gone = ("the benchmark job vanished without a result",)
            return taken.model_copy(update={"status": MeasurementStatus.LOST, "reasons": gone}), None
        # What was said in the measured window is read after it: nothing of ours asks the server inside it.
        complained = complaint(self.engine, await self.target.said_during(key), up=True)
        taken = taken.model_copy(update={"complaint": complained})
        said = () if complained is None else (f"{COMPLAINED}: {told(complained)}",)
        try:
            result = await self.target.collect_run(key)
        except CommandFailed as error:
            missing = (f"the client left no result: {error.tail or error.what}", *said)
            return taken.model_copy(update={"status": MeasurementStatus.INVALID, "reasons": missing}), None
        point = self.config.workload.point(taken.load_point)
        measured = taken.model_copy(update={"metrics": result.metrics, "telemetry": result.telemetry})
        rate = self.config.manners.max_foreign_rps
        reasons = (*invalid_reasons(result.metrics, result.telemetry, point, self.config.validity, rate), *said)
        reasons = reasons or doubts(measured, comparison, self.config.validity)
        serving = await self.target.serving()
        # Beside tolerated traffic it is the run's own window that counts, if the server counts.
        counted = rate and foreign_requests(result.metrics) is not None
        traffic = None if counted else await self.target.foreign_traffic(rate)
        if traffic is not None:
            reasons = (*reasons, f"{TRAFFIC}: {traffic} {AFTERWARDS}")
        if serving is None or serving.process != trial.process:
            reasons = (*reasons, GONE)
        if collapse is not None and complained is None:
            reasons = (COLLAPSED, collapse)
        closed = measured.model_copy(
            update={
                "status": MeasurementStatus.INVALID if reasons else MeasurementStatus.VALID,
                "reasons": reasons,
                "seconds": self._since(self.store.opened_at("measurements", taken.id)),
            }
        )
        return closed, result

    async def _follow(self, taken: Measurement, key: str, comparison: Comparison) -> tuple[RunState, str | None]:
        """Poll the job to its end; end it early when a candidate has plainly collapsed."""
        expected = pace(comparison, taken.load_point) if taken.arm is Arm.CANDIDATE else None
        of = self.config.workload.point(taken.load_point).requests
        while True:
            state = await self.target.look_run(key)
            if state.phase != "running":
                return state, None
            self.check()
            self.progress.tick(f"{taken.id} {state.done}/{of} requests", state.done, of)
            if expected is not None:
                collapse = collapsing(state.elapsed_s, state.output_tokens, expected, self.config.judge)
                if collapse is not None:
                    await self.target.stop_run(key)
                    return await self.target.look_run(key), collapse
            await self.target.pause(POLL_S)


def _given_up(trial: Trial) -> bool:
    """Whether a process was to be adjusted and nobody waited for it: what is live says how far that came."""
    abandoned = trial.failure is not None and trial.failure.failure_class == ABANDONED
    return trial.kind == "adjust" and abandoned


def run_seed(session_seed: int, experiment_id: str, need: Need, retry: int) -> int:
    """Seed of a run: the same for both arms of a block, new for every block, run, load point and repetition."""
    return int(digest([session_seed, experiment_id, need.block, need.run, need.load_point, retry], 8), 16) % 2**31
