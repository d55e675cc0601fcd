"""Fault points: absent in normal runs, a real SIGKILL in the crash suite, and a clear word for a wish that is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.faults import VARIABLE, fault_point
from state.errors import ConfigError
from state.journal import no_fault

KILLED = -9
POINTS = ("node:observe", "T2/launch:stopped", "node:observe", "end:closed")
PASS_ALL = f"""
import os
from agent.faults import fault_point
point = fault_point(os.environ)
for name in {POINTS!r}:
    point(name)
    print(name, flush=True)
"""


def passing(wish: str) -> tuple[int, list[str]]:
    """A process that passes POINTS under a wish: how it ended, and which points it left behind."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PASS_ALL], cwd=root, env={VARIABLE: wish}, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode, done.stdout.splitlines()


def test_without_the_variable_there_is_no_fault() -> None:
    assert fault_point({}) is no_fault


def test_at_a_name_the_process_is_killed_before_it_goes_on() -> None:
    assert passing("at:T2/launch:stopped") == (KILLED, ["node:observe"])
    assert passing("at:T9/launch:stopped") == (0, list(POINTS))


def test_the_nth_point_counts_from_one() -> None:
    assert passing("nth:1") == (KILLED, [])
    assert passing("nth:3") == (KILLED, list(POINTS[:2]))
    assert passing("nth:5") == (0, list(POINTS))


def test_a_list_has_every_point_and_kills_nobody(tmp_path: Path) -> None:
    assert passing(f"list:{tmp_path / 'points'}") == (0, list(POINTS))
    assert (tmp_path / "points").read_text().splitlines() == list(POINTS)


def test_a_walk_is_killed_once_at_each_name_in_turn_and_then_ends(tmp_path: Path) -> None:
    names = tmp_path / "points"
    seen = []
    while passing(f"walk:{names}")[0] == KILLED:
        seen.append(names.read_text().splitlines()[-1])
    assert seen == list(dict.fromkeys(POINTS)) == names.read_text().splitlines()


@pytest.mark.parametrize("wish", ["", "at", "at:", "nth:0", "nth:-1", "nth:x", "sometimes:node:apply"])
def test_a_wish_that_is_none_is_a_mistake_of_the_caller(wish: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        fault_point({VARIABLE: wish})
