"""The window: its arithmetic, and sessions on a simulated host whose own clock is the only one that counts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.config import SessionConfig
from agent.doctor import examine
from agent.evidence import used_by_level
from agent.inbox import ask_to_stop
from agent.session import Runner
from agent.status import summary
from agent.window import closes_in, is_open, later, opens_in, spoken, time_of_day, window_from
from state import events as ev
from state.journal import FaultPoint, no_fault
from state.models import DecisionKind, Disruption, Experiment, HostClock, Outcome, Role, SessionStatus, TodoStatus
from tests.agent.sim import ONE_POINT, SCENARIO, Listed, flag, sim_session
from tests.agent.test_loop import assert_consistent
from tools.simulated import Scenario, SimEffect, SimulatedTarget

HOUR, DAY = 3600.0, 86_400.0
MIDNIGHT = 20_000 * DAY


def clock(hours: float, **fields: float) -> HostClock:
    """A clock in UTC that shows so many hours after midnight."""
    return HostClock.model_validate({"unix": MIDNIGHT + hours * HOUR, **fields})


@pytest.mark.parametrize(
    ("text", "hours", "opens", "closes"),
    [
        ("01:00-05:00", 0.5, 0.5, 0.0),
        ("01:00-05:00", 1.0, 0.0, 4.0),
        ("01:00-05:00", 4.75, 0.0, 0.25),
        ("01:00-05:00", 5.0, 20.0, 0.0),
        ("22:00-05:30", 21.0, 1.0, 0.0),
        ("22:00-05:30", 23.0, 0.0, 6.5),
        ("22:00-05:30", 5.0, 0.0, 0.5),
        ("22:00-05:30", 5.5, 16.5, 0.0),
        ("22:00-00:00", 23.5, 0.0, 0.5),
    ],
)
def test_a_window_opens_and_closes_by_the_clock(text: str, hours: float, opens: float, closes: float) -> None:
    window, now = window_from(text), clock(hours)
    assert opens_in(window, now) == opens * HOUR
    assert closes_in(window, now) == closes * HOUR
    assert is_open(window, now) is (closes > 0)


def test_it_is_the_hosts_time_zone_that_counts() -> None:
    assert is_open(window_from("01:00-05:00"), HostClock(unix=MIDNIGHT + 20 * HOUR, offset_s=19_800))
    assert time_of_day(HostClock(unix=MIDNIGHT, offset_s=-16_200)) == "19:30 (UTC-04:30)"


@pytest.mark.parametrize(
    ("turned_s", "text", "hours", "closes"),
    [
        (3600, "01:00-05:00", 1.5, 2.5),  # at 2 it is 3: an hour is missing
        (-3600, "01:00-05:00", 1.5, 4.5),  # at 2 it is 1 again
        (3600, "01:00-02:30", 1.5, 0.5),  # 2:30 never comes
        (3600, "01:00-01:45", 1.5, 0.25),  # closed before it changes
    ],
)
def test_a_change_of_the_offset_moves_the_end(turned_s: int, text: str, hours: float, closes: float) -> None:
    now = clock(hours, turns_at=MIDNIGHT + 2 * HOUR, turned_s=turned_s)
    assert closes_in(window_from(text), now) == closes * HOUR
    if closes > 1:
        assert closes_in(window_from(text), later(now, HOUR)) == (closes - 1) * HOUR


@pytest.mark.parametrize("text", ["", "1:00-5:00", "01:00", "24:00-05:00", "01:60-05:00", "01:00 - 05:00"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as"):
        window_from(text)


def test_a_window_that_never_closes_is_refused() -> None:
    with pytest.raises(ValueError, match="ends at another time"):
        window_from("05:00-05:00")


def test_lengths_of_time_are_told_as_people_do() -> None:
    assert [spoken(seconds) for seconds in (40, 725, 6390)] == ["40 s", "12 min", "1 h 46 min"]


# --- sessions ----------------------------------------------------------------------------------------------

SLOW = SCENARIO.model_copy(update={"launch_s": 30.0, "polls_per_run": 8})
"""A launch takes half a minute of the world's time, a run four seconds."""
FASTER = flag("--threads", "2")


