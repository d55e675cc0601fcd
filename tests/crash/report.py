"""What came of each kill, and the table of it; it must not run anything."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.crash.kinds import rank

FAULTS = ("repeated", "lost", "wrong_end", "strays")


class Case(NamedTuple):
    """One session that was killed, and what was found after it had been taken up again."""

    name: str
    """Unique in its group; says where and in which order it was killed."""
    killed: tuple[str, ...]
    """Rows whose points were killed in an agent that nothing had happened to before."""
    again: tuple[str, ...]
    """Rows whose points were killed in a resume."""
    repeated: tuple[str, ...] = ()
    """Effects that the target's own log has twice, more often than an undisturbed session, or without an intent."""
    lost: tuple[str, ...] = ()
    """Events that were committed before a kill and are not there, unchanged and in place, at the end."""
    wrong_end: tuple[str, ...] = ()
    """Why the end is not the known-good one of an undisturbed session."""
    strays: tuple[str, ...] = ()
    """Processes that nobody needs any more and that live."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return not any(getattr(self, fault) for fault in FAULTS)


class Ledger:
    """All cases so far, kept in a file of JSON lines so that an interrupted suite goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[str, Case] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.reload()

    def reload(self) -> None:
        """Read what other processes added."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.cases = {case.name: case for case in map(_read, lines)}

    def add(self, case: Case) -> None:
        """Keep a case."""
        self.cases[case.name] = case
        with self.path.open("a") as file:
            file.write(json.dumps(case._asdict()) + "\n")


def _read(line: str) -> Case:
    fields = json.loads(line)
    return Case(fields.pop("name"), **{name: tuple(values) for name, values in fields.items()})


class Row(NamedTuple):
    """One line of the table: a kind of point, how often it was killed, and what was wrong afterwards."""

    kind: str
    killed: int
    again: int
    repeated: int
    lost: int
    wrong_end: int
    strays: int

    @property
    def ok(self) -> bool:
        """Whether all is as it must be."""
        return not (self.repeated or self.lost or self.wrong_end or self.strays)


def rows(cases: Iterable[Case]) -> list[Row]:
    """One row a kind; a case counts in every row of whose kind it was killed."""
    found: dict[str, list[int]] = {}
    for case in cases:
        for at, kinds in enumerate((case.killed, case.again)):
            for kind in kinds:
                found.setdefault(kind, [0] * 6)[at] += 1
        for kind in {*case.killed, *case.again}:
            for at, fault in enumerate(FAULTS, start=2):
                found[kind][at] += len(getattr(case, fault))
    return [Row(kind, *found[kind]) for kind in sorted(found, key=rank)]


def table(title: str, lines: list[Row]) -> Table:
    """The rows as a person reads them."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("killed at", no_wrap=True)
    for name in ("points", "resumes", "repeated", "lost", "wrong end", "strays"):
        shown.add_column(name, justify="right")
    shown.add_column("verdict")
    for row in lines:
        shown.add_row(*map(str, row), "ok" if row.ok else "[bold red]BROKEN[/]")
    total = [sum(int(row[at]) for row in lines) for at in range(1, 7)]
    shown.add_section()
    shown.add_row("all", *map(str, total), "ok" if all(row.ok for row in lines) else "[bold red]BROKEN[/]")
    return shown


def show(console: Console, title: str, cases: Iterable[Case]) -> None:
    """Print the table and what is broken, case by case."""
    known = list(cases)
    console.print(table(title, rows(known)))
    for case in known:
        for fault in FAULTS:
            for text in getattr(case, fault):
                console.print(f"{case.name}: {fault.replace('_', ' ')}: {text}", markup=False, highlight=False)
