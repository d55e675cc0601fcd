"""The search on a real server: what its comparison says, its goals, what it keeps, and a short one for real."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.searching import live
from benchmarks.searching.outcome import Search

PROJECT = Path(__file__).resolve().parents[2]
GOAL = tomllib.loads((PROJECT / "benchmarks" / "goals.toml").read_text())["search_live"]
FAST, SLOW = ("2", "on"), ("1", "on")


def left(setting: tuple[str, ...]) -> Search:
    return Search(setting, (), 300.0, 10, 12.0, 9, 1)


def rows(fast: float, slow: float) -> list[live.Figures]:
    return [
        {"round": number, "setting": list(setting), "value": math.log(rate) + luck}
        for number, luck in enumerate((-0.02, 0.02))
        for setting, rate in ((FAST, fast), (SLOW, slow))
    ]


def test_only_the_comparison_counts_and_the_same_setting_is_equal() -> None:
    searches = {"ratchet": left(FAST), "tpe": left(SLOW), "random": left(FAST)}
    told = live.seed_row(3, searches, rows(110.0, 100.0))
    assert told["ahead"]["tpe"] == pytest.approx(math.log(1.1))
    assert told["ahead"]["random"] == 0.0
    assert told["tok_s"] == pytest.approx({"ratchet": 110.0, "tpe": 100.0, "random": 110.0})


def test_goals_ask_for_the_mean_and_for_most_seeds() -> None:
    def sums(*ahead: float) -> live.Figures:
        return live.summed([{"ahead": {"tpe": one, "random": 0.0}} for one in ahead])

    assert list(live.missed(sums(0.03, 0.0, -0.005, 0.01, -0.03), GOAL)) == []
    (mean,) = live.missed(sums(-0.009, -0.009, -0.009, -0.009, 0.0), GOAL)
    assert "against tpe in the mean" in mean
    (often,) = live.missed(sums(0.2, 0.2, 0.2, -0.02, -0.02), GOAL)
    assert "below tpe in only 60% of seeds" in often


def test_what_is_kept_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    def work() -> dict[str, int]:
        made.append(1)
        return {"made": len(made)}

    path = tmp_path / "one.json"
    assert live.once(path, work) == {"made": 1} == live.once(path, work)
    assert made == [1]


@pytest.mark.real
@pytest.mark.slow
def test_a_short_search_on_the_real_server(tmp_path: Path, demo_model: Path) -> None:
    command = [sys.executable, str(PROJECT / "benchmarks" / "search_live.py"), "--seeds", "1", "--minutes", "0.5"]
    command += ["--rounds", "1", "--busy", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "told.json")]
    played = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert played.returncode == 0, played.stdout + played.stderr
    (seed,) = json.loads((tmp_path / "told.json").read_text())["seeds"]
    assert set(seed["planners"]) == {"ratchet", "tpe", "random"}
    assert all(rate > 0 for rate in seed["tok_s"].values())
    for name in ("tpe", "random"):
        assert seed["planners"][name]["restarts"] > 0
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
