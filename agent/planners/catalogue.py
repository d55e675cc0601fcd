"""The planner that is always there: the engine's catalogue, fitted to the host; deterministic, no model asked."""

from __future__ import annotations

from agent.catalogue import CatalogueFacts, experiments
from agent.catalogue.model import traits
from agent.planners.base import Proposal, View
from state.models import Experiment

NUMERICS = "numerics"
"""Stands in `only` and `skip` for everything that lets the model compute with other numbers."""


class CataloguePlanner:
    """Proposes a person's own experiments and what the catalogue knows.

    `only` and `skip` (ids or tags) restrict the catalogue; what a person wrote down is always proposed.
    """

    def __init__(
        self, only: tuple[str, ...] = (), skip: tuple[str, ...] = (), own: tuple[Experiment, ...] = ()
    ) -> None:
        self.only = frozenset(only)
        self.skip = frozenset(skip)
        self.own = own

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
                sm=None if view.facts.compute is None else round(view.facts.compute * 10),
                model=None if view.facts.model is None else traits(view.facts.model),
            ),
        )
        own = {experiment.id: experiment for experiment in self.own}
        known = [e for e in found.experiments if self._wanted(e) and e.id not in own]
        wanted = tuple(e for e in (*own.values(), *known) if e.id not in view.tried)
        reason = f"{len(known)} experiments of the {view.engine} catalogue fit this host"
        if own:
            reason += f", {len(own)} are from the session file"
        return Proposal(experiments=wanted, dropped=found.dropped, reason=reason)

    def _wanted(self, experiment: Experiment) -> bool:
        names = {experiment.id, *experiment.tags, *((NUMERICS,) if experiment.numerics else ())}
        return not names & self.skip and (not self.only or bool(names & self.only))
