"""Facts: every parser by data files (tests/data/facts: fact, args, output, expect), every question asked for real."""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from state.errors import CommandFailed, OutcomeUnknown
from tests.local_host import LocalHost
from tests.ssh_servers import SshServer, demo_sshd
from tools import facts
from tools.facts import (
    BusyFact,
    ClockFact,
    DescendantsFact,
    DiskFact,
    Gpu,
    GpuFact,
    GpuFacts,
    ListenersFact,
    MachineFact,
    MemoryFact,
    ModelFact,
    OpenFilesFact,
    ProcessFact,
    VisitorsFact,
    ask,
    decode,
    model_named,
)
from tools.shell import CommandResult
from tools.ssh import SshHost

DATA = Path(__file__).parent.parent / "data" / "facts"
CASES = sorted(DATA.glob("*.json"))
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with demo_sshd(tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture
async def host(server: SshServer) -> AsyncIterator[SshHost]:
    async with await SshHost.connect(server.settings) as connected:
        yield connected


# --- the parsers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_parser(path: Path) -> None:
    case = json.loads(path.read_text())
    args = {name: tuple(value) if isinstance(value, list) else value for name, value in case["args"].items()}
    answer = getattr(facts, case["fact"])(**args).parse(case["output"].encode("utf-8", "surrogateescape"))
    found: Any = TypeAdapter(Any).dump_python(answer, mode="python")
    assert json.loads(json.dumps(found)) == rounded(case["expect"], found)


def rounded(expect: Any, found: Any) -> Any:
    """`expect`, with numbers that equal those of `found` but for the last bits taken from there."""
    if isinstance(expect, dict):
        return {
            name: rounded(value, found.get(name) if isinstance(found, dict) else None) for name, value in expect.items()
        }
    if isinstance(expect, float) and isinstance(found, float) and abs(expect - found) < 1e-9:
        return found
    return expect


def test_every_fact_has_cases() -> None:
    covered = {json.loads(path.read_text())["fact"] for path in CASES}
    assert covered == {name for name in facts.__all__ if name.endswith("Fact") and name != "Fact"}


NONSENSE = [ProcessFact(1), BusyFact(), ClockFact(), MachineFact(), MemoryFact(), DiskFact("/"), GpuFact()]


@pytest.mark.parametrize("fact", NONSENSE)
def test_nonsense_is_an_error(fact: facts.Fact[Any]) -> None:
    with pytest.raises((ValueError, LookupError)):
        fact.parse(b"exit 0\nbash: command not found\n")


def test_decode() -> None:
    assert decode("b64:/wA=") == decode("hex:ff00") == b"\xff\x00"
    assert decode("b64:") == decode("hex:") == b""
    assert decode("-") is None
    for word in ("text", "b64:!!", "hex:zz"):
        with pytest.raises(ValueError, match=r"b64|non-hexadecimal|[Bb]ase64"):
            decode(word)


async def test_an_answer_that_cannot_be_read_tells_the_story(host: SshHost) -> None:
    class Odd(MemoryFact):
        def command(self) -> str:
            return "echo MemTotal: 5 apples"

    with pytest.raises(CommandFailed, match="cannot be read") as caught:
        await ask(host, Odd())
    assert caught.value.where["host"] == host.name
    assert "apples" in caught.value.tail


# --- the questions -----------------------------------------------------------------------------------------


AWKWARD = [b"--empty", b"", b"two words", b"line\nend", b"\xff\xfe", b"$HOME `x` 'q' \"d\""]


@pytest.mark.parametrize("without", [None, "base64"])
async def test_a_real_process_comes_back_byte_for_byte(without: str | None, tmp_path: Path) -> None:
    cwd = tmp_path / "a dir\nwith a line end"
    cwd.mkdir()
    environ = {b"PATH": os.environb[b"PATH"], b"JUNK": b"\xff\n\xfe", b"EMPTY": b""}
    process = await asyncio.create_subprocess_exec(
        *[shutil.which("sh") or "/bin/sh", "-c", "while :; do sleep 1; done", *map(os.fsdecode, AWKWARD)],
        cwd=cwd,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456)),
    )
    fact = ProcessFact(process.pid)
    try:
        output = subprocess_output(fact.command(), path_without(tmp_path / "bin", without))
    finally:
        process.kill()
        await process.wait()
    found = fact.parse(output)
    assert found is not None
    assert [os.fsencode(word) for word in found.argv[3:]] == AWKWARD
    assert found.environ is not None
    assert {os.fsencode(k): os.fsencode(v) for k, v in found.environ.items()} == environ
    assert (found.cwd, found.ppid, found.process.boot_id) == (str(cwd), os.getpid(), BOOT)
    assert found.limits["nofile"] == "123:456"
    assert found.stdio[:2] == ("/dev/null", "/dev/null")
    assert found.exe == os.path.realpath("/bin/sh")
    assert not found.has_tty
    assert (b"hex:" in output) == (without == "base64")


