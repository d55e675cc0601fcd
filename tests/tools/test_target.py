"""The Target seam on both of its sides: the simulated one, and a real server behind real SSH."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from state.errors import ForeignChange, HostError, RefusedForSafety, TargetLocked
from state.models import EnvChange, FlagChange, ProcessId
from tests.agent.sim import SCENARIO
from tests.contracts.target_contract import Intruder, TargetCase, TargetContract, now, request, up
from tests.e2e.rig import CANARY, Rig, assert_at_most_one_server, rig
from tests.e2e.witness import start_ticks
from tests.ssh_servers import demo_sshd
from tools.remote import RemoteSettings, RemoteTarget
from tools.servers.llamacpp import LlamaCpp
from tools.shell import CommandResult, Host, PosixHost
from tools.simulated import SimulatedTarget
from tools.ssh import SshHost

COUNT = itertools.count(1)
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class TestSimulatedTarget(TargetContract):
    @pytest.fixture
    def target(self, tmp_path: Path) -> SimulatedTarget:
        return SimulatedTarget(tmp_path / "world", SCENARIO.model_copy(update={"base_tok_s": {"few": 50.0}}))

    @pytest.fixture
    def case(self) -> TargetCase:
        return TargetCase(
            better=FlagChange(name="--threads", value="2"),
            unknown=FlagChange(name="--unknown", value="1"),
            refused=FlagChange(name="--cache", value="q8_0"),
            cause="requires flash_attn",
            name=f"sim{next(COUNT)}",
        )

    @pytest.fixture
    def intruder(self, target: SimulatedTarget) -> Intruder:
        path = target.path / "world.json"

        @contextlib.contextmanager
        def intrude() -> Iterator[ProcessId]:
            world = json.loads(path.read_text())
            path.write_text(json.dumps({**world, "server": {**world["server"], "key": "foreign", "pid": 4242}}))
            yield ProcessId(pid=4242, start_ticks=4242, boot_id="simulated-boot")
            path.write_text(json.dumps({**json.loads(path.read_text()), "server": None}))

        return intrude


# --- a real server behind real SSH ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("target"), demo_model, ssh_server=demo_sshd) as host:
        host.start_server()
        yield host
        assert_at_most_one_server(host)


async def connected(world: Rig, **fields: object) -> RemoteTarget:
    base: dict[str, object] = {
        "name": "rig",
        "directory": str(world.root),
        "python": str(world.python),
        "url": f"http://127.0.0.1:{world.port}",
        "port": world.port,
        "model": None,
        "start_deadline_s": 60.0,
        "stop_grace_s": 5.0,
        "lease_s": 300,
        "pid": None,
        "api_key_file": str(world.key_file),
    }
    host = await SshHost.connect(world.sshd.settings)
    return RemoteTarget(host, LlamaCpp(), RemoteSettings.model_validate(base | fields))


@contextlib.asynccontextmanager
async def taken(world: Rig, session: str) -> AsyncIterator[RemoteTarget]:
    """A target that may be changed, as `start` takes it."""
    target = await connected(world)
    try:
        await target.adopt()
        await target.prepare()
        await target.adopt()
        await target.acquire(session, f"session {session}, agent process {os.getpid()}")
        yield target
        await target.release()
    finally:
        await target.close()


@pytest.fixture
async def remote(world: Rig) -> AsyncIterator[RemoteTarget]:
    async with taken(world, f"s{next(COUNT)}") as target:
        yield target


@pytest.mark.real
class TestRemoteTarget(TargetContract):
    @pytest.fixture
    def target(self, remote: RemoteTarget) -> RemoteTarget:
        return remote

    @pytest.fixture
    def case(self, remote: RemoteTarget) -> TargetCase:
        return TargetCase(
            better=FlagChange(name="--threads", value="2"),
            unknown=FlagChange(name="--no-such-flag", value="1"),
            refused=FlagChange(name="--cache-type-v", value="q8_0"),
            cause="flash_attn",
            name=remote.session_id,
        )

    @pytest.fixture
    def intruder(self, world: Rig) -> Intruder:
        @contextlib.contextmanager
        def intrude() -> Iterator[ProcessId]:
            end_listener(world)
            pid = world.start_server()
            ticks = start_ticks(pid)
            assert ticks is not None
            yield ProcessId(pid=pid, start_ticks=ticks, boot_id=BOOT)
            end_listener(world)

        return intrude


def end_listener(world: Rig) -> None:
    """Somebody ends the server by hand; it is one of the rig's."""
    pid = world.listener()
    assert pid is not None and pid in world.ours()
    os.kill(pid, signal.SIGKILL)
    world.until(lambda: start_ticks(pid) is None and world.listener() is None)


@pytest.mark.real
@pytest.mark.anyio
async def test_looking_leaves_no_trace_on_the_host(world: Rig) -> None:
    directory = world.folder / "never-made"
    target = await connected(world, directory=str(directory))
    try:
        adoption = await target.adopt()
        await target.facts()
        assert await target.trouble() is None
    finally:
        await target.close()
    assert not directory.exists()
    assert adoption.process.pid == world.listener()


