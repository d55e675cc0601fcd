"""The generic adapter: declared flags on any command line, and checks of real processes that stand for a generation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError

from state.errors import PolicyRefused, ServerError
from state.models import EnvChange, FlagChange, ProcessId
from tests.contracts.server_contract import ServerCase, ServerContract, declared, spec_of
from tests.contracts.target_contract import over, request
from tests.local_host import LocalHost
from tools.remote import RemoteSettings, RemoteTarget
from tools.restore import ALREADY, Restore
from tools.servers.base import HttpAnswer
from tools.servers.generic import HEADER, DeclaredFlag, Generic, GenericRules
from tools.servers.probe import generates
from tools.services.base import StopJobs
from tools.shell import quote
from tools.target import Ready

PROJECT = Path(__file__).resolve().parents[2]
RULES = GenericRules(
    flags=(
        DeclaredFlag(name="--max-connections", type="int", low=1, high=1000, aliases=("-N",)),
        DeclaredFlag(name="--shared_buffers", joined=True),
        DeclaredFlag(name="--fsync", type="switch", opposite="--no-fsync"),
        DeclaredFlag(name="--mode", type="choice", choices=("fast", "safe")),
    ),
    env=("SERVER_THREADS", "SERVER_KEY"),
    secret_flags=("--password",),
)
ADAPTER = Generic(RULES, "http://127.0.0.1:5432")
PROGRAM = ("/opt/bin/server",)
CASE = ServerCase(
    adapter=ADAPTER,
    help_text=f"{HEADER}\n--max-connections\n",
    version_text="\nserver 16.4 (Debian)\n",
    version="server 16.4 (Debian)",
    argv=(*PROGRAM, "--shared_buffers=128MB", "--mode", "safe"),
    program=PROGRAM,
    number="--max-connections",
    switch="--fsync",
    secret="--password",
    own_variable=("SERVER_THREADS", "8"),
)


class TestGeneric(ServerContract):
    @pytest.fixture
    def case(self) -> ServerCase:
        return CASE

    def test_version_is_read_or_an_error(self, case: ServerCase) -> None:
        assert ADAPTER.parse_version(case.version_text) == case.version
        with pytest.raises(ServerError, match="printed nothing"):
            ADAPTER.parse_version("\n")

    def test_commands_start_with_the_program(self, case: ServerCase) -> None:
        """They do not: the server is not asked what it can do."""
        for command in (ADAPTER.help_command(PROGRAM), ADAPTER.version_command(PROGRAM)):
            printed = subprocess.run(["env", "-i", *command], capture_output=True, text=True, check=True).stdout
            assert printed
        assert set(ADAPTER.parse_help(f"{HEADER}\n").flags) >= {flag.name for flag in RULES.flags}

    def test_a_foreign_word_is_an_error_that_names_it(self, case: ServerCase) -> None:
        """It is kept instead, as part of the program."""
        reading = ADAPTER.read_argv((*case.argv, "--no-such-flag-at-all", "7"), case.known)
        assert reading.program == (*PROGRAM, "--no-such-flag-at-all", "7")

    def test_requests_go_to_the_server_itself(self, case: ServerCase) -> None:
        assert ADAPTER.health_requests("http://127.0.0.1:1") == ()
        rules = [GenericRules(health_path="/status"), GenericRules(), GenericRules(health_command=("true",))]
        asked = [Generic(rule, "http://127.0.0.1:1").generate_request("http://127.0.0.1:1", "", []) for rule in rules]
        assert [one.url for one in asked] == ["http://127.0.0.1:1/status", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"]
        assert asked[2].command == ("true",)

    def test_only_tokens_prove_life(self, case: ServerCase) -> None:
        """Nothing is generated: the declared check proves it."""
        assert [ADAPTER.tokens(HttpAnswer(id="g", status=status)) for status in (200, 204, 500, 404)] == [1, 1, 0, 0]
        assert ADAPTER.tokens(HttpAnswer(id="g", error="refused")) == 0


@pytest.mark.parametrize(
    ("words", "program", "flags"),
    [
        ("-N 5 -D /data", ("-D", "/data"), {"--max-connections": ("5",)}),
        ("-N=5 --max-connections 6", (), {"--max-connections": ("6",)}),
        ("--fsync --no-fsync", (), {"--no-fsync": ()}),
        ("--fsync=off", ("--fsync=off",), {}),
        ("-g daemon=off; conf.d", ("-g", "daemon=off;", "conf.d"), {}),
    ],
)
def test_only_declared_flags_are_read(words: str, program: tuple[str, ...], flags: dict[str, tuple[str, ...]]) -> None:
    reading = ADAPTER.read_argv((*PROGRAM, *words.split()), CASE.known)
    assert (reading.program, reading.flags) == ((*PROGRAM, *program), flags)


def test_a_joined_flag_is_written_in_one_word() -> None:
    change = FlagChange(name="--shared_buffers", value="1GB")
    assert ADAPTER.edit_argv(CASE.argv, CASE.known, change)[1:] == ("--shared_buffers=1GB", "--mode", "safe")
    edited = ADAPTER.edit_argv((*PROGRAM, "-D", "x"), CASE.known, change)
    assert edited == (*PROGRAM, "-D", "x", "--shared_buffers=1GB")


def test_a_secret_in_one_word_is_hidden_too() -> None:
    spec, secrets, _ = declared(
        CASE, "--password=hunter2", SERVER_KEY="k3y", SERVER_THREADS="8", SERVER_THREADS_MAX="9"
    )
    assert "hunter2" not in spec.model_dump_json() and "k3y" not in spec.model_dump_json()
    assert spec.env == {"SERVER_THREADS": "8"}
    assert sorted(secrets.values()) == ["/bin", "9", "hunter2", "k3y"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("--max-connections", "5000", "from 1 to 1000"),
        ("--mode", "quick", "one of fast, safe"),
        ("--password", "x", "secret"),
        ("--undeclared", "x", "no flag"),
        ("--fsync", "on", "takes no value"),
    ],
)
def test_what_was_not_declared_is_refused(name: str, value: str, reason: str) -> None:
    assert reason in (ADAPTER.check_change(FlagChange(name=name, value=value), CASE.known) or "accepted")
    with pytest.raises(PolicyRefused):
        ADAPTER.apply(spec_of(CASE), (EnvChange(name="SERVER_THREADS_MAX", value="1"),), CASE.known)


def test_a_name_without_dashes_is_no_flag() -> None:
    with pytest.raises(ValidationError):
        DeclaredFlag(name="max-connections")


# --- real processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Process and port of a web server that is no engine."""
    folder = tmp_path_factory.mktemp("www")
    (folder / "status").write_text("fine\n")
    number = free_port()
    command = [sys.executable, "-m", "http.server", str(number), "--bind", "127.0.0.1"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not answers(number):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield process.pid, number
    finally:
        process.kill()
        process.wait(60)


def answers(port: int) -> bool:
    with closing(socket.socket()) as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def port(served: tuple[int, int]) -> int:
    return served[1]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("rules", "state"),
    [
        (GenericRules(), "alive"),
        (GenericRules(health_path="/status"), "alive"),
        (GenericRules(health_path="/nothing-there"), "dead"),
        (GenericRules(health_command=("sh", "-c", "echo ready")), "alive"),
        (GenericRules(health_command=("sh", "-c", "echo not yet; exit 3")), "dead"),
        (GenericRules(health_command=("/no/such/program",)), "dead"),
        (GenericRules(health_command=("sh", "-c", "sleep 60 & wait")), "dead"),
    ],
    ids=["connect", "path", "no path", "command", "command fails", "no command", "command hangs"],
)
async def test_the_declared_check_decides(port: int, rules: GenericRules, state: str) -> None:
    url = f"http://127.0.0.1:{port}"
    seen = await generates(
        LocalHost(), sys.executable, Generic(rules, url), url, timeout_s=5 if state == "alive" else 1
    )
    assert seen.state == state, seen


