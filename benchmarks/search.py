"""Whether Ratchet finds better settings than other planners do in the same time, on recorded real servers.

It must not judge by what was measured in a search, only by what the recording says of the setting that is left. Every
planner gets the same wall time on the same surface, in virtual time: ours as whole sessions of the real loop on a
simulated target that plays the recording (searching/ours.py), the others as their users run them (searching/rivals.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

from benchmarks.kept import interrupt_on_sigterm  # noqa: E402
from benchmarks.searching import models, ours, rivals, surfaces  # noqa: E402
from benchmarks.searching.outcome import Search, read  # noqa: E402
from benchmarks.searching.scores import OURS, missed, pair_row, planner_row  # noqa: E402
from benchmarks.searching.surfaces import Surface  # noqa: E402

DATA = HERE / "data"
WITH = f"{OURS}+"
PLANNERS = (OURS, *(WITH + name for name in models.MODELS), *rivals.RIVALS)
"""Ours alone, ours with a language model beside the catalogue, and the others."""


@dataclass(frozen=True)
class Case:
    """A surface and the wall time that each planner gets on it."""

    surface: str
    minutes: float


@dataclass(frozen=True)
class Task:
    """One search."""

    case: Case
    planner: str
    seed: int

    def path(self, out: Path, mark: str) -> Path:
        """Where it is kept; another recording is another search."""
        return out / f"{self.case.surface}-{mark}-{self.case.minutes:g}m-{self.planner}-{self.seed}.json"


CASES = (
    Case("llamacpp", 10),
    Case("llamacpp", 20),
    Case("llamacpp", 40),
    Case("vllm_cpu", 120),
    Case("vllm_h200", 480),
    Case("sglang_h200", 480),
)


@functools.cache
def surface_of(name: str, folder: Path) -> Surface:
    """A recorded surface by name."""
    return surfaces.load(folder / f"{name}_space.json", folder / f"{name}_surface.jsonl")


def played(task: Task, folder: Path) -> dict[str, Any]:
    """One search, as it is kept."""
    surface, budget_s = surface_of(task.case.surface, folder), 60 * task.case.minutes
    if task.planner.startswith(OURS):
        return ours.searched(surface, task.seed, budget_s, task.planner.partition("+")[2] or None).row()
    rival = rivals.RIVALS[task.planner](surface, task.seed)
    return rivals.searched(surface, rival, f"{task.planner}/{task.seed}", budget_s).row()


def keep(task: Task, folder: Path, out: Path) -> Task:
    """Play a search and keep it; it is there whole or not at all."""
    path = task.path(out, surface_of(task.case.surface, folder).mark)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(played(task, folder)))
    partial.replace(path)
    return task


def play_missing(tasks: Sequence[Task], folder: Path, out: Path, jobs: int) -> None:
    """Play what is not kept yet, some at a time; the sessions first, since they take longest."""
    missing = [task for task in tasks if not task.path(out, surface_of(task.case.surface, folder).mark).exists()]
    missing.sort(key=lambda task: not task.planner.startswith(OURS))
    for done, task in enumerate(_played(missing, folder, out, min(jobs, len(missing))), 1):
        told = f"{task.case.surface} {task.case.minutes:g} min {task.planner} {task.seed}"
        print(f"{done}/{len(missing)} {told}", file=sys.stderr, flush=True)


def _played(tasks: Sequence[Task], folder: Path, out: Path, jobs: int) -> Iterator[Task]:
    """Each task as it is done."""
    if jobs <= 1:
        yield from (keep(task, folder, out) for task in tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(keep, task, folder, out) for task in tasks]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def case_row(case: Case, searches: dict[str, dict[int, Search]], surface: Surface) -> dict[str, Any]:
    """Everything about one case."""
    budget_s = 60 * case.minutes
    planners = {name: planner_row(surface, found, budget_s) for name, found in searches.items()}
    pairs = {}
    if OURS in searches:
        pairs = {n: pair_row(surface, searches[OURS], found) for n, found in searches.items() if n in rivals.RIVALS}
    with_model = [name for name in searches if name.startswith(WITH) and OURS in searches]
    models_row = {name: pair_row(surface, searches[name], searches[OURS]) for name in with_model}
    return {
        "surface": case.surface,
        "minutes": case.minutes,
        "planners": planners,
        "pairs": pairs,
        "models": models_row,
    }


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The tables as text."""
    for row in rows:
        yield f"{row['surface']}, {row['minutes']:g} min"
        yield (
            f"  {'planner':18} {'seeds':>5} {'below best':>10} {'worst':>6} {'gain':>6} {'98 % after':>10}"
            f" {'arrived':>7} {'restarts':>8} {'down min':>8} {'tried':>6} {'failed':>6} {'used min':>8}"
        )
        for name, told in row["planners"].items():
            yield (
                f"  {name:18} {told['seeds']:5} {told['below_best']:10.2%} {told['worst_below_best']:6.1%}"
                f" {told['gain']:6.0%} {told['arrival_s'] / 60:6.1f} min {told['arrived']:7.0%} {told['restarts']:8.1f}"
                f" {told['down_min']:8.2f} {told['experiments']:6.1f} {told['failed']:6.1f} {told['minutes']:8.1f}"
            )
        for name, told in row["pairs"].items():
            yield (
                f"  {OURS} against {name:8} at most 1 % below in {told['as_good']:4.0%} of seeds,"
                f" mean {told['mean']:+.2%} (by raw means {told['raw_as_good']:4.0%}, {told['raw_mean']:+.2%})"
            )
        for name, told in row["models"].items():
            yield (
                f"  {name} against {OURS} alone: at most 1 % below in {told['as_good']:4.0%} of seeds,"
                f" mean {told['mean']:+.2%}"
            )
        yield ""


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Ratchet and other planners on recorded real servers.")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--only", default="", help="only surfaces with this in their name")
    parser.add_argument("--minutes", type=float, action="append", help="only these budgets; may be given again")
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS))
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the recordings")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="searches at a time")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="keep each search in this folder, and skip those that are there")
    return parser.parse_args()


