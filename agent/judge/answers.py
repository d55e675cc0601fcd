"""Are a server's answers still as good? Passes over the fixed prompts in, a word out; pure, it asks nobody anything.

A change of the numbers shows first where two tokens are nearly equally likely: there the other one is taken, and the
rest of the text differs, as good as before. A broken model takes tokens that the sound one held for unlikely. So what
counts is not how much of the text differs, but how unlikely the parent found the first token that does: behind it
the two no longer answer the same question. The measurements behind each limit stand in docs/explanation/answers.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import Literal

from pydantic import Field

from state.models import Answer, Frozen

Pass = Sequence[Answer]
"""What was said to all fixed prompts, each asked once."""

FAR = 0.7
"""From which gap (difference of natural logarithms) on a departure is no near tie: the parent held its own token twice
as likely, or more. Caches of 8 bits depart below 0.2, those of 4 bits in the median below 0.5, broken models above."""
BROKEN_SHARE = 1 / 2
"""Share of answers that must fail or depart far, beyond the parent's own share. A cache of 4 bits has a third of such
answers on a very small model, broken models at least 0.58."""
ALTERNATIVES = 4
"""A token is called unlisted if it is not among so many alternatives of the parent, or more."""
ASTRAY_SHARE = 1 / 6
"""Share of answers that must fail or say an unlisted token for that alone to be a broken model: no change of numerics,
down to 4 bits, ever did either, and two of twelve are no accident."""
FEWEST = 10
"""Below so many prompts with two answers to compare nothing is said: of eight prompts drawn from the twelve, a cache of
4 bits was called broken once in six draws; of ten it cannot be."""
NOISE_DRIFT = 0.01
"""Mean change of logprobs (natural logarithm) that is no change of the numerics even where the parent repeats itself to
the last bit: the company that a request has in its batch moves them by less, another kernel or number format by three
times as much."""
CLOSE_EDIT = 0.4
"""Without logprobs: edit distance beyond the parent's own up to which few answers can have gone another way. A cache of
8 bits has half of that."""
BROKEN_EDIT = 0.7
"""Without logprobs: edit distance beyond the parent's own from which on the texts have little in common. A cache of 4
bits has 0.5, the mildest broken model 0.75."""
BROKEN_PREFIX = 0.2
"""Without logprobs: the texts must also part at once, as they do when the first steps are wrong already. A cache of 4
bits keeps 0.4, the mildest broken model 0.1."""


Word = Literal["same", "close", "broken", "unknown"]


class Pair(Frozen):
    """One answer held against one reference of the same prompt."""

    prompt: str
    failed: bool
    exact: bool
    edit: float = Field(description="edit distance over the longer answer's length, in tokens, else in words")
    prefix: float = Field(description="share of the reference that both have in common from the beginning")
    drift: float | None = Field(description="mean change of the logprobs of the common tokens")
    gap: float | None = Field(
        description="by how much the reference preferred its own first token that differs, at least"
    )
    unlisted: bool = Field(description="whether the other token is none of several alternatives")

    @property
    def far(self) -> bool:
        """Whether the reference clearly preferred its own token."""
        return self.unlisted or (self.gap is not None and self.gap >= FAR)

    @property
    def told(self) -> bool:
        """Whether it is known how far the answer departs."""
        return self.failed or self.exact or self.gap is not None


class Spread(Frozen):
    """How much answers differ from their references: means over all, logprobs as natural logarithms."""

    prompts: int
    failed: float
    unlisted: float = Field(description="share whose first token that differs is none of several alternatives")
    exact: float
    edit: float
    prefix: float
    drift: float | None = Field(description="None where no logprobs are known")
    gap: float | None = Field(description="median over those that depart, None where none does or none is known")
    bad: float | None = Field(
        description="share that failed or departed far, of those of which it is known; None where of too few"
    )

    def count(self, share: float) -> int:
        """How many of the prompts' answers a share is, whatever the number of passes."""
        return round(share * self.prompts)


