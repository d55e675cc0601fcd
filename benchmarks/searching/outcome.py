"""What a search left behind, whoever made it; plain data, no judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.searching.spaces import Setting


@dataclass(frozen=True)
class Moment:
    """From here on this setting was the best known."""

    at_s: float
    setting: Setting


@dataclass(frozen=True)
class Search:
    """One search of one surface; `final` is what serves in the end."""

    final: Setting
    incumbents: tuple[Moment, ...]
    seconds: float
    restarts: int
    down_s: float
    experiments: int
    failed: int

    def row(self) -> dict[str, Any]:
        """As it is kept."""
        return asdict(self)


def read(row: Mapping[str, Any]) -> Search:
    """As it was kept."""
    moments = tuple(Moment(one["at_s"], tuple(one["setting"])) for one in row["incumbents"])
    return Search(**{**row, "final": tuple(row["final"]), "incumbents": moments})