def main() -> int:
    """Plays what is missing, prints the tables, compares with the goals."""
    options = parse_options()
    interrupt_on_sigterm()
    goal = tomllib.loads((HERE / "goals.toml").read_text())["search"]
    chosen = [c for c in CASES if options.only in c.surface and c.minutes in (options.minutes or [c.minutes])]
    with tempfile.TemporaryDirectory(prefix="search-") as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        tasks = [
            Task(case, name, seed)
            for case in chosen
            for name in options.planners
            for seed in range(options.seeds)
            if not name.startswith(WITH) or case.minutes == goal["minutes"].get(case.surface)
        ]
        play_missing(tasks, options.data, out, options.jobs)
        rows = []
        for case in chosen:
            surface = surface_of(case.surface, options.data)
            searches: dict[str, dict[int, Search]] = {}
            for task in (task for task in tasks if task.case == case):
                searches.setdefault(task.planner, {})[task.seed] = read(
                    json.loads(task.path(out, surface.mark).read_text())
                )
            rows.append(case_row(case, searches, surface))
    print("\n".join(report(rows)))
    lacking = [line for row in rows for line in missed(row, goal)]
    for line in lacking:
        print(f"missed: {line}")
    if options.json:
        options.json.write_text(json.dumps({"goal": goal, "missed": lacking, "rows": rows}, indent=1))
    print(f"{last_line(rows, goal)} ({'goals met' if not lacking else f'{len(lacking)} MISSED'})")
    return 1 if options.check and lacking else 0


def last_line(rows: Sequence[dict[str, Any]], goal: dict[str, Any]) -> str:
    """The deciding figure: in how many seeds we end as well as the rival that is hardest to match."""
    pairs = [
        (told["as_good"], name, row["surface"])
        for row in rows
        if row["minutes"] == goal["minutes"].get(row["surface"])
        for name, told in row["pairs"].items()
    ]
    seeds = max((told["seeds"] for row in rows for told in row["planners"].values()), default=0)
    if not pairs:
        return f"search: {len(rows)} cases of {seeds} seeds, none of them with a goal"
    share, name, surface = min(pairs)
    worst = f"in {share:.0%} or more of seeds ({name}, {surface})"
    return f"search: {len(rows)} cases of {seeds} seeds, at most 1 % below each rival {worst}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("search: interrupted; finished searches are kept with --out")
