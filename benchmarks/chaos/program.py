"""The program behind `benchmarks/chaos.py`: rounds, their lines, the table, and the comparison with the goal."""

from __future__ import annotations

import argparse
import json
import shutil
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.chaos import faults, invariants, record
from benchmarks.chaos.faults import KINDS, Plan
from benchmarks.chaos.ground import ground, lacking
from benchmarks.chaos.story import Round
from benchmarks.kept import interrupt_on_sigterm, place
from tools.demo import model

GOALS = Path(__file__).resolve().parents[1] / "goals.toml"
COLUMNS = ("fault", "rounds", "hit", "ok", "broken", "skipped", "resumes", "seconds")
Figures = dict[str, Any]


def play(plan: Plan, folder: Path, gguf: Path) -> Figures:
    """Play one round in `folder`, which is removed when every invariant holds and kept when not."""
    missing = [why for need in sorted(plan.needs) if (why := lacking(need)) is not None]
    if missing:
        return {**told(plan), "end": "skipped", "skipped": "; ".join(missing), "broken": []}
    shutil.rmtree(folder, ignore_errors=True)
    with ground(folder, gguf, plan.needs) as made:
        a_round = Round(plan, made)
        story = a_round.play()
        seen = record.read(made.host.database)
        broken = invariants.check(plan, made, story, a_round.original)
        figures = {
            **told(plan),
            "resumes": story.resumes,
            "seconds": round(story.seconds, 1),
            "end": outcome(seen),
            "exits": [run.exit for run in story.runs],
            "starts": len(made.host.starts()),
            "runs": len(made.host.runs()),
            "skipped": None,
            "broken": [f"{name}: {what}" for name, what in broken],
        }
    if figures["broken"]:
        figures["kept"] = str(folder)
    else:
        shutil.rmtree(folder)
    return figures


def told(plan: Plan) -> Figures:
    """What is known of a round by its plan and what became of it."""
    return {
        "round": plan.number,
        "seed": plan.seed,
        "faults": [
            {
                "kind": fault.kind.name,
                "hit_s": None if fault.hit_s is None else round(fault.hit_s, 1),
                "phase": fault.phase,
                "told": fault.told(),
            }
            for fault in plan.faults
        ],
    }


def outcome(seen: record.Record | None) -> str:
    """How the session ended, in a word or two."""
    if seen is None or seen.session is None:
        return "no session"
    if seen.session["status"] != "done":
        return str(seen.session["status"])
    return "done, kept" if seen.roles["final"] != seen.roles["original"] else "done, original"


def line(figures: Figures) -> str:
    """One round in one line."""
    head = f"{figures['round']:>3}  seed {figures['seed']:<7}"
    hits = "; then ".join(fault["told"] for fault in figures["faults"])
    if figures["skipped"]:
        return f"{head}  {hits}  SKIPPED: {figures['skipped']}"
    verdict = "ok" if not figures["broken"] else f"BROKEN {' | '.join(figures['broken'])}  kept in {figures['kept']}"
    exits = ",".join(map(str, figures["exits"]))
    return (
        f"{head}  {hits}  resumes {figures['resumes']} (exits {exits})  {figures['seconds']:.0f} s  "
        f"{figures['end']}  {verdict}"
    )


def table(rows: Iterable[Figures]) -> str:
    """What came of each kind of fault; a round with two faults counts for both."""
    sums: dict[str, dict[str, float]] = {name: defaultdict(float) for name in KINDS}
    for row in rows:
        for fault in row["faults"]:
            of = sums[fault["kind"]]
            of["rounds"] += 1
            of["skipped"] += bool(row["skipped"])
            of["broken"] += bool(row["broken"])
            of["ok"] += not row["skipped"] and not row["broken"]
            of["hit"] += fault["hit_s"] is not None
            of["resumes"] += row.get("resumes", 0)
            of["seconds"] += row.get("seconds", 0.0)
    cells = [list(COLUMNS)]
    for name, of in sums.items():
        if of["rounds"]:
            cells.append([name, *(f"{of[column]:.0f}" for column in COLUMNS[1:])])
    widths = [max(len(row[place]) for row in cells) for place in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    )


def figures_of(plan: Plan, out: Path, gguf: Path) -> Figures:
    """The round's figures, played unless `out` has them already."""
    path = out / f"round-{plan.seed.replace('/', '-')}.json"
    if not path.exists():
        folder = out / f"round-{plan.number}"
        try:
            figures = play(plan, folder, gguf)
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        path.write_text(json.dumps(figures, indent=1))
    return dict(json.loads(path.read_text()))


def parse_options(goal: Figures) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Whole sessions under faults at random times, judged from outside.")
    parser.add_argument("--rounds", type=int, default=goal["rounds"], help="how many rounds")
    parser.add_argument("--first", type=int, default=1, help="number of the first round")
    parser.add_argument("--seed", type=int, default=1, help="what the faults and their times are drawn from")
    parser.add_argument("--only", choices=KINDS, metavar="FAULT", help=f"one kind of fault: {', '.join(KINDS)}")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="keep each round in this folder, and skip the rounds that are there")
    parser.add_argument("--check", action="store_true", help="exit 1 when the goal is missed")
    return parser.parse_args()


def main() -> int:
    """Plays the rounds, prints lines and table, compares with the goal."""
    goal = tomllib.loads(GOALS.read_text())["chaos"]
    options = parse_options(goal)
    interrupt_on_sigterm()
    gguf = model.fetch()
    rows = []
    with place(options.out, "chaos-") as out:
        for number in range(options.first, options.first + options.rounds):
            rows.append(figures_of(faults.plan(options.seed, number, options.only), out, gguf))
            print(line(rows[-1]), flush=True)
    broken, skipped = sum(bool(row["broken"]) for row in rows), sum(bool(row["skipped"]) for row in rows)
    met = broken <= goal["max_broken_rounds"]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"goal": goal, "met": met, "broken": broken, "rows": rows}, indent=1))
    print(
        f"chaos: {len(rows) - broken - skipped} of {len(rows)} rounds of seed {options.seed} held every invariant, "
        f"{broken} broken, {skipped} skipped (goal: {goal['max_broken_rounds']} broken: {'met' if met else 'MISSED'})"
    )
    return 1 if options.check and not met else 0
