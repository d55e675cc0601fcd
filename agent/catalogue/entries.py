"""How a catalogue file is written, and the reading of it; it must not know any host or decide what applies."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import Field, model_validator

from state.errors import ConfigError
from state.models import DisruptionField, EnvChange, FlagChange, Frozen, LoadHint

NUMBERS = frozenset(
    {
        "cores",
        "half_cores",
        "spare_cores",
        "gpus",
        "sm",
        "mem_available_mb",
        "threads",
        "threads_batch",
        "slots",
        "unified",
        "ctx_per_slot",
        "quantised_v",
        "flash_attn_off",
        "tp",
        "dp",
        "ep",
        "running",
        "step_tokens",
        "speculates",
    }
)
"""Names that values and conditions may use; `unified`, `quantised_v`, `flash_attn_off`, `speculates` are 0 or 1."""

TEMPLATE = re.compile(r"\{([a-z_]+)(?:\*(\d+))?\}")
VALUE = "value"
"""The name of the candidate in the texts of an entry with several `values`."""

ModelTrait = Literal["moe", "mla", "mtp", "fp8", "fp4", "awq"]
"""What a model is: mixture of experts, multi-head latent attention, own draft layers, the format of its weights."""


class ChangeEntry(Frozen):
    """One flag or one variable; a flag without value is a switch."""

    flag: str | None = Field(default=None, pattern="^--[a-z]", description="canonical name")
    env: str | None = Field(default=None, pattern="^[A-Z]", description="name of the variable")
    value: str | None = Field(default=None, description="may hold names of the host in braces")
    remove: bool = Field(default=False, description="the flag or variable is taken away")

    @model_validator(mode="after")
    def _one_thing(self) -> ChangeEntry:
        if (self.flag is None) == (self.env is None):
            raise ValueError("a change is of one flag or of one variable")
        if self.remove and self.value is not None:
            raise ValueError("what is removed has no value")
        if self.env is not None and self.value is None and not self.remove:
            raise ValueError("a variable needs a value")
        return self

    def change(self, value: str | None) -> FlagChange | EnvChange:
        """The change itself, with the value filled in."""
        if self.env is not None:
            return EnvChange(name=self.env, value=value)
        return FlagChange(name=self.flag or "", value=value, remove=self.remove)


class When(Frozen):
    """Conditions on the host's numbers; a number that is not known excludes nothing."""

    at_least: dict[str, int | str] = Field(default_factory=dict, description="number → least, or another number's name")
    below: dict[str, int | str] = Field(default_factory=dict, description="number → what it must stay below")


class Entry(Frozen):
    """One idea as the catalogue writes it: one experiment, or one for each of its `values`."""

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", description="stable: sessions and people refer to it")
    title: str = Field(min_length=1)
    hypothesis: str = Field(min_length=1)
    changes: tuple[ChangeEntry, ...]
    values: tuple[str, ...] = Field(default=(), description="candidates for {value}, tried one after the other")
    span: tuple[float, float] | None = Field(default=None, description="least and greatest sensible value of the knob")
    tags: tuple[str, ...] = Field(min_length=1, description="experiments that share one are relatives")
    tier: int = Field(ge=1, le=3)
    priority: float = Field(ge=0, le=1)
    expected_gain: float = Field(ge=0, lt=1, description="a guess before anything was measured, as a fraction")
    risk: str = Field(min_length=1)
    needs: tuple[str, ...] = Field(default=(), description="capabilities, the one that it is about first")
    load_hint: LoadHint
    disruption: DisruptionField | None = Field(default=None, description="only for more than the changes imply")
    numerics: bool = Field(default=False, description="the model computes with other numbers: answers can differ")
    model: tuple[ModelTrait, ...] = Field(default=(), description="what the model must be; an unknown model passes")
    not_model: tuple[ModelTrait, ...] = Field(default=(), description="what the model must not be")
    when: When = When()
    conflicts: tuple[str, ...] = Field(default=(), description="flags or variables that must not be set")
    requires: tuple[str, ...] = Field(default=(), description="flags or variables that must be set already")
    since: str | None = Field(
        default=None,
        pattern=r"^\d+(\.\d+)*$",
        description="oldest version seen with it; decides for variables, for a flag the live --help does",
    )
    until: str | None = Field(
        default=None, pattern=r"^\d+(\.\d+)*$", description="first version in which it does nothing or is spelled anew"
    )
    source: str = Field(min_length=1, description="public page, issue or help text")

    @model_validator(mode="after")
    def _known_names(self) -> Entry:
        texts = [change.value or "" for change in self.changes] + [self.title]
        used = {name for text in texts for name, _ in TEMPLATE.findall(text)}
        if (VALUE in used) != bool(self.values):
            raise ValueError("{value} stands in a change exactly when there are values to try")
        used |= {name for text in self.values for name, _ in TEMPLATE.findall(text)}
        used -= {VALUE}
        for limits in (self.when.at_least, self.when.below):
            used |= {*limits, *(limit for limit in limits.values() if isinstance(limit, str))}
        if used - NUMBERS:
            raise ValueError(f"{', '.join(sorted(used - NUMBERS))}: not among the names {', '.join(sorted(NUMBERS))}")
        if not self.changes and self.disruption is None:
            raise ValueError("an observation says what it costs: disruption")
        return self

    @model_validator(mode="after")
    def _within_its_span(self) -> Entry:
        if self.span is None:
            return self
        low, high = self.span
        plain = [float(value) for value in self.values if not TEMPLATE.search(value)]
        outside = [value for value in plain if not low <= value <= high]
        if low >= high or outside:
            raise ValueError(f"span {low:g} to {high:g} does not hold {', '.join(map(str, outside)) or 'anything'}")
        return self

    def each(self) -> Iterator[Entry]:
        """The entry with one value filled in, for each of its values; the entry itself when it has none."""
        if not self.values:
            yield self
        for value in self.values:
            changes = tuple(change.model_copy(update={"value": _with(change.value, value)}) for change in self.changes)
            name = f"{self.id}-{re.sub('[^a-z0-9]+', '-', value.lower()).strip('-')}"
            title = _with(self.title, value)
            yield self.model_copy(update={"id": name, "title": title, "changes": changes, "values": ()})


def _with(text: str | None, value: str) -> str | None:
    return None if text is None else text.replace(f"{{{VALUE}}}", value)


class Book(Frozen):
    """A whole catalogue: what the engine does when a flag is absent, and the experiments."""

    defaults: dict[str, str] = Field(default_factory=dict)
    experiments: tuple[Entry, ...]

    @model_validator(mode="after")
    def _unique(self) -> Book:
        ids = [one.id for entry in self.experiments for one in entry.each()]
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
        raise ConfigError(
            f'there is no catalogue for the engine "{engine}"',
            do=f"set server.engine to one of {', '.join(engines())}, or write experiments into the session file",
        )
    return read_book(file.read_text(encoding="utf-8"))


@cache
def engines() -> tuple[str, ...]:
    """The engines that have a packaged catalogue, by name."""
    files = resources.files("agent.catalogue").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))
