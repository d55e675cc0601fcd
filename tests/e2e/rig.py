"""A host as an operator would have it, for tests of whole sessions: sshd, a llama.cpp server, a session file.

The agent is a real process that reaches the host by SSH alone. What happened there is told by witnesses that are not
Ratchet's: the server's own start log, a log of every benchmark client, and procfs. Only processes that carry this
rig's folder in their command line or environment, or work in it, are ever signalled, by number and start time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from state.store import Store
from tests.e2e.witness import start_ticks
from tests.ssh_servers import SSHD, SshServer, await_port, free_port, openssh

PROJECT = Path(__file__).resolve().parents[2]
WITNESSED = (sys.executable, str(PROJECT / "tests" / "e2e" / "witness.py"))
TALKATIVE = (sys.executable, str(PROJECT / "tests" / "e2e" / "talkative.py"))
MODEST = "--threads 1 --parallel 2 --ctx-size 1024 --flash-attn off --ubatch-size 1 --metrics"
CANARY = "canary-7f3e9b-must-not-leave-the-host"
LIMIT_S = 300
"""After which something hangs; no test asserts a time."""

SESSION = """\
seed = 1

[target]
name = "rig"
host = "{host}"
port = {ssh_port}
user = "{user}"
identity_file = "{identity}"
known_hosts = "{known_hosts}"
directory = "{root}"
lease_s = {lease_s}
python = "{python}"

[server]
engine = "{engine}"
url = "http://127.0.0.1:{port}"
api_key_file = "{key_file}"
start_deadline_s = {start_deadline_s}
stop_grace_s = 5

[workload]
request_deadline_s = {request_deadline_s}
run_deadline_s = {run_deadline_s}

[[workload.load_points]]
name = "few"
concurrency = {concurrency}
requests = {requests}
prompt_tokens = {prompt_tokens}
output_tokens = {output_tokens}

[workload.objective]
at = ["few"]

[workload.guards]
answers = "{answers}"

[judge]
baseline_runs = {baseline_runs}
min_blocks = 2
max_blocks = {max_blocks}
max_runs = {max_runs}
close_out_blocks = {close_out_blocks}

[validity]                   # whoever else uses this machine must not decide how a test ends
max_foreign_cpu_cores = 1000
max_steal_share = 1.0
min_concurrency_share = 0.0
quiet_wait_s = {quiet_wait_s}
retries = {retries}

