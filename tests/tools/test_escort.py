"""Other programs under our own file's escort: real processes against a real stub server; nothing asserts seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.validity import invalid_reasons
from state.errors import CommandFailed, HostError
from state.models import ValidityRule
from tests.contracts.bench_contract import KEY, request
from tests.local_host import LocalHost
from tests.tools.test_benches import AIPERF, GUIDELLM, SGLANG, VLLM, Recording
from tests.tools.test_stream_client import CLIENT, Client, Stub, stub_server, until
from tools.benches.base import BenchClient, Place
from tools.benches.builtin import Builtin
from tools.benches.sglang_bench import SglangBench
from tools.benches.vllm_bench import VllmBench
from tools.remote import RemoteSettings, RemoteTarget
from tools.servers.llamacpp import LlamaCpp

PLAYBACK = Path(__file__).with_name("playback.py")
PROMPT = {"id": "capital", "text": "The capital of France is", "max_tokens": 4}


@pytest.fixture(scope="module")
def stub() -> Any:
    with stub_server() as running:
        yield running


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


def sh(tmp_path: Path, script: str, **more: Any) -> dict[str, Any]:
    """An escort for a script of sh in the folder of the test."""
    return {
        "warmup_requests": 0,
        "escort": {
            "command": ["sh", "-c", f"cd {tmp_path} && {script}"],
            "printed": str(tmp_path / "client.out"),
            "begin": "NOW",
            "end": "DONE",
            **more,
        },
    }


@pytest.mark.parametrize("recording", [SGLANG, VLLM, GUIDELLM, AIPERF], ids=lambda r: r.client.name)
def test_a_job_leaves_what_its_client_reads(recording: Recording, stub: Stub, tmp_path: Path) -> None:
    """The whole way, from the script to the figures; the stub has counted nothing of what the recording claims."""
    kind = type(recording.client)
    played = [sys.executable, str(PLAYBACK), str(recording.path), recording.client.result]
    player = kind(played, (), "/srv/llm/tokenizer")
    place = Place(python=sys.executable, client=str(CLIENT), url=stub.url, model="stub", api_key_file=None)
    script = player.script(KEY, request(recording.at, answers=True), place)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    files = {name: (tmp_path / name).read_bytes() for name in player.leaves}
    result = player.parse(files, KEY)
    untouched = recording.client.parse(recording.files(), KEY).metrics
    assert result.metrics.model_copy(update={"server_output_tokens": None}) == untouched
    assert result.telemetry.mem_available_mb
    assert len(result.answers) == 12 and all(answer.text for answer in result.answers)
    assert result.raw["escort"]["warmup"]["completed"] == 1
    reasons = invalid_reasons(result.metrics, result.telemetry, recording.at, ValidityRule())
    assert any("the server counted 0 output tokens" in reason for reason in reasons)


def test_the_server_is_read_before_at_the_mark_and_after(client: Client, stub: Stub, tmp_path: Path) -> None:
    ask = tmp_path / "ask.py"
    body = '{"prompt": [1, 2], "max_tokens": 5, "stream": true}'
    ask.write_text(
        f"import urllib.request as u\nu.urlopen({stub.url + '/v1/completions'!r}, {body.encode()!r}).read()\n"
    )
    once, wait = f"{sys.executable} {ask}", "while [ ! -e go ]; do sleep 0.1; done"
    escort = sh(tmp_path, f"{once}; echo NOW; {wait}; {once}; {once}; echo DONE")
    command = client.command(stub.url, **escort, metrics_path="/metrics")
    with subprocess.Popen(command) as process:
        until("the mark was printed", lambda: "NOW" in printed(tmp_path))
        (tmp_path / "go").touch()
        assert process.wait() == 0
    result = client.result()
    name = "llamacpp:tokens_predicted_total"
    before, begin, after = (result["counters"][at][name] for at in ("before", "begin", "after"))
    assert begin > before
    assert result["marks"] == ["begin", "end"]
    assert after - begin in (0, 2 * (begin - before))  # the mark may have been read too late to tell
    assert (result["exit"], result["stopped_early"], result["error"]) == (0, None, None)
    assert result["telemetry"]["client_cpu_cores"] is not None


def alive(pid: str) -> bool:
    """Whether the process still does something; one that nobody has waited for yet does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def printed(folder: Path) -> str:
    path = folder / "client.out"
    return path.read_text() if path.exists() else ""


