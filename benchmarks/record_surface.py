"""Records how the demo's llama.cpp server does in every combination of a few settings: a surface to search on.

It must not judge or tune. Every launch and every run goes through the product's own target and client, behind a real
sshd. The combinations are launched in a shuffled order, all of them once before any of them again, so that a slow
drift of the machine is not taken for an effect. A launch is one file in the folder of `--out` and is not recorded
again. Runs that a session would not count stay in the file with their reasons. Record on a machine that does nothing
else; whoever wants it for a moment can lock the file of `--turns`, which is held during each launch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # the rig lies among the tests

from agent.validity import invalid_reasons  # noqa: E402
from benchmarks.kept import interrupt_on_sigterm  # noqa: E402
from benchmarks.searching.sessions import HALF_IN_FLIGHT  # noqa: E402
from state.models import Change, Failure, LaunchSpec, LoadPoint, ValidityRule, digest  # noqa: E402
from tests.e2e import runs  # noqa: E402
from tests.e2e.rig import Rig, rig  # noqa: E402
from tools.demo import model  # noqa: E402
from tools.remote import RemoteTarget  # noqa: E402
from tools.target import Ready  # noqa: E402

SPACE = HERE / "data" / "llamacpp_space.json"
SURFACE = HERE / "data" / "llamacpp_surface.jsonl"
PROGRAM = (sys.executable, str(HERE.parent / "tools" / "demo" / "llama_server.py"))
VOCAB_HIGH = 8000
LAUNCH_S = 8.0
"""What a launch with its runs takes about on two idle cores."""
RULE = ValidityRule.model_validate(HALF_IN_FLIGHT)
TRIES = 3
"""How often a run is taken until a session would count it."""
CHANGES: TypeAdapter[tuple[Change, ...]] = TypeAdapter(tuple[Change, ...])

Figures = dict[str, Any]
Setting = tuple[str, ...]
"""The value of every knob, in the space's order."""


def settings_of(space: Figures) -> list[Setting]:
    """Every combination; the first is what a session finds."""
    return list(itertools.product(*(knob["values"] for knob in space["knobs"])))


def changes_of(space: Figures, setting: Setting) -> tuple[Change, ...]:
    """What brings a server into a setting."""
    parts = (knob["values"][value] for knob, value in zip(space["knobs"], setting, strict=True))
    return CHANGES.validate_python(list(itertools.chain.from_iterable(parts)))


def schedule(space: Figures, launches: int, seed: int) -> list[tuple[int, Setting]]:
    """The launches in their order: the whole space once, then again."""
    order: list[tuple[int, Setting]] = []
    for launch in range(launches):
        settings = settings_of(space)
        random.Random(f"{seed}/{launch}").shuffle(settings)
        order += [(launch, setting) for setting in settings]
    return order


