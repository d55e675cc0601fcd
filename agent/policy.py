"""What the session file allows: disruption, constraints and budgets; pure, and it must not weigh gains."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from agent.judge.spending import runs_per_launch
from agent.window import window_from
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

SLACK = 1.25
"""Close-out and way back are reserved so many times before a window closes: half of all launches take longer than
expected, and a window, unlike a budget, has an end that people rely on."""

SERVES = "the server already runs like this"
"""Why an experiment is not tried that changes nothing; what it sets may be worth a try again later."""


class Spent(Frozen):
    """What the session has used so far, and how long it may go on by the host's clock."""

    elapsed_s: float
    experiments: int
    restarts: int
    open_s: float | None = Field(default=None, description="until the window closes; None without a window")


class Costs(Frozen):
    """Prices measured on this very host, with stated guesses until they are known."""

    launch_s: float = 30.0
    level_s: dict[Disruption, float] = Field(
        default_factory=dict, description="a launch for an experiment of that level, where one was seen"
    )
    restore_s: float | None = Field(
        default=None, description="the longest that known-good took to start; None before it was seen"
    )
    wait_s: float = Field(default=0.0, description="how long known-good's launch may wait for requests in flight")
    run_s: dict[str, float] = Field(default_factory=dict)
    default_run_s: float = 20.0

    @property
    def back_s(self) -> float:
        """Bringing known-good back."""
        return self.launch_s if self.restore_s is None else max(self.launch_s, self.restore_s)

    @property
    def way_back_s(self) -> float:
        """So long before a window closes known-good has to be on its way."""
        return SLACK * self.back_s + self.wait_s

    def of_level(self, level: Disruption) -> Costs:
        """The same with a launch at the price of that level."""
        return self.model_copy(update={"launch_s": self.level_s.get(level, self.launch_s)})

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


class Price(Frozen):
    """What trying an experiment is expected to take: launches, while nobody serves, and the benchmark."""

    launches: int
    down_s: float
    bench_s: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.down_s + self.bench_s


def price(experiment: Experiment, workload: Workload, rule: JudgeRule, costs: Costs) -> Price:
    """The way to a keep, with start and run times as this host has shown them for experiments of that level."""
    launches = 2 * rule.min_blocks if restarts(experiment) else 0
    launch_s = costs.of_level(needed_disruption(experiment)).launch_s if launches else 0.0
    own = costs.model_copy(update={"launch_s": launch_s})
    if not experiment.changes:
        return Price(launches=launches, down_s=launches * launch_s, bench_s=observation_s(workload, rule, own))
    whole = comparison_s(workload, rule, own)
    return Price(launches=launches, down_s=launches * launch_s, bench_s=whole - launches * launch_s)


def close_out_s(workload: Workload, rule: JudgeRule, costs: Costs) -> float:
    """What the end needs: the final interleaved comparison, one restore and the runs that confirm what is left.

    Reserved before every experiment.
    """
    return final_s(workload, rule, costs) + costs.back_s + sum(map(costs.point_s, workload.objective.at))


def final_s(workload: Workload, rule: JudgeRule, costs: Costs) -> float:
    """The final interleaved comparison alone: the original starts as ever, the final configuration as it did."""
    runs, _ = _runs(workload, rule, costs)
    slower_s = costs.back_s - costs.launch_s
    return rule.close_out_blocks * (2 * costs.block_s(workload, runs) + slower_s)


def whole_s(policy: Policy) -> float:
    """The most time that a session can have: its budget, or one window."""
    most = policy.budget.time_s
    return most if policy.window is None else min(most, window_from(policy.window).length_s)


def left_s(policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs) -> float:
    """Time before the reserved close-out has to begin: of the budget or of the window, whichever ends first."""
    reserve_s = close_out_s(workload, rule, costs)
    left = policy.budget.time_s - spent.elapsed_s - reserve_s
    return left if spent.open_s is None else min(left, spent.open_s - SLACK * reserve_s - costs.wait_s)


def _runs(workload: Workload, rule: JudgeRule, costs: Costs) -> tuple[int, int]:
    return runs_per_launch(costs.launch_s, costs.objective_run_s(workload), rule.max_runs)