def within(window: str | None, time_s: float = 8 * HOUR, **policy: object) -> SessionConfig:
    budget = ONE_POINT.policy.budget.model_copy(update={"time_s": time_s})
    changed = ONE_POINT.policy.model_copy(update={"window": window, "budget": budget, **policy})
    return ONE_POINT.model_copy(update={"policy": changed})


@contextmanager
def at(
    folder: Path,
    hours: float,
    config: SessionConfig,
    *experiments: Experiment,
    scenario: Scenario = SLOW,
    fault: FaultPoint = no_fault,
) -> Iterator[Runner]:
    """A session on a host whose clock shows so many hours as its world begins; our own clock runs with the world's."""
    scenario = scenario.model_copy(update={"clock": clock(hours)})
    with sim_session(folder, *experiments, scenario=scenario, config=config, fault=fault) as runner:
        began = runner.store.session(runner.session_id).started_at
        runner.store.clock = lambda: began + world(folder)["clock"]
        yield runner


def world(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "world" / "world.json").read_text())
    return found


def disturbing(runner: Runner) -> list[float]:
    """When launches and runs of the session began and ended, in hours after the world's midnight."""
    began, zero = runner.store.session(runner.session_id).started_at, runner.target.scenario.clock.unix  # type: ignore[attr-defined]
    kinds = (ev.TrialOpened, ev.TrialClosed, ev.MeasurementOpened, ev.MeasurementClosed)
    happened = [
        stored
        for stored in runner.store.events(runner.session_id)
        if isinstance(stored.event, kinds) and not getattr(getattr(stored.event, "trial", None), "adopted", False)
    ]
    return [(stored.at - began + zero - MIDNIGHT) / HOUR for stored in happened]


def told(runner: Runner, kind: DecisionKind) -> list[str]:
    decisions = runner.store.decisions(runner.session_id)
    return [f"{d['what']}; {d['reason']}" for d in decisions if d["kind"] == kind]


@pytest.mark.anyio
async def test_a_session_waits_for_its_window_and_pays_nothing_for_that(tmp_path: Path) -> None:
    with at(tmp_path, 0.75, within("01:00-02:00", time_s=1500.0), FASTER) as runner:
        assert await runner.run() == 0
        (waits,) = told(runner, DecisionKind.WAIT)
        assert "nothing is touched before the window 01:00-02:00 opens, in 15 min" in waits
        assert "the host's clock shows 00:45 (UTC+00:00)" in waits
        times = disturbing(runner)
        assert min(times) >= 1.0
        assert max(times) < 2.0
        assert runner.store.verdicts(runner.session_id)["close-out"].outcome is Outcome.BETTER
        begun = runner.store.session(runner.session_id).started_at
        assert runner.store.active_s(runner.session_id) == pytest.approx(runner.store.clock() - begun - 900.0, abs=6.0)
        rows = runner.store.db.query(
            "SELECT kind, story FROM v_timeline WHERE kind LIKE '%clock%' OR kind LIKE 'window%'"
        )
        stories = {row["kind"]: row["story"] for row in rows}
        assert "00:45:0" in stories["clock-read"] and "the window is 01:00-02:00" in stories["clock-read"]
        assert stories["window-awaited"].endswith("min waited for the window")
        assert_consistent(runner)


