"""What a fact is, and how arbitrary bytes come through text; the only waiting here is in `ask`."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Generic, TypeVar

from state.errors import CommandFailed
from tools.redaction import unquoted
from tools.shell import Host, brief

Answer = TypeVar("Answer")


class Fact(ABC, Generic[Answer]):
    """One question to a host; `parse` raises ValueError, KeyError or IndexError for what it cannot read."""

    timeout_s: float = 30.0
    private: bool = False
    """Whether the answer may hold secrets, so that no error may quote it."""

    @abstractmethod
    def command(self) -> str:
        """The question as POSIX sh, to be answered in one round trip and without side effects."""

    @abstractmethod
    def parse(self, output: bytes) -> Answer:
        """The answer, from the command's standard output alone."""


async def ask(host: Host, fact: Fact[Answer]) -> Answer:
    """Put the question; CommandFailed when the host cannot answer or the answer cannot be read."""
    with unquoted() if fact.private else nullcontext():
        result = await host.check(fact.command(), timeout_s=fact.timeout_s)
    try:
        return fact.parse(result.stdout)
    except (ValueError, LookupError) as error:
        said = type(error).__name__ if fact.private else error
        raise CommandFailed(
            f"the host's answer to {type(fact).__name__} cannot be read: {said}",
            where={"host": host.name, "command": brief(fact.command())},
            tail="" if fact.private else result.tail,
            do="report this with the lines above: this system is not known yet",
        ) from error


def decode(word: str) -> bytes | None:
    """The bytes behind `b64:…` or `hex:…`; None for `-`, which means that they could not be read."""
    if word == "-":
        return None
    kind, _, text = word.partition(":")
    if kind == "b64":
        return base64.b64decode(text, validate=True)
    if kind == "hex":
        return bytes.fromhex(text)
    raise ValueError(f"neither b64 nor hex: {word[:40]!r}")


def as_text(data: bytes) -> str:
    """UTF-8 with surrogate escapes: `text.encode("utf-8", "surrogateescape")` gives the bytes back."""
    return data.decode("utf-8", "surrogateescape")


def lines(output: bytes) -> Iterator[list[str]]:
    """Words of each line that is not empty."""
    for line in output.decode("utf-8", "surrogateescape").splitlines():
        if words := line.split():
            yield words