def path_of(out: Path, space: Figures, launch: int, setting: Setting) -> Path:
    """Where a launch is kept; a changed space is another recording."""
    return out / f"{digest(space, 8)}-{launch}-{'-'.join(setting)}.json"


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """The machine for us alone, among those who lock the same file."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def record(
    host: Rig, space: Figures, missing: Sequence[tuple[int, Setting]], out: Path, turns: Path | None
) -> None:
    """Record the launches that are missing."""
    points = [LoadPoint.model_validate(point) for point in space["load_points"]]
    began = time.monotonic()
    async with runs.held(host, "surface") as target:
        adoption = await target.adopt()
        about = {"engine": adoption.engine_version, "hardware": adoption.hardware}
        for done, (launch, setting) in enumerate(missing):
            spec = target.derive(adoption.spec, changes_of(space, setting))
            with turn(turns):
                row = await one_launch(target, f"surface-{launch}-{digest(setting, 8)}", spec, points, launch)
            kept = {"launch": launch, "setting": list(setting), **row, **about}
            path_of(out, space, launch, setting).write_text(json.dumps(kept))
            left = (time.monotonic() - began) / (done + 1) * (len(missing) - done - 1)
            print(f"{launch} {' '.join(setting)}: {shown(row)}; {left / 60:.0f} min left", flush=True)


async def one_launch(
    target: RemoteTarget, name: str, spec: LaunchSpec, points: Sequence[LoadPoint], launch: int
) -> Figures:
    """A launch with one counted run at every load point; or why it did not come up."""
    at = time.time()
    key = f"{name}-T"  # a letter tells a launch from a run; who serves is stopped by it
    await target.launch(key, spec)
    outcome = await target.await_ready(key)
    start: Figures = {"at_unix": round(at, 1), "start_s": round(time.time() - at, 2)}
    if not isinstance(outcome, Ready):
        assert isinstance(outcome, Failure)
        return {**start, "failure": outcome.model_dump(mode="json", include={"failure_class", "cause"})}
    rows: list[Figures] = []
    for point in points:
        for attempt in range(TRIES):
            began = time.monotonic()
            workload = runs.workload_of(point, vocab_high=VOCAB_HIGH)
            seed = random.Random(f"{name}/{point.name}/{attempt}").randrange(1 << 30)
            result = await runs.ran(target, f"{name}-M{point.name}x{attempt}", outcome.process, workload, seed)
            metrics, seen = result.metrics, result.telemetry
            void = invalid_reasons(metrics, seen, point, RULE)
            rows.append(
                {
                    "point": point.name,
                    "tok_s": metrics.output_tok_s,
                    "duration_s": metrics.duration_s,
                    "wall_s": round(time.monotonic() - began, 2),
                    "ttft_p50_ms": metrics.ttft_ms.p50,
                    "ttft_p99_ms": metrics.ttft_ms.p99,
                    "tpot_p50_ms": metrics.tpot_ms.p50,
                    "tpot_p99_ms": metrics.tpot_ms.p99,
                    "server_cpu_cores": seen.server_cpu_cores,
                    "foreign_cpu_cores": seen.foreign_cpu_cores,
                    "steal_share": seen.steal_share,
                    "void": void,
                }
            )
            if not void:
                break
    return {**start, "runs": rows}


def shown(row: Figures) -> str:
    """A launch in a few words."""
    if "failure" in row:
        return f"failed after {row['start_s']:.1f} s: {row['failure']['cause']}"
    rates = " ".join(f"{run['point']} {run['tok_s'] or 0:.1f}{' void' if run['void'] else ''}" for run in row["runs"])
    return f"up after {row['start_s']:.1f} s, tok/s {rates}"


def summary(space: Figures, launches: Sequence[Figures]) -> Iterator[str]:
    """The recording in words."""
    failed = {tuple(launch["setting"]) for launch in launches if "failure" in launch}
    up = [launch for launch in launches if "failure" not in launch]
    yield f"{len({tuple(one['setting']) for one in up})} settings came up, {len(failed)} never or not always"
    for point in space["load_points"]:
        groups: dict[Setting, list[float]] = {}
        for launch in up:
            for run in launch["runs"]:
                if run["point"] == point["name"] and run["tok_s"] and not run["void"]:
                    groups.setdefault(tuple(launch["setting"]), []).append(run["tok_s"])
        if not groups:
            continue
        spreads = [statistics.stdev(rates) / statistics.fmean(rates) for rates in groups.values() if len(rates) > 1]
        means = {setting: statistics.fmean(rates) for setting, rates in groups.items()}
        best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        spread = f"{100 * statistics.median(spreads):.1f} % between launches" if spreads else "no repeat yet"
        yield f"{point['name']}: {len(groups)} settings, {spread}; best {means[best]:.1f} tok/s ({' '.join(best)})"
        yield f"{'':>{len(point['name'])}}  worst {means[worst]:.1f} tok/s ({' '.join(worst)})"


def merge(path: Path, launches: Sequence[Mapping[str, Any]]) -> None:
    """The recording as one file, a line for each launch."""
    path.write_text("".join(json.dumps(launch) + "\n" for launch in launches))


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Records the demo's server in every combination of a few settings.")
    parser.add_argument("--launches", type=int, default=2, help="of each setting")
    parser.add_argument("--limit", type=int, help="record at most so many launches now")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument("--json", type=Path, help="write all launches here, as one list")
    parser.add_argument("--out", type=Path, help="keep each launch in this folder, and skip those that are there")
    parser.add_argument("--turns", type=Path, help="lock this file during each launch")
    parser.add_argument("--merge", action="store_true", help=f"write what search.py reads ({SURFACE.name})")
    return parser.parse_args()


def main() -> int:
    """Records what is missing, prints a summary, merges."""
    options = parse_options()
    interrupt_on_sigterm()
    space = json.loads(SPACE.read_text())
    with tempfile.TemporaryDirectory(prefix="surface-") as scratch:
        out = (options.out or Path(scratch) / "out").resolve()
        out.mkdir(parents=True, exist_ok=True)
        planned = schedule(space, options.launches, options.seed)
        missing = [one for one in planned if not path_of(out, space, *one).exists()][: options.limit]
        if missing:
            minutes = len(missing) * LAUNCH_S / 60
            print(f"{len(missing)} launches are to be recorded, about {minutes:.0f} min", flush=True)
            with rig(Path(scratch) / "host", model.fetch(), PROGRAM) as host:
                host.start_server(*space["base"].split())
                asyncio.run(record(host, space, missing, out, options.turns))
        paths = [path_of(out, space, *one) for one in planned]
        launches = [json.loads(path.read_text()) for path in paths if path.exists()]
    print("\n".join(summary(space, launches)))
    if options.json:
        options.json.write_text(json.dumps(launches, indent=1))
    if options.merge:
        merge(SURFACE, launches)
    settings = len({tuple(launch["setting"]) for launch in launches})
    print(f"record_surface: {len(launches)} launches of {settings} settings")
    return 0 if launches else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("record_surface: interrupted; no process is left, finished launches are kept with --out")
