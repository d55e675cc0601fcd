"""The server to be tuned, with a witness before it: a program of the operator's, that Ratchet must start as it is.

`python witness.py ARGUMENTS` notes in the file WITNESS that it starts, by whom, and which earlier ones still live; then
it is the demo's llama.cpp server. It knows nothing of Ratchet but the name that a launch bears in RATCHET_LAUNCH.
"""

import json
import os
import runpy
import sys
from pathlib import Path

SERVER = Path(__file__).resolve().parents[2] / "tools" / "demo" / "llama_server.py"


def start_ticks(pid: int) -> int | None:
    """When a process started, None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def testify(path: Path) -> None:
    """One line: who we are, and who of those before us still lives."""
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    living = [seen["pid"] for seen in earlier if start_ticks(seen["pid"]) == seen["ticks"]]
    launch = os.environ.get("RATCHET_LAUNCH", "operator")
    line = {"pid": os.getpid(), "ticks": start_ticks(os.getpid()), "launch": launch, "living": living}
    with path.open("a") as log:
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    if not {"--help", "--version"} & set(sys.argv):
        testify(Path(os.environ["WITNESS"]))
    sys.argv[0] = str(SERVER)
    runpy.run_path(str(SERVER), run_name="__main__")
