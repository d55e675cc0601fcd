"""The demo's llama.cpp server, which takes its time to start: as long as LLAMA_START_DELAY says, in seconds.

It must not do anything else: what it says, and its `--help` and `--version`, are the server's own.
"""

import os
import runpy
import sys
import time
from pathlib import Path

SERVER = Path(__file__).resolve().parents[2] / "tools" / "demo" / "llama_server.py"
VARIABLE = "LLAMA_START_DELAY"

if __name__ == "__main__":
    if not {"--help", "--version"} & set(sys.argv):
        time.sleep(float(os.environ[VARIABLE]))
    sys.argv[0] = str(SERVER)
    runpy.run_path(str(SERVER), run_name="__main__")
