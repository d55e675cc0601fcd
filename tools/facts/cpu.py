"""How busy the host's CPUs are and how much of that is foreign, over a short window; it judges no measurement."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from state.models import Frozen
from tools.facts.base import Fact, as_text
from tools.facts.process import descent
from tools.procfs import Stat, parse_stats

BUSY_FIELDS = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq in the first line of /proc/stat, proc(5); guest time is part of user."""
STEAL_FIELD = 7


class BusyFacts(Frozen):
    """Means over the window; cores are CPU seconds per second."""

    cores: int
    load_1min: float
    window_s: float
    busy_cores: float | None = Field(description="all processes together; None where the kernel does not count")
    foreign_cores: float | None = Field(description="busy, less the trees that were named and the asking itself")
    steal_share: float | None = Field(description="share of all CPU time that the hypervisor gave to others")


@dataclass(frozen=True)
class BusyFact(Fact[BusyFacts]):
    """Busy and foreign cores, by two readings `window_s` apart; the processes in `ours` and below are not foreign."""

    window_s: float = 1.0
    ours: tuple[int, ...] = ()

    @property
    def timeout_s(self) -> float:  # type: ignore[override]
        """The window and time for the readings."""
        return self.window_s + 30

    def command(self) -> str:
        """Both readings in one round trip; the shell that asks names itself, so that it can be left out."""
        return f"""
reading() {{
  echo "reading"
  cat /proc/uptime /proc/loadavg /proc/stat
  echo "processes"
  cat /proc/[0-9]*/stat 2>/dev/null
}}
echo "self $$ $(getconf CLK_TCK 2>/dev/null || echo 100)"
reading
sleep {self.window_s:g}
reading
: processes may end while they are read
"""

    def parse(self, output: bytes) -> BusyFacts:
        """A process that ended within the window is found in its parent's account of reaped children."""
        head, before_text, after_text = as_text(output).split("reading\n")
        _, asking, hertz = head.split()
        before, after = _reading(before_text), _reading(after_text)
        window_s = after.uptime_s - before.uptime_s
        if window_s <= 0:
            raise ValueError(f"the clock of the host did not move: {window_s}")
        total = after.total - before.total
        busy = after.busy - before.busy
        own = _spent(before, after, [*self.ours, int(asking)])
        scale = int(hertz) * window_s
        return BusyFacts(
            cores=after.cores,
            load_1min=after.load_1min,
            window_s=window_s,
            busy_cores=busy / scale if total else None,
            foreign_cores=max(0.0, (busy - own) / scale) if total else None,
            steal_share=(after.steal - before.steal) / total if total else None,
        )


@dataclass(frozen=True)
class _Reading:
    uptime_s: float
    load_1min: float
    cores: int
    busy: int
    steal: int
    total: int
    processes: list[Stat]


def _reading(text: str) -> _Reading:
    host, _, processes = text.partition("processes\n")
    rows = host.splitlines()
    cpu = next(row for row in rows if row.startswith("cpu ")).split()[1:]
    ticks = [int(value) for value in cpu[:8]] + [0] * (8 - len(cpu[:8]))
    return _Reading(
        uptime_s=float(rows[0].split()[0]),
        load_1min=float(rows[1].split()[0]),
        cores=sum(row.startswith("cpu") and row[3].isdigit() for row in rows),
        busy=sum(ticks[field] for field in BUSY_FIELDS),
        steal=ticks[STEAL_FIELD],
        total=sum(ticks),
        processes=parse_stats(processes),
    )


def _spent(before: _Reading, after: _Reading, roots: list[int]) -> int:
    """Clock ticks that the trees spent between the readings, those of reaped children included."""
    both = before.processes + after.processes
    family = set(descent(both, roots))

    def account(reading: _Reading) -> int:
        return sum(one.cpu_ticks + one.reaped_cpu_ticks for one in reading.processes if one.pid in family)

    return account(after) - account(before)