@pytest.mark.anyio
async def test_a_port_that_nobody_listens_on_is_dead() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    seen = await generates(LocalHost(), sys.executable, Generic(GenericRules(), url), url, timeout_s=5)
    assert seen.state == "dead" and "refused" in seen.reason


@pytest.mark.anyio
async def test_a_command_that_hangs_leaves_nothing_behind(port: int, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    rules = GenericRules(health_command=("sh", "-c", f"echo $$ > {mark}; sleep 300"))
    url = f"http://127.0.0.1:{port}"
    await generates(LocalHost(), sys.executable, Generic(rules, url), url, timeout_s=2)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{mark.read_text().strip()}").exists():
        assert time.monotonic() < deadline
        await anyio.sleep(0.05)


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "proven"), [("/status", True), ("/nothing-there", False)])
async def test_the_watcher_believes_the_same_check(
    served: tuple[int, int], tmp_path: Path, path: str, proven: bool
) -> None:
    """The restore script with the listening process as the adopted known-good: it looks, and finds it well or not."""
    host, (pid, port) = LocalHost(), served
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    url = f"http://127.0.0.1:{port}"
    restore = Restore(
        root=str(tmp_path),
        port=port,
        key="k",
        fingerprint="f",
        adopted=ProcessId(pid=pid, start_ticks=int(stat[19]), boot_id=boot),
        adopted_is_good=True,
        launch_script="exit 1",
        operations=(),
        python=sys.executable,
        generate=Generic(GenericRules(health_path=path), url).generate_request(url, "", []),
        deadline_s=1,
    )
    prelude = f"boot={boot}\nnap() {{ sleep 0.1; }}\n"
    done = await host.run(f"{quote(['sh', '-c', prelude + restore.render()])}", timeout_s=60)
    assert (done.exit == ALREADY) is proven, done.text + done.tail


