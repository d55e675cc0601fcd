"""Whether the planted share is what the server really loses: launches with and without it, in turn; it judges nothing.

Two witnesses: the rate that the client saw, which has all the noise of a night, and the CPU time of the server's
process, which has hardly any.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planted.nights import FLAGS, GAIN_SHARE, SLOW_SHARE, Size, program
from benchmarks.planted.server import VARIABLE
from state.models import EnvChange, LoadPoint
from tests.e2e import runs
from tests.e2e.rig import Rig, rig
from tools.target import RunResult

SHARES = (0.0, SLOW_SHARE, GAIN_SHARE)
RUNS = 2
Figures = dict[str, Any]


async def measure(host: Rig, rounds: Sequence[int], size: Size, out: Path) -> None:
    """A file for each round, with a launch of each share in an order that turns from round to round."""
    point = LoadPoint(
        name="few", concurrency=4, requests=size.requests, prompt_tokens=16, output_tokens=size.output_tokens
    )
    workload = runs.workload_of(point, vocab_high=8000)
    async with runs.held(host, "share") as target:
        spec = (await target.adopt()).spec
        for number in rounds:
            turn = number % len(SHARES)
            seen = {}
            for share in SHARES[turn:] + SHARES[:turn]:
                key = f"{number}x{SHARES.index(share)}"
                change = EnvChange(name=VARIABLE, value=f"{share:.6f}" if share else None)
                process = await runs.launched(target, f"share-T{key}", target.derive(spec, (change,)))
                results = [
                    await runs.ran(target, f"share-M{key}x{run}", process, workload, seed=number * 100 + run)
                    for run in range(RUNS)
                ]
                seen[f"{share:.4f}"] = _means(results)
            path_of(out, number, size).write_text(json.dumps(seen, indent=1))
            print(f"share    round {number}: {_line(seen)}", flush=True)


def _means(results: Sequence[RunResult]) -> Figures:
    """Mean logs of a launch's runs."""
    rates = [math.log(result.metrics.output_tok_s or math.nan) for result in results]
    cpu = [math.log(result.telemetry.server_cpu_cores or math.nan) for result in results]
    foreign = [result.telemetry.foreign_cpu_cores or 0.0 for result in results]
    return {
        "log_tok_s": statistics.fmean(rates),
        "log_cpu": statistics.fmean(cpu),
        "foreign_cpu_cores": statistics.fmean(foreign),
    }


def _line(seen: Figures) -> str:
    parts = (f"{float(share):.1%} {math.exp(row['log_tok_s']):.1f} tok/s" for share, row in sorted(seen.items()))
    return ", ".join(parts)


def path_of(out: Path, number: int, size: Size) -> Path:
    """Where a round is kept."""
    return out / f"share-{number:02}-{size.name}.json"


def measured(rounds: int, size: Size, out: Path, scratch: Path, gguf: Path) -> Iterator[Figures]:
    """What each share costs by both witnesses, measured unless `out` has the rounds already; fractions."""
    missing = [number for number in range(1, rounds + 1) if not path_of(out, number, size).exists()]
    if missing:
        with rig(scratch, gguf, program()) as host:
            host.start_server(*FLAGS.split())
            asyncio.run(measure(host, missing, size, out))
        shutil.rmtree(scratch)
    seen = [json.loads(path_of(out, number, size).read_text()) for number in range(1, rounds + 1)]
    for share in SHARES[1:]:
        yield {"share": share, "rounds": rounds, **_lost(seen, share, "log_tok_s"), **_lost(seen, share, "log_cpu")}


def _lost(seen: Sequence[Figures], share: float, witness: str) -> Figures:
    """The share that is missing by a witness, and its standard error over the rounds."""
    pairs = [row[f"{share:.4f}"][witness] - row["0.0000"][witness] for row in seen]
    lost = -math.expm1(statistics.fmean(pairs))
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    name = witness.removeprefix("log_")
    return {f"lost_{name}": lost, f"error_{name}": error}


def told(row: Figures) -> str:
    """One share in one line."""

    def each(name: str) -> str:
        error = row[f"error_{name}"]
        return f"{row[f'lost_{name}']:.2%}" + ("" if error is None else f" ± {error:.2%}")

    return (
        f"share    planted {row['share']:.2%}: {each('cpu')} of the server's CPU time and {each('tok_s')} of tok/s"
        f" are missing, {row['rounds']} rounds"
    )
