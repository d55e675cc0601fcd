"""Each benchmark client on recorded output: the contract, every version's format, and what can be wrong with one.

The recordings are of real runs, trimmed. Where none of a broken server exists, it is made from one of a good server:
the same fields and labels, with the figures that the client shows for such a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from agent.remeasured import remeasured
from agent.validity import invalid_reasons
from state.conditions import machine
from state.errors import CommandFailed
from state.models import Arm, LoadPoint, MeasurementStatus, Objective, Telemetry, ValidityRule, Workload
from tests.agent.judging import taken
from tests.contracts.bench_contract import FIXED, KEY, PLACE, Bad, BenchCase, BenchContract, Files, request, verdict
from tools.benches.aiperf import AiPerf
from tools.benches.base import RESULT
from tools.benches.builtin import Builtin
from tools.benches.choice import EXTERNAL
from tools.benches.escorted import PRINTED, EscortedClient, in_between, server_count
from tools.benches.guidellm import GuideLlm
from tools.benches.sglang_bench import PRINTED_AS as SGLANG_PRINTS
from tools.benches.sglang_bench import SglangBench
from tools.benches.told import kind_of
from tools.benches.vllm_bench import PRINTED_AS as VLLM_PRINTS
from tools.benches.vllm_bench import VllmBench

DATA = Path(__file__).resolve().parents[1] / "data" / "benches"
ANSWERS = {"given": [{"id": FIXED[0], "text": FIXED[1]}], "error": None}
NO_RESULT = r"wrote no \S+ \(it ended with exit code 1\)"


def point(concurrency: int, requests: int, prompt: int, output: int) -> LoadPoint:
    return LoadPoint(
        name="busy", concurrency=concurrency, requests=requests, prompt_tokens=prompt, output_tokens=output
    )


def beside(at: LoadPoint, **changes: Any) -> bytes:
    """What our own file leaves beside an external client's result."""
    asked = {"requests": at.requests, "concurrency": at.concurrency, "output_tokens": at.output_tokens}
    seen = {
        "run_id": KEY,
        "request": asked,
        "limits": {"nofile": 4096, "nofile_low": False},
        "marks": ["begin", "end"],
        "exit": 0,
        "telemetry": None,
        "counters": None,
        "stopped_early": None,
        "answers": None,
        "error": None,
    }
    return json.dumps(seen | changes).encode()


def counters(count: int) -> dict[str, Any]:
    """A server that counted `count` tokens between the client's mark and its end."""
    name = "vllm:generation_tokens_total"
    return {"before": {name: 1000.0}, "begin": {name: 1000.0}, "after": {name: 1000.0 + count}}


class Recording:
    """A recorded run of an external client, and what it would have left had the server been another."""

    def __init__(self, client: EscortedClient, name: str, at: LoadPoint, prints: Mapping[str, str]) -> None:
        self.client, self.at, self.prints = client, at, prints
        folder, ending = DATA / client.name, Path(client.result).suffix
        self.path = folder / f"{name}{ending}"
        self.line: dict[str, Any] = json.loads(self.path.read_text())
        self.text = self.path.with_suffix(".txt").read_text()

    def files(self, line: Mapping[str, Any] | None = None, text: str | None = None, **seen: Any) -> Files:
        written = json.dumps(self.line if line is None else line)
        printed = self.text if text is None else text
        return {RESULT: beside(self.at, **seen), self.client.result: written.encode(), PRINTED: printed.encode()}

    def told(self, **changes: Any) -> Files:
        """With other figures, written and printed."""
        line = self.line | changes
        return self.files(line, reprinted(self.text, line, self.prints))

    def nothing(self, name: str, **seen: Any) -> Files:
        """With no result at all, and the recorded last words."""
        said = (DATA / self.client.name / name).read_bytes()
        return {RESULT: beside(self.at, **{"exit": 1, **seen}), PRINTED: said}

    def case(self, expected: Mapping[str, Any], words: tuple[str, ...], bad: Mapping[str, Bad]) -> BenchCase:
        common = {
            "ended_badly": Bad(self.files(exit=1), "stopped early: it ended with exit code 1"),
            "killed": Bad(self.files(exit=-9), "stopped early: it ended with exit code -9"),
            "cut_off": Bad(self.files(exit=-15, stopped_early="run deadline"), "stopped early: run deadline"),
            "not_started": Bad(
                {RESULT: beside(self.at, exit=None, error="the client could not be started: no such file")},
                "could not be started: no such file",
            ),
            "few_files": Bad(self.files(limits={"nofile": 64, "nofile_low": True}), "only 64 files"),
        }
        return BenchCase(
            client=self.client,
            point=self.at,
            files=self.files(),
            expected=expected,
            words=words,
            bad={**common, **bad},
            counted=lambda count: self.files(counters=counters(count)),
            answered=self.files(answers=ANSWERS),
        )


