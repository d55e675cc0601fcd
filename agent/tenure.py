"""Holding a target through the night: renew the lease, and get it back after the host could not be reached.

It must not judge or change the server: what happened on the host meanwhile is told by `look_back` as events, and the
loop then goes on from what it observes, as after a resume.
"""

from __future__ import annotations

import asyncio
import os

from agent.evidence import RESTORE
from agent.hands import Hands
from state import events as ev
from state.errors import HostError, HostUnreachable, LeasePassedOn, OutcomeUnknown, RatchetError, TargetLocked
from state.models import DecisionKind, LaunchSpec, Role, Trial, TrialStatus

RENEWALS_PER_LEASE = 6
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
FRUITLESS = 5
"""Losses in a row, without a single finished step between them, after which a person has to look."""


def holder_of(session_id: str, pid: int) -> str:
    """How an agent process names itself on the host."""
    return f"{any_holder_of(session_id)} {pid}"


def any_holder_of(session_id: str) -> str:
    """How the names of all agent processes of a session begin."""
    return f"session {session_id}, agent process"


class Tenure:
    """The lease of one agent process on its target."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands
        self.target = hands.target
        self.renewing: asyncio.Task[None] | None = None
        self.progress_at_loss = -1
        self.losses = 0

    def begin(self) -> None:
        """Renew from now on, in a task that no step of the loop can hold up for long."""
        self.renewing = asyncio.create_task(self._renew())

    async def end(self) -> None:
        """Renew no more."""
        if self.renewing is not None:
            self.renewing.cancel()
            await asyncio.gather(self.renewing, return_exceptions=True)
            self.renewing = None

    async def regain(self, lost: RatchetError) -> None:
        """Wait until the host answers again, take the lease again if it passed on, and note what happened meanwhile.

        Raises `lost` when `target.reconnect_s` is over or nothing was achieved between several losses,
        StoppedByOperator when a person does not want to wait.
        """
        self._count_loss(lost)
        patience_s = self.hands.config.target.reconnect_s
        waited, pause_s = 0.0, FIRST_PAUSE_S
        await self.end()
        while not await self._reached():
            if waited >= patience_s:
                raise lost
            self.hands.check_stop()
            self.hands.progress.tick(f"the host cannot be reached: {lost.what}", waited, patience_s)
            await self.target.pause(pause_s)
            waited, pause_s = waited + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
        self.hands.refused = None
        self.hands.guarded = ""
        decision = self.hands.store.decide(
            self.hands.session_id,
            kind=DecisionKind.RESUME,
            subject=self.hands.session_id,
            what="go on",
            reason=f"the host answers again after {waited:.0f} s ({lost.what}); it is observed first",
        )
        self.hands.write(ev.DecisionMade(decision=decision))
        await self.look_back()
        self.begin()

    async def look_back(self) -> None:
        """Note what happened on the host while no agent held it: the watcher acted, or the host was booted."""
        await self._after_silence()
        await self._after_reboot()

    # --- parts ---------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.hands.config.target.lease_s / RENEWALS_PER_LEASE)
            try:
                await self.target.renew()
            except LeasePassedOn as passed_on:
                self.hands.refused = passed_on
                return
            except (HostError, OutcomeUnknown) as silent:
                self.hands.progress.phase(f"the lease could not be renewed: {silent.what}")

    def _count_loss(self, lost: RatchetError) -> None:
        store, sid = self.hands.store, self.hands.session_id
        progress = sum(m.metrics is not None for m in store.measurements(sid)) + len(store.trials(sid))
        self.losses = self.losses + 1 if progress == self.progress_at_loss else 1
        self.progress_at_loss = progress
        if self.losses > FRUITLESS:
            raise lost

    async def _reached(self) -> bool:
        """Whether the host answers and the lease is ours (again)."""
        sid = self.hands.session_id
        holder = holder_of(sid, os.getpid())
        try:
            try:
                await self.target.renew()
                if await self.target.boot_id() in {self.hands.last_boot(), *self.hands.boots_noted}:
                    return True
            except LeasePassedOn:
                self.hands.progress.phase("the lease had passed on: taking the target again")
            await self.target.acquire(sid, holder, predecessor=any_holder_of(sid))
        except (HostUnreachable, OutcomeUnknown, TargetLocked):
            return False
        return True

    async def _after_silence(self) -> None:
        """If the host's watcher acted while no agent was there: say so, and know its launch as one of ours."""
        what = await self.target.restored_meanwhile()
        why = f"no agent renewed the lease; {what}"
        told = [decision["reason"] for decision in self.hands.store.decisions(self.hands.session_id)]
        if what is None or why in told:
            return
        known_good = self.hands.role(Role.KNOWN_GOOD)
        serving = await self.target.serving()
        happened: list[ev.Event] = []
        if serving is not None and serving.spec.fingerprint == known_good and serving.key is not None:
            happened += self._found(
                Trial(id="", experiment_id=RESTORE, fingerprint=known_good, process=serving.process)
            )
        self._note(happened, "the host's watcher had put known-good back", why)

    async def _after_reboot(self) -> None:
        """If the host was booted meanwhile: say so, and know the original again if it came back by itself."""
        now = await self.target.boot_id()
        if now == self.hands.last_boot() or now in self.hands.boots_noted:
            return
        self.hands.boots_noted.add(now)
        original = self.hands.store.spec(self.hands.role(Role.ORIGINAL))
        known_good = self.hands.role(Role.KNOWN_GOOD)
        serving = await self.target.serving()
        happened: list[ev.Event] = []
        why = "nothing that was started before survived, the loop brings known-good up again"
        if serving is not None and serving.key is None and _command_of(serving.spec) == _command_of(original):
            await self.target.adopt_again(serving.process)
            now_runs = serving.spec.fingerprint
            found = Trial(id="", experiment_id=RESTORE, fingerprint=now_runs, process=serving.process, adopted=True)
            happened += [ev.SpecSeen(fingerprint=now_runs, spec=serving.spec), *self._found(found)]
            why = f"the original configuration came back by itself as process {serving.process.pid}"
            left = serving.spec.differences(original)
            why += f", but for what a boot does not take back: {'; '.join(left)}" if left else ""
        elif serving is not None and serving.key is not None and serving.spec.fingerprint == known_good:
            happened += self._found(
                Trial(id="", experiment_id=RESTORE, fingerprint=known_good, process=serving.process)
            )
            why = f"the winner, which was made to last, came back by itself as process {serving.process.pid}"
        self._note(happened, "the host was rebooted", why)

    def _found(self, trial: Trial) -> list[ev.Event]:
        """A launch that nobody of this process began, as one of the session's own."""
        known = trial.model_copy(update={"id": self.hands.store.next_id("trials", "T"), "status": TrialStatus.READY})
        return [ev.TrialOpened(trial=known), ev.TrialClosed(trial=known)]

    def _note(self, happened: list[ev.Event], what: str, why: str) -> None:
        decision = self.hands.store.decide(
            self.hands.session_id, kind=DecisionKind.RESTORE, subject=self.hands.session_id, what=what, reason=why
        )
        self.hands.write(*happened, ev.DecisionMade(decision=decision))


def _command_of(spec: LaunchSpec) -> str:
    """Identity of what a boot starts again; patched files are as they were before it."""
    return spec.model_copy(update={"beside": ()}).fingerprint
