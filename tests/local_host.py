"""This machine as a Host: /bin/sh without any transport, for tests that are about something else than SSH."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from state.errors import OutcomeUnknown
from tools.shell import CommandResult, PosixHost, brief


class LocalHost(PosixHost):
    """Runs each script in a process group of its own, which a timeout ends: a test leaves nothing behind."""

    def __init__(self, name: str = "local") -> None:
        self.name = name

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", script, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
            raise OutcomeUnknown(
                "a command did not end in time", where={"host": self.name, "command": brief(script)}
            ) from None
        code = process.returncode or 0
        name = signal.Signals(-code).name.removeprefix("SIG") if code < 0 else None
        return CommandResult(exit=128 - code if code < 0 else code, signal=name, stdout=out, stderr=err)

    async def close(self) -> None:
        """Nothing is held open."""