def reprinted(text: str, line: Mapping[str, Any], prints: Mapping[str, str]) -> str:
    """The printed block with the figures of `line`, in the client's own form: two digits, whole numbers as they are."""
    for label, name in prints.items():
        if name in line:
            value = line[name]
            shown = f"{value:.2f}" if isinstance(value, float) else str(value)
            text = re.sub(
                rf"^({re.escape(label)}:\s+)\S+", lambda found, shown=shown: found[1] + shown, text, flags=re.M
            )
    return text


# --- our own ---------------------------------------------------------------------------------------------------


RECORDED = json.loads((DATA / "builtin" / "demo_server.json").read_text())


def builtin_case(raw: Mapping[str, Any], at: LoadPoint, expected: Mapping[str, Any]) -> BenchCase:
    """Our own client's run at two streams, and what it would have told of broken servers."""

    def own(**changes: Any) -> Files:
        return {RESULT: json.dumps({**raw, "answers": None, "run_id": KEY, **changes}).encode()}

    half = at.requests // 2
    refused = {"completed": half, "failed": half, "failures": {"http_503": half}}
    nothing: dict[str, Any] = {"output_tok_s": None, "duration_s": None, "ttft_ms": {}}
    storm = {"completed": 0, "failed": at.requests, "failures": {"http_503": at.requests}}
    return BenchCase(
        client=Builtin(),
        point=at,
        files=own(),
        expected=expected,
        words=(
            *(f'"concurrency": {at.concurrency}', f'"requests": {at.requests}', f'"tokens": {at.prompt_tokens}'),
            *(f'"output_tokens": {at.output_tokens}', PLACE.api_key_file or ""),
        ),
        bad={
            "quarter": Bad(
                own(short_outputs=4, output_tokens=8), f"4 answers were shorter than the {at.output_tokens}"
            ),
            "zero": Bad(own(short_outputs=4, output_tokens=0, output_tok_s=0.0), "no positive duration"),
            "refuses_half": Bad(own(**refused), rf"{half} of {at.requests} requests failed \({half} × http_503\)"),
            "refuses_all": Bad(own(**nothing, **storm, stopped_early="error storm"), "stopped early: error storm"),
            "own_limit": Bad(own(client={"bottleneck_reason": "a worker was full"}), "the client was the bottleneck"),
        },
        counted=lambda count: own(server_counters={"llamacpp:tokens_predicted_total": float(count)}),
        answered=own(answers=ANSWERS),
    )


class TestBuiltin(BenchContract):
    @pytest.fixture
    def case(self) -> BenchCase:
        expected = {
            "ttft_ms.mean": 418.2253,
            "output_tokens": 32,
            "cached_tokens": 0,
            "retokenized_tokens": None,
            "peak_concurrency": 2,
        }
        return builtin_case(RECORDED, point(2, 4, 16, 8), expected)


# --- sglang ----------------------------------------------------------------------------------------------------

SGLANG = Recording(SglangBench(["python", "-m", "sglang.bench_serving"]), "0.5.6", point(4, 24, 64, 48), SGLANG_PRINTS)


def sglang_refused(recording: Recording = SGLANG) -> Files:
    """Every second request was answered with 503; the line has no word for it, only holes in its lists."""
    line = recording.line
    good = [index % 2 == 0 for index in range(24)]
    return recording.told(
        completed=12,
        total_output_tokens=576,
        total_output_tokens_retokenized=570,
        output_throughput=line["output_throughput"] / 2,
        request_throughput=line["request_throughput"] / 2,
        output_lens=[48 if ok else 0 for ok in good],
        ttfts=[ttft if ok else 0.0 for ttft, ok in zip(line["ttfts"], good, strict=True)],
        itls=[gaps if ok else [] for gaps, ok in zip(line["itls"], good, strict=True)],
        errors=["" if ok else "Service Unavailable" for ok in good],
    )


