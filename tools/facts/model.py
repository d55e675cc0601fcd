"""What a model is, by its `config.json` on the host; weights are never read, and nothing is fetched."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.facts.base import Fact, as_text

FLAGS = ("--model-path", "--model")
LIMIT_BYTES = 1 << 20


def model_named(argv: Sequence[str], cwd: str) -> str | None:
    """The model that a server's command line names: a path (made absolute) or a name of the hub; None without one."""
    named = next((word.split("=", 1)[1] for word in argv if word.startswith(tuple(f"{flag}=" for flag in FLAGS))), None)
    for flag, value in itertools.pairwise(argv):
        if flag in FLAGS or (flag == "serve" and not value.startswith("-")):
            named = value
    if named is None or named.startswith("/") or re.fullmatch(r"[\w.-]+/[\w.-]+", named):
        return named
    return f"{cwd}/{named}"


@dataclass(frozen=True)
class ModelFact(Fact[dict[str, Any] | None]):
    """The `config.json` of a model: in its folder, or in the login's cache of the hub; None where there is none."""

    model: str

    def command(self) -> str:
        """Prints the first that is there; of a model in the cache any revision serves, since its kind is the same."""
        cache = '"${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}"'
        cached = shlex.quote(f"models--{self.model.replace('/', '--')}")
        return f"""
for f in {shlex.quote(self.model)}/config.json {cache}/{cached}/snapshots/*/config.json; do
  if [ -f "$f" ]; then head -c {LIMIT_BYTES} "$f"; exit 0; fi
done
:
"""

    def parse(self, output: bytes) -> dict[str, Any] | None:
        """A file that holds no JSON object tells nothing."""
        try:
            found = json.loads(as_text(output))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None
