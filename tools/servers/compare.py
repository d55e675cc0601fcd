"""What a server was asked for beside what it shows of itself, for engines that show flags by name; pure.

What is not shown is not judged. A word such as `auto` leaves the choice to the server, so nothing contradicts it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from state.models import LaunchSpec

OPEN = ("auto", "none", "default", "-1")
ON, OFF = "on", "off"


def shown_value(value: object) -> str | None:
    """A value as the server reports it, in the words of a command line; None where it reports nothing."""
    if value is None:
        return None
    if isinstance(value, bool):
        return ON if value else OFF
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def differences(spec: LaunchSpec, shown: Mapping[str, str]) -> Iterator[str]:
    """Each flag of the spec whose value is shown and is another one, in words."""
    for name, values in spec.flags.items():
        positive = f"--{name.removeprefix('--no-')}"
        have = shown.get(name, shown.get(positive))
        if have is None:
            continue
        if not values:
            wanted = OFF if name not in shown and name != positive else ON
            if have in (ON, OFF) and have != wanted:
                yield f"{name}: asked, but {positive if wanted == OFF else 'it'} is {have}"
        elif not same(" ".join(values), have):
            yield f"{name}: asked {' '.join(values)}, {_moved(' '.join(values), have)}"


def same(wanted: str, have: str) -> bool:
    """Whether two words mean one value: numbers by value, objects by the keys that were asked for."""
    if wanted.lower() in OPEN or wanted.lower() == have.lower():
        return True
    try:
        one, other = json.loads(wanted), json.loads(have)
    except ValueError:
        return False
    return _covers(one, other)


def _covers(wanted: Any, have: Any) -> bool:
    """Objects: every key that both have is equal. What only one of them tells is not judged."""
    if isinstance(wanted, dict) and isinstance(have, dict):
        return all(_covers(value, have[key]) for key, value in wanted.items() if key in have)
    if isinstance(wanted, str) and isinstance(have, str):
        return wanted.lower() == have.lower()
    return wanted is None or bool(wanted == have)


def _moved(wanted: str, have: str) -> str:
    try:
        return f"{'reduced' if float(have) < float(wanted) else 'raised'} to {have}"
    except ValueError:
        return f"runs {have}"
