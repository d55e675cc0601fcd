"""The start log of the server, line by line as 0.5.17 wrote it on another machine, with this host's values."""

from __future__ import annotations

import sys
import time

CUTLASS = """\
Traceback (most recent call last):
  File "/srv/lib/sglang/srt/managers/scheduler.py", line 4931, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/srv/lib/sglang/srt/layers/moe/cutlass_moe.py", line 512, in cutlass_moe_fp4
    run_tile(tile_shape=(128, 256, 128), ep_size=8)
triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. \
Reducing block sizes or `num_stages` may help.
"""
DYNAMO = """\
Traceback (most recent call last):
  File "/srv/lib/sglang/srt/managers/scheduler.py", line 4931, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/srv/lib/sglang/srt/model_executor/piecewise_cuda_graph_runner.py", line 301, in warmup_and_capture
    self.model_runner.model.forward = torch.compile(forward, fullgraph=True, dynamic=True)
torch._dynamo.exc.Unsupported: Attempted to call function marked as skipped
  Explanation: Dynamo does not know how to trace the builtin `flashinfer.jit.core.JitSpec.build_and_load`.
To work around this error, add --disable-piecewise-cuda-graph to your launch command.
"""
EXCEPTIONS = {"expert parallelism": CUTLASS, "piecewise graphs": DYNAMO}


def say(text: str, rank: str = "") -> None:
    """One line with its stamp."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S") + (f" {rank}" if rank else "")
    print(f"[{stamp}] {text}", file=sys.stderr, flush=True)


def deprecation(path: str) -> None:
    """What the module says of itself before anything else."""
    said = "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint."
    print(f"{path}:56: UserWarning: {said}", file=sys.stderr)
    print("  Example: sglang serve --model-path <model> [options]\n  warnings.warn(", file=sys.stderr, flush=True)


def server_args(flags: dict[str, str | bool | list[str]]) -> None:
    """The arguments as the server reads them; keys are not among those that a campaign gives."""
    told = ", ".join(f"{name.removeprefix('--').replace('-', '_')}={value!r}" for name, value in flags.items())
    say(f"server_args=ServerArgs({told})")
    say("Using default HuggingFace chat template with detected content format: string")


def weights(model_type: str) -> None:
    """Loading, of every tensor-parallel rank the first."""
    say("Init torch distributed begin.", "TP0")
    say("Init torch distributed ends. elapsed=0.02 s, mem usage=0.09 GB", "TP0")
    say("Load weight begin. avail mem=94.12 GB", "TP0")
    say(f"Load weight end. elapsed=0.12 s, type={model_type}, avail mem=41.31 GB, mem usage=52.81 GB.", "TP0")


def scheduler_exception(name: str) -> None:
    """What a rank says as it dies."""
    say(f"Scheduler hit an exception: {EXCEPTIONS[name]}", "TP0")


def graphs(flags: dict[str, str | bool | list[str]]) -> None:
    """Memory pools and CUDA graphs."""
    running = flags.get("--max-running-requests", "2048")
    say("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 859679, KV size: 33.12 GB", "TP0")
    say("Memory pool end. avail mem=6.29 GB", "TP0")
    say("Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=6.29 GB", "TP0")
    say("Capture target decode CUDA graph end. elapsed=0.48 s, mem usage=0.21 GB, avail mem=6.08 GB.", "TP0")
    say(
        "max_total_num_tokens=859679, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        f"max_running_requests={running}, context_len=202752, available_gpu_mem=6.08 GB",
        "TP0",
    )


def listening(port: int) -> None:
    """The HTTP server is there, the engine warms up."""
    say("INFO:     Waiting for application startup.")
    say("INFO:     Application startup complete.")
    say(f"INFO:     Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)")


def ready() -> None:
    """The warm-up is over."""
    say("Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, token usage: 0.00, #running-req: 0", "TP0")
    say("The server is fired up and ready to roll!")


def decoded(running: int, rate: float) -> None:
    """One line of many that a loaded server writes."""
    said = f"Decode batch, #running-req: {running}, token usage: 0.10, cuda graph: True, "
    say(f"{said}gen throughput (token/s): {rate:.2f}, #queue-req: 0", "TP0")
