"""Ratchet against other planners on the demo's real llama.cpp server, with the same wall time for each.

It must not judge by what was measured in a search: afterwards the settings that were left are launched side by side, in
turn, several times, and only that counts. All of them reach the server through the product's own target behind a real
sshd: Ratchet as a whole session, the others as their users run them, a launch and one run at each load point for a
trial. Each search is one file in the folder of `--out`. The parts lie in `searching/`. Run it on a machine that does
nothing else.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the parts use the rig of the tests
    try:
        sys.exit(importlib.import_module("benchmarks.searching.live").main())
    except KeyboardInterrupt:
        sys.exit("search_live: interrupted; no process is left, finished searches are kept with --out")
