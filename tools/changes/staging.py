"""Everything that a configuration needs beside its command line, made ready while the old server serves.

It writes to our own folder only, and asks; nothing is brought into effect here. What cannot be had is refused with the
reason, before any server is stopped.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from state.errors import CommandFailed, PolicyRefused
from state.models import Beside, CommandChange, HotCall, LaunchSpec, PatchChange
from tools import jobs
from tools.changes import command, hot, patch, record
from tools.changes.base import Aside, Overlay, Planned, aside_dir, overlays, planned
from tools.changes.hot_probe import Untold, alike, shown
from tools.changes.overlay import making_sh, overlay_digest, overlay_dir
from tools.changes.settle import OFF, Seen
from tools.servers import probe
from tools.servers.base import HotSetting, ServerAdapter
from tools.shell import CHUNK_BYTES, Host

MAKING_S = 3600.0
"""How long pip or git may take; a mirror that is far away is slow, one that hangs is of no use."""
POLL_S = 0.5
TRIES = 3
"""A job that a boot of the host ended is begun again."""


class Ground(NamedTuple):
    """What staging has to know of the target."""

    host: Host
    root: str
    session_id: str
    login: str
    python: str
    adapter: ServerAdapter
    url: str
    api_key_file: str | None
    environ: Mapping[str, str]
    """Of the server, in clear."""
    in_container: bool


class Current(NamedTuple):
    """A file as it is without any patch of ours, and something on the host with its time of change."""

    text: bytes
    like: str


async def make_ready(ground: Ground, spec: LaunchSpec) -> None:
    """Put all asides and overlays of a spec on the host. Raises PolicyRefused."""
    _refuse_strange_ground(ground, spec)
    begun = {seen.digest: seen for seen in await record.look(ground.host, ground.root)}
    for overlay in overlays(spec.beside):
        await _make_overlay(ground, spec, overlay)
    for plan in planned(spec):
        if plan.digest in begun:
            continue  # it may be in effect, so its record is the only way back
        aside, like = await _aside(ground, plan, begun)
        await record.write(ground.host, ground.root, aside, plan.changes, like)


def _refuse_strange_ground(ground: Ground, spec: LaunchSpec) -> None:
    """A container has its own files, and a server of another user cannot read our folder."""
    for change in spec.beside:
        if ground.in_container and not isinstance(change, HotCall | CommandChange):
            raise refused(change, ground, "the server runs in a container, which has files of its own")
        if isinstance(change, Overlay) and spec.user not in (ground.login, "root"):
            raise refused(change, ground, f"the server runs as {spec.user}, which cannot read the folder of our login")


def refused(change: Beside, ground: Ground, reason: str, tail: str = "") -> PolicyRefused:
    """The error for one change; the server that serves was not touched."""
    return PolicyRefused(
        f"{change} cannot be used: {reason}",
        where={"host": ground.host.name, "kind": change.kind},
        tail=tail,
        do="correct the change in the session file; the server was not touched",
    )


async def _aside(ground: Ground, plan: Planned, begun: Mapping[str, Seen]) -> tuple[Aside, dict[str, str]]:
    first = plan.changes[0]
    if isinstance(first, CommandChange):
        return await _command(ground, plan, first), {}
    if isinstance(first, HotCall):
        return await _hot(ground, plan, first, begun), {}
    return await _patches(ground, plan, [one for one in plan.changes if isinstance(one, PatchChange)], begun)


# --- commands and live settings ----------------------------------------------------------------------------


async def _command(ground: Ground, plan: Planned, change: CommandChange) -> Aside:
    """A command that is in effect already was somebody else's: to undo it later would take theirs away."""
    told = await ground.host.run(command.probe_sh(change), timeout_s=60)
    if told.ok:
        raise refused(change, ground, "its probe says that it is in effect already")
    if told.exit != OFF:
        raise refused(change, ground, "its probe cannot be run", told.tail)
    return command.aside(plan, change)


async def _hot(ground: Ground, plan: Planned, change: HotCall, begun: Mapping[str, Seen]) -> Aside:
    make, unmake = (
        ground.adapter.hot_setting(ground.url, change.name, value, ground.api_key_file)
        for value in (change.value, change.undo)
    )
    if make is None or unmake is None:
        raise refused(change, ground, "the server has no such live setting")
    now = await _shown(ground, change, make)
    ours = [one for seen in begun.values() for one in seen.changes if isinstance(one, HotCall)]
    known = [change.undo, *(one.value for one in ours if one.name == change.name)]
    if now is not None and not any(alike(now, value) for value in known):
        raise refused(change, ground, f"it is {now} now, and undo would make it {change.undo}")
    return hot.aside(ground.root, plan, change, make, unmake, ground.python)


