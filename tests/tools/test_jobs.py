"""Detached jobs over real SSH, and what only SSH can show: they outlive their connection and their server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contracts.jobs_contract import JobsContract, alive, ended
from tests.ssh_servers import SshServer, demo_sshd, openssh
from tools import jobs
from tools.jobs import JobState, parse_look
from tools.ssh import SshHost

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["openssh", "demo"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    kind = {"openssh": openssh, "demo": demo_sshd}[request.param]
    with kind(tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
async def host(server: SshServer) -> AsyncIterator[SshHost]:
    async with await SshHost.connect(server.settings) as connected:
        yield connected


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "it's the root"
    path.mkdir()
    return path


class TestJobsOverSsh(JobsContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        path = tmp_path / "root"
        path.mkdir()
        return path

    async def test_a_job_outlives_its_connection(self, server: SshServer, host: SshHost, root: Path) -> None:
        script = f"while [ ! -f {root}/go ]; do sleep 0.05; done; echo survived"
        started = await jobs.start(host, str(root), "j", script)
        server.kill_connections()
        assert await jobs.look(host, str(root), "j") == started
        await host.close()
        (root / "go").touch()
        async with await SshHost.connect(server.settings) as another:
            assert (await ended(another, root, "j")).exit == 0
            assert await jobs.tail(another, str(root), "j", "stdout") == "survived\n"

    async def test_a_start_cut_off_happens_at_most_once(self, server: SshServer, host: SshHost, root: Path) -> None:
        starting = [
            asyncio.create_task(jobs.start(host, str(root), "j", f"echo run >>{root}/witness")) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        server.kill_connections()
        await asyncio.gather(*starting, return_exceptions=True)
        await jobs.start(host, str(root), "j", f"echo run >>{root}/witness")
        assert (await ended(host, root, "j")).exit == 0
        assert (root / "witness").read_text() == "run\n"


async def test_a_root_with_awkward_letters(host: SshHost, root: Path) -> None:
    state = await jobs.start(host, str(root), "j", "exec sleep 300")
    assert state.process is not None
    assert (await jobs.stop(host, str(root), "j", grace_s=2)).exit == 143
    assert not alive(state.process.pid)


def test_parse_look() -> None:
    assert parse_look("phase absent\n") == JobState(phase="absent")
    state = parse_look("phase ended\nprocess 7 99 b-o-o-t\nexit 137\nstdout  12\nstderr 0\n")
    assert state.process is not None
    assert (state.phase, state.exit, state.process.pid, state.stdout_bytes) == ("ended", 137, 7, 12)
    with pytest.raises(ValueError, match="not a job's state"):
        parse_look("bash: command not found\n")