@pytest.mark.anyio
async def test_what_does_not_fit_before_the_window_closes_is_not_begun(tmp_path: Path) -> None:
    others = [flag("--poll", value) for value in ("0", "10", "20", "30")]
    first = flag("--threads", "2", priority=0.9)
    with at(tmp_path, 1.0, within("00:30-01:10"), first, *others) as runner:
        assert await runner.run() == 0
        skipped = [t for t in runner.store.todos(runner.session_id) if t.status is TodoStatus.SKIPPED]
        assert skipped
        assert all("of the window 00:30-01:10 are left before the reserved close-out" in t.reason for t in skipped)
        (ended,) = told(runner, DecisionKind.CLOSE_OUT)
        assert "the window 00:30-01:10 closes in" in ended
        assert runner.store.verdicts(runner.session_id)["close-out"].outcome is Outcome.BETTER
        assert max(disturbing(runner)) < 1 + 1 / 6
        assert_consistent(runner)


@pytest.mark.anyio
async def test_a_launch_that_takes_longer_than_ever_is_left_in_time_for_the_way_back(tmp_path: Path) -> None:
    endless = SLOW.model_copy(update={"effects": (SimEffect(name="--poll", value="0", slow_s=DAY),)})
    with at(tmp_path, 1.0, within("01:00-01:20"), flag("--poll", "0"), scenario=endless) as runner:
        assert await runner.run() == 0
        verdict = runner.store.verdicts(runner.session_id)["poll-0"]
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert "the window 01:00-01:20 closes soon" in verdict.reason
        launches = [t for t in runner.store.trials(runner.session_id) if not t.adopted]
        assert [t.status for t in launches] == ["failed", "ready"]
        assert launches[-1].fingerprint == runner.store.role(runner.session_id, Role.ORIGINAL)
        assert max(disturbing(runner)) < 1 + 1 / 3
        assert_consistent(runner)


@pytest.mark.anyio
async def test_a_close_out_that_cannot_end_is_not_begun_and_the_original_returns(tmp_path: Path) -> None:
    def late(name: str) -> None:
        if name == "wrote:verdict-reached+decision-made+todo-changed+role-set+finding-made":
            path = tmp_path / "world" / "world.json"
            path.write_text(json.dumps({**world(tmp_path), "clock": 3600.0 - 120.0}))

    with at(tmp_path, 1.0, within("01:00-02:00"), FASTER, fault=late) as runner:
        assert await runner.run() == 0
        assert any("the final comparison needs about" in one for one in told(runner, DecisionKind.REVERT))
        assert runner.store.role(runner.session_id, Role.FINAL) == runner.store.role(runner.session_id, Role.ORIGINAL)
        assert max(disturbing(runner)) < 2.0
        assert_consistent(runner)


@pytest.mark.anyio
async def test_a_stop_while_it_waits_leaves_everything_as_it_is(tmp_path: Path) -> None:
    def ask(name: str) -> None:
        if name == "wrote:decision-made" and told(runner, DecisionKind.WAIT):
            assert summary(runner.store, runner.session_id)["waits"].startswith("nothing is touched before the window")
            ask_to_stop(tmp_path / "state.db", runner.session_id)

    with at(tmp_path, 23.0, within("01:00-02:00"), FASTER, fault=ask) as runner:
        assert await runner.run() == 4
        assert runner.store.session(runner.session_id).status is SessionStatus.STOPPED
        assert "the window is closed" in told(runner, DecisionKind.INTERRUPTED)[0]
        assert disturbing(runner) == []


@pytest.mark.anyio
async def test_a_resume_outside_the_window_brings_known_good_back_and_goes_on_in_the_next_one(tmp_path: Path) -> None:
    class Killed(BaseException):
        """Stands for SIGKILL."""

    def die(name: str) -> None:
        if name.endswith("M4/run:after-outcome"):
            raise Killed(name)

    config = within("01:00-02:00")
    with at(tmp_path, 1.0, config, FASTER, fault=die) as runner, pytest.raises(Killed):
        await runner.run()
    path = tmp_path / "world" / "world.json"
    path.write_text(json.dumps({**world(tmp_path), "clock": DAY - 300.0}))
    with at(tmp_path, 1.0, config, FASTER) as runner:
        assert await runner.run() == 0
        assert len(told(runner, DecisionKind.WAIT)) == 1
        verdicts = runner.store.verdicts(runner.session_id)
        assert verdicts["threads-2"].outcome is Outcome.BETTER
        assert verdicts["close-out"].outcome is Outcome.BETTER
        day_after = [hours for hours in disturbing(runner) if hours > 24]
        restored = [hours for hours in day_after if hours < 25]
        assert len(restored) <= 3  # the run that was under way, and known-good's launch
        assert_consistent(runner)


