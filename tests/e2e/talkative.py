"""The server to be tuned, loose-tongued as some engines are: it prints its arguments and its environment.

`python talkative.py ARGUMENTS` prints both when it starts and when it fails, then is the witness's server. While the
file that BROKEN names exists, it says that it cannot log in with its key, and ends.
"""

import json
import os
import runpy
import sys
from pathlib import Path

SERVER = Path(__file__).with_name("witness.py")


def speak() -> None:
    """As SGLang does with its arguments, and as some start scripts do with all that they find."""
    print(f"server_args=ServerArgs(argv={sys.argv[1:]!r})", flush=True)
    print(json.dumps(dict(os.environ)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    loud = not {"--help", "--version"} & set(sys.argv)
    if loud:
        speak()
        if os.path.exists(os.environ.get("BROKEN", "")):
            sys.exit(f"RuntimeError: cannot log in with {sys.argv[-1]}")
    try:
        runpy.run_path(str(SERVER), run_name="__main__")
    finally:
        if loud:
            speak()