async def _shown(ground: Ground, change: HotCall, setting: HotSetting) -> str | None:
    """The value as it is now, None when no server runs. What cannot be read back cannot be proven either."""
    answers = await probe.http(ground.host, ground.python, setting.reads)
    try:
        return shown([answer.model_dump() for answer in answers], list(setting.where))
    except Untold as untold:
        raise refused(change, ground, "its value cannot be read back", str(untold)) from untold


# --- patches -----------------------------------------------------------------------------------------------


async def _patches(
    ground: Ground, plan: Planned, changes: Sequence[PatchChange], begun: Mapping[str, Seen]
) -> tuple[Aside, dict[str, str]]:
    first = changes[0]
    await _check_places(ground, changes)
    patched_now = await _patched_now(ground, begun)
    try:
        paths = patch.paths_of(changes)
    except ValueError as error:
        raise refused(first, ground, str(error)) from error
    before = {path: await _current(ground, first, path, patched_now) for path in paths}
    try:
        after = patch.all_patched(changes, {path: now.text for path, now in before.items()})
    except ValueError as error:
        raise refused(first, ground, f"it does not fit: {error}") from error
    aside = patch.aside(ground.root, plan, {path: now.text for path, now in before.items()}, after)
    return aside, {f"{number}.before": before[path].like for number, path in enumerate(after)}


async def _check_places(ground: Ground, changes: Sequence[PatchChange]) -> None:
    for change in changes:
        try:
            paths = patch.paths_of([change])
        except ValueError as error:
            raise refused(change, ground, str(error)) from error
        checks = [patch.check_sh(change, path) for path in paths]
        checks += [patch.check_folder_sh(folder) for folder in change.clear]
        for check in checks:
            told = await ground.host.run(check, timeout_s=60)
            if not told.ok:
                raise refused(change, ground, told.tail or f"it cannot be checked: {told.ending}")


async def _patched_now(ground: Ground, begun: Mapping[str, Seen]) -> dict[str, str]:
    """Files that are patched now or may be → the path of their original and patched bytes, without the ending."""
    found: dict[str, str] = {}
    for seen in begun.values():
        if isinstance(seen.changes[0], PatchChange):
            place = aside_dir(ground.root, seen.digest)
            for line in (await _read(ground, f"{place}/{patch.LIST}")).decode("utf-8", "surrogateescape").splitlines():
                number, _, path = line.partition(" ")
                found[path] = f"{place}/{number}"
    return found


async def _current(ground: Ground, change: PatchChange, path: str, patched_now: Mapping[str, str]) -> Current:
    text = await _read(ground, path)
    kept = patched_now.get(path)
    if kept is None:
        return Current(text, path)
    original = await _read(ground, f"{kept}.before")
    if text not in (original, await _read(ground, f"{kept}.after")):
        raise refused(change, ground, f"{path} was changed by somebody else while it was patched")
    return Current(original, f"{kept}.before")


async def _read(ground: Ground, path: str) -> bytes:
    parts: list[bytes] = []
    while not parts or len(parts[-1]) == CHUNK_BYTES:
        parts.append(await ground.host.get(path, offset=sum(map(len, parts))))
    return b"".join(parts)


# --- overlays ----------------------------------------------------------------------------------------------


async def _make_overlay(ground: Ground, spec: LaunchSpec, change: Overlay) -> None:
    """Begin the job that makes it, or find the one that does, and wait."""
    place = shlex.quote(overlay_dir(ground.root, change))
    await ground.host.check(f"umask 022 && mkdir -p {place}")
    await ground.host.put(f"{overlay_dir(ground.root, change)}/change.json", record.changes_json([change]))
    script = making_sh(ground.root, change, spec, ground.environ)
    for number in range(1, TRIES + 1):
        key = f"{ground.session_id}-stage-{overlay_digest(change)}-{number}"
        state = await _over(ground, key, script)
        if state.exit == 0:
            return
        if state.phase == "ended":
            raise refused(change, ground, "it could not be made", await _said(ground, key))
    raise refused(change, ground, "what makes it vanished each time it was begun", await _said(ground, key))


async def _over(ground: Ground, key: str, script: str) -> jobs.JobState:
    state = await jobs.start(ground.host, ground.root, key, script)
    waited = 0.0
    while not state.over:
        await asyncio.sleep(POLL_S)
        waited += POLL_S
        if waited > MAKING_S:
            return await jobs.stop(ground.host, ground.root, key)
        state = await jobs.look(ground.host, ground.root, key)
    return state


async def _said(ground: Ground, key: str) -> str:
    texts = []
    for name in ("stdout", "stderr"):
        try:
            texts.append(await jobs.tail(ground.host, ground.root, key, name, 12))
        except CommandFailed:
            continue
    return "\n".join(texts)
