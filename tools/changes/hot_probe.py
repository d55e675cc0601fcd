"""Reads a live setting out of a server's answers: one file for the host's python3, standard library only.

Usage: `python3 hot_probe.py VALUE [KEY ...] < answers.json` after `http_probe.py`. Exit 0: the value that the keys lead
to is VALUE; 1: it is another, or nobody listens; 2: it cannot be told. Without VALUE: exit 0 if the first answer is a
success. It must not ask anything itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ONLY = "(only)"
"""In the place of a key: the one member of a list that must have exactly one."""


class Untold(Exception):
    """The answers do not show the value."""


def shown(answers: list[dict[str, Any]], keys: list[str]) -> str | None:
    """The value as text, None when nobody listens, so that there is no state. Raises Untold."""
    good = next((answer for answer in answers if 200 <= (answer.get("status") or 0) < 300), None)
    if good is None:
        if answers and all(answer.get("error") == "refused" for answer in answers):
            return None
        raise Untold(
            "; ".join(f"{a.get('status') or a.get('error')} {a.get('text') or a.get('detail')}" for a in answers)
        )
    if not keys:
        return str(good.get("text") or "").strip()
    try:
        here = json.loads(good["text"])
        for key in keys:
            here = member(here, key)
    except (ValueError, LookupError, TypeError) as error:
        raise Untold(f"{' '.join(keys)}: {type(error).__name__}: {error}") from error
    return here if isinstance(here, str) else json.dumps(here)


def member(here: Any, key: str) -> Any:
    """One step into a JSON value."""
    if key == ONLY:
        (one,) = here
        return one
    return here[int(key)] if isinstance(here, list) else here[key]


def alike(one: str, other: str) -> bool:
    """Whether two texts mean the same value; numbers are compared as such."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one.strip().lower() == other.strip().lower()


def main() -> int:
    """Reads, compares, says why not."""
    answers = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    if len(sys.argv) == 1:
        status = answers[0].get("status") or 0
        if not 200 <= status < 300:
            print(
                status or answers[0].get("error"), answers[0].get("text") or answers[0].get("detail"), file=sys.stderr
            )
        return 0 if 200 <= status < 300 else 1
    try:
        value = shown(answers, sys.argv[2:])
    except Untold as untold:
        print(f"the live setting cannot be read back: {untold}", file=sys.stderr)
        return 2
    return 0 if value is not None and alike(value, sys.argv[1]) else 1


if __name__ == "__main__":
    sys.exit(main())
