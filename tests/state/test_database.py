"""What happens to a database on a full, read-only or locked disk, and when it is damaged, older, newer or cut short.

The disks are real: small tmpfs mounts. What was committed must stay, and nothing may be done that was not intended.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlite_utils import Database

from state import events as ev
from state.errors import (
    ConfigError,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreNewer,
    StoreUnwritable,
)
from state.journal import Journal
from state.migrations import migrations
from state.store import Store
from tests.disks import Disk, disk
from tests.state.test_journal import World
from tests.state.test_store import dump, fill, opened


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "small", 2048) as one:
        yield one


def a_store(folder: Path) -> Path:
    with Store.write(folder / "state.db") as store:
        fill(store)
    return folder / "state.db"


def told(path: Path) -> list[object]:
    """All events, by SQLite alone."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT seq, kind, body FROM events ORDER BY seq").fetchall()
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    return [tuple(row) for row in rows]


def exhaust(store: Store) -> int:
    """Write until nothing goes in any more; how many notes did."""
    for count in range(10_000):
        try:
            store.append("s", ev.Noted(text="x" * 400))
        except StoreFull:
            return count
    raise AssertionError("the disk never filled up")


def says_what_to_do(error: StoreError, path: Path) -> None:
    assert str(path) in error.what
    assert error.do
    assert error.exit_code == 3


# --- a full disk ---


def test_a_full_disk_loses_nothing_that_was_committed_and_takes_more_once_there_is_space(small: Disk) -> None:
    path = small.path / "state.db"
    with Store.write(path) as store:
        fill(store)
        small.fill(64)
        written = exhaust(store)
        with pytest.raises(StoreFull) as refused:
            store.append("s", ev.Noted(text="x" * 8192))
        says_what_to_do(refused.value, path)
        assert "free" in refused.value.where
        assert store.session("s").target == "t"
        small.grow()
        store.append("s", ev.Noted(text="there is space"))
    rows = told(path)
    assert [row[0] for row in rows] == list(range(1, len(rows) + 1))  # type: ignore[index]
    assert sum("xxx" in str(row) for row in rows) == written
    assert "there is space" in str(rows[-1])


def test_a_full_disk_at_the_start_leaves_nothing_half_made(small: Disk) -> None:
    path = small.path / "state.db"
    (small.path / "other").write_bytes(b"x" * 4096)
    for spare_kb in (0, 4, 16, 48):
        small.fill(spare_kb)
        with pytest.raises(StoreFull) as refused, Store.write(path):
            pass
        says_what_to_do(refused.value, path)
        assert not path.exists()
        assert [one.name for one in small.path.iterdir() if one.name not in ("other", "state.lock")] == []
    small.grow()
    with Store.write(path) as store:
        fill(store)


def test_a_disk_that_was_full_when_the_agent_ended_opens_again(small: Disk) -> None:
    path = small.path / "state.db"
    with Store.write(path) as store:
        fill(store)
        small.fill(64)
        exhaust(store)
    with Store.read(path) as reader:
        assert reader.session("s").target == "t"
    small.grow()
    with Store.write(path) as store:
        store.append("s", ev.Noted(text="goes on"))


@pytest.mark.anyio
async def test_without_a_written_intent_nothing_is_done(small: Disk) -> None:
    world = World()
    with Store.write(small.path / "state.db") as store:
        store.append("s", opened())
        small.fill(16)
        exhaust(store)
        with pytest.raises(StoreFull):
            await Journal(store, "s").once("k", {"why": "x" * 4096}, world.act, world.observe)
        assert world.done == {}


@pytest.mark.anyio
async def test_an_outcome_that_could_not_be_written_is_observed_and_not_repeated(small: Disk) -> None:
    world = World()
    path = small.path / "state.db"

    async def act_as_the_disk_fills() -> dict[str, object]:
        done = await world.act()
        small.fill(16)
        exhaust(store)
        return {**done, "much": "x" * 4096}

    with Store.write(path) as store:
        store.append("s", opened())
        with pytest.raises(StoreFull):
            await Journal(store, "s").once("k", {}, act_as_the_disk_fills, world.observe)
    small.grow()
    with Store.write(path) as store:
        assert await Journal(store, "s").once("k", {}, world.act, world.observe) == {"pid": 7}
        assert store.db.execute("SELECT closed_by FROM effects").fetchone()[0] == "observe"
    assert world.done == {"x": 1}


def test_a_migration_without_room_for_its_copy_changes_nothing(small: Disk) -> None:
    path = older(small.path)
    with Store.write(small.path / "other.db"):
        pass
    before = path.read_bytes()
    small.fill(8)
    with pytest.raises(StoreFull), Store.write(path):
        pass
    assert path.read_bytes() == before
    assert [one.name for one in small.path.glob("*before*")] == []


