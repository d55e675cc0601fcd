"""The file behind a store: made whole or not at all, refused when it is not ours, its errors told; it reads no session.

Each of SQLite's errors becomes one of the StoreError family, with the file, the free space and what a person can do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

from sqlite_utils import Database

from state.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreNewer,
    StoreUnwritable,
    TargetLocked,
)
from state.migrations import APPLICATION_ID, migrations

PATIENCE_S = 20.0
"""How long a statement waits for a lock. The lease is not renewed meanwhile, so it must stay far below its length."""
HARDLY_FREE_MB = 1.0
"""Below this an input/output error is a full disk: SQLite cannot always tell them apart."""
ANEW = "to tune on, `start` with another --db once known-good serves, which the host's watcher sees to"


class WriterLock:
    """The writer's hold on a database, and beside it the number of the last event that was committed.

    The number shows later that committed events are missing: a -wal file that was removed, an older copy put back.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.last_event = 0
        if (found := re.search(r"^last event (\d+)", self.text(), re.MULTILINE)) is not None:
            self.last_event = int(found[1])
        self.since = time.strftime("%F %T")

    def text(self) -> str:
        """What the file says."""
        return os.pread(self.handle, 200, 0).decode(errors="replace")

    def sign(self) -> None:
        """Say who holds it. In place and of one length, so that a disk that is full later is no matter."""
        line = f"process {os.getpid()} since {self.since}".ljust(60)
        os.pwrite(self.handle, f"{line}\nlast event {self.last_event:015d}\n".encode(), 0)

    def begin_anew(self) -> None:
        """The database is a new one, whatever lay here before."""
        self.last_event = 0
        self.sign()

    def note(self, event: int) -> None:
        """An event was committed. A note that is lost makes later checks weaker, not wrong."""
        self.last_event = max(self.last_event, event)
        with suppress(OSError):
            self.sign()


@contextmanager
def writer_lock(path: Path) -> Iterator[WriterLock]:
    """Hold the database for one agent. The lock dies with the process, so a SIGKILL never leaves it behind."""
    with story(path):
        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock = WriterLock(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = lock.text().partition("\n")[0].strip()
            raise TargetLocked(
                f"another agent is writing to {path}",
                where={"held by": holder or "unknown"},
                do="wait for it, or end it with `stop`",
            ) from error
        with story(path):
            lock.sign()
        yield lock
    finally:
        os.close(handle)


def connect(path: Path, mode: Literal["ro", "rw"], patience_s: float) -> Database:
    """Open a database that is there; never makes one."""
    uri = path.absolute().as_uri()
    if mode == "rw":
        db = Database(sqlite3.connect(f"{uri}?mode=rw", uri=True, isolation_level=None, timeout=patience_s))
        found = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if found != "wal":
            db.close()
            raise StoreUnwritable(
                f"{path} cannot be written with a write-ahead log",
                where=_place(path),
                do="put it on a local file system with --db",
            )
        return db
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=patience_s)
    try:
        connection.execute("PRAGMA application_id")
    except sqlite3.OperationalError:
        # In a read-only folder SQLite cannot make its lock file, and needs none where nothing is left in a log.
        connection.close()
        if os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
            raise
        connection = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
    return Database(connection)


def create(path: Path) -> None:
    """Make an empty database of ours under another name, then put it in place: a half-made one is never met."""
    new = path.with_name(f"{path.name}.new")
    for left in (new, new.with_name(f"{new.name}-journal")):
        left.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            migrations.apply(Database(connection))
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def migrate(db: Database, path: Path) -> None:
    """Bring an older schema forward, each step whole or not at all, after a copy of all of it was made."""
    pending = migrations.pending(db)
    if not pending:
        return
    copy = path.with_name(f"{path.name}.before-{pending[0].name}")
    part = copy.with_name(f"{copy.name}.part")
    try:
        part.unlink(missing_ok=True)
        with closing(sqlite3.connect(part)) as connection:
            db.conn.backup(connection)
        part.replace(copy)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    migrations.apply(db)


def prove_writable(db: Database, path: Path) -> None:
    """Commit something that changes nothing: who could not write anyway shall learn it before a host is touched."""
    if _free_mb(path) < HARDLY_FREE_MB:
        raise _full(path, "hardly anything is free")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    db.execute(f"PRAGMA user_version = {version:d}")


