"""Diagnosis by recorded logs: what failed, what to do, and that nothing is made up."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pydantic
import pytest

from agent.catalogue.entries import book, engines
from tools import diagnose as module
from tools.diagnose import Action, FailureClass, Layer, Rule, RuleBook, complaint, diagnose, rule_named, rules

EVERYTHING = Path(__file__).resolve().parents[1] / "data"
DATA = EVERYTHING / "llamacpp"
LINES = tomllib.loads((EVERYTHING / "diagnose" / "lines.toml").read_text())
INVALID, ENVIRONMENT, MEMORY = FailureClass.CONFIG_INVALID, FailureClass.ENVIRONMENT, FailureClass.OOM_INIT
PORT = (FailureClass.TRANSIENT_INFRA, Action.CLEAN_AND_RETRY_ONCE, "couldn't bind HTTP server socket")
NO_MEMORY = (MEMORY, Action.ADJUST_DOWN, "ggml_aligned_malloc: insufficient memory (attempted to allocate ")
NO_MODEL = (ENVIRONMENT, Action.ESCALATE, "failed to open GGUF file '/srv/models/nope.gguf'")
V_CACHE = (INVALID, Action.REJECT, "quantized V cache requires flash_attn to be enabled")

RECORDED = {
    "fail_bad_cache_type": (
        INVALID,
        Action.REJECT,
        'error while handling argument "-ctk": Unsupported cache type: q3_k',
    ),
    "fail_bad_host": PORT,
    "fail_bad_value": (INVALID, Action.REJECT, 'error while handling argument "-t": stoi'),
    "fail_ctx_impossible": NO_MEMORY,
    "fail_ctx_impossible_fit_off": NO_MEMORY,
    "fail_env_invalid": (INVALID, Action.REJECT, 'error while handling environment variable "LLAMA_ARG_THREADS"'),
    "fail_model_missing": NO_MODEL,
    "fail_model_truncated": (ENVIRONMENT, Action.ESCALATE, "tensor 'token_embd.weight' data is not within the file"),
    "fail_port_in_use": PORT,
    "fail_removed_flag_no_mmap": (INVALID, Action.REJECT, "error: invalid argument: --no-mmap"),
    "fail_restart_too_soon_after_sigkill": PORT,
    "fail_ulimit_oom": NO_MEMORY,
    "fail_unknown_flag": (INVALID, Action.REJECT, "error: invalid argument: --max-num-seqs"),
    "fail_v_quant_no_fa": V_CACHE,
    "fail_xllamacpp_ctx_impossible": NO_MEMORY,
    "fail_xllamacpp_model_missing": NO_MODEL,
    "fail_xllamacpp_port_in_use": PORT,
    "fail_xllamacpp_v_quant_no_fa": V_CACHE,
}
STARTED = ("fail_env_and_flag_conflict", "fail_np_too_many", "fail_priv_port", "fail_ub_gt_b")
"""These servers came up and served; the setting was not what was asked, which is no failure to diagnose."""


def log_of(name: str) -> str:
    return (DATA / f"{name}.log").read_text()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_failures(name: str) -> None:
    failure_class, action, cause = RECORDED[name]
    failure = diagnose("llamacpp", log_of(name), 1)
    assert (failure.failure_class, failure.action, failure.exit_code) == (failure_class, action, 1)
    assert failure.cause.startswith(cause)
    assert failure.tail == log_of(name).rstrip()


def test_every_recorded_log_has_an_expectation() -> None:
    assert {path.stem for path in DATA.glob("fail_*.log")} == {*RECORDED, *STARTED}


@pytest.mark.parametrize("name", STARTED)
def test_a_log_without_a_failure_is_not_explained(name: str) -> None:
    failure = diagnose("llamacpp", log_of(name), 1)
    assert (failure.failure_class, failure.action) == (FailureClass.UNKNOWN, Action.RETRY_ONCE)
    assert "listening on" in failure.cause
    assert failure.tail


def test_the_cause_is_found_far_above_the_end() -> None:
    usage = "\n".join(f"-x{number},  --option-{number} N   some text" for number in range(5000))
    failure = diagnose("llamacpp", f'error while handling argument "-c": stoi\n\nusage:\n{usage}\n', 1)
    assert failure.cause == 'error while handling argument "-c": stoi'
    assert len(failure.tail.splitlines()) == module.TAIL_LINES


def test_a_cause_outranks_an_earlier_symptom() -> None:
    symptom = "0.1 E llama_model_load: error loading model: something threw\n"
    assert diagnose("llamacpp", symptom, 1).failure_class == FailureClass.CRASH_AT_LOAD
    failure = diagnose("llamacpp", symptom + log_of("fail_v_quant_no_fa"), 1)
    assert failure.cause == V_CACHE[2]


@pytest.mark.parametrize(
    ("log", "code", "failure_class", "action", "cause"),
    [
        ("loading\n", -9, MEMORY, Action.REJECT, "SIGKILL"),
        ("loading\n", 137, MEMORY, Action.REJECT, "SIGKILL"),
        ("", 137, MEMORY, Action.REJECT, "SIGKILL"),
        ("kernel: Out of memory: Killed process 4711 (llama-server)\n", 137, MEMORY, Action.REJECT, "4711"),
        ("Traceback (most recent call last):\n  boom\n", 137, FailureClass.UNKNOWN, Action.RETRY_ONCE, "no rule"),
        ("loading\n", 139, FailureClass.CRASH_AT_LOAD, Action.RETRY_ONCE, "SIGSEGV"),
        ("loading\n", -4, FailureClass.UNSUPPORTED_HW, Action.REJECT, "SIGILL"),
        ("OSError: [Errno 98] Address already in use\n", 1, *PORT[:2], "98"),
        ("write: No space left on device\r\n", 1, ENVIRONMENT, Action.ABORT, "No space left"),
        ("ModuleNotFoundError: No module named 'vllm'\n", 1, ENVIRONMENT, Action.SKIP, "'vllm'"),
        ("sh: 1: exec: llama-server: not found\n", 127, ENVIRONMENT, Action.ESCALATE, "not found"),
        ("sh: 1: exec: ./llama-server: Permission denied\n", 126, ENVIRONMENT, Action.ESCALATE, "Permission denied"),
        ("slot 3: prompt not found in cache\n", 1, FailureClass.UNKNOWN, Action.RETRY_ONCE, "no rule"),
        ("", 0, FailureClass.UNKNOWN, Action.RETRY_ONCE, "the log is empty"),
        ("\x1b[31mEADDRINUSE\x1b[0m\n", 1, *PORT[:2], "EADDRINUSE"),
    ],
)  # fmt: skip
def test_what_holds_for_every_engine(
    log: str, code: int, failure_class: FailureClass, action: Action, cause: str
) -> None:
    failure = diagnose("some-engine", log, code)
    assert (failure.failure_class, failure.action) == (failure_class, action)
    assert cause in failure.cause


def test_a_named_cause_outranks_the_bare_signal() -> None:
    failure = diagnose("llamacpp", log_of("fail_ulimit_oom"), 137)
    assert failure.cause.startswith("ggml_aligned_malloc")


def test_one_engines_rules_are_not_applied_to_another() -> None:
    assert diagnose("sglang", "error: invalid argument: --x\n", 1).failure_class == FailureClass.UNKNOWN


def test_an_unexplained_failure_keeps_its_last_telling_line() -> None:
    log = "0.1 E srv: the moon is in the wrong house\n0.2 E srv  llama_server: exiting due to model loading error\n"
    failure = diagnose("llamacpp", log, None)
    assert "the moon" in failure.cause and "it did not end" in failure.cause
    assert failure.tail == log.rstrip()


# --- SGLang and vLLM, recorded -----------------------------------------------------------------------------

REJECT, RUNS = Action.REJECT, FailureClass.CRASH_WHILE_SERVING
BY_ENGINE = {
    "vllm/fail_awq_nockpt": (INVALID, REJECT, "Value error, Cannot find the config file for awq"),
    "vllm/fail_badquant": (INVALID, REJECT, "Value error, Unknown quantization method: awq_turbo"),
    "vllm/fail_cpu_batched_lt_seqs": (INVALID, REJECT, "Value error, max_num_batched_tokens (64) must be greater"),
    "vllm/fail_cpu_cli_package_metadata_not_found": (
        ENVIRONMENT,
        Action.ESCALATE,
        "importlib.metadata.PackageNotFound",
    ),
    "vllm/fail_cpu_ctx_too_long": (INVALID, REJECT, "Value error, User-specified max_model_len (100000) is greater"),
    "vllm/fail_cpu_env_invalid": (INVALID, REJECT, "Value error, invalid literal for int() with base 10: 'abc'"),
    "vllm/fail_cpu_kv_oom": (MEMORY, Action.ADJUST_DOWN, "Available memory on node 0 (17.85/20.59 GiB) on kv cache"),
    "vllm/fail_cpu_model_missing": (ENVIRONMENT, Action.ESCALATE, "huggingface_hub.errors.LocalEntryNotFoundError"),
    "vllm/fail_cpu_port_in_use": (*PORT[:2], "OSError: [Errno 98] Address already in use"),
    "vllm/fail_cpu_quant_awq": (INVALID, REJECT, "Value error, Cannot find the config file for awq"),
    "vllm/fail_cpu_tp2_heads": (INVALID, REJECT, "Value error, Total number of attention heads (9)"),
    "vllm/fail_cpu_unknown_flag": (INVALID, REJECT, "vllm: error: unrecognized arguments: --max-num-seq-typo 8"),
    "vllm/fail_cpu_worker_sigkilled_mid_bench": (RUNS, Action.RESTORE, "Worker proc VllmWorker-0 died unexpectedly"),
    "vllm/fail_engine_sigkilled": (RUNS, Action.RESTORE, "[shutdown] MPClient: engine core exited unexpectedly"),
    "vllm/fail_flashinfer_missing": (ENVIRONMENT, Action.SKIP, "Selected backend AttentionBackendEnum.FLASHINFER"),
    "vllm/fail_maxlen": (INVALID, REJECT, "Value error, User-specified max_model_len (400000) is greater"),
    "vllm/fail_no_flashinfer_pkg": (ENVIRONMENT, Action.SKIP, "ModuleNotFoundError: No module named 'flashinfer'"),
    "vllm/fail_tp2_one_gpu": (INVALID, REJECT, "Value error, World size (2) is larger than the number of available"),
    "vllm/fail_unknownflag": (INVALID, REJECT, "main.py: error: unrecognized arguments: --enable-turbo-mode"),
    "vllm/fail_util001": (MEMORY, Action.ADJUST_UP, "No available memory for the cache blocks."),
    "vllm/fail_util006": (ENVIRONMENT, Action.CLEAN_AND_RETRY_ONCE, "Error in memory profiling. Initial free memory"),
    "sglang/fail_badquant": (INVALID, REJECT, "sglang serve: error: argument --quantization: invalid choice"),
    "sglang/fail_fa4": (ENVIRONMENT, Action.SKIP, "ImportError: FlashAttention-4 CUTE is not available."),
    "sglang/fail_mem003": (MEMORY, Action.ADJUST_UP, "Loaded weights leave no GPU memory for the KV cache"),
    "sglang/fail_scheduler_sigkilled": (RUNS, Action.RESTORE, "Subprocess scheduler_0 (pid=6052) crashed with exit"),
    "sglang/fail_tp2_one_gpu": (INVALID, REJECT, "torch.AcceleratorError: CUDA error: invalid device ordinal"),
    "sglang/fail_unknownflag": (INVALID, REJECT, "sglang serve: error: unrecognized arguments: --enable-turbo-mode"),
}
SERVED = ("vllm/fail_cpu_attn_flashinfer", "vllm/fail_cpu_kv_fp8", "vllm/fail_cpu_omp_bind_bad")
"""vLLM on a CPU ignores these settings: it came up, served, and was stopped."""
EXITS = {"vllm": 1, "sglang": -9}


def of_engine(name: str) -> str:
    return (EVERYTHING / f"{name}.log").read_text()


@pytest.mark.parametrize("name", BY_ENGINE)
def test_recorded_failures_of_sglang_and_vllm(name: str) -> None:
    failure_class, action, cause = BY_ENGINE[name]
    engine = name.split("/")[0]
    failure = diagnose(engine, of_engine(name), EXITS[engine])
    assert (failure.failure_class, failure.action) == (failure_class, action)
    assert failure.cause.startswith(cause)
    assert failure.tail and failure.rule in {rule.id for rule in rules().rule}
    died_serving = failure_class is FailureClass.CRASH_WHILE_SERVING
    assert (complaint(engine, of_engine(name)) is not None) == died_serving


def good_logs() -> list[str]:
    names = [f"{engine}/{path.stem}" for engine in EXITS for path in (EVERYTHING / engine).glob("good_*.log")]
    return sorted([*names, *SERVED])


def test_every_recorded_log_of_sglang_and_vllm_has_an_expectation() -> None:
    failed = {f"{engine}/{path.stem}" for engine in EXITS for path in (EVERYTHING / engine).glob("fail_*.log")}
    assert failed == {*BY_ENGINE, *SERVED}
    assert len(good_logs()) >= 11


@pytest.mark.parametrize("name", good_logs())
def test_a_server_that_served_has_no_failure(name: str) -> None:
    engine = name.split("/")[0]
    assert complaint(engine, of_engine(name)) is None
    assert diagnose(engine, of_engine(name), 0).failure_class == FailureClass.UNKNOWN


# --- every rule, and whole situations ----------------------------------------------------------------------


def test_every_rule_has_a_line_and_every_line_a_rule() -> None:
    assert {line["rule"] for line in LINES["line"]} == {rule.id for rule in rules().rule}


@pytest.mark.parametrize("line", LINES["line"], ids=lambda line: f"{line['rule']} {line['engine']}")
def test_a_rule_speaks_on_the_line_it_was_made_for(line: dict[str, Any]) -> None:
    noise = "INFO 11-30 02:12:02 [config.py:1] starting\n"
    log = f"{noise}{line['text']}\n{noise}"
    failure = diagnose(line["engine"], log, line.get("exit", 1))
    rule = next(rule for rule in rules().rule if rule.id == line["rule"])
    assert (failure.rule, failure.failure_class, failure.action) == (rule.id, rule.failure_class, rule.action)
    assert failure.bound == line.get("bound")
    told = complaint(line["engine"], log)
    assert (told.rule if told else None) == (rule.id if line.get("serving") else None)
    assert rule.while_serving == bool(line.get("serving"))


@pytest.mark.parametrize("case", LINES["case"], ids=lambda case: case["why"])
def test_a_whole_situation(case: dict[str, Any]) -> None:
    failure = diagnose(case["engine"], case["log"], case.get("exit"))
    assert (failure.failure_class, failure.action) == (case["class"], case["action"])
    assert failure.rule == case.get("rule", failure.rule)
    assert case.get("told", "") in failure.cause
    assert failure.tail == case["log"].rstrip()


@pytest.mark.parametrize("line", [one for one in LINES["line"] if one.get("serving")], ids=lambda line: line["rule"])
def test_a_complaint_is_heard_in_what_was_said_during_one_run(line: dict[str, Any]) -> None:
    """The line with which a server says that it is up stands before the run, in a part of the log that is not read."""
    said = line["text"].strip().splitlines()[-1]
    told = complaint(line["engine"], f"INFO:     127.0.0.1:47012 - POST /v1/completions 200\n{said}\n", up=True)
    assert told is not None and told.rule == line["rule"]


def test_a_rule_is_found_by_its_id() -> None:
    found = rule_named("nan")
    assert found is not None and found.failure_class is FailureClass.NUMERICS
    assert rule_named("none-of-ours") is None


def test_a_capability_that_a_rule_takes_away_is_one_that_experiments_need() -> None:
    needed = {need for engine in engines() for entry in book(engine).experiments for need in entry.needs}
    assert {rule.capability for rule in rules().rule if rule.capability} <= needed


def test_a_long_compilation_is_no_failure_of_a_server_that_came_up() -> None:
    line = next(line["text"] for line in LINES["line"] if line["rule"] == "shm-broadcast")
    log = f"{line}\nINFO:     Application startup complete.\n"
    assert complaint("vllm", log) is None
    assert diagnose("vllm", log, 0).failure_class == FailureClass.UNKNOWN


# --- the rules themselves ----------------------------------------------------------------------------------


def test_each_recorded_rule_is_exercised() -> None:
    logs = [log_of(name) for name in RECORDED]
    seen = {rule.id for rule in rules().rule for log in logs if rule.applies("llamacpp", 1) and rule.match(log)}
    recorded = {
        rule.id for rule in rules().rule if rule.source.startswith("recorded") and rule.id.startswith("llamacpp")
    }
    assert recorded - seen == {"llamacpp-side-file"}
    lora = "0.00.125.117 E llama_adapter_lora_init: failed to open 'nope.gguf': No such file or directory\n"
    assert diagnose("llamacpp", lora, 1).failure_class == INVALID


def test_rules_are_told_apart() -> None:
    text = Path(module.__file__).with_name("diagnose_rules.toml").read_text("utf-8")
    first = tomllib.loads(text)["rule"][0]
    with pytest.raises(pydantic.ValidationError, match="exist twice"):
        RuleBook.model_validate({"rule": [first, first]})


@pytest.mark.parametrize(
    "change",
    [{"pattern": None}, {"pattern": "("}, {"source": ""}, {"action": "panic"}, {"x": 1}, {"action": "adjust up"}],
)
def test_a_malformed_rule_is_refused(change: dict[str, object]) -> None:
    good = {"id": "r", "pattern": "x", "failure_class": "hang", "action": "reject", "source": "here"}
    assert Rule.model_validate(good).layer is Layer.CAUSE
    with pytest.raises(pydantic.ValidationError):
        Rule.model_validate(good | change)
