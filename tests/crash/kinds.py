"""Point names by what they stand for: rows of the crash table; it must not know what a kill at one of them means."""

from __future__ import annotations

import re

NUMBERED = re.compile(r"(?P<letter>[TM])\d+(/(?P<effect>launch|adjust|run))?:(?P<step>.+)")
OF_LETTER = {"T": "launch", "M": "run"}


def kind(name: str) -> str:
    """`T7/launch:after-act` is a `launch: after-act`, whatever its number; a write is named by its first event."""
    numbered = NUMBERED.fullmatch(name)
    if numbered is not None:
        return f"{numbered['effect'] or OF_LETTER[numbered['letter']]}: {numbered['step']}"
    family, _, rest = name.partition(":")
    return f"{family}: {rest.partition('+')[0]}"


ORDER = ("launch", "adjust", "run", "node", "wrote", "agent", "finish", "end", "drain", "restore")


def rank(row: str) -> tuple[int, str]:
    """Where a row stands in the table: effects first, then nodes, then the rest."""
    family = row.partition(":")[0]
    return (ORDER.index(family) if family in ORDER else len(ORDER), row)
