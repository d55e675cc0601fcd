"""Sessions whose experiments do not stand on the command line: what is live costs no restart, and all comes back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from agent.config import SessionConfig
from agent.evidence import spent
from agent.report import markdown
from agent.session import Runner
from state.models import (
    Change,
    CommandChange,
    Disruption,
    Experiment,
    HotCall,
    Outcome,
    PatchChange,
    Role,
    TodoStatus,
    TrialStatus,
)
from state.store import Store
from tests.agent.sim import CONFIG, SCENARIO, flag, sim_session
from tools.simulated import SimEffect

FASTER = HotCall(name="beat", value="2", undo="1")
SLOWER = HotCall(name="beat", value="9", undo="1")
PATCH = PatchChange(directory="/srv/engine", diff="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
COMMAND = CommandChange(name="clocks", do=("do",), undo=("undo",), probe=("probe",))
WORLD = SCENARIO.model_copy(
    update={
        "effects": (
            *SCENARIO.effects,
            SimEffect(name="hot:beat", value="2", ratio={"*": 1.5}),
            SimEffect(name="hot:beat", value="9", ratio={"*": 0.8}),
            SimEffect(name="hot:bad", value="*", refuses="bad cannot be set"),
            SimEffect(name="patch:/srv/engine", value="*", ratio={"*": 1.4}),
            SimEffect(name="patch:/srv/other", value="*", unstageable="it does not fit: line 1 is 'b'"),
            SimEffect(name="command:clocks", value="*", ratio={"*": 1.3}),
        )
    }
)


def trying(name: str, *changes: Change, **fields: object) -> Experiment:
    base = {"id": name, "title": name, "hypothesis": "h", "changes": changes, "disruption": "hot"}
    return Experiment.model_validate(base | {"expected_gain": 0.1} | fields)


def allowing(level: Disruption) -> SessionConfig:
    return CONFIG.model_copy(update={"policy": CONFIG.policy.model_copy(update={"max_disruption": level})})


def approving(*names: str) -> SessionConfig:
    """Everything is allowed, and what changes the host by these names is approved beforehand."""
    config = allowing(Disruption.HOST)
    return config.model_copy(update={"policy": config.policy.model_copy(update={"approved": names})})


def log(folder: Path) -> list[str]:
    """What the world saw, a word a line."""
    path = folder / "world" / "world.log"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def served(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "world" / "world.json").read_text())["server"]
    return found


def outcome(store: Store, name: str) -> Outcome:
    return store.verdicts(store.latest_session().id)[name].outcome


def test_a_live_setting_is_kept_without_a_single_restart(tmp_path: Path) -> None:
    config = allowing(Disruption.HOT)
    with sim_session(
        tmp_path, trying("faster", FASTER), trying("slower", SLOWER), scenario=WORLD, config=config
    ) as run:
        assert asyncio.run(run.run()) == 0
        session = run.session_id
        assert (outcome(run.store, "faster"), outcome(run.store, "slower")) == (Outcome.BETTER, Outcome.WORSE)
        trials = run.store.trials(session)
        assert {trial.kind for trial in trials if not trial.adopted} == {"adjust"}
        assert {trial.process for trial in trials} == {trials[0].process}
        assert sum(trial.down_s for trial in trials) == 0
        assert spent(run.store, session).restarts == 0
        report = markdown(run.store, session)
        assert "brought into another state" in report and "beside: live beat=2 ≠ absent" in report
        known_good = run.store.spec(run.hands.role(Role.KNOWN_GOOD))
        assert known_good.beside == (FASTER,)
    assert "launch" not in log(tmp_path)
    assert served(tmp_path)["pid"] == 100
    assert served(tmp_path)["spec"] == known_good.model_dump(mode="json")


def test_what_is_live_is_done_again_after_a_restart(tmp_path: Path) -> None:
    experiments = (trying("faster", FASTER), flag("--threads", "2"))
    with sim_session(tmp_path, *experiments, scenario=WORLD) as run:
        assert asyncio.run(run.run()) == 0
        known_good = run.store.spec(run.hands.role(Role.KNOWN_GOOD))
        assert known_good.beside == (FASTER,) and known_good.flags["--threads"] == ("2",)
    assert served(tmp_path)["spec"] == known_good.model_dump(mode="json")
    told = log(tmp_path)
    assert told.index("adjust") < told.index("launch")
    assert "adjust" in told[told.index("launch") :]


def test_patches_and_commands_are_kept_and_taken_back_like_flags(tmp_path: Path) -> None:
    experiments = (
        trying("patch", PATCH),
        trying("clocks", COMMAND),
        trying("bad", HotCall(name="bad", value="1", undo="0")),
    )
    with sim_session(tmp_path, *experiments, scenario=WORLD, config=approving("clocks")) as run:
        assert asyncio.run(run.run()) == 0
        assert outcome(run.store, "patch") is Outcome.BETTER
        assert outcome(run.store, "clocks") is Outcome.BETTER
        assert outcome(run.store, "bad") is Outcome.FAILED
        failed = [trial for trial in run.store.trials(run.session_id) if trial.status is TrialStatus.FAILED]
        assert {trial.kind for trial in failed} == {"adjust"}
        known_good = run.store.spec(run.hands.role(Role.KNOWN_GOOD))
        assert set(known_good.beside) == {PATCH, COMMAND}
    assert served(tmp_path)["spec"] == known_good.model_dump(mode="json")


def test_what_cannot_be_made_ready_is_blocked_before_anything_is_stopped(tmp_path: Path) -> None:
    other = PATCH.model_copy(update={"directory": "/srv/other"})
    with sim_session(tmp_path, trying("patch", other), scenario=WORLD, config=allowing(Disruption.PATCH)) as run:
        assert asyncio.run(run.run()) == 0
        (todo,) = [todo for todo in run.store.todos(run.session_id) if todo.id == "patch"]
        assert (todo.status, todo.reason) == (TodoStatus.BLOCKED, "it does not fit: line 1 is 'b'")
    assert set(log(tmp_path)) == {"run"}


def test_a_live_state_that_was_lost_is_brought_back_without_a_restart(tmp_path: Path) -> None:
    """Somebody sets it back behind our back, once it was kept."""

    def lose(point: str) -> None:
        if point == "node:choose" and outcome_known(run) and not lost:
            path = tmp_path / "world" / "world.json"
            world = json.loads(path.read_text())
            world["server"]["spec"]["beside"] = []
            path.write_text(json.dumps(world))
            lost.append(point)

    lost: list[str] = []
    experiments = (trying("faster", FASTER), trying("slower", SLOWER))
    with sim_session(tmp_path, *experiments, scenario=WORLD, config=allowing(Disruption.HOT), fault=lose) as run:
        assert asyncio.run(run.run()) == 0
        assert lost
        assert run.store.spec(run.hands.role(Role.KNOWN_GOOD)).beside == (FASTER,)
    assert served(tmp_path)["spec"]["beside"][0]["value"] == "2"
    assert "launch" not in log(tmp_path)


def outcome_known(run: Runner) -> bool:
    return "faster" in run.store.verdicts(run.session_id)


def test_a_kept_change_that_cannot_be_left_out_stays_and_the_night_ends(tmp_path: Path) -> None:
    """Without the first patch the second one does not fit."""
    inner = PATCH.model_copy(update={"directory": "/srv/inner"})
    scenario = WORLD.model_copy(
        update={
            "effects": (
                *WORLD.effects,
                SimEffect(
                    name="patch:/srv/inner",
                    value="*",
                    ratio={"*": 1.3},
                    unstageable="it does not fit without the other",
                    unless=("patch:/srv/engine", PATCH.setting),
                ),
                SimEffect(name="patch:/srv/inner", value="*", ratio={"*": 1.3}),
            )
        }
    )
    experiments = (trying("outer", PATCH, priority=0.9), trying("inner", inner, priority=0.1))
    with sim_session(tmp_path, *experiments, scenario=scenario, config=allowing(Disruption.PATCH)) as run:
        assert asyncio.run(run.run()) == 0
        todos = {todo.id: todo for todo in run.store.todos(run.session_id)}
        assert todos["without-outer"].status is TodoStatus.SKIPPED
        assert todos["without-inner"].status is TodoStatus.DONE
        assert run.store.spec(run.hands.role(Role.KNOWN_GOOD)).beside == (PATCH, inner)
