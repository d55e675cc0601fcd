"""The wire between agent and sshd: an asyncio TCP proxy that can delay, stall, strand and cut; it reads no byte.

It runs in a thread of its own, so that a round may wait for processes meanwhile. Nothing but loopback and the address
that it is given is ever bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import TypeVar

CHUNK_BYTES = 1 << 16
Result = TypeVar("Result")


class Pair:
    """One connection of the agent and its other half to sshd."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.flowing = asyncio.Event()
        self.flowing.set()

    def abort(self) -> None:
        """Close both halves at once, unsent bytes included."""
        for half in (self.near, self.far):
            half.transport.abort()


class Link:
    """A proxy to a port of loopback; its methods may be called from any thread."""

    def __init__(self, target_port: int, address: str = "127.0.0.1") -> None:
        self.target_port = target_port
        self.address = address
        self.delay_s = 0.0
        self._pairs: set[Pair] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self._call(self._listen())

    def delay(self, seconds: float) -> None:
        """Hold every piece back for so long before it is passed on; 0 ends it."""
        self.delay_s = seconds

    def stall(self) -> None:
        """Pass nothing on, for old connections and new ones, without a reset, until `flow`."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def flow(self) -> None:
        """Pass on what was held back by `stall`."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def strand(self) -> None:
        """Leave the connections of now half-open for good: nothing passes, nobody is told. New ones work."""
        self._call(self._strand())

    def cut(self) -> None:
        """Break the connections of now; new ones work."""
        self._call(self._cut())

    def close(self) -> None:
        """Stop listening, break everything, end the thread."""
        if not self._thread.is_alive():
            return
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, work: Coroutine[None, None, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> int:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, self.address, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _strand(self) -> None:
        for pair in self._pairs:
            pair.flowing.clear()

    async def _cut(self) -> None:
        for pair in list(self._pairs):
            pair.abort()

    async def _end(self) -> None:
        self._server.close()
        self._flowing.set()
        for pair in list(self._pairs):
            pair.flowing.set()
            pair.abort()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            answers, far = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            near.transport.abort()
            return
        pair = Pair(near, far)
        self._pairs.add(pair)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await asyncio.gather(self._pump(reader, far, pair), self._pump(answers, near, pair))
        finally:
            pair.abort()
            self._pairs.discard(pair)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: Pair) -> None:
        while data := await source.read(CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flowing.wait()
            await pair.flowing.wait()
            sink.write(data)
            await sink.drain()
        await pair.flowing.wait()
        await self._flowing.wait()
        sink.write_eof()
