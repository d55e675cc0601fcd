"""The llama.cpp adapter: recorded texts, and live against the demo's launcher and the native binary where it is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from state.errors import PolicyRefused, ServerError
from state.models import Change, EnvChange, FlagChange, HotCall
from tests.contracts.server_contract import ServerCase, ServerContract, declared, spec_of
from tests.local_host import LocalHost
from tools.changes.hot_probe import shown
from tools.servers.argv import program_length
from tools.servers.base import HttpAnswer, KnownFlag
from tools.servers.llamacpp import LlamaCpp
from tools.servers.probe import generates, http

DATA = Path(__file__).resolve().parents[1] / "data" / "llamacpp"
PROJECT = DATA.parents[2]
HELP = (DATA / "help_native.txt").read_text()
ADAPTER = LlamaCpp()
KNOWN = ADAPTER.parse_help(HELP)
LIMIT_S = 60
LAUNCHER = (sys.executable, "-m", "tools.demo.llama_server")
NATIVE_CASE = ServerCase(
    adapter=ADAPTER,
    help_text=HELP,
    version_text="version: 0.6.0-dev (build 0, commit unknown)\nbuilt with GNU 12.2.0 for Linux x86_64\n",
    version="0.6.0-dev (build 0, commit unknown)",
    argv=("/opt/bin/llama-server", "-m", "m.gguf", "--ctx_size", "4096", "-np", "-1", "--port", "8103"),
    program=("/opt/bin/llama-server",),
    number="--threads",
    switch="--cont-batching",
    secret="--api-key",
    own_variable=("OMP_WAIT_POLICY", "passive"),
)


class TestNative(ServerContract):
    @pytest.fixture
    def case(self) -> ServerCase:
        return NATIVE_CASE


@pytest.fixture(scope="module")
def launcher_case() -> ServerCase:
    version_text = printed(*ADAPTER.version_command(LAUNCHER))
    return NATIVE_CASE._replace(
        help_text=printed(*ADAPTER.help_command(LAUNCHER)),
        version_text=version_text,
        version=version_text.removeprefix("version: ").splitlines()[0],
        argv=(*LAUNCHER, *NATIVE_CASE.argv[1:]),
        program=LAUNCHER,
    )


@pytest.mark.real
class TestLauncher(ServerContract):
    @pytest.fixture
    def case(self, launcher_case: ServerCase) -> ServerCase:
        return launcher_case


def printed(*command: str) -> str:
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return done.stdout + done.stderr


# --- help --------------------------------------------------------------------------------------------------


def flag(name: str) -> KnownFlag:
    return KNOWN.flags[name]


def test_the_native_help_is_read_completely() -> None:
    heads = [line for line in HELP.splitlines() if re.match(r"-[^-]|--[^-]", line)]
    names = {word for head in heads for word in re.findall(r"(?:^|, +)(--?[A-Za-z][\w.-]*)", head[:120])}
    assert names <= set(KNOWN.spellings)
    assert len(KNOWN.flags) == len(heads) + sum(1 for known in KNOWN.flags.values() if known.opposite) / 2


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("--threads", {"aliases": ("-t",), "type": "int", "default": "-1", "env": "LLAMA_ARG_THREADS"}),
        ("--predict", {"aliases": ("-n", "--n-predict"), "type": "int", "default": "-1"}),
        ("--flash-attn", {"type": "choice", "choices": ("on", "off", "auto"), "default": "auto", "takes_value": True}),
        ("--split-mode", {"type": "choice", "choices": ("none", "layer", "row", "tensor")}),
        ("--load-mode", {"type": "choice", "choices": ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")}),
        ("--numa", {"type": "choice", "choices": ("distribute", "isolate", "numactl"), "default": None}),
        ("--cpu-strict", {"type": "choice", "choices": ("0", "1"), "default": "0"}),
        ("--poll", {"type": "int", "low": 0, "high": 100}),
        ("--port", {"type": "int", "low": 0, "high": 65535, "default": "8080"}),
        ("--gpu-layers", {"type": "int", "choices": ("auto", "all"), "aliases": ("-ngl", "--n-gpu-layers")}),
        ("--slot-prompt-similarity", {"type": "float", "default": "0.10"}),
        ("--threads-batch", {"type": "int", "default": "same as --threads", "env": None}),
        ("--control-vector-layer-range", {"type": "str", "count": 2}),
        ("--no-host", {"type": "flag", "opposite": None}),
        ("--repack", {"opposite": "--no-repack", "aliases": ()}),
        ("--no-repack", {"opposite": "--repack", "aliases": ("-nr",)}),
        ("--no-kv-unified", {"opposite": "--kv-unified", "aliases": ("-no-kvu",)}),
        ("--no-mmproj", {"opposite": "--mmproj-auto", "aliases": ("--no-mmproj-auto",)}),
        ("--spec-draft-type-k", {"aliases": ("-ctkd", "--cache-type-k-draft"), "type": "choice"}),
        ("--draft", {"removed": True}),
        ("--defrag-thold", {"removed": True}),
        ("--top-k", {"section": "sampling params"}),
    ],
)
def test_help_facts(name: str, facts: dict[str, object]) -> None:
    assert {key: getattr(flag(name), key) for key in facts} == facts


def test_cache_types_come_from_the_allowed_values() -> None:
    assert flag("--cache-type-k").choices == ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@pytest.mark.real
def test_the_launcher_describes_its_flags_as_the_binary_does() -> None:
    launcher = ADAPTER.parse_help(printed(*ADAPTER.help_command(LAUNCHER)))
    assert set(launcher.flags) <= set(KNOWN.flags)
    for name, ours in launcher.flags.items():
        same = ("aliases", "takes_value", "type", "env", "opposite", "separator", "section")
        assert {key: getattr(ours, key) for key in same} == {key: getattr(flag(name), key) for key in same}
        assert set(ours.choices or ()) <= set(flag(name).choices or ())


def test_the_installed_binary_still_prints_the_recorded_help() -> None:
    binary = os.environ.get("RATCHET_LLAMA_SERVER", str(PROJECT / ".cache" / "llama-server" / "llama-server"))
    if not Path(binary).exists():
        pytest.skip(f"there is no native llama-server at {binary}; RATCHET_LLAMA_SERVER may name one")
    assert set(ADAPTER.parse_help(printed(*ADAPTER.help_command((binary,)))).flags) == set(KNOWN.flags)
    assert ADAPTER.parse_version(printed(*ADAPTER.version_command((binary,))))


# --- command lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "length"),
    [
        ("/opt/llama-server -m x", 1),
        ("python -m tools.demo.llama_server -m x", 3),
        ("python3.11 -u -X dev -W error -m pkg.server -m x", 8),
        ("python3 -uBm pkg.server -m x", 3),
        ("python3 -mpkg.server -m x", 2),
        ("/usr/bin/python3 -u /srv/tools/llama_server.py -m x", 3),
        ("/usr/bin/python3 -Im pkg -m x", 3),
        ("/bin/sh -e /srv/start.sh -m x", 3),
        ("bash", 1),
        ("pypy3 server.py", 2),
        ("python-wrapper -m x", 1),
    ],
)
def test_where_the_program_ends(argv: str, length: int) -> None:
    assert program_length(argv.split()) == length


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("-t 2 -t 4", {"--threads": ("4",)}),
        ("-s -1 --keep -1", {"--seed": ("-1",), "--keep": ("-1",)}),
        ("--n_predict 5", {"--predict": ("5",)}),
        ("-nocb -cb", {"--cont-batching": ()}),
        ("-cb -nocb", {"--no-cont-batching": ()}),
        ("--spec-type ngram-mod --spec-type ngram-simple", {"--spec-type": ("ngram-mod", "ngram-simple")}),
        ("--control-vector-layer-range 3 9 -t 1", {"--control-vector-layer-range": ("3", "9"), "--threads": ("1",)}),
        ("-a --threads", {"--alias": ("--threads",)}),
    ],
)
def test_reading_follows_the_servers_own_parser(words: str, flags: dict[str, tuple[str, ...]]) -> None:
    assert ADAPTER.read_argv(["llama-server", *words.split()], KNOWN).flags == flags


@pytest.mark.parametrize(
    "words", ["--threads=2", "--thread 2", "stray", "-t", "--control-vector-layer-range 3", "-T 2"]
)
def test_what_the_server_would_not_accept_cannot_be_read(words: str) -> None:
    with pytest.raises(ServerError):
        ADAPTER.read_argv(["llama-server", *words.split()], KNOWN)


def test_an_empty_command_line_is_an_error() -> None:
    with pytest.raises(ServerError, match="no command line"):
        ADAPTER.read_argv([], KNOWN)


# --- changes -----------------------------------------------------------------------------------------------

GOOD: list[Change] = [
    FlagChange(name="--flash-attn", value="on"),
    FlagChange(name="--gpu-layers", value="all"),
    FlagChange(name="--gpu-layers", value="20"),
    FlagChange(name="--cache-ram", value="-1"),
    FlagChange(name="--spec-type", value="ngram-mod,ngram-simple"),
    FlagChange(name="--slot-prompt-similarity", value="0.5"),
    FlagChange(name="--cpu-range", value="0-1"),
    FlagChange(name="--poll", value="100"),
    FlagChange(name="--threads", remove=True),
    EnvChange(name="GGML_CPU_TILED_MM", value="1"),
    EnvChange(name="LLAMA_ARG_UBATCH", value="128"),
    EnvChange(name="LLAMA_ARG_CONT_BATCHING", value="0"),
    EnvChange(name="OMP_WAIT_POLICY"),
]
BAD: list[tuple[Change, str]] = [
    (FlagChange(name="--flash-attn", value="maybe"), "one of on, off, auto"),
    (FlagChange(name="--flash_attn", value="on"), "write --flash-attn"),
    (FlagChange(name="--cache-type", value="q8_0"), "abbreviation"),
    (FlagChange(name="--max-num-seqs", value="8"), "no flag --max-num-seqs"),
    (FlagChange(name="--cache-type-k", value="q3_k"), "q8_0"),
    (FlagChange(name="--spec-type", value="ngram-mod,magic"), "'magic'"),
    (FlagChange(name="--poll", value="900"), "from 0 to 100"),
    (FlagChange(name="--port", value="99999"), "what is served"),
    (FlagChange(name="--model", value="/tmp/other.gguf"), "what is served"),
    (FlagChange(name="--no-jinja"), "what is answered"),
    (FlagChange(name="--temp", value="0"), "what is answered"),
    (FlagChange(name="--predict", value="1"), "what is answered"),
    (FlagChange(name="--spec-synth-len", value="9"), "what is answered"),
    (FlagChange(name="--tools", value="all"), "run or load"),
    (FlagChange(name="--log-file", value="/etc/passwd"), "what the program tells"),
    (FlagChange(name="--metrics", remove=True), "what the program tells"),
    (FlagChange(name="--draft", value="4"), "removed"),
    (FlagChange(name="--defrag-thold", value="4"), "DEPRECATED"),
    (FlagChange(name="--threads", value="2", remove=True), "dropped"),
    (FlagChange(name="--control-vector-layer-range", value="1 2"), "what is served"),
    (FlagChange(name="--cpu-range", value="--tools"), "another flag"),
    (EnvChange(name="LLAMA_ARG_TREADS", value="2"), "LLAMA_ARG_THREADS"),
    (EnvChange(name="LLAMA_ARG_THREADS", value="abc"), "integer"),
    (EnvChange(name="LLAMA_ARG_MODEL", value="/tmp/x"), "what is served"),
    (EnvChange(name="LLAMA_ARG_CONT_BATCHING", value="perhaps"), "0 or 1"),
    (EnvChange(name="GGML_BACKEND_PATH", value="/tmp/x.so"), "names code"),
    (EnvChange(name="OMP_TOOL_LIBRARIES", value="/tmp/x.so"), "names code"),
    (EnvChange(name="OMP_WAIT_POLICY", value="a\nb"), "control characters"),
]


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_good_changes(change: Change) -> None:
    assert ADAPTER.check_change(change, KNOWN) is None


@pytest.mark.parametrize(("change", "reason"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_changes_and_why(change: Change, reason: str) -> None:
    assert reason in (ADAPTER.check_change(change, KNOWN) or "accepted")


def test_the_scale_of_the_only_adapter_is_a_live_setting() -> None:
    made = ADAPTER.hot_setting("http://h:1", "lora:0", "0.5")
    assert made is not None
    assert json.loads(made.request.body or "") == [{"id": 0, "scale": 0.5}]
    assert {one.url for one in (made.request, *made.reads)} == {"http://h:1/lora-adapters"}
    shows = json.dumps([{"id": 0, "path": "a.gguf", "scale": 0.5}])
    assert shown([{"status": 200, "text": shows}], list(made.where)) == "0.5"
    assert ADAPTER.check_change(HotCall(name="lora:0", value="0.5", undo="1.0"), KNOWN) is None
    assert "lora:ID" in (ADAPTER.check_change(HotCall(name="poll", value="1", undo="0"), KNOWN) or "")
    assert ADAPTER.hot_setting("http://h:1", "poll", "1") is None


def test_a_variable_that_a_flag_overrules_is_refused() -> None:
    spec = spec_of(NATIVE_CASE, "-nocb")
    for name, value in (("LLAMA_ARG_CTX_SIZE", "512"), ("LLAMA_ARG_CONT_BATCHING", "1")):
        with pytest.raises(PolicyRefused, match="overrules"):
            ADAPTER.apply(spec, (EnvChange(name=name, value=value),), KNOWN)


def test_the_variable_of_a_secret_flag_is_hidden() -> None:
    spec, secrets, _ = declared(NATIVE_CASE, LLAMA_API_KEY="k3y", LLAMA_ARG_THREADS="2")
    assert spec.env == {"LLAMA_ARG_THREADS": "2"}
    assert secrets[spec.hidden_env["LLAMA_API_KEY"]] == "k3y"


# --- where it answers, and what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environ", "url"),
    [
        ("", {}, "http://127.0.0.1:8103"),
        ("--host 0.0.0.0", {}, "http://127.0.0.1:8103"),
        ("--host ::", {}, "http://[::1]:8103"),
        ("--host 10.0.0.5,127.0.0.1 --port 99999", {}, "http://10.0.0.5:34463"),
        ("--api-prefix /llm/", {"LLAMA_ARG_HOST": "127.0.0.2"}, "http://127.0.0.2:8103/llm"),
        ("--ssl-cert-file c.pem", {}, "https://127.0.0.1:8103"),
    ],
)
def test_base_url(words: str, environ: dict[str, str], url: str) -> None:
    assert ADAPTER.base_url(spec_of(NATIVE_CASE, *words.split(), **environ)) == url


@pytest.mark.parametrize("words", ["--host /run/llama.sock", "--port http"])
def test_a_server_without_a_tcp_port_cannot_be_asked(words: str) -> None:
    with pytest.raises(ServerError, match="TCP"):
        ADAPTER.base_url(spec_of(NATIVE_CASE, *words.split()))


def recorded() -> dict[str, HttpAnswer]:
    files = {"health": "health.txt", "props": "props.json", "slots": "slots.txt", "models": "v1_models.txt"}
    texts = {name: (DATA / file).read_text() for name, file in {**files, "metrics": "metrics.txt"}.items()}
    return {name: HttpAnswer(id=name, status=200, text=text) for name, text in texts.items()}


def test_recorded_answers() -> None:
    answers = recorded()
    effective = ADAPTER.effective(answers)
    assert effective["--parallel"] == "4"
    assert effective["info:n_ctx_slot"] == "4096"
    assert effective["info:speculative"] == "false"
    assert effective["--metrics"] == "on"
    assert ADAPTER.model_name(answers) == "smollm2"
    assert ADAPTER.counters(answers) == dict.fromkeys(
        ("prompt_tokens_total", "tokens_predicted_total", "n_decode_total", "spec_decode_num_draft_tokens_total",
         "spec_decode_num_accepted_tokens_total"), 0.0
    )  # fmt: skip


def test_counters_of_busy_slots_stand_in_for_metrics() -> None:
    slots = '[{"id":0,"is_processing":false},{"id":1,"n_prompt_tokens":86,"n_prompt_tokens_processed":1}]'
    answers = {"metrics": HttpAnswer(id="metrics", status=501), "slots": HttpAnswer(id="slots", status=200, text=slots)}
    assert ADAPTER.counters(answers) == {"slot 1 n_prompt_tokens": 86.0, "slot 1 n_prompt_tokens_processed": 1.0}


def test_an_answer_that_is_no_json_is_not_taken_for_a_fact() -> None:
    with pytest.raises(ServerError, match="not JSON"):
        ADAPTER.effective({"props": HttpAnswer(id="props", status=200, text="<html>")})


PORT_99999 = "--port: asked 99999, which is no TCP port; the server listens on 34463"


@pytest.mark.parametrize(
    ("log", "words", "found"),
    [
        ("fail_np_too_many", "-c 1024 -np 64", ("--ctx-size: asked 1024, raised to 16384 (256 for each of 64 slots)",)),
        ("fail_np_too_many", "-c 16384 -np 64 -t 2", ()),
        ("fail_np_too_many", "-c 16384 -np 32", ("--parallel: asked 32, runs 64",)),
        ("fail_priv_port", "--port 99999 -t 2", (PORT_99999,)),
        ("fail_priv_port", "-c 20000", ("--ctx-size: asked 20000, reduced to 8192 (8192 for each of 4 slots)",)),
        ("fail_priv_port", "-t 8", ("--threads: asked 8, runs 2",)),
    ],
)  # fmt: skip
def test_asked_is_compared_with_what_the_log_shows(log: str, words: str, found: tuple[str, ...]) -> None:
    case = NATIVE_CASE._replace(argv=("llama-server", "-m", "m.gguf", "-c", "8192"))
    if "-c" in words:
        case = case._replace(argv=("llama-server",))
    effective = ADAPTER.effective({}, (DATA / f"{log}.log").read_text())
    assert ADAPTER.mismatches(spec_of(case, *words.split()), effective) == found


def test_ignored_settings_are_recognised_in_the_answers() -> None:
    argv = ("llama-server", "-m", "/other.gguf", "-a", "big", "--spec-type", "ngram-mod", "--metrics")
    answers = recorded() | {"props": HttpAnswer(id="props", status=200, text='{"endpoint_metrics": false}')}
    found = ADAPTER.mismatches(spec_of(NATIVE_CASE._replace(argv=argv)), ADAPTER.effective(answers))
    assert found == ("--spec-type: asked ngram-mod, but no slot speculates", "--metrics: asked, but off")
    found = ADAPTER.mismatches(spec_of(NATIVE_CASE._replace(argv=argv)), ADAPTER.effective(recorded()))
    assert [text.split(":")[0] for text in found] == ["--spec-type", "--model", "--alias"]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("fail_env_and_flag_conflict", "will be overwritten"),
        ("fail_np_too_many", "rounding down to 16384"),
        ("fail_ctx_impossible", "failed to fit"),
    ],
)
def test_the_server_says_that_it_does_otherwise(log: str, said: str) -> None:
    remarks = ADAPTER.remarks((DATA / f"{log}.log").read_text())
    assert any(said in line for line in remarks)
    assert not any("security:" in line for line in remarks)


# --- live --------------------------------------------------------------------------------------------------


@contextmanager
def launched(log: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, ...]]]:
    """The demo's launcher on a free port, serving; and the command line with which one would start it there."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*LAUNCHER, "--port", "0", *words], cwd=PROJECT, env=clean | {"OMP_WAIT_POLICY": "passive"},
            stdout=sink, stderr=sink,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (found := re.search(r"listening on http://\S+:(\d+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, (*LAUNCHER, "--port", found[1], *words)
    finally:
        process.kill()
        process.wait(LIMIT_S)


@pytest.mark.real
@pytest.mark.anyio
async def test_a_live_server_is_seen_as_it_is(tmp_path: Path, demo_model: Path) -> None:
    host = LocalHost()
    words = ("-m", str(demo_model), "-t", "1", "-c", "1024", "-np", "8", "-a", "demo", "--metrics")
    with launched(tmp_path / "log", *words) as (process, argv):
        known = ADAPTER.parse_help(printed(*ADAPTER.help_command(LAUNCHER)))
        spec = spec_of(NATIVE_CASE._replace(help_text=HELP, argv=argv, program=LAUNCHER))
        base = ADAPTER.base_url(spec)

        alive = await generates(host, sys.executable, ADAPTER, base, prompt=[1000, 2000], max_tokens=3)
        assert (alive.state, alive.tokens) == ("alive", 3), alive

        looks = await http(host, sys.executable, ADAPTER.health_requests(base))
        answers = {answer.id: answer for answer in looks}
        assert [answer.status for answer in looks] == [200] * 5
        assert ADAPTER.model_name(answers) == "demo"
        assert ADAPTER.counters(answers)["tokens_predicted_total"] == 3
        effective = ADAPTER.effective(answers, (tmp_path / "log").read_text())
        found = ADAPTER.mismatches(spec, effective)
        assert found == ("--ctx-size: asked 1024, raised to 2048 (256 for each of 8 slots)",)
        assert ADAPTER.read_argv(argv, known).flags == spec.flags

        process.send_signal(signal.SIGSTOP)
        frozen = await generates(host, sys.executable, ADAPTER, base, timeout_s=0.5, look_s=0.5)
        assert (frozen.state, frozen.tokens) == ("dead", 0), frozen


@pytest.mark.real
@pytest.mark.anyio
async def test_a_key_is_read_on_the_host_only(tmp_path: Path, demo_model: Path) -> None:
    host, key = LocalHost(), tmp_path / "key"
    await host.put(str(key), b"# for tests\nopen-sesame\n")
    words = ("-m", str(demo_model), "-t", "1", "-c", "512", "-np", "1", "--api-key", "open-sesame")
    with launched(tmp_path / "log", *words) as (_, argv):
        base = ADAPTER.base_url(spec_of(NATIVE_CASE._replace(argv=argv)))
        shut = await generates(host, sys.executable, ADAPTER, base)
        assert shut.state == "dead" and "401" in shut.reason, shut
        opened = await generates(host, sys.executable, ADAPTER, base, api_key_file=str(key))
        assert opened.state == "alive", opened