class TestSglang(BenchContract):
    @pytest.fixture
    def case(self) -> BenchCase:
        return SGLANG.case(
            expected={
                "ttft_ms.mean": 280.08619854161526,
                "ttft_ms.p90": 409.65345,
                "tpot_ms.p99": 42.66795588232854,
                "itl_ms.p50": 34.828239499802294,
                "retokenized_tokens": 1143,
                "mean_concurrency": 3.994674366266513,
                "peak_concurrency": None,
                "cached_tokens": None,
                "server_output_tokens": None,
                "client_bottleneck": None,
            },
            words=(
                *("--random-range-ratio", "--random-input-len", '"64"', '"48"', "--num-prompts", '"24"'),
                *("--max-concurrency", '"4"', "--seed", "--output-file", '"OPENAI_API_KEY"'),
            ),
            bad={
                # it counts the tokens that it asked for
                "quarter": Bad(
                    SGLANG.told(total_output_tokens_retokenized=288), "the text that came has 288 tokens, .* 1152"
                ),
                "zero": Bad(
                    SGLANG.told(
                        total_output_tokens_retokenized=0, mean_ttft_ms=0.0, median_ttft_ms=0.0, p99_ttft_ms=0.0
                    ),
                    "no TTFT above zero",
                ),
                "refuses_half": Bad(sglang_refused(), r"12 of 24 requests failed \(12 × service_unavailable\)"),
                "refuses_all": Bad(SGLANG.nothing("fail_server_down.txt"), NO_RESULT),
                "killed_under_it": Bad(SGLANG.nothing("fail_server_sigkilled.txt"), NO_RESULT),
                "silently_missing": Bad(
                    SGLANG.told(**{name: None for name in ("errors", "output_lens", "ttfts", "itls")}, completed=20),
                    "4 of 24 requests failed",
                ),
            },
        )


STUB = DATA / "sglang" / "stub"
VERSIONS = ("0.4.0", "0.4.6.post5", "0.5.2", "0.5.6")
AT_THE_STUB = point(5, 20, 16, 16)


def at_the_stub(version: str, server: str) -> Files:
    """What the client of that version left, run against benchmarks/stub_server.py with 20 × 16 tokens at 5 streams.

    The client's code was its own; the libraries that it takes for HTTP and tokens were replaced by small ones.
    """
    line, said = STUB / f"{version}.{server}.jsonl", (STUB / f"{version}.{server}.txt").read_bytes()
    if not line.exists():
        return {RESULT: beside(AT_THE_STUB, exit=1), PRINTED: said}
    return {RESULT: beside(AT_THE_STUB), "client.jsonl": line.read_bytes(), PRINTED: said}


def judged(files: Files) -> tuple[str, ...]:
    return verdict(SGLANG.case({}, (), {})._replace(point=AT_THE_STUB), files)


def sglang_metrics(files: Files) -> Any:
    return SGLANG.client.parse(files, KEY).metrics


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read_in_full(version: str) -> None:
    metrics = sglang_metrics(at_the_stub(version, "honest"))
    assert judged(at_the_stub(version, "honest")) == ()
    assert (metrics.completed, metrics.output_tokens, metrics.retokenized_tokens) == (20, 320, 320)
    for summary in (metrics.ttft_ms, metrics.tpot_ms, metrics.itl_ms, metrics.e2e_ms):
        assert summary.mean and summary.p50
        assert (summary.p90 is None) == (version == "0.4.0")
    assert metrics.tpot_ms.mean == pytest.approx((metrics.e2e_ms.mean - metrics.ttft_ms.mean) / 15, rel=0.01)
    assert (metrics.mean_concurrency is None) == (version == "0.4.0")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("quarter", "the text that came has 80 tokens, the client claims 320"),
        ("zero", "the text that came has 0 tokens, the client claims 320"),
        ("zero", "no TTFT above zero"),
        ("half", "10 of 20 requests failed"),
        ("all", "(19|20) of 20 requests failed"),
    ],
)
def test_a_broken_server_loses_with_every_version(version: str, server: str, said: str) -> None:
    files = at_the_stub(version, server)
    wanted = said if "client.jsonl" in files else NO_RESULT
    assert any(re.search(wanted, reason) for reason in judged(files)), judged(files)


def test_broken_servers_had_looked_fast() -> None:
    """What the checks are for: the throughput that the newest of them showed, honest server first."""
    shown = [sglang_metrics(at_the_stub("0.5.6", server)).output_tok_s for server in ("honest", "quarter", "zero")]
    assert shown == sorted(shown)
    assert shown[2] > 5 * shown[0]


def test_an_old_line_is_completed_by_what_was_printed() -> None:
    metrics = sglang_metrics(at_the_stub("0.4.0", "honest"))
    line = json.loads((STUB / "0.4.0.honest.jsonl").read_text())
    assert "mean_ttft_ms" not in line
    assert metrics.ttft_ms.p50 == line["median_ttft_ms"]
    assert metrics.ttft_ms.mean == 4.29


