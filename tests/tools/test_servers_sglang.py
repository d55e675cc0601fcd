"""The SGLang adapter: recorded texts of 0.5.17 (H200); nothing here talks to an SGLang."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from state.errors import ServerError
from state.models import Change, EnvChange, FlagChange, HotCall
from tests.contracts.server_contract import ServerCase, ServerContract, spec_of
from tools.changes.hot_probe import shown
from tools.servers.base import HttpAnswer
from tools.servers.probe import judge
from tools.servers.sglang import FIXED_NAMES, Sglang

DATA = Path(__file__).resolve().parents[1] / "data" / "sglang"
HELP = (DATA / "help_0.5.17.txt").read_text()
ADAPTER = Sglang()
KNOWN = ADAPTER.parse_help(HELP)
MODULE = ("/opt/venv/bin/python3", "-m", "sglang.launch_server")
SCRIPT = ("/opt/venv/bin/python3", "/opt/venv/bin/sglang", "serve")
CASE = ServerCase(
    adapter=ADAPTER,
    help_text=HELP,
    version_text="UserWarning: something\nversion 0.5.17\n",
    version="0.5.17",
    argv=(*MODULE, "--model-path", "org/model", "--port", "18001", "--context-length=8k", "--dp", "1"),
    program=MODULE,
    number="--tp-size",
    switch="--dcp-replicate-q-proj",
    secret="--admin-api-key",
    own_variable=("NCCL_MIN_NCHANNELS", "8"),
)


class TestModule(ServerContract):
    @pytest.fixture
    def case(self) -> ServerCase:
        return CASE


class TestScript(ServerContract):
    @pytest.fixture
    def case(self) -> ServerCase:
        return CASE._replace(argv=(*SCRIPT, "org/model", "--port", "18001"), program=SCRIPT)


def text(name: str) -> str:
    return (DATA / name).read_text()


def recorded() -> dict[str, HttpAnswer]:
    files = {"models": "models_0.5.17.json", "server_info": "server_info_0.5.17.json", "metrics": "metrics_0.5.17.txt"}
    return {name: HttpAnswer(id=name, status=200, text=text(file)) for name, file in files.items()}


# --- help --------------------------------------------------------------------------------------------------


def test_the_help_is_read_completely() -> None:
    heads = [line for line in HELP.splitlines() if re.match(r"  -", line)]
    switches = sum(1 for flag in KNOWN.flags.values() if flag.opposite) / 2
    renamed = len(re.findall(r"Deprecated alias for --[\w-]+\.$", HELP, re.MULTILINE))
    assert len(KNOWN.flags) == len(heads) + switches - renamed
    assert renamed == 6


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("--model-path", {"aliases": ("--model",), "type": "str"}),
        ("--tp-size", {"aliases": ("--tensor-parallel-size",), "type": "int"}),
        ("--ep-size", {"aliases": ("--expert-parallel-size", "--ep"), "type": "int"}),
        ("--mem-fraction-static", {"type": "float", "low": 0, "high": 1}),
        ("--max-total-tokens", {"type": "size"}),
        ("--chunked-prefill-size", {"type": "int"}),
        ("--cuda-graph-max-bs-decode", {"aliases": ("--cuda-graph-max-bs",), "type": "int"}),
        ("--cuda-graph-bs-prefill", {"aliases": ("--piecewise-cuda-graph-tokens",), "count": 0}),
        ("--cuda-graph-backend-prefill", {"choices": ("full", "breakable", "tc_piecewise", "disabled")}),
        ("--lora-paths", {"takes_value": "optional", "count": 0}),
        ("--enable-mscclpp", {"takes_value": False, "opposite": None}),
        ("--disable-cuda-graph", {"takes_value": False}),
        ("--no-dcp-replicate-q-proj", {"opposite": "--dcp-replicate-q-proj"}),
    ],
)
def test_help_facts(name: str, facts: dict[str, object]) -> None:
    assert {key: getattr(KNOWN.flags[name], key) for key in facts} == facts


def test_every_closed_name_stands_in_the_help() -> None:
    globs = [glob for names in FIXED_NAMES.values() for glob in names.split() if glob != "model-type"]
    assert [glob for glob in globs if not any(Path(name[2:]).match(glob) for name in KNOWN.flags)] == []


def test_only_the_language_servers_part_of_the_help_counts() -> None:
    both = (
        "Usage: sglang serve <model>\nOptional override: --model-type {auto,llm,diffusion}\n"
        f"\n--- Help for Standard Language Model Server ---\n{HELP}"
        "\n--- Help for Diffusion Model Server ---\nusage: sglang serve\n\noptions:\n  --num-gpus NUM_GPUS\n"
    )
    assert set(ADAPTER.parse_help(both).flags) == {*KNOWN.flags, "--model-type"}


def test_the_interpreter_of_the_server_is_asked_for_its_version() -> None:
    assert ADAPTER.version_command(MODULE)[:2] == ("/opt/venv/bin/python3", "-c")
    assert ADAPTER.version_command(("/opt/bin/sglang", "serve")) == ("/opt/bin/sglang", "version")
    assert ADAPTER.parse_version("sglang version: 0.5.10\ngit revision: abc1234\n") == "0.5.10"


# --- command lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--model M --tp 8", {"--model-path": ("M",), "--tp-size": ("8",)}),
        ("--tensor-parallel-size=8", {"--tp-size": ("8",)}),
        ("--mem-fraction 0.8", {"--mem-fraction-static": ("0.8",)}),
        ("--cuda-graph-max-bs 64", {"--cuda-graph-max-bs-decode": ("64",)}),
        ("--cuda-graph-bs 1 2 4 --port 1", {"--cuda-graph-bs-decode": ("1", "2", "4"), "--port": ("1",)}),
        ("--chunked-prefill-size -1", {"--chunked-prefill-size": ("-1",)}),
        ("--context-length 1M", {"--context-length": ("1000000",)}),
        ("--context-length 8Ki", {"--context-length": ("8192",)}),
        ("--dcp-replicate-q-proj --no-dcp-replicate-q-proj", {"--no-dcp-replicate-q-proj": ()}),
        ('--json-model-override-args {"b":1,"a":2}', {"--json-model-override-args": ('{"a":2,"b":1}',)}),
        ("--schedule-policy lpm --schedule-policy fcfs", {"--schedule-policy": ("fcfs",)}),
    ],
)
def test_reading_follows_the_servers_own_parser(words: str, flags: dict[str, tuple[str, ...]]) -> None:
    assert ADAPTER.read_argv([*MODULE, *words.split()], KNOWN).flags == flags


@pytest.mark.parametrize("words", ["--enable_metrics", "--enable-turbo-mode", "--disable 1", "--tp-size", "-tp 8"])
def test_what_the_server_would_not_accept_cannot_be_read(words: str) -> None:
    with pytest.raises(ServerError):
        ADAPTER.read_argv([*MODULE, *words.split()], KNOWN)


# --- changes -----------------------------------------------------------------------------------------------

GOOD: list[Change] = [
    FlagChange(name="--max-running-requests", value="1024"),
    FlagChange(name="--mem-fraction-static", value="0.85"),
    FlagChange(name="--enable-mscclpp"),
    FlagChange(name="--enable-single-batch-overlap"),
    FlagChange(name="--num-continuous-decode-steps", value="4"),
    FlagChange(name="--attention-backend", value="flashinfer"),
    FlagChange(name="--moe-runner-backend", value="flashinfer_cutlass"),
    FlagChange(name="--disable-radix-cache"),
    FlagChange(name="--speculative-algorithm", value="NEXTN"),
    FlagChange(name="--cuda-graph-bs-decode", value="1 2 4"),
    EnvChange(name="NCCL_BUFFSIZE", value="8388608"),
    EnvChange(name="SGLANG_ENABLE_SPEC_V2", value="1"),
    HotCall(name="pp_max_micro_batch_size", value="16", undo="8"),
]
BAD: list[tuple[Change, str]] = [
    (FlagChange(name="--mem-fraction", value="0.5"), "write --mem-fraction-static"),
    (FlagChange(name="--enable_mscclpp"), "write --enable-mscclpp"),
    (FlagChange(name="--tp", value="8"), "--tp-size"),
    (FlagChange(name="--cuda-graph-max-bs", value="8"), "write --cuda-graph-max-bs-decode"),
    (FlagChange(name="--enable-turbo-mode"), "no flag"),
    (FlagChange(name="--attention-backend", value="magic"), "flashinfer"),
    (FlagChange(name="--mem-fraction-static", value="85"), "from 0 to 1"),
    (FlagChange(name="--max-running-requests", value="1e3"), "integer"),
    (FlagChange(name="--model-path", value="/other"), "what is served"),
    (FlagChange(name="--nnodes", value="2"), "accelerators"),
    (FlagChange(name="--max-queued-requests", value="8"), "refuse requests"),
    (FlagChange(name="--enable-metrics", remove=True), "tells of itself"),
    (FlagChange(name="--crash-dump-folder", value="/x"), "write"),
    (FlagChange(name="--speculative-accept-threshold-single", value="0.5"), "what is answered"),
    (EnvChange(name="SGLANG_USE_MODELSCOPE", value="1"), "run or load"),
    (EnvChange(name="NCCL_SOCKET_IFNAME", value="eth1"), "network devices"),
    (HotCall(name="pp_max_micro_batch_size", value="many", undo="8"), "not a number"),
    (HotCall(name="flush_cache", value="1", undo=""), "belongs to a measurement"),
    (HotCall(name="set_internal_state", value="{}", undo="{}"), "acceptance thresholds"),
]


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_good_changes(change: Change) -> None:
    assert ADAPTER.check_change(change, KNOWN) is None


@pytest.mark.parametrize(("change", "reason"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_changes_and_why(change: Change, reason: str) -> None:
    assert reason in (ADAPTER.check_change(change, KNOWN) or "accepted")


def test_live_settings_are_made_with_numbers_and_read_back_as_they_are_now() -> None:
    made = ADAPTER.hot_setting("http://h:1", "speculative_accept_threshold_acc", "0.5", "/key")
    assert made is not None
    assert json.loads(made.request.body or "") == {"server_args": {"speculative_accept_threshold_acc": 0.5}}
    assert (made.request.method, made.request.url) == ("POST", "http://h:1/set_internal_state")
    assert [read.url for read in made.reads] == ["http://h:1/server_info", "http://h:1/get_server_info"]
    assert {one.api_key_file for one in (made.request, *made.reads)} == {"/key"}
    shows = {"internal_states": [{"speculative_accept_threshold_acc": 0.5}]}
    assert shown([{"status": 200, "text": json.dumps(shows)}], list(made.where)) == "0.5"
    assert ADAPTER.hot_setting("http://h:1", "flush_cache", "1") is None


# --- where it answers, and what ----------------------------------------------------------------------------


def test_base_url() -> None:
    assert ADAPTER.base_url(spec_of(CASE)) == "http://127.0.0.1:18001"
    bare = CASE._replace(argv=(*MODULE, "--model-path", "M", "--host", "0.0.0.0"))
    assert ADAPTER.base_url(spec_of(bare)) == "http://127.0.0.1:30000"
    with pytest.raises(ServerError, match="TCP"):
        ADAPTER.base_url(spec_of(bare, "--smg-grpc-mode"))


def test_recorded_answers() -> None:
    answers = recorded()
    assert ADAPTER.model_name(answers) == "m"
    assert ADAPTER.in_flight(answers) == 0
    assert ADAPTER.requests(answers) == 4967
    assert ADAPTER.counters(answers) == {
        "sglang:prompt_tokens_total": 2149897.0,
        "sglang:generation_tokens_total": 596168.0,
        "sglang:realtime_tokens_total": 2746067.0,
    }
    shown = ADAPTER.effective(answers)
    assert (shown["--mem-fraction-static"], shown["--attention-backend"]) == ("0.903", "fa3")
    assert (shown["--max-running-requests"], shown["--max-total-tokens"]) == ("4096", "859679")
    assert (shown["--cuda-graph-backend-prefill"], shown["--cuda-graph-max-bs-decode"]) == ("breakable", "256")
    assert (shown["--enable-metrics"], shown["--enable-mscclpp"]) == ("on", "off")
    assert shown["info:version"] == "0.5.17"


def test_most_flags_of_the_help_are_read_back() -> None:
    shown = ADAPTER.effective(recorded())
    switches = [name for name, flag in KNOWN.flags.items() if not flag.takes_value and not flag.opposite]
    assert sum(name in shown for name in switches) > 0.8 * len(switches)


def test_keys_that_the_server_tells_are_never_read() -> None:
    told = recorded()["server_info"].text.replace('"api_key": null', '"api_key": "sk-123"')
    assert "sk-123" in told
    shown = ADAPTER.effective({"server_info": HttpAnswer(id="server_info", status=200, text=told)})
    assert "sk-123" not in str(shown)
    log = text("start_0.5.17.log").replace("api_key=None", "api_key='sk-123'")
    assert "sk-123" in log
    assert "sk-123" not in str(ADAPTER.effective({}, log)) + str(ADAPTER.remarks(log))


def test_the_log_stands_in_for_a_server_that_does_not_answer() -> None:
    shown = ADAPTER.effective({}, text("start_0.5.17.log"))
    assert (shown["--context-length"], shown["--max-running-requests"]) == ("8192", "4096")
    assert (shown["--enable-metrics"], shown["--load-format"]) == ("on", "dummy")
    assert ADAPTER.effective({"server_info": HttpAnswer(id="server_info", status=404)}, "") == {}


def test_an_older_server_answers_under_the_former_name() -> None:
    answers = {"get_server_info": recorded()["server_info"], "server_info": HttpAnswer(id="server_info", status=404)}
    assert ADAPTER.effective(answers)["info:version"] == "0.5.17"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--context-length 8192 --enable-metrics --sampling-backend pytorch --model-path other", ()),
        ("--max-running-requests 8192", ("--max-running-requests: asked 8192, reduced to 4096",)),
        ("--max-total-tokens 1M", ("--max-total-tokens: asked 1000000, reduced to 859679",)),
        ("--mem-fraction-static 0.95", ("--mem-fraction-static: asked 0.95, reduced to 0.903",)),
        ("--attention-backend flashinfer", ("--attention-backend: asked flashinfer, runs fa3",)),
        ("--kv-cache-dtype auto --attention-backend FA3", ()),
        ("--enable-mscclpp", ("--enable-mscclpp: asked, but it is off",)),
        ("--cuda-graph-bs-decode 1 2 4", None),
        ("--cuda-graph-max-bs 256 --chunked-prefill-size 8192", ()),
        ("--page-size 64", ("--page-size: asked 64, reduced to 1",)),
    ],
)
def test_asked_is_compared_with_what_runs(words: str, found: tuple[str, ...] | None) -> None:
    spec = spec_of(CASE._replace(argv=(*MODULE, *words.split())))
    got = ADAPTER.mismatches(spec, ADAPTER.effective(recorded()))
    if found is None:
        assert len(got) == 1 and got[0].startswith("--cuda-graph-bs-decode: asked 1 2 4, runs 1 2 4 8")
    else:
        assert got == found


def test_the_server_says_what_it_chose_and_what_is_deprecated() -> None:
    said = ADAPTER.remarks(text("start_no_graphs_0.5.17.log"))
    assert any("'--disable-cuda-graph' is deprecated" in line and "\x1b" not in line for line in said)
    assert "Attention backend not specified. Use fa3 backend by default." in said
    assert not any("batch, #" in line or "ServerArgs" in line for line in said)


def test_a_server_that_warms_up_is_loading() -> None:
    warming = HttpAnswer(id="health", status=503)
    assert ADAPTER.is_loading(warming)
    assert not ADAPTER.is_loading(HttpAnswer(id="generate", status=503, text="The server is overloaded"))
    assert judge(ADAPTER, {}, warming.model_copy(update={"id": "generate"}), {}).state == "loading"


def test_busy_is_told_from_dead_by_tokens() -> None:
    before, silent = recorded(), HttpAnswer(id="generate", error="timeout", detail="after 30 s")
    moved = before["metrics"].text.replace(
        'mode="decode",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 5961',
        'mode="decode",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 6961',
    )
    after = before | {"metrics": HttpAnswer(id="metrics", status=200, text=moved)}
    assert judge(ADAPTER, before, silent, after).state == "busy"
    assert judge(ADAPTER, before, silent, before).state == "dead"
