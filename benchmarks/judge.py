"""How often the judge keeps something false in a night, what it finds, and what that costs: by rehearsed nights.

It must not judge by itself: every night goes through `agent.judge.rehearsal`, hence through the functions that judge a
session. Cells: nights of 5, 20 and 50 experiments without any effect under many kinds of noise; nights with one planted
gain; a night with dear launches; recorded noise; and how early a collapse is called. Beside it, on the same noise, the
rules that published tuning loops keep by. A false keep is a kept change whose true effect is not above zero.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from judging.rivals import RIVALS
from judging.worlds import Floats, MadeUp, Noise, Recorded
from scipy import stats

from agent.judge.course import Ruling
from agent.judge.progress import Pace, collapsing
from agent.judge.rehearsal import Played, Rehearsal, Script
from state.models import JudgeRule

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "data" / "recorded_noise.json"
SIZES = (5, 20, 50)
PILOT_NIGHTS = 100
DRIFT = 0.1
MEMORY = 0.5
PLANTED = ((Noise(0.02, 0.01), 0.05), (Noise(0.01, 0.005), 0.03))


@dataclass(frozen=True)
class Cell:
    """One row: what is played. `gain` 0 is a night of no-ops; `source` names recorded noise."""

    experiments: int
    noise: Noise
    gain: float = 0.0
    launch_s: float = 30.0
    run_s: float = 20.0
    hours: float = 0.0
    source: str = ""

    @property
    def name(self) -> str:
        """Readable, and unique among the cells."""
        kind = self.source or self.noise.text
        gain = f", one of +{100 * self.gain:g} %" if self.gain else ""
        dear = f", launches of {self.launch_s:.0f} s in {self.hours:g} h" if self.hours else ""
        return f"{self.experiments} experiments, {kind}{gain}{dear}"


def cells() -> Iterator[Cell]:
    """All of them, the planted ones first."""
    for size in SIZES:
        for noise, gain in PLANTED:
            yield Cell(size, noise, gain)
    for gain in (0.0, PLANTED[0][1]):
        yield Cell(20, PLANTED[0][0], gain, launch_s=300.0, run_s=60.0, hours=8.0)
    for size in SIZES:
        for run in (0.01, 0.02, 0.05):
            for ratio in (0.0, 0.5, 1.0):
                yield Cell(size, Noise(run, ratio * run))
        yield Cell(size, Noise(0.002, 0.06))
    for size in SIZES:
        for run, launch in ((0.01, 0.005), (0.02, 0.01), (0.05, 0.025), (0.002, 0.06)):
            yield Cell(size, Noise(run, launch, heavy=True))
            yield Cell(size, Noise(run, launch, memory=MEMORY))
            yield Cell(size, Noise(run, launch, drift=DRIFT))
            yield Cell(size, Noise(run, launch, heavy=True, memory=MEMORY, drift=DRIFT))
    for source in json.loads(RECORDED.read_text())["sources"]:
        yield Cell(20, Noise(0.0, 0.0), source=source)


def played(cell: Cell, nights: int, seed: int, launches: float) -> tuple[Floats, Played]:
    """True effects and what the judge made of them."""
    effects = np.zeros((nights, cell.experiments))
    if cell.gain:
        place = np.random.default_rng([seed, 1]).integers(0, cell.experiments, nights)
        effects[np.arange(nights), place] = np.log1p(cell.gain)
    world: MadeUp | Recorded
    if cell.source:
        world = Recorded(json.loads(RECORDED.read_text())["sources"][cell.source], nights, seed)
    else:
        world = MadeUp(cell.noise, nights, launches, seed)
    script = Script(
        effects,
        launch_s=cell.launch_s,
        run_s=cell.run_s,
        time_s=cell.hours * 3600 or np.inf,
        rule=JudgeRule(),
    )
    return effects, Rehearsal(script, world).play()


def figures(cell: Cell, nights: int, seed: int) -> dict[str, Any]:
    """The row of one cell. Drift is spread over as many launches as such a night takes on average."""
    launches = 1.0
    if cell.noise.drift:
        _, pilot = played(Cell(cell.experiments, Noise(cell.noise.run, cell.noise.launch)), PILOT_NIGHTS, seed, 1.0)
        launches = float(pilot.night_launches.mean())
    effects, told = played(cell, nights, seed, launches)
    kept, null = told.rulings == Ruling.KEEP, effects <= 0
    judged = told.rulings >= 0
    row = {
        **asdict(cell),
        "name": cell.name,
        "nights": nights,
        **false_nights(kept & null),
        "expected_false_keeps": float((kept & null).sum(axis=1).mean()),
        "judged": float(judged.sum(axis=1).mean()),
        "null_runs": float(told.runs[null & judged].mean()),
        "null_launches": float(told.launches[null & judged].mean()),
        "night_runs": float(told.night_runs.mean()),
        "night_launches": float(told.night_launches.mean()),
        "night_min": float(told.night_s.mean() / 60),
    }
    if cell.gain:
        gain = ~null
        row |= {
            "found": float(kept[gain].mean()),
            "gain_runs": float(told.runs[gain & judged].mean()),
            "gain_launches": float(told.launches[gain & judged].mean()),
        }
    return row


def false_nights(false_keeps: Floats) -> dict[str, float]:
    """Share of nights with any false keep, with the one-sided 95 % lower bound of Clopper and Pearson."""
    count, nights = int(false_keeps.any(axis=1).sum()), len(false_keeps)
    low = float(stats.beta.ppf(0.05, count, nights - count + 1)) if count else 0.0
    return {"false_nights": count / nights, "false_nights_low": low}


def rival_rows(nights: int, seed: int) -> Iterator[dict[str, Any]]:
    """The other rules: nights without effect, and nights with one planted gain, on the noise of the first goal."""
    noise, gain = PLANTED[0]
    for name, play in RIVALS.items():
        for size in SIZES:
            effects = np.zeros((nights, size))
            kept = play(MadeUp(noise, nights, 1.0, seed), effects)
            row = {"name": name, "experiments": size, "nights": nights, "runs": kept.runs, "launches": kept.launches}
            row |= false_nights(kept.kept)
            effects[np.arange(nights), np.random.default_rng([seed, 1]).integers(0, size, nights)] = np.log1p(gain)
            found = play(MadeUp(noise, nights, 1.0, seed + 1), effects).kept
            yield {**row, "found": float(found[effects > 0].mean())}


def collapse_rows() -> list[dict[str, Any]]:
    """When a run in progress is ended, for candidates that give a share of the baseline's tokens from the start."""
    base = Pace(tok_s=100.0, duration_s=30.0, e2e_p99_s=4.0)
    rows = []
    for share in (0.0, 0.05, 0.1, 0.2):
        ticks = np.arange(0.5, 1000, 0.5)
        ended = next(t for t in ticks if collapsing(float(t), int(share * 100 * t), base, JudgeRule()) is not None)
        whole_s = base.duration_s / share if share else float("inf")
        rows.append({"share": share, "ended_s": float(ended), "whole_run_s": whole_s if share else None})
    return rows