def test_a_dead_server_of_0_4_0_is_exit_0_with_bare_nan() -> None:
    files = at_the_stub("0.4.0", "all")
    assert b"NaN" in files["client.jsonl"] and b"Infinity" in files["client.jsonl"]
    metrics = sglang_metrics(files)
    assert (metrics.e2e_ms.mean, metrics.ttft_ms.mean, metrics.output_tok_s) == (None, None, None)
    assert "20 of 20 requests failed (20 × missing)" in judged(files)
    assert any("mean_e2e_latency_ms = NaN" in reason for reason in judged(files))


def test_without_a_tpot_section_the_line_tells_it() -> None:
    files = at_the_stub("0.5.2", "honest")
    assert b"TPOT" not in files[PRINTED]
    assert sglang_metrics(files).tpot_ms.mean == json.loads(files["client.jsonl"])["mean_tpot_ms"]


@pytest.mark.parametrize(
    ("name", "at", "p90"),
    [
        ("0.5.17", point(10, 60, 128, 128), 3.749801837007607),
        ("0.5.23_busy_neighbour", point(4, 24, 64, 32), 302.52895),
    ],
)
def test_newer_lines_tell_their_percentiles(name: str, at: LoadPoint, p90: float) -> None:
    recording = Recording(SglangBench(["x"]), name, at, SGLANG_PRINTS)
    result = recording.client.parse(recording.files(), KEY)
    assert result.metrics.tpot_ms.p90 == pytest.approx(p90)
    assert invalid_reasons(result.metrics, Telemetry(), at, ValidityRule()) == ()


def test_percentiles_from_the_lists_are_those_of_the_line() -> None:
    """On a run whose line has both."""
    recording = Recording(SglangBench(["x"]), "0.5.23_busy_neighbour", point(4, 24, 64, 32), SGLANG_PRINTS)
    told = {name: value for name, value in recording.line.items() if not name.startswith("p90")}
    text = re.sub(r"^P90[^\n]*\n", "", recording.text, flags=re.M)
    metrics = recording.client.parse(recording.files(told, text), KEY).metrics
    for what in ("ttft", "tpot", "itl", "e2e_latency"):
        summary = getattr(metrics, f"{what.removesuffix('_latency')}_ms")
        assert summary.p90 == pytest.approx(recording.line[f"p90_{what}_ms"], rel=1e-3), what


def test_a_file_that_was_appended_to_is_read_from_its_end() -> None:
    older = json.dumps(SGLANG.line | {"completed": 3, "duration": 1.0}).encode() + b"\n"
    files = SGLANG.files()
    assert sglang_metrics({**files, "client.jsonl": older + files["client.jsonl"] + b"\n"}).completed == 24


def test_two_values_for_one_figure_are_an_error() -> None:
    files = SGLANG.files(SGLANG.line | {"mean_ttft_ms": 28.0})
    (said,) = verdict(SGLANG.case({}, (), {}), files)
    assert "contradicts itself: Mean TTFT (ms) is printed as 280.09, written as 28.0" in said
    faster = SGLANG.line | {"output_throughput": 200.0}
    (said,) = verdict(SGLANG.case({}, (), {}), SGLANG.files(faster, reprinted(SGLANG.text, faster, SGLANG_PRINTS)))
    assert "output_throughput is 200, its tokens over its duration are 96.68" in said


def test_noise_after_the_block_and_no_block_at_all_are_told_apart() -> None:
    noisy = SGLANG.text + "nanobind: leaked 4 instances!\nMean TTFT (ms):    1.00\n"
    assert sglang_metrics(SGLANG.files(text=noisy)).ttft_ms.mean == SGLANG.line["mean_ttft_ms"]
    with pytest.raises(CommandFailed, match="it did not print Successful requests"):
        sglang_metrics(SGLANG.files(text="Starting warmup with 1 sequences...\n"))


def test_a_line_of_another_load_is_refused() -> None:
    for name in ("max_concurrency", "random_output_len"):
        with pytest.raises(CommandFailed, match=f"result of another run: {name} is 99"):
            sglang_metrics(SGLANG.told(**{name: 99}))


# --- vllm ------------------------------------------------------------------------------------------------------

VLLM = Recording(VllmBench(["vllm", "bench", "serve"]), "0.32", point(4, 16, 128, 32), VLLM_PRINTS)


