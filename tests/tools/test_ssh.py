"""The SSH door against real servers: outcomes that are unknown, keys that changed, noise, limits, reconnects."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from state.errors import (
    CommandFailed,
    ConfigError,
    HostKeyRejected,
    HostUnreachable,
    LoginRejected,
    OutcomeUnknown,
)
from tests.contracts.host_contract import HostContract, seen
from tests.ssh_servers import SshServer, demo_sshd, free_port, make_key, openssh
from tools.login_shell import COMMAND_LIMIT_BYTES, after_token, login_command
from tools.ssh import SshHost

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def openssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with openssh(tmp_path_factory.mktemp("openssh")) as server:
        yield server


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with demo_sshd(tmp_path_factory.mktemp("demo")) as server:
        yield server


@pytest.fixture
async def host(server: SshServer) -> AsyncIterator[SshHost]:
    async with await SshHost.connect(server.settings) as connected:
        yield connected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


class SshContract(HostContract):
    """What holds for any SSH server."""

    async def test_connection_killed_while_a_command_runs(self, server: SshServer, host: SshHost, folder: Path) -> None:
        script = f"echo said; : >{folder}/begun; sleep 0.7; : >{folder}/ended"
        running = asyncio.create_task(host.run(script))
        assert await seen((folder / "begun").exists)
        server.kill_connections()
        with pytest.raises(OutcomeUnknown) as caught:
            await running
        assert "may have ended, failed or still be running" in str(caught.value)
        assert "begun" in caught.value.where["command"]
        assert await seen((folder / "ended").exists), "the command itself goes on"
        assert (await host.run("echo back")).text == "back\n"

    async def test_a_command_is_sent_once_even_if_the_connection_dies(
        self, server: SshServer, host: SshHost, folder: Path
    ) -> None:
        running = asyncio.create_task(host.run(f"echo once >>{folder}/witness; sleep 30"))
        assert await seen((folder / "witness").exists)
        server.kill_connections()
        with pytest.raises(OutcomeUnknown):
            await running
        await host.run("true")
        assert (folder / "witness").read_text() == "once\n"

    async def test_connection_lost_while_idle_is_renewed(self, server: SshServer, host: SshHost) -> None:
        assert (await host.run("echo one")).ok
        server.kill_connections()
        assert (await host.run("echo two")).text == "two\n"
        server.kill_connections()
        results = await asyncio.gather(*(host.run(f"echo {n}") for n in range(8)))
        assert [result.text for result in results] == [f"{n}\n" for n in range(8)]

    async def test_put_cut_in_the_middle_leaves_the_old_file(
        self, server: SshServer, host: SshHost, folder: Path
    ) -> None:
        path = folder / "file"
        await host.put(str(path), b"old")
        server.relay.cut_after(300_000)
        with pytest.raises(OutcomeUnknown):
            await host.put(str(path), b"n" * 3_000_000)
        assert await seen(lambda: [p.name for p in folder.iterdir()] == ["file"])
        assert path.read_bytes() == b"old"

    async def test_a_stalled_link_ends_in_our_own_deadline(self, server: SshServer, host: SshHost) -> None:
        await host.run("true")
        server.relay.stall()
        try:
            with pytest.raises((HostUnreachable, OutcomeUnknown)) as caught:
                await host.run("true", timeout_s=0.5)
        finally:
            server.relay.resume()
        assert isinstance(caught.value, HostUnreachable), "the channel was not open: the command was surely not sent"
        assert (await host.run("echo usable")).text == "usable\n"

    async def test_a_frozen_peer_is_noticed_by_keepalive(self, server: SshServer, folder: Path) -> None:
        settings = server.settings.model_copy(update={"keepalive_s": 0.2, "keepalive_max": 2})
        async with await SshHost.connect(settings) as host:
            running = asyncio.create_task(host.run(f": >{folder}/begun; sleep 60", timeout_s=30))
            assert await seen((folder / "begun").exists)
            server.relay.stall()
            try:
                with pytest.raises(OutcomeUnknown, match="connection was lost"):
                    await running
            finally:
                server.relay.resume()

    async def test_a_stalled_greeting_ends_in_the_connect_deadline(self, server: SshServer) -> None:
        server.relay.stall()
        try:
            with pytest.raises(HostUnreachable, match="no answer within"):
                await SshHost.connect(server.settings.model_copy(update={"connect_timeout_s": 0.5}))
        finally:
            server.relay.resume()

    async def test_unknown_host_key(self, server: SshServer, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        with pytest.raises(HostKeyRejected, match="is unknown") as caught:
            await SshHost.connect(server.settings.model_copy(update={"known_hosts": tmp_path / "empty"}))
        assert "compare the fingerprint" in caught.value.do
        assert caught.value.where["port"] == str(server.settings.port)

    async def test_changed_host_key(self, server: SshServer, tmp_path: Path) -> None:
        other = server.write_known_hosts(tmp_path / "known", make_key(tmp_path / "another"))
        with pytest.raises(HostKeyRejected, match="has CHANGED") as caught:
            await SshHost.connect(server.settings.model_copy(update={"known_hosts": other}))
        assert "ssh-keygen -R" in caught.value.do

    async def test_changed_host_key_of_another_kind(self, server: SshServer, tmp_path: Path) -> None:
        other = server.write_known_hosts(tmp_path / "known", make_key(tmp_path / "another", kind="ecdsa"))
        with pytest.raises(HostKeyRejected, match="has CHANGED"):
            await SshHost.connect(server.settings.model_copy(update={"known_hosts": other}))

    async def test_host_key_that_changes_under_a_session_is_final(
        self, server: SshServer, host: SshHost, tmp_path: Path
    ) -> None:
        known = server.settings.known_hosts
        assert known is not None
        before = known.read_text()
        server.write_known_hosts(known, make_key(tmp_path / "another"))
        try:
            server.kill_connections()
            with pytest.raises(HostKeyRejected, match="has CHANGED"):
                await host.run("true")
        finally:
            known.write_text(before)

    async def test_wrong_key(self, server: SshServer, tmp_path: Path) -> None:
        wrong = make_key(tmp_path / "wrong")
        with pytest.raises(LoginRejected) as caught:
            await SshHost.connect(server.settings.model_copy(update={"identity_file": wrong}))
        assert caught.value.where["identity_file"] == str(wrong)
        assert caught.value.where["user"] == server.settings.user

    async def test_closing_twice_and_running_after(self, server: SshServer) -> None:
        host = await SshHost.connect(server.settings)
        await host.close()
        await host.close()
        with pytest.raises(HostUnreachable, match="closed by us"):
            await host.run("true")

    async def test_cancelling_a_command_leaves_the_connection_usable(self, host: SshHost, folder: Path) -> None:
        running = asyncio.create_task(host.run(f": >{folder}/begun; sleep 60"))
        assert await seen((folder / "begun").exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await host.run("echo usable")).text == "usable\n"


class TestOpenSsh(SshContract):
    @pytest.fixture
    def server(self, openssh_server: SshServer) -> SshServer:
        return openssh_server

    async def test_a_background_child_without_redirects_is_not_waited_for_forever(self, host: SshHost) -> None:
        with pytest.raises(OutcomeUnknown):
            await host.run("sleep 3 & echo started", timeout_s=1)


class TestDemoServer(SshContract):
    @pytest.fixture
    def server(self, demo_server: SshServer) -> SshServer:
        return demo_server


# --- what needs a server of its own ------------------------------------------------------------------------


async def test_login_noise_is_cut_off(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text(': >"$HOME/sourced"\nprintf "BANNER\\377\\n{\\"a\\": 0}\\n"; echo noise >&2\n')
    with openssh(tmp_path / "sshd", home=home) as server:
        async with await SshHost.connect(server.settings) as host:
            result = await host.run("echo '{\"a\": 1}'; echo real >&2")
            if not (home / "sourced").exists():
                pytest.skip("the login shell of this user is not a bash that reads .bashrc under sshd")
    assert (result.stdout, result.stderr) == (b'{"a": 1}\n', b"real\n")


async def test_a_login_shell_that_refuses_is_no_result(tmp_path: Path) -> None:
    with openssh(tmp_path / "sshd", "ForceCommand echo This account is currently not available.") as server:
        async with await SshHost.connect(server.settings) as host:
            with pytest.raises(CommandFailed, match="did not run our command") as caught:
                await host.run("echo hello")
    assert "not available" in caught.value.tail


async def test_fewer_sessions_than_channels_are_waited_for(tmp_path: Path) -> None:
    with openssh(tmp_path / "sshd", "MaxSessions 2") as server:
        async with await SshHost.connect(server.settings) as host:
            results = await asyncio.gather(*(host.run(f"sleep 0.05; echo {n}") for n in range(14)))
    assert [result.text for result in results] == [f"{n}\n" for n in range(14)]


async def test_no_sessions_at_all(tmp_path: Path) -> None:
    with openssh(tmp_path / "sshd", "MaxSessions 0") as server:
        settings = server.settings.model_copy(update={"reconnect_s": 0.5})
        async with await SshHost.connect(settings) as host:
            with pytest.raises(HostUnreachable, match="refuses to run commands") as caught:
                await host.run("true", timeout_s=0.5)
    assert "MaxSessions" in caught.value.do


async def test_a_host_that_stays_away(tmp_path: Path) -> None:
    with openssh(tmp_path / "sshd") as server:
        settings = server.settings.model_copy(update={"reconnect_s": 1.0})
        async with await SshHost.connect(settings) as host:
            server.stop()
            with pytest.raises(HostUnreachable) as caught:
                await host.run("true")
    assert caught.value.where["port"] == str(settings.port)


async def test_a_port_where_nobody_listens(openssh_server: SshServer) -> None:
    settings = openssh_server.settings.model_copy(update={"port": free_port()})
    with pytest.raises(HostUnreachable) as caught:
        await SshHost.connect(settings)
    assert "refused" in caught.value.where["cause"].lower()
    assert caught.value.do


async def test_key_files_that_cannot_be_used(openssh_server: SshServer, tmp_path: Path) -> None:
    settings = openssh_server.settings
    locked = make_key(tmp_path / "locked", passphrase="a passphrase")
    (tmp_path / "junk").write_text("not a key")
    for path in (locked, tmp_path / "junk", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="private key cannot be used"):
            await SshHost.connect(settings.model_copy(update={"identity_file": path}))
    (tmp_path / "damaged").write_text("@nonsense 127.0.0.1 ssh-ed25519 AAAA\n")
    for path in (tmp_path / "damaged", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="known_hosts"):
            await SshHost.connect(settings.model_copy(update={"known_hosts": path}))


# --- the command line for any login shell ------------------------------------------------------------------


SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
def test_login_command_in_any_installed_shell(shell: str) -> None:
    script = "printf '%s|' 'a!b' \"it's\" '\\\\n' '100%'\nexit 9"
    done = subprocess.run([shell, "-c", login_command(script, "TOKEN")], capture_output=True, check=False)
    assert after_token("TOKEN", done.stdout) == b"a!b|it's|\\\\n|100%|"
    assert after_token("TOKEN", done.stderr) == b""
    assert done.returncode == 9


def test_login_command_refuses_what_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="too long"):
        login_command("x" * COMMAND_LIMIT_BYTES, "TOKEN")
    with pytest.raises(ValueError, match="NUL"):
        login_command("echo \0", "TOKEN")
