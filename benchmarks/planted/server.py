"""The demo's llama.cpp server with a planted slowness: a child holds the process still for a known share of the time.

`python server.py ARGUMENTS` takes the arguments of `tools/demo/llama_server.py`. With LLAMA_PLANTED_PAUSE=0.05 in its
environment the process stands still for 5 % of the time, in short slices, so that it does 5 % less work whatever it
computes. It must not touch a flag, an answer or a figure, and never leaves the process stopped or the child behind.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

SERVER = Path(__file__).resolve().parents[2] / "tools" / "demo" / "llama_server.py"
VARIABLE = "LLAMA_PLANTED_PAUSE"
PERIOD_S = 0.1
"""One pause in each; far below the length of a run."""
MOST_SHARE = 0.95
LONGEST_S = 3 * PERIOD_S
"""Of one pause, however much the child is behind: nobody may take the server for a hanging one."""
PR_SET_PDEATHSIG = 1
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def share_of(text: str) -> float:
    """The planted share; exits with an error when it is none."""
    with contextlib.suppress(ValueError):
        share = float(text)
        if 0 <= share <= MOST_SHARE:
            return share
    sys.exit(f"error: {VARIABLE}={text!r} is not a number from 0 to {MOST_SHARE}")


def plant(share: float) -> None:
    """Leave a child that holds this process still for that share of the time, for as long as it lives."""
    parent = os.getpid()
    if os.fork():
        return
    for number in ENDINGS:  # they are meant for the server; the child ends with it
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        hold(parent, share)
    finally:
        if os.getppid() == parent:
            os.kill(parent, signal.SIGCONT)
        os._exit(0)


def hold(parent: int, share: float) -> None:
    """Stop and continue the parent until it is gone. What a pause lacked or had too much is made up for in the next."""
    began, held = time.monotonic(), 0.0
    while os.getppid() == parent:
        owed = share * (time.monotonic() - began) - held
        if owed > 0:
            os.kill(parent, signal.SIGSTOP)
            stopped = time.monotonic()
            time.sleep(min(owed, LONGEST_S))
            os.kill(parent, signal.SIGCONT)
            held += time.monotonic() - stopped
        left = PERIOD_S - (time.monotonic() - began) % PERIOD_S
        time.sleep(left)


if __name__ == "__main__":
    wanted = share_of(os.environ.get(VARIABLE, "0"))
    if wanted and not {"--help", "--version"} & set(sys.argv):
        plant(wanted)
    sys.argv[0] = str(SERVER)
    runpy.run_path(str(SERVER), run_name="__main__")
