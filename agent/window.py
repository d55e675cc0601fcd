"""When a session may disturb the server: its window against the host's own clock; pure, no clock of ours counts here.

All of it is reckoned from one reading of the host's clock, so that a log tells later what was known when.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from state.models import HostClock

DAY_S = 86_400
_FORM = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class Window(NamedTuple):
    """A span of every day, in seconds after local midnight; one that closes before it opens goes over midnight."""

    opens: int
    closes: int

    @property
    def length_s(self) -> float:
        """How long it is open, on a day without a change of the offset."""
        return (self.closes - self.opens) % DAY_S


def window_from(text: str) -> Window:
    """Read `01:00-05:00`. Raises ValueError for anything else, and for a window that is never or always open."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError('expected a span of the day such as "01:00-05:00"')
    hours = [int(part) for part in found.groups()]
    window = Window(opens=_of_day(*hours[:2]), closes=_of_day(*hours[2:]))
    if window.opens == window.closes:
        raise ValueError("expected a span that ends at another time than it begins; leave it out for the whole day")
    return window


def later(clock: HostClock, seconds: float) -> HostClock:
    """What a clock shows some time after it was read."""
    unix = clock.unix + seconds
    if clock.turns_at is not None and unix >= clock.turns_at:
        return HostClock(unix=unix, offset_s=clock.turned_s)
    return clock.model_copy(update={"unix": unix})


def is_open(window: Window, clock: HostClock) -> bool:
    """Whether the clock shows a time within the window."""
    now = _shown(clock)
    if window.opens < window.closes:
        return window.opens <= now < window.closes
    return now >= window.opens or now < window.closes


def opens_in(window: Window, clock: HostClock) -> float:
    """Seconds until the window opens, 0 while it is open."""
    return 0.0 if is_open(window, clock) else _until(window.opens, clock)


def closes_in(window: Window, clock: HostClock) -> float:
    """Seconds until the window closes, 0 while it is closed."""
    return _until(window.closes, clock) if is_open(window, clock) else 0.0


def time_of_day(clock: HostClock) -> str:
    """What the host's clock on the wall shows: `23:14 (UTC+01:00)`."""
    hours, minutes = divmod(int(_shown(clock)) // 60, 60)
    ahead, rest = divmod(abs(clock.offset_s) // 60, 60)
    return f"{hours:02}:{minutes:02} (UTC{'-' if clock.offset_s < 0 else '+'}{ahead:02}:{rest:02})"


def spoken(seconds: float) -> str:
    """A length of time as people say it: `1 h 46 min`, `12 min`, `40 s`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _of_day(hours: int, minutes: int) -> int:
    return 3600 * hours + 60 * minutes


def _shown(clock: HostClock) -> float:
    """Seconds after local midnight."""
    return (clock.unix + clock.offset_s) % DAY_S


def _until(of_day: int, clock: HostClock) -> float:
    """Seconds until the clock shows a time of day; one that a change of the offset leaves out is met at the change."""
    left = (of_day - _shown(clock)) % DAY_S
    if clock.turns_at is None or clock.unix + left < clock.turns_at:
        return left
    return max(left - (clock.turned_s - clock.offset_s), clock.turns_at - clock.unix)