class Likeness(Frozen):
    """How like the parent's the candidate's answers are, beside how like each other the parent's own are."""

    word: Word
    reason: str
    candidate: Spread | None = None
    parent: Spread | None = Field(default=None, description="None with a single pass of the parent")


def likeness(parent: Sequence[Pass], candidate: Sequence[Pass]) -> Likeness:
    """What the candidate's passes say beside the parent's; passes may lack prompts, which then count for nothing.

    `same`: within the parent's own spread. `close`: the numbers changed, and where answers differ the parent was nearly
    undecided. `broken`: many answers failed, or say what the parent would clearly not have said. `unknown`: too few
    answers, one that failed, or texts that differ much without logprobs that could tell why.
    """
    pairs = [pair for one in candidate for pair in _held(one, parent)]
    if _prompts(pairs) < FEWEST:
        return Likeness(word="unknown", reason=f"only {_prompts(pairs)} answers can be held against the parent's")
    repeats = [
        pair
        for place, one in enumerate(parent)
        for pair in _held(one, [other for at, other in enumerate(parent) if at != place])
    ]
    theirs = _spread(pairs)
    own = _spread(repeats) if _prompts(repeats) >= FEWEST else None
    word, reason = _judged(theirs, own)
    return Likeness(word=word, reason=reason, candidate=theirs, parent=own)


def _judged(theirs: Spread, own: Spread | None) -> tuple[Word, str]:
    differ, failed = theirs.count(1 - theirs.exact), theirs.count(theirs.failed)
    of = f"of {theirs.prompts} answers"
    failures = f"{failed} {of} failed or are empty"
    if _broken(theirs, own):
        far, unlisted = theirs.count(theirs.bad or 0.0) - failed, theirs.count(theirs.unlisted)
        strange = f", and in {unlisted} none of its alternatives was said" if unlisted else ""
        preferred = f"in {far} {of} the parent clearly preferred something else{strange}"
        return "broken", "; ".join([failures] * bool(failed) + [preferred] * bool(far))
    if failed:
        return "unknown", f"{failures}, the others tell no broken model"
    if _within(theirs, own):
        equal = "all answers are" if not differ else f"{theirs.prompts - differ} {of} are"
        repeats = ", and the parent's own repetitions differ as much" if differ else ""
        return "same", f"{equal} as before{repeats}"
    if theirs.bad is None:
        return _judged_by_text(theirs, own, f"{differ} {of} differ")
    if not differ:
        return "close", f"all answers are as before, but their logprobs moved by {theirs.drift or 0.0:.3f} on average"
    gap = "" if theirs.gap is None else f", where the parent preferred its own by {theirs.gap:.2f} (median)"
    odd = theirs.count(theirs.bad)
    clearly = f"; in {odd} of them clearly" if odd else ""
    return "close", f"{differ} {of} differ{gap}{clearly}"


def _broken(theirs: Spread, own: Spread | None) -> bool:
    """Whether what is known about single answers, more than the parent's own, tells a broken model."""
    astray = theirs.failed + theirs.unlisted - (own.failed + own.unlisted if own else 0.0)
    bad = (theirs.bad or 0.0) - ((own.bad if own else None) or 0.0)
    return astray >= ASTRAY_SHARE or bad >= BROKEN_SHARE


def _judged_by_text(theirs: Spread, own: Spread | None, differ: str) -> tuple[Word, str]:
    """Judge by the texts alone: how much of them differs, and how soon."""
    beyond = theirs.edit - (own.edit if own else 0.0)
    if beyond >= BROKEN_EDIT and theirs.prefix <= BROKEN_PREFIX:
        return "broken", f"{differ}, and hardly a word is as before"
    if beyond <= CLOSE_EDIT:
        return "close", f"{differ}, in {theirs.edit:.0%} of their length"
    return "unknown", f"{differ} much, and there are no logprobs that could tell whether they are as good"


def _within(theirs: Spread, own: Spread | None) -> bool:
    """Whether the answers differ no more than the parent's own; one more of them may, since few are asked."""
    if (theirs.drift or 0.0) > max(NOISE_DRIFT, 2 * ((own.drift if own else None) or 0.0)):
        return False
    if own is None:
        return theirs.exact == 1
    return (theirs.bad or 0.0) <= (own.bad or 0.0) and theirs.count(own.exact) - theirs.count(theirs.exact) <= 1


