"""Is a run in progress worth finishing: the parent's pace, and when a candidate is hopelessly behind it; pure."""

from __future__ import annotations

from agent.judge.comparison import Comparison, parent_runs
from state.models import Frozen, JudgeRule


class Pace(Frozen):
    """How a baseline run at a load point went: output tok/s, whole duration in s, and the E2E of its slow requests."""

    tok_s: float
    duration_s: float
    e2e_p99_s: float


def pace(comparison: Comparison, point: str) -> Pace | None:
    """The pace of the parent's newest valid run at a load point, None before there is one."""
    runs = parent_runs(comparison, point)
    metrics = runs[-1].metrics if runs else None
    if metrics is None or not metrics.output_tok_s:
        return None
    slow = metrics.e2e_ms.p99
    return Pace(
        tok_s=metrics.output_tok_s,
        duration_s=metrics.duration_s,
        e2e_p99_s=metrics.duration_s if slow is None else slow / 1000,
    )


def collapsing(elapsed_s: float, output_tokens: int, baseline: Pace, rule: JudgeRule) -> str | None:
    """Whether a run in progress is already so far below the baseline that finishing it would teach nothing.

    Looks only once every request that was sent first should long be answered (twice the E2E of the baseline's slow
    ones, or one and a half whole runs, whichever is sooner), and then asks for less than half of the collapse ratio,
    because more slots in parallel bring the first tokens late. A run that outlasts what the ratio allows has collapsed
    whatever it still does.
    """
    if elapsed_s > 1.5 * baseline.duration_s / rule.collapse_ratio:
        return f"still running after {elapsed_s:.0f} s where the baseline needs {baseline.duration_s:.0f} s"
    patience_s = max(2.0, min(1.5 * baseline.duration_s, 2 * baseline.e2e_p99_s))
    share = output_tokens / elapsed_s / baseline.tok_s if elapsed_s > 0 else 0.0
    if elapsed_s >= patience_s and share < 0.5 * rule.collapse_ratio:
        rate = output_tokens / elapsed_s
        return f"{rate:.1f} tok/s after {elapsed_s:.0f} s, {share:.0%} of the baseline's {baseline.tok_s:.1f}"
    return None
