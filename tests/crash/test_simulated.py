"""Every point on the simulated target, as `make test` has it: the crash suite's own program with a short session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.graph import NODES
from tests.crash.kinds import kind, rank
from tests.crash.report import Case, Ledger, rows

ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "launch": ("before-intent", "after-intent", "stopped", "after-act", "after-outcome", "ready"),
    "adjust": ("before-intent", "after-intent", "after-act", "after-outcome"),
    "run": ("before-intent", "after-intent", "after-act", "after-outcome", "collected"),
}


ELSEWHERE = {"consult", "refine"}
"""No model is asked in these sessions: tests/agent/test_model_sessions.py kills those that ask one. `refine` has a
session of its own.
"""
ABOUT = {
    "window": {"wrote: clock-read", "wrote: window-awaited", "node: settle", "launch: stopped"},
    "refined": {"node: refine", "wrote: todo-added", "launch: stopped"},
    "spoken": {"wrote: word-heard", "adjust: after-act", "launch: stopped"},
}
"""What has to be killed in a session that is about one thing."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program says of each point; in a process of its own, since it forks."""
    return _told(tmp_path_factory.mktemp("crash"), "changes")


def _told(folder: Path, night: str) -> dict[str, Any]:
    path = folder / "crash.json"
    command = [sys.executable, "-m", "tests.crash", "--short", "--night", night, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert path.exists(), done.stdout + done.stderr
    said: dict[str, Any] = json.loads(path.read_text())
    said["exit"] = done.returncode
    return said


@pytest.mark.slow
def test_killed_at_every_point_and_resumed_it_ends_as_if_nothing_had_happened(told: dict[str, Any]) -> None:
    """0 effects repeated, 0 decisions lost, the final configuration serves, no process is left."""
    assert told["broken"] == []
    assert told["exit"] == 0
    assert told["cases"] > 150


@pytest.mark.slow
def test_every_step_of_an_effect_and_every_node_is_killed(told: dict[str, Any]) -> None:
    killed = {row["kind"] for row in told["rows"] if row["killed"]}
    wanted = {f"{effect}: {step}" for effect, steps in STEPS.items() for step in steps}
    wanted |= {f"node: {name}" for name in NODES if name not in ELSEWHERE}
    assert wanted <= killed


@pytest.mark.slow
def test_killed_after_the_end_nothing_is_left_to_do(told: dict[str, Any]) -> None:
    assert {"end: closed", "end: released"} <= {row["kind"] for row in told["rows"] if row["killed"]}
    assert [case for case in told["broken"] if "end:" in case["name"]] == []


@pytest.mark.slow
def test_killed_on_the_way_out_known_good_comes_back_all_the_same(told: dict[str, Any]) -> None:
    killed = {row["kind"] for row in told["rows"] if row["killed"]}
    assert {"drain: begun", "drain: runs-ended", "drain: restored"} <= killed
    assert killed & {"drain: launch: stopped", "drain: adjust: after-act"}
    assert [case for case in told["broken"] if "of the drain" in case["name"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("night", ABOUT)
def test_a_window_refinements_and_a_persons_words_survive_a_kill_at_every_point(night: str, tmp_path: Path) -> None:
    """Nothing outside the window, no refinement twice, each word heard once; the list ends as if nothing happened."""
    said = _told(tmp_path, night)
    assert said["broken"] == []
    assert said["exit"] == 0
    assert said["cases"] > 150
    assert ABOUT[night] <= {row["kind"] for row in said["rows"] if row["killed"]}


def test_a_point_is_named_by_its_kind_whatever_its_number() -> None:
    assert kind("T12/launch:after-act") == "launch: after-act"
    assert kind("M3:collected") == "run: collected"
    assert kind("wrote:trial-closed+noted") == "wrote: trial-closed"
    assert sorted(["node: apply", "run: collected", "launch: ready"], key=rank)[0] == "launch: ready"


def test_a_case_counts_in_each_row_that_it_was_killed_in_and_keeps(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "cases.jsonl")
    ledger.add(Case("one", ("node: apply",), ()))
    ledger.add(Case("two", (), ("node: apply",), repeated=("launch T2 2 times",)))
    again = Ledger(tmp_path / "cases.jsonl")
    assert again.cases == ledger.cases
    (row,) = rows(again.cases.values())
    assert (row.killed, row.again, row.repeated, row.ok) == (1, 1, 1, False)
