"""How many streamed chunks per second the built-in client carries, and whether it says so itself when it is the limit.

It must not tune the client or leave a server behind. The stub server is offered at rising paces, then without any pace;
it sends to every stream on its own schedule whether or not the client keeps up, so a carried rate near the offered one,
read one chunk at a time, is the client's doing. `carried` counts content chunks of completed requests per second. A row
counts for the goal when one client process carried it, nothing failed, and the client did not call itself the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
STUB = HERE / "stub_server.py"
CLIENT = HERE.parent / "tools" / "benches" / "stream_client.py"
OUTPUT_TOKENS = 128
UNPACED_WAVES = 12


class Load(NamedTuple):
    """One row: chunks per second offered over all streams (0: as fast as sockets take them) and client processes."""

    offered_chunks_s: int
    processes: int

    @property
    def name(self) -> str:
        """A file name for the row."""
        return f"offered-{self.offered_chunks_s or 'unpaced'}-processes-{self.processes}"


LOADS = [*(Load(rate, 1) for rate in (5_000, 10_000, 20_000, 25_000, 30_000, 40_000, 60_000, 0)), Load(0, 2)]
COLUMNS = {
    "offered/s": "offered_chunks_s",
    "processes": "processes",
    "carried/s": "carried_chunks_s",
    "chunks/read": "chunks_per_read",
    "failed": "failed",
    "client core": "cpu_share",
    "stub core": "stub_cores",
    "mean lag ms": "mean_lag_ms",
    "p99 lag ms": "p99_lag_ms",
    "ITL mean ms": "itl_mean_ms",
    "bottleneck": "bottleneck",
}


@contextlib.contextmanager
def stub(rate: int, streams: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running stub and its base URL; killed at the end."""
    command = [sys.executable, str(STUB), "--rate", str(rate), "--streams", str(streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, f"http://{process.stdout.readline().split()[1]}"
        finally:
            process.kill()


def waves(load: Load, seconds: float, streams: int) -> int:
    """How many rounds of all streams last about `seconds` at the offered pace."""
    if not load.offered_chunks_s:
        return UNPACED_WAVES
    return max(2, round(seconds * load.offered_chunks_s / (streams * OUTPUT_TOKENS)))


def run_client(load: Load, seconds: float, streams: int, folder: Path) -> dict[str, Any]:
    """The client's result for one row, from a fresh stub."""
    with stub(load.offered_chunks_s, streams) as (process, base_url):
        request = {
            "schema": 1,
            "run_id": load.name,
            "base_url": base_url,
            "concurrency": streams,
            "requests": streams * waves(load, seconds, streams),
            "warmup_requests": streams,
            "prompt": {"kind": "random", "tokens": 32, "vocab_low": 100, "vocab_high": 30_000},
            "output_tokens": OUTPUT_TOKENS,
            "seed": 1,
            "request_deadline_s": 60,
            "run_deadline_s": 300,
            "metrics_path": "/metrics",
            "server_pid": process.pid,
            "sample_interval_s": 0.5,
            "processes": load.processes,
        }
        asked, told = folder / f"{load.name}.request.json", folder / f"{load.name}.result.json"
        asked.write_text(json.dumps(request))
        subprocess.run([sys.executable, str(CLIENT), "--request", str(asked), "--result", str(told)], check=True)
        return dict(json.loads(told.read_text()))


def figures(load: Load, result: dict[str, Any]) -> dict[str, Any]:
    """The row of one result."""
    client, telemetry = result["client"], result["telemetry"]
    return {
        **load._asdict(),
        "carried_chunks_s": result["chunks_s"],
        "failed": result["failed"],
        "itl_mean_ms": result["itl_ms"]["mean"],
        "stub_cores": telemetry["server_cpu_cores"]["mean"],
        "foreign_cores": telemetry["foreign_cpu_cores"]["mean"],
        "peak_concurrency": result["peak_concurrency"],
        **{key: client[key] for key in ("cpu_share", "mean_lag_ms", "p99_lag_ms", "chunks_per_read")},
        "bottleneck": client["bottleneck"],
        "bottleneck_reason": client["bottleneck_reason"],
    }


def row(load: Load, seconds: float, streams: int, out: Path) -> dict[str, Any]:
    """The row of one load, measured unless `out` has it already."""
    kept = out / f"{load.name}.json"
    if not kept.exists():
        measured = {**figures(load, run_client(load, seconds, streams, out)), "streams": streams}
        kept.write_text(json.dumps(measured))
    return dict(json.loads(kept.read_text()))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, one column for each of COLUMNS."""
    cells = [list(COLUMNS), *([shown(key, each[key]) for key in COLUMNS.values()] for each in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def shown(key: str, value: Any) -> str:
    """A cell."""
    if value is None:
        return "-"
    if key == "offered_chunks_s":
        return f"{value:,}" if value else "unpaced"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3f}"


def best(rows: list[dict[str, Any]]) -> float:
    """The highest rate that one client process carried, nothing failing, itself not the limit; 0 if none."""
    sound = (r["carried_chunks_s"] for r in rows if r["processes"] == 1 and not r["failed"] and not r["bottleneck"])
    return max((rate for rate in sound if rate is not None), default=0.0)


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Streamed chunks per second that the built-in client carries.")
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a paced row lasts")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="keep each row in this folder, and skip the rows that are there")
    parser.add_argument("--check", action="store_true", help="exit 1 when the goal is missed")
    return parser.parse_args()


def main() -> int:
    """Measures, prints the table, compares with the goal."""
    options = parse_options()
    goal = tomllib.loads((HERE / "goals.toml").read_text())["client_rate"]
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        rows = [row(load, options.seconds, goal["streams"], out) for load in LOADS]
    carried, limited = best(rows), [each for each in rows if each["bottleneck"]]
    print(table(rows))
    for each in limited:
        print(
            f"the client calls itself the bottleneck at {each['carried_chunks_s']:,.0f}/s: {each['bottleneck_reason']}"
        )
    met = carried >= goal["min_chunks_s"]
    if options.json:
        options.json.write_text(
            json.dumps({"goal": goal, "met": met, "carried_chunks_s": carried, "rows": rows}, indent=1)
        )
    print(
        f"client_rate: {carried:,.0f} chunks/s over {goal['streams']} streams without being the bottleneck"
        f" (goal {goal['min_chunks_s']:,}: {'met' if met else 'MISSED'})"
    )
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
