"""Diagnosis by recorded logs: what failed, what to do, and that nothing is made up."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pydantic
import pytest

from tools import diagnose as module
from tools.diagnose import Action, FailureClass, Layer, Rule, RuleBook, diagnose, rules

DATA = Path(__file__).resolve().parents[1] / "data" / "llamacpp"
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
        ("ModuleNotFoundError: No module named 'vllm'\n", 1, ENVIRONMENT, Action.ESCALATE, "'vllm'"),
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


# --- the rules themselves ----------------------------------------------------------------------------------


def test_each_recorded_rule_is_exercised() -> None:
    logs = [log_of(name) for name in RECORDED]
    seen = {rule.id for rule in rules().rule for log in logs if rule.applies("llamacpp", 1) and rule.match(log)}
    recorded = {rule.id for rule in rules().rule if rule.source.startswith("recorded")}
    assert recorded - seen == {"llamacpp-side-file"}
    lora = "0.00.125.117 E llama_adapter_lora_init: failed to open 'nope.gguf': No such file or directory\n"
    assert diagnose("llamacpp", lora, 1).failure_class == INVALID


def test_rules_are_told_apart() -> None:
    text = Path(module.__file__).with_name("diagnose_rules.toml").read_text("utf-8")
    first = tomllib.loads(text)["rule"][0]
    with pytest.raises(pydantic.ValidationError, match="exist twice"):
        RuleBook.model_validate({"rule": [first, first]})


@pytest.mark.parametrize("change", [{"pattern": None}, {"pattern": "("}, {"source": ""}, {"action": "panic"}, {"x": 1}])
def test_a_malformed_rule_is_refused(change: dict[str, object]) -> None:
    good = {"id": "r", "pattern": "x", "failure_class": "hang", "action": "reject", "source": "here"}
    assert Rule.model_validate(good).layer is Layer.CAUSE
    with pytest.raises(pydantic.ValidationError):
        Rule.model_validate(good | change)
