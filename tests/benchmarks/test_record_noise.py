"""The recorder of noise: its figures on luck of a known size, what is left out, merging, and a real recording."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from state.models import digest

PROJECT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "threads": 1,
    "slots": 4,
    "streams": 4,
    "requests": 8,
    "prompt_tokens": 16,
    "output_tokens": 48,
    "runs": 10,
}
NAME = "llama.cpp demo, 1 thread, 4 streams"
NOISY = "noisy host: 1.00 cores were busy with other work, 0.25 allowed"


def recorder(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "benchmarks" / "record_noise.py"), "--out", str(out)]
    return subprocess.run([*command, "--json", str(out / "told"), *options], capture_output=True, text=True)


def kept(out: Path, launches: int, rate: Callable[[int, int], float], void: Callable[[int, int], bool]) -> None:
    """A recording as the program keeps it; `rate` is tok/s by launch and run, both from 0."""
    out.mkdir(parents=True, exist_ok=True)
    for launch in range(launches):
        rows = [
            {
                "at_unix": 1e9 + 60 * launch + 5 * run,
                "tok_s": rate(launch, run),
                "duration_s": 4.0,
                "server_cpu_cores": 1.0,
                "foreign_cpu_cores": 0.1,
                "foreign_cpu_cores_max": 0.2,
                "steal_share": 0.0,
                "void": [NOISY] * void(launch, run),
            }
            for run in range(SETTINGS["runs"])
        ]
        about = {"settings": SETTINGS, "engine": "1", "hardware": "2 × CPU", "launch": launch + 1}
        (out / f"launch-{digest(SETTINGS, 8)}-{launch + 1:03}.json").write_text(json.dumps({**about, "runs": rows}))


def never(launch: int, run: int) -> bool:
    return False


def told(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "told").read_text()))


def test_spreads_drift_and_memory_are_found_again(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    launch_luck, run_luck = 0.03 * draw.standard_normal(200), 0.02 * draw.standard_normal((200, 10))
    for run in range(1, 10):
        run_luck[:, run] = 0.6 * run_luck[:, run - 1] + 0.8 * run_luck[:, run]
    drift = np.linspace(0, 0.1, 200)
    rates = 100 * np.exp(drift[:, None] + launch_luck[:, None] + run_luck)
    kept(tmp_path, 200, lambda launch, run: float(rates[launch, run]), never)
    assert recorder(tmp_path, "--launches", "200").returncode == 0
    found = told(tmp_path)
    assert (found["launches"], found["runs"], found["void"]) == (200, 2000, 0)
    assert found["drift"]["change"] == pytest.approx(0.1, abs=4 * found["drift"]["error"])
    assert found["launch_spread"] == pytest.approx(np.hypot(0.03, 0.1 / np.sqrt(12)), rel=0.2)
    assert found["autocorrelation"] > 0.3 > 0 > found["autocorrelation_of_pure_chance"]


def test_pure_luck_of_runs_is_not_taken_for_luck_of_launches(tmp_path: Path) -> None:
    luck = 0.02 * np.random.default_rng(6).standard_normal((60, 10))
    kept(tmp_path, 60, lambda launch, run: float(50 * np.exp(luck[launch, run])), never)
    recorder(tmp_path, "--launches", "60")
    found = told(tmp_path)
    assert found["run_spread"] == pytest.approx(0.02, rel=0.1)
    assert found["launch_spread"] < 0.005
    assert abs(found["autocorrelation"] - found["autocorrelation_of_pure_chance"]) < 0.1


def test_void_runs_are_marked_and_left_out_of_figures_and_of_the_merged_source(tmp_path: Path) -> None:
    def void(launch: int, run: int) -> bool:
        return launch == 1 or run == 0

    kept(tmp_path, 3, lambda launch, run: 1.0 if void(launch, run) else 80.0 + run, void)
    file = tmp_path / "recorded.json"
    file.write_text((PROJECT / "benchmarks" / "data" / "recorded_noise.json").read_text())
    before = json.loads(file.read_text())
    before["sources"].pop(NAME, None)
    for _ in range(2):
        done = recorder(tmp_path, "--launches", "3", "--merge", str(file))
        assert done.returncode == 0, done.stderr
    found, after = told(tmp_path), json.loads(file.read_text())
    assert (found["launches"], found["runs"], found["void"]) == (2, 18, 12)
    assert after["sources"].pop(NAME) == [[80.0 + run for run in range(1, 10)]] * 2
    assert after["sources"] == before["sources"]
    assert after["about"] == before["about"]
    assert after["settings"][NAME]["threads"] == 1
    assert after["settings"][NAME]["engine"] == "1"


def test_a_recording_without_a_single_run_that_counts_is_no_source(tmp_path: Path) -> None:
    kept(tmp_path, 2, lambda launch, run: 80.0, lambda launch, run: True)
    file = tmp_path / "recorded.json"
    file.write_text('{"about": "", "sources": {}}')
    assert recorder(tmp_path, "--launches", "2", "--merge", str(file)).returncode == 1
    assert json.loads(file.read_text()) == {"about": "", "sources": {}}


@pytest.mark.real
@pytest.mark.slow
def test_a_real_server_is_recorded_and_a_second_time_nothing_is(tmp_path: Path, demo_model: Path) -> None:
    small = ("--launches", "2", "--runs", "2", "--requests", "4", "--output-tokens", "8")
    first = recorder(tmp_path, *small)
    assert first.returncode in (0, 1), first.stderr  # on a busy machine no run counts
    rows = [row for launch in told(tmp_path)["recorded"] for row in launch["runs"]]
    assert len(rows) == 4
    assert all(row["tok_s"] > 0 and row["foreign_cpu_cores"] >= 0 for row in rows)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("launch-*")}
    assert len(times) == 2
    second = recorder(tmp_path, *small)
    assert second.stdout.splitlines()[-4:] == first.stdout.splitlines()[-4:]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("launch-*")} == times
