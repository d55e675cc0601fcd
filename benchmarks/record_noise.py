"""How much equal runs of an unchanged server differ: records the demo's llama.cpp server, launch by launch.

It must not judge or tune. Every launch and every run goes through the product's own target and client, behind a real
sshd. A launch's runs are one file in the folder of `--out`, and are not recorded again. Runs that a session would not
count stay in the file with their reasons and are left out of every figure. `--merge` adds the recording to the noise
that `judge.py` rehearses on. Record on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # the rig lies among the tests

from agent.validity import invalid_reasons  # noqa: E402
from benchmarks.kept import interrupt_on_sigterm  # noqa: E402
from state.models import LoadPoint, ValidityRule, digest  # noqa: E402
from tests.e2e import runs  # noqa: E402
from tests.e2e.rig import Rig, rig  # noqa: E402
from tools.demo import model  # noqa: E402

RECORDED = HERE / "data" / "recorded_noise.json"
PROGRAM = (sys.executable, str(HERE.parent / "tools" / "demo" / "llama_server.py"))
VOCAB_HIGH = 8000
SLOT_TOKENS = 256
LAUNCH_S, RUN_S = 3.0, 5.5
"""What a launch and a run of the default load take about on two idle cores, their surroundings included."""
COLUMNS = ("launch", "runs", "void", "tok/s", "spread %", "foreign cores", "most")

Figures = dict[str, Any]


def settings_of(options: argparse.Namespace) -> Figures:
    """What is recorded: two recordings with the same settings are one."""
    return {
        "threads": options.threads,
        "slots": options.slots,
        "streams": options.streams,
        "requests": options.requests,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "runs": options.runs,
    }


def flags(settings: Figures) -> list[str]:
    """The server's own part of the settings, the rest as in the demo."""
    words = f"--threads {settings['threads']} --parallel {settings['slots']} --flash-attn off --metrics"
    return [*words.split(), "--ctx-size", str(SLOT_TOKENS * settings["slots"])]


def point_of(settings: Figures) -> LoadPoint:
    """The load."""
    return LoadPoint(
        name="noise",
        concurrency=settings["streams"],
        requests=settings["requests"],
        prompt_tokens=settings["prompt_tokens"],
        output_tokens=settings["output_tokens"],
    )


def path_of(out: Path, settings: Figures, launch: int) -> Path:
    """Where the runs of a launch are kept."""
    return out / f"launch-{digest(settings, 8)}-{launch:03}.json"


async def record(host: Rig, settings: Figures, missing: Sequence[int], out: Path) -> None:
    """Record the launches that are missing."""
    workload = runs.workload_of(point_of(settings), vocab_high=VOCAB_HIGH)
    point, rule = workload.load_points[0], ValidityRule()
    began = time.monotonic()
    async with runs.held(host, "noise") as target:
        adoption = await target.adopt()
        for done, launch in enumerate(missing):
            process = await runs.launched(target, f"noise-T{launch}", adoption.spec)
            rows = []
            for run in range(settings["runs"]):
                at = time.time()
                result = await runs.ran(target, f"noise-M{launch}x{run}", process, workload, seed=launch * 1000 + run)
                metrics, seen = result.metrics, result.telemetry
                rows.append(
                    {
                        "at_unix": round(at, 1),
                        "tok_s": metrics.output_tok_s,
                        "duration_s": metrics.duration_s,
                        "server_cpu_cores": seen.server_cpu_cores,
                        "foreign_cpu_cores": seen.foreign_cpu_cores,
                        "foreign_cpu_cores_max": seen.foreign_cpu_cores_max,
                        "steal_share": seen.steal_share,
                        "void": invalid_reasons(metrics, seen, point, rule),
                    }
                )
            kept = {"settings": settings, "engine": adoption.engine_version, "hardware": adoption.hardware}
            path_of(out, settings, launch).write_text(json.dumps({**kept, "launch": launch, "runs": rows}, indent=1))
            left = (time.monotonic() - began) / (done + 1) * (len(missing) - done - 1)
            print(
                f"launch {launch}: {shown([row['tok_s'] for row in rows])} tok/s, {left / 60:.0f} min left", flush=True
            )


def shown(rates: Sequence[float | None]) -> str:
    """Rates in a line."""
    return " ".join("-" if rate is None else f"{rate:.1f}" for rate in rates)


