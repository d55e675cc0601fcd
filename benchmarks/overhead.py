"""How much of a session's time is Ratchet's own, and do its steps grow dearer? Whole sessions, watched from inside.

It must not change what a session does. The demo and a session on a server that takes a minute to start run in this
process with a target that notes when it stops, loads, measures and waits; what is left of the wall time is the agent's
own. A session of a thousand experiments on a simulated target shows what a step costs late against early. The parts lie
in `waits/`. Run it on a machine that does nothing else.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the parts use the rig of the tests
    try:
        sys.exit(importlib.import_module("benchmarks.waits.program").main())
    except KeyboardInterrupt:
        sys.exit("overhead: interrupted; what is finished is kept with --out")
