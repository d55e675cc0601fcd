"""The demo's llama-server behaves like the binary: its help, its exits, and each flag in force.

What both must do is run on both; the binary takes part where `make native` has built it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real
PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "tools" / "demo" / "llama_server.py"
NATIVE = Path(os.environ.get("RATCHET_LLAMA_SERVER", PROJECT / ".cache" / "llama-server" / "llama-server"))
NATIVE_HELP = PROJECT / "tests" / "data" / "llamacpp" / "help_native.txt"
LIMIT_S = 60
STORY = "The quick brown fox jumps over the lazy dog. " * 12


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without any setting for the server, so that a developer's shell cannot change a test."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    return ours | {"OMP_WAIT_POLICY": "passive"} | dict(extra or {})


def run(program: list[str], *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A launch that is expected to end by itself."""
    command = [*program, *arguments]
    return subprocess.run(
        command, cwd=PROJECT, env=environment(env), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


class Running:
    """A server process on a free port, and its log."""

    def __init__(self, program: list[str], log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*program, "--port", "0", *arguments], cwd=PROJECT, env=environment(env), stdout=sink, stderr=sink
            )
        self.address = ""

    def wait(self) -> "Running":
        """Until it serves, and would end in an orderly way: it listens a moment before it minds signals."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := re.search(r"listening on (http://\S+)", self.text())) or not self.minds_signals():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.02)
        self.address = found.group(1)
        return self

    def minds_signals(self) -> bool:
        """Whether SIGTERM is caught (proc(5), SigCgt)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, path: str, body: object = None, key: str = "") -> tuple[int, str]:
        """The status and the text of an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.address + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def get(self, path: str) -> Any:
        return json.loads(self.ask(path)[1])

    def complete(self, prompt: object, tokens: int, **more: object) -> Any:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        return json.loads(self.ask("/v1/completions", body)[1])

    def cached(self, prompt: str) -> int:
        """How many of the prompt's tokens came from the cache."""
        return int(self.complete(prompt, 2)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(LIMIT_S)
        finally:
            self.process.kill()


PROGRAMS = {
    "module": [sys.executable, "-m", "tools.demo.llama_server"],
    "path": [sys.executable, str(SOURCE)],
    "native": [str(NATIVE)],
}


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "native" and not NATIVE.exists():
        pytest.skip(f"{NATIVE} is not built (make native)")
    return PROGRAMS[request.param]


class Launch:
    """Starts servers and ends what is left of them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.servers = model, folder, list[Running]()

    def __call__(
        self, *arguments: str, program: list[str] | None = None, env: Mapping[str, str] | None = None
    ) -> Running:
        log = self.folder / f"{len(self.servers)}.log"
        small = ("-m", str(self.model), "-c", "1024", "-np", "1", "-t", "1")
        self.servers.append(Running(program or PROGRAMS["path"], log, *small, *arguments, env=env))
        return self.servers[-1].wait()

    def close(self) -> None:
        for server in self.servers:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


@pytest.fixture
def launch(demo_model: Path, tmp_path: Path) -> Iterator[Launch]:
    launcher = Launch(demo_model, tmp_path)
    yield launcher
    launcher.close()


class TestLikeTheBinary:
    def test_help_has_the_layout_that_adapters_parse(self, program: list[str]) -> None:
        done = run(program, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        sections = re.findall(r"^----- (.*) params -----$", done.stdout, re.MULTILINE)
        assert sections == ["common", "sampling", "speculative", "example-specific"]
        assert re.search(
            r"^-t,    --threads N {22}\S.*\(default: -1\)\n {40}\(env: LLAMA_ARG_THREADS\)$", done.stdout, re.M
        )
        assert re.search(r"^-cb,   --cont-batching, -nocb, --no-cont-batching\n {40}\S", done.stdout, re.MULTILINE)
        assert re.search(r"^--metrics {31}\S", done.stdout, re.MULTILINE)

    def test_version_is_told_on_standard_error(self, program: list[str]) -> None:
        done = run(program, "--version")
        assert (done.returncode, done.stdout) == (0, "")
        assert re.match(r"version: \S+ \(build \d+, commit \w+\)\nbuilt with .+ for .+\n$", done.stderr)

    def test_an_unknown_flag(self, program: list[str]) -> None:
        done = run(program, "--max_num-seqs", "4")
        assert (done.returncode, done.stderr) == (1, "error: invalid argument: --max-num-seqs\n")

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["-t", "abc"], 'error while handling argument "-t": stoi'),
            (["--threads", "99999999999"], 'error while handling argument "--threads": stoi'),
            (["-t"], 'error while handling argument "-t": expected value for argument'),
            (["-ctk", "q3_k"], 'error while handling argument "-ctk": Unsupported cache type: q3_k'),
            (["-fa", "maybe"], 'error while handling argument "-fa": error: unknown value for --flash-attn: '),
            (["-np", "0"], 'error while handling argument "-np": error: invalid value for n_parallel'),
            (["-lm", "fast"], 'error while handling argument "-lm": invalid value'),
            (["--poll", "x"], 'error while handling argument "--poll": stoul'),
            (["-sps", "x"], 'error while handling argument "-sps": stof'),
            (["--spec-type", "magic"], 'error while handling argument "--spec-type": unknown speculative type: magic'),
        ],
    )
    def test_a_bad_value_is_explained_with_the_options_usage(
        self, program: list[str], arguments: list[str], complaint: str
    ) -> None:
        done = run(program, *arguments)
        assert done.returncode == 1
        assert done.stderr.startswith(complaint)
        assert re.search(
            rf"\n\nusage:\n.*{arguments[0]}\b.*\n\n\nto show complete usage, run with -h\n$", done.stderr, re.S
        )

    @pytest.mark.parametrize(
        ("name", "value", "complaint"),
        [("THREADS", "abc", "stoi"), ("CONT_BATCHING", "perhaps", "invalid boolean value")],
    )
    def test_a_bad_environment_variable(self, program: list[str], name: str, value: str, complaint: str) -> None:
        done = run(program, env={f"LLAMA_ARG_{name}": value})
        assert done.returncode == 1
        assert done.stderr.startswith(f'error while handling environment variable "LLAMA_ARG_{name}": {complaint}')

    def test_a_model_that_is_missing_or_damaged(self, program: list[str], demo_model: Path, tmp_path: Path) -> None:
        damaged = tmp_path / "damaged.gguf"
        with demo_model.open("rb") as source:
            damaged.write_bytes(source.read(3_000_000))
        for path, complaint in ((tmp_path / "none", "No such file or directory"), (damaged, "corrupted or incomplete")):
            done = run(program, "-m", str(path), "--port", "0")
            assert done.returncode == 1
            assert complaint in done.stderr
            assert "exiting due to model loading error" in done.stderr

    def test_a_quantized_v_cache_needs_flash_attention(self, program: list[str], demo_model: Path) -> None:
        done = run(program, "-m", str(demo_model), "--port", "0", "-c", "512", "-ctv", "q8_0", "-fa", "off")
        assert done.returncode == 1
        assert "quantized V cache requires flash_attn to be enabled" in done.stderr

    def test_a_port_in_use_is_noticed_before_the_model_is_loaded(self, program: list[str], launch: Launch) -> None:
        port = launch(program=program).address.rpartition(":")[2]
        done = run(program, "-m", str(launch.model), "--port", port)
        assert done.returncode == 1
        assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in done.stderr
        assert "load_model: loading model" not in done.stderr

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_stops_it_cleanly_and_frees_the_port(
        self, program: list[str], number: int, launch: Launch
    ) -> None:
        server = launch(program=program)
        server.complete("Once", 2)
        assert server.stop(number) == 0
        assert "cleaning up before exit" in server.text()
        port = server.address.rpartition(":")[2]
        assert launch("--port", port, program=program).address == server.address

    def test_a_signal_while_it_loads_ends_it_at_once(self, program: list[str], launch: Launch, tmp_path: Path) -> None:
        server = Running(program, tmp_path / "log", "-m", str(launch.model), "-t", "1")
        launch.servers.append(server)
        while "loading model" not in server.text():
            assert server.process.poll() is None
            time.sleep(0.005)
        assert server.stop() == -signal.SIGTERM

    def test_it_answers_like_a_server(self, program: list[str], launch: Launch) -> None:
        server = launch("-a", "smollm2", "--metrics", "-np", "2", program=program)
        assert server.ask("/health") == (200, '{"status":"ok"}')
        assert server.get("/v1/models")["data"][0]["id"] == "smollm2"
        answer = server.complete([504, 3575, 4505, 282], 4)
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["usage"]["completion_tokens"] == 4
        status, stream = server.ask(
            "/v1/completions",
            {"prompt": [504, 3575], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        )
        events = [line for line in stream.splitlines() if line]
        assert status == 200
        assert all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 3
        assert "\nllamacpp:tokens_predicted_total 7\n" in server.ask("/metrics")[1]
        assert len(server.get("/slots")) == server.get("/props")["total_slots"] == 2

    def test_the_command_line_wins_over_the_environment_with_a_warning(
        self, program: list[str], launch: Launch
    ) -> None:
        server = launch("--parallel", "3", program=program, env={"LLAMA_ARG_N_PARALLEL": "2"})
        assert server.get("/props")["total_slots"] == 3
        warning = (
            "warn: LLAMA_ARG_N_PARALLEL environment variable is set, but will be overwritten by command line argument"
        )
        assert f"{warning} --parallel" in server.text()

    def test_the_environment_alone_is_enough(self, program: list[str], launch: Launch) -> None:
        settings = {"LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_NO_ENDPOINT_SLOTS": "", "LLAMA_API_KEY": "one,two"}
        server = launch(program=program, env=settings)
        assert server.ask("/metrics")[0] == 401
        assert server.ask("/metrics", key="two")[0] == 200
        assert server.ask("/slots", key="one")[0] == 501


def options(help_text: str) -> set[tuple[tuple[str, ...], str]]:
    """Each option's names and environment variable."""
    found = set()
    for block in re.split(r"\n(?=-)", help_text):
        head, variable = re.match(r"((?:-\w[\w-]*|--\w[\w.-]*)(?:, +)?)+", block), re.search(r"\(env: (\w+)\)", block)
        if head:
            found.add((tuple(re.findall(r"-[\w.-]+", head.group())), variable.group(1) if variable else ""))
    return found


def test_every_option_has_the_names_and_the_variable_of_the_binary() -> None:
    offered = options(run(PROGRAMS["path"], "--help").stdout)
    assert len(offered) > 55
    assert offered - options(NATIVE_HELP.read_text()) == set()


def test_without_a_model_it_says_what_to_pass() -> None:
    done = run(PROGRAMS["path"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no model given: name its GGUF file with -m FNAME or LLAMA_ARG_MODEL\n"


def test_draft_models_are_not_offered() -> None:
    done = run(PROGRAMS["path"], "--spec-type", "draft-simple")
    assert done.returncode == 1
    assert "unknown speculative type: draft-simple" in done.stderr


LOGGED = {
    "-t 1 -tb 2": "n_threads = 1 (n_threads_batch = 2)",
    "-b 96 -ub 32": "n_batch               = 96\n n_ubatch              = 32",
    "-fa on": "flash_attn            = enabled",
    "-ctk q8_0": "K (q8_0)",
    "-ctv q4_0": "V (q4_0)",
    "-ctxcp 3 -cms 77": "context checkpoints enabled, max = 3, min spacing = 77",
    "-cram 64": "prompt cache is enabled, size limit: 64 MiB",
    "--threads-http 9": "using 9 threads for HTTP server",
    "--kv-unified-per-slot 512": "capping per-slot context",
    "--swa-full": "swa_full is not supported by this model",
    "-lm none": "load_mode = none",
    "-kvu": "kv_unified = 'true'",
    "--spec-type ngram-mod,ngram-map-k": "implementation 'ngram-mod'\n implementation 'ngram-map-k'",
    "--spec-ngram-mod-n-match 16 --spec-ngram-mod-n-max 32 --spec-ngram-mod-n-min 8": "n_match=16, n_max=32, n_min=8",
    "--spec-ngram-map-k-size-n 7 --spec-ngram-map-k-min-hits 2": "size_key=7, size_value=48, key_only=1, min_hits=2",
    "--warmup": "warming up the model",
}


def test_settings_show_in_the_servers_own_log(launch: Launch, subtests: pytest.Subtests) -> None:
    server = launch("-lv", "4", *" ".join(LOGGED).split())
    log = server.text()
    for flags, traces in LOGGED.items():
        for trace in traces.split("\n "):
            with subtests.test(flags):
                assert trace in log


def test_settings_show_in_the_answers(launch: Launch) -> None:
    server = launch("-s", "7", "--keep", "3", "-n", "5", "--props", "--spec-type", "ngram-simple", "--no-slots")
    answer = json.loads(server.ask("/completion", {"prompt": "Once upon a time", "ignore_eos": True})[1])
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["n_keep"], settings["speculative.types"]) == (7, 3, "none,ngram-simple")
    assert answer["tokens_predicted"] == 5
    assert server.ask("/props", {})[0] == 200
    assert server.ask("/slots")[0] == 501


def test_defaults_are_the_binarys(launch: Launch) -> None:
    server = launch("-np", "-1")
    assert server.get("/props")["total_slots"] == 4
    assert "kv_unified = 'true'" in server.text()
    assert server.ask("/metrics")[0] == 501
    assert server.ask("/props", {})[0] == 501
    assert launch("--no-warmup", "-fit", "off", "-lv", "4").text().count("warming up") == 0
    assert "fitting params" not in launch.servers[-1].text()


def test_the_prompt_cache_obeys_its_flags(launch: Launch) -> None:
    cached = launch()
    assert (cached.cached(STORY), cached.cached(STORY) > 50) == (0, True)
    uncached = launch("--no-cache-prompt")
    assert [uncached.cached(STORY), uncached.cached(STORY)] == [0, 0]


def test_cache_reuse_keeps_what_follows_a_removed_part(launch: Launch) -> None:
    one, two, three = ("One two three four. " * 8, "Alpha beta gamma delta. " * 8, "Red green blue white. " * 16)
    plain, shifting = launch(), launch("--cache-reuse", "16")
    for server in (plain, shifting):
        server.cached(one + two + three)
    assert shifting.cached(one + three) > plain.cached(one + three) + 30


def test_context_shift_generates_past_the_context(launch: Launch) -> None:
    counts = [
        launch("-c", "256", flag).complete("Once", 300, ignore_eos=True)["usage"]["completion_tokens"]
        for flag in ("--no-context-shift", "--context-shift")
    ]
    assert counts[0] < 256
    assert counts[1] == 300


def test_slot_prompt_similarity_decides_who_gets_a_slot(launch: Launch) -> None:
    start = "One two three four five six. " * 8
    for similarity, reason in (("0.1", "selected slot by LCP similarity"), ("0.9", "selected slot by LRU")):
        server = launch("-np", "2", "-sps", similarity)
        for end in ("Alpha beta gamma. ", "Red green blue. "):
            server.complete(start + end * 12, 1)
        assert reason in [line for line in server.text().splitlines() if "selected slot by" in line][-1]


def test_without_continuous_batching_a_request_waits_for_the_slots(launch: Launch) -> None:
    for flag, order in (("-cb", ["short", "long"]), ("-nocb", ["long", "short"])):
        server, done = launch("-np", "2", flag), list[str]()

        def ask(name: str, tokens: int, server: Running = server, done: list[str] = done) -> None:
            server.complete(name, tokens, ignore_eos=True)
            done.append(name)

        first = threading.Thread(target=ask, args=("long", 120))
        first.start()
        while not any(slot["is_processing"] for slot in server.get("/slots")):
            time.sleep(0.005)
        ask("short", 1)
        first.join()
        assert done == order


def test_settings_show_in_the_process(launch: Launch) -> None:
    server = launch("-lm", "mlock", "--prio", "-1", "-t", "2", "-Cr", "0-0")
    server.complete("Once", 2)
    tasks = list(Path(f"/proc/{server.process.pid}/task").iterdir())
    allowed = {re.search(r"Cpus_allowed_list:\s*(\S+)", (task / "status").read_text())[1] for task in tasks}  # type: ignore[index]
    nice = {(task / "stat").read_text().rpartition(")")[2].split()[16] for task in tasks}
    locked = re.search(r"VmLck:\s*(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())
    assert "0" in allowed
    assert "5" in nice
    assert locked is not None
    assert int(locked.group(1)) > 50_000


def test_a_request_that_stalls_is_ended_after_the_timeout(launch: Launch) -> None:
    host, _, port = launch("-to", "1").address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as stalled:
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert stalled.recv(100).startswith(b"HTTP/1.1 400")


def test_two_servers_share_a_port_only_if_both_ask_for_it(launch: Launch) -> None:
    port = launch("--reuse-port").address.rpartition(":")[2]
    assert launch("--port", port, "--reuse-port").address == launch.servers[0].address
    assert run(PROGRAMS["path"], "-m", str(launch.model), "--port", port).returncode == 1


def test_a_signal_during_a_stream_ends_it_at_the_next_ping(launch: Launch) -> None:
    server = launch("--sse-ping-interval", "1")
    body = json.dumps({"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(server.address + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as stream:
        assert stream.readline().startswith(b"data: ")
        assert server.stop() == 0
