"""Each reason for which a run does not count, and when another try is worth it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agent.validity import COLLAPSED, QUIET, hopelessly_void, invalid_reasons, noisy, void_streak
from state.models import Arm, Measurement, MeasurementStatus, Metrics, Telemetry, ValidityRule
from tests.agent.judging import HIGH, metrics, taken

RULE = ValidityRule()
GOOD = {
    "requested": HIGH.requests,
    "completed": HIGH.requests,
    "output_tokens": 1000,
    "server_output_tokens": 1000,
    "ttft_ms": {"mean": 20.0},
    "peak_concurrency": 8,
    "mean_concurrency": 7.5,
}
CALM = {"foreign_cpu_cores": 0.05, "steal_share": 0.01}
VALID, INVALID = MeasurementStatus.VALID, MeasurementStatus.INVALID


def good(**fields: Any) -> Metrics:
    return metrics(100.0, **(GOOD | fields))


def reasons(telemetry: dict[str, Any] | None = None, rule: ValidityRule = RULE, **fields: Any) -> tuple[str, ...]:
    return invalid_reasons(good(**fields), Telemetry.model_validate(CALM | (telemetry or {})), HIGH, rule)


def test_a_good_run_counts_and_what_was_not_observed_is_no_reason() -> None:
    assert reasons() == ()
    unseen: dict[str, Any] = {"peak_concurrency": None, "mean_concurrency": None, "server_output_tokens": None}
    assert reasons({"foreign_cpu_cores": None, "steal_share": None}, **unseen) == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stopped_early": "deadline"}, "stopped early: deadline"),
        ({"requested": 15, "completed": 15}, "15 requests were sent where 16 were asked"),
        ({"completed": 15, "failed": 1, "failures": {"http_500": 1}}, "1 of 16 requests failed (1 × http_500)"),
        ({"completed": 15}, "15 completed and 0 failed of 16: some are missing"),
        ({"short_outputs": 2}, "2 answers were shorter than the 32 tokens asked"),
        ({"output_tok_s": None}, "no positive duration and throughput"),
        ({"output_tok_s": math.nan}, "no positive duration and throughput"),
        ({"output_tok_s": math.inf}, "no positive duration and throughput"),
        ({"duration_s": 0.0}, "no positive duration and throughput"),
        ({"ttft_ms": {"mean": 0.0}}, "no TTFT above zero"),
        ({"ttft_ms": {}}, "no TTFT above zero"),
        ({"peak_concurrency": 7}, "only 7 of 8 streams were ever in flight"),
        ({"mean_concurrency": 4.7}, "4.7 streams in flight on average, 8 asked"),
        ({"client_bottleneck": "one core full"}, "the client was the bottleneck: one core full"),
        ({"server_output_tokens": 949}, "the server counted 949 output tokens, the client claims 1000"),
    ],
)
def test_each_thing_wrong_with_the_figures_is_named(fields: dict[str, Any], said: str) -> None:
    assert reasons(**fields) == (said,)
    assert not noisy(reasons(**fields))


def test_traffic_of_others_is_waited_out_like_noise() -> None:
    said = reasons(server_output_tokens=1051)
    assert said == ("foreign traffic: the server counted 1051 output tokens, we received 1000",)
    assert noisy(said)
    assert not noisy(reasons(server_output_tokens=1051, short_outputs=1))


@pytest.mark.parametrize(
    ("telemetry", "said"),
    [
        ({"foreign_cpu_cores": 0.26}, f"{QUIET}: 0.26 cores were busy with other work, 0.25 allowed"),
        ({"steal_share": 0.06}, f"{QUIET}: 6.0% of CPU time was stolen, 5.0% allowed"),
    ],
)
def test_a_noisy_host_is_told_apart_since_waiting_may_help(telemetry: dict[str, Any], said: str) -> None:
    assert reasons(telemetry) == (said,)
    assert noisy(reasons(telemetry))
    assert not noisy(reasons(telemetry, short_outputs=1))
    assert not noisy(())


@pytest.mark.parametrize(
    ("telemetry", "fields"),
    [
        ({"foreign_cpu_cores": 0.25}, {}),
        ({"steal_share": 0.05}, {}),
        ({}, {"server_output_tokens": 1049}),
        ({}, {"server_output_tokens": 951}),
        ({}, {"mean_concurrency": 4.8}),
    ],
)
def test_up_to_its_limit_a_run_counts(telemetry: dict[str, Any], fields: dict[str, Any]) -> None:
    assert reasons(telemetry, **fields) == ()


def test_failures_are_tolerated_only_as_far_as_the_rule_says() -> None:
    one: dict[str, Any] = {"completed": 15, "failed": 1, "failures": {"timeout": 1}}
    assert reasons(rule=ValidityRule(max_failed_share=0.1), **one) == ()
    assert len(reasons(**one)) == 1


def test_fewer_requests_than_streams_need_not_fill_the_streams() -> None:
    few = HIGH.model_copy(update={"requests": 4})
    run = good(requested=4, completed=4, peak_concurrency=4, mean_concurrency=3.5)
    assert invalid_reasons(run, Telemetry(), few, RULE) == ()


def test_several_reasons_are_all_named() -> None:
    assert len(reasons({"steal_share": 0.5}, short_outputs=1, peak_concurrency=1)) == 3


# --- another try ---


def run(status: MeasurementStatus, *why: str, **fields: Any) -> Measurement:
    return taken(Arm.CANDIDATE, 0, "high", 100.0, status=status, reasons=why, **fields)


@pytest.mark.parametrize(
    ("own", "streak", "hopeless"),
    [
        pytest.param((), 0, None, id="nothing yet"),
        pytest.param((run(INVALID, "a"), run(VALID)), 0, None, id="the last one counts"),
        pytest.param((run(VALID), *[run(INVALID, "a")] * 3), 3, None, id="as many as are retried"),
        pytest.param((*[run(INVALID, "a")] * 3, run(INVALID, "b")), 4, "4 runs in a row do not count: b", id="more"),
        pytest.param((run(INVALID, COLLAPSED, "slow"),), 0, None, id="a collapse is a result"),
        pytest.param(
            (run(INVALID, "no client", metrics=None),), 1, "1 runs in a row do not count: no client", id="no figures"
        ),
        pytest.param((run(MeasurementStatus.LOST), run(INVALID, "a")), 1, None, id="a lost run is no void one"),
    ],
)
def test_runs_are_repeated_a_few_times(own: tuple[Measurement, ...], streak: int, hopeless: str | None) -> None:
    assert len(void_streak(own)) == streak
    assert hopelessly_void(own, RULE) == hopeless


def test_a_claim_without_the_text_for_it_is_void() -> None:
    assert reasons(retokenized_tokens=500) == ()
    assert reasons(retokenized_tokens=3500) == ()
    assert reasons(retokenized_tokens=499) == ("the text that came has 499 tokens, the client claims 1000",)
    assert reasons(rule=ValidityRule(min_retokenized_share=0.4), retokenized_tokens=400) == ()


def test_figures_that_measure_nothing_are_named() -> None:
    assert reasons(unusable=("e2e = NaN", "ttft = -1.7")) == ("these figures measure nothing: e2e = NaN, ttft = -1.7",)


# --- requests of others that are tolerated ---


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param({"server_requests": 16 + 5}, (), id="as many as are allowed"),
        pytest.param(
            {"server_requests": 16 + 6},
            ("foreign traffic: about 0.60 requests a second of others, 0.5 allowed",),
            id="more, by the count of requests",
        ),
        pytest.param(
            {"server_output_tokens": 1000 * 22 // 16},
            ("foreign traffic: about 0.60 requests a second of others, 0.5 allowed",),
            id="more, by tokens in requests like ours",
        ),
        pytest.param({"server_requests": 16, "server_output_tokens": 1500}, (), id="requests count more than tokens"),
        pytest.param({"server_output_tokens": None}, (), id="nothing is counted"),
        pytest.param(
            {"server_requests": 16, "server_output_tokens": 900},
            ("the server counted 900 output tokens, the client claims 1000",),
            id="fewer tokens are a false claim still",
        ),
    ],
)
def test_so_many_requests_of_others_a_second_are_tolerated(fields: dict[str, Any], said: tuple[str, ...]) -> None:
    run = good(duration_s=10.0, **fields)
    assert invalid_reasons(run, Telemetry(), HIGH, RULE, max_foreign_rps=0.5) == said
