"""Whether the judge is right about a real server: whole sessions, with the truth planted in the server's own process.

It must not touch a figure. What is planted is a child that holds the server's process still for a known share of the
time, or a variable that no engine reads. One night has twenty experiments without any effect, one has ten that slow the
server down by 5 %, and in ten nights a parent is held still and can be freed, for +10 %. Each night is a session of the
product against the demo's llama.cpp server behind a real sshd. The parts lie in `planted/`. Run it on a machine that
does nothing else.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the parts use the rig of the tests
    try:
        sys.exit(importlib.import_module("benchmarks.planted.program").main())
    except KeyboardInterrupt:
        sys.exit("real_night: interrupted; nothing of the night is left, finished nights are kept with --out")
