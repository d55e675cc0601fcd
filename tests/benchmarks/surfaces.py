"""A small made-up recording for tests of the search benchmark: what is planted in it is known."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

from benchmarks.searching.surfaces import Surface

SPACE: dict[str, Any] = {
    "about": "made up",
    "base": "--metrics",
    "knobs": [
        {
            "name": "threads",
            "tags": ["threads"],
            "values": {value: [{"kind": "flag", "name": "--threads", "value": value}] for value in ("1", "2")},
        },
        {
            "name": "attention",
            "tags": ["attention"],
            "values": {value: [{"kind": "flag", "name": "--flash-attn", "value": value}] for value in ("off", "on")},
        },
        {
            "name": "values",
            "tags": ["kv-type"],
            "values": {
                value: [{"kind": "flag", "name": "--cache-type-v", "value": value}] for value in ("f16", "q8_0")
            },
        },
        {
            "name": "waiting",
            "tags": ["waiting"],
            "values": {
                value: [{"kind": "env", "name": "OMP_WAIT_POLICY", "value": value}] for value in ("passive", "active")
            },
        },
    ],
    "load_points": [
        {"name": "one", "concurrency": 1, "requests": 2, "output_tokens": 50},
        {"name": "eight", "concurrency": 8, "requests": 8, "output_tokens": 25},
    ],
}
GAINS = {"threads": {"2": 0.5}, "attention": {"on": 0.1}, "values": {"q8_0": -0.2}, "waiting": {"active": 0.05}}
"""Log-ratios at every load point."""
START_S = {0: 1.0, 1: 2.0}
REFUSED = "quantized V cache requires flash_attn to be enabled"


def planted(setting: tuple[str, ...]) -> float:
    """Log tok/s of a setting at `one`; `eight` has twice as many."""
    names = [knob["name"] for knob in SPACE["knobs"]]
    return math.log(40) + sum(GAINS[name].get(value, 0.0) for name, value in zip(names, setting, strict=True))


def launches(noise: float = 0.01) -> list[dict[str, Any]]:
    """Two launches of every setting; a quantised cache does not start without flash attention."""
    luck = random.Random(1)
    rows: list[dict[str, Any]] = []
    for setting in itertools.product(*(knob["values"] for knob in SPACE["knobs"])):
        for launch in range(2):
            row: dict[str, Any] = {"launch": launch, "setting": list(setting), "start_s": START_S[launch]}
            if setting[1:3] == ("off", "q8_0"):
                rows.append({**row, "failure": {"failure_class": "config-invalid", "cause": REFUSED}})
                continue
            shared = luck.gauss(0, noise)
            runs = []
            for point, more in (("one", 0.0), ("eight", math.log(2))):
                rate = math.exp(planted(setting) + more + shared + luck.gauss(0, noise))
                tokens = next(p["requests"] * p["output_tokens"] for p in SPACE["load_points"] if p["name"] == point)
                seconds = tokens / rate
                runs.append({"point": point, "tok_s": rate, "duration_s": seconds, "wall_s": seconds + 0.5, "void": []})
            rows.append({**row, "runs": runs})
    return rows


def surface(noise: float = 0.01) -> Surface:
    """The recording as a surface."""
    return Surface("made-up", SPACE, launches(noise))


def write(folder: Path, name: str = "llamacpp") -> None:
    """The recording as the files that the program reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_space.json").write_text(json.dumps(SPACE))
    (folder / f"{name}_surface.jsonl").write_text("".join(json.dumps(row) + "\n" for row in launches()))
