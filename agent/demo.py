"""The demo: a whole session on this machine against real parts, and a check of what it showed.

Brings its own SSH server (loopback, fresh keys), its own llama.cpp server with a small model, and a modest
configuration to improve. It ends only processes that it started, and leaves the database and the report behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rich.console import Console

from agent import operate
from agent.config import SessionConfig, load
from state.errors import ConfigError, RatchetError, ServerError
from state.models import DecisionKind, Outcome, SessionStatus
from state.store import Store
from tools import jobs
from tools.demo.model import fetch
from tools.remote import RemoteTarget

PROJECT = Path(__file__).resolve().parents[1]
LAUNCHER = PROJECT / "tools" / "demo" / "llama_server.py"
SERVER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
FLAGS = "--threads 1 --parallel 1 --ctx-size 4096 --flash-attn off --metrics"
"""A modest start: one thread, one slot, no flash attention, and threads that sleep instead of spinning."""

AGAIN = "make demo"

SESSION = """\
# The demo's session file, written by `ratchet demo`.
seed = 1

[target]
name = "demo"
host = "127.0.0.1"
port = {ssh_port}
user = "{user}"
identity_file = "{ssh}/client_key"
known_hosts = "{ssh}/known_hosts"
directory = "{folder}/host"
python = "{python}"
lease_s = 60

[server]
engine = "llamacpp"
url = "http://127.0.0.1:{port}"
start_deadline_s = 30
stop_grace_s = 5

[workload]
vocab_low = 1000
vocab_high = 8000

[[workload.load_points]]
name = "prompts"             # four streams with long random prompts and short answers
concurrency = 4
requests = 4
prompt = "random"
prompt_tokens = 192
output_tokens = 16

[[workload.load_points]]
name = "answers"             # one stream with a long answer that repeats itself
concurrency = 1
requests = 2
prompt = "repetitive"
prompt_tokens = 48
output_tokens = 128

[workload.objective]
at = ["prompts", "answers"]

[workload.guards]
other_points_tolerance = 0.10

[policy]
max_disruption = "restart"

[policy.budget]
time = "8m"
experiments = 8
restarts = 60

[judge]
baseline_runs = 3
max_blocks = 3
max_runs = 1

[validity]
quiet_wait_s = 120

[planner]
refine = false               # one change at a time, so that each step can be followed
only = ["threads-batch-all", "threads-all", "spec-ngram-mod-short", "slots-4", "poll-none", "flash-attn-on"]

[[experiments]]              # refused by the server at start: shows what a failed launch costs and that it is mended
id = "values-in-8-bits"
title = "Values in 8 bits without flash attention"
hypothesis = "half the memory traffic for values, if this server takes it without flash attention"
changes = [
    {{ kind = "flag", name = "--flash-attn", value = "off" }},
    {{ kind = "flag", name = "--cache-type-v", value = "q8_0" }},
]
tags = ["kv-type"]
priority = 0.55
expected_gain = 0.02
"""


async def run_demo(folder: Path, check: bool, console: Console, kind: type[RemoteTarget] = RemoteTarget) -> int:
    """Set up, tune (or go on with an unfinished session of the same folder), clean up; the exit code."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "state.db"
    console.print("demo: about 8 minutes of tuning; a real SSH server, a real llama.cpp server, a real small model")
    model = fetch()
    unfinished = _unfinished(database)
    async with _ssh_server(folder, _port_of(unfinished, "target")) as ssh_port:
        if unfinished is not None:
            console.print("an unfinished session is here: going on with it")
            try:
                code = await operate.resume(database, None, console, AGAIN)
            finally:
                await _end_launches(unfinished)
        else:
            code = await _fresh(folder, database, model, ssh_port, console, kind)
    if check and code == 0:
        return _check(database, console)
    return code


