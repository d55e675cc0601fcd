"""The judge's benchmark: a small rehearsal for real, resumed, and that its goals can be missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def rehearsed(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The program on a few nights of the smallest cells."""
    command = [sys.executable, str(PROJECT / "benchmarks" / "judge.py"), "--nights", "40", "--out", str(folder / "out")]
    return subprocess.run(
        [*command, "--json", str(folder / "judge.json"), "--only", "5 experiments, 2 % + 1 %", *options],
        capture_output=True,
        text=True,
        cwd=PROJECT,
    )


def test_it_prints_tables_and_figures_and_a_second_time_plays_nothing_again(tmp_path: Path) -> None:
    first = rehearsed(tmp_path)
    assert first.returncode == 0, first.stderr
    told = json.loads((tmp_path / "judge.json").read_text())
    assert {row["experiments"] for row in told["rows"]} == {5}
    assert all(0 <= row["false_nights_low"] <= row["false_nights"] <= 1 for row in told["rows"])
    assert len({row["name"] for row in told["rivals"]}) == 5
    assert all(row["ended_s"] < row["whole_run_s"] for row in told["collapses"] if row["whole_run_s"])
    assert first.stdout.splitlines()[-1].startswith(f"judge: {len(told['rows'])} cells of 40 nights")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert len(kept) == len(told["rows"])
    assert rehearsed(tmp_path).stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == kept


def test_a_row_that_misses_a_goal_fails_the_check(tmp_path: Path) -> None:
    rehearsed(tmp_path)
    for path in (tmp_path / "out").iterdir():
        row = json.loads(path.read_text())
        path.write_text(json.dumps({**row, "false_nights": 0.2, "false_nights_low": 0.1}))
    checked = rehearsed(tmp_path, "--check")
    assert checked.returncode == 1
    assert "of nights keep something false" in checked.stdout
    assert "MISSED" in checked.stdout.splitlines()[-1]
