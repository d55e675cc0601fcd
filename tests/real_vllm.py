"""A real vLLM for tests, where the environment names one; it downloads and installs nothing.

`RATCHET_VLLM` is the path of its `vllm`, `RATCHET_VLLM_MODEL` that of a small model in Hugging Face's format. Both are
installed by `make real`; docs/how-to/vllm.md says how it is done by hand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ssh_servers import free_port


def named(variable: str) -> str:
    """The absolute path that a variable names, "" where it names none: servers run in folders of their own."""
    path = os.environ.get(variable, "")
    return os.path.abspath(path) if path else ""


PROGRAM, MODEL = named("RATCHET_VLLM"), named("RATCHET_VLLM_MODEL")
START_S = 900
"""After which a start hangs; a busy machine without a GPU takes minutes."""
OWN = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Variables of a server that has 1 GiB of cache and tells nobody of itself."""

needed = pytest.mark.skipif(
    not (PROGRAM and MODEL),
    reason="there is no vLLM: RATCHET_VLLM names its `vllm`, RATCHET_VLLM_MODEL a model; see docs/how-to/vllm.md",
)


class Running(NamedTuple):
    """A server that answers."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path


def environ() -> dict[str, str]:
    """This process's own and a server's variables."""
    return {**os.environ, **OWN}


@contextlib.contextmanager
def vllm_server(log: Path, *flags: str) -> Iterator[Running]:
    """`vllm serve` on a free port, ready; its whole session is gone after the block."""
    port = free_port()
    words = [PROGRAM, "serve", MODEL, "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as sink:
        process = subprocess.Popen(words, env=environ(), stdout=sink, stderr=sink, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while "Application startup complete" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield Running(process, f"http://127.0.0.1:{port}", log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
