"""With this folder on its PYTHONPATH, `vllm serve` notes that it starts, as `witness.py` notes it for llama.cpp.

The program itself and its command line stay the operator's. Its workers and whoever asks for help note nothing.
"""

import os
import runpy
from pathlib import Path

WORDS = Path("/proc/self/cmdline").read_bytes().split(b"\0")

if b"serve" in WORDS[:3] and not any(word.startswith((b"--help", b"--version")) for word in WORDS):
    runpy.run_path(str(Path(__file__).parents[1] / "witness.py"))["testify"](Path(os.environ["WITNESS"]))
