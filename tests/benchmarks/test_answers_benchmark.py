"""The benchmark of the judge of answers, on answers that it finds already given, so that no server starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.simulated_answers import Likeness, simulated_answers

PROJECT = Path(__file__).resolve().parents[2]
CASES = {"nothing": "nothing", "K cache q8_0": "k-cache-q8-0", "RoPE base 100": "rope-base-100"}


def given(out: Path, name: str, how: Likeness) -> None:
    """The answers of a launch, as the program keeps them: three passes."""
    out.mkdir(exist_ok=True)
    one = [answer.model_dump() for answer in simulated_answers(1, how)]
    (out / f"{name}.json").write_text(json.dumps([one] * 3))


def judged(folder: Path, *words: Likeness) -> tuple[int, str, list[dict[str, object]]]:
    """Exit code, output and rows, with these answers for nothing, a coarser cache and a broken model."""
    for number in range(2):
        given(folder / "out", f"parent-{number}", "same")
    command = [sys.executable, str(PROJECT / "benchmarks" / "answers.py"), "--check", "--out", str(folder / "out")]
    for (case, slug), how in zip(CASES.items(), words, strict=True):
        given(folder / "out", f"{slug}-0", how)
        command += ["--only", case]
    done = subprocess.run([*command, "--json", str(folder / "told.json")], capture_output=True, text=True, cwd=PROJECT)
    assert done.stderr == ""
    return done.returncode, done.stdout, json.loads((folder / "told.json").read_text())["rows"]


def test_it_prints_a_row_for_each_change_and_the_goal(tmp_path: Path) -> None:
    code, out, rows = judged(tmp_path, "same", "close", "broken")
    assert code == 0
    assert [(row["name"], row["word"], row["one_pass"]) for row in rows] == [
        ("nothing", "same", "same"),
        ("K cache q8_0", "close", "close"),
        ("RoPE base 100", "broken", "broken"),
    ]
    assert [line.count("|") for line in out.splitlines()[:-1]] == [13] * 5
    assert out.splitlines()[-1] == "answers: 0 of 9 words are wrong (goal 0: met)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("same", "broken", "broken"), "K cache q8_0 is lossy and was called broken (word)"),
        (("broken", "close", "broken"), "nothing is harmless and was called broken (one_pass)"),
        (("same", "close", "close"), "RoPE base 100 is broken and was called close (texts)"),
        (("same", "close", "same"), "RoPE base 100 is broken and was called same (word)"),
    ],
)
def test_a_wrong_word_misses_the_goal(tmp_path: Path, words: tuple[Likeness, ...], said: str) -> None:
    code, out, _ = judged(tmp_path, *words)
    assert code == 1
    assert said in out and out.splitlines()[-1].endswith("(goal 0: MISSED)")
