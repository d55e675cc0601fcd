"""What detached jobs must do on any Host; a subclass gives the fixtures `host` and `root` (an empty folder on it)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from state.errors import CommandFailed
from tests.contracts.host_contract import seen
from tools import jobs
from tools.job_scripts import start_script
from tools.jobs import JobState
from tools.shell import Host


def alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def number_in(path: Path) -> Callable[[], bool]:
    return lambda: path.exists() and path.read_text().strip().isdigit()


async def ended(host: Host, root: Path, key: str) -> JobState:
    for _ in range(600):
        state = await jobs.look(host, str(root), key)
        if state.over:
            return state
        await asyncio.sleep(0.05)
    raise AssertionError(f"job {key} does not end: {state}")


@pytest.mark.anyio
class JobsContract:
    async def test_a_job_runs_to_its_end(self, host: Host, root: Path) -> None:
        assert (await jobs.look(host, str(root), "j1")).phase == "absent"
        state = await jobs.start(host, str(root), "j1", "printf 'out\\377'; echo err >&2; exit 3\n")
        assert state.process is not None
        assert state.process.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        done = await ended(host, root, "j1")
        assert (done.phase, done.exit, done.stdout_bytes, done.stderr_bytes) == ("ended", 3, 4, 4)
        assert done.process == state.process
        assert await jobs.read(host, str(root), "j1", "stdout") == b"out\xff"
        assert await jobs.read(host, str(root), "j1", "stdout", offset=1, limit=2) == b"ut"
        assert await jobs.tail(host, str(root), "j1", "stderr", 5) == "err\n"

    async def test_the_recorded_process_is_the_program_itself(self, host: Host, root: Path) -> None:
        state = await jobs.start(host, str(root), "exec", "exec sleep 300")
        assert state.phase == "running"
        assert state.process is not None
        pid = state.process.pid
        assert await seen(lambda: Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x00300\x00")
        assert start_ticks(pid) == state.process.start_ticks
        assert os.getsid(pid) == int((root / "jobs/exec/wrapper").read_text().split()[0])
        assert [os.readlink(f"/proc/{pid}/fd/{n}") for n in range(3)] == [
            "/dev/null",
            str(root / "jobs/exec/stdout"),
            str(root / "jobs/exec/stderr"),
        ]
        assert await jobs.look(host, str(root), "exec") == state
        stopped = await jobs.stop(host, str(root), "exec", grace_s=5)
        assert (stopped.phase, stopped.exit) == ("ended", 128 + signal.SIGTERM)
        assert not alive(pid)
        assert await jobs.stop(host, str(root), "exec", grace_s=5) == stopped

    async def test_environment_and_surroundings(self, host: Host, root: Path) -> None:
        value = "two words, 'quotes'\nand a line"
        await jobs.start(host, str(root), "env", "env -0; pwd >&2; umask >&2", marker_env={"RATCHET_TRIAL": value})
        await ended(host, root, "env")
        environ = (await jobs.read(host, str(root), "env", "stdout")).split(b"\0")
        assert f"RATCHET_TRIAL={value}".encode() in environ
        assert f"RATCHET_JOB={root}/jobs/env/".encode() in environ
        assert await jobs.tail(host, str(root), "env", "stderr") == f"{root}/jobs/env\n{(await host.run('umask')).text}"

    async def test_five_starts_at_a_time_run_it_once(self, host: Host, root: Path) -> None:
        script = f"echo run >>{root}/witness; exec sleep 300"
        states = await asyncio.gather(*(jobs.start(host, str(root), "once", script) for _ in range(5)))
        assert {state.process for state in states} == {states[0].process}
        again = await jobs.start(host, str(root), "once", "echo another >>witness")
        assert again.process == states[0].process
        assert await seen((root / "witness").exists)
        await jobs.stop(host, str(root), "once", grace_s=5)
        assert (await jobs.start(host, str(root), "once", script)).phase == "ended"
        assert (root / "witness").read_text() == "run\n"

    async def test_a_start_that_was_prepared_only_is_completed(self, host: Host, root: Path) -> None:
        directory = root / "jobs" / "half"
        directory.mkdir(parents=True)
        (directory / "run.sh").write_text("half of a scri")
        assert (await jobs.look(host, str(root), "half")).phase == "prepared"
        assert (await jobs.stop(host, str(root), "half")).phase == "prepared"
        await jobs.start(host, str(root), "half", "exit 5")
        assert (await ended(host, root, "half")).exit == 5

    async def test_a_command_that_arrives_incomplete_is_not_run(self, host: Host, root: Path) -> None:
        directory = jobs.job_dir(str(root), "cut")
        text = start_script(directory, "", len("echo one; echo two"), 1.0)
        result = await host.run(text, stdin=b"echo one")
        assert (result.exit, result.stderr) == (1, b"the command arrived incomplete\n")
        assert (await jobs.look(host, str(root), "cut")).phase == "absent"
        assert os.listdir(directory) == []

    async def test_signal_death_of_the_command(self, host: Host, root: Path) -> None:
        state = await jobs.start(host, str(root), "killed", "exec sleep 300")
        assert state.process is not None
        os.kill(state.process.pid, signal.SIGKILL)
        done = await ended(host, root, "killed")
        assert (done.phase, done.exit) == ("ended", 137)

    async def test_a_killed_wrapper_leaves_a_job_that_vanished(self, host: Host, root: Path) -> None:
        await jobs.start(host, str(root), "lost", "exec sleep 300")
        wrapper, _, _ = (root / "jobs/lost/wrapper").read_text().split()
        os.kill(int(wrapper), signal.SIGKILL)
        assert (await jobs.look(host, str(root), "lost")).phase == "running", "the command itself goes on"
        assert (await jobs.stop(host, str(root), "lost", grace_s=5)).phase == "vanished"

    async def test_signals_to_the_wrapper_lose_nothing(self, host: Host, root: Path) -> None:
        await jobs.start(host, str(root), "woken", f"while [ ! -f {root}/go ]; do sleep 0.05; done; exit 6")
        wrapper = int((root / "jobs/woken/wrapper").read_text().split()[0])
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.kill(wrapper, number)
        (root / "go").touch()
        assert (await ended(host, root, "woken")).exit == 6

    async def test_another_boot_means_vanished_and_nothing_is_signalled(self, host: Host, root: Path) -> None:
        state = await jobs.start(host, str(root), "boot", "exec sleep 300")
        assert state.process is not None
        for name in ("process", "wrapper"):
            path = root / "jobs" / "boot" / name
            pid, ticks, _ = path.read_text().split()
            path.write_text(f"{pid} {ticks} 00000000-0000-0000-0000-000000000000\n")
        assert (await jobs.look(host, str(root), "boot")).phase == "vanished"
        assert (await jobs.stop(host, str(root), "boot", grace_s=1)).phase == "vanished"
        assert alive(state.process.pid)
        os.kill(state.process.pid, signal.SIGKILL)

    async def test_a_reused_pid_is_never_signalled(self, host: Host, root: Path) -> None:
        await jobs.start(host, str(root), "old", "exit 0")
        await ended(host, root, "old")
        stranger = await asyncio.create_subprocess_exec("sleep", "300", start_new_session=True)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ticks = start_ticks(stranger.pid) - 1
        for name in ("process", "wrapper"):
            (root / "jobs" / "old" / name).write_text(f"{stranger.pid} {ticks} {boot}\n")
        (root / "jobs/old/exit").unlink()
        try:
            assert (await jobs.look(host, str(root), "old")).phase == "vanished"
            assert (await jobs.stop(host, str(root), "old", grace_s=1)).phase == "vanished"
            assert alive(stranger.pid)
        finally:
            stranger.kill()
            await stranger.wait()

    async def test_stop_ends_children_that_ignore_term(self, host: Host, root: Path) -> None:
        stubborn = f"trap '' TERM; echo $$ >{root}/child; while :; do sleep 0.1; done"
        await jobs.start(host, str(root), "stubborn", f"sh -c {quoted(stubborn)} &\nexec sleep 300")
        assert await seen(number_in(root / "child"))
        state = await jobs.stop(host, str(root), "stubborn", grace_s=0.2)
        assert (state.phase, state.exit) == ("ended", 143)
        assert not alive(int((root / "child").read_text()))

    async def test_stop_kills_a_command_that_ignores_term(self, host: Host, root: Path) -> None:
        state = await jobs.start(host, str(root), "deaf", f"trap '' TERM; : >{root}/deaf; while :; do sleep 0.1; done")
        assert state.process is not None
        assert await seen((root / "deaf").exists)
        assert (await jobs.stop(host, str(root), "deaf", grace_s=0.3)).exit == 137
        assert not alive(state.process.pid)

    async def test_stop_finds_children_that_changed_name_and_session(self, host: Host, root: Path) -> None:
        renamed = f"printf renamed >/proc/$$/comm; echo $$ >{root}/child; trap '' TERM; while :; do sleep 0.1; done"
        orphan = f"( setsid sh -c {quoted(renamed)} & ) ; exit 0"
        await jobs.start(host, str(root), "orphan", orphan)
        assert (await ended(host, root, "orphan")).exit == 0
        assert await seen(number_in(root / "child"))
        child = int((root / "child").read_text())
        assert await seen(lambda: Path(f"/proc/{child}/comm").read_text() == "renamed\n")
        assert (await jobs.stop(host, str(root), "orphan", grace_s=1)).phase == "ended"
        assert not alive(child)

    async def test_stop_finds_orphans_without_our_environment(self, host: Host, root: Path) -> None:
        await jobs.start(
            host, str(root), "scrubbed", f"( env -i sh -c 'echo $$ >{root}/child; exec sleep 300' & ); exit 0"
        )
        assert (await ended(host, root, "scrubbed")).exit == 0
        assert await seen(number_in(root / "child"))
        child = int((root / "child").read_text())
        await jobs.stop(host, str(root), "scrubbed", grace_s=1)
        assert not alive(child)

    async def test_stop_leaves_the_neighbour_alone(self, host: Host, root: Path) -> None:
        await jobs.start(host, str(root), "a", "exec sleep 300")
        other = await jobs.start(host, str(root), "a-b", "exec sleep 300")
        await jobs.stop(host, str(root), "a", grace_s=2)
        assert other.process is not None
        assert alive(other.process.pid)
        await jobs.stop(host, str(root), "a-b", grace_s=2)

    async def test_a_job_that_cannot_begin(self, host: Host, root: Path) -> None:
        (root / "jobs").write_text("a file is in the way")
        with pytest.raises(CommandFailed, match="could not be started") as caught:
            await jobs.start(host, str(root), "j", "exit 0")
        assert caught.value.where["key"] == "j"

    async def test_names_that_lead_elsewhere_are_refused(self, host: Host, root: Path) -> None:
        for key in ("", ".", "..", "a/b", "a b", "../x", ".hidden", "é", "x" * 300):
            with pytest.raises(ValueError, match="may name a job"):
                await jobs.look(host, str(root), key)
        with pytest.raises(ValueError, match="absolute path"):
            await jobs.look(host, "~/jobs", "key")
        with pytest.raises(ValueError, match="environment variable"):
            await jobs.start(host, str(root), "key", "exit 0", marker_env={"A B": "c"})
        with pytest.raises(CommandFailed, match="could not be read"):
            await jobs.read(host, str(root), "key", "stdout")


def quoted(script: str) -> str:
    return "'" + script.replace("'", "'\"'\"'") + "'"