def vllm_refused(share: float) -> dict[str, Any]:
    """Requests that were refused count in no figure but `failed`."""
    bad = round(16 * share)
    good = 16 - bad
    throughput = VLLM.line["output_throughput"] * good / 16
    lengths, errors = [32] * good + [0] * bad, [""] * good + ["Service Unavailable"] * bad
    figures: dict[str, Any] = {"completed": good, "failed": bad, "total_output_tokens": 32 * good}
    figures |= {"output_throughput": throughput, "request_throughput": throughput / 32}
    if not good:
        figures |= {name: 0.0 for name in VLLM.line if re.match(r"(mean|median|p\d+)_", name)}
    return figures | {"output_lens": lengths, "errors": errors}


class TestVllm(BenchContract):
    @pytest.fixture
    def case(self) -> BenchCase:
        cut = VLLM.line["output_throughput"] / 4
        return VLLM.case(
            expected={
                "ttft_ms.p90": 1647.3510089998626,
                "tpot_ms.p50": 44.22122287096572,
                "itl_ms.p99": 599.2908829499584,
                "e2e_ms.mean": 2488.168395562482,
                "mean_concurrency": 3.9636183963844434,
                "retokenized_tokens": None,
                "peak_concurrency": None,
                "cached_tokens": None,
            },
            words=(
                *("--ignore-eos", "--random-range-ratio", '"0.0"', '"128"', '"32"', '"16"', '"4"'),
                *("--endpoint", '"/v1/completions"', "--save-detailed", '"client.json"', '"OPENAI_API_KEY"'),
            ),
            bad={
                "quarter": Bad(
                    VLLM.told(total_output_tokens=128, output_throughput=cut, output_lens=[8] * 16),
                    "16 answers were shorter than the 32 tokens",
                ),
                "zero": Bad(
                    VLLM.told(total_output_tokens=0, output_throughput=0.0, output_lens=[0] * 16),
                    "no positive duration and throughput",
                ),
                "refuses_half": Bad(
                    VLLM.told(**vllm_refused(0.5)), r"8 of 16 requests failed \(8 × service_unavailable\)"
                ),
                "refuses_all": Bad(VLLM.told(**vllm_refused(1.0)), "16 of 16 requests failed"),
            },
        )


@pytest.mark.parametrize(
    ("name", "at", "failed"),
    [("fail_server_killed", point(4, 24, 64, 48), 16), ("fail_engine_killed", point(64, 1200, 128, 128), 1007)],
)
def test_a_server_that_died_under_the_vllm_client_loses(name: str, at: LoadPoint, failed: int) -> None:
    """Recorded: exit code 0, and a throughput that looks fine."""
    recording = Recording(VllmBench(["x"]), name, at, VLLM_PRINTS)
    metrics = recording.client.parse(recording.files(), KEY).metrics
    reasons = invalid_reasons(metrics, Telemetry(), at, ValidityRule())
    assert f"{failed} of {at.requests} requests failed ({failed} × failed)" in reasons


def test_a_plain_result_of_an_older_version_counts() -> None:
    recording = Recording(VllmBench(["x"]), "0.25.1", point(10, 80, 128, 128), VLLM_PRINTS)
    old = {name: value for name, value in recording.line.items() if name != "failed"}
    text = re.sub(r"^Failed requests[^\n]*\n", "", recording.text, flags=re.M)
    for files in (recording.files(), recording.files(old, text)):
        metrics = recording.client.parse(files, KEY).metrics
        assert (metrics.completed, metrics.failed, metrics.mean_concurrency) == (80, 0, None)
        assert invalid_reasons(metrics, Telemetry(), recording.at, ValidityRule()) == ()


# --- guidellm --------------------------------------------------------------------------------------------------

GUIDELLM = Recording(GuideLlm(["guidellm", "run"]), "0.8.1", point(4, 16, 64, 32), {})


def guidellm(change: Callable[[dict[str, Any]], None], completed: int = 16, errored: int = 0) -> Files:
    """The recording with `change` made to its metrics, and the printed row of counts to match."""
    line = json.loads(json.dumps(GUIDELLM.line))
    metrics = line["benchmarks"][0]["metrics"]
    metrics["request_totals"] |= {"successful": completed, "errored": errored}
    change(metrics)
    row = "| 0.0  | 0.0  | {:<4} | 0   | {:<3} |"
    return GUIDELLM.files(line, GUIDELLM.text.replace(row.format(16, 0), row.format(completed, errored)))


def tokens(total: float, least: float) -> Callable[[dict[str, Any]], None]:
    def change(metrics: dict[str, Any]) -> None:
        metrics["output_token_count"]["successful"] |= {"total_sum": total, "min": least}
        metrics["output_tokens_per_second"]["total"]["mean"] *= total / 512

    return change


def nobody(metrics: dict[str, Any]) -> None:
    tokens(0, 0)(metrics)
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency"):
        metrics[name]["successful"] = metrics[name]["errored"]


