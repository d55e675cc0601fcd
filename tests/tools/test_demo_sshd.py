"""The demo's SSH server behaves like OpenSSH where Ratchet depends on it: bytes, exits, signals, lost connections."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import asyncssh
import pytest

pytestmark = pytest.mark.anyio
PROJECT = Path(__file__).resolve().parents[2]
LIMIT_S = 20


def start(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.demo.sshd", "--dir", str(directory), *arguments]
    return subprocess.Popen(
        command, cwd=PROJECT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def until(look: Callable[[], object]) -> None:
    """Waits for another process, until `look` gives something true."""
    deadline = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_port(directory: Path, process: subprocess.Popen[bytes]) -> int:
    until(lambda: process.poll() is not None or (directory / "port").exists())
    return int((directory / "port").read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("sshd") / "keys"
    process = start(directory, env={"OPENAI_API_KEY": "only-for-the-agent"})
    try:
        wait_for_port(directory, process)
        yield directory
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def connect(
    directory: Path, key: Path | None = None
) -> "asyncssh.connection._ACMWrapper[asyncssh.SSHClientConnection]":
    return asyncssh.connect(
        "127.0.0.1",
        int((directory / "port").read_text()),
        username="tester",
        client_keys=[key or directory / "client_key"],
        known_hosts=str(directory / "known_hosts"),
        config=None,
        agent_path=None,
    )


@pytest.fixture
async def ssh(server: Path) -> AsyncIterator[asyncssh.SSHClientConnection]:
    async with connect(server) as connection:
        yield connection


async def test_bytes_pass_both_ways_and_the_exit_status_follows(ssh: asyncssh.SSHClientConnection) -> None:
    data = bytes(range(256)) * 5000
    done = await ssh.run("cat; echo complaint >&2; exit 7", input=data, encoding=None)
    assert (done.stdout, done.stderr, done.exit_status) == (data, b"complaint\n", 7)


async def test_nothing_is_lost_when_both_streams_end_together(ssh: asyncssh.SSHClientConnection) -> None:
    for turn in range(40):
        done = await ssh.run(f"echo out{turn}; echo err{turn} >&2; exit {turn}", encoding=None, stdin=asyncssh.DEVNULL)
        assert (done.stdout, done.stderr) == (f"out{turn}\n".encode(), f"err{turn}\n".encode())
        assert done.exit_status == turn


async def test_many_sessions_of_one_connection_run_at_the_same_time(
    ssh: asyncssh.SSHClientConnection, tmp_path: Path
) -> None:
    outputs: dict[int, object] = {}

    async def one(number: int) -> None:
        # Each command ends only when all of them have begun.
        command = (
            f"touch {tmp_path}/{number}; while [ $(ls {tmp_path} | wc -l) -lt 24 ]; do sleep 0.05; done; echo {number}"
        )
        outputs[number] = (await ssh.run(command, encoding=None)).stdout

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            for number in range(24):
                group.start_soon(one, number)
    assert outputs == {number: f"{number}\n".encode() for number in range(24)}


async def test_a_command_that_dies_of_a_signal_is_reported_as_such(ssh: asyncssh.SSHClientConnection) -> None:
    done = await ssh.run("kill -KILL $$")
    assert done.exit_signal is not None
    assert done.exit_signal[0] == "KILL"


async def test_a_signal_from_the_client_reaches_the_command(ssh: asyncssh.SSHClientConnection) -> None:
    async with ssh.create_process(
        "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    ) as process:
        assert await process.stdout.readline() == "ready\n"
        process.terminate()
        with anyio.fail_after(LIMIT_S):
            done = await process.wait()
    assert (done.stdout, done.exit_status) == ("caught\n", 3)


async def test_a_command_without_reader_of_its_input_still_ends(ssh: asyncssh.SSHClientConnection) -> None:
    with anyio.fail_after(LIMIT_S):
        done = await ssh.run("exit 4", input=b"x" * 1_000_000, encoding=None)
    assert done.exit_status == 4


async def test_a_lost_connection_ends_nothing(server: Path, tmp_path: Path) -> None:
    async with connect(server) as connection:
        job = f"setsid sh -c 'echo $$ >{tmp_path}/job; sleep 60' </dev/null >/dev/null 2>&1 &"
        await connection.run(job)
        silent = await connection.create_process(f"echo $$ >{tmp_path}/silent; sleep 1; touch {tmp_path}/finished")
        until(lambda: (tmp_path / "silent").exists() and (tmp_path / "job").read_text().strip())
        connection.abort()
        await connection.wait_closed()
    assert silent.exit_status is None
    pid = int((tmp_path / "job").read_text())
    try:
        until((tmp_path / "finished").exists)
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


async def test_a_session_lasts_as_long_as_something_holds_its_output(
    ssh: asyncssh.SSHClientConnection, tmp_path: Path
) -> None:
    """OpenSSH does that too: a job that was not redirected is not detached."""
    done = await ssh.run(f"(while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo late) & touch {tmp_path}/go")
    assert done.stdout == "late\n"


async def test_commands_get_a_login_environment_and_not_ours(ssh: asyncssh.SSHClientConnection) -> None:
    done = await ssh.run("env; pwd", check=True)
    assert "HOME=" in str(done.stdout)
    assert "only-for-the-agent" not in str(done.stdout)


async def test_only_the_client_key_gets_in(server: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(stranger)
    with pytest.raises(asyncssh.PermissionDenied):
        await connect(server, stranger)


async def test_no_terminal_and_no_forwarding(ssh: asyncssh.SSHClientConnection) -> None:
    with pytest.raises(asyncssh.ChannelOpenError):
        await ssh.create_process("tty", term_type="xterm")
    with pytest.raises(asyncssh.ChannelOpenError):
        await ssh.open_connection("127.0.0.1", 9)
    with pytest.raises(asyncssh.ChannelListenError):
        await ssh.forward_remote_port("127.0.0.1", 0, "127.0.0.1", 9)


def test_the_folder_and_the_files_are_private(server: Path) -> None:
    assert stat.S_IMODE(server.stat().st_mode) == 0o700
    names = {path.name for path in server.iterdir()}
    assert names == {"host_key", "client_key", "authorized_keys", "known_hosts", "port"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in server.iterdir()} == {0o600}


def test_sigterm_stops_it_cleanly_and_a_restart_keeps_its_identity(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    hosts = []
    for _ in range(2):
        process = start(directory)
        port = wait_for_port(directory, process)
        hosts.append((directory / "known_hosts").read_text().split()[2])
        process.terminate()
        _, complaints = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, complaints) == (0, b"")
        assert not (directory / "port").exists()
        assert port > 0
    assert hosts[0] == hosts[1]


def test_a_port_in_use_is_told_without_a_traceback(server: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "--port", (server / "port").read_text().strip())
    _, complaint = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert b"error: no SSH server on 127.0.0.1" in complaint
    assert b"Traceback" not in complaint


def test_it_can_be_told_to_die_with_its_parent(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    arguments = [sys.executable, "-m", "tools.demo.sshd", "--dir", str(directory), "--die-with-parent"]
    script = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until((directory / "port").exists)
        parent.kill()
    until(lambda: not alive(pid))
