"""What a server's program prints of its flags and version, kept on the host as long as nothing of the program changes.

A large engine needs half a minute to print its help. The answer is kept under a digest of all that it can depend on:
the words, the variables and the folder, the interpreter, every installed distribution, and size and times of every file
of the engine's own packages. Where one of these cannot be learned the program is asked. It must not know any engine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress

from state.errors import CommandFailed
from state.models import digest
from tools.servers.argv import PYTHON
from tools.shell import Host

KEPT = 16
"""So many answers are kept; each new version and each overlay makes another one."""
SIGNATURE_TIMEOUT_S = 60.0
FIRST_LINE_SH = 'file=$(command -v "$1") && head -c 200 "$file" | head -n 1'
SIGNATURE_CODE = """\
import hashlib, importlib.util, os, sys
seen = hashlib.sha256(repr((sys.version, sys.executable, sys.path)).encode())
def note(*words):
    seen.update(repr(words).encode())
for folder in sys.path:
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else ()
    note(sorted(name for name in names if name.endswith((".dist-info", ".egg-info", ".egg-link", ".pth"))))
for package in sys.argv[1:]:
    for place in importlib.util.find_spec(package).submodule_search_locations:
        for folder, folders, files in os.walk(place):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                found = os.lstat(os.path.join(folder, name))
                note(folder, name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
print("signature", seen.hexdigest())
"""
"""Run by the program's own interpreter; finds the packages without importing them, and fails where there is none."""
NOT_FROM_HERE = "import sys\nsys.path.pop(0)\n"
"""A script does not look for its packages in the working directory, as code in the command line does."""
SIGNATURE = re.compile(r"^signature ([0-9a-f]{64})$", re.MULTILINE)

InPlace = Callable[[Sequence[str]], str]
"""From a command to the sh that runs it where the server's program lies, errors on its standard output."""


class HelpCache:
    """Answers of one host's programs, in the folder `help` of ours."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.unkept: dict[str, list[str]] = {}

    async def find(self, root: str, key: str) -> list[str] | None:
        """What was kept under the key, None without it; what is damaged counts as absent."""
        try:
            found = json.loads((await self.host.check(f"cat {shlex.quote(_path(root, key))}")).stdout)
        except (CommandFailed, ValueError):
            return None
        return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else None

    def note(self, key: str, said: Sequence[str]) -> None:
        """To be kept as soon as something may be written on the host."""
        self.unkept[key] = list(said)

    async def keep(self, root: str) -> None:
        """Write what was noted; the newest answers stay. What cannot be written is asked for again the next time."""
        if not self.unkept:
            return
        folder = shlex.quote(f"{root}/help")
        with suppress(CommandFailed):
            await self.host.check(f"umask 077 && mkdir -p {folder}")
            for key, said in self.unkept.items():
                await self.host.put(_path(root, key), json.dumps(said).encode())
            newest = f"ls -t | tail -n +{KEPT + 1}"
            await self.host.check(f'cd {folder} && {newest} | while read -r old; do rm -f "$old"; done')
        self.unkept = {}


async def signature(host: Host, in_place: InPlace, program: str, packages: Sequence[str]) -> str | None:
    """A digest that changes whenever something of these Python packages does; None where that cannot be told."""
    if not packages:
        return None
    python: str | None = program
    code = SIGNATURE_CODE
    if not PYTHON.match(program.rpartition("/")[2]):
        first = await host.run(in_place(("/bin/sh", "-c", FIRST_LINE_SH, "sh", program)), timeout_s=SIGNATURE_TIMEOUT_S)
        python, code = interpreter(first.text) if first.ok else None, NOT_FROM_HERE + code
    if python is None:
        return None
    told = await host.run(in_place((python, "-c", code, *packages)), timeout_s=SIGNATURE_TIMEOUT_S)
    found = SIGNATURE.search(told.text)
    return found[1] if told.ok and found else None


def interpreter(first_line: str) -> str | None:
    """The Python that a script's first line names; None for a script of another kind, and for a program."""
    words = first_line.removeprefix("#!").split() if first_line.startswith("#!") else []
    if len(words) == 2 and words[0].endswith("/env"):
        words = words[1:]
    return words[0] if len(words) == 1 and PYTHON.match(words[0].rpartition("/")[2]) else None


def key_of(signed: str, *words: object) -> str:
    """Where an answer is kept: the program's signature and whatever else the answer depends on, as plain JSON."""
    return digest([signed, *words], 32)


def _path(root: str, key: str) -> str:
    return f"{root}/help/{key}.json"
