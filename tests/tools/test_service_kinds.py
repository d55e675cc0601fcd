"""Bare process, systemd and container under one contract: on stand-ins always, on the real thing where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from state.models import Holder
from tests.contracts.service_contract import ServiceCase, ServiceContract, served
from tests.local_host import LocalHost
from tests.ssh_servers import free_port
from tools.services.process import BareProcess
from tools.services.systemd import SystemdUnit
from tools.shell import CommandResult, PosixHost

STUBS = Path(__file__).parents[1] / "stubs"


class Prefixed(PosixHost):
    """A host on which every script begins with some lines, such as one that sets PATH."""

    def __init__(self, lines: str) -> None:
        self.within, self.lines, self.name = LocalHost(), lines, "local"

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        return await self.within.run(self.lines + script, stdin=stdin, timeout_s=timeout_s)

    async def close(self) -> None:
        """Nothing is held open."""


def words(folder: Path, port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(served(folder)), str(port))


def other_folder(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Another folder with the same files, with a name that must be quoted."""
    at = argv.index("--directory") + 1
    other = served(Path(argv[at]).parent / 'an $odd "one" %n it\'s')
    return (*argv[:at], str(other), *argv[at + 1 :])


def with_unknown_flag(argv: tuple[str, ...]) -> tuple[str, ...]:
    return (*argv, "--no-such-flag")


def stubbed(folder: Path, name: str) -> Path:
    """A folder for PATH with one stand-in under the name of the real program."""
    place = folder / "bin"
    place.mkdir()
    program = place / name
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUBS / name}.py" "$@"\n')
    program.chmod(0o755)
    return place


def spawned(argv: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    environ = {"PATH": os.environ["PATH"], "DROPPED": "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        argv, cwd=folder, env=environ, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )


class TestBareProcess(ServiceContract):
    @pytest.fixture
    async def case(self, tmp_path: Path) -> AsyncIterator[ServiceCase]:
        port, root = free_port(), tmp_path / "root"
        argv = words(tmp_path / "files", port)
        started: list[subprocess.Popen[bytes]] = []

        async def start() -> None:
            started.append(spawned(argv, tmp_path))

        async def by_hand() -> None:
            started[-1].kill()
            started[-1].wait()
            await start()

        async def footprint() -> object:
            return None

        await start()
        yield ServiceCase(
            host=LocalHost(),
            root=str(root),
            port=port,
            python=sys.executable,
            service=lambda original: BareProcess(str(root), port, 1.0),
            changed=other_folder,
            refused=with_unknown_flag,
            footprint=footprint,
            by_hand=by_hand,
        )
        for one in started:
            one.kill()
            one.wait()


UNIT = """\
[Unit]
Description=A server of files
StartLimitIntervalSec=1000
StartLimitBurst=3

[Service]
Environment="DROPPED=1" "GIVEN=some words"
WorkingDirectory={folder}
ExecStart={command}
Restart=always
RestartSec=0.1
"""


class TestSystemdStandIn(ServiceContract):
    @pytest.fixture
    async def case(self, tmp_path: Path) -> AsyncIterator[ServiceCase]:
        port, root, runtime = free_port(), tmp_path / "root", tmp_path / "runtime"
        units = runtime / "systemd" / "user"
        units.mkdir(parents=True)
        (units / "files.service").write_text(
            UNIT.format(folder=tmp_path, command=" ".join(words(tmp_path / "files", port)))
        )
        place = stubbed(tmp_path, "systemctl")
        host = Prefixed(f"export PATH={place}:$PATH XDG_RUNTIME_DIR={runtime}\n")
        holder = Holder(kind="systemd", scope="user", name="files.service")

        async def footprint() -> object:
            files = {str(path): path.read_bytes() for path in units.rglob("*") if path.is_file()}
            return (
                files,
                sorted(units.rglob("*")),
                (await host.check("systemctl --user show -p NeedDaemonReload f")).text,
            )

        async def by_hand() -> None:
            await host.check("systemctl --user stop files.service && systemctl --user start files.service")

        await host.check("systemctl --user start files.service")
        yield ServiceCase(
            host=host,
            root=str(root),
            port=port,
            python=sys.executable,
            service=lambda original: SystemdUnit(str(root), port, 5.0, holder, original),
            changed=other_folder,
            refused=with_unknown_flag,
            footprint=footprint,
            by_hand=by_hand,
        )
        await host.check("systemctl --user stop files.service")
