"""Small disks that fill up and turn read-only: real tmpfs mounts, which only root can make."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A tmpfs; its size is a limit, not memory that is taken."""

    def __init__(self, path: Path, size_kb: int) -> None:
        self.path = path
        self.size_kb = size_kb

    def fill(self, spare_kb: int = 0) -> None:
        """Leave no more than `spare_kb` free, by making the disk as small as what lies on it."""
        seen = os.statvfs(self.path)
        used_kb = (seen.f_blocks - seen.f_bfree) * seen.f_frsize // 1024
        self._remount(f"size={max(4, used_kb + spare_kb)}k")

    def grow(self) -> None:
        """Give it its first size again."""
        self._remount(f"size={self.size_kb}k")

    def read_only(self) -> None:
        """Refuse every write; fails while a file is open for writing."""
        self._remount("ro")

    def writable(self) -> None:
        """Take writes again."""
        self._remount("rw")

    def _remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)


@contextmanager
def disk(path: Path, size_kb: int) -> Iterator[Disk]:
    """A disk of its own at `path`, gone at the end with all that is on it. Skips where it cannot be made."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    path.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kb}k,mode=700", "tmpfs", path], check=False)
    if made.returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        yield Disk(path, size_kb)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