def kept_row(cell: Cell, nights: int, seed: int, out: Path) -> dict[str, Any]:
    """The row of one cell, rehearsed unless `out` has it already."""
    safe = "".join(c if c.isalnum() else "-" for c in cell.name.replace("%", "pc"))
    kept = out / f"{safe}-{nights}-{seed}.json"
    if not kept.exists():
        kept.write_text(json.dumps(figures(cell, nights, seed)))
    return dict(json.loads(kept.read_text()))


def missed(rows: list[dict[str, Any]], collapses: list[dict[str, Any]], goal: dict[str, Any]) -> list[str]:
    """What the goals ask for and the rows don't show."""
    found = []
    for row in rows:
        name = row["name"]
        if row["false_nights"] > goal["max_false_nights"] or row["false_nights_low"] > goal["max_false_nights_low"]:
            found.append(f"{name}: {row['false_nights']:.1%} of nights keep something false")
        if row["hours"]:
            if row["judged"] < goal["dear_judged"]:
                found.append(f"{name}: {row['judged']:.1f} judged")
        elif row["gain"]:
            least = goal["min_found_many" if row["experiments"] >= 50 else "min_found"]
            if row["found"] < least:
                found.append(f"{name}: found in {row['found']:.1%}")
            for key, most in (("gain_runs", "max_gain_runs"), ("gain_launches", "max_gain_launches")):
                if row[key] > goal[most]:
                    found.append(f"{name}: {row[key]:.2f} {key}")
            if row["null_runs"] > goal["max_null_runs"]:
                found.append(f"{name}: {row['null_runs']:.2f} runs to dismiss a null")
    found += [
        f"collapse at {r['share']:.0%}" for r in collapses if r["whole_run_s"] and r["ended_s"] >= r["whole_run_s"]
    ]
    return found


