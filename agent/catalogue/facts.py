"""What decides whether a catalogue entry applies, as plain data; it must not look anything up."""

from __future__ import annotations

from agent.catalogue.entries import ModelTrait
from state.models import Experiment, Frozen


class CatalogueFacts(Frozen):
    """The host, the live flag list, and the parent's configuration. None is "not known", and excludes nothing."""

    cores: int
    known_flags: frozenset[str]
    flags: dict[str, tuple[str, ...]]
    env: dict[str, str]
    mem_available_mb: float
    gpus: int
    engine_version: str
    sm: int | None = None
    model: frozenset[ModelTrait] | None = None


class Catalogue(Frozen):
    """The experiments that apply, in the catalogue's order, and (id, reason) for each that does not."""

    experiments: tuple[Experiment, ...]
    dropped: tuple[tuple[str, str], ...]
