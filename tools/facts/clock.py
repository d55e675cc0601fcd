"""What time it is on the host, and by which time zone people read it there; nothing is set."""

from __future__ import annotations

from dataclasses import dataclass

from state.models import HostClock
from tools.facts.base import Fact, lines

AHEAD_S = 90_000
"""A day and an hour: the end of any window that is open now lies within it."""
STEP_S = 1800
"""Time zones change their offset at full and half hours."""


@dataclass(frozen=True)
class ClockFact(Fact[HostClock]):
    """The host's clock with the offset of its time zone now, and from when on that will be another one."""

    def command(self) -> str:
        """Unix time and offset, now and, where a day from now the offset is another one, at each half hour until then.

        A `date` that cannot tell of other times than now leaves the change to the next reading.
        """
        return f"""
LC_ALL=C; export LC_ALL
date '+%s %z' || exit 1
now=$(date +%s)
then=$(date -d "@$((now + {AHEAD_S}))" +%z 2>/dev/null) || exit 0
[ "$then" = "$(date +%z)" ] && exit 0
half=$((now / {STEP_S} + 1))
while [ $((half * {STEP_S})) -le $((now + {AHEAD_S})) ]; do
  date -d "@$((half * {STEP_S}))" '+%s %z' || exit 0
  half=$((half + 1))
done
:
"""

    def parse(self, output: bytes) -> HostClock:
        """The first row is now; the first one with another offset is the change."""
        rows = [(int(unix), _offset_s(zone)) for unix, zone in lines(output)]
        unix, offset_s = rows[0]
        for turns_at, turned_s in rows[1:]:
            if turned_s != offset_s:
                return HostClock(unix=unix, offset_s=offset_s, turns_at=turns_at, turned_s=turned_s)
        return HostClock(unix=unix, offset_s=offset_s)


def _offset_s(zone: str) -> int:
    """`+0530` in seconds."""
    sign = {"+": 1, "-": -1}[zone[0]]
    return sign * (3600 * int(zone[1:3]) + 60 * int(zone[3:5]))