async def _fresh(
    folder: Path, database: Path, model: Path, ssh_port: int, console: Console, kind: type[RemoteTarget]
) -> int:
    port = _free_port()
    session_file = folder / "session.toml"
    session_file.write_text(
        SESSION.format(
            ssh_port=ssh_port, user=_user(), ssh=folder / "ssh", folder=folder, python=sys.executable, port=port
        )
    )
    config = load(session_file)
    async with _llama_server(folder, model, port):
        try:
            return await operate.start(config, database, console, AGAIN, kind)
        finally:
            await _end_launches(config)


def _check(database: Path, console: Console) -> int:
    """What a demo must have shown: a kept gain, a revert, a refused start that was recovered from."""
    with Store.read(database) as store:
        session = store.latest_session()
        verdicts = store.verdicts(session.id)
        kinds = [decision["kind"] for decision in store.decisions(session.id)]
        shown = {
            "a kept gain, confirmed at the end": verdicts.get("close-out") is not None
            and verdicts["close-out"].outcome is Outcome.BETTER,
            "a revert": DecisionKind.REVERT.value in kinds,
            "a server that refused to start": any(v.outcome is Outcome.FAILED for v in verdicts.values()),
            "an orderly end": session.status is SessionStatus.DONE,
        }
    for what, seen in shown.items():
        console.print(f"{'shown' if seen else 'MISSING'}: {what}")
    return 0 if all(shown.values()) else 1


# --- the parts it brings along -----------------------------------------------------------------------------


@asynccontextmanager
async def _ssh_server(folder: Path, port: int) -> AsyncIterator[int]:
    """The loopback SSH server, on `port` or, if 0, on one that is free."""
    place = folder / "ssh"
    announced = place / "port"
    announced.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.demo.sshd", "--dir", str(place), "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--die-with-parent",
        cwd=PROJECT,
        start_new_session=True,  # a Ctrl-C in the terminal is for the agent, which needs SSH to restore
    )
    try:
        yield int(await _appears(announced, process))
    finally:
        await _end(process)


@asynccontextmanager
async def _llama_server(folder: Path, model: Path, port: int) -> AsyncIterator[None]:
    """The server to be tuned, started as an operator would: a command, a directory, a log."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with (folder / "server.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(LAUNCHER),
            *("--model", str(model), "--port", str(port), *FLAGS.split()),
            cwd=folder,
            env=environment | SERVER_ENVIRONMENT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await _listens(port, process, folder / "server.log")
        yield
    finally:
        await _end(process)


async def _end_launches(config: SessionConfig) -> None:
    """The demo's target is its own: nothing that was launched on it outlives the demo."""
    with suppress(RatchetError):
        async with operate.connected(config) as target:
            await target.look_around()
            for key in await target.running_jobs():
                await jobs.stop(target.host, target.root, key, config.server.stop_grace_s)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _appears(path: Path, process: asyncio.subprocess.Process) -> str:
    for _ in range(600):
        if path.exists():
            return path.read_text()
        if process.returncode is not None:
            break
        await asyncio.sleep(0.05)
    raise ServerError("the demo's SSH server did not start", do="run `python -m tools.demo.sshd --dir DIR` by hand")


async def _listens(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    for _ in range(600):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        if process.returncode is not None:
            break
        await asyncio.sleep(0.1)
    tail = log.read_text(errors="replace")[-2000:]
    raise ServerError("the demo's llama.cpp server did not start", tail=tail, do="is the `demo` extra installed?")


def _unfinished(database: Path) -> SessionConfig | None:
    if not database.exists():
        return None
    with Store.read(database) as store:
        rows = store.sessions()
        if not rows or rows[-1].status is SessionStatus.DONE:
            return None
        return SessionConfig.model_validate(rows[-1].config)


def _port_of(config: SessionConfig | None, section: str) -> int:
    return 0 if config is None else config.target.port


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _user() -> str:
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "root"
    if '"' in user:
        raise ConfigError(f"the login name {user} cannot be written into a session file", do="set USER")
    return user
