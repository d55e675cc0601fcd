"""What the session file allows: disruption, constraints and budgets; pure, and it must not weigh gains."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from agent.judge.spending import runs_per_launch
from state.models import (
    CHANGE_DISRUPTION,
    Disruption,
    Experiment,
    Frozen,
    JudgeRule,
    LaunchSpec,
    Policy,
    TodoStatus,
    Workload,
    needs_restart,
)


class Spent(Frozen):
    """What the session has used so far."""

    elapsed_s: float
    experiments: int
    restarts: int


class Costs(Frozen):
    """Prices measured on this very host, with stated guesses until they are known."""

    launch_s: float = 30.0
    run_s: dict[str, float] = Field(default_factory=dict)
    default_run_s: float = 20.0

    def point_s(self, name: str) -> float:
        """One run at a load point."""
        return self.run_s.get(name, self.default_run_s)

    def objective_run_s(self, workload: Workload) -> float:
        """One run at an average load point of the objective."""
        return sum(map(self.point_s, workload.objective.at)) / len(workload.objective.at)

    def block_s(self, workload: Workload, runs: int = 1) -> float:
        """One launch measured `runs` times at the objective's load points and once at the others."""
        names = [point.name for point in workload.load_points]
        return self.launch_s + sum(self.point_s(n) * (runs if n in workload.objective.at else 1) for n in names)


def needed_disruption(experiment: Experiment) -> Disruption:
    """The disruption that the changes imply, or the declared one if that is higher."""
    implied = [CHANGE_DISRUPTION[change.kind] for change in experiment.changes]
    return max([experiment.disruption, *implied])


def restarts(experiment: Experiment) -> bool:
    """Whether testing it starts the server anew: it says so itself, or one of its changes needs it."""
    live = experiment.changes and not any(map(needs_restart, experiment.changes))
    return not live and needed_disruption(experiment) >= Disruption.RESTART


def forbidden(experiment: Experiment, policy: Policy) -> str | None:
    """Why the session file forbids this experiment, None when it does not."""
    wanted = needed_disruption(experiment)
    if wanted > policy.max_disruption:
        return f"needs {wanted.name.lower()}, the session allows {policy.max_disruption.name.lower()} at most"
    dropped = sorted(set(experiment.tags) & set(policy.drop))
    if dropped:
        return f"the session drops everything tagged {', '.join(dropped)}"
    for change in experiment.changes:
        if change.kind == "flag" and change.name in policy.keep_flags:
            return f"the session keeps {change.name} as it is"
        if change.kind == "env" and policy.keep_env.get(change.name, change.value) != change.value:
            return f"{change.name} must stay {policy.keep_env[change.name]}"
    return None


class Admission(NamedTuple):
    """With which status an experiment goes on the list, and why it is not simply pending."""

    status: TodoStatus
    reason: str = ""


def admission(experiment: Experiment, policy: Policy) -> Admission:
    """What the session file says of an experiment: forbidden, to be approved by a person first, or free to be tried."""
    reason = forbidden(experiment, policy)
    if reason is not None:
        return Admission(TodoStatus.SKIPPED, reason)
    reason = awaits_approval(experiment, policy)
    return Admission(TodoStatus.PENDING) if reason is None else Admission(TodoStatus.GATED, reason)


def awaits_approval(experiment: Experiment, policy: Policy) -> str | None:
    """Why a person has to approve an experiment before it may be tried, None when nobody has to."""
    if not experiment.tries or {experiment.id, *experiment.tags} & {*policy.approved}:
        return None
    level = needed_disruption(experiment)
    if level >= Disruption.HOST:
        return "it changes the host, which a person has to approve"
    asked = sorted({experiment.id, *experiment.tags, level.name.lower()} & {*policy.gate})
    return f"the session file wants {', '.join(asked)} to be approved by a person" if asked else None


def broken_constraints(spec: LaunchSpec, policy: Policy) -> list[str]:
    """Hard constraints that a spec does not meet; checked again on the whole spec, whoever proposed it."""
    return [
        f"{name} must be {value}, is {spec.env.get(name, 'unset')}"
        for name, value in sorted(policy.keep_env.items())
        if spec.env.get(name) != value
    ]


def comparison_s(workload: Workload, rule: JudgeRule, costs: Costs) -> float:
    """Expected time of a comparison that ends in a keep: `min_blocks` launches of either arm."""
    return rule.min_blocks * sum(costs.block_s(workload, runs) for runs in _runs(workload, rule, costs))


def observation_s(workload: Workload, rule: JudgeRule, costs: Costs) -> float:
    """Time of an observation of what runs now: no launch."""
    return rule.baseline_runs * (costs.block_s(workload) - costs.launch_s)


def close_out_s(workload: Workload, rule: JudgeRule, costs: Costs) -> float:
    """What the end needs: the final interleaved comparison and one restore. Reserved before every experiment."""
    runs, _ = _runs(workload, rule, costs)
    return 2 * rule.close_out_blocks * costs.block_s(workload, runs) + costs.launch_s


def _runs(workload: Workload, rule: JudgeRule, costs: Costs) -> tuple[int, int]:
    return runs_per_launch(costs.launch_s, costs.objective_run_s(workload), rule.max_runs)


def unaffordable(
    experiment: Experiment, policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs
) -> str | None:
    """Why the remaining budget, less the reserved close-out, does not cover this experiment."""
    budget = policy.budget
    if experiment.changes and spent.experiments >= budget.experiments:
        return f"all {budget.experiments} experiments of the budget are used"
    again = restarts(experiment)
    own = costs if again else costs.model_copy(update={"launch_s": 0.0})
    price = (comparison_s if experiment.changes else observation_s)(workload, rule, own)
    return _beyond(price, 2 * rule.min_blocks if again else 0, policy, spent, workload, rule, costs)


def no_room_for(
    blocks: int, policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs
) -> str | None:
    """Why a comparison of the loop itself, with `blocks` launches of either side, does not fit before the close-out."""
    price = blocks * sum(costs.block_s(workload, runs) for runs in _runs(workload, rule, costs))
    return _beyond(price, 2 * blocks, policy, spent, workload, rule, costs)


def _beyond(
    price: float, restarts: int, policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs
) -> str | None:
    budget = policy.budget
    left = budget.time_s - spent.elapsed_s - close_out_s(workload, rule, costs)
    if price > left:
        return f"needs about {price:.0f} s, {max(0.0, left):.0f} s are left before the reserved close-out"
    free = budget.restarts - spent.restarts - (2 * rule.close_out_blocks + 1)
    if restarts > free:
        return f"needs {restarts} restarts, {max(0, free)} are left before the reserved close-out"
    return None


def out_of_time(policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs) -> str | None:
    """Whether a comparison under way must end now, so that the close-out still fits."""
    reserve = close_out_s(workload, rule, costs)
    block_s = max(costs.block_s(workload, runs) for runs in _runs(workload, rule, costs))
    if spent.elapsed_s + block_s > policy.budget.time_s - reserve:
        return f"the time budget of {policy.budget.time_s:.0f} s is used up but for the reserved close-out"
    if spent.restarts >= policy.budget.restarts - (2 * rule.close_out_blocks + 1):
        return f"the {policy.budget.restarts} restarts of the budget are used up but for the reserved close-out"
    return None
