"""How the people who use the server are spared: drained before it is disturbed, given back when it serves them again.

It must not judge or change the server. Draining and undoing it are journalled effects like launches and runs: looked
for first, done once. What the host shows decides, so that a watcher's or a person's undoing is simply seen.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from agent.config import MannersSection, SessionConfig
from state import events as ev
from state.errors import CommandFailed, DrainFailed, NeedsHuman
from state.models import LoadPoint, Role, TrialStatus
from state.store import EffectRow, Store

if TYPE_CHECKING:
    from agent.hands import Hands

BUSY = "busy"
"""Begins the reason of a run that could not be made since the server was not to be restarted under its users."""
UNMEASURED, LASTING = "unmeasured", "lasting"
"""Subjects of notes: a load point that is left out; what a person types to make the winner last."""
LOOK_S = 2.0
UNDRAIN_TRIES, UNDRAIN_PAUSE_S = 3, 10.0


def beyond_ceiling(config: SessionConfig) -> tuple[LoadPoint, ...]:
    """The load points that are not run: more streams than others may feel, where nothing drains the server."""
    most = config.manners.max_concurrency
    if most is None or config.manners.drain:
        return ()
    return tuple(point for point in config.workload.load_points if point.concurrency > most)


def within_ceiling(config: SessionConfig) -> SessionConfig:
    """The configuration without them."""
    beyond = beyond_ceiling(config)
    if not beyond:
        return config
    kept = tuple(point for point in config.workload.load_points if point not in beyond)
    return config.model_copy(update={"workload": config.workload.model_copy(update={"load_points": kept})})


def unmeasured(config: SessionConfig) -> str:
    """What is said of the load points that are left out; empty when none is."""
    named = ", ".join(f"C={point.concurrency} ({point.name})" for point in beyond_ceiling(config))
    most = config.manners.max_concurrency
    return f"unmeasured at {named}: above max_concurrency = {most}, and nothing drains the server" if named else ""


class Manners:
    """Drains, waits and gives back, for one session on one target."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands
        self.number = 0

    @property
    def rules(self) -> MannersSection:
        """The session file's words on it."""
        return self.hands.config.manners

    @property
    def store(self) -> Store:
        """The session's store."""
        return self.hands.store

    # --- before and after what disturbs --------------------------------------------------------------------

    async def before_run(self, point: LoadPoint) -> None:
        """Drain the server for a load that its users are not to feel. Raises DrainFailed."""
        most = self.rules.max_concurrency
        above = most is not None and point.concurrency > most
        if self.rules.drain and (above or self.rules.drain_for == "load"):
            await self._drain(f"a run of {point.concurrency} streams")

    async def make_way(self) -> str | None:
        """Drain the server, then wait for requests in flight: why it must not be restarted or changed, None if it may.

        Raises DrainFailed, StoppedByOperator.
        """
        if self.rules.drain:
            await self._drain("a restart")
        if self.hands.run_under_way:  # then it is our own requests that are in flight
            return None
        return await self._wait_inflight()

    async def before_restore(self, fingerprint: str) -> None:
        """The same for bringing back what must serve, which nothing stops: it is done after that in any case."""
        if self.rules.drain:
            try:
                await self._drain("a restore")
            except DrainFailed as failed:
                self.hands.write(ev.Noted(text=f"restored without draining: {failed.what}; {failed.tail}"))
        if not self.rules.wait_inflight_s:
            return
        replaced = (await self.hands.where()).trial
        if replaced is None or replaced.status is not TrialStatus.READY or replaced.fingerprint == fingerprint:
            return  # nobody serves, or what serves answers no more
        busy = await self._wait_inflight(must=True)
        if busy is not None:
            self.hands.write(ev.Noted(text=f"{replaced.id} was replaced under its users: {busy}", subject=replaced.id))

    async def at_rest(self) -> None:
        """Known-good serves and nothing of ours loads it: give it back to its users. Raises NeedsHuman."""
        if not self.rules.drain:
            return
        for _ in range(UNDRAIN_TRIES):
            try:
                await self._ensure(False, "known-good serves, and nothing of ours loads it")
                return
            except CommandFailed as error:
                failed = error
                self.hands.write(*self._abandoned(f"failed: {error.tail or error.what}"))
                await self.hands.target.pause(UNDRAIN_PAUSE_S)
        raise NeedsHuman(
            "known-good serves, but could not be given back to its users: it is still drained",
            where={"target": self.hands.target.name, "command": shlex.join(self.rules.undrain)},
            tail=failed.tail,
            do="run the command on the host; `resume` goes on once it works",
        )

    def still_drained(self) -> str:
        """The command that ends a drain of ours which has not ended, by the journal alone; empty without one."""
        for number in range(self._last()[0], 0, -1):
            known = self._effect(number)
            if known is None or "abandoned" in (known.outcome or {}):
                continue
            if not known.intent["drained"]:
                break
            return shlex.join(self.rules.undrain)
        return ""

    # --- for good --------------------------------------------------------------------------------------------

    async def make_lasting(self, fingerprint: str) -> str:
        """See that a winner outlives a reboot if the session file wants it, else note what a person would type.

        What came of it, in words for the session's last decision; empty where the original serves.
        """
        serving = (await self.hands.where()).serving
        if serving is None or fingerprint == self.hands.role(Role.ORIGINAL):
            return ""
        spec = self.store.spec(fingerprint)
        if self.rules.persist and spec.beside:
            self.hands.write(ev.Noted(text="nothing was made to last: not all of it stands on the command line"))
        elif self.rules.persist and serving.key is not None:
            told = await self._persisted(serving.key, fingerprint)
            if told:
                return f"; it comes back after a reboot: {told}"
        commands = [f"# beside the command line: {change}" for change in spec.beside]
        commands.append(self.hands.target.lasting(spec))
        self.hands.write(ev.Noted(text="\n".join(commands), subject=LASTING))
        return "; a reboot ends it, unless the commands in the report are used"

    async def _persisted(self, launch: str, fingerprint: str) -> str | None:
        """What was done so that it comes back; None, with a note of the reason, where nothing could be."""

        async def act() -> dict[str, Any]:
            return {"told": await self.hands.target.persist(self.store.spec(fingerprint), launch)}

        async def observe() -> dict[str, Any] | None:
            return None  # it may be done again

        name = f"{launch.removeprefix(self.hands.session_id + '-')}/persist"
        try:
            done = await self.hands.journal.once(name, {"fingerprint": fingerprint}, act, observe)
        except CommandFailed as failed:
            why = failed.tail or failed.what
            self.hands.write(
                *self.hands.journal.abandoned(name, why), ev.Noted(text=f"nothing was made to last: {why}")
            )
            return None
        told: str | None = done["told"]
        if told is None:
            self.hands.write(ev.Noted(text="nothing was made to last: nobody starts a bare process at a reboot"))
        return told

    # --- parts ---------------------------------------------------------------------------------------------

    async def _drain(self, why: str) -> None:
        try:
            await self._ensure(True, why)
        except CommandFailed as failed:
            self.hands.write(*self._abandoned(f"failed: {failed.tail or failed.what}"))
            raise DrainFailed(
                f"the server could not be drained for {why}, so it was not disturbed",
                where={"target": self.hands.target.name, "command": shlex.join(self.rules.drain)},
                tail=failed.tail,
                do="mend the command, or leave manners.drain out; then `resume`",
            ) from failed

    async def _ensure(self, wanted: bool, why: str) -> None:
        """See that the server is drained, or not by us; an effect that an earlier agent left open is ended first."""
        number, last = self._last()
        if last is not None and last.outcome is None:
            if last.intent["drained"] == wanted:
                await self._do(number, last.intent)
                return
            self.hands.write(*self._abandoned("the opposite was wanted after an interruption"))
            last = None
        if not await self._is_so(wanted, last):
            await self._do(number + 1, {"drained": wanted, "for": why})

    async def _is_so(self, wanted: bool, last: EffectRow | None) -> bool:
        seen = await self.hands.target.drained()
        if not wanted:
            return not seen.ours
        if seen.seen is None:  # no probe: our mark on the host tells, if the command had time to end
            return not seen.trouble and seen.ours and last is not None and "told" in (last.outcome or {})
        return seen.seen

    async def _do(self, number: int, intent: dict[str, Any]) -> None:
        wanted, target = bool(intent["drained"]), self.hands.target
        self.hands.progress.phase("draining the server" if wanted else "giving the server back to its users")

        async def act() -> dict[str, Any]:
            return {"told": await (target.drain() if wanted else target.undrain())}

        async def observe() -> dict[str, Any] | None:
            seen = await target.drained()
            done = seen.seen is True if wanted else not seen.ours
            return {"told": ""} if done else None

        done = await self.hands.journal.once(_key(number), intent, act, observe)
        if done["told"]:
            self.hands.write(ev.Noted(text=done["told"]))

    def _last(self) -> tuple[int, EffectRow | None]:
        """Number and row of the newest drain or undoing of one; 0 and None before the first."""
        while self._effect(self.number + 1) is not None:
            self.number += 1
        return self.number, self._effect(self.number)

    def _effect(self, number: int) -> EffectRow | None:
        return self.store.effect(f"{self.hands.session_id}/{_key(number)}")

    def _abandoned(self, why: str) -> list[ev.Event]:
        return self.hands.journal.abandoned(_key(self._last()[0]), why)

    async def _wait_inflight(self, must: bool = False) -> str | None:
        """Wait until nobody has a request in flight; what is in flight when the time is over.

        `must`: what follows is done anyway, and a person who asks to stop waits for it.
        """
        limit = self.rules.wait_inflight_s
        waited = 0.0
        while limit and (busy := await self.hands.target.foreign_traffic()) is not None:
            if waited >= limit:
                return f"{BUSY}: {busy} of somebody else after {waited:.0f} s"
            if not must:
                self.hands.check()
            self.hands.progress.tick(f"waiting for requests in flight: {busy}", waited, limit)
            await self.hands.target.pause(LOOK_S)
            waited += LOOK_S
        return None


def _key(number: int) -> str:
    """Key of the effect that drains, or undoes that, for the number-th time in the session."""
    return f"drain-{number}"
