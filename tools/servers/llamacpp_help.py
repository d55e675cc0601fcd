"""llama-server's `--help` as a flag table; it reads text only and knows no flag by heart.

Layout (llama.cpp `common_arg::to_string`): names from column 0, separated by commas, then the value's hint, then text
from column 40, on the next line when the names are long. A switch lists its negative names last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from state.errors import ServerError
from tools.servers.base import FlagTable, KnownFlag

HEAD = re.compile(r"(?P<names>--?[A-Za-z][\w.-]*(?:, +--?[A-Za-z][\w.-]*)*)(?: (?P<hint>\S.*?))?(?:  +(?P<text>.*))?$")
RULE = "-----"
NUMBER = re.compile(r"-?\d+(\.\d+)?")
BULLET = re.compile(r"^ *- ([\w+-]+)(?: \(default\))?:", re.MULTILINE)
ALLOWED = re.compile(r"(?:allowed values:|one of) ([\w+-]+(?:,\s+[\w+-]+)+)")
DEFAULT = re.compile(r"default:\s*((?:[^()]|\([^()]*\))*)")
ENV = re.compile(r"\(env: (\w+)\)")
RANGE = re.compile(r"<(-?\d+)\.\.\.(-?\d+)>")
PLAIN_DEFAULTS = ("enabled", "disabled", "none", "unused", "auto", "unset")
TCP_PORTS = (0, 65535)


class Entry(NamedTuple):
    """One option as printed."""

    names: tuple[str, ...]
    hint: str
    text: str
    section: str


def entries(text: str) -> Iterator[Entry]:
    """The options of a help text in order; section headers and blank lines fall away."""
    head: re.Match[str] | None = None
    section, lines = "", list[str]()
    for line in [*text.splitlines(), RULE]:
        next_head = HEAD.match(line)
        if not next_head and not line.startswith(RULE):
            lines.append(line.strip())
            continue
        if head:
            names = tuple(re.split(r", +", head["names"]))
            yield Entry(names, (head["hint"] or "").strip(), "\n".join(lines).strip(), section)
        section = section if next_head else line.strip("- ")
        head, lines = next_head, [next_head["text"] or ""] if next_head else []


def parse_help(text: str) -> FlagTable:
    """Every option of the help. Raises ServerError when there is none."""
    flags = [flag for entry in entries(text) for flag in flags_of(entry)]
    if not flags:
        raise ServerError(
            "no option was found in the output of llama-server's --help",
            tail=text,
            do="run the program with --help by hand: it must print its options to stdout",
        )
    return FlagTable(flags={flag.name: flag for flag in flags})


def flags_of(entry: Entry) -> list[KnownFlag]:
    """One flag, or for a switch two that are each other's opposite."""
    cut = negative_names_at(entry.names)
    spellings = [entry.names[:cut], entry.names[cut:]] if cut else [entry.names]
    canonical = [next((name for name in names if name.startswith("--")), names[0]) for names in spellings]
    shared = facts_of(entry)
    return [
        KnownFlag(
            name=name,
            aliases=tuple(alias for alias in names if alias != name),
            opposite=canonical[1 - position] if cut else None,
            **{**shared, "env": shared["env"] if position == 0 else None},
        )
        for position, (name, names) in enumerate(zip(canonical, spellings, strict=True))
    ]


def negative_names_at(names: Sequence[str]) -> int:
    """Where the negative names of a switch begin: after its last positive long name; 0 when there are none.

    `--no-host` alone is a flag of its own, not the negative of anything.
    """
    longs = [(at, name.startswith("--no-")) for at, name in enumerate(names) if name.startswith("--")]
    first_negative = next((at for at, negative in longs if negative), None)
    if first_negative is None:
        return 0
    positives = [at for at, negative in longs if not negative and at < first_negative]
    return positives[-1] + 1 if positives else 0


def facts_of(entry: Entry) -> dict[str, Any]:
    """What both names of a switch, or the one flag, have in common: type, choices, bounds, default, variable."""
    default = default_of(entry.text)
    env = ENV.findall(entry.text)
    facts: dict[str, Any] = {
        "env": env[-1] if env else None,
        "default": default,
        "removed": re.search(r"argument has been removed|\(DEPRECATED\)", entry.text) is not None,
        "section": entry.section,
        "text": " ".join(ENV.sub("", entry.text).split()),
    }
    return facts | (value_facts(entry, default) if entry.hint else {})


def value_facts(entry: Entry, default: str | None) -> dict[str, Any]:
    """Type, choices and bounds of a value. A hint in brackets is a choice: llama.cpp has no optional values."""
    hint = entry.hint
    facts: dict[str, Any] = {"takes_value": True, "count": 2 if re.fullmatch(r"[A-Z]+ [A-Z]+", hint) else 1}
    choices = choices_of(entry)
    bounds = RANGE.fullmatch(hint)
    if bounds:
        facts |= {"low": float(bounds[1]), "high": float(bounds[2])}
    elif hint == "PORT":
        facts |= {"low": float(TCP_PORTS[0]), "high": float(TCP_PORTS[1])}
    kind = number_type(entry, default) if bounds or not choices or hint == "N" else None
    if hint.count(",") > 1 and choices and "{" not in hint:
        facts["separator"] = ","
    return facts | {"type": kind or ("choice" if choices else "str"), "choices": choices or None}


def choices_of(entry: Entry) -> tuple[str, ...]:
    """The words that a value may be, from the hint, a list of allowed values, bullets, or quoted alternatives."""
    hint, text = entry.hint, entry.text
    bracketed = re.fullmatch(r"[\[<{]([\w+-]+(?:[|,][\w+-]+)+)[\]>}]", hint)
    if bracketed:
        return tuple(re.split(r"[|,]", bracketed[1]))
    if re.fullmatch(r"[a-z0-9-]+(,[a-z0-9-]+)+", hint):
        return tuple(hint.split(","))
    allowed = ALLOWED.search(text)
    if allowed:
        return tuple(re.split(r",\s+", allowed[1]))
    if hint == "N":
        return tuple(dict.fromkeys(re.findall(r"'([a-z]+)'", text)))
    return tuple(BULLET.findall(text)) if hint in ("MODE", "TYPE", "FORMAT") else ()


def number_type(entry: Entry, default: str | None) -> str | None:
    """`int` or `float` where default, bounds or hint say so, else None."""
    if default is not None and NUMBER.fullmatch(default) and "," not in entry.hint:
        return "float" if "." in default else "int"
    if RANGE.fullmatch(entry.hint):
        return "int"
    if entry.hint != "N":
        return None
    return "float" if re.search(r"rope|factor", entry.names[-1]) else "int"


def default_of(text: str) -> str | None:
    """The default as the help words it, without the explanations that follow a number or a plain word."""
    found = DEFAULT.search(" ".join(text.split()))
    if not found:
        return None
    words = found[1].strip()
    first = re.split(r"[,; ]", words, maxsplit=1)[0].strip("'\"")
    return first if NUMBER.fullmatch(first) or first in PLAIN_DEFAULTS else words.strip("'\"")