def refuse_foreign(path: Path, patience_s: float) -> None:
    """An empty file, another program's file, damage or a newer schema is refused rather than written over."""
    with closing(connect(path, "ro", patience_s).conn) as connection:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION_ID:
            raise StoreDamaged(
                f"{path} is not a Ratchet database (it is empty, foreign or damaged)",
                where=_place(path),
                do="move it away, or name another database with --db",
            )
        check = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if check != "ok":
            raise damaged(path, check)
        known = {migration.name for migration in migrations._migrations}
        applied = {row[0] for row in connection.execute("SELECT name FROM _sqlite_migrations")}
        if newer := sorted(applied - known):
            raise StoreNewer(
                f"{path} was written by a newer version of Ratchet ({', '.join(newer)})",
                do="update this program; the database was not changed",
            )


def refuse_missing_events(db: Database, path: Path, last_event: int) -> None:
    """Going on without events that were committed could do again on the host what was done already."""
    there = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]
    if there < last_event:
        raise StoreDamaged(
            f"{path} lacks the events {there + 1} to {last_event}: its -wal file was removed, or it is an older copy",
            where={"events there": there, "events written": last_event},
            do=f"put the newest {path.name} back together with its {path.name}-wal; without them: {ANEW}",
        )


def damaged(path: Path, what: str) -> StoreDamaged:
    """The story of a file that SQLite or we cannot read."""
    return StoreDamaged(
        f"{path} is damaged or not a database: {what}",
        where=_place(path),
        do=f"`replay` and `report` can read a backup of it; {ANEW}",
    )


@contextmanager
def story(path: Path) -> Iterator[None]:
    """Turn SQLite's and the system's errors into ours, with the file and the advice."""
    try:
        yield
    except sqlite3.Error as error:
        raise _told(path, error) from error
    except OSError as error:
        what = f"{os.strerror(error.errno)}: {error.filename or path}" if error.errno else str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(path, what) from error
        raise _unwritable(path, what) from error


def _told(path: Path, error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    match code:
        case sqlite3.SQLITE_FULL:
            return _full(path, str(error))
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN if _free_mb(path) < HARDLY_FREE_MB:
            return _full(path, str(error))
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return _unwritable(path, str(error))
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED | sqlite3.SQLITE_PROTOCOL:
            return StoreBusy(
                f"{path} is locked by another program: {error}",
                where={"locked by": ", ".join(_holders(path)) or "unknown"},
                do="close what has it open for writing (sqlite3, a database browser, a backup), then `resume`",
            )
        case sqlite3.SQLITE_CONSTRAINT:
            return StoreError(
                f"{path} refused what contradicts it: {error}",
                do="this is a defect of Ratchet; please report it. Nothing of it was written",
            )
    return damaged(path, str(error))


def _full(path: Path, what: str) -> StoreFull:
    return StoreFull(
        f"no space is left for {path}: {what}",
        where=_place(path),
        do="free some space there, then `resume` (or `start`); what was committed is safe",
    )


def _unwritable(path: Path, what: str) -> StoreUnwritable:
    return StoreUnwritable(
        f"{path} cannot be used: {what}",
        where=_place(path),
        do="see that its folder is there, writable for this user and on a disk without errors (dmesg), "
        "or name another place with --db; then `resume` (or `start`)",
    )


def _place(path: Path) -> dict[str, str]:
    return {"folder": str(path.parent), "free": f"{_free_mb(path):.1f} MiB"}


def _free_mb(path: Path) -> float:
    """Free space where the file lies or would lie."""
    for folder in (path.absolute(), *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free / 2**20
    return 0.0


def _holders(path: Path) -> list[str]:
    """Processes other than this one with a lock on the database's files, as /proc/locks tells."""
    inodes = set()
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        with suppress(OSError):
            inodes.add(str(path.with_name(name).stat().st_ino))
    with suppress(OSError):
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        found = {row[4] for row in rows if len(row) > 5 and row[5].rpartition(":")[2] in inodes}
        return [f"process {pid}" for pid in sorted(found - {str(os.getpid())}, key=int)]
    return []
