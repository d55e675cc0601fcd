"""Language models to plan beside the catalogue, made up to be good, useless or hostile; no endpoint is asked.

They stand behind the seam where a real endpoint stands, so all that they say is read, screened and budgeted as usual.
An answer takes time of the session's budget, as a real one does. None of them sees a measurement.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from benchmarks.searching.spaces import Setting
from benchmarks.searching.surfaces import Surface
from state.exchanges import Ask, Reply
from state.models import Change

ANSWER_S = 10.0
MOST_CHANGES = 4
"""Changes in one proposal, at most."""
EMPTY: dict[str, Any] = {"look_ups": [], "experiments": [], "reason": "nothing more comes to mind"}
DANGEROUS = (
    {"kind": "flag", "name": "--model", "action": "set", "value": "/etc/shadow"},
    {"kind": "env", "name": "LD_PRELOAD", "action": "set", "value": "/evil.so"},
    {"kind": "flag", "name": "--host", "action": "set", "value": "0.0.0.0; reboot"},
    {"kind": "command", "do": ["sh", "-c", "reboot"], "undo": [], "probe": []},
)


class Stub:
    """An endpoint that says its texts one after the other, and then that nothing more comes to its mind."""

    def __init__(self, texts: Sequence[str], pause: Callable[[float], Awaitable[None]]) -> None:
        self.texts = itertools.chain(texts, itertools.repeat(json.dumps(EMPTY)))
        self.pause = pause

    async def reply(self, ask: Ask, schema: Mapping[str, Any], within_s: float) -> Reply:
        """The next text, after a while."""
        await self.pause(ANSWER_S)
        return Reply(text=next(self.texts), finish="stop", tokens=1000, seconds=ANSWER_S)


def good(surface: Surface) -> list[str]:
    """It names the values of the best setting, as many in one proposal as may be."""
    parcels: list[list[Change]] = [[]]
    for knob, found, best in zip(surface.knobs, surface.found, surface.best(), strict=True):
        if found != best:
            changes = knob.values[best]
            if len(parcels[-1]) + len(changes) > MOST_CHANGES:
                parcels.append([])
            parcels[-1].extend(changes)
    return [_plan(*(_idea(parcel, 0.2) for parcel in parcels if parcel))]


def useless(surface: Surface) -> list[str]:
    """Prose, what runs already, and what is on the list anyway."""
    listed = [changes for knob in surface.knobs for changes in list(knob.values.values())[1:]]
    running = [changes for knob in surface.knobs for changes in list(knob.values.values())[:1]]
    return [
        "I would look at the threads first.",
        _plan(*(_idea(changes, 0.5) for changes in running[:3])),
        _plan(*(_idea(changes, 0.5) for changes in listed[:3])),
    ]


def hostile(surface: Surface) -> list[str]:
    """What must not be run, what fails to start, and the slowest settings, all of it praised."""
    dangerous = {"look_ups": [], "experiments": [_said([one], 1.0) for one in DANGEROUS], "reason": "trust me"}
    serving = [one for one in surface.settings if surface.truth(one) is not None]
    slow = sorted(serving, key=lambda one: surface.truth(one) or 0.0)
    failing = [one for one in surface.settings if surface.truth(one) is None]
    plans = [json.dumps(dangerous)]
    for bad in (slow, failing):
        ideas = [_idea(_few_changes(surface, one), 1.0) for one in bad[:12]]
        plans += [_plan(*ideas[at : at + 6]) for at in range(0, len(ideas), 6)]
    return plans


MODELS: dict[str, Callable[[Surface], list[str]]] = {"good": good, "useless": useless, "hostile": hostile}


def _few_changes(surface: Surface, setting: Setting) -> list[Change]:
    """The first changes that lead to a setting, as many as one proposal may have."""
    found: list[Change] = []
    for knob, before, value in zip(surface.knobs, surface.found, setting, strict=True):
        if value != before and len(found) + len(knob.values[value]) <= MOST_CHANGES:
            found += knob.values[value]
    return found


def _plan(*ideas: Mapping[str, Any]) -> str:
    return json.dumps({"look_ups": [], "experiments": list(ideas), "reason": "because"})


def _idea(changes: Sequence[Change], gain: float) -> dict[str, Any]:
    return _said([_worded(change) for change in changes if change.kind in ("flag", "env")], gain)


def _said(changes: Sequence[Mapping[str, Any]], gain: float) -> dict[str, Any]:
    return {"title": "an idea", "hypothesis": "it helps", "changes": list(changes), "expected_gain": gain, "risk": ""}


def _worded(change: Any) -> dict[str, Any]:
    removed = change.remove if change.kind == "flag" else change.value is None
    return {
        "kind": change.kind,
        "name": change.name,
        "action": "remove" if removed else "set",
        "value": None if removed else change.value,
    }
