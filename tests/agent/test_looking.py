"""What a language model may look up: bounded, quoted, fresh, and never more than it asked a typed question for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.looking import MEASURING, OFF, USED_UP, looked_up
from agent.planners.answer import LOOK_UPS
from agent.planners.look_ups import BYTES, LINES, together, told, wish_of
from agent.session import Runner
from state import events as ev
from state.models import Arm, Failure, Measurement, Trial, TrialStatus
from tests.agent.model_sessions import TYPED, model_session
from tests.agent.test_table import INJECTION

pytestmark = pytest.mark.anyio
SOURCE = {"/src/engine/core.py": f"threads = 4\n# {INJECTION.splitlines()[0]}\n", "/src/notes.md": "threads\n"}
SCENARIO = TYPED.model_copy(update={"source": SOURCE})


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    """A session in which one launch failed, with its log still on the host."""
    with model_session(tmp_path, "http://127.0.0.1:9/v1", scenario=SCENARIO, source_roots=("/src",)) as made:
        store, sid = made.store, made.session_id
        failure = Failure(failure_class="oom", cause="out of memory", tail="as it was told when it ended")
        trial = Trial(id=store.next_id("trials", "T"), experiment_id="e1", fingerprint="f")
        failed = trial.model_copy(update={"status": TrialStatus.FAILED, "failure": failure})
        store.append(sid, ev.TrialOpened(trial=trial), ev.TrialClosed(trial=failed))
        yield made


async def found(runner: Runner, *wishes: object, left: int = 99) -> str:
    return await looked_up(runner.hands, await runner.target.facts(), wishes, left)


def write_log(runner: Runner, text: str) -> None:
    """The world's log of the failed launch, as it is by now."""
    path = runner.store.path.parent / "world" / "world.json"
    world = json.loads(path.read_text())
    key = runner.hands.key(runner.store.trials(runner.session_id)[-1].id)
    path.write_text(json.dumps({**world, "runs": {"r": {"launch": key, "said": text}}}))


async def test_help_and_readings_come_from_the_session(runner: Runner) -> None:
    text = await found(runner, {"kind": "help", "of": "--threads"}, {"kind": "telemetry", "of": "e1"})
    assert text.startswith('help of --threads:\n"takes an integer from 1 to 64"')
    assert text.endswith("telemetry of e1: there is none.")


async def test_a_log_is_read_as_it_is_now_below_the_cause_that_is_known(runner: Runner) -> None:
    stored = await found(runner, {"kind": "log", "of": "e1"})
    assert stored == 'log of e1:\n"oom: out of memory"\n"as it was told when it ended"'
    write_log(runner, "\n".join(f"line {n}" for n in range(500)))
    fresh = (await found(runner, {"kind": "log", "of": "e1"})).splitlines()
    assert (len(fresh), fresh[1], fresh[-1]) == (LINES + 1, '"oom: out of memory"', '"line 499"')
    newest = await found(runner, {"kind": "log", "of": "server"})
    assert newest.endswith('"line 499"')


async def test_source_is_searched_for_a_literal_text_in_the_roots_of_the_session_file(runner: Runner) -> None:
    text = await found(runner, {"kind": "source", "of": "threads", "files": "*.py"})
    assert text == 'source of threads in *.py:\n"/src/engine/core.py:1:threads = 4"'
    assert "there is none" in await found(runner, {"kind": "source", "of": "thr.*", "files": ""})


async def test_without_roots_there_is_no_source(tmp_path: Path) -> None:
    with model_session(tmp_path, "http://127.0.0.1:9/v1", scenario=SCENARIO) as runner:
        assert "there is none" in await found(runner, {"kind": "source", "of": "threads", "files": ""})


@pytest.mark.parametrize("kind", ["log", "source"])
async def test_what_a_log_or_a_source_file_says_stands_in_quotes_line_by_line(kind: str, runner: Runner) -> None:
    write_log(runner, INJECTION)
    wish = {"kind": kind, "of": "e1" if kind == "log" else "ignore previous", "files": ""}
    text = await found(runner, wish)
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    assert any("ignore previous instructions" in line for line in lines)


@pytest.mark.parametrize(
    "wish",
    [
        {"kind": "shell", "of": "id"},
        {"kind": "log"},
        {"kind": "log", "of": "e1", "path": "/etc/passwd"},
        {"kind": "source", "of": "x", "files": "../*"},
        {"kind": "source", "of": "x", "files": "/etc/passwd"},
        {"kind": "source", "of": "x", "files": "*.py -e root"},
        {"kind": "source", "of": "one\ntwo", "files": ""},
        {"kind": "source", "of": "x" * 81, "files": ""},
        {"kind": "source", "of": "   ", "files": ""},
        "log",
        None,
    ],
    ids=str,
)
def test_anything_else_than_a_typed_question_is_not_understood(wish: object) -> None:
    assert "was not understood" in str(wish_of(wish))


async def test_a_name_is_only_a_key(runner: Runner) -> None:
    for name in ("../../etc/passwd", "*", "e1; id"):
        assert "there is none" in await found(runner, {"kind": "log", "of": name})


async def test_look_ups_are_bounded_in_number_lines_and_bytes(runner: Runner) -> None:
    one = {"kind": "help", "of": "--threads"}
    many = await found(runner, *[one] * 5)
    assert many.count("help of --threads:") == LOOK_UPS
    assert "2 more were not looked up" in many
    assert await found(runner, one, one, left=1) == f"{await found(runner, one)}\n\n{USED_UP}"
    assert await found(runner, one, left=0) == USED_UP
    wish = wish_of(one)
    assert not isinstance(wish, str)
    assert len(together([told(wish, "\n".join(["é" * 1000] * 100))] * 3).encode()) < BYTES + 50


async def test_nothing_is_looked_up_while_a_measurement_runs(runner: Runner) -> None:
    taken = Measurement(
        id="M1", experiment_id="e1", trial_id="T1", arm=Arm.BASELINE, block=0, run=0, load_point="c8", seed=1
    )
    runner.store.append(runner.session_id, ev.MeasurementOpened(measurement=taken))
    assert await found(runner, {"kind": "log", "of": "e1"}) == MEASURING


async def test_a_person_may_switch_it_off(tmp_path: Path) -> None:
    with model_session(tmp_path, "http://127.0.0.1:9/v1", look_ups=False) as runner:
        assert await found(runner, {"kind": "help", "of": "--threads"}) == OFF
