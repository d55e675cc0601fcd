"""How an experiment ends: what its data say, else what void runs or the budget ask for; it writes nothing.

A session and the check of it afterwards ask here, so that both get the same answer from the same store.
"""

from __future__ import annotations

from agent.config import SessionConfig
from agent.evidence import costs, spent
from agent.judge import Comparison, assess, close
from agent.policy import Costs, needed_disruption, out_of_time, window_shut
from agent.validity import errs, hopelessly_void, void_streak
from state.models import Arm, MeasurementStatus, Outcome, Purpose, Verdict
from state.store import SessionRow, Store


def final_verdict(store: Store, session_id: str, config: SessionConfig, comparison: Comparison) -> Verdict:
    """The verdict of a comparison that ends now."""
    verdict = verdict_now(store, session_id, config, comparison)
    return close(comparison, Outcome.INCONCLUSIVE, "ended early") if verdict is None else verdict


def verdict_now(store: Store, session_id: str, config: SessionConfig, comparison: Comparison) -> Verdict | None:
    """The verdict if the comparison has to end now, None while the next run is worth making."""
    verdict = assess(comparison).verdict
    if verdict is not None:
        return verdict
    void = hopelessly_void(comparison.own, config.validity)
    if void is not None:
        return close(comparison, Outcome.WORSE if _fails(comparison, config) else Outcome.INVALID, void)
    late = no_time_left(store, session_id, config, comparison)
    return None if late is None else close(comparison, Outcome.INCONCLUSIVE, late)


def _fails(comparison: Comparison, config: SessionConfig) -> bool:
    """Whether it is the candidate that loses requests: each of its last runs did, and the parent has runs that count.

    The error rate is a guard like any other; only where the parent fails as well is it the measurement that is void.
    """
    streak = void_streak(comparison.own)
    parent = (*comparison.record, *(m for m in comparison.own if m.arm is Arm.BASELINE))
    counts = any(taken.status is MeasurementStatus.VALID for taken in parent)
    return counts and all(taken.arm is Arm.CANDIDATE and errs(taken, config.validity) for taken in streak)


def no_time_left(store: Store, session_id: str, config: SessionConfig, comparison: Comparison) -> str | None:
    """Why budget or window end a comparison now; an observation and the close-out have their time set aside."""
    set_aside = comparison.purpose is Purpose.CLOSE_OUT or comparison.observes
    if set_aside and config.policy.window is None:
        return None
    used, prices = spent(store, session_id), costs(store, session_id, config)
    if set_aside:
        return window_shut(used, _next_step_s(comparison, prices))
    level = needed_disruption(store.comparison(session_id, comparison.experiment_id).experiment)
    return out_of_time(config.policy, used, config.workload, config.judge, prices, level)


def _next_step_s(comparison: Comparison, prices: Costs) -> float:
    """What the next run takes, with the launch before it and the way back to known-good."""
    need = assess(comparison).need
    if need is None:
        return 0.0
    run_s = prices.point_s(need.load_point)
    if comparison.observes:
        return run_s
    begun = any((m.arm, m.block) == (need.arm, need.block) for m in comparison.own)
    return run_s + prices.way_back_s + (0.0 if begun else prices.launch_s)


def scope(session: SessionRow) -> str:
    """Within what a session's findings hold."""
    return f"workload {session.workload_revision}, {session.adoption.engine_version}, parent"
