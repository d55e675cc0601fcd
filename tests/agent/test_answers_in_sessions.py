"""Whole sessions on the simulated target in which a faster server answers otherwise: what is kept, and when it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import SessionConfig
from agent.session import Runner
from state.models import Arm, MeasurementStatus, Outcome
from tests.agent.sim import ONE_POINT, SCENARIO, flag, sim_session
from tests.agent.test_loop import assert_consistent, outcomes
from tools.simulated import Scenario, SimEffect

pytestmark = pytest.mark.anyio


def changed(answers: str, ratio: float = 1.5) -> Scenario:
    """A server that `--spec ngram` makes faster and whose answers it changes."""
    effect = SimEffect.model_validate({"name": "--spec", "value": "ngram", "ratio": {"*": ratio}, "answers": answers})
    return SCENARIO.model_copy(update={"effects": (effect,)})


def guarded(answers: str) -> SessionConfig:
    guards = ONE_POINT.workload.guards.model_copy(update={"answers": answers})
    return ONE_POINT.model_copy(update={"workload": ONE_POINT.workload.model_copy(update={"guards": guards})})


def asked(runner: Runner) -> dict[str, list[tuple[str, Arm, int]]]:
    """Which runs asked the fixed prompts: experiment → (id, arm, block)."""
    launches = {trial.id for trial in runner.store.trials(runner.session_id)}
    ids = {name for name, _ in runner.store.answers(runner.session_id, launches)}
    found: dict[str, list[tuple[str, Arm, int]]] = {}
    for taken in runner.store.measurements(runner.session_id):
        if taken.id in ids:
            assert taken.status is MeasurementStatus.VALID
            found.setdefault(taken.experiment_id, []).append((taken.id, taken.arm, taken.block))
    return found


@pytest.mark.parametrize(
    ("answers", "guard", "numerics", "outcome", "reason"),
    [
        pytest.param("same", "close", False, Outcome.BETTER, "answers: same", id="as before"),
        pytest.param("close", "close", False, Outcome.BETTER, "answers: close", id="other numerics, allowed"),
        pytest.param("close", "same", False, Outcome.INCONCLUSIVE, "no longer the same", id="other numerics, not"),
        pytest.param("broken", "close", False, Outcome.WORSE, "fixed prompts broke", id="a broken model"),
        pytest.param("broken", "off", True, Outcome.WORSE, "fixed prompts broke", id="must be compared though off"),
        pytest.param("broken", "off", False, Outcome.BETTER, "chance of no gain", id="nobody wants to know"),
    ],
)
async def test_a_faster_server_is_kept_only_if_its_answers_are_still_good(
    tmp_path: Path, answers: str, guard: str, numerics: bool, outcome: Outcome, reason: str
) -> None:
    experiment = flag("--spec", "ngram", numerics=numerics)
    with sim_session(tmp_path, experiment, config=guarded(guard), scenario=changed(answers)) as runner:
        assert await runner.run() == 0
        verdict = runner.store.verdicts(runner.session_id)["spec-ngram"]
        assert verdict.outcome is outcome, verdict.reason
        assert reason in verdict.reason
        assert bool(asked(runner)) is (guard != "off" or numerics)
        assert_consistent(runner)


async def test_the_prompts_are_asked_only_where_they_matter(tmp_path: Path) -> None:
    listed = (flag("--spec", "ngram"), flag("--poll", "0"))
    with sim_session(tmp_path, *listed, config=ONE_POINT, scenario=changed("same")) as runner:
        assert await runner.run() == 0
        found = asked(runner)
        assert len(found["baseline"]) == 3  # what is needed to know the server's own spread
        assert all(arm is Arm.BASELINE or block >= 1 for _, arm, block in found["spec-ngram"])
        assert any(arm is Arm.CANDIDATE for _, arm, _ in found["spec-ngram"])
        assert "confirm" not in found
        if outcomes(runner)["poll-0"] is Outcome.NO_DIFFERENCE:
            assert all(arm is Arm.BASELINE for _, arm, _ in found.get("poll-0", []))


async def test_the_close_out_compares_answers_where_a_kept_change_made_it_necessary(tmp_path: Path) -> None:
    experiment = flag("--spec", "ngram", numerics=True)
    with sim_session(tmp_path, experiment, config=guarded("off"), scenario=changed("close")) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["spec-ngram"] is Outcome.BETTER
        assert {arm for _, arm, _ in asked(runner)["close-out"]} >= {Arm.CANDIDATE}
