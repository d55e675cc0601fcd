"""Unified diffs, applied to the byte or not at all; pure, it reads no file.

No line is searched for and no blank is forgiven: a diff that fits somewhere else than where it says was made for
another file. Lines end with a line feed and nothing else, so that form feeds and the like stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NEVER = (b"rename from ", b"rename to ", b"copy from ", b"new file mode ", b"deleted file mode ", b"GIT binary patch")
NOWHERE = "/dev/null"


class Hunk(NamedTuple):
    """One place of a file: each line with its sign (blank, - or +) in front, line ends included."""

    start: int
    """Lines of the original in front of it."""
    lines: tuple[tuple[bytes, bytes], ...]


class FileDiff(NamedTuple):
    """What a diff does to one file."""

    path: str
    hunks: tuple[Hunk, ...]


def parsed(text: str) -> tuple[FileDiff, ...]:
    """The files of a diff. ValueError when it holds something else than edits of existing files."""
    lines = text.removesuffix("\n").encode("utf-8", "surrogateescape").split(b"\n")
    found: list[FileDiff] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith(NEVER):
            raise ValueError(f"it does more than edit a file: {_shown(lines[at])}")
        if lines[at].startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            path = _path(lines[at], lines[at + 1])
            hunks, at = _hunks(lines, at + 2)
            if not hunks:
                raise ValueError(f"nothing is said about {path}")
            found.append(FileDiff(path, hunks))
        elif HUNK.match(lines[at]):
            raise ValueError("a change of lines stands in front of the first file name")
        else:
            at += 1
    if not found:
        raise ValueError("it is no unified diff: no line begins with --- and the next one with +++")
    return tuple(found)


def patched(before: bytes, hunks: Sequence[Hunk]) -> bytes:
    """The file with the hunks applied. ValueError names the first line that is not as the diff says."""
    lines = _lines(before)
    after: list[bytes] = []
    at = 0
    for hunk in hunks:
        if hunk.start < at:
            raise ValueError(f"its parts overlap or are out of order at line {hunk.start + 1}")
        after += lines[at : hunk.start]
        at = hunk.start
        for sign, line in hunk.lines:
            if sign == b"+":
                after.append(line)
                continue
            there = lines[at] if at < len(lines) else None
            if there != line:
                found = "the end of the file" if there is None else _shown(there)
                raise ValueError(f"line {at + 1} is {found}, the diff was made for {_shown(line)}")
            at += 1
            if sign == b" ":
                after.append(line)
    after += lines[at:]
    if any(not line.endswith(b"\n") for line in after[:-1]):
        raise ValueError("it puts lines behind one that has no line end")
    return b"".join(after)


def _path(old: bytes, new: bytes) -> str:
    names = [line[4:].split(b"\t")[0].rstrip(b"\r").decode("utf-8", "surrogateescape") for line in (old, new)]
    if NOWHERE in names:
        raise ValueError(f"it makes or deletes a file: {next((name for name in names if name != NOWHERE), NOWHERE)}")
    prefixed = names[0].startswith("a/") and names[1].startswith("b/")
    first, second = (name[2:] if prefixed else name for name in names)
    if first != second:
        raise ValueError(f"it renames a file: {first} to {second}")
    if second.startswith("/") or ".." in second.split("/") or not second:
        raise ValueError(f"{second!r} leads out of the folder")
    return second


def _hunks(lines: list[bytes], at: int) -> tuple[tuple[Hunk, ...], int]:
    found: list[Hunk] = []
    while at < len(lines) and (head := HUNK.match(lines[at])):
        old, new = (1 if count is None else int(count) for count in (head[2], head[4]))
        start = int(head[1]) - (1 if old else 0)
        body: list[tuple[bytes, bytes]] = []
        at += 1
        while old or new or (at < len(lines) and lines[at].startswith(b"\\")):
            if at == len(lines):
                raise ValueError("it ends in the middle of a change")
            sign, line = lines[at][:1] or b" ", lines[at][1:]
            at += 1
            if sign == b"\\":
                body = _without_end(body)
                continue
            if sign not in (b" ", b"-", b"+"):
                raise ValueError(f"a change of lines is broken off by {_shown(sign + line)}")
            old, new = old - (sign != b"+"), new - (sign != b"-")
            if old < 0 or new < 0:
                raise ValueError(f"the numbers of lines at line {start + 1} are wrong")
            body.append((sign, line + b"\n"))
        found.append(Hunk(start, tuple(body)))
    return tuple(found), at


def _without_end(body: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The line before the remark that there is no newline at the end of the file has no end."""
    if not body:
        raise ValueError("a remark on a missing line end stands in front of any line")
    sign, line = body[-1]
    return [*body[:-1], (sign, line.removesuffix(b"\n"))]


def _lines(text: bytes) -> list[bytes]:
    parts = text.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _shown(line: bytes) -> str:
    return repr(line.decode("utf-8", "replace"))