def path_without(folder: Path, missing: str | None) -> str:
    """A PATH that has the usual tools but for one."""
    folder.mkdir()
    for name in ("base64", "od", "tr", "readlink", "id", "cat"):
        if name != missing:
            (folder / name).symlink_to(shutil.which(name) or name)
    return str(folder)


def subprocess_output(script: str, path: str) -> bytes:
    return subprocess.run(["/bin/sh", "-c", script], env={"PATH": path}, capture_output=True, check=True).stdout


async def test_process_over_ssh(host: SshHost) -> None:
    mine = await ask(host, ProcessFact(os.getpid()))
    assert mine is not None
    assert mine.process.pid == os.getpid()
    assert mine.argv[0].endswith(Path(sys.argv[0]).name) or "python" in mine.argv[0]
    assert mine.rss_mb > 1
    assert mine.threads >= 1
    assert await ask(host, ProcessFact(4_000_000)) is None


async def test_a_terminal_is_noticed(host: SshHost) -> None:
    leader, follower = os.openpty()
    process = await asyncio.create_subprocess_exec("sleep", "60", stdin=follower)
    try:
        found = await ask(host, ProcessFact(process.pid))
        assert found is not None
        assert found.has_tty
    finally:
        process.kill()
        await process.wait()
        os.close(leader)
        os.close(follower)


async def test_descendants_of_a_real_process(host: SshHost) -> None:
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "sleep 60 & sleep 60 & echo up; wait", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        found = await ask(host, DescendantsFact(process.pid))
        assert len(found) == 2
        names = [Path(f"/proc/{one.pid}/comm").read_text() for one in found]
        assert names == ["sleep\n", "sleep\n"]
        assert {one.boot_id for one in found} == {BOOT}
    finally:
        for one in found:
            os.kill(one.pid, 9)
        await process.wait()


