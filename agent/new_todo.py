"""An experiment that a person words on the command line or in a file of its own; it must not reach a store or a host.

It is checked like those of a session file, and every problem is named at once.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.config import own_experiments, read_text
from agent.config_lines import KeyPath, locate
from agent.config_problems import Problem, problems_error, syntax_error, unwanted_values
from state.errors import ConfigError
from state.models import Experiment

PAGE = "docs/how-to/todo-list.md"
WORDING = (
    "write flag:--name=value, flag:--name for a switch, env:NAME=value, or without:--name and without:NAME; "
    "anything else goes into a file (--file)"
)
_LONGEST_ID = 40


def change_of(text: str) -> dict[str, Any]:
    """One change as it is worded on the command line: `flag:--threads=4`. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    name, equals, value = rest.partition("=")
    if kind == "without" and name and not equals:
        return {"kind": "flag", "name": name, "remove": True} if name.startswith("-") else {"kind": "env", "name": name}
    if kind == "flag" and name.startswith("-"):
        return {"kind": "flag", "name": name, **({"value": value} if equals else {})}
    if kind == "env" and re.fullmatch(r"[A-Za-z_]\w*", name) and equals:
        return {"kind": "env", "name": name, "value": value}
    raise ConfigError(f"--change {text} is no change", do=WORDING)


def worded(changes: Sequence[str], fields: Mapping[str, Any], taken: Collection[str]) -> Experiment:
    """The experiment of `--change` words; `fields` are what else was said, and None stands for nothing.

    An id that nobody gave is made from the changes, and is none of `taken`. Raises ConfigError.
    """
    made = [change_of(text) for text in changes]
    if not made:
        raise ConfigError("an experiment needs a change", do=f"give --change; {WORDING}")
    said = {key: value for key, value in fields.items() if value is not None}
    title = ", ".join(_title(change) for change in made)
    entry = {"id": _free_id(title, taken), "title": title, "hypothesis": "a person wants to know", **said}
    return _checked({**entry, "changes": made}, "what was asked for", {})


def from_file(path: Path) -> Experiment:
    """The one entry under `experiments` of a TOML or JSON file, or all of it where there is no such key.

    Raises ConfigError.
    """
    text = read_text(path, "file", PAGE)
    lines: dict[KeyPath, int] = {}
    if path.suffix == ".json":
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            what = f"{path} is not valid JSON; nothing was touched\n  line {error.lineno}: {error.msg}"
            raise ConfigError(what, do=f"mend line {error.lineno} of {path}") from None
    else:
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise syntax_error(str(path), text, str(error)) from None
        lines = dict(locate(text))
    return _checked(_one(raw, path), str(path), lines)


def _one(raw: Any, path: Path) -> Any:
    """The entry itself."""
    do = f"write one [[experiments]] as in a session file; {PAGE} shows one"
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} holds no experiment", do=do)
    if "experiments" not in raw:
        return raw
    others = sorted({*raw} - {"experiments"})
    if others:
        raise ConfigError(f"{path} holds more than experiments: {', '.join(others)}", do=do)
    entries = raw["experiments"]
    if not isinstance(entries, list) or len(entries) != 1:
        count = len(entries) if isinstance(entries, list) else 0
        raise ConfigError(f"{path} holds {count} experiments, expected one", do="give each a file of its own")
    return entries[0]


def _checked(entry: Any, name: str, lines: Mapping[KeyPath, int]) -> Experiment:
    problems: list[Problem] = list(unwanted_values([entry], ("experiments",)))
    given, wrong = own_experiments([entry])
    problems += [problem for problem in wrong if problem.path not in {known.path for known in problems}]
    if problems:
        raise problems_error(name, problems, lines)
    return given[0].experiment()


def _title(change: Mapping[str, Any]) -> str:
    name, value = change["name"], change.get("value")
    if change.get("remove") or (change["kind"] == "env" and value is None):
        return f"no {name}"
    return f"{name}={value}" if change["kind"] == "env" else f"{name} {value}" if value is not None else str(name)


def _free_id(title: str, taken: Collection[str]) -> str:
    base = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-._").lower()[:_LONGEST_ID] or "own"
    number, name = 1, base
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name