@pytest.mark.anyio
async def test_a_share_moves_the_choice_in_a_session_and_the_log_says_so(tmp_path: Path) -> None:
    listed = [flag("--threads", "8"), flag("--poll", "0"), flag("--parallel", "4", disruption="patch")]
    config = within(None, time_s=2000.0, level_share=0.05, max_disruption=Disruption.PATCH)
    with at(tmp_path, 1.0, config, *listed) as runner:
        assert await runner.run() == 0
        chosen = [d for d in runner.store.decisions(runner.session_id) if d["kind"] == DecisionKind.CHOOSE]
        assert [d["subject"] for d in chosen][:4] == ["baseline", "poll-0", "parallel-4", "threads-8"]
        assert "restart has used" in chosen[2]["reason"]
        assert "so patch comes first" in chosen[2]["reason"]
        used = used_by_level(runner.store, runner.session_id)
        assert set(used) == {Disruption.LOAD, Disruption.RESTART, Disruption.PATCH}
        assert 0 < sum(used.values()) < runner.store.active_s(runner.session_id)
        assert_consistent(runner)


@pytest.mark.anyio
async def test_doctor_tells_the_window_by_the_hosts_clock(tmp_path: Path) -> None:
    async def said(window: str) -> tuple[str, str]:
        shown = SLOW.model_copy(update={"clock": clock(0.5)})
        target = SimulatedTarget(tmp_path / "world", shown)
        found = await examine(target, within(window), Listed(FASTER), tmp_path / "state.db")
        (check,) = [check for check in found.checks if check.name == "window"]
        return check.status, check.text

    assert await said("01:00-05:00") == (
        "ok",
        "01:00-05:00; the host's clock shows 00:30 (UTC+00:00): it opens in 30 min",
    )
    assert (await said("00:00-05:00"))[1].endswith("it is open, and closes in 4 h 30 min")
    assert await said("23:00-00:35") == (
        "warning",
        "23:00-00:35; the host's clock shows 00:30 (UTC+00:00): it is open, and closes in 5 min",
    )
    assert "longer than the window" in (await said("01:00-01:05"))[1]


@pytest.mark.anyio
@pytest.mark.parametrize("seed", [0, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 15))])
async def test_every_session_ends_inside_window_and_budget(tmp_path: Path, seed: int) -> None:
    """Whatever is on the list: with launches and runs as long as expected, close-out and restore included."""
    draw = random.Random(seed)
    names = [("--threads", "2"), ("--threads", "8"), ("--poll", "0"), ("--parallel", "4"), ("--cache", "q8_0")]
    chosen = draw.sample(names, draw.randint(1, 4))
    minutes = draw.randint(4, 25)
    config = within(f"01:00-01:{minutes:02}", time_s=float(draw.choice((300, 700, 1500))))
    with at(tmp_path, draw.choice((0.95, 1.0, 1.05)), config, *(flag(*name) for name in chosen)) as runner:
        assert await runner.run() == 0
        times = [1.0, *disturbing(runner)]
        assert min(times) >= 1.0
        assert max(times) <= 1 + minutes / 60
        assert runner.store.active_s(runner.session_id) <= config.policy.budget.time_s
        changed = runner.store.role(runner.session_id, Role.FINAL) != runner.store.role(
            runner.session_id, Role.ORIGINAL
        )
        closed = runner.store.verdicts(runner.session_id).get("close-out")
        assert changed is (closed is not None and closed.outcome is Outcome.BETTER)
        assert_consistent(runner)