def _held(one: Pass, references: Sequence[Pass]) -> Iterator[Pair]:
    """Each answer held against the reference that it follows longest; those whose prompt has none are left out."""
    for answer in one:
        known = [other for reference in references for other in reference if other.prompt == answer.prompt]
        pairs = [compare(other, answer) for other in known if other.error is None]
        if pairs:
            yield min(pairs, key=lambda pair: (not pair.exact, -pair.prefix, pair.gap or 0.0, pair.drift or 0.0))


def compare(reference: Answer, answer: Answer) -> Pair:
    """One answer held against one reference that did not fail."""
    tokens = bool(reference.tokens and answer.tokens)
    mine = reference.tokens if tokens else _words(reference.text)
    theirs = answer.tokens if tokens else _words(answer.text)
    common = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(mine, theirs, strict=False)))
    gap, unlisted = _departure(reference, theirs, common) if tokens else (None, False)
    empty = bool(reference.text.strip()) and not answer.text.strip() and gap is None
    logprobs = zip(reference.logprobs[:common], answer.logprobs[:common], strict=False)
    moves = [abs(a - b) for a, b in logprobs if tokens and a is not None and b is not None]
    return Pair(
        prompt=reference.prompt,
        failed=answer.error is not None or empty,
        exact=answer.error is None and (mine == theirs if tokens else reference.text == answer.text),
        edit=_edit_distance(mine, theirs),
        prefix=common / len(mine) if mine else 1.0,
        drift=fmean(moves) if moves else None,
        gap=gap,
        unlisted=unlisted,
    )


def _departure(reference: Answer, theirs: Sequence[str], at: int) -> tuple[float | None, bool]:
    """How much likelier the reference held its own token at a step than the other's, and whether that one is unlisted.

    The gap is None where that is not told. A token that is not among the alternatives was less likely than the last of
    them, so that is the least it can be.
    """
    if at >= len(theirs) or at >= len(reference.tops) or not reference.tops[at]:
        return None, False
    own, tops = reference.logprobs[at], reference.tops[at]
    if own is None:
        return None, False
    least = tops.get(theirs[at], min(tops.values()))
    return max(0.0, own - least), len(tops) >= ALTERNATIVES and theirs[at] not in tops


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\S+", text))


def _edit_distance(left: Sequence[str], right: Sequence[str]) -> float:
    """Insertions, deletions and replacements that make one of the other (Levenshtein), over the longer length."""
    row = list(range(len(right) + 1))
    for place, one in enumerate(left, 1):
        before, row[0] = row[0], place
        for at, two in enumerate(right, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (one != two))
    return row[-1] / max(len(left), len(right), 1)


def _spread(pairs: Sequence[Pair]) -> Spread:
    drifts = [pair.drift for pair in pairs if pair.drift is not None]
    gaps = [pair.gap for pair in pairs if pair.gap is not None]
    told = [pair for pair in pairs if pair.told]
    return Spread(
        prompts=_prompts(pairs),
        failed=fmean(pair.failed for pair in pairs),
        unlisted=fmean(pair.unlisted for pair in pairs),
        exact=fmean(pair.exact for pair in pairs),
        edit=fmean(pair.edit for pair in pairs),
        prefix=fmean(pair.prefix for pair in pairs),
        drift=fmean(drifts) if drifts else None,
        gap=median(gaps) if gaps else None,
        bad=sum(pair.failed or pair.far for pair in told) / len(told) if _enough(told, pairs) else None,
    )


def _prompts(pairs: Sequence[Pair]) -> int:
    return len({pair.prompt for pair in pairs})


def _enough(told: Sequence[Pair], pairs: Sequence[Pair]) -> bool:
    """Whether of most answers that are not as before it is known how far they depart."""
    astray = sum(not pair.exact for pair in pairs)
    return 2 * sum(not pair.exact for pair in told) >= astray
