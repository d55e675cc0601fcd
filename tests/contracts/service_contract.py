"""What every Service must do; a subclass gives the fixture `case`: a server that somebody started before, and its host.

The server is a small HTTP server that serves files. It is observed on the host from outside, through procfs, never by
what the service says of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from state.errors import CommandFailed
from state.models import Holder, LaunchSpec, ProcessId
from tools import jobs
from tools.facts import ListenersFact, MachineFact, ProcessFact, ProcessFacts, ask
from tools.jobs import JobState
from tools.restore import ALREADY, FOREIGN, Restore
from tools.servers.base import HttpRequest, is_volatile
from tools.services.base import Service, StopJobs
from tools.services.finding import find
from tools.services.held import launch_of
from tools.shell import Host

pytestmark = pytest.mark.anyio

COMPLETION = '{"choices": [{"text": " Paris"}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}'
"""Served as a file named `completion`: an answer in which a token came back."""


@dataclass
class ServiceCase:
    """A host with a server on it that Ratchet did not start."""

    host: Host
    root: str
    port: int
    python: str
    holder: Holder | None
    """What is found to hold the server; None where it cannot be found."""
    service: Callable[[LaunchSpec], Service]
    """For the server's own spec."""
    changed: Callable[[tuple[str, ...]], tuple[str, ...]]
    """The command line with one flag changed, which the server accepts."""
    refused: Callable[[tuple[str, ...]], tuple[str, ...]]
    """The command line with a flag that the server does not know."""
    footprint: Callable[[], Awaitable[object]]
    """Everything that tells how the server is set up, in any comparable form."""
    by_hand: Callable[[], Awaitable[None]]
    """Somebody ends whatever serves, and starts the original anew without us."""

    async def serving(self) -> ProcessFacts | None:
        seen = await ask(self.host, ListenersFact(self.port))
        pids = [pid for listener in seen.listeners for pid in listener.pids]
        return await ask(self.host, ProcessFact(min(pids))) if pids else None

    async def until(self, wanted: Callable[[ProcessFacts | None], bool]) -> ProcessFacts | None:
        for _ in range(300):
            facts = await self.serving()
            if wanted(facts):
                return facts
            await asyncio.sleep(0.1)
        raise AssertionError(f"waited in vain; now there is {facts}\n{await self.said()}")

    async def said(self) -> str:
        return (await self.host.run(f"tail -n 20 {self.root}/jobs/*/stderr {self.root}/jobs/*/launch.log")).text

    async def spec(self) -> LaunchSpec:
        """What is observed of the server now."""
        facts = await self.until(lambda found: found is not None)
        assert facts is not None and facts.environ is not None and facts.cwd is not None
        return LaunchSpec(
            engine="files",
            program=facts.argv[:1],
            flags={"all": facts.argv[1:]},
            argv=facts.argv,
            cwd=facts.cwd,
            user=facts.user,
            hidden_env={name: value for name, value in facts.environ.items() if not is_volatile(name)},
            limits=facts.limits,
        )

    async def found(self) -> tuple[LaunchSpec, ProcessId]:
        """The server as it is before anything was done."""
        original = await self.spec()
        facts = await self.serving()
        assert facts is not None
        return original, facts.process

    async def make_way(self, service: Service, adopted: ProcessId, key: str) -> None:
        for operation in service.plan(adopted, key):
            await self.host.check(operation.render(), timeout_s=300)

    async def launch(self, service: Service, adopted: ProcessId, key: str, spec: LaunchSpec) -> JobState:
        """As the target does it: everything in place, the old server ended, the new one begun."""
        script = service.launch_script(spec, {}, key)
        await jobs.prepare(self.host, self.root, key, script)
        await self.make_way(service, adopted, key)
        return await jobs.start(self.host, self.root, key, script)

    async def launched(self, service: Service, adopted: ProcessId, key: str, spec: LaunchSpec) -> ProcessFacts:
        await self.launch(service, adopted, key, spec)
        facts = await self.until(lambda found: found is not None and found.process != adopted)
        assert facts is not None
        for _ in range(100):
            if await self.key_of(facts) == key:
                break
            await asyncio.sleep(0.1)
        assert await self.key_of(facts) == key, await self.said()
        return facts

    async def key_of(self, facts: ProcessFacts) -> str | None:
        """Which launch a process is recognised as."""
        found = await launch_of(self.host, self.root, facts.process)
        if found is not None:
            return found.key
        mark = (facts.environ or {}).get("RATCHET_JOB", "").rstrip("/")
        return mark.rpartition("/")[2] or None

    async def ended(self, key: str) -> JobState:
        for _ in range(300):
            state = await jobs.look(self.host, self.root, key)
            if state.over:
                return state
            await asyncio.sleep(0.1)
        raise AssertionError(f"{key} does not end\n{await self.said()}")

    def restore(
        self, service: Service, adopted: ProcessId, key: str, good: LaunchSpec, original: LaunchSpec
    ) -> Restore:
        return Restore(
            root=self.root,
            port=self.port,
            key=key,
            fingerprint=good.fingerprint,
            adopted=adopted,
            adopted_is_good=good.fingerprint == original.fingerprint,
            launch_script=service.launch_script(good, {}, key),
            operations=(StopJobs(root=self.root, shape="*-M*", grace_s=1), *service.plan(adopted, key)),
            python=self.python,
            generate=HttpRequest(id="generate", url=f"http://127.0.0.1:{self.port}/completion", timeout_s=5),
            deadline_s=30,
        )


