"""Launches and benchmark runs on a rig, one at a time, through the product's own target and without a session.

It judges nothing. What serves at the end of the block is what was launched last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

from state.models import LaunchSpec, LoadPoint, Objective, ProcessId, Workload
from tests.e2e.rig import LIMIT_S, Rig
from tools.remote import RemoteSettings, RemoteTarget
from tools.servers.llamacpp import LlamaCpp
from tools.ssh import SshHost
from tools.target import Ready, RunRequest, RunResult

POLL_S = 0.2


@contextlib.asynccontextmanager
async def held(host: Rig, name: str, **fields: object) -> AsyncIterator[RemoteTarget]:
    """The rig's target, taken as `start` takes it; `fields` override its settings."""
    known: dict[str, object] = {
        "name": "rig",
        "directory": str(host.root),
        "python": str(host.python),
        "url": f"http://127.0.0.1:{host.port}",
        "port": host.port,
        "model": None,
        "start_deadline_s": 60.0,
        "stop_grace_s": 5.0,
        "lease_s": 300,
        "pid": None,
        "api_key_file": str(host.key_file),
    }
    link = await SshHost.connect(host.sshd.settings)
    target = RemoteTarget(link, LlamaCpp(), RemoteSettings.model_validate(known | fields))
    try:
        await target.prepare()
        await target.adopt()
        await target.acquire(name, f"session {name}, agent process {os.getpid()}")
        try:
            yield target
        finally:
            await target.release()
    finally:
        await target.close()


async def launched(target: RemoteTarget, key: str, spec: LaunchSpec) -> ProcessId:
    """The process of a fresh launch that generates."""
    await target.launch(key, spec)
    ready = await target.await_ready(key)
    assert isinstance(ready, Ready), ready
    return ready.process


async def serving(target: RemoteTarget) -> ProcessId:
    """The process that serves now."""
    now = await target.serving()
    assert now is not None, "nobody serves"
    return now.process


def workload_of(point: LoadPoint, **fields: object) -> Workload:
    """A workload of one load point."""
    known: dict[str, object] = {"load_points": (point,), "objective": Objective(at=(point.name,))}
    return Workload.model_validate(known | fields)


async def ran(target: RemoteTarget, key: str, process: ProcessId, workload: Workload, seed: int) -> RunResult:
    """The result of one whole run at the workload's first load point."""
    await target.begin_run(key, request_of(workload, process, seed))
    return await over(target, key)


def request_of(workload: Workload, process: ProcessId, seed: int) -> RunRequest:
    """A run at the workload's first load point."""
    return RunRequest(point=workload.load_points[0], workload=workload, seed=seed, process=process)


async def over(target: RemoteTarget, key: str) -> RunResult:
    """The result of a run that has begun, once it has ended."""
    for _ in range(int(LIMIT_S / POLL_S)):
        if (await target.look_run(key)).phase != "running":
            return await target.collect_run(key)
        await target.pause(POLL_S)
    raise AssertionError(f"run {key} does not end")
