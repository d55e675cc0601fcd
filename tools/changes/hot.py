"""A live setting as an aside: made and read back by small programs on the host; it asks nothing itself.

The API key is read on the host from its file, so it stands in none of the scripts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from state.models import HotCall
from tools.changes.base import Aside, Planned, aside_dir
from tools.servers.base import HotSetting, HttpRequest
from tools.servers.probe import probe_source

ASK_S = 30.0
"""For all questions of one script together."""


def aside(root: str, plan: Planned, change: HotCall, make: HotSetting, unmake: HotSetting, python: str) -> Aside:
    """The aside of one live setting."""
    place = aside_dir(root, plan.digest)

    def ask(name: str) -> str:
        program = shlex.join([python, f"{place}/ask.py", f"{ASK_S:g}"])
        return f"answers=$({program} <{shlex.quote(f'{place}/{name}.json')}) || exit 2\n"

    def told(*words: str) -> str:
        return f"printf '%s\\n' \"$answers\" | {shlex.join([python, f'{place}/told.py', *words])}\n"

    files = {
        "probe": ask("read") + told(change.value, *make.where),
        "do": ask("do") + told(),
        "undo": ask("undo") + told(),
        "read.json": _questions(make.reads),
        "do.json": _questions([make.request]),
        "undo.json": _questions([unmake.request]),
        "ask.py": probe_source(),
        "told.py": hot_probe_source(),
    }
    return Aside(plan.digest, plan.when, str(change), {name: text.encode() for name, text in files.items()})


@cache
def hot_probe_source() -> str:
    """The program that reads a value out of answers."""
    return Path(__file__).with_name("hot_probe.py").read_text("utf-8")


def _questions(requests: Sequence[HttpRequest]) -> str:
    return json.dumps([request.model_dump() for request in requests])
