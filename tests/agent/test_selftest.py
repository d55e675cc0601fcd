"""The self-test: what it does to a server, and that its answer follows the noise that it met."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from agent.config import SessionConfig
from agent.planners.selftest import SelftestPlanner
from agent.progress import Silent
from agent.selftest import Found, SelfTest, rehearse, session_config
from agent.session import Runner, new_session_id, open_session
from state.models import Disruption, Outcome, SessionStatus
from state.store import Store
from tests.agent.sim import ONE_POINT, SCENARIO
from tools.simulated import Scenario, SimulatedTarget

pytestmark = pytest.mark.anyio
NIGHTS = 150


async def tried_out(
    folder: Path, scenario: Scenario, relaunches: int, runs: int = 12
) -> tuple[Path, str, SessionConfig]:
    """A self-test on a simulated server; database, session and its configuration."""
    config = session_config(ONE_POINT, relaunches, runs)
    target = SimulatedTarget(folder / "world", scenario)
    with Store.write(folder / "state.db") as store:
        session_id = new_session_id(store.clock())
        open_session(store, session_id, config, await target.adopt())
        runner = Runner(store, session_id, target, config, SelftestPlanner(relaunches), Silent())
        assert await runner.run() == 0
        assert store.session(session_id).status is SessionStatus.DONE
    return folder / "state.db", session_id, config


async def told(folder: Path, scenario: Scenario, relaunches: int, runs: int = 12) -> SelfTest:
    database, session_id, config = await tried_out(folder, scenario, relaunches, runs)
    with Store.read(database) as store:
        return rehearse(store, session_id, config, 5, NIGHTS, np.random.default_rng(1))


def world(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "world" / "world.log").read_text().splitlines()]


async def test_without_relaunches_nothing_is_restarted_and_every_run_is_of_the_unchanged_server(tmp_path: Path) -> None:
    database, session_id, config = await tried_out(tmp_path, SCENARIO, 0)
    assert set(world(tmp_path)) == {"run"}
    assert config.policy.max_disruption is Disruption.LOAD
    with Store.read(database) as store:
        assert {trial.adopted for trial in store.trials(session_id)} == {True}
        assert len(store.measurements(session_id, "baseline")) == 12


async def test_each_relaunch_is_one_comparison_of_the_server_with_itself(tmp_path: Path) -> None:
    database, session_id, _ = await tried_out(tmp_path, SCENARIO, 3)
    with Store.read(database) as store:
        verdicts = store.verdicts(session_id)
        specs = {trial.fingerprint for trial in store.trials(session_id)}
    assert [name for name in verdicts if name.startswith("sentinel")] == ["sentinel-1", "sentinel-2", "sentinel-3"]
    assert len(specs) == 1
    assert all(verdict.outcome is not Outcome.COLLAPSED for verdict in verdicts.values())
    assert world(tmp_path).count("launch") >= 3


async def test_the_answer_follows_the_noise(tmp_path: Path) -> None:
    quiet = await told(tmp_path / "quiet", SCENARIO.model_copy(update={"run_noise": 0.005, "launch_noise": 0.002}), 4)
    loud = await told(tmp_path / "loud", SCENARIO.model_copy(update={"run_noise": 0.06, "launch_noise": 0.03}), 4)
    assert quiet.run_spread.high < loud.run_spread.low
    assert quiet.smallest is not None
    assert quiet.smallest < (loud.smallest or math.inf)
    for answer in (quiet, loud):
        assert answer.false_low <= 0.05, answer.false_nights
        assert answer.found[-1].share >= answer.found[0].share


async def test_without_relaunches_launch_noise_is_only_a_prior_and_so_wider(tmp_path: Path) -> None:
    scenario = SCENARIO.model_copy(update={"run_noise": 0.01, "launch_noise": 0.001})
    guessed = await told(tmp_path / "guessed", scenario, 0)
    measured = await told(tmp_path / "measured", scenario, 12)
    assert guessed.launches == 1
    assert measured.launches > 5
    ratio = guessed.launch_spread.high / guessed.run_spread.middle
    assert ratio > measured.launch_spread.high / measured.run_spread.middle


@pytest.mark.parametrize(
    ("shares", "smallest"),
    [((0.1, 0.9, 0.95), 0.02), ((0.1, 0.9, 0.7), None), ((0.1, 0.2, 0.85), 0.03), ((0.9, 0.9, 0.9), 0.01)],
)
def test_the_smallest_gain_is_one_from_which_on_all_are_found(
    shares: tuple[float, ...], smallest: float | None
) -> None:
    gains = zip((0.01, 0.02, 0.03), shares, strict=True)
    found = tuple(Found(gain=gain, share=share, runs=1, launches=1) for gain, share in gains)
    assert SelfTest.model_construct(found=found).smallest == smallest