def report(rows: list[dict[str, Any]], rivals: list[dict[str, Any]], collapses: list[dict[str, Any]]) -> Iterator[str]:
    """The tables as text."""
    head = f"{'cell':78} {'false':>6} {'low':>5} {'found':>6} {'runs':>5} {'launch':>6} {'null runs':>9} {'launch':>6}"
    yield f"{head} {'night: launches':>15} {'min':>6} {'judged':>6}"
    for row in rows:
        gain = f"{row['found']:6.1%} {row['gain_runs']:5.2f} {row['gain_launches']:6.2f}" if row["gain"] else " " * 19
        yield (
            f"{row['name']:78} {row['false_nights']:6.1%} {row['false_nights_low']:5.1%} {gain} {row['null_runs']:9.2f}"
            f" {row['null_launches']:6.2f} {row['night_launches']:15.1f} {row['night_min']:6.0f} {row['judged']:6.1f}"
        )
    yield ""
    yield f"other rules at {PLANTED[0][0].text}: nights with a false keep, +{PLANTED[0][1]:.0%} kept, runs, launches"
    for row in rivals:
        yield (
            f"{row['name']:34} {row['experiments']:3} experiments {row['false_nights']:6.1%} {row['found']:6.1%}"
            f" {row['runs']:3} {row['launches']:3}"
        )
    yield ""
    for row in collapses:
        whole = f"{row['whole_run_s']:.0f} s" if row["whole_run_s"] else "never ends"
        yield f"collapse: {row['share']:.0%} of the baseline's speed: ended at {row['ended_s']:.1f} s, whole: {whole}"


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Operating characteristics of the judge, by rehearsed nights.")
    parser.add_argument("--nights", type=int, default=2000, help="nights per cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only cells with this in their name")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="keep each row in this folder, and skip the rows that are there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    return parser.parse_args()


def main() -> int:
    """Rehearses, prints the tables, compares with the goals."""
    options = parse_options()
    goal = tomllib.loads((HERE / "goals.toml").read_text())["judge"]
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        rows = [kept_row(c, options.nights, options.seed, out) for c in cells() if options.only in c.name]
    rivals = list(rival_rows(options.nights, options.seed))
    collapses = collapse_rows()
    print("\n".join(report(rows, rivals, collapses)))
    lacking = missed(rows, collapses, goal)
    for line in lacking:
        print(f"missed: {line}")
    if options.json:
        told = {"goal": goal, "missed": lacking, "rows": rows, "rivals": rivals, "collapses": collapses}
        options.json.write_text(json.dumps(told, indent=1))
    worst = max(row["false_nights"] for row in rows)
    found = "/".join(f"{row['found']:.0%}" for row in rows if row["gain"] == PLANTED[0][1] and not row["hours"])
    print(
        f"judge: {len(rows)} cells of {options.nights} nights, at most {worst:.1%} of nights keep something false,"
        f" +{PLANTED[0][1]:.0%} found in {found} ({'goals met' if not lacking else f'{len(lacking)} MISSED'})"
    )
    return 1 if options.check and lacking else 0


if __name__ == "__main__":
    sys.exit(main())
