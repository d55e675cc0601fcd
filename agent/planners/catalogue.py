"""The planner that is always there: the engine's catalogue, fitted to the host; deterministic, no model asked."""

from __future__ import annotations

from agent.catalogue import CatalogueFacts, experiments
from agent.planners.base import Proposal, View
from state.models import Experiment


class CataloguePlanner:
    """Proposes what the catalogue knows, restricted by the session file's `only` and `skip` (ids or tags)."""

    def __init__(self, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> None:
        self.only = frozenset(only)
        self.skip = frozenset(skip)

    def propose(self, view: View) -> Proposal:
        """Everything applicable that was not tried yet, in the catalogue's order."""
        found = experiments(
            view.engine,
            CatalogueFacts(
                cores=view.facts.cores,
                known_flags=view.facts.known_flags,
                flags=view.spec.flags,
                env=view.spec.env,
                mem_available_mb=view.facts.mem_available_mb,
                gpus=view.facts.gpus,
                engine_version=view.facts.engine_version,
            ),
        )
        wanted = tuple(e for e in found.experiments if self._wanted(e) and e.id not in view.tried)
        reason = f"{len(wanted)} experiments of the {view.engine} catalogue fit this host"
        return Proposal(experiments=wanted, dropped=found.dropped, reason=reason)

    def _wanted(self, experiment: Experiment) -> bool:
        names = {experiment.id, *experiment.tags}
        return not names & self.skip and (not self.only or bool(names & self.only))
