"""Answers a language model's look-ups from the session, and from the host where that reads only; it decides nothing.

Nothing is looked up while a measurement runs, nor more than the session file allows. What the model wrote is compared
with what is known, or handed on as one literal word: it chooses no command, no path and no host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.briefing import shelf
from agent.hands import Hands
from agent.planners.answer import LOOK_UPS
from agent.planners.look_ups import LINES, SERVER, LookUp, Shelf, from_shelf, together, told, wish_of
from state.errors import HostError, OutcomeUnknown
from tools.target import TargetFacts

OFF = "Look-ups are switched off."
MEASURING = "Nothing is looked up while a measurement runs."
USED_UP = "No more look-ups are left in this session."


async def looked_up(hands: Hands, facts: TargetFacts, wishes: Sequence[Any], left: int) -> str:
    """The answers to all wishes of one turn, of which `left` may still be granted."""
    section = hands.config.planner.model
    if section is None or not section.look_ups:
        return OFF
    if hands.run_under_way:
        return MEASURING
    granted = wishes[: max(0, min(LOOK_UPS, left))]
    texts = shelf(hands.store, hands.session_id, facts)
    parts = [await _one(hands, texts, wish) for wish in granted]
    if wishes[len(granted) :]:
        parts.append(USED_UP if len(granted) < LOOK_UPS else f"{len(wishes) - LOOK_UPS} more were not looked up.")
    return together(parts)


async def _one(hands: Hands, texts: Shelf, item: Any) -> str:
    wish = wish_of(item)
    if isinstance(wish, str):
        return wish
    try:
        if wish.kind == "source":
            return told(wish, await _source(hands, wish), first=True)
        found = from_shelf(wish, texts)
        if wish.kind == "log":
            cause, _, stored = found.partition("\n")
            end = (await _log(hands, wish) or stored).splitlines()
            found = "\n".join([cause, *end[1 - LINES :]])
        return told(wish, found)
    except (HostError, OutcomeUnknown) as unread:
        return f"{wish}: it could not be read ({unread.what})."


async def _log(hands: Hands, wish: LookUp) -> str:
    """The end of the log as it is now, of an experiment's newest launch or of the newest of all."""
    own = [trial for trial in hands.store.trials(hands.session_id) if not trial.adopted and trial.kind == "launch"]
    meant = [trial for trial in own if wish.of in (SERVER, trial.experiment_id)]
    return await hands.target.log_end(hands.key(meant[-1].id)) if meant else ""


async def _source(hands: Hands, wish: LookUp) -> str:
    section = hands.config.planner.model
    assert section is not None, "asked only with a language model"
    roots = section.source_roots
    return await hands.target.search_source(roots, wish.of, wish.files or "*") if roots else ""
