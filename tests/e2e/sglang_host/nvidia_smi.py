"""A stand-in for nvidia-smi(1), written from its public manual: no recording of one. It must be run by tests only.

`python nvidia_smi.py HOST --query-gpu=FIELDS --format=csv,noheader,nounits` shows eight GPUs whose readings follow
from what serves on the simulated host.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GPUS = 8
FIXED = {
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "driver_version": "580.65.06",
    "memory.total": "97887",
    "power.limit": "600.00",
    "clocks.max.sm": "2430",
    "compute_cap": "12.0",
}


def alive(pid: int, ticks: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] not in (b"Z", b"X") and int(fields[19]) == ticks


def readings(host: Path) -> dict[str, str]:
    """What every GPU shows just now."""
    path = host / "gpus.json"
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    serves = bool(state) and alive(state["pid"], state["ticks"])
    power = state["power_w"] if serves else None
    busy = power is not None
    return {
        "memory.used": str(state["memory_mb"] if serves else 4),
        "power.draw": f"{power:.2f}" if power is not None else "31.40",
        "utilization.gpu": "98" if busy else "0",
        "clocks.sm": "2302" if busy else "180",
        "temperature.gpu": "61" if busy else "34",
        "clocks_throttle_reasons.active": "0x0000000000000000" if busy else "0x0000000000000001",
    }


def main(host: Path, words: list[str]) -> int:
    asked = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu=")), "")
    if not asked or "--format=csv,noheader,nounits" not in words:
        print("this stand-in answers --query-gpu=… --format=csv,noheader,nounits alone", file=sys.stderr)
        return 1
    shown = FIXED | readings(host)
    for index in range(GPUS):
        own = {"index": str(index), "uuid": f"GPU-00000000-0000-0000-0000-00000000000{index}"}
        print(", ".join((shown | own).get(field, "[N/A]") for field in asked.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
