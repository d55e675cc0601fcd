"""Does the judge tell a harmless change of the numbers from a broken model? Real servers, each with one change.

It must not tune the judge, and leaves no server behind. Every server is the demo's, with the demo's model; the fixed
prompts are asked by the client that measures, in its own way. The parent is launched several times, each time with one
pass at each of several loads; each candidate is launched once and judged against all of it, and against one pass only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from state.models import Answer, LoadPoint, Objective, ProcessId, Workload  # noqa: E402
from tools.benches import builtin  # noqa: E402
from tools.demo import model  # noqa: E402
from tools.target import RunRequest  # noqa: E402

SERVER = HERE.parent / "tools" / "demo" / "llama_server.py"
CLIENT = HERE.parent / "tools" / "benches" / "stream_client.py"
BASE = "--threads 1 --parallel 4 --ctx-size 4096 --flash-attn off --fit off"
AT_ONCE = (1, 2, 4)
START_S = 60.0


class Case(NamedTuple):
    """A change of the server: what it is called, its flags, what it must be called, and how its model is damaged."""

    name: str
    flags: str
    kind: str
    """`harmless`, `lossy` (numbers change on purpose, the model works), `broken`."""
    damage: float = 0.0
    """Share of the model's bytes that are replaced by random ones."""


CASES = (
    Case("two threads", "--threads 2", "harmless"),
    Case("physical batch of 8", "--ubatch-size 8", "harmless"),
    Case("physical batch of 1", "--ubatch-size 1", "harmless"),
    Case("two slots", "--parallel 2", "harmless"),
    Case("other kernels", "--no-repack", "harmless"),
    Case("flash attention", "--flash-attn on", "harmless"),
    Case("n-gram speculation", "--spec-type ngram-simple", "harmless"),
    Case("no prompt cache", "--no-cache-prompt", "harmless"),
    Case("unified cache", "--kv-unified", "harmless"),
    Case("K cache f32", "--cache-type-k f32", "harmless"),
    Case("K cache bf16", "--cache-type-k bf16", "harmless"),
    Case("K cache q8_0", "--cache-type-k q8_0", "lossy"),
    Case("K and V cache q8_0", "--cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on", "lossy"),
    Case("K cache q5_1", "--cache-type-k q5_1", "lossy"),
    Case("K cache q4_0", "--cache-type-k q4_0", "lossy"),
    Case("K and V cache q4_0", "--cache-type-k q4_0 --cache-type-v q4_0 --flash-attn on", "lossy"),
    Case("RoPE scale 0.9", "--rope-freq-scale 0.9", "lossy"),
    Case("RoPE scale 0.5", "--rope-freq-scale 0.5", "broken"),
    Case("RoPE scale 0.25", "--rope-freq-scale 0.25", "broken"),
    Case("RoPE base 10000", "--rope-freq-base 10000", "lossy"),
    Case("RoPE base 100", "--rope-freq-base 100", "broken"),
    Case("damaged: 1 byte in 10,000,000", "", "lossy", 1e-7),
    Case("damaged: 1 byte in 1,000,000", "", "broken", 1e-6),
    Case("damaged: 1 byte in 100,000", "", "broken", 1e-5),
    Case("damaged: 1 byte in 1,000", "", "broken", 1e-3),
)


@contextlib.contextmanager
def server(folder: Path, flags: str, weights: Path) -> Iterator[tuple[int, str]]:
    """A running server's pid and base URL; ended with the block."""
    log = folder / "server.log"
    words = [sys.executable, str(SERVER), "--model", str(weights), "--port", "0", *BASE.split(), *flags.split()]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    environment = {**ours, "OMP_WAIT_POLICY": "passive"}
    with log.open("wb") as sink, subprocess.Popen(words, stdout=sink, stderr=sink, env=environment) as process:
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start with {flags}:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield process.pid, found.group(1)
        finally:
            process.kill()


def ask(folder: Path, pid: int, url: str, at_once: int) -> tuple[Answer, ...]:
    """One pass over the fixed prompts, after a measured run that is as short as can be."""
    point = LoadPoint(name="few", concurrency=at_once, requests=1, prompt_tokens=8, output_tokens=2)
    workload = Workload(load_points=(point,), objective=Objective(at=("few",)))
    process = ProcessId(pid=pid, start_ticks=0, boot_id="")
    request = RunRequest(point=point, workload=workload, seed=1, process=process, answers=True)
    asked, told = folder / "request.json", folder / "result.json"
    asked.write_text(json.dumps(builtin.request_json("pass", request, url, None, None)))
    subprocess.run([sys.executable, str(CLIENT), "--request", str(asked), "--result", str(told)], check=True)
    return builtin.parse(told.read_bytes(), "pass").answers


def launch(folder: Path, case: Case, weights: Path, seed: int) -> list[tuple[Answer, ...]]:
    """The passes of one launch, one for each load."""
    if case.damage:
        weights = damaged(weights, folder / "damaged.gguf", case.damage, seed)
    with server(folder, case.flags, weights) as (pid, url):
        return [ask(folder, pid, url, at_once) for at_once in AT_ONCE]


def damaged(weights: Path, copy: Path, share: float, seed: int) -> Path:
    """A copy of the model with some bytes of its last nine tenths replaced; names and sizes stay as they are."""
    content, draw = bytearray(weights.read_bytes()), random.Random(seed)
    begin = len(content) // 10
    for _ in range(int(len(content) * share)):
        content[draw.randrange(begin, len(content))] = draw.randrange(256)
    copy.write_bytes(content)
    return copy
