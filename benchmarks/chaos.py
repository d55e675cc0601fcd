"""Whether a session survives what a night can bring: faults at random times on a real sshd and a real server.

It must not know how Ratchet works. Each round is a whole session of three experiments, with the agent as a process;
one or two faults hit it, it is resumed until it ends, and then ten invariants are looked at from outside: the server's
own start log, the log of benchmark clients, procfs, job folders, plain SQL on state.db, exit codes and the report. The
parts lie in `chaos/`; `docs/explanation/chaos.md` tells about them.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the parts use the rig of the tests
    try:
        sys.exit(importlib.import_module("benchmarks.chaos.program").main())
    except KeyboardInterrupt:
        sys.exit("chaos: interrupted; nothing of the round is left, finished rounds are kept with --out")
