"""The planner of a self-test: only the unchanged server, compared with itself; it never proposes a change."""

from __future__ import annotations

from agent.built_in import sentinel_experiment
from agent.planners.base import Proposal, View


class SelftestPlanner:
    """Proposes `relaunches` comparisons of the unchanged server with itself, each with a launch of its own."""

    def __init__(self, relaunches: int) -> None:
        self.relaunches = relaunches

    def propose(self, view: View) -> Proposal:
        """As many A/A sentinels as launches were asked for; none restarts nothing."""
        asked = tuple(map(sentinel_experiment, range(1, self.relaunches + 1)))
        reason = f"a self-test launches the unchanged server {self.relaunches} times and changes nothing"
        return Proposal(experiments=asked, reason=reason)
