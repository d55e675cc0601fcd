"""What a server said during a run: exactly what came after the mark, from both of its files, bounded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.server_words import END_LINES, LIMIT_BYTES, MARK, end_sh, mark_sh, said_sh


def sh(script: str, cwd: Path) -> str:
    done = subprocess.run(["/bin/sh", "-c", script], cwd=cwd, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    folder = tmp_path / "a launch's folder"
    folder.mkdir()
    (folder / "stdout").write_text("said before\n")
    (folder / "stderr").write_text("complained before\n")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_came_after_the_mark_is_told(launch: Path, run: Path) -> None:
    sh(mark_sh(str(launch)), run)
    append(launch / "stdout", "said meanwhile\n")
    append(launch / "stderr", "complained meanwhile\n")
    assert sh(said_sh(str(run)), run).split("\n") == ["said meanwhile", "", "complained meanwhile", ""]


def test_a_quiet_server_said_nothing(launch: Path, run: Path) -> None:
    sh(mark_sh(str(launch)), run)
    assert sh(said_sh(str(run)), run).strip() == ""


def test_without_a_mark_nothing_is_told(run: Path) -> None:
    assert sh(said_sh(str(run)), run) == ""


def test_a_log_that_is_not_there_is_no_obstacle(tmp_path: Path, run: Path) -> None:
    sh(mark_sh(str(tmp_path / "gone")), run)
    assert (run / MARK).read_text().splitlines() == ["0", "0", str(tmp_path / "gone")]
    assert sh(said_sh(str(run)), run).strip() == ""


def test_of_a_long_log_the_end_is_told(launch: Path, run: Path) -> None:
    sh(mark_sh(str(launch)), run)
    append(launch / "stdout", "x" * LIMIT_BYTES + "the end\n")
    said = sh(said_sh(str(run)), run)
    assert said.rstrip().endswith("the end")
    assert len(said) <= LIMIT_BYTES + 2


def test_the_end_of_a_launchs_log_is_that_of_both_files_and_of_none_nothing(launch: Path, tmp_path: Path) -> None:
    (launch / "stdout").write_text("".join(f"line {n}\n" for n in range(500)))
    lines = sh(end_sh(str(launch)), tmp_path).splitlines()
    assert lines == [*(f"line {n}" for n in range(500 - END_LINES, 500)), "complained before"]
    assert sh(end_sh(str(tmp_path / "never begun")), tmp_path) == ""