# --- a folder that takes no writes ---


def test_a_read_only_folder_is_read_and_not_written(small: Disk) -> None:
    path = a_store(small.path)
    small.read_only()
    with pytest.raises(StoreUnwritable, match="Read-only file system") as refused, Store.write(path):
        pass
    says_what_to_do(refused.value, path)
    with Store.read(path) as store:
        assert store.session("s").target == "t"
    with pytest.raises(StoreUnwritable), Store.write(small.path / "new" / "state.db"):
        pass


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreUnwritable, match="file") as refused, Store.write(tmp_path / "file" / "state.db"):
        pass
    assert refused.value.do
    (tmp_path / "folder" / "state.db").mkdir(parents=True)
    with pytest.raises(StoreUnwritable), Store.write(tmp_path / "folder" / "state.db"):
        pass


def _open_as_nobody(folder: str, answers: multiprocessing.Queue[str]) -> None:
    os.chdir(folder)  # by a relative path, since nobody may not look into what lies above
    os.setuid(65534)
    try:
        with Store.write(Path("state.db")):
            answers.put("opened")
    except StoreError as error:
        answers.put(f"{type(error).__name__}: {error}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_somebody_elses_folder_is_said_to_be_that(tmp_path: Path) -> None:
    a_store(tmp_path)
    tmp_path.chmod(0o755)
    processes = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[str] = processes.Queue()
    asking = processes.Process(target=_open_as_nobody, args=(str(tmp_path), answers))
    asking.start()
    said = answers.get(timeout=60)
    asking.join()
    assert said.startswith("StoreUnwritable: ") and "Permission denied" in said


# --- others who have it open ---


def test_a_reader_in_a_long_transaction_holds_nobody_up(tmp_path: Path) -> None:
    path = a_store(tmp_path)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    before = reader.execute("SELECT count(*) FROM events").fetchone()
    with Store.write(path, patience_s=0.1) as store:
        store.append("s", ev.Noted(text="meanwhile"))
        assert reader.execute("SELECT count(*) FROM events").fetchone() == before
    reader.close()
    assert "meanwhile" in str(told(path)[-1])


def _lock(path: str, ready: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    Path(ready).touch()
    signal.pause()


def test_another_writer_is_waited_for_then_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path, ready = a_store(tmp_path), tmp_path / "ready"
    holder = multiprocessing.get_context("spawn").Process(target=_lock, args=(str(path), str(ready)))
    with Store.write(path, patience_s=0.2) as store:
        holder.start()
        while not ready.exists():
            holder.join(0.02)
        with pytest.raises(StoreBusy, match="locked by another program") as refused:
            store.append("s", ev.Noted(text="refused"))
        says_what_to_do(refused.value, path)
        assert refused.value.where["locked by"] == f"process {holder.pid}"
        with Store.read(path) as reader:
            assert reader.session("s").target == "t"
        holder.kill()
        holder.join()
        store.append("s", ev.Noted(text="taken"))
    assert "refused" not in str(told(path)[-2]) and "taken" in str(told(path)[-1])


def test_a_database_that_is_locked_at_the_start_is_left_alone(tmp_path: Path) -> None:
    path = a_store(tmp_path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    for opening in (Store.write(path, patience_s=0.1), Store.read(path, patience_s=0.1)):
        with pytest.raises(StoreBusy), opening:
            pass
    other.close()
    with Store.write(path) as store:
        assert store.session("s").target == "t"


# --- files that are not what they should be ---


def older(folder: Path) -> Path:
    """A database of the first schema, with its last events only in the log, as a killed agent leaves it."""
    source, path = folder / "source.db", folder / "state.db"
    connection = sqlite3.connect(source, isolation_level=None)
    migrations.apply(Database(connection), stop_before="m002_views")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    store = Store(Database(connection), source, lambda: 1.0)
    fill(store)
    for suffix in ("", "-wal"):
        shutil.copy(f"{source}{suffix}", f"{path}{suffix}")
    connection.close()
    source.unlink()
    return path


def test_an_older_schema_is_copied_with_its_log_and_brought_forward(tmp_path: Path) -> None:
    path = older(tmp_path)
    with Store.write(path) as store:
        assert store.session("s").target == "t"
        assert store.timeline("s")
        events = dump(store.db, "events")
    (copy,) = tmp_path.glob("state.db.before-*")
    assert copy.name == "state.db.before-m002_views"
    connection = sqlite3.connect(f"{copy.as_uri()}?mode=ro&immutable=1", uri=True)
    assert sorted(connection.execute("SELECT * FROM events").fetchall(), key=str) == events
    assert connection.execute("SELECT name FROM sqlite_master WHERE type = 'view'").fetchall() == []
    connection.close()


def _files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.name.startswith("state.db")}


def a_newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('ratchet', 'm999_ahead', '')"
        )
    connection.close()


def a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xa5" * 4096)


def a_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 100)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def nothing(path: Path) -> None:
    os.truncate(path, 0)


