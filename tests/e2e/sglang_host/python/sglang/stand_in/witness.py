"""The host's own record of what happened on it, and what its GPUs are doing; nobody of Ratchet reads or writes it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from sglang.stand_in.scenario import folder


def start_ticks(pid: int) -> int | None:
    """When a process started, None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def note(event: str, **facts: Any) -> None:
    """One line, whole whoever else writes."""
    line = json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **facts}) + "\n"
    place = os.open(folder() / "witness.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(place, line.encode())
    os.close(place)


def starts() -> list[dict[str, Any]]:
    """Every start of a server so far."""
    path = folder() / "witness.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == "start"]


def show_gpus(power_w: float | None, memory_mb: int) -> None:
    """What the stand-in for nvidia-smi shows as long as this process lives; no power: it is idle."""
    state = {"pid": os.getpid(), "ticks": start_ticks(os.getpid()), "power_w": power_w, "memory_mb": memory_mb}
    part = folder() / f"gpus.{os.getpid()}.part"
    part.write_text(json.dumps(state))
    part.replace(folder() / "gpus.json")