@contextlib.asynccontextmanager
async def cleared(case: ServiceCase):  # type: ignore[no-untyped-def]
    """Whatever of ours is left on the host is ended afterwards."""
    try:
        yield
    finally:
        await case.host.run(StopJobs(root=case.root, shape="*-T*", grace_s=1).render(), timeout_s=60)


@pytest.mark.anyio
class ServiceContract:
    async def test_what_holds_the_server_is_found_without_a_trace(self, case: ServiceCase) -> None:
        if case.holder is None:
            pytest.skip("a stand-in has no cgroup")
        await case.found()
        footprint, facts = await case.footprint(), await case.serving()
        assert facts is not None
        found = await find(case.host, facts, await ask(case.host, MachineFact()))
        assert (found.holder, found.obstacles) == (case.holder, ())
        assert await case.footprint() == footprint

    async def test_a_flag_is_changed_and_what_was_found_comes_back_byte_for_byte(self, case: ServiceCase) -> None:
        async with cleared(case):
            original, adopted = await case.found()
            footprint, service = await case.footprint(), case.service(original)
            changed = original.model_copy(update={"argv": case.changed(original.argv), "flags": {"changed": ()}})
            changed = changed.model_copy(update={"env": {"ADDED": 'a "b" $c \\d 100%'}})
            dropped = sorted(original.hidden_env)[0] if "DROPPED" not in original.hidden_env else "DROPPED"
            kept = {name: value for name, value in original.hidden_env.items() if name != dropped}
            changed = changed.model_copy(update={"hidden_env": kept})
            facts = await case.launched(service, adopted, "S-T1", changed)
            assert facts.argv == changed.argv
            seen = await case.spec()
            assert seen.hidden_env == {**changed.hidden_env, **changed.env}
            assert (seen.cwd, seen.user, seen.limits) == (original.cwd, original.user, original.limits)
            assert (await jobs.look(case.host, case.root, "S-T1")).phase == "running"
            again = await case.launched(service, adopted, "S-T2", original)
            assert again.process != facts.process
            assert await case.spec() == original
            assert await case.footprint() == footprint
            assert (await case.ended("S-T1")).phase == "ended"

    async def test_a_server_that_is_killed_ends_its_launch_and_stays_away(self, case: ServiceCase) -> None:
        async with cleared(case):
            original, adopted = await case.found()
            service = case.service(original)
            changed = original.model_copy(update={"argv": case.changed(original.argv), "flags": {"changed": ()}})
            facts = await case.launched(service, adopted, "S-T1", changed)
            await case.host.check(f"kill -KILL {facts.process.pid}")
            state = await case.ended("S-T1")
            assert state.phase == "ended" and state.exit not in (0, None)
            assert await case.serving() is None
            await case.launched(service, adopted, "S-T2", original)

    async def test_a_launch_that_fails_ends_with_the_servers_own_words(self, case: ServiceCase) -> None:
        async with cleared(case):
            original, adopted = await case.found()
            service = case.service(original)
            broken = original.model_copy(update={"argv": case.refused(original.argv), "flags": {"broken": ()}})
            await case.launch(service, adopted, "S-T1", broken)
            state = await case.ended("S-T1")
            assert state.phase == "ended" and state.exit not in (0, None)
            told = await jobs.tail(case.host, case.root, "S-T1", "stderr")
            told += await jobs.tail(case.host, case.root, "S-T1", "stdout")
            assert "unrecognized" in told or "unknown option" in told or "invalid option" in told or "usage" in told
            await case.launched(service, adopted, "S-T2", original)

    async def test_what_somebody_else_started_is_left_alone(self, case: ServiceCase) -> None:
        async with cleared(case):
            original, adopted = await case.found()
            service = case.service(original)
            await case.by_hand()
            stranger = await case.until(lambda found: found is not None and found.process != adopted)
            assert stranger is not None
            with pytest.raises(CommandFailed):
                await case.make_way(service, adopted, "S-T1")
            watcher = case.restore(service, adopted, "S-Tw2", original, original)
            told = await case.host.run(watcher.render(), timeout_s=120)
            assert told.exit == FOREIGN, told.tail
            still = await case.serving()
            assert still is not None and still.process == stranger.process

    async def test_the_watchers_script_does_the_same_as_the_agent(self, case: ServiceCase) -> None:
        async with cleared(case):
            footprint = await case.footprint()
            original, adopted = await case.found()
            service = case.service(original)
            changed = original.model_copy(update={"argv": case.changed(original.argv), "flags": {"changed": ()}})
            candidate = await case.launched(service, adopted, "S-T1", changed)
            good = case.restore(service, adopted, "S-Tw2", changed, original)
            told = await case.host.run(good.render(), timeout_s=120)
            assert told.exit == ALREADY, told.tail
            watcher = case.restore(service, adopted, "S-Tw3", original, original)
            told = await case.host.run(watcher.render(), timeout_s=120)
            assert told.exit == 0, told.text + told.tail + await case.said()
            facts = await case.serving()
            assert facts is not None and facts.process not in (candidate.process, adopted)
            assert await case.key_of(facts) == "S-Tw3"
            assert await case.spec() == original
            assert await case.footprint() == footprint
            later = case.restore(service, adopted, "S-Tw4", original, original)
            told = await case.host.run(later.render(), timeout_s=120)
            assert told.exit == ALREADY, told.tail

    async def test_making_way_again_finds_nothing_to_do(self, case: ServiceCase) -> None:
        async with cleared(case):
            original, adopted = await case.found()
            service = case.service(original)
            await case.make_way(service, adopted, "S-T1")
            assert await case.serving() is None
            await case.make_way(service, adopted, "S-T1")
            await case.launched(service, adopted, "S-T2", original)

    async def test_a_frozen_server_makes_way_all_the_same(self, case: ServiceCase) -> None:
        async with cleared(case):
            original, adopted = await case.found()
            await case.host.check(f"kill -STOP {adopted.pid}")
            await case.launched(case.service(original), adopted, "S-T1", original)

    async def test_operations_are_data_that_render_the_same_script(self, case: ServiceCase) -> None:
        original, adopted = await case.found()
        for operation in case.service(original).plan(adopted, "S-T1"):
            again = type(operation).model_validate_json(operation.model_dump_json())
            assert again.render() == operation.render()


def served(folder: Path) -> Path:
    """A folder of files to serve."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "completion").write_text(COMPLETION)
    return folder
