"""Whole sessions of the product in this process, against real servers behind real SSH, on a target that is watched."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

from rich.console import Console

from agent import demo, operate
from agent.config import load
from benchmarks.waits import account
from benchmarks.waits.record import Record, watched
from benchmarks.waits.slow_start import VARIABLE
from tests.e2e.rig import FASTER, rig
from tools.demo import model

SLOW_START = Path(__file__).with_name("slow_start.py")
HARMLESS = """
[[experiments]]
id = "no-change"
title = "Another limit of the HTTP queue"
hypothesis = "it changes nothing here, so it is dismissed"
changes = [{ kind = "flag", name = "--threads-http", value = "3" }]
expected_gain = 0.1
"""


def play_demo(folder: Path) -> account.Figures:
    """The demo."""
    record, said = Record(), io.StringIO()
    code = asyncio.run(demo.run_demo(folder, False, Console(file=said, width=160), watched(record)))
    return _figures("demo", folder / "state.db", record, code, said.getvalue())


def play_slow(folder: Path, launch_s: float) -> account.Figures:
    """A session on a server whose every start takes `launch_s` and longer."""
    record, said = Record(), io.StringIO()
    with rig(folder, model.fetch(), (sys.executable, str(SLOW_START))) as host:
        host.around_server = {VARIABLE: str(launch_s)}
        host.start_server()
        session = host.write_session(HARMLESS + FASTER, start_deadline_s=int(3 * launch_s + 60), requests=6)
        console = Console(file=said, width=160)
        code = asyncio.run(operate.start(load(session), host.database, console, kind=watched(record)))
        return _figures("slow", host.database, record, code, said.getvalue())


def _figures(name: str, database: Path, record: Record, code: int, said: str) -> account.Figures:
    if code != 0:
        sys.exit(f"the {name} session ended with {code}:\n{said[-3000:]}")
    table = account.rows(database, record)
    return {"name": name, "rows": table, **account.summed(table)}