def before_the_start(metrics: dict[str, Any]) -> None:
    metrics["time_to_first_token_ms"]["successful"]["min"] = -1.7e15


class TestGuideLlm(BenchContract):
    @pytest.fixture
    def case(self) -> BenchCase:
        return GUIDELLM.case(
            expected={
                "ttft_ms.mean": 1207.9048603773117,
                "tpot_ms.mean": 52.809243721346704,  # what it calls ITL; its TPOT is 88.9
                "e2e_ms.p50": 2851.3684272766113,
                "itl_ms.mean": None,
                "cached_tokens": 410,
                "mean_concurrency": 3.974705356555052,
                "retokenized_tokens": None,
            },
            words=(
                "kind=concurrent,streams=4",
                "kind=max_requests,count=16",
                "prompt_tokens=64,output_tokens=32",
                "request_format=/v1/completions",
                "path=client.json",
            ),
            bad={
                "quarter": Bad(guidellm(tokens(128, 8)), "12 answers were shorter than the 32 tokens"),
                "zero": Bad(guidellm(tokens(0, 0)), "no positive duration and throughput"),
                "refuses_half": Bad(
                    guidellm(tokens(256, 32), completed=8, errored=8), r"8 of 16 requests failed \(8 × errored\)"
                ),
                "refuses_all": Bad(guidellm(nobody, completed=0, errored=16), "16 of 16 requests failed"),
                "was_down": Bad(GUIDELLM.nothing("fail_server_down.txt"), NO_RESULT),
                "one_short": Bad(guidellm(tokens(512, 31)), "1 answers were shorter"),
                "before_the_start": Bad(
                    guidellm(before_the_start), "measure nothing: time_to_first_token_ms.least = -17"
                ),
                "printed_otherwise": Bad(
                    GUIDELLM.files(text=GUIDELLM.text.replace("| 16   | 0   | 0   |", "| 12   | 0   | 4   |")),
                    "successful requests are printed as 12, written as 16",
                ),
            },
        )


# --- aiperf ----------------------------------------------------------------------------------------------------

AIPERF = Recording(AiPerf(["aiperf", "profile"]), "0.13.0", point(4, 16, 64, 32), {})


def aiperf(**parts: Mapping[str, Any] | None) -> Files:
    """The recording with parts of its summaries changed; None takes one away."""
    line = {name: value for name, value in AIPERF.line.items() if parts.get(name, {}) is not None}
    return AIPERF.files(line | {name: line.get(name, {}) | part for name, part in parts.items() if part is not None})


class TestAiPerf(BenchContract):
    @pytest.fixture
    def case(self) -> BenchCase:
        rate = AIPERF.line["output_token_throughput"]["avg"]
        return AIPERF.case(
            expected={
                "ttft_ms.p90": 3369.1125399999996,
                "tpot_ms.mean": 62.2902614780242,
                "itl_ms.mean": 62.188030864919355,
                "e2e_ms.p99": 5033.711652649999,
                "output_tokens": 512,
                "retokenized_tokens": 511,
                "prompt_tokens": 1504,
                "cached_tokens": 288,
                "mean_concurrency": 3.9804870416010383,
            },
            words=(
                *("--endpoint-type", '"completions"', "--concurrency", '"4"', "--request-count", '"16"'),
                *("--output-tokens-mean", '"32"', '"ignore_eos:true"', "--random-seed"),
            ),
            bad={
                "quarter": Bad(
                    aiperf(
                        usage_completion_tokens={"sum": 128.0, "min": 8.0},
                        total_osl={"avg": 128.0},
                        output_token_throughput={"avg": rate * 128 / 511},
                    ),
                    "12 answers were shorter than the 32 tokens",
                ),
                "zero": Bad(
                    aiperf(
                        usage_completion_tokens={"sum": 0.0, "min": 0.0},
                        total_osl={"avg": 0.0},
                        output_token_throughput={"avg": 0.0},
                    ),
                    "no positive duration and throughput",
                ),
                "refuses_half": Bad(
                    aiperf(
                        request_count={"avg": 8.0},
                        request_throughput={"avg": AIPERF.line["request_throughput"]["avg"] / 2},
                        error_request_count={"avg": 8.0},
                        usage_completion_tokens={"sum": 256.0},
                        total_osl={"avg": 256.0},
                        output_token_throughput={"avg": rate * 256 / 511},
                    ),
                    r"8 of 16 requests failed \(8 × errors\)",
                ),
                "refuses_all": Bad(AIPERF.nothing("fail_server_down.txt"), NO_RESULT),
                "cancelled": Bad(AIPERF.files(AIPERF.line | {"was_cancelled": True}), "says that it was cancelled"),
                "printed_otherwise": Bad(
                    AIPERF.files(text=AIPERF.text.replace("1,742.62", "1,002.62")),
                    "Time to First Token is printed as 1,002.62",
                ),
            },
        )


