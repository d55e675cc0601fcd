"""What the host is and has: identity, tools, memory, disk, GPUs; a hung GPU driver must not hang the asking."""

from __future__ import annotations

import csv
import io
import shlex
from dataclasses import dataclass

from pydantic import Field

from state.models import Frozen, digest
from tools.facts.base import Fact, as_text

TOOLS = ("python3", "setsid", "nvidia-smi", "base64", "sha256sum", "timeout", "ss", "systemctl", "docker", "taskset")
GPU_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
)


class Machine(Frozen):
    """What does not change while the host is up, and how long that has been."""

    hostname: str
    kernel: str
    boot_id: str
    uptime_s: float
    uid: int
    user: str
    home: str
    cores: int
    cpu_model: str
    mem_total_mb: float
    tools: dict[str, str] = Field(description="name → path of what is installed")
    python_version: str | None = Field(description="of python3, None where there is none")

    def hardware(self, gpus: GpuFacts) -> str:
        """One line that is the same as long as figures may be compared: processor, memory in GiB, GPUs."""
        parts = [f"{self.cores} x {self.cpu_model or 'unknown processor'}", f"{self.mem_total_mb / 1024:.0f} GiB"]
        names = [gpu.name for gpu in gpus.gpus]
        return ", ".join(parts + [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)])

    def hardware_id(self, gpus: GpuFacts) -> str:
        """Hash of `hardware`."""
        return digest(self.hardware(gpus))


@dataclass(frozen=True)
class MachineFact(Fact[Machine]):
    """The host's identity and means."""

    def command(self) -> str:
        """One line for each, a name and its value."""
        tools = shlex.join(TOOLS)
        return f"""
LC_ALL=C; export LC_ALL
echo "hostname $(uname -n)"
echo "kernel $(uname -srm)"
echo "boot_id $(cat /proc/sys/kernel/random/boot_id)"
echo "uptime_s $(cat /proc/uptime)"
echo "uid $(id -u)"
echo "user $(id -nu 2>/dev/null || id -u)"
echo "home $HOME"
echo "cores $(grep -c '^cpu[0-9]' /proc/stat)"
echo "cpu_model $(grep -m 1 '^model name' /proc/cpuinfo)"
echo "memory $(grep '^MemTotal' /proc/meminfo)"
for tool in {tools}; do path=$(command -v $tool) && echo "tool $tool $path"; done
command -v python3 >/dev/null && echo "python_version $(python3 -c 'import platform; print(platform.python_version())')"
:
"""

    def parse(self, output: bytes) -> Machine:
        """KeyError names what is missing."""
        values: dict[str, str] = {}
        tools: dict[str, str] = {}
        for line in as_text(output).splitlines():
            name, _, value = line.partition(" ")
            if name == "tool":
                tool, _, path = value.partition(" ")
                tools[tool] = path
            else:
                values[name] = value.strip()
        return Machine(
            hostname=values["hostname"],
            kernel=values["kernel"],
            boot_id=values["boot_id"],
            uptime_s=float(values["uptime_s"].split()[0]),
            uid=int(values["uid"]),
            user=values["user"],
            home=values["home"],
            cores=int(values["cores"]),
            cpu_model=values["cpu_model"].partition(":")[2].strip(),
            mem_total_mb=int(values["memory"].split()[1]) / 1024,
            tools=tools,
            python_version=values.get("python_version") or None,
        )


class Memory(Frozen):
    """Main memory in MiB; available is the kernel's own estimate of what a new process could get."""

    total_mb: float
    available_mb: float


@dataclass(frozen=True)
class MemoryFact(Fact[Memory]):
    """Main memory."""

    def command(self) -> str:
        """The kernel's table."""
        return "cat /proc/meminfo"

    def parse(self, output: bytes) -> Memory:
        """KeyError for kernels before 3.14, which do not estimate what is available."""
        rows = {name: value for name, _, value in (line.partition(":") for line in as_text(output).splitlines())}
        total, available = (int(rows[name].split()[0]) / 1024 for name in ("MemTotal", "MemAvailable"))
        return Memory(total_mb=total, available_mb=available)


class Disk(Frozen):
    """The file system that holds a path."""

    mount: str
    free_mb: float = Field(description="MiB that this user may still write")