def test_at_the_deadline_the_whole_group_is_ended(client: Client, stub: Stub, tmp_path: Path) -> None:
    stubborn = (
        "trap '' TERM; (trap '' TERM; echo $$ >pids; while :; do sleep 0.2; done) & echo $! >>pids; wait; sleep 60"
    )
    result = client.run(stub.url, run_deadline_s=2, **sh(tmp_path, stubborn), answers={"prompts": [PROMPT]})
    assert (result["exit"], result["stopped_early"]) == (-signal.SIGKILL, "run deadline")
    assert result["answers"] == {"error": "not asked: run deadline"}
    for pid in (tmp_path / "pids").read_text().split():
        assert not alive(pid)


def test_a_terminated_run_ends_its_program_and_says_so(client: Client, stub: Stub, tmp_path: Path) -> None:
    with subprocess.Popen(client.command(stub.url, **sh(tmp_path, "echo NOW; exec sleep 60"))) as process:
        until("the program runs", lambda: "NOW" in printed(tmp_path))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    result = client.result()
    assert (result["exit"], result["stopped_early"]) == (-signal.SIGTERM, "terminated")


def test_a_file_from_before_is_never_taken_for_the_result(client: Client, stub: Stub, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    result = client.run(stub.url, **sh(tmp_path, "echo ran >ran", fresh=[str(tmp_path / "old.json")]))
    assert "left from an earlier run" in result["error"]
    assert not (tmp_path / "ran").exists()


def test_a_program_that_is_not_there_is_an_error_of_the_run(client: Client, stub: Stub, tmp_path: Path) -> None:
    wanted = sh(tmp_path, "true")
    wanted["escort"]["command"] = [str(tmp_path / "no-such-client")]
    result = client.run(stub.url, **wanted, answers={"prompts": [PROMPT]})
    assert result["error"].startswith("the client could not be started: ")
    assert result["answers"]["error"].startswith("not asked: ")


def test_a_failed_program_leaves_its_exit_code_and_no_answers(client: Client, stub: Stub, tmp_path: Path) -> None:
    result = client.run(stub.url, **sh(tmp_path, "exit 7"), answers={"prompts": [PROMPT]})
    assert (result["exit"], result["marks"]) == (7, [])
    assert result["answers"] == {"error": "not asked: exit code 7"}


def test_a_server_that_refuses_the_warm_up_is_not_measured(client: Client, tmp_path: Path) -> None:
    with stub_server("--fault", "http_503") as refusing:
        result = client.run(refusing.url, **{**sh(tmp_path, "echo ran >ran"), "warmup_requests": 8})
    assert result["stopped_early"] == "error storm"
    assert not (tmp_path / "ran").exists()


def test_the_key_goes_to_the_program_and_nowhere_else(client: Client, stub: Stub, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("hunter2-hunter2\n")
    wanted = sh(tmp_path, 'printf %s "$OPENAI_API_KEY-$EXTRA" >seen', key_variables=["OPENAI_API_KEY"])
    wanted["escort"]["environment"] = {"EXTRA": "more"}
    result = client.run(stub.url, **wanted, api_key_file=str(key))
    assert (tmp_path / "seen").read_text() == "hunter2-hunter2-more"
    assert "hunter2" not in json.dumps(result)
    assert os.environ.get("OPENAI_API_KEY") != "hunter2-hunter2"


@pytest.mark.parametrize("command", [[], ["a", 5], ["a\0b"], "words"])
def test_words_that_cannot_be_run_are_refused(client: Client, stub: Stub, tmp_path: Path, command: Any) -> None:
    wanted: Mapping[str, Any] = {"command": command, "printed": str(tmp_path / "client.out")}
    done = subprocess.run(client.command(stub.url, escort=wanted), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "request.escort" in done.stderr


def target_with(bench: BenchClient, folder: Path, url: str) -> RemoteTarget:
    """A target on this machine; nothing is asked of its server but what the client asks."""
    settings = RemoteSettings(
        name="here",
        directory=str(folder / "ratchet"),
        python=sys.executable,
        url=url,
        port=int(url.rpartition(":")[2]),
        model="stub",
        start_deadline_s=5.0,
        stop_grace_s=1.0,
        lease_s=300,
        pid=None,
        api_key_file=None,
    )
    return RemoteTarget(LocalHost(), LlamaCpp(), settings, bench)


@pytest.mark.anyio
async def test_a_target_runs_the_client_that_it_was_given(stub: Stub, tmp_path: Path) -> None:
    played = [sys.executable, str(PLAYBACK), str(SGLANG.path), SGLANG.client.result]
    target = target_with(SglangBench(played, (), "/srv/llm/tokenizer"), tmp_path, stub.url)
    await target.prepare()
    await target.acquire("s1", "a test")
    await target.begin_run(KEY, request(SGLANG.at))
    for _ in range(600):
        state = await target.look_run(KEY)
        if state.phase != "running":
            break
        assert (state.done, state.output_tokens) == (0, 0)
        await target.pause(0.05)
    assert state.phase == "ended"
    assert (await target.collect_run(KEY)).metrics.completed == 24
    await target.release()


@pytest.mark.anyio
async def test_a_client_that_wrote_nothing_is_told_with_its_last_words(stub: Stub, tmp_path: Path) -> None:
    crash = ["sh", "-c", "echo 'requests.exceptions.ConnectionError: refused' >&2; exit 1"]
    target = target_with(SglangBench(crash, (), "/srv/llm/tokenizer"), tmp_path, stub.url)
    await target.prepare()
    await target.acquire("s1", "a test")
    await target.begin_run(KEY, request(SGLANG.at))
    while (await target.look_run(KEY)).phase == "running":
        await target.pause(0.05)
    with pytest.raises(CommandFailed) as failed:
        await target.collect_run(KEY)
    assert failed.value.tail.splitlines() == [
        "the client's result cannot be used: the client wrote no client.jsonl (it ended with exit code 1)",
        "requests.exceptions.ConnectionError: refused",
    ]
    await target.release()


@pytest.mark.anyio
async def test_a_stopped_run_leaves_none_of_its_clients_processes(stub: Stub, tmp_path: Path) -> None:
    """Not even one that began a session of its own and does not mind being asked."""
    stray = tmp_path / "stray"
    away = f"trap '' TERM; echo $$ >{stray}.part; mv {stray}.part {stray}; while :; do sleep 0.2; done"
    (tmp_path / "away.sh").write_text(away)
    client = SglangBench(["sh", "-c", f"setsid sh {tmp_path}/away.sh & exec sleep 60"], (), "t")
    target = target_with(client, tmp_path, stub.url)
    await target.prepare()
    await target.acquire("s1", "a test")
    await target.begin_run(KEY, request(SGLANG.at))
    while not stray.exists():
        await target.pause(0.05)
    await target.stop_run(KEY)
    assert (await target.look_run(KEY)).phase == "ended"
    assert not alive(stray.read_text().strip())
    await target.release()


@pytest.mark.anyio
async def test_the_client_is_asked_for_its_version_before_anything_else(stub: Stub, tmp_path: Path) -> None:
    there, gone = VllmBench(["echo"], (), "t"), SglangBench([sys.executable], (), "t")
    assert await target_with(there, tmp_path, stub.url).client() == f"vllm --version; it lacks {there.lacks[0]}"
    file = SglangBench([sys.executable, str(PLAYBACK)], (), "t")
    assert (await target_with(file, tmp_path, stub.url).client()).startswith(f"sglang {PLAYBACK}; it lacks ")
    assert await target_with(Builtin(), tmp_path, stub.url).client() == "builtin"
    with pytest.raises(HostError, match="sglang cannot be started") as refused:
        await target_with(gone, tmp_path, stub.url).client()
    assert "PackageNotFoundError" in refused.value.tail and "client_command" in refused.value.do
    assert not (tmp_path / "ratchet").exists()