def test_without_usage_its_own_count_is_taken() -> None:
    files = aiperf(usage_completion_tokens=None, usage_prompt_tokens=None)
    metrics = AIPERF.client.parse(files, KEY).metrics
    assert (metrics.output_tokens, metrics.retokenized_tokens, metrics.prompt_tokens) == (511, None, 1024)
    assert metrics.short_outputs == 1


# --- what all external clients share -----------------------------------------------------------------------------


def test_the_clients_own_trials_are_no_traffic_of_others() -> None:
    name = "sglang:generation_tokens_total"
    told = {"before": {name: 0.0}, "begin": {name: 100.0}, "after": {name: 1100.0}}
    assert [server_count(told, claimed) for claimed in (900, 1000, 1050, 1100, 4000)] == [1000, 1000, 1050, 1100, 1100]
    assert server_count({**told, "begin": None}, 600) == 600
    assert server_count({**told, "after": None}, 600) is None
    assert server_count({"before": {"other": 1.0}, "begin": None, "after": {"other": 2.0}}, 600) is None
    assert server_count(None, 600) is None


def test_a_client_of_one_process_that_fills_its_core_was_the_limit() -> None:
    seen = {"foreign_cpu_cores": None, "steal_cores": None, "cores": 8, "server_cpu_cores": {"mean": 3.0}}
    seen |= {"client_cpu_cores": {"mean": 0.93}, "mem_available_mb_min": 100.0, "server_rss_mb_max": 5.0, "gpu": None}
    result = SGLANG.client.parse(SGLANG.files(telemetry=seen), KEY)
    assert result.metrics.client_bottleneck == "it used 93% of a core"
    assert (result.telemetry.client_cpu_share, result.telemetry.server_cpu_cores) == (0.93, 3.0)
    loading = SGLANG.client.parse(SGLANG.files(telemetry=seen, marks=[]), KEY)
    assert (loading.metrics.client_bottleneck, loading.telemetry.client_cpu_share) == (None, None)
    assert AIPERF.client.parse(AIPERF.files(telemetry=seen), KEY).metrics.client_bottleneck is None


@pytest.mark.parametrize("recording", [SGLANG, VLLM, GUIDELLM, AIPERF], ids=lambda r: r.client.name)
def test_a_stored_run_is_verified_with_the_client_that_made_it(recording: Recording) -> None:
    workload = Workload(
        load_points=(recording.at,),
        objective=Objective(at=(recording.at.name,)),
        client=recording.client.name,
        client_command=("x",),
        tokenizer="t",
    )
    result = recording.client.parse(recording.files(), KEY)
    run = taken(Arm.CANDIDATE, 0, recording.at.name, 1.0)
    again = remeasured(run, result.raw, KEY, workload, ValidityRule())
    assert (again.unread, again.measurement.status) == ("", MeasurementStatus.VALID)
    assert again.measurement.metrics == result.metrics
    other = remeasured(run, result.raw, KEY, workload.model_copy(update={"client": "builtin"}), ValidityRule())
    assert other.unread.startswith("the client's result cannot be used")


BOARDS = [
    {
        "index": "0",
        "power_w": {"mean": 330.0, "min": 120.0, "max": 350.0},
        "power_limit_w": {"mean": 700.0, "min": 700.0, "max": 700.0},
        "sm_mhz": {"mean": 2300.0, "min": 2100.0, "max": 2400.0},
        "util_pct": {"mean": 98.0, "min": 90.0, "max": 100.0},
        "memory_mb": {"mean": 70000.0, "min": 70000.0, "max": 72704.0},
        "temperature_c": None,
        "throttle_reasons": ["0x0000000000000000", "0x0000000000000004"],
    }
]
COUNTED = {
    "vllm:request_success_total": 24.0,
    "vllm:num_preemptions_total": 3.0,
    "vllm:generation_tokens_total": 1152.0,
}


