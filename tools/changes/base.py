"""What every change beside the command line comes down to: a folder on the host with three scripts; it runs nothing.

    ROOT/asides/DIGEST/   probe   0: in effect, 1: not at all, anything else: in part, or it cannot be told
                          do      brings it into effect     undo   takes it back; both may be repeated at any time
                          fits    fails when somebody else changed what it is about (not all kinds have one)
                          change.json, title, when, order   what it is, and the place in which it is taken back
                          begun   there from before the first `do` until `undo` is known to be complete

Everything is there before anything is done, so that whoever comes next can finish it or take it back.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from state.models import Beside, CheckoutChange, CommandChange, HotCall, LaunchSpec, PackageChange, PatchChange, digest

When = Literal["stopped", "live", "hot"]
"""Brought into effect while no server runs, while one serves, or (hot) as a part of that very process."""

Overlay = PackageChange | CheckoutChange


class Planned(NamedTuple):
    """One aside that a spec wants: patches are a single one, so that files always change from their original."""

    digest: str
    when: When
    changes: tuple[Beside, ...]


class Aside(NamedTuple):
    """What is written to the host for one, by file name; `probe`, `do` and `undo` are among them."""

    digest: str
    when: When
    title: str
    files: dict[str, bytes]


def planned(spec: LaunchSpec) -> tuple[Planned, ...]:
    """The asides of a spec in the order in which they are brought into effect."""
    patches = tuple(change for change in spec.beside if isinstance(change, PatchChange))
    commands = [change for change in spec.beside if isinstance(change, CommandChange)]
    calls = [change for change in spec.beside if isinstance(change, HotCall)]
    found = [_planned("stopped", patches)] if patches else []
    found += [_planned("stopped", (change,)) for change in commands if change.restart]
    found += [_planned("live", (change,)) for change in commands if not change.restart]
    return (*found, *(_planned("hot", (change,)) for change in calls))


def _planned(when: When, changes: tuple[Beside, ...]) -> Planned:
    return Planned(digest([change.model_dump(mode="json") for change in changes]), when, changes)


def overlays(beside: tuple[Beside, ...]) -> tuple[Overlay, ...]:
    """The changes that are folders in front of the server's own packages."""
    return tuple(change for change in beside if isinstance(change, Overlay))


def aside_dir(root: str, name: str) -> str:
    """Where an aside lies on the host."""
    return f"{root}/asides/{name}"