async def test_listeners_of_a_real_port(host: SshHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        found = await ask(host, ListenersFact(port))
        assert [(one.address, one.pids) for one in found.listeners] == [("127.0.0.1", (os.getpid(),))]
        assert not found.free
    assert (await ask(host, ListenersFact(port))).free


async def test_visitors_of_a_real_port(host: SshHost) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        at = listening.getsockname()
        with socket.create_connection(at), socket.create_connection(at):
            assert await ask(host, VisitorsFact(at[1], 0.5)) == 0, "they were there before"
        asked = asyncio.create_task(ask(host, VisitorsFact(at[1], 1.0)))
        with contextlib.ExitStack() as visitors:
            while not asked.done():
                visitors.enter_context(socket.create_connection(at))
                await asyncio.sleep(0.1)
        assert await asked >= 1


async def test_busy_cores_tell_ours_from_foreign(host: SshHost) -> None:
    process = await asyncio.create_subprocess_exec("sh", "-c", "while :; do :; done")
    try:
        ours = await ask(host, BusyFact(0.5, ours=(process.pid,)))
    finally:
        process.kill()
        await process.wait()
    assert ours.cores == os.cpu_count()
    assert ours.busy_cores is not None
    assert ours.foreign_cores is not None
    assert ours.steal_share is not None
    assert 0 <= ours.foreign_cores < ours.busy_cores
    assert 0 <= ours.steal_share <= 1


async def test_machine_memory_and_disk(host: SshHost, tmp_path: Path) -> None:
    machine = await ask(host, MachineFact())
    assert (machine.boot_id, machine.uid, machine.hostname) == (BOOT, os.getuid(), os.uname().nodename)
    assert machine.cores == os.cpu_count()
    assert Path(machine.tools["setsid"]).exists()
    clock = await ask(host, ClockFact())
    assert clock.unix == pytest.approx(time.time(), abs=600)
    assert clock.offset_s == time.localtime(clock.unix).tm_gmtoff
    memory = await ask(host, MemoryFact())
    assert 0 < memory.available_mb <= memory.total_mb == machine.mem_total_mb
    assert (await ask(host, DiskFact(str(tmp_path)))).free_mb <= shutil.disk_usage(tmp_path).total / 2**20
    with pytest.raises(CommandFailed, match="a remote command failed"):
        await ask(host, DiskFact(str(tmp_path / "absent")))


async def test_a_change_of_the_time_zone_within_a_day_is_seen_ahead(host: SshHost) -> None:
    turn = time.gmtime(time.time() + 10 * 3600)
    day, back = turn.tm_yday - 1, (turn.tm_yday + 99) % 365
    zone = f"STD0DST-1,{day}/{turn.tm_hour},{back}/2"
    told = await host.check(f"TZ={zone}; export TZ\n{ClockFact().command()}")
    clock = ClockFact().parse(told.stdout)
    assert (clock.offset_s, clock.turned_s) == (0, 3600)
    assert clock.turns_at == calendar.timegm(turn) // 3600 * 3600


def test_hardware_names_what_figures_depend_on() -> None:
    case = json.loads((DATA / "machine.json").read_text())
    machine = MachineFact().parse(case["output"].encode())
    gpu = Gpu.model_validate(json.loads((DATA / "gpu_h200.json").read_text())["expect"]["gpus"][0])
    assert machine.hardware(GpuFacts(gpus=(gpu, gpu))) == "2 x AMD EPYC 9654 96-Core Processor, 24 GiB, 2 x NVIDIA H200"
    assert machine.hardware_id(GpuFacts()) != machine.hardware_id(GpuFacts(gpus=(gpu,)))


@pytest.mark.parametrize(
    ("stub", "error"),
    [
        ("exec sleep 60", "no answer within 1 s"),
        ("echo Failed to initialize NVML; exit 9", "exit 9"),
        ("echo '0, X, GPU-1, 1, 2, 3, 4, 5, 6, 7, 8, 0x0'", None),
    ],
)
async def test_nvidia_smi_that_hangs_fails_or_answers(
    host: SshHost, tmp_path: Path, stub: str, error: str | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{stub}\n")
    program.chmod(0o755)
    fact = GpuFact(deadline_s=1)
    result = await host.check(f"PATH={tmp_path}:$PATH\n{fact.command()}")
    found = fact.parse(result.stdout)
    if error is None:
        assert [gpu.name for gpu in found.gpus] == ["X"]
    else:
        assert found.error is not None
        assert error in found.error


# --- open files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["64", "1024"])
def test_the_limit_of_open_files_is_the_hard_one(limit: str) -> None:
    script = f"ulimit -S -n 32 && ulimit -H -n {limit} && {OpenFilesFact().command()}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert OpenFilesFact().parse(done.stdout) == int(limit)


# --- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python3 -m sglang.launch_server --model-path /srv/m --tp 8", "/srv/m"),
        ("vllm serve --model=/srv/m --port 8000", "/srv/m"),
        ("vllm serve org/name --port 8000", "org/name"),
        ("vllm serve --port 8000", None),
        ("llama-server --model models/small/m.gguf", "/home/llm/models/small/m.gguf"),
        ("llama-server --port 1", None),
    ],
)
def test_the_model_that_a_command_line_names(line: str, expected: str | None) -> None:
    assert model_named(line.split(), "/home/llm") == expected


def test_a_model_is_found_in_its_folder_and_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    cached = tmp_path / "hub" / "models--org--name" / "snapshots" / "0a1b"
    for place, kind in ((folder, "dense"), (cached, "moe")):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"model_type": kind}))
    for model, kind in ((str(folder), "dense"), ("org/name", "moe"), ("org/other", None), ("it's/none", None)):
        fact = ModelFact(model)
        done = subprocess.run(
            ["sh", "-c", fact.command()],
            env={"PATH": os.environ["PATH"], "HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": "/nowhere"},
            capture_output=True,
            check=True,
        )
        assert (fact.parse(done.stdout) or {}).get("model_type") == kind


# --- answers that may hold secrets -------------------------------------------------------------------------


class Losing(LocalHost):
    """Loses the connection when part of the answer has come."""

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        raise OutcomeUnknown("the connection was lost", tail="environ b64:U0VDUkVU")


class Nonsense(LocalHost):
    """Answers everything with words that no fact knows."""

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        return CommandResult(exit=0, signal=None, stdout=b"stat b64:%%%\nenviron b64:U0VDUkVU\n", stderr=b"")


async def test_an_error_does_not_quote_the_environment_of_a_process() -> None:
    with pytest.raises(OutcomeUnknown) as lost:
        await ask(Losing(), ProcessFact(os.getpid()))
    assert lost.value.tail == ""
    with pytest.raises(OutcomeUnknown) as other:
        await ask(Losing(), MemoryFact())
    assert other.value.tail == "environ b64:U0VDUkVU"


async def test_an_error_does_not_quote_an_answer_that_cannot_be_read() -> None:
    with pytest.raises(CommandFailed) as garbled:
        await ask(Nonsense(), DiskFact("/"))
    assert "U0VDUkVU" in garbled.value.tail
    with pytest.raises(CommandFailed, match=r"ProcessFact cannot be read: \w+\n") as unread:
        await ask(Nonsense(), ProcessFact(os.getpid()))
    assert unread.value.tail == ""
