"""How searches of one surface compare: by what their final setting truly is; it plays nothing.

The truth is the pooled mean of the recording, which no planner sees. All differences are of logarithms, shown as
percent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.searching.outcome import Search
from benchmarks.searching.surfaces import Surface

OURS = "ratchet"
NEAR = 0.98
"""A search has arrived when its best known setting has this share of the best."""
SLACK = 0.01
"""A final setting at most this much below another one is as good."""

Searches = Mapping[int, Search]
"""By seed."""


def worth(surface: Surface, search: Search, raw: bool = False) -> float:
    """Log tok/s of the final setting."""
    value = surface.raw(search.final) if raw else surface.truth(search.final)
    assert value is not None, f"{search.final} does not serve"
    return value


def arrival_s(surface: Surface, search: Search, budget_s: float) -> float:
    """When the best known setting first had 98 % of the best; never counts as the whole budget."""
    least = (surface.truth(surface.best()) or 0.0) + math.log(NEAR)
    times = [one.at_s for one in search.incumbents if (surface.truth(one.setting) or -math.inf) >= least]
    return min([*times, budget_s])


def planner_row(surface: Surface, searches: Searches, budget_s: float) -> dict[str, Any]:
    """What one planner did over all seeds."""
    best, found = surface.truth(surface.best()), surface.truth(surface.found)
    assert best is not None and found is not None
    ends = [worth(surface, one) for one in searches.values()]
    arrivals = [arrival_s(surface, one, budget_s) for one in searches.values()]
    return {
        "seeds": len(searches),
        "below_best": fmean(1 - math.exp(end - best) for end in ends),
        "worst_below_best": max(1 - math.exp(end - best) for end in ends),
        "gain": fmean(math.exp(end - found) - 1 for end in ends),
        "arrival_s": median(arrivals),
        "arrived": fmean(one < budget_s for one in arrivals),
        "restarts": fmean(one.restarts for one in searches.values()),
        "down_min": fmean(one.down_s for one in searches.values()) / 60,
        "experiments": fmean(one.experiments for one in searches.values()),
        "failed": fmean(one.failed for one in searches.values()),
        "minutes": fmean(one.seconds for one in searches.values()) / 60,
    }


def pair_row(surface: Surface, ours: Searches, theirs: Searches) -> dict[str, Any]:
    """Our finals against another planner's, seed by seed."""
    seeds = sorted(set(ours) & set(theirs))
    apart = [worth(surface, ours[seed]) - worth(surface, theirs[seed]) for seed in seeds]
    raw = [worth(surface, ours[seed], raw=True) - worth(surface, theirs[seed], raw=True) for seed in seeds]
    return {
        "seeds": len(seeds),
        "as_good": share_above(apart, math.log(1 - SLACK)),
        "mean": fmean(apart),
        "raw_as_good": share_above(raw, math.log(1 - SLACK)),
        "raw_mean": fmean(raw),
    }


def share_above(values: Sequence[float], least: float) -> float:
    """Share of the values that are not below."""
    return fmean(value >= least for value in values)


def missed(row: Mapping[str, Any], goal: Mapping[str, Any]) -> list[str]:
    """What the goals ask for in one case and the row doesn't show; only one budget of each surface has goals."""
    if row["minutes"] != goal["minutes"].get(row["surface"]):
        return []
    planners, where = row["planners"], f"{row['surface']}, {row['minutes']:g} min"
    found = []
    for name, told in row["pairs"].items():
        if told["as_good"] < goal["min_as_good"]:
            found.append(f"{where}: as good as {name} in {told['as_good']:.0%} of seeds")
        beatable = planners[name]["below_best"] > goal["nothing_left"]
        if told["mean"] <= (0.0 if beatable else -goal["nothing_left"]):
            found.append(f"{where}: {told['mean']:+.2%} against {name} in the mean")
    for name, told in row["models"].items():
        if name.endswith("+good"):
            continue
        if told["as_good"] < goal["min_as_good"] or told["mean"] < math.log(1 - SLACK):
            found.append(f"{where}: {name} as good as alone in {told['as_good']:.0%}, mean {told['mean']:+.2%}")
    if OURS in planners and "tpe" in planners:
        ours, theirs = planners[OURS]["arrival_s"], planners["tpe"]["arrival_s"]
        if ours > goal["max_arrival_share"] * theirs:
            found.append(f"{where}: 98 % of the best after {ours / 60:.1f} min, TPE after {theirs / 60:.1f}")
    return found
