"""What every BenchClient must do; a subclass gives the fixture `case` with a recorded run of its own client."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.validity import TRAFFIC, invalid_reasons
from state.errors import CommandFailed
from state.models import LoadPoint, Objective, ProcessId, Telemetry, ValidityRule, Workload
from tools.benches.base import RESULT, BenchClient, Place
from tools.target import RunRequest, RunResult

KEY = "20260101-abcd-M1"
FIXED = ("capital", "The capital of France is Paris.")
PLACE = Place(
    python="/usr/bin/python3",
    client="/srv/ratchet/stream_client.py",
    url="http://127.0.0.1:8080",
    model="smollm2",
    api_key_file="/srv/llm/key",
)
Files = Mapping[str, bytes]


class Bad(NamedTuple):
    """A run that must not count, and a pattern of what is said about it."""

    files: Files
    said: str


class BenchCase(NamedTuple):
    """A client with a run of it that counts, and others made from it."""

    client: BenchClient
    point: LoadPoint
    files: Files
    expected: Mapping[str, Any]
    """Figures of the run by dotted names, None for what the client does not tell."""
    words: tuple[str, ...]
    """What stands in the script for this load point."""
    bad: Mapping[str, Bad]
    """Dead, truncating and refusing servers: `quarter`, `zero`, `refuses_half`, `refuses_all` and more."""
    counted: Callable[[int], Files]
    """The run, while the server counted so many output tokens."""
    answered: Files
    """The run, after which the fixed prompt FIXED was asked."""


def request(point: LoadPoint, seed: int = 7, answers: bool = False) -> RunRequest:
    workload = Workload(load_points=(point,), objective=Objective(at=(point.name,)))
    process = ProcessId(pid=4242, start_ticks=1, boot_id="b")
    return RunRequest(point=point, workload=workload, seed=seed, process=process, answers=answers)


def figure(result: RunResult, name: str) -> Any:
    found: Any = result.metrics
    for step in name.split("."):
        found = getattr(found, step)
    return found


def verdict(case: BenchCase, files: Files, telemetry: Telemetry | None = None) -> tuple[str, ...]:
    """Why the run does not count, in the way a session finds it out."""
    try:
        result = case.client.parse(files, KEY)
    except CommandFailed as error:
        return (error.what,)
    return invalid_reasons(result.metrics, telemetry or Telemetry(), case.point, ValidityRule())


class BenchContract:
    # --- a run that counts

    def test_a_recorded_run_counts_and_tells_its_figures(self, case: BenchCase) -> None:
        assert verdict(case, case.files) == ()
        result = case.client.parse(case.files, KEY)
        for name, value in case.expected.items():
            assert figure(result, name) == (None if value is None else pytest.approx(value, rel=1e-6)), name

    def test_figures_mean_the_same_for_all(self, case: BenchCase) -> None:
        metrics = case.client.parse(case.files, KEY).metrics
        assert metrics.requested == metrics.completed == case.point.requests
        assert metrics.output_tokens == case.point.requests * case.point.output_tokens
        assert metrics.output_tok_s == pytest.approx(metrics.output_tokens / metrics.duration_s, rel=1e-3)
        ttft, tpot, e2e = metrics.ttft_ms, metrics.tpot_ms, metrics.e2e_ms
        assert ttft.mean and tpot.mean and e2e.mean
        assert tpot.mean == pytest.approx((e2e.mean - ttft.mean) / (case.point.output_tokens - 1), rel=0.02)
        for summary in (ttft, tpot, e2e):
            assert (summary.p50 or 0) <= (summary.p90 or 0) <= (summary.p99 or 0)

    def test_a_stored_result_is_read_again_alike(self, case: BenchCase) -> None:
        result = case.client.parse(case.files, KEY)
        again = case.client.again(json.loads(json.dumps(result.raw, allow_nan=False)), KEY)
        assert again.model_copy(update={"answers": result.answers}) == result

    def test_answers_are_told_beside_the_figures(self, case: BenchCase) -> None:
        result = case.client.parse(case.answered, KEY)
        assert [(answer.prompt, answer.text) for answer in result.answers][:1] == [FIXED]
        assert result.metrics == case.client.parse(case.files, KEY).metrics
        assert FIXED[1] not in json.dumps(result.raw)

    # --- runs that do not

    @pytest.mark.parametrize("server", ["quarter", "zero", "refuses_half", "refuses_all"])
    def test_a_broken_server_loses(self, case: BenchCase, server: str) -> None:
        files, said = case.bad[server]
        reasons = verdict(case, files)
        assert any(re.search(said, reason) for reason in reasons), reasons

    def test_whatever_else_went_wrong_is_named(self, case: BenchCase) -> None:
        for name, (files, said) in case.bad.items():
            reasons = verdict(case, files)
            assert any(re.search(said, reason) for reason in reasons), (name, reasons)

    def test_the_servers_own_counters_are_held_against_the_claim(self, case: BenchCase) -> None:
        claimed = case.client.parse(case.files, KEY).metrics.output_tokens
        assert verdict(case, case.counted(claimed)) == ()
        (less,) = verdict(case, case.counted(claimed // 4))
        assert less == f"the server counted {claimed // 4} output tokens, the client claims {claimed}"
        (more,) = verdict(case, case.counted(2 * claimed))
        assert more.startswith(TRAFFIC)

    def test_another_runs_result_is_refused(self, case: BenchCase) -> None:
        with pytest.raises(CommandFailed, match=KEY):
            case.client.parse(case.files, "another-run")
        with pytest.raises(CommandFailed, match=KEY):
            case.client.again(case.client.parse(case.files, KEY).raw, "another-run")

    def test_a_broken_or_missing_file_is_an_error(self, case: BenchCase) -> None:
        result = next(name for name in reversed(case.client.leaves) if not name.endswith(".out"))
        whole = case.files[result]
        for text in (b"", b"null", b"[]", b"{}", b"\xff\xfe", whole[: len(whole) // 2]):
            with pytest.raises(CommandFailed):
                case.client.parse({**case.files, result: text}, KEY)
        for name in {RESULT, result}:
            with pytest.raises(CommandFailed):
                case.client.parse({key: text for key, text in case.files.items() if key != name}, KEY)

    # --- the job

    def test_the_script_is_sh_and_asks_for_the_load_point(self, case: BenchCase, tmp_path: Path) -> None:
        script = case.client.script(KEY, request(case.point), PLACE)
        path = tmp_path / "run.sh"
        path.write_text(script)
        subprocess.run(["sh", "-n", path], check=True)
        for word in (*case.words, KEY, PLACE.url):
            assert word in script, word
        assert script.splitlines()[-1].startswith(f"exec {PLACE.python} {PLACE.client} ")

    def test_the_script_follows_from_the_request_alone(self, case: BenchCase) -> None:
        one, same, other = (case.client.script(KEY, request(case.point, seed), PLACE) for seed in (7, 7, 987654))
        assert one == same != other
        assert "987654" in other

    def test_fixed_prompts_are_asked_only_when_wanted(self, case: BenchCase) -> None:
        without, wanted = (case.client.script(KEY, request(case.point, answers=on), PLACE) for on in (False, True))
        assert '"answers": null' in without
        assert '"max_tokens"' in wanted

    def test_it_says_what_it_cannot_do(self, case: BenchCase) -> None:
        assert case.client.leaves[0] == RESULT
        assert all(case.client.lacks) and case.client.name
        assert all(isinstance(word, str) and word for word in case.client.version_command())
