"""`python -m sglang.launch_server`: starts, logs, fails and serves as the scenario has it; it computes nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from sglang.srt.layers import flashinfer_comm_fusion
from sglang.stand_in import command_line, log, witness
from sglang.stand_in.http_api import Engine, serve
from sglang.stand_in.scenario import Scenario, folder
from sglang.version import __version__

CAPABILITY = (12, 0)
KERNELS = ("norm", "sampling")
FUSED_KERNEL = "trtllm_comm"
FUSION = ("--enable-flashinfer-allreduce-fusion", "--flashinfer-allreduce-fusion-backend")
VARIABLES = ("NCCL_", "SGLANG_", "FLASHINFER_")
MEMORY_MB = 90_000


def fused(flags: dict[str, str | bool | list[str]]) -> bool:
    """Whether all-reduces are fused: asked for, and let through by the gate."""
    return any(name in flags for name in FUSION) and flashinfer_comm_fusion.is_supported(CAPABILITY)


def in_force(flags: dict[str, str | bool | list[str]]) -> list[str]:
    """All that an effect of the scenario may be named after."""
    found = [f"version {__version__}", *(["fusion"] if fused(flags) else [])]
    for name, value in flags.items():
        found += [name] if value is True else [name, f"{name} {' '.join(value) if isinstance(value, list) else value}"]
    for name, text in os.environ.items():
        found += [name, f"{name}={text}"] if name.startswith(VARIABLES) else []
    return found


def compile_kernels(wanted: tuple[str, ...]) -> None:
    """Fill the cache of compiled kernels with what it lacks."""
    cache = folder() / "cache" / "flashinfer" / "0.6.11" / "120a" / "cached_ops"
    for name in wanted:
        library = cache / name / f"{name}.so"
        if not library.exists():
            log.say(f"flashinfer.jit: Compiling {name} for sm_120a")
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_text(f"kernel {name}, gate {flashinfer_comm_fusion.SUPPORTED_ARCHITECTURES}\n")


def end(number: int, frame: FrameType | None) -> None:
    """SIGTERM: the real one kills its own tree, itself included."""
    witness.note("stop")
    log.say("Received SIGTERM. Draining requests and shutting down...")
    log.say(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def fail(name: str) -> None:
    """End as a scheduler that dies at its start takes the whole server with it."""
    witness.note("failed", cause=name)
    log.scheduler_exception(name)
    log.say("Received sigquit from a child process. It usually means the child failed.", rank="")
    log.say(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def testify(flags: dict[str, str | bool | list[str]]) -> int:
    """Note the start with all that is in force; the number of this launch on this host."""
    earlier = witness.starts()
    witness.note(
        "start",
        number=len(earlier) + 1,
        ticks=witness.start_ticks(os.getpid()),
        launch=os.environ.get("RATCHET_LAUNCH", "operator"),
        living=[seen["pid"] for seen in earlier if witness.start_ticks(seen["pid"]) == seen["ticks"]],
        argv=sys.argv[1:],
        env={name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        version=__version__,
        package=str(Path(__file__).parent),
        gate=list(flashinfer_comm_fusion.SUPPORTED_ARCHITECTURES),
        fused=fused(flags),
    )
    return len(earlier) + 1


def main() -> None:
    """The program."""
    words = sys.argv[1:]
    log.deprecation(__file__)
    if {"-h", "--help"} & set(words):
        print(command_line.help_text(), end="")
        return
    flags = command_line.given(words)
    launch, scenario = testify(flags), Scenario.read()
    signal.signal(signal.SIGTERM, end)
    log.server_args(flags)
    time.sleep(scenario.told["load_s"] / 2)
    witness.show_gpus(None, MEMORY_MB)
    log.weights(scenario.told["model_type"])
    failure = scenario.failure(in_force(flags))
    if failure is not None:
        fail(failure)
    if any(name in flags for name in FUSION) and not fused(flags):
        log.say("FlashInfer allreduce fusion is not supported on SM120, it is disabled.")
    compile_kernels((*KERNELS, *((FUSED_KERNEL,) if fused(flags) else ())))
    time.sleep(scenario.told["load_s"] / 2)
    log.graphs(flags)
    engine = Engine(scenario, flags, in_force(flags), launch, MEMORY_MB)
    serve(engine, json.loads((command_line.DATA / "server_info.json").read_text()))


if __name__ == "__main__":
    main()
