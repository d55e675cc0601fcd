"""Are a server's answers still as good? Answers to fixed prompts in, a word out; pure: it asks nobody anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

from state.models import Answer, Frozen

Pass = Sequence[Answer]
"""What was said to all fixed prompts, each asked once."""


class Pair(Frozen):
    """One answer held against one reference: how much is equal, and how it departs."""

    prompt: str
    failed: bool = False
    exact: bool
    edit: float
    prefix: int
    length: int
    drift: float | None
    gap: float | None
    outside: bool = False


def compare(reference: Answer, answer: Answer) -> Pair:
    mine, other = steps(reference, answer), steps(answer, reference)
    prefix = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(mine, other, strict=False)))
    exact = mine == other
    gap, outside = departure(reference, other, prefix)
    told = zip(reference.logprobs[:prefix], answer.logprobs[:prefix], strict=False)
    moves = [abs(a - b) for a, b in told if a is not None and b is not None]
    return Pair(prompt=reference.prompt, failed=answer.error is not None or (not answer.text.strip() and bool(reference.text.strip())),
        exact=exact, edit=distance(mine, other), prefix=prefix, length=len(mine),
        drift=sum(moves) / len(moves) if moves else None, gap=gap, outside=outside)


def departure(reference: Answer, other: Sequence[str], at: int) -> tuple[float | None, bool]:
    if at >= len(reference.tops) or at >= len(other) or not reference.tops[at]:
        return None, False
    own, tops = reference.logprobs[at], reference.tops[at]
    if own is None:
        return None, False
    return own - tops.get(other[at], min(tops.values())), other[at] not in tops


def steps(answer: Answer, other: Answer) -> Sequence[str]:
    if answer.tokens and other.tokens:
        return answer.tokens
    return re.findall(r"\s*\S+", answer.text)


def distance(left: Sequence[str], right: Sequence[str]) -> float:
    row = list(range(len(right) + 1))
    for place, one in enumerate(left, 1):
        before, row[0] = row[0], place
        for at, two in enumerate(right, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (one != two))
    return row[-1] / max(len(left), len(right), 1)