@pytest.mark.real
@pytest.mark.anyio
async def test_secrets_are_placeholders_in_the_spec_and_values_in_the_process(remote: RemoteTarget, world: Rig) -> None:
    spec = (await remote.adopt()).spec
    assert CANARY not in spec.model_dump_json()
    await up(
        remote, f"{remote.session_id}-T1", remote.derive(spec, (EnvChange(name="OMP_WAIT_POLICY", value="active"),))
    )
    assert world.environ()["SECRET_CANARY"] == f"{CANARY}-env"
    assert world.environ()["OMP_WAIT_POLICY"] == "active"
    assert world.argv()[world.argv().index("--api-key") + 1] == f"{CANARY}-key"
    await up(remote, f"{remote.session_id}-T2", spec)


@pytest.mark.real
@pytest.mark.anyio
async def test_a_program_of_another_kind_on_the_port_is_foreign_and_its_arguments_are_not_told(
    remote: RemoteTarget, world: Rig
) -> None:
    spec = (await remote.adopt()).spec
    end_listener(world)
    words = [
        sys.executable,
        "-m",
        "http.server",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(world.folder),
        str(world.port),
    ]
    stranger = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        world.until(lambda: world.listener() == stranger.pid)
        for attempt in (remote.serving(), remote.launch(f"{remote.session_id}-T1", spec)):
            with pytest.raises(ForeignChange, match="held by a process that is not ours") as caught:
                await attempt
            assert caught.value.where["process"] == str(stranger.pid)
            assert "http.server" not in str(caught.value)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    await up(remote, f"{remote.session_id}-T2", spec)


HALF_DEAD = """\
import ctypes, os, platform, socket, sys, threading, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=lambda: (time.sleep(1.5), os._exit(1))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2): of this thread alone
"""


@pytest.mark.real
@pytest.mark.anyio
async def test_a_server_that_is_just_dying_is_not_taken_for_a_hidden_one(remote: RemoteTarget, world: Rig) -> None:
    spec = (await remote.adopt()).spec
    end_listener(world)
    dying = subprocess.Popen([sys.executable, "-c", HALF_DEAD, str(world.port)])  # noqa: ASYNC220
    try:
        world.until(lambda: start_ticks(dying.pid) is None)
        assert dying.poll() is None, "its leading thread has ended, the process holds the port"
        assert await remote.serving() is None
    finally:
        dying.kill()
        dying.wait()
    await up(remote, f"{remote.session_id}-T1", spec)


@pytest.mark.real
@pytest.mark.anyio
async def test_without_a_lease_nothing_can_be_changed(remote: RemoteTarget, world: Rig) -> None:
    adoption = await remote.adopt()
    await remote.release()
    key = remote.session_id
    for attempt in (
        remote.launch(f"{key}-T1", adoption.spec),
        remote.begin_run(f"{key}-M1", request(adoption.process)),
        remote.stop_run(f"{key}-M1"),
        remote.guard(adoption.spec),
        remote.renew(),
    ):
        with pytest.raises(RefusedForSafety):
            await attempt
    assert (await now(remote)).process == adoption.process
    assert not any(name.startswith(f"{key}-") for name in world.jobs())


@pytest.mark.real
@pytest.mark.anyio
async def test_a_second_agent_is_refused_while_the_first_one_holds_the_target(remote: RemoteTarget, world: Rig) -> None:
    with pytest.raises(TargetLocked, match="holds this target"):
        async with taken(world, f"s{next(COUNT)}"):
            pass
    await remote.renew()


@pytest.mark.real
@pytest.mark.anyio
async def test_a_host_without_what_the_client_needs_is_told_before_anything_else(world: Rig) -> None:
    target = await connected(world, python="no-such-python")
    try:
        with pytest.raises(HostError, match=r"Python 3\.8 or later as no-such-python"):
            await target.adopt()
    finally:
        await target.close()


class Told(PosixHost):
    """A host that remembers what it was asked."""

    def __init__(self, host: Host) -> None:
        self.host, self.name = host, host.name
        self.scripts: list[str] = []

    def asked_for_asides(self) -> int:
        """How often somebody asked what is in effect beside the command line."""
        return sum("/asides" in script for script in self.scripts)

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        self.scripts.append(script)
        return await self.host.run(script, stdin=stdin, timeout_s=timeout_s)

    async def close(self) -> None:
        await self.host.close()


@pytest.mark.real
@pytest.mark.anyio
async def test_the_host_is_asked_for_changes_beside_the_command_line_only_where_there_can_be_any(
    world: Rig, tmp_path: Path
) -> None:
    target = await connected(world, directory=str(tmp_path / "own"))
    target.host = told = Told(target.host)
    try:
        await target.adopt()
        await target.prepare()
        await target.adopt()
        await target.serving()
        before = told.asked_for_asides()
        await target.serving()
        assert told.asked_for_asides() == before + 1, "without a lease anybody may make one"
        await target.acquire("own", f"session own, agent process {os.getpid()}")
        await target.serving()
        once = told.asked_for_asides()
        await target.serving()
        assert told.asked_for_asides() == once
        target.has_asides = True  # as after `stage`
        await target.serving()
        assert told.asked_for_asides() == once + 1
        await target.release()
    finally:
        await target.close()