[planner]
only = ["nothing-of-the-catalogue"]
refine = false
"""
FASTER = """
[[experiments]]
id = "faster"
title = "Two threads and larger batches"
hypothesis = "one thread and batches of one token are slow on purpose"
changes = [
    { kind = "flag", name = "--threads", value = "2" },
    { kind = "flag", name = "--ubatch-size", value = "256" },
]
priority = 0.9
expected_gain = 0.5
"""
"""An experiment for the session file: a change that gains on this server."""


class Start(NamedTuple):
    """One start of the server, as its witness tells it."""

    pid: int
    ticks: int
    launch: str
    living: tuple[int, ...]


class Agent:
    """A running `run_agent.py` with its output in files."""

    def __init__(
        self, folder: Path, words: tuple[str, ...], environment: Mapping[str, str], within: tuple[str, ...] = ()
    ) -> None:
        number = len(list(folder.glob("agent-*.out")))
        self.out, self.err = folder / f"agent-{number}.out", folder / f"agent-{number}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*within, sys.executable, str(PROJECT / "run_agent.py"), *words],
                cwd=PROJECT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Until it ends by itself; the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the agent hangs\n{self.said}") from None

    def kill(self) -> None:
        """SIGKILL: no handler runs."""
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        """All of its output so far."""
        return self.out.read_text() + self.err.read_text()


class Rig:
    """The host, its server and its session file; see `rig`."""

    def __init__(self, folder: Path, sshd: SshServer, model: Path, program: tuple[str, ...]) -> None:
        self.folder, self.sshd, self.model, self.program = folder, sshd, model, program
        self.port = free_port()
        self.root = folder / "ratchet"
        self.database = folder / "agent" / "state.db"
        self.key_file = folder / "api.key"
        self.key_file.write_text(f"{CANARY}-key\n")
        self.key_file.chmod(0o600)
        self.python = self._python()
        self.agents: list[Agent] = []
        self.around_agents: dict[str, str] = {}
        """More environment for every agent."""
        self.agents_within: tuple[str, ...] = ()
        """A command that becomes the agent elsewhere, such as in a network namespace."""
        self.around_server: dict[str, str] = {}
        """More environment for the server as the operator starts it."""

    # --- what an operator does -----------------------------------------------------------------------------

    def generates(self, tokens: int = 1) -> bool:
        """Whether a request made here, not by Ratchet, is answered with that many tokens."""
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {CANARY}-key"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return bool(json.load(answer)["usage"]["completion_tokens"] == tokens)

    def start_server(
        self, *flags: str, program: tuple[str, ...] = (), port: int | None = None, stdin: str = "/dev/null"
    ) -> int:
        """Start the server detached, by default without a terminal, and wait until it listens; its pid."""
        port = port or self.port
        words = [*(program or self.program), "--model", str(self.model), "--port", str(port)]
        words += ["--api-key", f"{CANARY}-key", *(flags or MODEST.split())]
        return self.start_detached(words, port, stdin)

    def start_detached(
        self, words: Sequence[str], port: int, stdin: str = "/dev/null", limit_s: float = LIMIT_S, **more: str
    ) -> int:
        """Start a server by its whole command line and wait until it listens; its pid. `more`: environment."""
        environ = {
            "PATH": os.environ["PATH"],
            "OMP_WAIT_POLICY": "passive",
            "WITNESS": str(self.folder / "starts"),
            "SECRET_CANARY": f"{CANARY}-env",
            **more,
        }
        detach = 'tty=$1; shift; setsid "$@" <"$tty" >>server.log 2>&1 & echo $!'
        environ |= self.around_server
        command = ["/bin/sh", "-c", detach, "sh", stdin, *words]
        started = subprocess.run(command, cwd=self.folder, env=environ, stdout=subprocess.PIPE, check=True)
        pid = int(started.stdout)
        self.until(lambda: self.listener(port) == pid or start_ticks(pid) is None, pause_s=0.1, limit_s=limit_s)
        assert self.listener(port) == pid, (self.folder / "server.log").read_text()
        return pid

    def reboot(self) -> None:
        """What a power failure leaves: no process of the host lives, and the kernel shows another boot.

        The agent's machine is another one, so its processes stay. The new boot id is mounted over the kernel's in a
        mount namespace of the new sshd. Skips where that is not allowed.
        """
        agents = {agent.process.pid for agent in self.agents}
        self.sshd.kill_connections()
        for pid, ticks in self.ours().items():
            if pid not in agents and start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.sshd.process.wait()
        boot_id = self.folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        config = self.sshd.folder / "sshd_config"
        script = 'mount --bind "$1" /proc/sys/kernel/random/boot_id && exec "$2" -D -e -f "$3"'
        command = ["unshare", "--mount", "/bin/sh", "-c", script, "sh", boot_id, SSHD, config]
        if subprocess.run(["unshare", "--mount", "/bin/true"], check=False).returncode != 0:
            pytest.skip("a mount namespace for another boot id may not be made here")
        with (self.sshd.folder / "log").open("ab") as log:
            self.sshd.process = subprocess.Popen(command, stderr=log)
        await_port(self.sshd.direct_port, self.sshd.process, self.sshd.folder / "log")

    def write_session(self, more: str = "", **fields: object) -> Path:
        """A session file for this rig; `fields` override what stands in its template."""
        settings = self.sshd.settings
        known: dict[str, object] = {
            "host": settings.host,
            "ssh_port": settings.port,
            "user": settings.user,
            "identity": settings.identity_file,
            "known_hosts": settings.known_hosts,
            "root": self.root,
            "python": self.python,
            "port": self.port,
            "key_file": self.key_file,
            "engine": "llamacpp",
            "request_deadline_s": 60,
            "run_deadline_s": 300,
            "concurrency": 2,
            "requests": 4,
            "prompt_tokens": 64,
            "output_tokens": 8,
            "baseline_runs": 2,
            "max_blocks": 2,
            "max_runs": 1,
            "lease_s": 300,
            "start_deadline_s": 60,
            "close_out_blocks": 2,
            "quiet_wait_s": 300,
            "retries": 3,
            "answers": "off",
        }
        path = self.folder / "session.toml"
        path.write_text(SESSION.format(**known | fields) + more)
        return path

    def agent(self, *words: str) -> Agent:
        """Start `run_agent.py` in the background."""
        environment = {**os.environ, "HOME": str(self.folder / "home-of-agent"), "XDG_STATE_HOME": str(self.folder)}
        environment |= {"COLUMNS": "240", **self.around_agents}  # no sentence is broken over lines of a table
        self.agents.append(Agent(self.folder, words, environment, self.agents_within))
        return self.agents[-1]

    def command(self, *words: str) -> Agent:
        """Run `run_agent.py` to its end; look at `.process.returncode` and its output."""
        agent = self.agent(*words)
        agent.wait()
        return agent

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        told = self.command("status", "--json", "--db", str(self.database))
        assert told.process.returncode == 0, told.said
        status: dict[str, Any] = json.loads(told.out.read_text())
        return status

    # --- what witnesses saw --------------------------------------------------------------------------------

    def starts(self) -> list[Start]:
        """Every start of the server, by its own log."""
        path = self.folder / "starts"
        seen = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [Start(one["pid"], one["ticks"], one["launch"], tuple(one["living"])) for one in seen]

    def runs(self) -> list[str]:
        """The key of every benchmark client that was ever started on the host, in order."""
        path = self.folder / "runs"
        return [Path(line).name for line in path.read_text().splitlines()] if path.exists() else []

    def listener(self, port: int | None = None) -> int | None:
        """Who listens on a port, by default the server's."""
        wanted = f":{port or self.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(wanted) and row[3] == "0A"}
        for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
            with contextlib.suppress(OSError):
                if os.readlink(link) in sockets:
                    return int(link.parts[2])
        return None

    def argv(self) -> list[str]:
        """The command line of whoever listens on the server's port."""
        pid = self.listener()
        assert pid is not None, "nobody listens on the server's port"
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]

    def environ(self) -> dict[str, str]:
        """The environment of whoever listens on the server's port."""
        raw = Path(f"/proc/{self.listener()}/environ").read_text().split("\0")
        return dict(item.partition("=")[::2] for item in raw if item)

    def jobs(self) -> dict[str, Path]:
        """Every job that ever began on the host, by key."""
        return {path.parent.name: path.parent for path in sorted(self.root.glob("jobs/*/begun"))}

    def run_under_way(self) -> bool:
        """Whether a benchmark job has begun and not ended."""
        runs = [folder for key, folder in self.jobs().items() if "-M" in key]
        return any((folder / "process").exists() and not (folder / "exit").exists() for folder in runs)

    def client_at_work(self) -> Path | None:
        """The folder of a benchmark that has answers and awaits more, None while there is none."""
        for folder in self.jobs().values():
            with contextlib.suppress(OSError, ValueError):
                done = json.loads((folder / "progress.json").read_text())["done"]
                if done and not (folder / "result.json").exists() and not (folder / "exit").exists():
                    return folder
        return None

    def store(self) -> contextlib.AbstractContextManager[Store]:
        """The session's database, to be read."""
        return Store.read(self.database)

    def ours(self) -> dict[int, int]:
        """pid → start of every living process with this rig's folder in command line or environment, or working there.

        An engine's workers write another name over the first two.
        """
        mark, found = f"{self.folder}/".encode(), {}  # with its end: round-2 is no part of round-27
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                said = (path / "cmdline").read_bytes() + b" " + (path / "environ").read_bytes()
                if mark in said + b" " + os.readlink(path / "cwd").encode() + b"/":
                    ticks = start_ticks(int(path.name))
                    if ticks is not None and int(path.name) != os.getpid():
                        found[int(path.name)] = ticks
        return found

    def workers(self) -> dict[int, int]:
        """pid → session of every living process of a server: they work in this rig's folder, and nobody else does."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "cwd") == str(self.folder) and start_ticks(int(path.name)) is not None:
                    found[int(path.name)] = int((path / "stat").read_bytes().rpartition(b")")[2].split()[3])
        return found

    def until(
        self,
        condition: Callable[[], object],
        agent: Agent | None = None,
        pause_s: float = 0.02,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Wait until the condition is true; an agent that ends before, or the limit, is a failure."""
        deadline = time.monotonic() + limit_s
        while not condition():
            story = "" if agent is None else agent.said
            assert agent is None or agent.process.poll() is None, f"the agent ended too early\n{story}"
            assert time.monotonic() < deadline, f"waited in vain\n{story}"
            time.sleep(pause_s)

    # --- the end -------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """End every process of this rig and prove that none is left."""
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.kill()
        for _ in range(100):
            left = self.ours()
            if not left:
                return
            for pid, ticks in left.items():
                if start_ticks(pid) == ticks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        raise AssertionError(f"processes are left: {left}")

    def _python(self) -> Path:
        """The host's python, which notes every benchmark client that it is asked to run."""
        program = self.folder / "python-of-host"
        note = f'case "$1" in *stream_client.py) echo "$PWD" >>"{self.folder}/runs" ;; esac'
        program.write_text(f'#!/bin/sh\n{note}\nexec "{sys.executable}" "$@"\n')
        program.chmod(0o755)
        return program


@contextlib.contextmanager
def rig(
    folder: Path,
    model: Path,
    program: tuple[str, ...] = WITNESSED,
    ssh_server: Callable[[Path], contextlib.AbstractContextManager[SshServer]] = openssh,
) -> Iterator[Rig]:
    """A host behind a real SSH server, all of it in `folder`; no process of it outlives the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with ssh_server(folder / "sshd") as sshd:
        made = Rig(folder, sshd, model, program)
        try:
            yield made
        finally:
            sshd.stop()
            made.clean_up()


def assert_at_most_one_server(rig: Rig) -> None:
    """Each server found all earlier ones gone, and one at most lives now."""
    starts = rig.starts()
    assert [start for start in starts if start.living] == []
    assert len([start for start in starts if start_ticks(start.pid) == start.ticks]) <= 1
