"""The vLLM adapter: recorded texts of 0.25.1 (H200) and 0.32.0 (CPU)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from state.errors import ServerError
from state.models import Change, EnvChange, FlagChange, HotCall
from tests.contracts.server_contract import ServerCase, ServerContract, declared, spec_of
from tools.servers.base import HttpAnswer
from tools.servers.probe import judge
from tools.servers.vllm import FIXED_NAMES, Vllm

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm"
HELP = (DATA / "help_0.25.1.txt").read_text()
ADAPTER = Vllm()
KNOWN = ADAPTER.parse_help(HELP)
NEWER = ADAPTER.parse_help((DATA / "help_0.32.0_new.txt").read_text())
"""What 0.32.0 has and 0.25.1 has not, and --max-num-seqs."""
SCRIPT = ("/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve")
MODULE = ("/opt/venv/bin/python3", "-m", "vllm.entrypoints.openai.api_server")
CASE = ServerCase(
    adapter=ADAPTER,
    help_text=HELP,
    version_text="Triton is installed, but doesn't include CPU backend. Disabling Triton.\nversion 0.25.1\n",
    version="0.25.1",
    argv=(*SCRIPT, "org/model", "--port", "8201", "--max_model_len=8k", "-dp", "1"),
    program=SCRIPT,
    number="--tensor-parallel-size",
    switch="--enable-prefix-caching",
    secret="--api-key",
    own_variable=("NCCL_ALGO", "Ring"),
)


class TestScript(ServerContract):
    @pytest.fixture
    def case(self) -> ServerCase:
        return CASE


class TestModule(ServerContract):
    @pytest.fixture
    def case(self) -> ServerCase:
        return CASE._replace(argv=(*MODULE, "--model", "org/model", "--port", "8201"), program=MODULE)


def text(name: str) -> str:
    return (DATA / name).read_text()


# --- help --------------------------------------------------------------------------------------------------


def test_the_help_is_read_completely() -> None:
    heads = [line for line in HELP.splitlines() if re.match(r"  -", line)]
    switches = sum(1 for flag in KNOWN.flags.values() if flag.opposite) / 2
    assert len(KNOWN.flags) == len(heads) + switches == 342
    assert {flag.section for flag in KNOWN.flags.values()} >= {
        "Frontend",
        "ModelConfig",
        "SchedulerConfig",
        "VllmConfig",
    }


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("--tensor-parallel-size", {"aliases": ("-tp",), "type": "int", "default": "1"}),
        ("--enable-expert-parallel", {"aliases": ("-ep",), "opposite": "--no-enable-expert-parallel"}),
        ("--gpu-memory-utilization", {"type": "float", "low": 0, "high": 1, "default": "0.92"}),
        ("--max-model-len", {"type": "size", "choices": ("auto", "-1")}),
        ("--max-num-batched-tokens", {"type": "size"}),
        ("--max-num-seqs", {"type": "int", "default": "None"}),
        ("--compilation-config", {"type": "json", "aliases": ("-cc",)}),
        ("--speculative-config", {"type": "json", "aliases": ("-sc",)}),
        ("--optimization-level", {"type": "int", "aliases": ("-O",), "default": "2"}),
        ("--kv-cache-dtype", {"type": "choice", "default": "auto"}),
        ("--distributed-executor-backend", {"type": "str", "choices": ("external_launcher", "mp", "ray", "uni")}),
        ("--served-model-name", {"type": "str", "count": 0}),
        ("--cudagraph-capture-sizes", {"type": "int", "count": 0}),
        ("--hf-token", {"takes_value": "optional"}),
        ("--api-key", {"env": "VLLM_API_KEY", "count": 0}),
        ("--scheduling-policy", {"choices": ("fcfs", "priority"), "section": "SchedulerConfig"}),
    ],
)
def test_help_facts(name: str, facts: dict[str, object]) -> None:
    assert {key: getattr(KNOWN.flags[name], key) for key in facts} == facts


def test_every_closed_name_stands_in_the_help() -> None:
    globs = [glob for names in FIXED_NAMES.values() for glob in names.split()]
    listed = [*KNOWN.flags, *NEWER.flags]
    assert [glob for glob in globs if not any(Path(name[2:]).match(glob) for name in listed)] == []


def test_a_newer_version_brings_flags_of_its_own() -> None:
    assert NEWER.flags["--max-num-scheduled-tokens"].type == "size"
    assert NEWER.flags["--kda-prefill-backend"].choices == ("auto", "triton", "flashkda", "flashinfer", "fused")
    for name, reason in (("--max-num-queued-reqs", "refuse requests"), ("--watermark-config", "what is answered")):
        assert reason in (ADAPTER.check_change(FlagChange(name=name, value="1"), NEWER) or "accepted")


def test_an_abbreviation_of_one_version_is_ambiguous_in_the_next() -> None:
    argv = (*SCRIPT, "--max-num-s", "8")
    assert ADAPTER.read_argv(argv, KNOWN).flags == {"--max-num-seqs": ("8",)}
    with pytest.raises(ServerError, match="--max-num-s"):
        ADAPTER.read_argv(argv, NEWER)


def test_the_interpreter_of_the_server_is_asked_for_its_version() -> None:
    command = ADAPTER.version_command(SCRIPT)
    assert command[:2] == ("/opt/venv/bin/python3", "-c") and "vllm" in command[2]
    assert ADAPTER.version_command(("/opt/bin/vllm", "serve")) == ("/opt/bin/vllm", "--version")
    assert ADAPTER.parse_version("INFO imports\n0.32.0\n") == "0.32.0"


# --- command lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("M", {"--model": ("M",)}),
        ("--model M", {"--model": ("M",)}),
        ("--port 8000 M", {"--model": ("M",), "--port": ("8000",)}),
        ("--max_num_seqs 8", {"--max-num-seqs": ("8",)}),
        ("--max-num-s 8", {"--max-num-seqs": ("8",)}),
        ("--max-num-seqs 8 --max-num-seqs=16", {"--max-num-seqs": ("16",)}),
        ("-tp=2", {"--tensor-parallel-size": ("2",)}),
        ("-O3", {"--optimization-level": ("3",)}),
        ("-O 3", {"--optimization-level": ("3",)}),
        ("-qfp8", {"--quantization": ("fp8",)}),
        ("-ep", {"--enable-expert-parallel": ()}),
        ("--enable-prefix-caching --no-enable-prefix-caching", {"--no-enable-prefix-caching": ()}),
        ("--served-model-name a b --port 1", {"--served-model-name": ("a", "b"), "--port": ("1",)}),
        ("--max-model-len 8k", {"--max-model-len": ("8000",)}),
        ("--max-model-len 8K", {"--max-model-len": ("8192",)}),
        ("--max-model-len -1", {"--max-model-len": ("-1",)}),
        ("--hf-token --port 1", {"--hf-token": (), "--port": ("1",)}),
        ("--compilation-config '{\"mode\":3, \"backend\":\"\"}'",
         {"--compilation-config": ('{"backend":"","mode":3}',)}),
        ('-cc.mode=3 -cc.backend ""', {"--compilation-config": ('{"backend":"","mode":3}',)}),
        ("--compilation_config.pass_config.enable_sp true -cc.mode 3",
         {"--compilation-config": ('{"mode":3,"pass_config":{"enable_sp":true}}',)}),
        ("-cc.splitting_ops+ a,b -cc.splitting_ops+=c", {"--compilation-config": ('{"splitting_ops":["a","b","c"]}',)}),
        ("-cc '{\"mode\":0}' -cc.mode=3", {"--compilation-config": ('{"mode":3}',)}),
        ("--middleware a --middleware b", {"--middleware": ("a", "b")}),
        ("--seed -1", {"--seed": ("-1",)}),
    ],
)  # fmt: skip
def test_reading_follows_the_servers_own_parser(words: str, flags: dict[str, tuple[str, ...]]) -> None:
    assert ADAPTER.read_argv([*SCRIPT, *shlex.split(words)], KNOWN).flags == flags


@pytest.mark.parametrize(
    "words", ["--max-num 8", "--max-num-seq-typo 8", "--port", "--port --seed 1", "-zz 3", "-cc.x"]
)
def test_what_the_server_would_not_accept_cannot_be_read(words: str) -> None:
    with pytest.raises(ServerError):
        ADAPTER.read_argv([*SCRIPT, *words.split()], KNOWN)


def test_both_entry_points_are_one_configuration_but_for_the_program() -> None:
    one, other = (ADAPTER.read_argv([*words], KNOWN) for words in ((*SCRIPT, "M"), (*MODULE, "--model=M")))
    assert one.flags == other.flags
    assert (one.program, other.program) == (SCRIPT, MODULE)


def test_an_edit_replaces_every_spelling_of_a_json_value() -> None:
    argv = (*SCRIPT, "M", "-cc.mode=0", "--port", "1", "--compilation-config.backend", "eager")
    change = FlagChange(name="--compilation-config", value='{"mode": 3}')
    assert ADAPTER.edit_argv(argv, KNOWN, change) == (
        *SCRIPT,
        "M",
        "--compilation-config",
        '{"mode": 3}',
        "--port",
        "1",
    )


def test_every_key_is_hidden_however_it_is_given() -> None:
    argv = (*SCRIPT, "M", "--api-key", "first", "second", "--hf-token=third")
    masked = ADAPTER.mask_argv(argv, KNOWN, lambda name, value: f"<{name}>")
    assert masked == (*SCRIPT, "M", "--api-key", "<--api-key>", "<--api-key>", "--hf-token=<--hf-token>")
    spec, secrets, _ = declared(CASE, VLLM_API_KEY="k3y", VLLM_CPU_KVCACHE_SPACE="1")
    assert spec.env == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert secrets[spec.hidden_env["VLLM_API_KEY"]] == "k3y"


# --- changes -----------------------------------------------------------------------------------------------

GOOD: list[Change] = [
    FlagChange(name="--max-num-seqs", value="512"),
    FlagChange(name="--max-num-batched-tokens", value="16k"),
    FlagChange(name="--max-model-len", value="auto"),
    FlagChange(name="--gpu-memory-utilization", value="0.95"),
    FlagChange(name="--compilation-config", value='{"mode": 3, "cudagraph_mode": "FULL"}'),
    FlagChange(name="--cudagraph-capture-sizes", value="1 2 4 8"),
    FlagChange(name="--no-async-scheduling"),
    FlagChange(name="--kv-cache-dtype", value="fp8"),
    FlagChange(name="--max-num-seqs", remove=True),
    EnvChange(name="NCCL_P2P_DISABLE", value="1"),
    EnvChange(name="VLLM_CPU_OMP_THREADS_BIND", value="0-1"),
]
BAD: list[tuple[Change, str]] = [
    (FlagChange(name="--max_num_seqs", value="8"), "write --max-num-seqs"),
    (FlagChange(name="--max-num-s", value="8"), "abbreviation"),
    (FlagChange(name="-tp", value="2"), "write --tensor-parallel-size"),
    (FlagChange(name="--disable-log-requests"), "no flag"),
    (FlagChange(name="--max-num-seqs", value="many"), "integer"),
    (FlagChange(name="--max-num-batched-tokens", value="16kb"), "unit"),
    (FlagChange(name="--gpu-memory-utilization", value="1.5"), "from 0 to 1"),
    (FlagChange(name="--compilation-config", value="3"), "JSON object"),
    (FlagChange(name="--compilation-config.mode", value="3"), "no flag --compilation-config.mode"),
    (FlagChange(name="--kv-cache-dtype", value="fp9"), "fp8_e4m3"),
    (FlagChange(name="--cudagraph-capture-sizes", value="1 two"), "integer"),
    (FlagChange(name="--model", value="other"), "what is served"),
    (FlagChange(name="--seed", value="1"), "what is answered"),
    (FlagChange(name="--trust-remote-code"), "run or load"),
    (FlagChange(name="--no-trust-remote-code"), "run or load"),
    (FlagChange(name="--disable-log-stats"), "tells of itself"),
    (EnvChange(name="VLLM_API_KEY", value="x"), "secret"),
    (EnvChange(name="VLLM_SERVER_DEV_MODE", value="1"), "tells of itself"),
    (EnvChange(name="VLLM_PLUGINS", value="x"), "run or load"),
    (EnvChange(name="CUDA_VISIBLE_DEVICES", value="1"), "accelerators"),
    (EnvChange(name="NCCL_DEBUG", value="INFO"), "diagnostics"),
    (EnvChange(name="TORCHINDUCTOR_CACHE_DIR", value="/x"), "run or load"),
    (HotCall(name="reset_prefix_cache", value="1", undo=""), "VLLM_SERVER_DEV_MODE"),
    (HotCall(name="something", value="1", undo=""), "no live setting"),
]


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_good_changes(change: Change) -> None:
    assert ADAPTER.check_change(change, KNOWN) is None


@pytest.mark.parametrize(("change", "reason"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_changes_and_why(change: Change, reason: str) -> None:
    assert reason in (ADAPTER.check_change(change, KNOWN) or "accepted")


# --- where it answers, and what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("M", "http://127.0.0.1:8000"),
        ("M --host 0.0.0.0 --port 9000", "http://127.0.0.1:9000"),
        ("M --host ::", "http://[::1]:8000"),
        ("M --host 10.0.0.5 --ssl-certfile c.pem", "https://10.0.0.5:8000"),
    ],
)
def test_base_url(words: str, url: str) -> None:
    assert ADAPTER.base_url(spec_of(CASE._replace(argv=(*SCRIPT, *words.split())))) == url


@pytest.mark.parametrize("words", ["--uds /run/vllm.sock", "--grpc", "--port http"])
def test_a_server_that_is_not_asked_over_http_is_refused(words: str) -> None:
    with pytest.raises(ServerError, match="TCP"):
        ADAPTER.base_url(spec_of(CASE._replace(argv=(*SCRIPT, "M", *words.split()))))


def recorded(version: str) -> dict[str, HttpAnswer]:
    files = {"metrics": f"metrics_{version}.txt"}
    if version == "0.32.0":
        files |= {"models": "models_0.32.0.json", "version": "version_0.32.0.json"}
    return {name: HttpAnswer(id=name, status=200, text=text(file)) for name, file in files.items()}


def test_recorded_answers() -> None:
    answers = recorded("0.32.0")
    shown = ADAPTER.effective(answers)
    assert ADAPTER.model_name(answers) == "smollm2"
    assert ADAPTER.requests(answers) == 0
    assert ADAPTER.in_flight(answers) == 0
    assert ADAPTER.counters(answers) == {"vllm:prompt_tokens_total": 0, "vllm:generation_tokens_total": 0}
    assert (shown["--block-size"], shown["--max-model-len"], shown["info:version"]) == ("128", "2048", "0.32.0")
    assert (shown["--enable-prefix-caching"], shown["info:kv_cache_tokens"]) == ("on", "46592")
    busy = ADAPTER.counters(recorded("0.25.1"))
    assert busy["vllm:generation_tokens_total"] > 500_000 and len(busy) == 2


def test_requests_of_all_engines_are_counted() -> None:
    lines = [f'vllm:num_requests_{state}{{engine="{engine}",model_name="m"}} 2.0' for state in ("running", "waiting")
             for engine in (0, 1)]  # fmt: skip
    answers = {"metrics": HttpAnswer(id="metrics", status=200, text="\n".join(lines))}
    assert ADAPTER.in_flight(answers) == 8


def test_the_start_log_tells_what_runs() -> None:
    shown = ADAPTER.effective({}, text("start_0.25.1.log"))
    assert shown["--max-num-batched-tokens"] == "8192"
    assert shown["--async-scheduling"] == shown["--enable-chunked-prefill"] == "on"
    assert shown["--attention-backend"] == "FLASH_ATTN"
    assert shown["--dtype"] == "bfloat16"
    assert shown["--compilation-config"] == '{"cudagraph_mode":"FULL_AND_PIECEWISE","mode":3}'
    assert (shown["info:kv_cache_tokens"], shown["info:speculative"]) == ("873008", "None")
    assert ADAPTER.effective({}, text("start_kv_fp8_0.32.0.log"))["--kv-cache-dtype"] == "fp8"


@pytest.mark.parametrize(
    ("log", "words", "found"),
    [
        ("start_0.25.1", "--max-num-batched-tokens 8k --async-scheduling --max-model-len 8K --dtype bfloat16", ()),
        ("start_0.25.1", "--max-num-batched-tokens 32k", ("--max-num-batched-tokens: asked 32000, reduced to 8192",)),
        ("start_0.25.1", "--no-async-scheduling", ("--no-async-scheduling: asked, but --async-scheduling is on",)),
        ("start_0.25.1", "--enforce-eager", ("--enforce-eager: asked, but it is off",)),
        ("start_0.25.1", "--attention-backend TRITON_ATTN",
         ("--attention-backend: asked TRITON_ATTN, runs FLASH_ATTN",)),
        ("start_0.25.1", "-cc.mode=3 -cc.cudagraph_mode=full_and_piecewise -cc.backend=x", ()),
        ("start_0.25.1", "-O2 -cc.mode=0",
         ('--compilation-config: asked {"mode":0}, runs {"cudagraph_mode":"FULL_AND_PIECEWISE","mode":3}',)),
        ("start_0.25.1", '--speculative-config {"method":"ngram"}',
         ("--speculative-config: asked, but nothing speculates",)),
        ("start_attention_refused_0.32.0", "--attention-backend FLASHINFER",
         ("--attention-backend: asked FLASHINFER, but it cannot be used here",)),
        ("start_attention_refused_0.32.0", "--attention-backend auto --kv-cache-dtype auto", ()),
        ("start_kv_fp8_0.32.0", "--kv-cache-dtype fp8 --enforce-eager", ()),
    ],
)  # fmt: skip
def test_asked_is_compared_with_what_the_log_shows(log: str, words: str, found: tuple[str, ...]) -> None:
    spec = spec_of(CASE._replace(argv=(*SCRIPT, "M", *words.split())))
    got = ADAPTER.mismatches(spec, ADAPTER.effective({}, text(f"{log}.log")))
    if words.startswith("--max-num-batched-tokens 8k"):
        found = ("--max-num-batched-tokens: asked 8000, raised to 8192",)
    assert got == found


def test_asked_is_compared_with_what_the_answers_show() -> None:
    words = "--served-model-name big smollm2 --block-size 16 --no-enable-prefix-caching --max-model-len 4096"
    spec = spec_of(CASE._replace(argv=(*SCRIPT, "M", *words.split())))
    assert ADAPTER.mismatches(spec, ADAPTER.effective(recorded("0.32.0"))) == (
        "--block-size: asked 16, raised to 128",
        "--no-enable-prefix-caching: asked, but --enable-prefix-caching is on",
        "--max-model-len: asked 4096, reduced to 2048",
    )


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("start_0.32.0", "optimizations settings that are only active during inductor compilation will be ignored"),
        ("start_attention_refused_0.32.0", "Cannot use AttentionBackendEnum.FLASHINFER backend on CPU."),
        ("start_omp_bind_0.32.0", "leaving Torch threads at 2"),
    ],
)
def test_the_server_says_that_it_does_otherwise(log: str, said: str) -> None:
    remarks = ADAPTER.remarks(text(f"{log}.log"))
    assert sum(said in line for line in remarks) == 1
    assert not any("non-default args" in line or "ulimit" in line for line in remarks)


def test_a_healthy_server_without_a_completion_is_dead() -> None:
    looks = {**recorded("0.32.0"), "health": HttpAnswer(id="health", status=200)}
    silent = HttpAnswer(id="generate", error="timeout", detail="after 30 s")
    assert judge(ADAPTER, looks, silent, looks).state == "dead"
    assert judge(ADAPTER, looks, HttpAnswer(id="generate", status=503), looks).state == "dead"