# --- figures ---------------------------------------------------------------------------------------------------------


def counted(launch: Figures) -> list[Figures]:
    """The runs of a launch that a session would count."""
    return [row for row in launch["runs"] if not row["void"] and row["tok_s"]]


def figures(launches: Sequence[Figures]) -> Figures:
    """What the recording says; spreads are standard deviations of logs, None where there is too little."""
    groups = [rows for launch in launches if (rows := counted(launch))]
    logs = [np.log([row["tok_s"] for row in rows]) for rows in groups]
    means = np.array([luck.mean() for luck in logs])
    inner = [luck - luck.mean() for luck in logs if len(luck) > 1]
    free = sum(len(luck) - 1 for luck in inner)
    run_spread = math.sqrt(sum(float(luck @ luck) for luck in inner) / free) if free else None
    between = float(np.var(means, ddof=1)) if len(means) > 1 else None
    each = len(groups) / sum(1 / len(rows) for rows in groups) if groups else 1.0  # harmonic mean of the runs
    launch_spread = None
    if between is not None and run_spread is not None:
        launch_spread = math.sqrt(max(0.0, between - run_spread**2 / each))
    every = [row for launch in launches for row in launch["runs"]]
    foreign = [row["foreign_cpu_cores"] for row in every if row["foreign_cpu_cores"] is not None]
    return {
        "launches": len(groups),
        "runs": sum(map(len, groups)),
        "void": len(every) - sum(map(len, groups)),
        "tok_s": float(np.exp(np.concatenate(logs).mean())) if logs else None,
        "run_spread": run_spread,
        "launch_spread": launch_spread,
        "spread_of_means": None if between is None else math.sqrt(between),
        "largest_run_deviation": max((float(abs(luck).max()) for luck in inner), default=None),
        "drift": drift(groups),
        "autocorrelation": autocorrelation(inner),
        "autocorrelation_of_pure_chance": -1 / each if groups else None,
        "foreign_cpu_cores": statistics.fmean(foreign) if foreign else None,
        "foreign_cpu_cores_most": max(foreign, default=None),
    }


def drift(groups: Sequence[Sequence[Figures]]) -> Figures | None:
    """Change of the log rate over the whole recording by a line through the launches, with its standard error."""
    if len(groups) < 3:
        return None
    at = np.array([statistics.fmean(row["at_unix"] for row in rows) for rows in groups])
    level = np.array([np.log([row["tok_s"] for row in rows]).mean() for rows in groups])
    off = at - at.mean()
    slope = float(off @ level / (off @ off))
    rest = level - level.mean() - slope * off
    error = math.sqrt(float(rest @ rest) / (len(groups) - 2) / float(off @ off))
    whole = float(at.max() - at.min())
    return {"change": slope * whole, "error": error * whole, "minutes": whole / 60}


def autocorrelation(inner: Sequence[Any]) -> float | None:
    """Of a run with the run before it in the same launch; pure chance shows -1/runs, since the mean is taken off."""
    pairs = sum(float(luck[1:] @ luck[:-1]) for luck in inner)
    whole = sum(float(luck @ luck) for luck in inner)
    return pairs / whole if whole else None


def table(launches: Sequence[Figures]) -> Iterator[str]:
    """A line for each launch."""
    yield "  ".join(f"{name:>13}" for name in COLUMNS)
    for launch in launches:
        rows, foreign = counted(launch), [row["foreign_cpu_cores"] or 0.0 for row in launch["runs"]]
        rates = [row["tok_s"] for row in rows]
        level = f"{math.exp(statistics.fmean(map(math.log, rates))):.1f}" if rates else "-"
        spread = f"{100 * statistics.stdev(map(math.log, rates)):.2f}" if len(rates) > 1 else "-"
        void = len(launch["runs"]) - len(rows)
        cells = (
            launch["launch"],
            len(rows),
            void,
            level,
            spread,
            f"{statistics.fmean(foreign):.2f}",
            f"{max(foreign):.2f}",
        )
        yield "  ".join(f"{cell!s:>13}" for cell in cells)


