"""Room for a night: whether this machine and the host can take what a session writes; it looks, and writes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from state.errors import HostError, StoreFull, StoreUnwritable
from tools.target import Target

HERE_FREE_MB = 64.0
"""A night's database has a few MB; the rest is for its log, the report and a copy before a migration."""
HOST_FREE_MB = 256.0
"""64 for jobs and results, the rest for the logs of the servers that are launched, which are never cut."""


def refuse_no_room_here(database: Path) -> float:
    """Free MB where the database lies or will lie. Raises StoreFull, StoreUnwritable."""
    near = database.absolute().parent
    while not os.path.lexists(near):
        near = near.parent
    files = [near, *(one for one in (database, database.with_suffix(".lock")) if one.exists())]
    closed = [one for one in files if not os.access(one, os.W_OK)]
    if not near.is_dir() or closed:
        raise StoreUnwritable(
            f"the session's database cannot be written: {closed[0] if closed else near}",
            where={"database": database},
            do="make it writable for this user, or name another place with --db",
        )
    free_mb = shutil.disk_usage(near).free / 2**20
    if free_mb < HERE_FREE_MB:
        raise StoreFull(
            f"only {free_mb:.1f} MiB are free for the session's database, {HERE_FREE_MB:.0f} are needed",
            where={"database": database},
            do="free some space there, or name another place with --db",
        )
    return free_mb


async def refuse_no_room_there(target: Target) -> float:
    """Free MB where our folder on the host lies or will lie. Raises HostError."""
    room = await target.room()
    if room.obstacle is not None:
        raise HostError(
            f"our folder on the host cannot be used: {room.obstacle}",
            where={"host": target.name, "directory": room.path},
            do="clear the way, or name another folder as target.directory",
        )
    if room.free_mb < HOST_FREE_MB:
        raise HostError(
            f"only {room.free_mb:.1f} MiB are free on the host, {HOST_FREE_MB:.0f} are needed",
            where={"host": target.name, "directory": room.path},
            do="free some space there, or name a folder on another disk as target.directory",
        )
    return room.free_mb