def observed_by(name: str) -> tuple[BenchCase, Files]:
    """A client with a run of its own beside which a GPU and the server's counters were read."""
    if name == "builtin":
        case = builtin_case(RECORDED, point(2, 4, 16, 8), {})
        seen = {**json.loads(case.files[RESULT]), "server_counters": COUNTED}
        seen["telemetry"] = {**seen["telemetry"], "gpu": BOARDS}
        return case, {RESULT: json.dumps(seen).encode()}
    recording = {one.client.name: one for one in (SGLANG, VLLM, GUIDELLM, AIPERF)}[name]
    before = dict.fromkeys(COUNTED, 1000.0)
    told = {"before": before, "begin": before, "after": {key: before[key] + count for key, count in COUNTED.items()}}
    return recording.case({}, (), {}), recording.files(telemetry={"cores": 8, "gpu": BOARDS}, counters=told)


@pytest.mark.parametrize("name", ["builtin", *EXTERNAL])
def test_readings_beside_the_run_reach_its_telemetry_whoever_measures(name: str) -> None:
    case, files = observed_by(name)
    result = case.client.parse(files, KEY)
    assert machine(result.telemetry) == "330 W of 700 W, 98 %, 2300 MHz, 71.0 GiB, slowed by power cap"
    assert (result.metrics.server_requests, result.telemetry.preemptions) == (24, 3)
    assert case.client.again(json.loads(json.dumps(result.raw)), KEY).telemetry == result.telemetry


def test_without_a_mark_all_that_the_server_counted_since_the_start_is_the_runs() -> None:
    name = "sglang:num_retracted_requests_total"
    assert in_between({"before": {}, "begin": None, "after": {name: 2.0}}) == {name: 2.0}
    assert in_between({"before": {name: 1.0}, "begin": {}, "after": {name: 2.0}}) == {name: 1.0}
    assert in_between({"before": None, "begin": None, "after": {name: 2.0}}) is None
    assert in_between(None) is None


@pytest.mark.parametrize("recording", [SGLANG, VLLM, GUIDELLM, AIPERF], ids=lambda r: r.client.name)
def test_the_marks_stand_in_what_was_recorded(recording: Recording) -> None:
    begin, end = (recording.text.index(mark or "") for mark in (recording.client.begin, recording.client.end))
    assert begin < end
    assert recording.text.count(recording.client.begin or "") == 1


def test_every_client_can_be_chosen() -> None:
    assert {"builtin", *EXTERNAL} == set(get_args(Workload.model_fields["client"].annotation))


def test_further_words_come_last_and_no_proxy_stands_between() -> None:
    for kind in EXTERNAL.values():
        client = kind(["x"], ["--more"], "/srv/llm/tokenizer")
        script = client.script(KEY, request(point(1, 1, 4, 4)), PLACE)
        assert '"--more"], "environment"' in script
        assert "/srv/llm/tokenizer" in script
        assert '"no_proxy": "127.0.0.1"' in script


def test_a_failed_request_is_named_in_one_word() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\naiohttp.ServerDisconnectedError: gone\n'
    assert [kind_of(text) for text in (trace, "Service Unavailable", " \n", "503: no")] == [
        "serverdisconnectederror",
        "service_unavailable",
        "failed",
        "503",
    ]


# --- real runs that taught something -----------------------------------------------------------------------------


def test_answers_that_vllms_client_counts_anew_are_whole() -> None:
    """Recorded on llama.cpp, whose usage it does not see: of twelve answers of 16 tokens two count as 15."""
    recording = Recording(VllmBench(["x"]), "0.32_llamacpp", point(2, 12, 32, 16), VLLM_PRINTS)
    metrics = recording.client.parse(recording.files(), KEY).metrics
    assert sorted(set(recording.line["output_lens"])) == [15, 16]
    assert (metrics.output_tokens, metrics.retokenized_tokens, metrics.short_outputs) == (192, 190, 0)
    assert invalid_reasons(metrics, Telemetry(), recording.at, ValidityRule()) == ()


def test_aiperfs_rates_are_over_all_that_it_observed() -> None:
    """Recorded in a run of 0.4 s whose every second request was refused; its window is a sixth longer."""
    recording = Recording(AiPerf(["x"]), "half_refused", point(2, 12, 32, 16), {})
    metrics = recording.client.parse(recording.files(), KEY).metrics
    reasons = invalid_reasons(metrics, Telemetry(), recording.at, ValidityRule())
    assert reasons[0] == "6 of 12 requests failed (6 × errors)"
    assert metrics.output_tokens == 96


def test_guidellm_tells_the_same_of_the_completions_endpoint() -> None:
    recording = Recording(GuideLlm(["x"]), "0.8.1_completions", point(2, 12, 32, 16), {})
    metrics = recording.client.parse(recording.files(), KEY).metrics
    assert (metrics.completed, metrics.prompt_tokens, metrics.output_tokens) == (12, 12 * 32, 192)
    assert invalid_reasons(metrics, Telemetry(), recording.at, ValidityRule()) == ()
