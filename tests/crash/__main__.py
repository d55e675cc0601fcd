"""`python -m tests.crash`: kill Ratchet at every point and in its resumes, look from outside, and print the table.

Without options the simulated target, all of it; `--real` a real OpenSSH server and a real llama.cpp server. The exit
code is 1 when anything was repeated, lost, left over, or not known-good at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.crash import real, simulated
from tests.crash.nights import NIGHTS
from tests.crash.report import Case, Ledger, rows, show

MEMORY = Path("/dev/shm")
"""A kill of a process loses nothing that was written, so sessions that are to be killed need no disk."""


def main() -> int:
    """Run what is asked for; the exit code."""
    asked = _asked()
    console = Console(width=max(Console().width, 120))
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="ratchet-crash-") as scratch:
        out = asked.out or Path(scratch) / "out"
        began = time.monotonic()
        if asked.real:
            title, ledger = "a real sshd and a real llama.cpp server", Ledger(out / "real.jsonl")
            real.walk((asked.out or Path(scratch)) / "rig", ledger, console)
            show(console, title, ledger.cases.values())
            cases += ledger.cases.values()
        for name in () if asked.real else asked.night or NIGHTS:
            ledger = Ledger(out / f"{name}-{asked.nested}.jsonl")
            whole = simulated.every_point(Path(scratch) / name, ledger, NIGHTS[name], asked.nested, asked.short)
            title = f"the simulated target, {name}: {len(whole.points)} points, "
            title += f"killed again in `resume`: {asked.nested}"
            show(console, title, ledger.cases.values())
            cases += ledger.cases.values()
        took = time.monotonic() - began
    broken = [case for case in cases if not case.ok]
    if asked.json is not None:
        table = [row._asdict() for row in rows(cases)]
        told = {"rows": table, "broken": [case._asdict() for case in broken], "cases": len(cases)}
        asked.json.write_text(json.dumps({**told, "seconds": took}, indent=1))
    word = "ok" if not broken else f"{len(broken)} BROKEN"
    console.print(f"{len(cases)} sessions killed and taken up again in {took:.0f} s: {word}")
    return 1 if broken or not cases else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--real", action="store_true", help="one session on real parts, killed at every point in turn")
    parser.add_argument("--short", action="store_true", help="a shorter session, each point once, little beside")
    parser.add_argument(
        "--night", action="append", choices=NIGHTS, help="only this session on the simulated target (may be repeated)"
    )
    parser.add_argument(
        "--nested",
        choices=("no", "first", "all"),
        help="kills in the resume: none, until it is back where an undisturbed session is (default), or everywhere",
    )
    parser.add_argument("--json", type=Path, help="write the table and all figures there")
    parser.add_argument("--out", type=Path, help="folder that keeps finished cases, which are not done again")
    asked = parser.parse_args()
    asked.nested = asked.nested or ("no" if asked.short else "first")
    return asked


if __name__ == "__main__":
    sys.exit(main())
