"""A real target that notes what it is waiting for, and a host that counts round trips; neither changes what is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from state.models import Failure, LaunchSpec
from tools.benches.base import BenchClient
from tools.remote import RemoteSettings, RemoteTarget
from tools.servers import probe
from tools.servers.base import ServerAdapter
from tools.shell import CommandResult, Host, PosixHost
from tools.target import Ready, RunRequest, RunState, unheard

KINDS = ("stopping", "loading", "measuring", "noticing", "quiet")
"""What the target is waited for: exit, port and memory of the old server; the new one; a run; its end, until it is
noticed; a quiet host."""


class Span(NamedTuple):
    """A stretch of time in which the target was waited for."""

    kind: str
    begin: float
    end: float


class Sample(NamedTuple):
    """The CPU time that this process had used by then."""

    at: float
    cpu_s: float


class Record:
    """What was noted, in Unix time as a session's events have it."""

    def __init__(self) -> None:
        self.ahead = time.time() - time.monotonic()
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self.trips: list[Span] = []

    def now(self) -> float:
        """Unix time, by a clock that nobody sets."""
        return time.monotonic() + self.ahead

    def sample(self) -> None:
        """Note the CPU time."""
        self.samples.append(Sample(self.now(), time.process_time()))

    def span(self, kind: str, begin: float, end: float) -> None:
        """Note a stretch."""
        if end > begin:
            self.spans.append(Span(kind, begin, end))

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Note the block as a stretch."""
        begin = self.now()
        try:
            yield
        finally:
            self.span(kind, begin, self.now())


class CountedHost(PosixHost):
    """A host whose round trips are noted."""

    def __init__(self, host: Host, record: Record) -> None:
        self.name = host.name
        self.host, self.record = host, record

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 30.0) -> CommandResult:
        """One round trip."""
        self.record.sample()
        begin = self.record.now()
        try:
            return await self.host.run(script, stdin=stdin, timeout_s=timeout_s)
        finally:
            self.record.trips.append(Span("trip", begin, self.record.now()))

    async def close(self) -> None:
        """See `Host.close`."""
        await self.host.close()


def watched(record: Record) -> type[RemoteTarget]:
    """The kind of target that notes in `record`."""

    class Watched(RemoteTarget):
        """See `record`."""

        def __init__(
            self, host: Host, adapter: ServerAdapter, settings: RemoteSettings, client: BenchClient | None = None
        ) -> None:
            super().__init__(CountedHost(host, record), adapter, settings, client)
            self.loaded = 0.0
            self.running: dict[str, float] = {}

        async def launch(self, key: str, spec: LaunchSpec, stopped: Callable[[], None] = unheard) -> str:
            operations = len(self._service().plan(self.adopted, key))

            def heard() -> None:
                done = record.trips[-operations:]
                record.span("stopping", done[0].begin, done[-1].end)
                stopped()

            return await super().launch(key, spec, heard)

        async def await_ready(self, key: str) -> Ready | Failure:
            begin = record.now()
            found = await super().await_ready(key)
            record.span("loading", begin, self.loaded)
            return found

        async def _generates(self, timeout_s: float) -> probe.Liveness:
            try:
                return await super()._generates(timeout_s)
            finally:
                self.loaded = record.now()

        async def _diagnosed(self, key: str, code: int | None) -> Failure:
            self.loaded = record.now()
            return await super()._diagnosed(key, code)

        async def begin_run(self, key: str, request: RunRequest) -> None:
            await super().begin_run(key, request)
            self.running[key] = record.now()

        async def look_run(self, key: str) -> RunState:
            began = record.now()
            state = await super().look_run(key)
            if key in self.running:
                kind = "measuring" if state.phase == "running" else "noticing"
                record.span(kind, self.running.pop(key), began)
            if state.phase == "running":
                self.running[key] = began
            return state

        async def foreign_cores(self) -> float | None:
            with record.during("quiet"):
                return await super().foreign_cores()

        async def foreign_traffic(self, max_rps: float = 0.0) -> str | None:
            with record.during("quiet"):
                return await super().foreign_traffic(max_rps)

    return Watched
