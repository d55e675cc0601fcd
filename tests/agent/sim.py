"""A session on the simulated target, for tests of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.config import SessionConfig
from agent.manners import unmeasured, within_ceiling
from agent.planners.base import Endpoint, Proposal, View
from agent.progress import Silent
from agent.session import Runner, new_session_id, open_session
from state.journal import FaultPoint, no_fault
from state.models import Experiment, FlagChange
from state.store import Store
from tools.simulated import Scenario, SimEffect, SimulatedTarget


def flag(name: str, value: str, **fields: object) -> Experiment:
    changes = (FlagChange(name=name, value=value),)
    base = {"id": f"{name.strip('-')}-{value}", "title": f"{name} {value}", "hypothesis": "h", "changes": changes}
    return Experiment.model_validate(base | {"tags": (name.strip("-"),), "expected_gain": 0.1} | fields)


class Listed:
    """A planner that proposes a given list once."""

    def __init__(self, *experiments: Experiment) -> None:
        self.experiments = experiments

    def propose(self, view: View) -> Proposal:
        left = tuple(e for e in self.experiments if e.id not in view.tried)
        return Proposal(experiments=left, reason="a list made for a test")


CONFIG = SessionConfig.model_validate(
    {
        "target": {"name": "sim", "host": "nowhere", "user": "nobody"},
        "workload": {
            "load_points": [
                {"name": "c1", "concurrency": 1, "requests": 4},
                {"name": "c8", "concurrency": 8, "requests": 16},
            ],
            "objective": {"at": ["c8"]},
        },
        "judge": {"baseline_runs": 3, "max_runs": 1},
        "validity": {"quiet_wait_s": 4.0},
        "planner": {"refine": False},
    }
)

ONE_POINT = CONFIG.model_copy(
    update={"workload": CONFIG.workload.model_copy(update={"load_points": CONFIG.workload.load_points[1:]})}
)
"""A single load point, so that every point of a night can be tried in reasonable time."""

SCENARIO = Scenario(
    flags={"--threads": ("1",), "--parallel": ("1",)},
    known_flags=frozenset({"--threads", "--parallel", "--poll", "--cache", "--spec"}),
    base_tok_s={"c1": 50.0, "c8": 80.0},
    effects=(
        SimEffect(name="--threads", value="2", ratio={"*": 1.8}),
        SimEffect(name="--threads", value="8", ratio={"*": 0.6}),
        SimEffect(name="--threads", value="64", ratio={"*": 0.05}),
        SimEffect(name="--cache", value="q8_0", refuses="quantized V cache requires flash_attn to be enabled"),
        SimEffect(name="--parallel", value="4", ratio={"c8": 1.5, "c1": 1.0}),
        SimEffect(name="--spec", value="ngram", ratio={"c8": 1.4, "c1": 0.7}),
    ),
)

STANDARD = (
    flag("--threads", "2"),
    flag("--threads", "8"),
    flag("--threads", "64"),
    flag("--cache", "q8_0"),
    flag("--poll", "0"),
    flag("--spec", "ngram"),
    flag("--unknown", "1"),
)


@contextmanager
def sim_session(
    folder: Path,
    *experiments: Experiment,
    scenario: Scenario = SCENARIO,
    config: SessionConfig = CONFIG,
    fault: FaultPoint = no_fault,
    endpoint: Endpoint | None = None,
    session_id: str | None = None,
) -> Iterator[Runner]:
    """A runner on a simulated target in `folder`; a session that is there already is taken up again.

    All noise follows from the session's id: two sessions of the same id are the same.
    """
    target = SimulatedTarget(folder / "world", scenario)
    with Store.write(folder / "state.db") as store:
        known = store.sessions()
        left_out, config = unmeasured(config), within_ceiling(config)
        session_id = known[-1].id if known else session_id or new_session_id(store.clock())
        if not known:
            open_session(store, session_id, config, _adopted(target), left_out)
        planner = Listed(*experiments or STANDARD)
        yield Runner(store, session_id, target, config, planner, Silent(), fault, endpoint)


def _adopted(target: SimulatedTarget):  # type: ignore[no-untyped-def]
    coroutine = target.adopt()
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("adopting a simulated target never waits")