def summary(told: Figures) -> Iterator[str]:
    """The figures in words."""

    def percent(value: float | None) -> str:
        return "not known" if value is None else f"{100 * value:.2f} %"

    yield f"run spread: {percent(told['run_spread'])}, the largest deviation {percent(told['largest_run_deviation'])}"
    yield f"launch spread: {percent(told['launch_spread'])} (means of launches: {percent(told['spread_of_means'])})"
    if told["drift"] is not None:
        line = told["drift"]
        yield f"drift: {percent(line['change'])} ± {percent(line['error'])} over {line['minutes']:.0f} min"
    if told["autocorrelation"] is not None:
        chance = told["autocorrelation_of_pure_chance"]
        yield f"autocorrelation within a launch: {told['autocorrelation']:+.2f} (pure chance: {chance:+.2f})"
    if told["foreign_cpu_cores"] is not None:
        most = told["foreign_cpu_cores_most"]
        yield f"other work: {told['foreign_cpu_cores']:.2f} cores on average, {most:.2f} at most"


# --- the file that judge.py reads ------------------------------------------------------------------------------------


def source_name(settings: Figures) -> str:
    """The name of the source, as the tables show it."""
    threads = f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    return f"llama.cpp demo, {threads}, {settings['streams']} streams"


def merge(path: Path, launches: Sequence[Figures]) -> str:
    """Put the recording among the sources of `path`, one list for each launch; the source's name."""
    known = json.loads(path.read_text())
    settings = launches[0]["settings"]
    name = source_name(settings)
    lists = [[row["tok_s"] for row in counted(launch)] for launch in launches]
    known["sources"][name] = [rates for rates in lists if rates]
    known.setdefault("settings", {})[name] = {
        "engine": launches[0]["engine"],
        "hardware": launches[0]["hardware"],
        "kernel": platform.release(),
        **settings,
    }
    path.write_text(text_of(known))
    return name


def text_of(known: Figures) -> str:
    """The file with a line for each source, so that a change shows which one changed."""

    def block(rows: Figures) -> str:
        return ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in rows.items())

    parts = [f" {json.dumps(key)}: {{\n{block(known[key])}\n }}" for key in ("sources", "settings") if key in known]
    return "{\n" + ",\n".join([f' "about": {json.dumps(known["about"])}', *parts]) + "\n}\n"


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Records how much equal runs of the demo's server differ.")
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--runs", type=int, default=10, help="runs of each launch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8, help="requests of each run")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, help="write all figures and runs here")
    parser.add_argument(
        "--out", type=Path, help="keep each launch in this folder, and skip the launches that are there"
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="?",
        const=RECORDED,
        help="add the recording to this file (benchmarks/data/recorded_noise.json)",
    )
    return parser.parse_args()


def main() -> int:
    """Records what is missing, prints tables, merges."""
    options = parse_options()
    interrupt_on_sigterm()
    settings = settings_of(options)
    with tempfile.TemporaryDirectory(prefix="noise-") as scratch:
        out = (options.out or Path(scratch) / "out").resolve()
        out.mkdir(parents=True, exist_ok=True)
        paths = {launch: path_of(out, settings, launch) for launch in range(1, options.launches + 1)}
        missing = [launch for launch, path in paths.items() if not path.exists()]
        if missing:
            minutes = len(missing) * (LAUNCH_S + options.runs * RUN_S) / 60
            print(
                f"{len(missing)} launches of {options.runs} runs are to be recorded, about {minutes:.0f} min",
                flush=True,
            )
            with rig(Path(scratch) / "host", model.fetch(), PROGRAM) as host:
                host.start_server(*flags(settings))
                asyncio.run(record(host, settings, missing, out))
        launches = [json.loads(path.read_text()) for path in paths.values()]
    told = figures(launches)
    print("\n".join([*table(launches), "", *summary(told)]))
    if options.json:
        options.json.write_text(json.dumps({"settings": settings, **told, "recorded": launches}, indent=1))
    if options.merge and told["runs"]:
        print(f"merged into {options.merge} as {merge(options.merge, launches)!r}")
    rate = "no figure" if told["tok_s"] is None else f"{told['tok_s']:.1f} tok/s"
    print(f"record_noise: {told['runs']} runs in {told['launches']} launches, {told['void']} void, {rate}")
    return 0 if told["runs"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("record_noise: interrupted; no process is left, finished launches are kept with --out")
