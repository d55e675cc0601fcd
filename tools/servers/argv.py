"""Command lines as tokens: read, edited and masked for any engine from its flag table; it runs nothing.

`Syntax` holds what differs between option parsers. The program part of a command line (an interpreter with its own
options, the module or file, positional arguments) is kept apart from the server's flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from state.errors import ServerError
from state.models import FlagChange, Frozen
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
    positionals: bool = False
    """Words that belong to no flag are allowed; they are read as part of the program."""
    accumulating: frozenset[str] = frozenset()
    """Flags whose repetitions add up; of all others the last one counts."""


class Token(NamedTuple):
    """One option with its values, or (`flag` None) one positional word: argv[start:stop]."""

    start: int
    stop: int
    flag: KnownFlag | None
    values: tuple[str, ...]
    inline: bool = False
    """The value stood behind `=` in the same word."""


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


def resolve(word: str, known: FlagTable, syntax: Syntax) -> tuple[KnownFlag, str | None] | None:
    """The flag that a word spells and its inline value; None when it spells none."""
    name, has_value, value = word.partition("=") if syntax.equals and word.startswith("-") else (word, "", "")
    if syntax.underscores and name.startswith("--"):
        name = name.replace("_", "-")
    flag = known.find(name)
    if flag is None and syntax.abbreviations and name.startswith("--"):
        meant = {canonical for spelling, canonical in known.spellings.items() if spelling.startswith(name)}
        flag = known.flags[meant.pop()] if len(meant) == 1 else None
    return None if flag is None else (flag, value if has_value else None)


def tokens(argv: Sequence[str], known: FlagTable, syntax: Syntax) -> Iterator[Token]:
    """The options and positional words after the program. Raises ServerError for a word that means nothing."""
    at = program_length(argv)
    while at < len(argv):
        found = resolve(argv[at], known, syntax)
        if found is not None:
            token = _option(argv, at, *found, known=known, syntax=syntax)
        elif syntax.positionals and not re.match(r"-\D", argv[at]):
            token = Token(at, at + 1, None, (argv[at],))
        else:
            raise _unreadable(argv, at, known)
        yield token
        at = token.stop


def _option(
    argv: Sequence[str], at: int, flag: KnownFlag, inline: str | None, *, known: FlagTable, syntax: Syntax
) -> Token:
    if inline is not None:
        return Token(at, at + 1, flag, (inline,), inline=True)
    if not flag.takes_value:
        return Token(at, at + 1, flag, ())
    stop = at + 1 + flag.count
    if flag.takes_value == "optional" or flag.count == 0:
        most = len(argv) if flag.count == 0 else stop
        stop = at + 1
        while stop < min(most, len(argv)) and resolve(argv[stop], known, syntax) is None:
            stop += 1
    least = 0 if flag.takes_value == "optional" else max(flag.count, 1)
    if stop > len(argv) or stop - at - 1 < least:
        raise ServerError(
            "a command line ends before a flag has its value",
            where={"program": argv[0], "flag": argv[at]},
            do="check that the help was taken from the very program that runs",
        )
    return Token(at, stop, flag, tuple(argv[at + 1 : stop]))


def _unreadable(argv: Sequence[str], at: int, known: FlagTable) -> ServerError:
    nearest = known.nearest(argv[at])
    return ServerError(
        "a command line holds a word that the server's own --help does not explain",
        where={"program": argv[0], "word": argv[at], "nearest flag": nearest or "none", "known": len(known.flags)},
        do="check that the help was taken from the very program and version that runs",
    )


def read(argv: Sequence[str], known: FlagTable, syntax: Syntax) -> Reading:
    """The canonical reading: aliases resolved, of contradicting or repeated flags only what counts."""
    program = list(argv[: program_length(argv)])
    flags: dict[str, tuple[str, ...]] = {}
    for token in tokens(argv, known, syntax):
        if token.flag is None:
            program += token.values
            continue
        name = token.flag.name
        before = flags.pop(name, ()) if name in syntax.accumulating else ()
        flags.pop(token.flag.opposite or "", None)
        flags[name] = before + token.values
    return Reading(tuple(program), flags)


def edit(argv: Sequence[str], known: FlagTable, syntax: Syntax, change: FlagChange) -> tuple[str, ...]:
    """The flag set (in place of its first spelling or opposite, else at the end) or dropped, the rest untouched."""
    flag = known.flags[change.name]
    names = {flag.name} if change.remove else {flag.name, flag.opposite}
    new = () if change.remove else rendered(flag, change.value)
    edited = list(argv[: program_length(argv)])
    for token in tokens(argv, known, syntax):
        if token.flag is None or token.flag.name not in names:
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
        if token.flag is None or token.flag.name not in secret:
            continue
        if token.inline:
            masked[token.start] = f"{argv[token.start].partition('=')[0]}={hide(token.flag.name, token.values[0])}"
        else:
            masked[token.start + 1 : token.stop] = [hide(token.flag.name, value) for value in token.values]
    return tuple(masked)
