"""How a bare process is stopped and started again: exactly as it was, and never anybody else's process signalled."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.errors import CommandFailed, ServerError
from state.models import LaunchSpec, ProcessId
from tests.contracts.host_contract import seen
from tests.contracts.jobs_contract import alive, ended, start_ticks
from tests.local_host import LocalHost
from tools import jobs
from tools.facts import ProcessFact, ask
from tools.servers.base import is_volatile
from tools.services.base import AwaitPortFree, StopAdopted, StopJobs
from tools.services.memory import AwaitMemory
from tools.services.process import BareProcess

pytestmark = pytest.mark.anyio

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
SHOW = """\
import json, os, resource, sys
kinds = {"nofile": resource.RLIMIT_NOFILE, "core": resource.RLIMIT_CORE, "memlock": resource.RLIMIT_MEMLOCK,
         "nproc": resource.RLIMIT_NPROC}
limits = {name: resource.getrlimit(kind) for name, kind in kinds.items()}
raw = [item.partition(b"=") for item in open("/proc/self/environ", "rb").read().split(b"\\0") if item]
environ = {name.decode(): value.decode() for name, _, value in raw}
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "environ": environ, "limits": limits, "pid": os.getpid()}))
"""
DEAF_SH = "trap '' TERM; echo $$ >child; while :; do sleep 0.05; done"
ODD_WORDS = (
    "",
    "two  words",
    "it's",
    'a "quote"',
    "line\nend\n",
    "$HOME `id` $(id) \\ *",
    "é",
    "-n",
    "--x=y",
    "~",
    "#",
)


@pytest.fixture
def host() -> LocalHost:
    return LocalHost()


@pytest.fixture
def show(tmp_path: Path) -> Path:
    """A program that tells how it was started."""
    program = tmp_path / "show it.py"
    program.write_text(SHOW)
    return program


def spec(*argv: str, cwd: Path, **fields: object) -> LaunchSpec:
    base = {"engine": "llamacpp", "program": argv[:1], "flags": {}, "argv": argv, "cwd": str(cwd), "user": "any"}
    return LaunchSpec.model_validate(base | fields)


def spawned(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process that an operator started, away from our terminal."""
    return subprocess.Popen(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


async def shown(host: LocalHost, root: Path, desired: LaunchSpec, secrets: dict[str, str]) -> dict[str, object]:
    script = BareProcess(str(root), 1, 1.0).launch_script(desired, secrets, "S-T1")
    await jobs.start(host, str(root), "S-T1", script)
    state = await ended(host, root, "S-T1")
    assert state.exit == 0, await jobs.tail(host, str(root), "S-T1", "stderr")
    told: dict[str, object] = json.loads(await jobs.read(host, str(root), "S-T1", "stdout"))
    assert state.process is not None
    assert told["pid"] == state.process.pid
    return told


# --- starting ----------------------------------------------------------------------------------------------


async def test_argv_and_directory_are_rebuilt_byte_for_byte(host: LocalHost, tmp_path: Path, show: Path) -> None:
    cwd = tmp_path / "a 'folder'\nof two lines"
    cwd.mkdir()
    told = await shown(host, tmp_path, spec(sys.executable, str(show), *ODD_WORDS, cwd=cwd), {})
    assert told["argv"] == list(ODD_WORDS)
    assert told["cwd"] == str(cwd)


async def test_a_person_can_run_the_launch_script_by_hand(host: LocalHost, tmp_path: Path, show: Path) -> None:
    desired = spec(sys.executable, str(show), "--by-hand", cwd=tmp_path)
    await jobs.prepare(
        host, str(tmp_path), "S-T1", BareProcess(str(tmp_path), 1, 1.0).launch_script(desired, {}, "S-T1")
    )
    told = json.loads((await host.check(f"unset RATCHET_JOB; /bin/sh {tmp_path}/jobs/S-T1/run.sh")).text)
    assert told["argv"] == ["--by-hand"]
    assert told["environ"]["RATCHET_JOB"] == f"{tmp_path}/jobs/S-T1/"


async def test_the_environment_is_the_recorded_one_and_nothing_else(
    host: LocalHost, tmp_path: Path, show: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_LOGIN", "must not leak into the server")
    recorded = {
        "PATH": "/opt/of the server:/usr/bin:/bin",
        "HOME": "/nowhere",
        "EMPTY": "",
        "LINES_": "one\ntwo\n",
        "QUOTES": 'it\'s "so" $HOME `id` \\',
        "IFS": ":",
        "ENV": "/nonexistent",
        "UID": "1234",
        "OPTIND": "x",
        "with.dots": "a dot",
        "BASH_FUNC_module%%": "() {  eval `modulecmd bash $*`\n}",
        "é": "é",
    }
    own = {"LLAMA_ARG_THREADS": "2"}
    token = "«secret:0123456789abcdef»"
    argv = (sys.executable, str(show), "--api-key", token, f"--api-key={token}")
    desired = spec(*argv, cwd=tmp_path, env=own, hidden_env=recorded)
    told = await shown(host, tmp_path, desired, {token: "a 'secret' value"})
    environ = told["environ"]
    assert isinstance(environ, dict)
    assert environ.pop("RATCHET_LAUNCH") == "S-T1"
    assert environ.pop("RATCHET_SPEC")
    assert environ.pop("RATCHET_JOB") == f"{tmp_path}/jobs/S-T1/"
    assert {name: value for name, value in environ.items() if not is_volatile(name)} == recorded | own
    assert told["argv"] == ["--api-key", "a 'secret' value", "--api-key=a 'secret' value"]


async def test_hidden_values_come_from_the_hosts_secrets_or_not_at_all(tmp_path: Path) -> None:
    desired = spec("server", cwd=tmp_path, hidden_env={"TOKEN": "«secret:00»"})
    service = BareProcess(str(tmp_path), 1, 1.0)
    assert "export TOKEN='of the host'" in service.launch_script(desired, {"«secret:00»": "of the host"}, "k")
    with pytest.raises(ServerError, match="not in the host's secrets file") as caught:
        service.launch_script(desired, {}, "k")
    assert caught.value.where == {"placeholder": "«secret:00»"}


@pytest.mark.parametrize("soft", [64, 200])
async def test_limits_are_those_of_the_recorded_process(host: LocalHost, tmp_path: Path, show: Path, soft: int) -> None:
    ceiling = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    limits = {"nofile": f"{soft}:{ceiling}", "core": "0:512", "memlock": "32768:65536", "nproc": "1:1"}
    told = await shown(host, tmp_path, spec(sys.executable, str(show), cwd=tmp_path, limits=limits), {})
    assert told["limits"] == {"nofile": [soft, ceiling], "core": [0, 512], "memlock": [32768, 65536], "nproc": [1, 1]}


async def test_a_hard_limit_below_the_logins_soft_one_is_set(host: LocalHost, tmp_path: Path, show: Path) -> None:
    told = await shown(host, tmp_path, spec(sys.executable, str(show), cwd=tmp_path, limits={"nofile": "50:60"}), {})
    limits = told["limits"]
    assert isinstance(limits, dict)
    assert limits["nofile"] == [50, 60]


async def test_a_directory_that_is_gone_ends_the_launch(host: LocalHost, tmp_path: Path) -> None:
    script = BareProcess(str(tmp_path), 1, 1.0).launch_script(spec("true", cwd=tmp_path / "gone"), {}, "k")
    await jobs.start(host, str(tmp_path), "k", script)
    assert (await ended(host, tmp_path, "k")).exit != 0
    assert "gone" in await jobs.tail(host, str(tmp_path), "k", "stderr")


async def test_what_is_observed_of_a_launch_can_be_launched_again(host: LocalHost, tmp_path: Path) -> None:
    """Observed → spec → launched → observed: the second look shows what the first one did."""
    environ = {"PATH": "/usr/bin:/bin", "A": "x\ny", "b.c": "odd"}
    tuned = "umask 027; renice -n 3 -p $$ >&2; taskset -pc 0 $$ >&2; ulimit -n 77; exec env b.c=odd sleep 300"
    first = spawned("/bin/sh", "-c", tuned, cwd=tmp_path, env=environ)
    try:
        assert await seen(lambda: Path(f"/proc/{first.pid}/cmdline").read_bytes() == b"sleep\x00300\x00")
        before = await ask(host, ProcessFact(first.pid))
    finally:
        first.kill()
        first.wait()
    assert before is not None
    desired = spec(*before.argv, cwd=tmp_path, hidden_env=before.environ, limits=before.limits)
    script = BareProcess(str(tmp_path), 1, 1.0).launch_script(desired, {}, "again")
    state = await jobs.start(host, str(tmp_path), "again", script)
    assert state.process is not None
    pid = state.process.pid
    try:
        assert await seen(lambda: Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x00300\x00")
        after = await ask(host, ProcessFact(pid))
    finally:
        await jobs.stop(host, str(tmp_path), "again", 2.0)
    assert after is not None and after.environ is not None
    assert (after.argv, after.cwd, after.user) == (before.argv, before.cwd, before.user)
    assert {name: value for name, value in after.environ.items() if not is_volatile(name)} == environ
    assert after.limits == before.limits
    assert (after.limits["umask"], after.limits["niceness"], after.limits["affinity"]) == ("0027", "3", "0")


# --- stopping ----------------------------------------------------------------------------------------------


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = spawned("sleep", "300", cwd=Path("/"))
    yield process
    process.kill()
    process.wait()


def identity(pid: int) -> ProcessId:
    return ProcessId(pid=pid, start_ticks=start_ticks(pid), boot_id=BOOT)


async def test_the_adopted_process_is_ended(host: LocalHost, victim: subprocess.Popen[bytes]) -> None:
    operation = StopAdopted(process=identity(victim.pid), grace_s=5)
    await host.check(operation.render())
    assert victim.wait() == -signal.SIGTERM
    await host.check(operation.render())


@pytest.mark.parametrize("wrong", [{"start_ticks": 1}, {"boot_id": "00000000-0000-0000-0000-000000000000"}])
async def test_a_process_of_another_start_or_boot_is_never_signalled(
    host: LocalHost, victim: subprocess.Popen[bytes], wrong: dict[str, object]
) -> None:
    operation = StopAdopted(process=identity(victim.pid).model_copy(update=wrong), grace_s=0.2)
    await host.check(operation.render())
    assert victim.poll() is None


async def test_a_frozen_server_is_ended(host: LocalHost, victim: subprocess.Popen[bytes]) -> None:
    victim.send_signal(signal.SIGSTOP)
    await host.check(StopAdopted(process=identity(victim.pid), grace_s=0.2).render())
    assert victim.wait() == -signal.SIGKILL


async def child_in(folder: Path) -> int:
    path = folder / "child"
    assert await seen(lambda: path.exists() and path.read_text().strip().isdigit())
    return int(path.read_text())


async def test_a_server_that_ignores_term_is_killed_with_its_deaf_child(host: LocalHost, tmp_path: Path) -> None:
    (tmp_path / "deaf").write_text(DEAF_SH)
    parent = spawned("/bin/sh", "-c", "trap '' TERM; sh deaf & while :; do sleep 0.05; done", cwd=tmp_path)
    child = await child_in(tmp_path)
    try:
        await host.check(StopAdopted(process=identity(parent.pid), grace_s=0.3).render())
        assert not alive(child)
    finally:
        parent.kill()
        assert parent.wait() == -signal.SIGKILL


async def test_a_child_that_outlives_its_obedient_parent_is_ended(host: LocalHost, tmp_path: Path) -> None:
    (tmp_path / "deaf").write_text(DEAF_SH)
    with_child = "import subprocess; subprocess.Popen(['setsid', 'sh', 'deaf']).wait()"
    parent = spawned(sys.executable, "-c", with_child, cwd=tmp_path)
    child = await child_in(tmp_path)
    await host.check(StopAdopted(process=identity(parent.pid), grace_s=5).render())
    assert parent.wait() == -signal.SIGTERM
    assert not alive(child)


async def test_launches_of_ours_are_ended_but_the_wanted_one_and_other_jobs_go_on(
    host: LocalHost, tmp_path: Path
) -> None:
    pids = {}
    for key in ("S-T1", "S-T2", "S-Tw3", "S-M1", "watcher-1"):
        state = await jobs.start(host, str(tmp_path), key, "exec sleep 300")
        assert state.process is not None
        pids[key] = state.process.pid
    await host.check(StopJobs(root=str(tmp_path), shape="*-T*", but="S-T2", grace_s=2).render())
    assert {key for key, pid in pids.items() if alive(pid)} == {"S-T2", "S-M1", "watcher-1"}
    for key in pids:
        await jobs.stop(host, str(tmp_path), key, 1)
    await host.check(StopJobs(root=str(tmp_path), shape="*-M*", grace_s=2).render())


def test_the_plan_ends_what_is_ours_and_waits_for_port_and_memory(tmp_path: Path) -> None:
    service = BareProcess(str(tmp_path), 8102, 5.0)
    adopted = ProcessId(pid=7, start_ticks=8, boot_id=BOOT)
    assert service.plan(adopted, "S-T2") == (
        StopJobs(root=str(tmp_path), shape="*-T*", but="S-T2", grace_s=5.0),
        StopAdopted(process=adopted, grace_s=5.0),
        AwaitPortFree(port=8102, within_s=15.0),
        AwaitMemory(root=str(tmp_path), but="S-T2", within_s=15.0),
    )


# --- the port ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
async def test_a_port_in_use_is_waited_for(host: LocalHost, family: socket.AddressFamily) -> None:
    try:
        listener = socket.create_server(("127.0.0.1" if family == socket.AF_INET else "::1", 0), family=family)
    except OSError as error:
        pytest.skip(f"no such addresses here: {error}")
    port = listener.getsockname()[1]
    with listener:
        with pytest.raises(CommandFailed) as caught:
            await host.check(AwaitPortFree(port=port, within_s=0.1).render())
        assert f"port {port} is still taken" in caught.value.tail
        waiting = asyncio.create_task(host.check(AwaitPortFree(port=port, within_s=20).render()))
        await asyncio.sleep(0.1)
        assert not waiting.done()
    await waiting


async def test_a_free_port_and_mere_clients_are_not_waited_for(host: LocalHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            listener.close()
            await host.check(AwaitPortFree(port=port, within_s=0.1).render())


async def test_operations_are_data_that_render_the_same_script(tmp_path: Path) -> None:
    for operation in (
        StopJobs(root=str(tmp_path), shape="*-T*", grace_s=1),
        StopAdopted(process=ProcessId(pid=os.getpid(), start_ticks=1, boot_id=BOOT), grace_s=1),
        AwaitPortFree(port=1, within_s=1),
    ):
        again = type(operation).model_validate_json(operation.model_dump_json())
        assert again.render() == operation.render()  # type: ignore[attr-defined]
