"""Asides as they lie on the host: written whole before anything is done, and read back; it brings none into effect."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from state.errors import CommandFailed
from state.models import Beside
from tools.changes.base import Aside, aside_dir
from tools.changes.settle import LookAsides, Seen, read_asides
from tools.shell import Host

LOOK_S = 600.0
"""Each probe has a limit of its own."""


async def look(host: Host, root: str, overlays: Sequence[str] = ()) -> tuple[Seen, ...]:
    """Every aside that may be in effect, and the named overlays."""
    told = await host.check(LookAsides(root=root, overlays=tuple(overlays)).render(), timeout_s=LOOK_S)
    try:
        return read_asides(told.text)
    except ValueError as error:
        raise CommandFailed(
            f"a record of a change on the host is damaged: {error}",
            where={"host": host.name, "records": f"{root}/asides, {root}/overlays"},
            do="put its change.json back from a backup; else take the change back by hand and remove its folder",
        ) from error


async def write(
    host: Host, root: str, aside: Aside, changes: Sequence[Beside], like: Mapping[str, str] | None = None
) -> None:
    """Put an aside on the host in one piece; one of the same name that may be in effect stays as it is.

    `like`: file of the aside → path on the host whose time of change it gets, after both were found equal.
    """
    place = aside_dir(root, aside.digest)
    part = f"{root}/asides/.{aside.digest}.part"
    await host.check(f"umask 077 && mkdir -p {shlex.quote(part)}")
    files = {
        **aside.files,
        "change.json": changes_json(changes),
        "title": aside.title.encode("utf-8", "surrogateescape") + b"\n",
        "when": f"{aside.when}\n".encode(),
    }
    for name, data in files.items():
        await host.put(f"{part}/{name}", data)
    timed = "".join(
        f'cmp -s {shlex.quote(path)} "$part"/{name} && touch -r {shlex.quote(path)} "$part"/{name} || exit 1\n'
        for name, path in (like or {}).items()
    )
    await host.check(f"""
a={shlex.quote(f"{root}/asides")} place={shlex.quote(place)} part={shlex.quote(part)}
{timed}last=0
for order in "$a"/*/order; do
  [ -e "$order" ] || continue
  number=$(cat "$order")
  [ "$number" -gt $last ] && last=$number
done
echo $((last + 1)) >"$part/order" || exit 1
sync "$part"/* "$part" 2>/dev/null || sync
if [ -e "$place/begun" ]; then rm -rf "$part"; exit 0; fi
rm -rf "$place" && mv "$part" "$place" && {{ sync "$a" 2>/dev/null || sync; }}
""")


def changes_json(changes: Sequence[Beside]) -> bytes:
    """Changes as a file of ours holds them."""
    return json.dumps([change.model_dump(mode="json") for change in changes]).encode()
