"""How a catalogue file is written, and the reading of it; it must not know any host or decide what applies."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

from pydantic import Field, model_validator

from state.errors import ConfigError
from state.models import DisruptionField, EnvChange, FlagChange, Frozen, LoadHint

NUMBERS = frozenset(
    {
        "cores",
        "half_cores",
        "spare_cores",
        "gpus",
        "mem_available_mb",
        "threads",
        "threads_batch",
        "slots",
        "unified",
        "ctx_per_slot",
        "quantised_v",
        "flash_attn_off",
    }
)
"""Names that values and conditions may use; `unified`, `quantised_v` and `flash_attn_off` are 0 or 1."""

TEMPLATE = re.compile(r"\{([a-z_]+)(?:\*(\d+))?\}")


class ChangeEntry(Frozen):
    """One flag or one variable; a flag without value is a switch."""

    flag: str | None = Field(default=None, pattern="^--[a-z]", description="canonical name")
    env: str | None = Field(default=None, pattern="^[A-Z]", description="name of the variable")
    value: str | None = Field(default=None, description="may hold names of the host in braces")

    @model_validator(mode="after")
    def _one_thing(self) -> ChangeEntry:
        if (self.flag is None) == (self.env is None):
            raise ValueError("a change is of one flag or of one variable")
        if self.env is not None and self.value is None:
            raise ValueError("a variable needs a value")
        return self

    def change(self, value: str | None) -> FlagChange | EnvChange:
        """The change itself, with the value filled in."""
        if self.env is not None:
            return EnvChange(name=self.env, value=value)
        return FlagChange(name=self.flag or "", value=value)


class When(Frozen):
    """Conditions on the host's numbers; a number that is not known excludes nothing."""

    at_least: dict[str, int | str] = Field(default_factory=dict, description="number → least, or another number's name")
    below: dict[str, int | str] = Field(default_factory=dict, description="number → what it must stay below")


class Entry(Frozen):
    """One experiment as the catalogue writes it."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", description="stable: sessions and people refer to it")
    title: str = Field(min_length=1)
    hypothesis: str = Field(min_length=1)
    changes: tuple[ChangeEntry, ...]
    tags: tuple[str, ...] = Field(min_length=1, description="experiments that share one are relatives")
    tier: int = Field(ge=1, le=3)
    priority: float = Field(ge=0, le=1)
    expected_gain: float = Field(ge=0, lt=1, description="a guess before anything was measured, as a fraction")
    risk: str = Field(min_length=1)
    needs: tuple[str, ...] = ()
    load_hint: LoadHint
    disruption: DisruptionField | None = Field(default=None, description="only for more than the changes imply")
    when: When = When()
    conflicts: tuple[str, ...] = Field(default=(), description="flags or variables that must not be set")
    source: str = Field(min_length=1, description="public page, issue or help text")

    @model_validator(mode="after")
    def _known_names(self) -> Entry:
        used = {name for change in self.changes for name, _ in TEMPLATE.findall(change.value or "")}
        used |= {name for name, _ in TEMPLATE.findall(self.title)}
        for limits in (self.when.at_least, self.when.below):
            used |= {*limits, *(limit for limit in limits.values() if isinstance(limit, str))}
        if used - NUMBERS:
            raise ValueError(f"{', '.join(sorted(used - NUMBERS))}: not among the names {', '.join(sorted(NUMBERS))}")
        if not self.changes and self.disruption is None:
            raise ValueError("an observation says what it costs: disruption")
        return self


class Book(Frozen):
    """A whole catalogue: what the engine does when a flag is absent, and the experiments."""

    defaults: dict[str, str] = Field(default_factory=dict)
    experiments: tuple[Entry, ...]

    @model_validator(mode="after")
    def _unique(self) -> Book:
        ids = [entry.id for entry in self.experiments]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            raise ValueError(f"more than one experiment has the id {', '.join(twice)}")
        return self


def read_book(text: str) -> Book:
    """A catalogue from its TOML text; pydantic's ValidationError or tomllib's TOMLDecodeError when it is wrong."""
    return Book.model_validate(tomllib.loads(text))


@cache
def book(engine: str) -> Book:
    """The packaged catalogue of an engine; ConfigError when there is none."""
    file = resources.files("agent.catalogue").joinpath(f"{engine}.toml")
    if not file.is_file():
        raise ConfigError(f'there is no catalogue for the engine "{engine}"', do="set server.engine to llamacpp")
    return read_book(file.read_text(encoding="utf-8"))
