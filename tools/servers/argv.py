"""Command lines as tokens: read, edited and masked for any engine from its flag table; it runs nothing.

`Syntax` holds what differs between option parsers. The program part of a command line (an interpreter with its own
options, the module or file, positional arguments) is kept apart from the server's flags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from state.errors import ServerError
from state.models import FlagChange, Frozen, canonical_json
from tools.servers.base import FlagTable, KnownFlag, Reading

PYTHON = re.compile(r"(python|pypy)[\d.]*$")
PYTHON_VALUE_OPTIONS = ("-W", "-X", "--check-hash-based-pycs")
SHELL = re.compile(r"(sh|bash|dash|ash|ksh|zsh)$")


class Syntax(Frozen):
    """How an engine's option parser reads."""

    equals: bool = False
    """`--flag=value` is one token."""
    underscores: bool = False
    """`--a_b` is `--a-b`."""
    abbreviations: bool = False
    """A unique beginning of a long flag stands for it, as argparse has it by default."""
    joined: bool = False
    """The value of a flag of one letter may follow it in the same word: `-O3`."""
    dotted: bool = False
    """`--flag.a.b 3` sets one key of a JSON value, and all such keys together replace a value given whole."""
    dashes: bool = True
    """A word that begins with `-` and is no number may be a value; argparse takes it for a flag."""
    subcommands: frozenset[str] = frozenset()
    """A word right after the program that belongs to it: `vllm serve`."""
    positional: str | None = None
    """The flag that a word without one stands for; None where such a word is an error."""
    units: Mapping[str, int] = Field(default_factory=dict)
    """Endings of numbers such as `8k`, with what they multiply."""
    accumulating: frozenset[str] = frozenset()
    """Flags whose repetitions add up; of all others the last one counts."""


class Token(NamedTuple):
    """One option with its values, or one positional word under the flag that it stands for: argv[start:stop]."""

    start: int
    stop: int
    flag: KnownFlag
    values: tuple[str, ...]
    inline: bool = False
    """The value stood in the same word."""
    keys: tuple[str, ...] = ()
    """Where in a JSON value this one goes (`--flag.a.b`); a last key that ends with `+` adds to a list."""


class Spelled(NamedTuple):
    """What a word spells: a flag, the value in the same word, and the keys behind its name."""

    flag: KnownFlag
    inline: str | None = None
    keys: tuple[str, ...] = ()


def program_length(argv: Sequence[str]) -> int:
    """How many leading words start the program: `python -u -m pkg.server` are 4, a plain binary is 1.

    Python: `-m module`, `-c code` or a file ends the interpreter's own options (python(1)); a shell is followed by
    its script. Raises ServerError for an empty command line.
    """
    if not argv or not argv[0]:
        raise ServerError("the process has no command line", do="a kernel thread or a zombie is no server")
    base = argv[0].rpartition("/")[2]
    if PYTHON.match(base):
        return _python_length(argv)
    if SHELL.match(base):
        return next((i + 1 for i, word in enumerate(argv) if i and not word.startswith("-")), 1)
    return 1


def _python_length(argv: Sequence[str]) -> int:
    at = 1
    while at < len(argv):
        word = argv[at]
        if not word.startswith("-") or word == "-":
            return at + 1
        bundle = re.match(r"-[A-Za-z]*?([mc])(.*)", word) if not word.startswith(("--", "-W", "-X")) else None
        if bundle:
            return at + (1 if bundle.group(2) else 2)
        at += 2 if word in PYTHON_VALUE_OPTIONS else 1
    return len(argv)


def begin(argv: Sequence[str], syntax: Syntax) -> int:
    """Where the server's own words begin: after the program and its subcommand."""
    at = program_length(argv)
    return at + (at < len(argv) and argv[at] in syntax.subcommands)


def resolve(word: str, known: FlagTable, syntax: Syntax) -> Spelled | None:
    """What a word spells; None when it spells no flag."""
    if not word.startswith("-"):
        return None
    whole = _flag(word, known, syntax)
    if whole is not None:
        return Spelled(whole)
    name, has_value, value = word.partition("=") if syntax.equals else (word, "", "")
    inline = value if has_value else None
    base, *keys = name.split(".") if syntax.dotted else (name,)
    flag = _flag(base, known, syntax)
    if flag is not None:
        return Spelled(flag, inline, tuple(keys))
    letter = known.find(word[:2]) if syntax.joined and re.match(r"-[A-Za-z].", word) else None
    return Spelled(letter, word[2:]) if letter is not None and letter.takes_value else None


def _flag(name: str, known: FlagTable, syntax: Syntax) -> KnownFlag | None:
    if syntax.underscores and name.startswith("--"):
        name = name.replace("_", "-")
    flag = known.find(name)
    if flag is None and syntax.abbreviations and re.match(r"--\w", name):
        meant = {canonical for spelling, canonical in known.spellings.items() if spelling.startswith(name)}
        flag = known.flags[meant.pop()] if len(meant) == 1 else None
    return flag


def tokens(argv: Sequence[str], known: FlagTable, syntax: Syntax) -> Iterator[Token]:
    """The options and positional words after the program. Raises ServerError for a word that means nothing."""
    at = begin(argv, syntax)
    stands_for = known.flags.get(syntax.positional or "")
    while at < len(argv):
        found = resolve(argv[at], known, syntax)
        if found is not None:
            token = _option(argv, at, found, known=known, syntax=syntax)
        elif stands_for is not None and not _is_option(argv[at]):
            token = Token(at, at + 1, stands_for, (argv[at],))
        else:
            raise _unreadable(argv, at, known)
        yield token
        at = token.stop