@pytest.fixture
def engine(demo_model: Path) -> Iterator[int]:
    """Port of the demo's server, started as an operator starts it."""
    port = free_port()
    words = ("-m", "tools.demo.llama_server", "-m", str(demo_model), "--port", str(port), "-t", "1", "-np", "2")
    none = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, *words], cwd=PROJECT, stdin=none, stdout=none, stderr=none, start_new_session=True
    )
    threading.Thread(target=process.wait, daemon=True).start()
    try:
        deadline = time.monotonic() + 60
        while not answers(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        process.kill()


@pytest.mark.real
@pytest.mark.anyio
async def test_a_target_relaunches_and_measures_a_server_it_knows_nothing_of(engine: int, tmp_path: Path) -> None:
    """The demo's server, told of as if it had no adapter."""
    host, root, url = LocalHost(), tmp_path / "ratchet", f"http://127.0.0.1:{engine}"
    rules = GenericRules(
        flags=(DeclaredFlag(name="-np", type="int", low=1, high=64),),
        env=("OMP_WAIT_POLICY",),
        health_path="/health",
        version_command=(sys.executable, "--version"),
    )
    target = RemoteTarget(host, Generic(rules, url), remote_settings(root, url, engine))
    await target.prepare()
    found = await target.adopt()
    assert (found.spec.flags, found.engine_version[:8]) == ({"-np": ("2",)}, "Python 3")
    await target.acquire("s1", f"session s1, agent process {os.getpid()}")
    try:
        changes = (FlagChange(name="-np", value="4"), EnvChange(name="OMP_WAIT_POLICY", value="passive"))
        changed = target.derive(found.spec, changes)
        await target.launch("s1-T1", changed)
        ready = await target.await_ready("s1-T1")
        assert isinstance(ready, Ready), ready
        serving = await target.serving()
        assert serving is not None and serving.spec.fingerprint == changed.fingerprint
        assert serving.spec.argv[-2:] == ("-np", "4")
        await target.begin_run("s1-M1", request(ready.process))
        assert (await over(target, "s1-M1")).phase == "ended"
        assert (await target.collect_run("s1-M1")).metrics.output_tok_s > 0
        await target.release()
    finally:
        await host.check(StopJobs(root=str(root), shape="*-T*", grace_s=10.0).render(), timeout_s=60)


def free_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def remote_settings(root: Path, url: str, port: int) -> RemoteSettings:
    return RemoteSettings(
        name="any",
        directory=str(root),
        python=sys.executable,
        url=url,
        port=port,
        model=None,
        start_deadline_s=60.0,
        stop_grace_s=10.0,
        lease_s=600,
        pid=None,
        api_key_file=None,
    )