def text(path: Path) -> None:
    path.write_text("a letter\n" * 1000)


def somebody_elses(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("PRAGMA application_id = 77")
        connection.execute("CREATE TABLE theirs (n)")
    connection.close()


@pytest.mark.parametrize("spoil", [a_page, a_header, half, nothing, text, somebody_elses, a_newer])
def test_what_is_not_ours_or_not_whole_is_refused_and_left_as_it_is(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    path = a_store(tmp_path)
    spoil(path)
    before = _files(tmp_path)
    kind = StoreNewer if spoil is a_newer else StoreDamaged
    for opening in (Store.write(path), Store.read(path)):
        with pytest.raises(kind) as refused, opening:
            pass
        says_what_to_do(refused.value, path)
    after = _files(tmp_path)
    assert after["state.db"] == before["state.db"]
    assert {name for name in after if name not in ("state.db-shm", "state.db-wal")} == set(before)


def test_damage_that_only_we_can_see_is_damage_too(tmp_path: Path) -> None:
    path = a_store(tmp_path)
    content = path.read_bytes()
    assert b'"hypothesis":"h"' in content
    path.write_bytes(content.replace(b'"hypothesis":"h"', b'"hypothesis":"h\\'))
    with Store.read(path) as store, pytest.raises(StoreDamaged, match="a row cannot be read"):
        store.todos("s")


def test_damage_that_comes_while_it_is_open_ends_in_our_words(tmp_path: Path) -> None:
    path = a_store(tmp_path)
    with Store.write(path) as store:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"\xa5" * (size - 100))
        with pytest.raises(StoreDamaged):
            for _ in range(100):
                store.append("s", ev.Noted(text="x" * 4096))
                store.sessions()


def _write_and_wait(path: str, ready: str) -> None:
    with Store.write(Path(path)) as store:
        fill(store)
        Path(ready).touch()
        signal.pause()


def test_a_log_removed_after_a_crash_is_noticed_and_a_resume_refused(tmp_path: Path) -> None:
    path, ready = tmp_path / "state.db", tmp_path / "ready"
    agent = multiprocessing.get_context("spawn").Process(target=_write_and_wait, args=(str(path), str(ready)))
    agent.start()
    while not ready.exists():
        agent.join(0.02)
    agent.kill()
    agent.join()
    log = path.with_name("state.db-wal")
    kept = log.read_bytes()
    log.unlink()
    main = path.read_bytes()
    with pytest.raises(StoreDamaged, match="lacks the events 1 to") as refused, Store.write(path):
        pass
    says_what_to_do(refused.value, path)
    assert path.read_bytes() == main
    path.with_name("state.db-shm").unlink(missing_ok=True)
    log.write_bytes(kept)
    with Store.write(path) as store:
        assert store.session("s").target == "t"
        store.append("s", ev.Noted(text="goes on"))


def test_an_older_copy_put_back_is_read_but_not_gone_on_from(tmp_path: Path) -> None:
    path = a_store(tmp_path)
    copy = path.read_bytes()
    with Store.write(path) as store:
        store.append("s", ev.Noted(text="later"))
    path.write_bytes(copy)
    with pytest.raises(StoreDamaged, match="or it is an older copy"), Store.write(path):
        pass
    with Store.read(path) as reader:
        assert reader.session("s").target == "t"


def test_a_database_that_was_moved_away_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = a_store(tmp_path)
    path.rename(tmp_path / "old.db")
    for _ in range(2):
        with Store.write(path) as store:
            assert store.sessions() == []
    with Store.read(tmp_path / "old.db") as store:
        assert store.session("s").target == "t"


def test_an_agent_that_died_while_it_made_the_database_left_nothing_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "state.db.new").write_bytes(b"half")
    with Store.write(tmp_path / "state.db") as store:
        fill(store)
    assert not (tmp_path / "state.db.new").exists()


def test_a_name_with_odd_characters_is_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "50%? #1"
    folder.mkdir()
    path = a_store(folder)
    with Store.read(path) as store:
        assert store.session("s").target == "t"
    with pytest.raises(ConfigError), Store.read(folder / "none.db"):
        pass
    assert list(tmp_path.iterdir()) == [folder]
