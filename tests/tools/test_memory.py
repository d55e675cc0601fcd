"""Memory given back after a stop: real memory of this host, and a stand-in for a GPU's tool that reads a file."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import pytest

from tests.local_host import LocalHost
from tools.services.memory import NOTE_LEVEL_SH, AwaitMemory

pytestmark = pytest.mark.anyio

HELD_MB = 1500


@pytest.fixture
def host() -> LocalHost:
    return LocalHost()


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A folder with an nvidia-smi that prints the file beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "said").write_text("0, 100\n1, 100\n")
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {shlex.quote(str(folder / 'said'))}\n")
    tool.chmod(0o755)
    return folder


async def noted(host: LocalHost, root: Path, key: str, path: str = "") -> None:
    job = root / "jobs" / key
    job.mkdir(parents=True)
    await host.check(f"PATH={shlex.quote(path)}:$PATH RATCHET_JOB={shlex.quote(str(job))}\n{NOTE_LEVEL_SH}")


async def said(host: LocalHost, root: Path, path: str = "", within_s: float = 20) -> str:
    operation = AwaitMemory(root=str(root), but="s-T9", within_s=within_s)
    return (await host.check(f"PATH={shlex.quote(path)}:$PATH\n{operation.render()}")).text


async def test_what_was_never_noted_cannot_be_observed(host: LocalHost, tmp_path: Path) -> None:
    assert "cannot be observed" in await said(host, tmp_path)
    await noted(host, tmp_path, "s-T9")
    assert "cannot be observed" in await said(host, tmp_path)  # the launch that is about to begin knows nothing either


async def test_held_memory_of_the_host_is_waited_for_and_named(host: LocalHost, tmp_path: Path) -> None:
    await noted(host, tmp_path, "s-T1")
    assert await said(host, tmp_path) == ""
    holder = bytearray(HELD_MB << 20)
    holder[::4096] = b"x" * (len(holder) // 4096)
    told = await said(host, tmp_path, within_s=1)
    assert "MB of host memory" in told
    assert told.startswith("memory is not back to its level before")
    threading.Timer(1.0, holder.clear).start()
    assert await said(host, tmp_path, within_s=60) == ""


async def test_held_memory_of_a_gpu_is_named_with_its_number(host: LocalHost, tmp_path: Path, gpu: Path) -> None:
    await noted(host, tmp_path, "s-T1", str(gpu))
    assert await said(host, tmp_path, str(gpu)) == ""
    (gpu / "said").write_text("0, 150\n1, 9000\n")
    assert await said(host, tmp_path, str(gpu), 1) == "memory is not back to its level before: 8900 MB of GPU 1;\n"


async def test_a_gpu_that_no_longer_answers_is_not_taken_for_a_free_one(
    host: LocalHost, tmp_path: Path, gpu: Path
) -> None:
    await noted(host, tmp_path, "s-T1", str(gpu))
    (gpu / "said").write_text("")
    assert "GPU 0, which cannot be observed any more" in await said(host, tmp_path, str(gpu), 1)


async def test_the_newest_launch_is_the_one_that_was_stopped_last(host: LocalHost, tmp_path: Path, gpu: Path) -> None:
    (gpu / "said").write_text("0, 9000\n1, 100\n")
    await noted(host, tmp_path, "s-T1", str(gpu))
    (gpu / "said").write_text("0, 100\n1, 100\n")
    await noted(host, tmp_path, "s-T2", str(gpu))
    (gpu / "said").write_text("0, 9000\n1, 100\n")
    assert "8900 MB of GPU 0" in await said(host, tmp_path, str(gpu), 1)
