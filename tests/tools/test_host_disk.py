"""The host's disk is full, read-only or in the way: a clear refusal, nothing half-written, and nothing begun twice."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.errors import CommandFailed, HostError
from tests.disks import Disk, disk
from tests.local_host import LocalHost
from tests.ssh_servers import free_port
from tools import jobs, lease
from tools.benches import builtin
from tools.facts import FolderFact, ask
from tools.lease import FencedHost
from tools.remote import RemoteSettings, RemoteTarget
from tools.restore import Restore
from tools.servers.base import HttpRequest
from tools.servers.llamacpp import LlamaCpp
from tools.services.base import StopJobs

pytestmark = pytest.mark.anyio

HOST = LocalHost()
COUNT = "echo once >>{0}/count\nexec sleep 0.1\n"

SETTINGS = RemoteSettings(
    name="t",
    directory="",
    python=sys.executable,
    url="http://127.0.0.1:1",
    port=1,
    model=None,
    start_deadline_s=1,
    stop_grace_s=1,
    lease_s=60,
    pid=None,
    api_key_file=None,
)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "small", 16 << 10) as one:
        yield one


async def ended(root: str, key: str) -> jobs.JobState:
    for _ in range(200):
        state = await jobs.look(HOST, root, key)
        if state.over:
            return state
        await HOST.check("sleep 0.05")
    raise AssertionError("the job does not end")


def no_scraps(folder: Path) -> bool:
    return [str(one) for one in folder.rglob("*.part")] == []


async def test_a_file_that_does_not_fit_leaves_the_old_one(small: Disk) -> None:
    path = small.path / "restore.sh"
    await HOST.put(str(path), b"old\n")
    small.fill(64)
    with pytest.raises(CommandFailed, match="could not be written on the host") as refused:
        await HOST.put(str(path), b"x" * (256 << 10))
    assert "No space left on device" in refused.value.tail
    assert "disk is not full" in refused.value.do
    assert path.read_bytes() == b"old\n"
    assert no_scraps(small.path)


async def test_a_folder_that_is_read_only_or_a_file_is_named(small: Disk) -> None:
    (small.path / "file").write_text("mine")
    with pytest.raises(CommandFailed) as refused:
        await jobs.start(HOST, f"{small.path}/file", "k", "exit 0\n")
    assert "File exists" in refused.value.tail or "Not a directory" in refused.value.tail
    small.read_only()
    with pytest.raises(CommandFailed) as refused:
        await jobs.start(HOST, str(small.path), "k", "exit 0\n")
    assert "Read-only file system" in refused.value.tail
    with pytest.raises(CommandFailed) as refused:
        await lease.take(HOST, str(small.path), "one", 60)
    assert "Read-only file system" in refused.value.tail


@pytest.mark.parametrize("spare_kb", [0, 4, 8, 12, 16, 20, 24])
async def test_a_job_that_a_full_disk_kept_from_beginning_begins_once_when_there_is_space(
    small: Disk, tmp_path: Path, spare_kb: int
) -> None:
    """With some pages left it fails at other steps; wherever that is, it has not begun, or it has once."""
    root = str(small.path / "ratchet")
    Path(root).mkdir()
    small.fill(spare_kb)
    script = COUNT.format(tmp_path)
    try:
        await jobs.start(HOST, root, "k", script)
    except CommandFailed as refused:
        assert refused.what == "a job could not be started"
        assert not (tmp_path / "count").exists()
        assert (await jobs.look(HOST, root, "k")).phase in ("absent", "prepared")
    small.grow()
    await jobs.start(HOST, root, "k", script)
    await ended(root, "k")
    assert (tmp_path / "count").read_text() == "once\n"
    assert not list(Path(root).rglob("run.sh.*.part"))


async def test_a_prepared_job_can_begin_on_a_disk_that_is_full_by_then(small: Disk, tmp_path: Path) -> None:
    root, script = str(small.path / "ratchet"), COUNT.format(tmp_path)
    await jobs.prepare(HOST, root, "k", script)
    assert (await jobs.look(HOST, root, "k")).phase == "prepared"
    small.fill()
    await jobs.start(HOST, root, "k", script)
    assert (await ended(root, "k")).exit == 0
    assert (tmp_path / "count").read_text() == "once\n"


async def test_what_cannot_be_prepared_says_so_before_anything_is_stopped(small: Disk) -> None:
    small.fill(32)
    with pytest.raises(CommandFailed, match="nothing was stopped for it") as refused:
        await jobs.prepare(HOST, str(small.path), "k", "exit 0\n")
    assert "No space left on device" in refused.value.tail
    assert no_scraps(small.path)


async def test_a_benchmark_request_is_whole_or_the_client_is_not_started(small: Disk, tmp_path: Path) -> None:
    asked = {"run_id": "k", "much": "x" * (48 << 10)}
    script = builtin.script("/bin/sh", str(tmp_path / "client.sh"), asked)
    (tmp_path / "client.sh").write_text(f"echo started >>{tmp_path}/started\n")
    folder = small.path / "job"
    folder.mkdir()
    small.fill(16)
    done = await HOST.run(f"cd {folder}\n{script}")
    assert not done.ok
    assert not (folder / "request.json").exists()
    assert not (tmp_path / "started").exists()


async def test_a_full_disk_does_not_silence_the_agent_and_does_not_keep_the_watcher_from_restoring(
    small: Disk,
) -> None:
    root = str(small.path / "ratchet")
    held = await lease.take(HOST, root, "one", 60)
    fenced = FencedHost(HOST, held)
    restored = small.path / "restored"
    launch = f"head -c 1048576 /dev/zero >{restored} && echo restored\n"
    await lease.watch(fenced, launch)
    small.fill()
    assert await lease.renew(fenced)
    with pytest.raises(CommandFailed):
        await lease.watch(fenced, launch + "# another\n" * 1000)
    assert (Path(root) / "lease" / "restore.sh").read_text() == launch
    await lease.hand_over(fenced)
    await ended(root, held.watcher_key)
    seen = await lease.marker(HOST, root)
    assert seen is not None and seen.result == "restored"
    assert restored.stat().st_size == 1 << 20


async def test_without_room_for_its_ballast_no_watcher_is_promised(small: Disk) -> None:
    root = str(small.path / "ratchet")
    fenced = FencedHost(HOST, await lease.take(HOST, root, "one", 60))
    small.fill(1024)
    with pytest.raises(CommandFailed) as refused:
        await lease.watch(fenced, "exit 0\n")
    assert "No space left on device" in refused.value.tail
    assert no_scraps(small.path)


async def test_a_restore_without_room_for_its_launch_stops_nothing(small: Disk, tmp_path: Path) -> None:
    root, port = str(small.path / "ratchet"), free_port()
    url = f"http://127.0.0.1:{port}/v1/completions"
    restore = Restore(
        root=root,
        port=port,
        key="s-Tw1",
        fingerprint="f",
        adopted=None,
        adopted_is_good=False,
        launch_script=COUNT.format(tmp_path),
        operations=(StopJobs(root=root, shape="*-T*", but="s-Tw1", grace_s=1),),
        python=sys.executable,
        generate=HttpRequest(id="generate", method="POST", url=url, timeout_s=1),
        deadline_s=1,
    )
    await jobs.start(HOST, root, "s-T1", "exec sleep 60\n")
    small.fill(32)
    assert (await HOST.run(restore.render())).exit == 1
    assert (await jobs.look(HOST, root, "s-T1")).phase == "running"
    assert not (tmp_path / "count").exists()
    small.grow()
    await HOST.run(restore.render())  # nothing listens on the port, so it is not proven; but it was begun
    assert (await jobs.look(HOST, root, "s-T1")).over
    assert (tmp_path / "count").read_text() == "once\n"


@pytest.mark.parametrize(("name", "spoilt"), [("hash.key", b""), ("hash.key", b"zz"), ("secrets.json", b"{")])
async def test_a_file_of_ours_that_a_power_cut_spoilt_is_named(tmp_path: Path, name: str, spoilt: bytes) -> None:
    target = RemoteTarget(HOST, LlamaCpp(), SETTINGS.model_copy(update={"directory": str(tmp_path / "ratchet")}))
    await target.prepare()
    assert (tmp_path / "ratchet" / "hash.key").exists()
    (tmp_path / "ratchet" / name).write_bytes(spoilt)
    with pytest.raises(HostError, match=f"our file {name} on the host is damaged") as refused:
        await target.prepare()
    assert refused.value.where["path"] == str(tmp_path / "ratchet" / name) and refused.value.do
    assert (tmp_path / "ratchet" / name).read_bytes() == spoilt


async def test_a_folder_tells_whose_it_is_and_what_stands_in_the_way(small: Disk) -> None:
    async def obstacle(path: Path) -> str | None:
        return (await ask(HOST, FolderFact(str(path), sys.executable))).obstacle

    ours, absent, file = small.path / "ours", small.path / "a" / "b", small.path / "file"
    ours.mkdir()
    file.write_text("mine")
    assert await obstacle(ours) is None
    assert await obstacle(absent) is None
    assert "is no folder" in str(await obstacle(file))
    assert "is no folder" in str(await obstacle(file / "below"))
    os.chown(ours, 65534, 65534)
    assert "belongs to the user with the number 65534" in str(await obstacle(ours))
    small.fill(100)
    assert (await ask(HOST, FolderFact(str(absent), sys.executable))).free_mb < 1
    small.read_only()
    assert "cannot be written" in str(await obstacle(absent))
