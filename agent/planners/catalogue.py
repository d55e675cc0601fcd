"""The planner that is always there: the engine's catalogue, fitted to the host; deterministic, no model asked."""

from __future__ import annotations

from agent.catalogue import Catalogue, CatalogueFacts, engines, experiments
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
        found = _catalogue(view)
        own = {experiment.id: experiment for experiment in self.own}
        known = [e for e in found.experiments if self._wanted(e) and e.id not in own]
        wanted = tuple(e for e in (*own.values(), *known) if e.id not in view.tried)
        if view.engine in engines():
            reason = f"{len(known)} experiments of the {view.engine} catalogue fit this host"
        else:
            reason = f"there is no catalogue for {view.engine}"
        if own:
            reason += f", {len(own)} are from the session file"
        return Proposal(experiments=wanted, dropped=found.dropped, reason=reason)

    def _wanted(self, experiment: Experiment) -> bool:
        names = {experiment.id, *experiment.tags, *((NUMERICS,) if experiment.numerics else ())}
        return not names & self.skip and (not self.only or bool(names & self.only))


def _catalogue(view: View) -> Catalogue:
    """What the catalogue has for this view; nothing for an engine without one: only a person knows its knobs."""
    if view.engine not in engines():
        return Catalogue(experiments=(), dropped=())
    facts = view.facts
    return experiments(
        view.engine,
        CatalogueFacts(
            cores=facts.cores,
            known_flags=facts.known_flags,
            flags=view.spec.flags,
            env=view.spec.env,
            mem_available_mb=facts.mem_available_mb,
            gpus=facts.gpus,
            engine_version=facts.engine_version,
            sm=None if facts.compute is None else round(facts.compute * 10),
            model=None if facts.model is None else traits(facts.model),
        ),
    )
