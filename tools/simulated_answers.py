"""What a simulated server says to the fixed prompts: made-up words, drawn from names; it knows no judge and no host."""

from __future__ import annotations

import hashlib
import random
from typing import Literal

from state.models import Answer
from tools.benches.builtin import TOP, fixed_prompts

Likeness = Literal["same", "close", "broken"]
STEPS = 12
WORDS = tuple(f" {a}{b}" for a in ("ba", "de", "fi", "lo", "mu", "ra", "se", "ti") for b in "klmnrst")
NEAR_TIE = 0.02
"""How much likelier (logarithm) the first alternative is than the second where numerics decide."""
CLEAR = 2.0
MOVED = 0.01
"""By how much other numerics move every logprob."""


def simulated_answers(seed: int, likeness: Likeness) -> tuple[Answer, ...]:
    """One pass over all prompts: of the server itself, with other numerics, or of a broken model.

    With other numerics every second prompt has its near tie fall the other way. A broken model says from the first
    step on what the sound one holds for unlikely.
    """
    return tuple(_answer(seed, number, one["id"], likeness) for number, one in enumerate(fixed_prompts()))


def _answer(seed: int, number: int, prompt: str, likeness: Likeness) -> Answer:
    tie = 2 + number % (STEPS - 2)
    breaks = {"same": STEPS, "close": tie if number % 2 else STEPS, "broken": 0}[likeness]
    branch, moved = "", 0.0 if likeness == "same" else MOVED
    tokens: list[str] = []
    tops: list[dict[str, float]] = []
    for step in range(STEPS):
        words = _words(seed, prompt, branch, step)
        first = -0.3 - moved
        second = first - (NEAR_TIE if step == tie else CLEAR)
        if step == breaks:  # from here on the context is another one
            branch = likeness
            place = 1 if likeness == "close" else TOP
            words = (words[place], *(word for word in words if word != words[place]))
        tokens.append(words[0])
        tops.append({word: round(first if at == 0 else second - (at - 1), 4) for at, word in enumerate(words[:TOP])})
    logprobs = tuple(top[token] for token, top in zip(tokens, tops, strict=True))
    return Answer(prompt=prompt, text="".join(tokens), tokens=tuple(tokens), logprobs=logprobs, tops=tuple(tops))


def _words(seed: int, prompt: str, branch: str, step: int) -> tuple[str, ...]:
    """What could come at a step, likeliest first; the last is no alternative that anybody is told."""
    name = hashlib.sha256(f"{seed}/{prompt}/{branch}/{step}".encode()).digest()
    return tuple(random.Random(name).sample(WORDS, TOP + 1))