@dataclass(frozen=True)
class DiskFact(Fact[Disk]):
    """Free room at a path, which must exist."""

    path: str

    def command(self) -> str:
        """POSIX df, one file system in one row."""
        return f"LC_ALL=C df -Pk -- {shlex.quote(self.path)}"

    def parse(self, output: bytes) -> Disk:
        """The last row; its mount point may contain blanks."""
        row = as_text(output).splitlines()[-1].split(maxsplit=5)
        return Disk(mount=row[5], free_mb=int(row[3]) / 1024)


class Gpu(Frozen):
    """One NVIDIA GPU; None where the driver does not tell."""

    index: int
    name: str
    uuid: str
    driver_version: str
    memory_total_mb: float | None
    memory_used_mb: float | None
    utilization_percent: float | None
    temperature_c: float | None
    power_w: float | None
    clock_sm_mhz: float | None
    clock_sm_max_mhz: float | None
    throttle_reasons: str = Field(description="the driver's bit mask, e.g. 0x0000000000000001 for idle")


class GpuFacts(Frozen):
    """The GPUs; without nvidia-smi there are none, and `error` says why they could not be seen."""

    gpus: tuple[Gpu, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class GpuFact(Fact[GpuFacts]):
    """The NVIDIA GPUs, asked with a deadline of their own: nvidia-smi hangs when a GPU has fallen off the bus."""

    deadline_s: int = 15

    def command(self) -> str:
        """See `_query`."""
        return _query(GPU_FIELDS, self.deadline_s)

    def parse(self, output: bytes) -> GpuFacts:
        """Rows of comma-separated values after the exit code."""
        head, _, body = as_text(output).partition("\n")
        if head == "absent":
            return GpuFacts()
        if head == "hung":
            return GpuFacts(error=f"nvidia-smi gave no answer within {self.deadline_s} s")
        if head != "exit 0":
            return GpuFacts(error=f"nvidia-smi failed ({head}): {body.strip()[-1000:]}")
        rows = csv.reader(io.StringIO(body), skipinitialspace=True)
        return GpuFacts(gpus=tuple(_gpu(dict(zip(GPU_FIELDS, row, strict=True))) for row in rows if row))


@dataclass(frozen=True)
class ComputeFact(Fact[float | None]):
    """The least compute capability of the GPUs, for example 9.0; None without one, or where the driver cannot tell.

    Asked by itself: a driver that does not know the field refuses the whole query.
    """

    deadline_s: int = 15

    def command(self) -> str:
        """See `_query`."""
        return _query(("compute_cap",), self.deadline_s)

    def parse(self, output: bytes) -> float | None:
        """One number a line after the exit code."""
        head, _, body = as_text(output).partition("\n")
        found = [_number(line) for line in body.splitlines() if line.strip()] if head == "exit 0" else []
        told = [value for value in found if value is not None]
        return min(told) if told else None


def _query(fields: tuple[str, ...], deadline_s: int) -> str:
    """nvidia-smi runs beside the shell and is left behind when it hangs: in state D even KILL does not end it."""
    return f"""
command -v nvidia-smi >/dev/null || {{ echo absent; exit 0; }}
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
nvidia-smi --query-gpu={",".join(fields)} --format=csv,noheader,nounits </dev/null >"$out" 2>&1 &
tries=0
while kill -0 $! 2>/dev/null; do
  tries=$((tries + 1))
  if [ $tries -gt {deadline_s * 10} ]; then kill -9 $!; echo hung; exit 0; fi
  sleep 0.1 2>/dev/null || {{ sleep 1; tries=$((tries + 9)); }}
done
wait $!
echo "exit $?"
cat "$out"
"""


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        index=int(row["index"]),
        name=row["name"],
        uuid=row["uuid"],
        driver_version=row["driver_version"],
        memory_total_mb=_number(row["memory.total"]),
        memory_used_mb=_number(row["memory.used"]),
        utilization_percent=_number(row["utilization.gpu"]),
        temperature_c=_number(row["temperature.gpu"]),
        power_w=_number(row["power.draw"]),
        clock_sm_mhz=_number(row["clocks.sm"]),
        clock_sm_max_mhz=_number(row["clocks.max.sm"]),
        throttle_reasons=row["clocks_throttle_reasons.active"],
    )


def _number(text: str) -> float | None:
    """`[N/A]`, `[Not Supported]` and the like are None, never zero."""
    try:
        return float(text)
    except ValueError:
        return None
