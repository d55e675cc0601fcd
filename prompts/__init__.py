"""Words for a language model, one file each, loaded by name; the first line of a file is its version."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple


class Prompt(NamedTuple):
    """The words of one file."""

    name: str
    version: int
    text: str

    @property
    def label(self) -> str:
        """Name, version and digest: what a stored conversation is traced back by, also after an unversioned edit."""
        return f"{self.name} {self.version} ({hashlib.sha256(self.text.encode()).hexdigest()[:8]})"


def load(name: str) -> Prompt:
    """The prompt of that name; FileNotFoundError when there is none."""
    head, _, text = resources.files("prompts").joinpath(f"{name}.md").read_text(encoding="utf-8").partition("\n")
    return Prompt(name, int(head.removeprefix("version: ")), text.strip() + "\n")
