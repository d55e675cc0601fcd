"""What is planted is there, and nothing of it stays: the paused server, its session files, the lines and the goals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.config import SessionConfig
from benchmarks.planted import nights, program
from benchmarks.planted.server import VARIABLE
from state.models import EnvChange
from tests.e2e.witness import start_ticks
from tests.ssh_servers import descendants, free_port
from tools.servers.llamacpp import LlamaCpp

PROJECT = Path(__file__).resolve().parents[2]
SERVER = PROJECT / "benchmarks" / "planted" / "server.py"
LIMIT_S = 60
GOAL = tomllib.loads((PROJECT / "benchmarks" / "goals.toml").read_text())["real_night"]


def state(pid: int) -> str:
    """The kernel's letter for a process, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.001)


def await_stop_and_go(pid: int) -> None:
    """Until it was seen stopped, going and stopped again."""
    for letters in ({"T"}, {"R", "S", "D"}, {"T"}):
        until(lambda wanted=letters: state(pid) in wanted, f"its state is one of {letters}")


@contextmanager
def server(model: Path, log: Path, share: str) -> Iterator[subprocess.Popen[bytes]]:
    """The planted server, once it serves."""
    words = [sys.executable, str(SERVER), "--model", str(model), "--port", str(free_port()), "--threads", "1"]
    with log.open("wb") as sink:
        process = subprocess.Popen(words, env={**os.environ, VARIABLE: share}, stdout=sink, stderr=sink)
    try:
        until(lambda: b"listening on" in log.read_bytes(), "it serves")
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.real
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_is_held_still_now_and_then_and_its_child_dies_with_it(
    tmp_path: Path, demo_model: Path, ending: signal.Signals
) -> None:
    with server(demo_model, tmp_path / "log", "0.3") as process:
        (child,) = descendants(process.pid)
        await_stop_and_go(process.pid)
        os.kill(process.pid, ending)
        process.wait(LIMIT_S)
        until(lambda: start_ticks(child) is None, "the child is gone")


@pytest.mark.real
def test_signals_that_end_others_do_not_end_the_child(tmp_path: Path, demo_model: Path) -> None:
    with server(demo_model, tmp_path / "log", "0.3") as process:
        (child,) = descendants(process.pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(child, number)
        await_stop_and_go(process.pid)
        assert start_ticks(child) is not None


@pytest.mark.real
def test_without_a_share_there_is_no_child(tmp_path: Path, demo_model: Path) -> None:
    with server(demo_model, tmp_path / "log", "0") as process:
        assert descendants(process.pid) == []


@pytest.mark.parametrize("share", ["much", "1", "-0.1", "nan"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    words = [sys.executable, str(SERVER), "--model", "none"]
    done = subprocess.run(words, env={**os.environ, VARIABLE: share}, capture_output=True, text=True)
    assert done.returncode == 1
    assert VARIABLE in done.stderr


# --- the nights ------------------------------------------------------------------------------------------------------


def config_of(night: nights.Night) -> SessionConfig:
    fields = {
        "seed": 1,
        "host": "127.0.0.1",
        "ssh_port": 22,
        "user": "u",
        "identity": "i",
        "known_hosts": "k",
        "root": "/r",
        "python": "python3",
        "port": 8102,
        "key_file": "/key",
    }
    raw = tomllib.loads(nights.session_text(night, nights.Size(), False, **fields))
    return SessionConfig.model_validate(raw)


def test_each_night_is_a_session_file_in_which_every_experiment_is_another_configuration() -> None:
    found = {night.name: night for night in nights.nights(20, 10, 10)}
    assert [len(night.experiments) for night in found.values()] == [20, 10] + [1] * 10
    for night in found.values():
        config = config_of(night)
        assert [one.id for one in config.experiments] == [planted.id for planted in night.experiments]
        assert len({one.changes for one in config.experiments}) == len(night.experiments)
    (freed,) = config_of(found["gain-01"]).experiments
    assert freed.changes == (EnvChange(name=VARIABLE, value=None),)
    assert found["gain-01"].share == pytest.approx(1 - 1 / 1.1)
    assert all(planted.effect == -0.05 for planted in found["slow"].experiments)


def test_what_is_planted_is_open_to_experiments_and_no_option_of_the_server() -> None:
    text = (PROJECT / "tests" / "data" / "llamacpp" / "help_native.txt").read_text()
    adapter = LlamaCpp()
    known = adapter.parse_help(text)
    for night in nights.nights(20, 10, 1):
        for planted in night.experiments:
            for name, value in planted.changes:
                assert name not in known.variables
                assert adapter.check_change(EnvChange(name=name, value=value), known) is None


def row(effect: float, kept: bool, outcome: str | None = "inconclusive") -> dict[str, Any]:
    return {
        "id": "one",
        "effect": effect,
        "outcome": outcome,
        "kept": kept,
        "shown": "",
        "runs": 2,
        "launches": 1,
        "void": 0,
    }


def night_of(kind: str, *rows: dict[str, Any], broken: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "night": kind,
        "kind": kind,
        "experiments": list(rows),
        "confirmed": False,
        "measurements": [],
        "minutes": 1.0,
        "broken": broken,
    }


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (night_of("aa", row(0.0, False)), None),
        (night_of("aa", row(0.0, True)), "1 of 1 experiments without any effect were kept"),
        (night_of("slow", row(-0.05, True)), "1 of 1 experiments that slow down were kept"),
        (night_of("gain", row(0.1, True)), None),
        (night_of("gain", row(0.1, False)), "only 0 of 1 gains were kept"),
        (night_of("aa", *[row(0.0, False, None)] * 3), "3 experiments were not judged"),
        (night_of("aa", row(0.0, False), broken=("nobody serves",)), "aa: nobody serves"),
    ],
)
def test_the_goals_can_be_missed(told: dict[str, Any], said: str | None) -> None:
    found = program.missed(program.summed([told]), [], GOAL)
    assert found == ([] if said is None else [said])


def test_a_share_that_is_not_what_was_planted_misses_the_goal() -> None:
    shares = [{"share": 0.05, "lost_cpu": lost} for lost in (0.045, 0.2)]
    (said,) = program.missed(program.summed([]), shares, GOAL)
    assert "20.00% of the server's CPU time" in said


def test_lines_call_a_false_keep_and_a_missed_gain_by_their_name() -> None:
    assert program.line("aa", row(0.0, True)).endswith("FALSE KEEP")
    assert program.line("slow", row(-0.05, True)).endswith("FALSE KEEP")
    assert program.line("gain-01", row(0.1, False)).endswith("missed")
    assert program.line("gain-01", row(0.1, True)).endswith("kept")
    assert program.line("aa", row(0.0, False)).endswith("void 0")


def test_nights_that_are_there_are_not_played_again(tmp_path: Path) -> None:
    told = night_of("aa", row(0.0, False), row(0.0, False))
    (tmp_path / "night-aa-2-8x32.json").write_text(json.dumps(told))
    command = [sys.executable, str(PROJECT / "benchmarks" / "real_night.py"), "--only", "aa", "--no-ops", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("real_night: kept 0 of 2 no-ops")
    assert done.stdout.splitlines()[-1].endswith("(goals met)")
