"""The accounting of the agent's own time, on stretches whose sums are known, and a short round of the long session."""

from __future__ import annotations

from pathlib import Path

from benchmarks.waits import growth
from benchmarks.waits.account import covered, cpu_until, summed
from benchmarks.waits.program import missed
from benchmarks.waits.record import KINDS, Record, Sample, Span

GOAL = {"min_waited_demo": 0.9, "min_waited_slow": 0.99, "max_growth": 1.05}


def test_stretches_that_overlap_count_once_and_only_inside_the_window() -> None:
    spans = [Span("loading", 1.0, 4.0), Span("quiet", 3.0, 6.0), Span("quiet", 9.0, 20.0)]
    assert covered(spans, 2.0, 10.0) == 5.0
    assert covered([], 0.0, 1.0) == 0.0


def test_cpu_time_is_that_of_the_last_sample_before() -> None:
    samples = [Sample(1.0, 0.5), Sample(2.0, 0.75)]
    assert cpu_until(samples, 1.5) == 0.5
    assert cpu_until(samples, 0.5) == 0.5
    assert cpu_until([], 0.5) == 0.0


def test_an_own_share_beyond_the_goal_is_named() -> None:
    row = {"experiment": "a", "wall_s": 10.0, **dict.fromkeys(KINDS, 0.0), "loading": 8.5, "own_s": 1.5}
    sums = summed([row | {"cpu_s": 0.1, "trips": 7}])
    assert sums["waited_share"] == 0.85
    assert len(missed({"demo": sums}, GOAL)) == 1
    assert missed({"demo": sums | {"waited_share": 0.9}}, GOAL) == []
    grows = {"growth": {"ratios": {"all": {"ratio": 1.2}}}}
    assert "1.20" in missed(grows, GOAL)[0]


def test_a_stretch_is_noted_only_when_time_passed() -> None:
    record = Record()
    record.span("quiet", 2.0, 2.0)
    record.span("quiet", 2.0, 3.0)
    assert record.spans == [Span("quiet", 2.0, 3.0)]


def test_the_long_session_goes_on_where_it_was_left_and_its_list_never_runs_dry(tmp_path: Path) -> None:
    first = growth.play(tmp_path, 4)
    then = growth.play(tmp_path, 6)
    assert (len(first), len(then)) == (3, 1)
    assert all(name in growth.by_node(first[0]) for name in ("apply", "measure", "judge", "all"))


def test_late_over_early_has_an_interval_around_the_mean_of_the_rounds() -> None:
    rounds = [{"early": {"all": 1.0}, "late": {"all": late}} for late in (1.1, 1.2, 1.3)]
    told = growth.ratios(rounds)["all"]
    assert told["low"] < 1.1 < told["ratio"] < 1.3 < told["high"]
