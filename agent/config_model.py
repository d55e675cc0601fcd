"""The section `[planner.model]` of a session file: which language model is asked, and what it may cost.

It reads a key where one is named, and must not ask anybody anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from state.errors import ConfigError
from state.models import Frozen

NO_KEY = "none"
"""What is sent where no key is named: local servers take anything."""


def _endpoint(value: str) -> str:
    advice = 'expected the address of an OpenAI-compatible API, such as "https://llm.example.net/v1"'
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as impossible:
        raise ValueError(advice) from impossible
    if not usable or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(advice)
    return value.rstrip("/")


def _folder(value: str) -> str:
    """A folder whose name says where it lies; the whole machine is no source."""
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or not value.isprintable():
        raise ValueError(f'expected the absolute path of a folder on the host, without "..", got "{value}"')
    return str(path)


class ModelSection(Frozen):
    """The language model that proposes experiments beside the catalogue, and its budget in one session."""

    base_url: Annotated[str, AfterValidator(_endpoint)] = Field(
        description="address of an OpenAI-compatible API, without /chat/completions, as seen from this machine"
    )
    model: str = Field(min_length=1, description="name of the model there")
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="name of the variable of this machine that holds the key",
    )
    api_key_file: str | None = Field(
        default=None, min_length=1, description="file on this machine that holds the key; ~ is expanded"
    )
    deadline_s: float = Field(
        default=300.0, gt=0, le=3600, description="for one conversation, with everything that is asked again in it"
    )
    max_calls: int = Field(default=20, ge=1, description="the most requests in one session")
    max_tokens: int = Field(default=300_000, ge=1, description="the most tokens in one session, both ways")
    answer_tokens: int = Field(default=2000, ge=64, description="the most tokens of one answer")
    max_cost: float | None = Field(
        default=None, gt=0, description="the most that one session may cost, in the unit of the prices"
    )
    price_in: float | None = Field(default=None, ge=0, description="price of 1000 tokens that are sent")
    price_out: float | None = Field(default=None, ge=0, description="price of 1000 tokens of an answer")
    temperature: float | None = Field(default=None, ge=0, le=2, description="of the answers; by default none is sent")
    max_proposals: int = Field(
        default=12, ge=1, description="the most experiments that the model may put on the list in one session"
    )
    min_per_answer: int = Field(
        default=0,
        ge=0,
        le=3,
        description="the least experiments of one answer, where the endpoint keeps to a schema; for a small model that "
        "would rather say nothing",
    )
    look_ups: bool = Field(
        default=True,
        description="whether it may ask for ends of logs, help texts, readings of this session and lines of source",
    )
    max_look_ups: int = Field(default=24, ge=0, description="the most texts that it may look up in one session")
    source_roots: tuple[Annotated[str, AfterValidator(_folder)], ...] = Field(
        default=(),
        max_length=8,
        description="folders on the host, such as that of the engine's source, in whose files it may search for a text",
    )


def api_key(section: ModelSection, environ: Mapping[str, str]) -> str:
    """The key that is to be sent. Raises ConfigError when the one that is named is not there or can't be a key."""
    if section.api_key_env is not None:
        place, found = f"the variable {section.api_key_env}", environ.get(section.api_key_env, "")
    elif section.api_key_file is not None:
        place, found = section.api_key_file, _read(section.api_key_file)
    else:
        return NO_KEY
    key = found.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"there is no usable key for the language model in {place}",
            where={"endpoint": section.base_url, "model": section.model},
            do='put the key there, alone, or set planner.kind = "catalogue"',
        )
    return key


def _read(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""
