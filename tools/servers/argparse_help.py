"""The `--help` of a Python server (argparse) as a flag table; it reads text only and knows no engine and no flag.

Layout (argparse.HelpFormatter): an option begins with two blanks, its text stands from column 24 on, or on the next
lines when the names are long. The help tells choices and, where the engine asks for it, defaults; it tells no types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from state.errors import ServerError
from tools.servers.base import FlagTable, KnownFlag

HEAD = re.compile(r"  (?P<head>-\S.*?)(?:  +(?P<text>.*))?$")
SECTION = re.compile(r"(\w[\w ]*):$")
NAME = re.compile(r"(?:^|, )(--?[A-Za-z][\w.-]*)(?= |,|$)")
BRACES = re.compile(r"\{([^{}]+)\}")
WORDS_LIST = re.compile(r"\['[^\]]*'\]")
DEFAULT = re.compile(r"\(default: (.*)\)$")
INT, FLOAT = re.compile(r"-?\d+"), re.compile(r"-?\d*\.\d+(e-?\d+)?")
RENAMED = re.compile(r"Deprecated alias for (--[\w-]+)\.$")


class Entry(NamedTuple):
    """One option as printed."""

    names: tuple[str, ...]
    hint: str
    text: str
    section: str


def entries(text: str) -> Iterator[Entry]:
    """The options of a help text in order; the usage, positional words and section texts fall away."""
    head: re.Match[str] | None = None
    section, lines = "", list[str]()
    for line in [*text.splitlines(), "end:"]:
        next_head, next_section = HEAD.match(line), SECTION.match(line)
        if not next_head and not next_section:
            lines.append(line.strip())
            continue
        if head:
            yield _entry(head["head"], " ".join(part for part in lines if part), section)
        section = next_section[1] if next_section else section
        head, lines = next_head, [next_head["text"] or ""] if next_head else []


def _entry(head: str, text: str, section: str) -> Entry:
    found = list(NAME.finditer(head))
    hint = head[found[0].end() : found[1].start() if len(found) > 1 else None].strip() if found else ""
    return Entry(tuple(match[1] for match in found), hint, text.strip(), section)


@cache
def parse_help(text: str, engine: str) -> FlagTable:
    """Every option of the help. Raises ServerError when there is none."""
    printed = [entry for entry in entries(text) if entry.names]
    if not printed:
        raise ServerError(
            f"no option was found in the output of {engine}'s --help",
            tail=text,
            do="run the program with --help by hand: it must print its options to stdout",
        )
    flags = {flag.name: flag for entry in printed for flag in flags_of(entry)}
    for entry in printed:
        meant = RENAMED.match(entry.text)
        if meant and meant[1] in flags and entry.names[0] in flags:
            flags = _renamed(flags, entry.names[0], meant[1])
    return FlagTable(flags=flags)


def _renamed(flags: dict[str, KnownFlag], old: str, new: str) -> dict[str, KnownFlag]:
    """A former name becomes another spelling of the present one, if both take the same number of values."""
    former, present = flags[old], flags[new]
    if (former.takes_value, former.count) != (present.takes_value, present.count):
        return flags
    aliases = (*present.aliases, former.name, *former.aliases)
    kept = {name: flag for name, flag in flags.items() if name != old}
    return kept | {new: present.model_copy(update={"aliases": aliases})}


def flags_of(entry: Entry) -> list[KnownFlag]:
    """One flag, or for a switch with negative names two that are each other's opposite.

    argparse.BooleanOptionalAction puts `--no-x` behind each `--x`; short names belong to the positive.
    """
    longs = {name for name in entry.names if name.startswith("--")}
    negative = [name for name in entry.names if f"--{name.removeprefix('--no-')}" in longs - {name}]
    positive = [name for name in entry.names if name not in negative]
    sides = [_canonical_first(names) for names in (positive, negative) if names]
    shared = facts_of(entry)
    return [
        KnownFlag(name=names[0], aliases=tuple(names[1:]), opposite=_other(sides, at), **shared)
        for at, names in enumerate(sides)
    ]


def _canonical_first(names: Sequence[str]) -> list[str]:
    canonical = next((name for name in names if name.startswith("--")), names[0])
    return [canonical, *(name for name in names if name != canonical)]


def _other(sides: Sequence[Sequence[str]], at: int) -> str | None:
    return sides[1 - at][0] if len(sides) > 1 else None


def facts_of(entry: Entry) -> dict[str, Any]:
    """What both names of a switch, or the one flag, have in common."""
    found = DEFAULT.search(entry.text)
    default = found[1] if found else None
    facts: dict[str, Any] = {"section": entry.section, "text": entry.text, "default": default}
    return facts | (value_facts(entry.hint, default) if entry.hint else {})


def value_facts(hint: str, default: str | None) -> dict[str, Any]:
    """How many values, which ones, and of which type if the default shows it."""
    several = hint.endswith("...]")
    braces, listed = BRACES.match(hint.lstrip("[")), WORDS_LIST.match(hint)
    optional = hint.startswith("[") and not listed
    count = 0 if several else 1
    if not braces and not optional and not listed and not several:
        count = len(hint.split())
    choices = tuple(braces[1].split(",")) if braces else tuple(re.findall(r"'([^']*)'", hint)) if listed else None
    only_these = braces is not None and " or " not in hint
    kind = "choice" if only_these else _type_of(default) if not choices else "str"
    return {"takes_value": "optional" if optional else True, "count": count, "choices": choices, "type": kind}


def _type_of(default: str | None) -> str:
    if default is not None and INT.fullmatch(default):
        return "int"
    return "float" if default is not None and FLOAT.fullmatch(default) else "str"
