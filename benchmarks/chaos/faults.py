"""What goes wrong in a round, drawn from its seed, and how it is brought about; it must not judge what came of it.

A fault hits some seconds after the n-th event that the outside witnesses saw (a start of the server or of a benchmark
client), not after n seconds: so every phase of a session is hit on a slow machine and on a fast one. What lasts is
mended after a while, whether or not the agent still lives.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.chaos.ground import LEASE_S, Ground
from tests.e2e.rig import Agent

EVENTS = 18
"""Witnessed events before which a first fault hits; an undisturbed session has about 20."""
EARLY_SHARE = 0.15
"""How many of the rounds are hit before the first benchmark, while the session is being opened."""
SECOND_SHARE = 0.35
"""How many of the rounds have a second fault."""


@dataclass(frozen=True)
class Kind:
    """A sort of fault."""

    name: str
    what: str
    needs: tuple[str, ...] = ()
    lasts_s: tuple[float, float] | None = None
    at_benchmark: bool = False
    second: bool = True


KINDS = {
    kind.name: kind
    for kind in (
        Kind("agent-kill", "SIGKILL to the agent; resumed at once, after some seconds, or after the lease ran out"),
        Kind("agent-term", "SIGTERM to the agent"),
        Kind("agent-freeze", "SIGSTOP to the agent for longer than the lease", lasts_s=(LEASE_S + 5, LEASE_S + 10)),
        Kind("silence", "SIGKILL to the agent; resumed only after the host's watcher has done its work", second=False),
        Kind("two-agents", "a second session with a database of its own, and a second `resume`", second=False),
        Kind("sshd-kill", "SIGKILL to sshd's listener and sessions; started again later", lasts_s=(0.5, 12.0)),
        Kind("cut", "every connection is broken"),
        Kind("strand", "every connection is half-open from now on"),
        Kind("stall", "no byte passes for a while, and nothing is reset", lasts_s=(2.0, 30.0)),
        Kind("delay", "every piece comes late", lasts_s=(10.0, 30.0)),
        Kind("loss", "5 % of all packets are lost, to the end of the round", needs=("network",)),
        Kind("server-kill", "SIGKILL to the server in the middle of a benchmark", at_benchmark=True),
        Kind("server-hang", "SIGSTOP to the server in the middle of a benchmark, for good", at_benchmark=True),
        Kind("host-disk", "no byte is free in Ratchet's folder on the host", ("host-disk",), (3.0, 20.0)),
        Kind("agent-disk", "no byte is free in the folder of the database", ("agent-disk",), (3.0, 20.0)),
        Kind("clock", "the agent's wall clock jumps", needs=("clock",)),
    )
}


@dataclass
class Fault:
    """One fault of one round: what was drawn, then what became of it."""

    kind: Kind
    after_events: int
    delay_s: float
    lasts_s: float
    amount: float
    phase: str = ""
    detail: str = ""
    hit_s: float | None = None
    rivals: dict[str, int] = field(default_factory=dict)
    due_at: float | None = field(default=None, repr=False)
    mend_at: float | None = field(default=None, repr=False)

    def told(self) -> str:
        """For the line of the round."""
        if self.hit_s is None:
            return f"{self.kind.name} not hit"
        extra = f" ({self.detail})" if self.detail else ""
        return f"{self.kind.name}{extra} at {self.hit_s:.1f} s, {self.phase}"


@dataclass(frozen=True)
class Plan:
    """A round: its faults, and how soon the agent is resumed each time."""

    number: int
    seed: str
    faults: tuple[Fault, ...]
    pauses_s: tuple[float, ...]

    @property
    def needs(self) -> frozenset[str]:
        """What the ground must have."""
        return frozenset(need for fault in self.faults for need in fault.kind.needs)


def plan(seed: int, number: int, only: str | None = None) -> Plan:
    """The round of that number; the kinds take turns, in another order each time, so that none is left out."""
    name = f"{seed}/{number}" if only is None else f"{seed}/{number}/{only}"
    draw = random.Random(name)
    turn, place = divmod(number - 1, len(KINDS))
    order = random.Random(f"{seed}/turn/{turn}").sample(sorted(KINDS), len(KINDS))
    first = KINDS[only or order[place]]
    early, after_events, delay_s = draw.random() < EARLY_SHARE, draw.randint(1, EVENTS - 1), draw.uniform(0.0, 4.0)
    faults = [_drawn(draw, first, 0 if early else after_events, delay_s)]
    may_follow = [kind for kind in KINDS.values() if kind.second]
    second, share, gap_s = draw.choice(may_follow), draw.random(), draw.uniform(0.2, 12.0)
    if share < SECOND_SHARE and only is None and first.second:
        faults.append(_drawn(draw, second, 0, gap_s))
    pauses_s = tuple(draw.choice((0.0, 0.0, 3.0, LEASE_S + 6.0)) for _ in faults)
    return Plan(number, name, tuple(faults), pauses_s)


def _drawn(draw: random.Random, kind: Kind, after_events: int, delay_s: float) -> Fault:
    lasts_s = draw.uniform(*kind.lasts_s) if kind.lasts_s is not None else 0.0
    amounts = {"clock": (-3600, 3600, 36_000), "delay": (0.05, 0.2, 0.4)}
    return Fault(kind, after_events, round(delay_s, 1), round(lasts_s, 1), draw.choice(amounts.get(kind.name, (0,))))


def hit(fault: Fault, ground: Ground, agent: Agent) -> None:
    """Bring the fault about; `mend` ends it after `lasts_s`."""
    act = _ACTS[fault.kind.name]
    fault.detail = act(fault, ground, agent) or ""
    if fault.kind.lasts_s is not None:
        fault.mend_at = time.monotonic() + fault.lasts_s


def mend(fault: Fault, ground: Ground, agent: Agent | None) -> None:
    """End what lasts; safe to repeat."""
    fault.mend_at = None
    name = fault.kind.name
    if name == "sshd-kill":
        ground.start_sshd()
    elif name == "stall":
        ground.link.flow()
    elif name == "delay":
        ground.link.delay(0.0)
    elif name in ground.disks:
        ground.disks[name].empty()
    elif name == "agent-freeze" and agent is not None and agent.process.poll() is None:
        agent.process.send_signal(signal.SIGCONT)


def _send(number: signal.Signals) -> Callable[[Fault, Ground, Agent], str | None]:
    def act(fault: Fault, ground: Ground, agent: Agent) -> str | None:
        agent.process.send_signal(number)
        if number == signal.SIGKILL:
            agent.process.wait()
        return f"for {fault.lasts_s:g} s" if fault.lasts_s else None

    return act


def _sshd(fault: Fault, ground: Ground, agent: Agent) -> str:
    ground.kill_sshd()
    return f"for {fault.lasts_s:g} s"


def _cut(fault: Fault, ground: Ground, agent: Agent) -> None:
    ground.link.cut()


def _strand(fault: Fault, ground: Ground, agent: Agent) -> None:
    ground.link.strand()


def _stall(fault: Fault, ground: Ground, agent: Agent) -> str:
    ground.link.stall()
    return f"for {fault.lasts_s:g} s"


def _delay(fault: Fault, ground: Ground, agent: Agent) -> str:
    ground.link.delay(fault.amount)
    return f"{fault.amount * 1000:.0f} ms for {fault.lasts_s:g} s"


def _loss(fault: Fault, ground: Ground, agent: Agent) -> None:
    assert ground.network is not None
    ground.network.lose(5)


def _server_kill(fault: Fault, ground: Ground, agent: Agent) -> str:
    return ground.signal_server(signal.SIGKILL)


def _server_hang(fault: Fault, ground: Ground, agent: Agent) -> str:
    return ground.signal_server(signal.SIGSTOP)


def _disk(fault: Fault, ground: Ground, agent: Agent) -> str:
    ground.disks[fault.kind.name].fill()
    return f"for {fault.lasts_s:g} s"


def _clock(fault: Fault, ground: Ground, agent: Agent) -> str:
    ground.set_clock(int(fault.amount))
    return f"{fault.amount:+g} s"


def _two_agents(fault: Fault, ground: Ground, agent: Agent) -> str:
    """Both must be refused for as long as the first one lives."""
    host = ground.host
    rivals = {
        "second session": host.command("start", str(ground.session), "--db", str(host.folder / "rival" / "state.db")),
        "second resume": host.command("resume", "--db", str(host.database)),
    }
    codes = {name: rival.process.returncode for name, rival in rivals.items()}
    if agent.process.poll() is None:
        fault.rivals = codes
    return ", ".join(f"{name}: exit {code}" for name, code in codes.items())


_ACTS: dict[str, Callable[[Fault, Ground, Agent], str | None]] = {
    "agent-kill": _send(signal.SIGKILL),
    "agent-term": _send(signal.SIGTERM),
    "agent-freeze": _send(signal.SIGSTOP),
    "silence": _send(signal.SIGKILL),
    "two-agents": _two_agents,
    "sshd-kill": _sshd,
    "cut": _cut,
    "strand": _strand,
    "stall": _stall,
    "delay": _delay,
    "loss": _loss,
    "server-kill": _server_kill,
    "server-hang": _server_hang,
    "host-disk": _disk,
    "agent-disk": _disk,
    "clock": _clock,
}
