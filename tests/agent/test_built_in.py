"""Sentinels and leaving one out, in whole sessions on the simulated target: when they come and what they change."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import SessionConfig
from agent.evidence import RESTORE
from agent.report import markdown
from agent.session import Runner
from state import events as ev
from state.models import (
    Arm,
    DecisionKind,
    Disruption,
    Effect,
    Experiment,
    Outcome,
    Purpose,
    Role,
    SessionStatus,
    TodoStatus,
    Verdict,
)
from tests.agent.sim import CONFIG, ONE_POINT, SCENARIO, flag, sim_session
from tests.agent.test_loop import assert_consistent, outcomes, world_log
from tools.simulated import SimEffect

pytestmark = pytest.mark.anyio
NO_OPS = tuple(flag("--poll", str(value)) for value in range(5))
QUIET = SCENARIO.model_copy(update={"run_noise": 0.004, "launch_noise": 0.002})
SILENT = SCENARIO.model_copy(update={"run_noise": 0.0, "launch_noise": 0.0})
"""Without noise, so that no luck can make a sentinel win."""


def every(number: int, config: SessionConfig = ONE_POINT) -> SessionConfig:
    return config.model_copy(update={"judge": config.judge.model_copy(update={"sentinel_every": number})})


def chosen(runner: Runner) -> list[str]:
    kinds = (DecisionKind.CHOOSE, DecisionKind.CLOSE_OUT)
    return [d["subject"] for d in runner.store.decisions(runner.session_id) if d["kind"] in kinds]


def won(number: int) -> tuple[ev.Event, ...]:
    """A sentinel that looked like a gain."""
    effect = Effect(
        estimate=0.1, low=0.05, high=0.15, n_baseline=6, n_candidate=4, launches_baseline=2, launches_candidate=2
    )
    name = f"sentinel-{number}"
    return (
        ev.TodoAdded(
            experiment=Experiment(id=name, title=name, hypothesis="h", purpose=Purpose.SENTINEL), status=TodoStatus.DONE
        ),
        ev.VerdictReached(
            verdict=Verdict(experiment_id=name, outcome=Outcome.BETTER, reason="+10 %", objective=effect)
        ),
    )


# --- sentinels ---------------------------------------------------------------------------------------------


async def test_a_sentinel_takes_the_launch_that_a_restore_made_anyway_and_changes_nothing(tmp_path: Path) -> None:
    with sim_session(tmp_path, *NO_OPS, config=every(2), scenario=SILENT) as runner:
        assert await runner.run() == 0
        order = chosen(runner)
        assert [name for name in order if name.startswith("sentinel")] == ["sentinel-1", "sentinel-2"]
        assert order.index("sentinel-1") == 3, order  # after the baseline and two experiments
        trials = {trial.id: trial for trial in runner.store.trials(runner.session_id)}
        for name in ("sentinel-1", "sentinel-2"):
            own = runner.store.measurements(runner.session_id, name)
            assert own[0].arm is Arm.CANDIDATE
            assert trials[own[0].trial_id].experiment_id == RESTORE
            assert outcomes(runner)[name] is not Outcome.BETTER
        assert runner.store.role(runner.session_id, Role.FINAL) == runner.store.role(runner.session_id, Role.ORIGINAL)
        assert "2 A/A sentinels, 0 looked like a gain" in markdown(runner.store, runner.session_id)
        assert_consistent(runner)


@pytest.mark.parametrize("config", [every(0), every(9)], ids=["switched off", "not in its turn"])
async def test_without_need_there_is_no_sentinel(tmp_path: Path, config: SessionConfig) -> None:
    with sim_session(tmp_path, *NO_OPS, config=config) as runner:
        assert await runner.run() == 0
        assert not [name for name in chosen(runner) if name.startswith("sentinel")]


async def test_after_a_sentinel_that_won_nothing_is_tried_before_one_passes(tmp_path: Path) -> None:
    with sim_session(tmp_path, flag("--threads", "2"), config=every(5), scenario=SILENT) as runner:
        runner.store.append(runner.session_id, *won(1))
        runner.nodes.hands.write(ev.TodoAdded(experiment=flag("--poll", "7")))
        assert await runner.run() == 0
        order = chosen(runner)
        assert order[0] == "sentinel-2"
        assert outcomes(runner)["sentinel-2"] is not Outcome.BETTER
        assert "poll-7" in order[1:]


async def test_three_sentinels_that_won_end_the_session_with_the_original(tmp_path: Path) -> None:
    with sim_session(tmp_path, flag("--threads", "2"), config=every(5)) as runner:
        runner.store.append(runner.session_id, *won(1), *won(2), *won(3))
        assert await runner.run() == 0
        row = runner.store.session(runner.session_id)
        assert row.status is SessionStatus.DONE
        assert "too noisy to judge: the last 3 A/A sentinels showed gains of an unchanged server" in row.reason
        assert [words for words in world_log(tmp_path) if words[0] == "launch"] == []


async def test_a_session_that_may_not_restart_has_no_sentinels(tmp_path: Path) -> None:
    config = every(1)
    policy = config.policy.model_copy(update={"max_disruption": Disruption.LOAD})
    with sim_session(tmp_path, *NO_OPS, config=config.model_copy(update={"policy": policy})) as runner:
        runner.store.append(runner.session_id, *won(1))
        assert await runner.run() == 0
        assert "sentinel-2" not in chosen(runner)


# --- leaving one out ---------------------------------------------------------------------------------------

REPLACED = QUIET.model_copy(
    update={
        "effects": (
            SimEffect(name="--spec", value="ngram", ratio={"*": 1.3}, unless=("--parallel", "4")),
            SimEffect(name="--parallel", value="4", ratio={"*": 1.6}),
        )
    }
)
"""Once `--parallel 4` is set, `--spec ngram` does nothing any more."""
RESERVED = 2 * CONFIG.judge.close_out_blocks + 1
"""Restarts that the final comparison and one restore always have."""
BOTH = (flag("--spec", "ngram", priority=0.9), flag("--parallel", "4", priority=0.1))


async def test_a_kept_change_that_another_one_made_useless_is_left_out_at_the_end(tmp_path: Path) -> None:
    with sim_session(tmp_path, *BOTH, config=ONE_POINT, scenario=REPLACED) as runner:
        assert await runner.run() == 0
        said = outcomes(runner)
        assert (said["spec-ngram"], said["parallel-4"]) == (Outcome.BETTER, Outcome.BETTER)
        assert chosen(runner)[-2:] == ["without-spec-ngram", "close-out"]
        final = runner.store.spec(runner.store.role(runner.session_id, Role.FINAL) or "")
        assert final.flags["--parallel"] == ("4",)
        left_out = "--spec" not in final.flags
        verdict = runner.store.verdicts(runner.session_id)["without-spec-ngram"]
        assert verdict.objective is not None
        assert left_out == (verdict.objective.estimate >= 0)
        assert left_out == (verdict.outcome in (Outcome.BETTER, Outcome.NO_DIFFERENCE))
        log = runner.store.decisions(runner.session_id)
        kind = next(d["kind"] for d in log if d["subject"] == "without-spec-ngram" and d["kind"] != "choose")
        assert kind == (DecisionKind.LEAVE_OUT if left_out else DecisionKind.KEEP)
        assert said["close-out"] is Outcome.BETTER
        assert_consistent(runner)


async def test_kept_changes_that_are_all_needed_stay_and_the_weakest_is_asked_first(tmp_path: Path) -> None:
    needed = REPLACED.model_copy(
        update={"effects": tuple(e.model_copy(update={"unless": None}) for e in REPLACED.effects)}
    )
    with sim_session(tmp_path, *BOTH, config=ONE_POINT, scenario=needed) as runner:
        assert await runner.run() == 0
        said = outcomes(runner)
        assert chosen(runner)[-3:] == ["without-spec-ngram", "without-parallel-4", "close-out"]
        assert (said["without-spec-ngram"], said["without-parallel-4"]) == (Outcome.WORSE, Outcome.WORSE)
        final = runner.store.spec(runner.store.role(runner.session_id, Role.FINAL) or "")
        assert (final.flags["--spec"], final.flags["--parallel"]) == (("ngram",), ("4",))
        own = runner.store.measurements(runner.session_id, "without-parallel-4")
        assert len({m.trial_id for m in own}) == 2  # -38 % is plain after one launch of each
        report = markdown(runner.store, runner.session_id)
        assert "Expected number of false keeps" in report
        assert_consistent(runner)


async def test_one_kept_change_needs_no_other_check_than_the_final_comparison(tmp_path: Path) -> None:
    with sim_session(tmp_path, flag("--threads", "2"), config=ONE_POINT) as runner:
        assert await runner.run() == 0
        assert chosen(runner)[-2:] == ["threads-2", "close-out"]


async def test_without_time_nothing_is_left_out_and_the_final_comparison_is_still_made(tmp_path: Path) -> None:
    generous = tmp_path / "generous"
    with sim_session(generous, *BOTH, config=ONE_POINT, scenario=REPLACED) as runner:
        assert await runner.run() == 0
        made = runner.store.trials(runner.session_id)
        restarts = [trial.experiment_id for trial in made].index("without-spec-ngram") - 1 + RESERVED
    budget = ONE_POINT.policy.budget.model_copy(update={"restarts": restarts})
    policy = ONE_POINT.policy.model_copy(update={"budget": budget})
    config = ONE_POINT.model_copy(update={"policy": policy})
    with sim_session(tmp_path / "scarce", *BOTH, config=config, scenario=REPLACED) as runner:
        assert await runner.run() == 0
        assert chosen(runner)[-2:] == ["parallel-4", "close-out"]
