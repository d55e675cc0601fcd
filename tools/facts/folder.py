"""A place for our files on the host: whose it is, whether it takes writes, what is free; it makes nothing there."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from state.models import Frozen
from tools.facts.base import Fact

LOOK_PY = """
import json, os, sys
path = sys.argv[1]
near = path
while not os.path.lexists(near):
    near = os.path.dirname(near)
folder = os.path.isdir(near)
at = near if folder else os.path.dirname(near)
seen, disk = os.stat(at), os.statvfs(at)
print(json.dumps({
    "path": path,
    "nearest": near,
    "is_folder": folder,
    "owner_uid": seen.st_uid,
    "uid": os.getuid(),
    "writable": os.access(at, os.W_OK | os.X_OK),
    "free_mb": disk.f_bavail * disk.f_frsize / 2**20,
}))
"""
"""By Python, since `test -w` of some shells lets root write to a read-only file system."""


class Folder(Frozen):
    """A folder, or the nearest one above it where it is not there yet."""

    path: str
    nearest: str
    is_folder: bool
    owner_uid: int
    uid: int
    writable: bool
    free_mb: float

    @property
    def obstacle(self) -> str | None:
        """Why our files cannot lie here, None when they can."""
        if not self.is_folder:
            return f"{self.nearest} is no folder"
        if self.nearest == self.path and self.owner_uid != self.uid:
            return f"{self.path} belongs to the user with the number {self.owner_uid}, the login is {self.uid}"
        if not self.writable:
            return f"{self.nearest} cannot be written by this login: a read-only file system, or its mode"
        return None


@dataclass(frozen=True)
class FolderFact(Fact[Folder]):
    """What stands at a path, which need not exist."""

    path: str
    python: str

    def command(self) -> str:
        """The host's Python, which everything needs anyway."""
        return shlex.join([self.python, "-c", LOOK_PY, self.path])

    def parse(self, output: bytes) -> Folder:
        """One object."""
        return Folder.model_validate(json.loads(output))