def _is_option(word: str) -> bool:
    return re.match(r"-(?!\d|\.\d|$)", word) is not None


def _option(argv: Sequence[str], at: int, found: Spelled, *, known: FlagTable, syntax: Syntax) -> Token:
    flag = found.flag
    if found.inline is not None:
        return Token(at, at + 1, flag, (found.inline,), inline=True, keys=found.keys)
    if not flag.takes_value:
        return Token(at, at + 1, flag, ())
    count = 1 if found.keys else flag.count
    stop = at + 1 + count
    if flag.takes_value == "optional" or count == 0 or not syntax.dashes:
        most = len(argv) if count == 0 else stop
        stop = at + 1
        while stop < min(most, len(argv)) and not _ends_values(argv[stop], known, syntax):
            stop += 1
    least = 0 if flag.takes_value == "optional" else max(count, 1)
    if stop > len(argv) or stop - at - 1 < least:
        raise ServerError(
            "a command line ends before a flag has its value",
            where={"program": argv[0], "flag": argv[at]},
            do="check that the help was taken from the very program that runs",
        )
    return Token(at, stop, flag, tuple(argv[at + 1 : stop]), keys=found.keys)


def _ends_values(word: str, known: FlagTable, syntax: Syntax) -> bool:
    return resolve(word, known, syntax) is not None or (not syntax.dashes and _is_option(word))


def _unreadable(argv: Sequence[str], at: int, known: FlagTable) -> ServerError:
    nearest = known.nearest(argv[at])
    return ServerError(
        "a command line holds a word that the server's own --help does not explain",
        where={
            "program": argv[0],
            "word": argv[at].partition("=")[0],  # what follows may be a secret
            "nearest flag": nearest or "none",
            "known": len(known.flags),
        },
        do="check that the help was taken from the very program and version that runs",
    )


def read(argv: Sequence[str], known: FlagTable, syntax: Syntax) -> Reading:
    """The canonical reading: aliases resolved, of contradicting or repeated flags only what counts."""
    flags: dict[str, tuple[str, ...]] = {}
    pieces: dict[str, dict[str, Any]] = {}
    for token in tokens(argv, known, syntax):
        name = token.flag.name
        if token.keys:
            _merge(pieces.setdefault(name, {}), _nested(token.keys, token.values[0]))
            continue
        before = flags.pop(name, ()) if name in syntax.accumulating else ()
        flags.pop(token.flag.opposite or "", None)
        flags[name] = before + tuple(_canonical(token.flag, value, syntax) for value in token.values)
    whole = {name: (canonical_json(value),) for name, value in pieces.items()}
    return Reading(tuple(argv[: begin(argv, syntax)]), flags | whole)


def _canonical(flag: KnownFlag, value: str, syntax: Syntax) -> str:
    """One spelling for equal values: JSON without its accidents, numbers without units."""
    if value.startswith(("{", "[")) and flag.type in ("json", "str"):
        try:
            return canonical_json(json.loads(value))
        except ValueError:
            return value
    return str(count_of(value, syntax.units) or value) if flag.type == "size" else value


def count_of(value: str, units: Mapping[str, int]) -> int | None:
    """The integer that `8k` or `8192` stands for; None for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", value)
    if not found or (found[2] and found[2] not in units) or ("." in found[1] and not found[2]):
        return None
    return int(float(found[1]) * units.get(found[2], 1))


def _nested(keys: Sequence[str], text: str) -> dict[str, Any]:
    """`a.b` and `3` as `{"a": {"b": 3}}`; `a+` and `x,y` as `{"a": ["x", "y"]}`."""
    try:
        value: Any = text.split(",") if keys[-1].endswith("+") else json.loads(text)
    except ValueError:
        value = text
    for key in reversed(keys):
        value = {key.removesuffix("+"): value}
    nested: dict[str, Any] = value
    return nested


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        else:
            into[key] = old + value if isinstance(old, list) and isinstance(value, list) else value


def edit(argv: Sequence[str], known: FlagTable, syntax: Syntax, change: FlagChange) -> tuple[str, ...]:
    """The flag set (in place of its first spelling or opposite, else at the end) or dropped, the rest untouched."""
    flag = known.flags[change.name]
    names = {flag.name} if change.remove else {flag.name, flag.opposite}
    new = () if change.remove else rendered(flag, change.value)
    edited = list(argv[: begin(argv, syntax)])
    for token in tokens(argv, known, syntax):
        if token.flag.name not in names:
            edited += argv[token.start : token.stop]
        else:
            edited += new
            new = ()
    return (*edited, *new)


def rendered(flag: KnownFlag, value: str | None) -> tuple[str, ...]:
    """The words that set a flag; a flag with several values takes them separated by blanks."""
    if value is None:
        return (flag.name,)
    return (flag.name, *(value.split() if flag.count != 1 else (value,)))


def mask(
    argv: Sequence[str], known: FlagTable, syntax: Syntax, secret: frozenset[str], hide: Callable[[str, str], str]
) -> tuple[str, ...]:
    """Argv with the value of each secret flag replaced by `hide(canonical name, value)`."""
    masked = list(argv)
    for token in tokens(argv, known, syntax):
        if token.flag.name not in secret:
            continue
        if token.inline:
            masked[token.start] = argv[token.start].removesuffix(token.values[0]) + hide(
                token.flag.name, token.values[0]
            )
        else:
            masked[token.start + 1 : token.stop] = [hide(token.flag.name, value) for value in token.values]
    return tuple(masked)