def unaffordable(
    experiment: Experiment, policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs
) -> str | None:
    """Why the remaining budget, less the reserved close-out, does not cover this experiment."""
    budget = policy.budget
    if experiment.changes and spent.experiments >= budget.experiments:
        return f"all {budget.experiments} experiments of the budget are used"
    wanted = price(experiment, workload, rule, costs)
    if experiment.observes and not costs.run_s:
        return _first_look(wanted.seconds, policy, spent)
    return _beyond(wanted.seconds, wanted.launches, policy, spent, workload, rule, costs)


def _first_look(seconds: float, policy: Policy, spent: Spent) -> str | None:
    """Why the very first runs do not fit: what a run takes is a guess still, and there is nothing yet to close out."""
    left = policy.budget.time_s - spent.elapsed_s
    left = left if spent.open_s is None else min(left, spent.open_s)
    return None if seconds <= left else f"needs about {seconds:.0f} s, {max(0.0, left):.0f} s are left"


def no_room_for(
    blocks: int, policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs
) -> str | None:
    """Why a comparison of the loop itself, with `blocks` launches of either side, does not fit before the close-out."""
    seconds = blocks * sum(costs.block_s(workload, runs) for runs in _runs(workload, rule, costs))
    return _beyond(seconds, 2 * blocks, policy, spent, workload, rule, costs)


def no_room_for_the_end(spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs) -> str | None:
    """Why the final comparison is not begun: it would not end, known-good back, before the window closes."""
    needed = final_s(workload, rule, costs) + costs.way_back_s
    if spent.open_s is None or needed <= spent.open_s:
        return None
    return f"the final comparison needs about {needed:.0f} s, the window closes in {spent.open_s:.0f} s"


def _beyond(
    seconds: float, launches: int, policy: Policy, spent: Spent, workload: Workload, rule: JudgeRule, costs: Costs
) -> str | None:
    left = left_s(policy, spent, workload, rule, costs)
    if seconds > left:
        of = f" of the window {policy.window}" if _ends_by_window(policy, spent, left, workload, rule, costs) else ""
        return f"needs about {seconds:.0f} s, {max(0.0, left):.0f} s{of} are left before the reserved close-out"
    free = policy.budget.restarts - spent.restarts - (2 * rule.close_out_blocks + 1)
    if launches > free:
        return f"needs {launches} restarts, {max(0, free)} are left before the reserved close-out"
    return None


def _ends_by_window(
    policy: Policy, spent: Spent, left: float, workload: Workload, rule: JudgeRule, costs: Costs
) -> bool:
    """Whether it is the window that leaves so little, not the budget."""
    return left < policy.budget.time_s - spent.elapsed_s - close_out_s(workload, rule, costs)


def out_of_time(
    policy: Policy,
    spent: Spent,
    workload: Workload,
    rule: JudgeRule,
    costs: Costs,
    level: Disruption = Disruption.RESTART,
) -> str | None:
    """Whether a comparison of that level under way must end now, so that the close-out still fits."""
    left = left_s(policy, spent, workload, rule, costs)
    own = costs.of_level(level)
    block_s = max(own.block_s(workload, runs) for runs in _runs(workload, rule, own))
    if block_s > left and _ends_by_window(policy, spent, left, workload, rule, costs):
        return f"the window {policy.window} closes soon; what is left of it is reserved for the close-out"
    if block_s > left:
        return f"the time budget of {policy.budget.time_s:.0f} s is used up but for the reserved close-out"
    if spent.restarts >= policy.budget.restarts - (2 * rule.close_out_blocks + 1):
        return f"the {policy.budget.restarts} restarts of the budget are used up but for the reserved close-out"
    return None


def window_shut(spent: Spent, step_s: float) -> str | None:
    """Why even a check that has its time set aside must end: its next step would not end before the window closes."""
    if spent.open_s is None or step_s <= spent.open_s:
        return None
    return f"the window closes in {spent.open_s:.0f} s, the next step and the way back need about {step_s:.0f} s"


def over(policy: Policy, spent: Spent) -> bool:
    """Whether budget or window are used up to the last second."""
    return spent.elapsed_s >= policy.budget.time_s or spent.open_s == 0
