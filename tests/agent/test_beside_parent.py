"""A candidate's run beside its parent's: what is not believed, what a second run confirms, and what is only noted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.beside_parent import IMPLAUSIBLE, doubts, otherwise
from agent.validity import hopelessly_void
from agent.verify import verify
from state.models import Arm, Measurement, MeasurementStatus, Outcome, Purpose, Telemetry, ValidityRule
from tests.agent.judging import compare, metrics, record, taken
from tests.agent.sim import SCENARIO, flag, sim_session
from tools.simulated import SimEffect

RULE = ValidityRule()
LEAP = f"{IMPLAUSIBLE}: 310.0 tok/s are 3.1 times the parent's, measured again before it counts"


def run(tok_s: float = 100.0, name: str = "now", arm: Arm = Arm.CANDIDATE, **fields: Any) -> Measurement:
    return taken(arm, 0, "high", tok_s, id=name, **fields)


def set_aside(tok_s: float, name: str, *reasons: str) -> Measurement:
    return run(tok_s, name, status=MeasurementStatus.INVALID, reasons=reasons or (f"{IMPLAUSIBLE}: x",))


# --- a leap ----------------------------------------------------------------------------------------------------------


def test_a_run_three_times_the_parents_is_not_believed_at_once() -> None:
    assert doubts(run(310.0), compare(before=record()), RULE) == (LEAP,)
    assert doubts(run(300.0), compare(before=record()), RULE) == ()
    assert doubts(run(310.0), compare(before=record()), ValidityRule(implausible_ratio=4.0)) == ()


@pytest.mark.parametrize(
    ("earlier", "believed"),
    [
        pytest.param((set_aside(320.0, "a"),), True, id="a second run that agrees"),
        pytest.param((set_aside(800.0, "a"),), False, id="a second run that says something else"),
        pytest.param((set_aside(800.0, "a"), set_aside(330.0, "b")), True, id="a third that agrees with one"),
        pytest.param((run(305.0, "a"),), True, id="one that counts already"),
        pytest.param((set_aside(310.0, "a", "2 answers were shorter"),), False, id="void for another reason"),
        pytest.param((set_aside(310.0, "a", f"{IMPLAUSIBLE}: x", "and more"),), False, id="void for more than that"),
        pytest.param((run(310.0, "now"),), False, id="itself"),
        pytest.param((taken(Arm.CANDIDATE, 0, "low", 310.0, id="a"),), False, id="at another load point"),
    ],
)
def test_a_second_run_decides(earlier: tuple[Measurement, ...], believed: bool) -> None:
    assert (doubts(run(310.0), compare(*earlier, before=record()), RULE) == ()) is believed


def test_only_a_candidate_with_a_measured_parent_is_doubted() -> None:
    assert doubts(run(900.0), compare(), RULE) == ()
    assert doubts(run(900.0, arm=Arm.BASELINE), compare(before=record()), RULE) == ()
    assert doubts(run(900.0, metrics=None), compare(before=record()), RULE) == ()
    own = compare(run(100.0, "p", arm=Arm.BASELINE), purpose=Purpose.CLOSE_OUT)
    assert len(doubts(run(900.0), own, RULE)) == 1


def test_leaps_that_never_agree_are_given_up_like_other_void_runs() -> None:
    own = tuple(set_aside(400.0 * 2**n, f"m{n}") for n in range(4))
    assert hopelessly_void(own[:3], RULE) is None
    assert "4 runs in a row do not count" in (hopelessly_void(own, RULE) or "")


def test_a_true_leap_is_kept_after_one_more_run_and_verified(tmp_path: Path) -> None:
    leap = SimEffect(name="--threads", value="2", ratio={"*": 4.0})
    scenario = SCENARIO.model_copy(update={"effects": (leap,)})
    with sim_session(tmp_path, flag("--threads", "2"), scenario=scenario) as runner:
        assert asyncio.run(runner.run()) == 0
        store, session = runner.store, runner.session_id
        verdict = store.verdicts(session)["threads-2"]
        own = [m for m in store.measurements(session, "threads-2") if m.arm is Arm.CANDIDATE]
        at = {name: [m for m in own if m.load_point == name] for name in ("c1", "c8")}
        assert verdict.outcome is Outcome.BETTER
        for taken_at in at.values():
            assert [m.status is MeasurementStatus.VALID for m in taken_at[:2]] == [False, True]
            assert taken_at[0].reasons[0].startswith(IMPLAUSIBLE)
            assert taken_at[0].seed != taken_at[1].seed
            assert all(m.status is MeasurementStatus.VALID for m in taken_at[1:])
        audit = verify(store, session)
    assert audit.clean, [check for check in audit.checks if check.differences]


# --- the text --------------------------------------------------------------------------------------------------------


def with_text(share: float, name: str = "now", arm: Arm = Arm.CANDIDATE) -> Measurement:
    figures = metrics(100.0, output_tokens=1000, retokenized_tokens=round(1000 * share))
    return run(100.0, name, arm, metrics=figures)


def parents(*shares: float) -> tuple[Measurement, ...]:
    return tuple(with_text(share, f"p{n}", Arm.BASELINE) for n, share in enumerate(shares))


@pytest.mark.parametrize(
    ("parent", "mine", "doubted"),
    [
        pytest.param((0.99, 1.0, 0.99), 0.96, False, id="within the tolerance"),
        pytest.param((0.99, 1.0, 0.99), 0.90, True, id="fewer tokens"),
        pytest.param((0.99, 1.0, 0.99), 1.10, True, id="more tokens"),
        pytest.param((3.5, 3.5), 2.0, False, id="the client's tokenizer is not the model's"),
        pytest.param((0.3, 0.3), 0.2, False, id="nor here"),
        pytest.param((0.8, 1.0), 0.6, False, id="the parent's own runs differ as much"),
        pytest.param((1.0,), 0.6, False, id="one run of the parent shows no spread"),
    ],
)
def test_other_text_than_the_parents_is_doubted(parent: tuple[float, ...], mine: float, doubted: bool) -> None:
    found = doubts(with_text(mine), compare(*parents(*parent)), RULE)
    assert (found != ()) is doubted
    if doubted:
        assert found == (f"the text that came has {mine:.2f} tokens for each that is claimed, the parent's has 0.99",)


def test_where_no_client_tells_of_the_text_nothing_is_said() -> None:
    assert doubts(run(), compare(*parents(1.0, 1.0)), RULE) == ()
    assert doubts(with_text(0.6), compare(before=record()), RULE) == ()


# --- the machine -----------------------------------------------------------------------------------------------------


def slowed(*masks: str) -> Telemetry:
    return Telemetry.model_validate({"gpu": [{"index": "0", "throttle_reasons": masks}]})


def test_a_slowed_gpu_is_noted_when_no_run_of_the_parent_had_it() -> None:
    calm = run(arm=Arm.BASELINE, telemetry=slowed("0x0000000000000000", "0x0000000000000004"))
    hot = run(telemetry=slowed("0x0000000000000044"))
    said = otherwise(hot, compare(calm))
    assert said == "its GPUs were slowed by hardware thermal limit, in no run of the parent at high"
    assert otherwise(run(telemetry=slowed("0x4")), compare(calm)) is None
    assert otherwise(hot, compare(run(arm=Arm.BASELINE, telemetry=Telemetry()))) is None
    assert otherwise(run(), compare(calm)) is None
    assert otherwise(hot.model_copy(update={"arm": Arm.BASELINE}), compare(calm)) is None
