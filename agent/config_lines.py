"""Where each key of a TOML text stands, which tomllib does not tell; it must not judge values or report errors.

The text must already have been accepted by tomllib: the scanner relies on it and understands no more of the grammar
than it needs to tell keys, values, strings and comments apart.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LITERAL = re.compile(r"'[^']*'")
# The closing quotes may follow up to two quotes that belong to the text.
_LONG_BASIC = re.compile(r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''.*?'''(?:'{0,2})", re.DOTALL)
_STRINGS = (_LONG_BASIC, _LONG_LITERAL, _BASIC, _LITERAL)
_SCALAR = re.compile(r"[^,\]}#\r\n]+")


def locate(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every table, key and array item, by path: `("workload", "load_points", 1, "requests")`.

    A key inside an inline table has its own line, which is nearly always that of the key that holds the table.
    """
    return _Scanner(text).scan()


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    """Line of the path or of the nearest enclosing key that stands in the file; None when none does."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.items: dict[KeyPath, int] = {}
        self._counted_to, self._line = 0, 1

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip_blank():
            if self.text.startswith("[", self.at):
                table = self._header()
            else:
                self._pair(table)
        return self.lines

    def _header(self) -> KeyPath:
        many = self.text.startswith("[[", self.at)
        line = self._line_here()
        self.at += 2 if many else 1
        *parents, last = self._key()
        self._skip_blank()
        self.at += 2 if many else 1
        path = self._parents(parents, line)
        if not many:
            self.lines[(*path, last)] = line  # over what a header further up has implied
            return (*path, last)
        path = (*path, last)
        self._note(path, line)
        index = self.items[path] = self.items.get(path, -1) + 1
        self._note((*path, index), line)
        return (*path, index)

    def _parents(self, parts: list[str], line: int) -> KeyPath:
        """Path of the table that a header's last name stands in: an array of tables means its latest item."""
        path: KeyPath = ()
        for part in parts:
            path = (*path, part)
            self._note(path, line)
            if path in self.items:
                path = (*path, self.items[path])
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line_here()
        path = table
        for part in self._key():
            path = (*path, part)
            self._note(path, line)
        self._skip_blank()
        self.at += 1  # the equals sign
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._skip_blank()
        opening = self.text[self.at]
        if opening == "[":
            self._array(path)
        elif opening == "{":
            self._inline_table(path)
        elif opening in "\"'":
            self._string()
        else:
            self._take(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        while self._more("]"):
            self._note((*path, index), self._line_here())
            self._value((*path, index))
            index += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        while self._more("}"):
            self._pair(path)

    def _more(self, closing: str) -> bool:
        """Step over blanks and one comma; False, and past it, at the closing bracket."""
        self._skip_blank()
        if self.text[self.at] == ",":
            self.at += 1
            self._skip_blank()
        if self.text[self.at] != closing:
            return True
        self.at += 1
        return False

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._skip_blank()
            if self.text[self.at] in "\"'":
                parts.append(str(tomllib.loads(f"key = {self._string()}")["key"]))
            else:
                parts.append(self._take(_BARE_KEY))
            self._skip_blank()
            if self.text[self.at] != ".":
                return parts
            self.at += 1

    def _string(self) -> str:
        for pattern in _STRINGS:
            if pattern.match(self.text, self.at):
                return self._take(pattern)
        raise ValueError(f"no string at offset {self.at}")

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"the text at offset {self.at} is not what valid TOML has there")
        self.at = found.end()
        return found.group()

    def _skip_blank(self) -> bool:
        """Go to the next thing that is neither blank nor comment; False at the end of the text."""
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.at < len(self.text)

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted_to, self.at)
        self._counted_to = self.at
        return self._line

    def _note(self, path: KeyPath, line: int) -> None:
        self.lines.setdefault(path, line)
