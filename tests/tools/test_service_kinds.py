"""Bare process, systemd and container under one contract: on stand-ins always, on the real thing where it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from state.models import Holder
from tests.contained import ContainedHost, contained
from tests.contracts.service_contract import ServiceCase, ServiceContract, served
from tests.local_host import LocalHost
from tests.ssh_servers import free_port
from tools.facts import MachineFact, ask
from tools.services.container import InContainer
from tools.services.container_options import read_container
from tools.services.finding import find
from tools.services.process import BareProcess
from tools.services.systemd import SystemdUnit
from tools.shell import CommandResult, Host, PosixHost, quote

STUBS = Path(__file__).parents[1] / "stubs"


class Prefixed(PosixHost):
    """A host on which every script begins with some lines, such as one that sets PATH."""

    def __init__(self, lines: str) -> None:
        self.within, self.lines, self.name = LocalHost(), lines, "local"

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        return await self.within.run(self.lines + script, stdin=stdin, timeout_s=timeout_s)

    async def close(self) -> None:
        """Nothing is held open."""


def words(folder: Path, port: int, python: str = sys.executable) -> tuple[str, ...]:
    return (python, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(served(folder)), str(port))


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
            holder=Holder(),
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
            holder=None,
            service=lambda original: SystemdUnit(str(root), port, 1.0, holder, original),
            changed=other_folder,
            refused=with_unknown_flag,
            footprint=footprint,
            by_hand=by_hand,
        )
        await host.check("systemctl --user stop files.service")


class TestDockerStandIn(ServiceContract):
    @pytest.fixture
    async def case(self, tmp_path: Path) -> AsyncIterator[ServiceCase]:
        port, root = free_port(), tmp_path / "root"
        place = stubbed(tmp_path, "docker")
        host = Prefixed(f"export PATH={place}:$PATH STUB_DOCKER={tmp_path / 'store'}\n")
        command = " ".join(words(tmp_path / "files", port))
        made = "--network host --restart always --ulimit nofile=512:1024 --label mine=1 --shm-size 1000000b"
        made += f" --workdir {tmp_path} -e DROPPED=1 -e 'GIVEN=some words' --stop-signal SIGINT"
        await host.check(f"docker run -d --name files {made} python {command}")
        container = read_container(json.loads((await host.check("docker inspect files")).text)[0])
        assert container.obstacles == ()
        holder = Holder(kind="container", scope="docker", name="files", id=container.id)

        async def footprint() -> object:
            ids = (await host.check("docker ps -aq --no-trunc")).text.split()
            shown = json.loads((await host.check(f"docker inspect {' '.join(ids)}")).text)
            return [{key: value for key, value in one.items() if key != "State"} for one in shown]

        async def by_hand() -> None:
            await host.check("docker restart -t 5 files")

        yield ServiceCase(
            host=host,
            root=str(root),
            port=port,
            python=sys.executable,
            holder=None,
            service=lambda original: InContainer(str(root), port, 1.0, holder, original, container),
            changed=other_folder,
            refused=with_unknown_flag,
            footprint=footprint,
            by_hand=by_hand,
        )
        await host.check("for one in $(docker ps -q); do docker stop -t 1 $one; done")


# --- the real things, where they can't harm this machine --------------------------------------------------------

SYSTEMD = "/usr/lib/systemd/systemd"
DEBIANS_PYTHON = "/usr/bin/python3"
ROOTS = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
BASE = "[Unit]\nDescription=All that there is\nDefaultDependencies=no\n"
BEGIN_SH = """
set -e
mkdir -p /run/systemd/system "$1"
cp "$0"/units/* "$1/"
begin() {
  exec env -i container=ratchet XDG_RUNTIME_DIR=/run/of-user SYSTEMD_UNIT_PATH="$1" "PATH=$PATH" \\
    /usr/lib/systemd/systemd "$2" --unit=base.target --log-target=console --log-level=info
}
[ "$2" = --user ] || begin "$@"
group=/sys/fs/cgroup/user.slice/user@0.service
mkdir -p $group
( sh -c 'echo $PPID' >$group/cgroup.procs; begin "$@" ) &
while :; do sleep 1; done
"""
"""There are no other units than ours: none that cleans, mounts, seeds or logs."""


@pytest.mark.real
class TestSystemd(ServiceContract):
    """The real systemd as the first process of a contained part of this machine: system manager and user manager."""

    @pytest.fixture(params=["system", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sudo", "user"))])
    async def case(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ServiceCase]:
        if not Path(SYSTEMD).exists():
            pytest.skip("systemd is not installed")
        port, world, user = free_port(), tmp_path / "world", request.param == "user"
        units = "/run/of-user/systemd/user" if user else "/run/systemd/system"
        manager = ["--user"] if user else ["--system"]
        first = ["/bin/sh", "-c", BEGIN_SH, str(tmp_path / "given"), units, *manager]
        command = " ".join(words(world / "files", port, DEBIANS_PYTHON))
        (tmp_path / "given" / "units").mkdir(parents=True)
        (tmp_path / "given" / "units" / "base.target").write_text(BASE)
        unit = UNIT.format(folder=world, command=command).replace("[Unit]", "[Unit]\nDefaultDependencies=no")
        (tmp_path / "given" / "units" / "files.service").write_text(unit)
        with contained(world, *first, environ=ROOTS) as pid:
            host = ContainedHost(pid, "export XDG_RUNTIME_DIR=/run/of-user\n")
            served(world / "files")
            asking = f"systemctl --no-pager {manager[0]}"

            async def footprint() -> object:
                properties = "DropInPaths,NeedDaemonReload,Restart,Environment,EnvironmentFiles,StandardOutput"
                shown = f"{asking} show -p {properties},StartLimitIntervalUSec,FailureAction files.service"
                told = await host.check(f"cd {units}; find . | sort; find . -type f -exec cat {{}} +; {shown}")
                return told.text

            async def by_hand() -> None:
                await host.check(f"{asking} restart files.service")

            await host.check(
                f"until {asking} is-active -q base.target; do sleep 0.1; done; {asking} start files.service"
            )
            scope, sudo = "user" if user else "system", request.param == "sudo"
            holder = Holder.model_validate({"kind": "systemd", "scope": scope, "name": "files.service", "sudo": sudo})
            yield ServiceCase(
                host=host,
                root=str(world / "root"),
                port=port,
                python=DEBIANS_PYTHON,
                holder=holder.model_copy(update={"sudo": False}),
                service=lambda original: SystemdUnit(str(world / "root"), port, 5.0, holder, original),
                changed=other_folder,
                refused=with_unknown_flag,
                footprint=footprint,
                by_hand=by_hand,
            )

    async def test_a_login_that_may_neither_is_told_so(self, case: ServiceCase) -> None:
        assert case.holder is not None
        await case.found()
        facts, nobody = await case.serving(), AsNobody(case.host)
        assert facts is not None
        found = await find(nobody, facts, await ask(nobody, MachineFact()))
        (told,) = found.obstacles
        wanted = "log in as that user" if case.holder.scope == "user" else "neither root nor may use `sudo -n`"
        assert wanted in told
        assert str(case.holder) in told


class AsNobody(PosixHost):
    """A host whose login has no rights at all."""

    def __init__(self, within: Host) -> None:
        self.within, self.name = within, "nobody"

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/bin/sh", "-c", script]
        return await self.within.run(f"exec {quote(words)}", stdin=stdin, timeout_s=timeout_s)

    async def close(self) -> None:
        """Nothing is held open."""


def busybox_image(path: Path) -> None:
    """The smallest root file system with a web server."""
    with tarfile.open(path, "w") as image:
        image.add("/bin/busybox", "bin/busybox")
        for name in ("httpd", "sh"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            image.addfile(link)
        for name in ("www", "tmp", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            image.addfile(folder)


@pytest.mark.real
class TestPodman(ServiceContract):
    """The real podman, its storage and its containers, in a contained part of this machine."""

    @pytest.fixture
    async def case(self, tmp_path: Path) -> AsyncIterator[ServiceCase]:
        if shutil.which("podman") is None or not Path("/bin/busybox").exists():
            pytest.skip("podman or busybox is not installed")
        port, world = free_port(), tmp_path / "world"
        with contained(world, "/bin/sh", "-c", "while :; do sleep 1; done", environ=ROOTS) as pid:
            busybox_image(world / "image.tar")
            served(world / "files")
            (world / "bin").mkdir()
            podman = f"--root {world}/store --runroot /run/podman --tmpdir /run/libpod --storage-driver vfs"
            podman += " --cgroup-manager cgroupfs --events-backend file"
            (world / "bin" / "podman").write_text(f'#!/bin/sh\nexec /usr/bin/podman {podman} "$@"\n')
            (world / "bin" / "podman").chmod(0o755)
            host = ContainedHost(pid, f"export PATH={world}/bin:$PATH TMPDIR={world}\n")
            made = (
                "--network host --cgroups disabled --ulimit nofile=512:1024 --ulimit nproc=4000:4000 --restart always"
            )
            made += f" --stop-signal KILL -e DROPPED=1 -e 'GIVEN=some words' -v {world}/files:/www:ro --label mine=1"
            run = f"podman run -d --name files {made} files /bin/httpd -f -p 127.0.0.1:{port} -h /www"
            await host.check(f"podman import {world}/image.tar files && {run}", timeout_s=60)
            inspected = json.loads((await host.check("podman inspect files")).text)[0]
            container = read_container(inspected)
            assert container.obstacles == ()
            holder = Holder(kind="container", scope="podman", name="files", id=container.id)

            async def footprint() -> object:
                one = json.loads((await host.check("podman inspect files")).text)[0]
                names = (await host.check("podman ps -a --format '{{.Names}}'")).text
                return names, {key: value for key, value in one.items() if key not in ("State", "ExecIDs")}

            async def by_hand() -> None:
                await host.check("podman restart -t 1 files")

            yield ServiceCase(
                host=host,
                root=str(world / "root"),
                port=port,
                python=DEBIANS_PYTHON,
                holder=holder,
                service=lambda original: InContainer(str(world / "root"), port, 2.0, holder, original, container),
                changed=lambda argv: (*argv, "-r", 'a $realm "of" it\'s'),
                refused=lambda argv: (*argv, "-Q"),
                footprint=footprint,
                by_hand=by_hand,
            )
