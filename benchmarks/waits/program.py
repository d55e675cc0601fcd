"""The program behind `benchmarks/overhead.py`: its parts, their tables, and the comparison with the goals."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kept import interrupt_on_sigterm, place
from benchmarks.waits import account, growth, sessions

GOALS = Path(__file__).resolve().parents[1] / "goals.toml"
PARTS = ("demo", "slow", "growth")
Figures = dict[str, Any]


def kept(path: Path, made: Callable[[], Figures]) -> Figures:
    """The figures in a file, made and written unless it is there."""
    if not path.exists():
        figures = made()
        path.write_text(json.dumps(figures, indent=1))
    return dict(json.loads(path.read_text()))


def session_of(part: str, out: Path, launch_s: float) -> Figures:
    """One watched session, played unless `out` has it already."""
    folder = out / f"host-{part}"

    def made() -> Figures:
        shutil.rmtree(folder, ignore_errors=True)
        figures = sessions.play_demo(folder) if part == "demo" else sessions.play_slow(folder, launch_s)
        shutil.rmtree(folder)
        return figures

    figures = kept(out / (f"{part}.json" if part == "demo" else f"{part}-{launch_s:g}.json"), made)
    print(f"{part}:\n{account.shown([*figures['rows'], {**figures, 'experiment': 'all'}])}")
    print(
        f"{part}: {figures['waited_share']:.2%} of the time is waiting for the target "
        f"({figures['seen_share']:.2%} without what passes until the end of a run is noticed); "
        f"{figures['cpu_s_per_experiment']:.2f} s of CPU and {figures['trips_per_experiment']:.0f} round trips "
        "for each experiment",
        flush=True,
    )
    return figures


def growth_of(out: Path, experiments: int, rounds: int) -> Figures:
    """The rounds that compare late with early."""
    found = [
        kept(
            out / f"growth-{experiments}-{number}.json", lambda number=number: growth.round_of(out, experiments, number)
        )
        for number in range(rounds)
    ]
    ratios = growth.ratios(found)
    print(f"growth, experiment {experiments} against the first ones:\n{growth.shown(ratios)}", flush=True)
    return {"experiments": experiments, "rounds": found, "ratios": ratios}


def missed(found: Figures, goal: Figures) -> list[str]:
    """What the goals ask for and the figures don't show; parts that were not played are not asked for."""
    lacking = []
    for part in ("demo", "slow"):
        least = goal[f"min_waited_{part}"]
        if part in found and found[part]["waited_share"] < least:
            lacking.append(f"{part}: {found[part]['waited_share']:.2%} of the time is waiting, {least:.0%} is the goal")
    if "growth" in found and found["growth"]["ratios"]["all"]["ratio"] > goal["max_growth"]:
        ratio = found["growth"]["ratios"]["all"]["ratio"]
        lacking.append(f"growth: a late step costs {ratio:.2f} of an early one, {goal['max_growth']:g} is the goal")
    return lacking


def verdict(found: Figures, lacking: list[str]) -> str:
    """The deciding figures in one line."""
    told = [f"{part} {found[part]['waited_share']:.2%} waiting" for part in ("demo", "slow") if part in found]
    if "growth" in found:
        whole = found["growth"]["ratios"]["all"]
        told.append(f"late step / early step {whole['ratio']:.2f} [{whole['low']:.2f}, {whole['high']:.2f}]")
    return f"overhead: {', '.join(told)} ({'MISSED' if lacking else 'met'})"


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="How much of a session's time is Ratchet's own.")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--launch-s", type=float, default=60.0, help="how long a start of the slow server takes")
    parser.add_argument("--experiments", type=int, default=1000, help="length of the long session")
    parser.add_argument("--rounds", type=int, default=5, help="comparisons of late with early")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="keep each part in this folder, and skip what is there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    return parser.parse_args()


def main() -> int:
    """Plays the parts, prints tables, compares with the goals."""
    options = parse_options()
    goal = tomllib.loads(GOALS.read_text())["overhead"]
    interrupt_on_sigterm()
    parts = options.only or PARTS
    found: Figures = {}
    with place(options.out, "overhead-") as out:
        for part in PARTS:
            if part not in parts:
                continue
            if part == "growth":
                found[part] = growth_of(out, options.experiments, options.rounds)
            else:
                found[part] = session_of(part, out, options.launch_s)
    lacking = missed(found, goal)
    for what in lacking:
        print(f"missed: {what}")
    if options.json:
        figures = {"goal": goal, "missed": lacking, "cores": os.cpu_count(), **found}
        options.json.write_text(json.dumps(figures, indent=1))
    print(verdict(found, lacking))
    return 1 if options.check and lacking else 0
