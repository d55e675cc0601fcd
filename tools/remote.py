"""A target behind SSH: composes host, service, server adapter and bench client into the Target seam; judges nothing.

All our files on the host lie in one directory: `jobs/` (launches and benchmark runs), `asides/` and `overlays/`
(changes beside the command line), `stream_client.py`, and two 0600 files, `hash.key` (key of the hashes that stand for
secrets) and `secrets.json` (their values).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets as randomness
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from pydantic import Field

from state.errors import (
    CommandFailed,
    ForeignChange,
    HostError,
    PolicyRefused,
    RefusedForSafety,
    ServerError,
    ServerNotFound,
)
from state.models import (
    Adoption,
    Beside,
    Change,
    EnvChange,
    Failure,
    FlagChange,
    Frozen,
    Holder,
    HostClock,
    LaunchSpec,
    ProcessId,
    arranged,
    with_beside,
)
from tools import jobs, lease, server_words, source_search
from tools.benches import builtin
from tools.benches.base import BenchClient, Place
from tools.benches.builtin import Builtin
from tools.changes import overlay, record, settle, staging
from tools.diagnose import Action, FailureClass, diagnose
from tools.facts import (
    BusyFact,
    ClockFact,
    ComputeFact,
    ConnectionsFact,
    FolderFact,
    GpuFact,
    ListenersFact,
    Machine,
    MachineFact,
    MemoryFact,
    ModelFact,
    OpenFilesFact,
    PortFacts,
    ProcessFact,
    ProcessFacts,
    VisitorsFact,
    ask,
    model_named,
)
from tools.help_cache import HelpCache, key_of, signature
from tools.manners import Drain, DrainedFact, Draining, Undrain
from tools.redaction import Redactor, discreet, unquoted
from tools.restore import Restore
from tools.servers import probe
from tools.servers.base import Declared, FlagTable, HttpAnswer, ServerAdapter, make_spec
from tools.servers.knobs import knobs
from tools.services.base import Service, StopJobs
from tools.services.container import InContainer, in_place_sh
from tools.services.container_options import Container
from tools.services.finding import find, find_again
from tools.services.held import MARK, launch_of
from tools.services.process import BareProcess, revealed
from tools.services.systemd import SystemdUnit
from tools.shell import CHUNK_BYTES, Host, quote
from tools.target import Drained, Ready, Room, RunRequest, RunResult, RunState, Serving, TargetFacts, unheard

Known = TypeVar("Known")
KEY_BYTES = 32
CLIENT_KEY = "«secret:client key»"
READY_POLL_S = 0.25
TRAFFIC_LOOK_S = 0.5
ALL_OF_STDIN_SH = 'eval "$(cat)"'
RATE_LOOK_S, LONGEST_RATE_LOOK_S = 5.0, 60.0
"""How long requests of others are counted, at least and at most: long enough to see two at the rate allowed."""
WORD = "NEEDS-HUMAN"
"""File in our directory that says what a person has to do."""
ENDING_LOOKS = 20
"""For about 5 s: a dying server's threads hold its socket when its own descriptors can no longer be read."""
SETTLE_S = 3600.0
"""For the scripts of all asides together; each of them has a limit of its own."""
LOADER_VARIABLES = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG")
"""What a program may need from its environment to print its own help."""


class RemoteSettings(Frozen):
    """What is needed beside the connection; taken from the session file."""

    name: str
    directory: str = Field(description="our directory on the host; ~ is the login's home")
    python: str
    url: str = Field(description="of the server, as seen from the host")
    port: int
    model: str | None
    start_deadline_s: float
    stop_grace_s: float
    lease_s: int
    pid: int | None
    api_key_file: str | None
    draining: Draining | None = Field(default=None, description="how the server is taken out of its users' way")


@discreet
class RemoteTarget:
    """One server on one host."""

    def __init__(
        self, host: Host, adapter: ServerAdapter, settings: RemoteSettings, client: BenchClient | None = None
    ) -> None:
        self.name = settings.name
        self.host = host
        self.adapter = adapter
        self.settings = settings
        self.bench = client or Builtin()
        self.root = ""
        self.machine: Machine | None = None
        self.known: FlagTable | None = None
        self.version = ""
        self.overlaid: dict[tuple[str, ...], tuple[FlagTable, str]] = {}
        self.in_front: tuple[str, ...] = ()
        self.has_asides = False
        self.aside_free = False
        self.hash_key = randomness.token_bytes(KEY_BYTES)
        self.secrets: dict[str, str] = {}
        self.redactor = Redactor()
        self.helps = HelpCache(host)
        self.adopted: ProcessId | None = None
        self.original: LaunchSpec | None = None
        self.holder = Holder()
        self.container: Container | None = None
        self.prepared = False
        self.session_id = ""
        self.holders = ""
        self.fenced: lease.FencedHost | None = None

    # --- looking -------------------------------------------------------------------------------------------

    async def look_around(self) -> Machine:
        """What machine this is; raises HostError when the few things that everything needs are missing."""
        if self.machine is None:
            self.machine = await ask(self.host, MachineFact())
            self.root = self.settings.directory.replace("~", self.machine.home, 1)
            await self._needs(self.machine)
            await self._client_key()
        return self.machine

    async def prepare(self, earlier: Adoption | None = None) -> None:
        """Create our directory, put the client there, and load (or make) key and secrets; nothing else is touched.

        `earlier` is what an earlier agent process of the session adopted.
        """
        await self.look_around()
        if earlier is not None:
            self.adopted, self.original, self.holder = earlier.process, earlier.spec, earlier.holder
            with unquoted():
                self.container = await find_again(self.host, self.holder)
        place = shlex.quote(self.root)
        await self.host.check(f"umask 077 && mkdir -p {place}/jobs && chmod 700 {place}")
        await self.host.put(f"{self.root}/stream_client.py", builtin.source(), 0o600)
        key = await self._file("hash.key")
        if key is None:
            await self.host.put(f"{self.root}/hash.key", self.hash_key.hex().encode())
        else:
            self.hash_key = self._read("hash.key", key, _key)
        stored = await self._file("secrets.json")
        self.secrets = self._read("secrets.json", stored, _secrets) if stored is not None else {}
        if self.original is not None:
            self.redactor.learn(self.original, self.secrets)
        await self.helps.keep(self.root)
        self.prepared = True

    # --- the lease -----------------------------------------------------------------------------------------

    async def refuse_held(self) -> None:
        """Look whether somebody holds the target: between two launches nobody serves, which is no reason to say so.

        Touches nothing. Raises TargetLocked.
        """
        await self.look_around()
        await lease.refuse_held(self.host, self.root)

    async def acquire(self, session_id: str, holder: str, predecessor: str | None = None) -> None:
        """See `Target.acquire`; every change from here on is refused by the host once somebody else has taken it."""
        self.session_id, self.holders = session_id, predecessor or holder
        self.aside_free = False
        held = await lease.take(self.host, self.root, holder, self.settings.lease_s, predecessor)
        self.fenced = lease.FencedHost(self.host, held)
        await self.fenced.check(f"rm -f {shlex.quote(f'{self.root}/{WORD}')}")

    async def guard(self, known_good: LaunchSpec) -> None:
        """See `Target.guard`."""
        fenced = self._held()
        await lease.watch(fenced, self._restore(known_good, fenced.lease.epoch).render())

    async def renew(self) -> None:
        """See `Target.renew`; a watcher that is gone is started again."""
        fenced = self._held()
        if not await lease.renew(fenced):
            await lease.watch(fenced, None)

    async def adopt_again(self, process: ProcessId) -> None:
        """See `Target.adopt_again`."""
        self.adopted = process

    async def hand_over(self) -> None:
        """See `Target.hand_over`."""
        if self.fenced is not None:
            await lease.hand_over(self.fenced)
            self.fenced = None

    async def leave_word(self, text: str) -> None:
        """See `Target.leave_word`."""
        word = self.redactor.text(text).encode("utf-8", "surrogateescape")
        await self._held().put(f"{self.root}/{WORD}", word + b"\n")

    async def release(self) -> None:
        """See `Target.release`."""
        if self.fenced is not None:
            await lease.release(self.fenced)
            self.fenced = None

    async def restored_meanwhile(self) -> str | None:
        """See `Target.restored_meanwhile`."""
        left = await lease.marker(self.host, self.root, self.holders)
        return None if left is None else f"{left.result}: {left.detail} (epoch {left.epoch})"

    def _held(self) -> lease.FencedHost:
        if self.fenced is None:
            raise RefusedForSafety(
                "the target is not ours to change: no lease is held",
                where={"host": self.host.name},
                do="this is a defect of Ratchet; please report it",
            )
        return self.fenced

    def _restore(self, known_good: LaunchSpec, epoch: int) -> Restore:
        """What the watcher of our epoch has to do: the same operations and the same launch script as ours."""
        key = f"{self.session_id}-Tw{epoch}"
        service = self._service()
        runs = StopJobs(root=self.root, shape="*-M*", grace_s=5.0)
        return Restore(
            root=self.root,
            port=self.settings.port,
            key=key,
            fingerprint=known_good.process_fingerprint,
            adopted=self.adopted,
            adopted_is_good=self.original is not None
            and known_good.process_fingerprint == self.original.process_fingerprint,
            launch_script=service.launch_script(known_good, self.secrets, key),
            check=settle.foreign(self.root, known_good),
            operations=(
                runs,
                *service.plan(self.adopted, key),
                settle.before_start(self.root, known_good, epoch + 1, tolerant=True),
            ),
            live=settle.while_serving(self.root, known_good, epoch + 1),
            python=self.settings.python,
            generate=self.adapter.generate_request(
                self.settings.url,
                self.settings.model or "",
                "The capital of France is",
                timeout_s=min(60.0, self.settings.start_deadline_s),
                api_key_file=self.settings.api_key_file,
            ),
            deadline_s=self.settings.start_deadline_s,
            undrain=None
            if self.settings.draining is None
            else Undrain(root=self.root, draining=self.settings.draining),
        )

    # --- looking at the server -----------------------------------------------------------------------------

    async def adopt(self) -> Adoption:
        """See `Target.adopt`. After `prepare`, the secrets of the launch are kept on the host as well."""
        machine = await self.look_around()
        facts = await self._listener()
        if facts is None:
            raise ServerNotFound(
                f"nothing listens on port {self.settings.port}",
                where={"host": self.host.name, "url": self.settings.url},
                do="start the server, or correct server.url in the session file",
            )
        with unquoted():
            found = await find(self.host, facts, machine)
        self.holder, self.container = found.holder, found.container
        declared = await self._declare(facts)
        if self.prepared:
            self.secrets |= declared.secrets
            await self.host.put(f"{self.root}/secrets.json", json.dumps(self.secrets).encode())
        self.adopted, self.original = facts.process, declared.spec
        obstacles = (*_obstacles(facts, machine, found.holder), *found.obstacles)
        return Adoption(
            process=facts.process,
            spec=declared.spec,
            engine_version=self.version,
            hardware=await self._hardware(machine),
            reproducible=not obstacles,
            obstacles=obstacles,
            holder=found.holder,
        )

    async def room(self) -> Room:
        """See `Target.room`."""
        await self.look_around()
        seen = await ask(self.host, FolderFact(self.root, self.settings.python))
        return Room(path=self.root, free_mb=seen.free_mb, obstacle=seen.obstacle)

    async def open_files(self) -> int | None:
        """See `Target.open_files`."""
        await self.look_around()
        return await ask(self.host, OpenFilesFact())

    async def client(self) -> str:
        """See `Target.client`; asked in the way in which the client will be started."""
        words = self.bench.version_command()
        if not words:
            return self.bench.name
        said = await self.host.run(f"{quote(words)} 2>&1 </dev/null", timeout_s=120)
        version = next((line.strip() for line in reversed(said.text.splitlines()) if line.strip()), "")
        if not said.ok or not version:
            raise HostError(
                f"the benchmark client {self.bench.name} cannot be started",
                where={"host": self.host.name, "command": quote(words), "ended": said.ending},
                tail=said.text,
                do="install it on the host for the login's user, or correct workload.client_command",
            )
        return f"{self.bench.name} {version}; it lacks {'; '.join(self.bench.lacks)}"

    async def facts(self) -> TargetFacts:
        """See `Target.facts`."""
        machine = await self.look_around()
        memory, gpus = await ask(self.host, MemoryFact()), await ask(self.host, GpuFact())
        compute = await ask(self.host, ComputeFact()) if gpus.gpus else None
        server = await self._listener()
        named = None if server is None else model_named(server.argv, server.cwd or "/")
        assert self.known is not None, "facts are asked after a server was looked at"
        known, version = self.overlaid.get(self.in_front, (self.known, self.version))
        return TargetFacts(
            cores=machine.cores,
            mem_available_mb=memory.available_mb,
            gpus=len(gpus.gpus),
            known_flags=frozenset(known.flags),
            engine_version=version,
            compute=compute,
            model=None if named is None else await ask(self.host, ModelFact(named)),
            knobs=knobs(self.adapter, known),
            env_prefixes=self.adapter.env_prefixes,
        )

    def derive(self, spec: LaunchSpec, changes: tuple[Change, ...]) -> LaunchSpec:
        """See `Target.derive`; flags are those of the program that the changed spec starts, once that is known."""
        assert self.known is not None, "specs are derived after a server was looked at"
        beside = spec.beside
        for change in changes:
            beside = beside if isinstance(change, FlagChange | EnvChange) else with_beside(beside, change)
        folders = overlay.on_path(self.root, beside)
        known, _ = self.overlaid.get(folders, (self.known, self.version))
        derived = self.adapter.apply(spec, changes, known)
        if folders == overlay.on_path(self.root, spec.beside):
            return derived
        try:
            reading = self.adapter.read_argv(derived.argv, known)
        except ServerError as error:
            raise PolicyRefused(
                f"the changed program does not know the command line: {error.what}", where=error.where, do=error.do
            ) from error
        return derived.model_copy(update={"program": reading.program, "flags": reading.flags})

    async def stage(self, spec: LaunchSpec) -> None:
        """See `Target.stage`; of a changed program the flags and the version are learned here."""
        environ = self._environ(spec)
        ground = staging.Ground(
            host=self._held(),
            root=self.root,
            session_id=self.session_id,
            login=(await self.look_around()).user,
            python=self.settings.python,
            adapter=self.adapter,
            url=self.settings.url,
            api_key_file=self.settings.api_key_file,
            environ=environ,
            in_container=self.container is not None,
        )
        await staging.make_ready(ground, spec)
        self.has_asides = True
        try:
            await self._table(spec.argv, spec.cwd, environ, spec.beside)
        except (CommandFailed, ServerError) as error:
            raise PolicyRefused(
                f"the changed program cannot be asked for its flags: {error.what}", where=error.where, tail=error.tail
            ) from error

    async def serving(self) -> Serving | None:
        """See `Target.serving`."""
        facts = await self._listener()
        if facts is None:
            return None
        try:
            declared = await self._declare(facts)
        except ServerError as error:
            if await self._is_foreign(facts):
                raise self._foreign(facts) from error
            raise
        return Serving(process=facts.process, key=await self._launch_key(facts), spec=declared.spec)

    async def trouble(self) -> str | None:
        """See `Target.trouble`."""
        alive = await self._generates(min(60.0, self.settings.start_deadline_s))
        return None if alive.state in ("alive", "busy") else alive.reason

    async def foreign_cores(self) -> float | None:
        """See `Target.foreign_cores`."""
        facts = await self._listener()
        ours = () if facts is None else (facts.process.pid,)
        return (await ask(self.host, BusyFact(window_s=1.0, ours=ours))).foreign_cores

    async def foreign_traffic(self, max_rps: float = 0.0) -> str | None:
        """See `Target.foreign_traffic`; open connections cost a look at procfs, only then the server is asked.

        Twice, a moment apart: what ended just now may still be counted. Idle connections, such as a proxy's pool, are
        told from requests where the server shows how many it has in flight.
        """
        if max_rps:
            seen = await self._foreign_rps(min(LONGEST_RATE_LOOK_S, max(RATE_LOOK_S, 2 / max_rps)))
            return None if seen <= max_rps else f"{seen:.2f} requests a second, where {max_rps:g} are allowed,"
        said = None
        for _ in range(2):
            opened = await ask(self.host, ConnectionsFact(self.settings.port))
            if not opened:
                return None
            asked = self.adapter.in_flight(await self._looks())
            if asked == 0:
                return None
            said = f"{opened} open connections" if asked is None else f"{asked} requests in flight"
            await asyncio.sleep(TRAFFIC_LOOK_S)
        return said

    async def _foreign_rps(self, window_s: float) -> float:
        """Requests of others a second: by the server's own count, else by the connections that come meanwhile.

        One that stays open, as a client keeps it that sends one request after another, counts once then: a busy one
        where the server shows how many requests it has in flight, else any.
        """
        opened = await ask(self.host, ConnectionsFact(self.settings.port))
        if not opened:
            return 0.0
        before = await self._looks()
        counted = self.adapter.requests(before)
        if counted is None:
            came = await ask(self.host, VisitorsFact(self.settings.port, window_s))
            busy = self.adapter.in_flight(before)
            return (came + (opened if busy is None else busy)) / window_s
        await asyncio.sleep(window_s)
        return max(0.0, (self.adapter.requests(await self._looks()) or counted) - counted) / window_s

    async def _looks(self) -> dict[str, HttpAnswer]:
        """What the server says of its own state, by the id of the question."""
        looks = self.adapter.health_requests(self.settings.url, self.settings.api_key_file)
        return {a.id: a for a in await probe.http(self.host, self.settings.python, looks, deadline_s=10.0)}

    # --- draining ------------------------------------------------------------------------------------------

    async def drained(self) -> Drained:
        """See `Target.drained`."""
        await self.look_around()
        return await ask(self.host, DrainedFact(self.root, self._draining()))

    async def drain(self) -> str:
        """See `Target.drain`."""
        return await self._drain_or_back(Drain(root=self.root, draining=self._draining()))

    async def undrain(self) -> str:
        """See `Target.undrain`."""
        return await self._drain_or_back(Undrain(root=self.root, draining=self._draining()))

    async def _drain_or_back(self, operation: Drain | Undrain) -> str:
        """The probe before, the command, and the probe until it agrees: each has the deadline to itself."""
        deadline_s = 3 * operation.draining.deadline_s + 30
        return (await self._held().check(operation.render(), timeout_s=deadline_s)).text.strip()

    # --- for good --------------------------------------------------------------------------------------------

    def lasting(self, spec: LaunchSpec) -> str:
        """See `Target.lasting`."""
        return self._service().lasting(spec)

    async def persist(self, spec: LaunchSpec, key: str) -> str | None:
        """See `Target.persist`."""
        script = self._service().persist_script(spec, self.secrets, key)
        if script is None:
            return None
        text = script.encode("utf-8", "surrogateescape")  # not in a command line, which everybody can read
        return (await self._held().check(ALL_OF_STDIN_SH, stdin=text, timeout_s=60)).text.strip()

    async def unpersist(self) -> None:
        """See `Target.unpersist`."""
        script = self._service().unpersist_script(self.session_id)
        if script is not None:
            await self._held().check(script, timeout_s=60)

    def _draining(self) -> Draining:
        assert self.settings.draining is not None, "draining is asked for only where a session file says how"
        return self.settings.draining

    def by_hand(self, key: str) -> str:
        """See `Target.by_hand`; the script holds what the command line in the log does not: secrets and environment."""
        run = shlex.quote(f"{jobs.job_dir(self.root, key)}/run.sh")
        place = shlex.quote(f"{jobs.job_dir(self.root, key)}/settle.sh")
        first = f"/bin/sh {place} && " if self.has_asides else ""
        return f"look at what the server said; to start it by hand, on {self.host.name}: {first}setsid /bin/sh {run} &"

    async def boot_id(self) -> str:
        """See `Target.boot_id`."""
        return (await ask(self.host, MachineFact())).boot_id

    async def clock(self) -> HostClock:
        """See `Target.clock`."""
        return await ask(self.host, ClockFact())

    # --- launching -----------------------------------------------------------------------------------------

    async def launch(self, key: str, spec: LaunchSpec, stopped: Callable[[], None] = unheard) -> str:
        """See `Target.launch`."""
        if (await jobs.look(self.host, self.root, key)).phase not in ("absent", "prepared"):
            return ""
        facts = await self._listener()
        if facts is not None and await self._is_foreign(facts):
            raise self._foreign(facts)
        await self._refuse_changed(spec)
        script = self._service().launch_script(spec, self.secrets, key)
        await jobs.prepare(self._held(), self.root, key, script)
        settling = settle.before_start(self.root, spec, self._held().lease.epoch)
        if self.has_asides:
            by_hand = settling.model_copy(update={"epoch": None}).render().encode("utf-8", "surrogateescape")
            await self._held().put(f"{jobs.job_dir(self.root, key)}/settle.sh", by_hand)
        told = ""
        for operation in self._service().plan(self.adopted, key):
            done = await self._held().check(operation.render(), timeout_s=2 * self.settings.stop_grace_s + 60)
            told += done.text
        stopped()
        settled = await self._held().run(settling.render(), timeout_s=SETTLE_S)
        if not settled.ok:
            script = _not_begun(settled.tail) + script
        await jobs.start(self._held(), self.root, key, script)
        return told.strip()

    async def adjust(self, key: str, spec: LaunchSpec) -> Failure | None:
        """See `Target.adjust`."""
        facts = await self._listener()
        if facts is None:
            return Failure(failure_class="vanished", cause=f"nobody serves for {key}", action=Action.RETRY_ONCE)
        if await self._is_foreign(facts):
            raise self._foreign(facts)
        settling = settle.while_serving(self.root, spec, self._held().lease.epoch)
        settled = await self._held().run(settling.render(), timeout_s=SETTLE_S)
        if not settled.ok:
            cause = settled.tail.splitlines()[-1] if settled.tail else f"the change ended with {settled.ending}"
            return Failure(
                failure_class=FailureClass.CONFIG_INVALID, cause=cause, tail=settled.tail, action=Action.REJECT
            )
        trouble = await self.trouble()
        if trouble is None:
            return None
        cause = f"it does not generate any more: {trouble}"
        return Failure(failure_class=FailureClass.CRASH_WHILE_SERVING, cause=cause, action=Action.REJECT)

    async def launched(self, key: str) -> bool:
        """See `Target.launched`."""
        return (await jobs.look(self.host, self.root, key)).phase not in ("absent", "prepared")

    async def await_ready(self, key: str) -> Ready | Failure:
        """See `Target.await_ready`: the job lives, its process listens, and a real request is answered."""
        deadline = time.monotonic() + self.settings.start_deadline_s
        while True:
            state = await jobs.look(self.host, self.root, key)
            if state.phase != "running":
                return await self._diagnosed(key, state.exit)
            facts = await self._listener()
            if facts is not None and await self._launch_key(facts) == key:
                alive = await self._generates(max(5.0, deadline - time.monotonic()))
                if alive.state == "alive":
                    return await self._as_asked(facts) or await self._ready(key, facts)
            if time.monotonic() > deadline:
                told = await self._diagnosed(key, None)
                if told.failure_class != FailureClass.UNKNOWN:
                    return told
                cause = f"no token within {self.settings.start_deadline_s:.0f} s"
                return told.model_copy(update={"failure_class": FailureClass.HANG, "cause": cause})
            await asyncio.sleep(READY_POLL_S)

    async def running_jobs(self) -> tuple[str, ...]:
        """Keys of all jobs of ours that have begun and not ended."""
        folder = shlex.quote(f"{self.root}/jobs")
        listed = await self.host.check(
            f'for d in {folder}/*; do [ -d "$d/begun" ] && [ ! -f "$d/exit" ] && echo "${{d##*/}}"; done; :'
        )
        return tuple(listed.text.split())

    # --- benchmarking --------------------------------------------------------------------------------------

    async def begin_run(self, key: str, request: RunRequest) -> None:
        """See `Target.begin_run`."""
        place = Place(
            python=self.settings.python,
            client=f"{self.root}/stream_client.py",
            url=self.settings.url,
            model=self.settings.model,
            api_key_file=self.settings.api_key_file,
        )
        mark = "" if request.launch is None else server_words.mark_sh(jobs.job_dir(self.root, request.launch))
        await jobs.start(self._held(), self.root, key, mark + self.bench.script(key, request, place))

    async def look_run(self, key: str) -> RunState:
        """See `Target.look_run`."""
        state = await jobs.look(self.host, self.root, key)
        if state.phase in ("absent", "prepared"):
            return RunState(phase="absent")
        if state.phase != "running":
            return RunState(phase="ended" if state.phase == "ended" else "vanished")
        with suppress(CommandFailed, ValueError):
            if self.bench.progress is None:
                return RunState(phase="running")
            seen = json.loads(await jobs.read(self.host, self.root, key, self.bench.progress))
            return RunState(
                phase="running",
                elapsed_s=seen["elapsed_s"] or 0.0,
                done=seen["done"],
                output_tokens=seen["output_tokens"],
            )
        return RunState(phase="running")

    async def collect_run(self, key: str) -> RunResult:
        """See `Target.collect_run`."""
        try:
            return self._storable(self.bench.parse(await self._left(key), key), key)
        except CommandFailed as error:
            said = await jobs.tail(self.host, self.root, key, "stderr", 12)
            raise CommandFailed(
                f"the benchmark client left no usable result: {error.what}",
                where={**error.where, "run": key},
                tail="\n".join(filter(None, (error.what, said or error.tail))),
                do="run the client by hand in the job's folder on the host",
            ) from error

    async def said_during(self, key: str) -> str:
        """See `Target.said_during`."""
        return (await self.host.check(server_words.said_sh(jobs.job_dir(self.root, key)))).text

    async def stop_run(self, key: str) -> None:
        """See `Target.stop_run`."""
        await jobs.stop(self._held(), self.root, key, 5.0)

    async def log_end(self, key: str) -> str:
        """See `Target.log_end`."""
        return (await self.host.check(server_words.end_sh(jobs.job_dir(self.root, key)))).text

    async def search_source(self, roots: tuple[str, ...], text: str, files: str) -> str:
        """See `Target.search_source`."""
        limit_s = source_search.SECONDS * len(roots) + 20.0
        return (await self.host.check(source_search.search_sh(roots, text, files, self.root), timeout_s=limit_s)).text

    async def pause(self, seconds: float) -> None:
        """See `Target.pause`."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """See `Target.close`."""
        await self.host.close()

    # --- parts ---------------------------------------------------------------------------------------------

    def _service(self) -> Service:
        where = self.root, self.settings.port, self.settings.stop_grace_s
        if self.holder.kind == "process" or self.original is None:
            return BareProcess(*where)
        if self.container is None:
            return SystemdUnit(*where, self.holder, self.original)
        return InContainer(*where, self.holder, self.original, self.container)

    async def _needs(self, machine: Machine) -> None:
        """The few things that everything needs; said before anything is touched."""
        missing = [] if "setsid" in machine.tools else ["setsid (util-linux)"]
        version = await self.host.run(
            f"{quote([self.settings.python])} -c 'import sys; print(sys.version_info >= (3, 8))'"
        )
        if not version.ok or version.text.strip() != "True":
            missing.append(f"Python 3.8 or later as {self.settings.python} (it says: {version.tail or version.text})")
        if missing:
            raise HostError(
                f"the host lacks what the benchmark client needs: {'; '.join(missing)}",
                where={"host": self.host.name},
                do="install it, or name another interpreter as target.python",
            )

    async def _listener(self) -> ProcessFacts | None:
        """The process that holds the server's port; of a forking server the one that the others descend from."""
        await self.look_around()
        if self.settings.pid is not None and self.adopted is None:
            return await ask(self.host, ProcessFact(self.settings.pid))
        seen = await self._holders()
        pids = {pid for listener in seen.listeners for pid in listener.pids}
        found = [facts for pid in sorted(pids) if (facts := await ask(self.host, ProcessFact(pid))) is not None]
        roots = [facts for facts in found if facts.ppid not in pids]
        return roots[0] if roots else None

    async def _holders(self) -> PortFacts:
        """Who holds the server's port; a process that is just ending shows nobody for a while, which is waited out."""
        for _ in range(ENDING_LOOKS):
            seen = await ask(self.host, ListenersFact(self.settings.port))
            if seen.observed and all(listener.pids for listener in seen.listeners):
                return seen
            await asyncio.sleep(READY_POLL_S)
        raise HostError(
            f"who listens on port {self.settings.port} cannot be observed",
            where={"host": self.host.name, "user": self.machine.user if self.machine else ""},
            do="log in as the user that runs the server, or as root",
        )

    async def _declare(self, facts: ProcessFacts) -> Declared:
        if facts.environ is None or facts.cwd is None:
            raise ServerError(
                f"process {facts.process.pid} belongs to {facts.user} and cannot be read",
                where={"host": self.host.name, "login": self.machine.user if self.machine else ""},
                do="log in as the user that runs the server, or as root",
            )
        environ, digests = overlay.parted(self.root, facts.environ)
        seen = await self._asides(digests)
        beside = arranged(change for one in seen if one.state != settle.OFF for change in one.changes)
        known, _ = await self._table(facts.argv, facts.cwd, environ, beside)
        self.in_front = overlay.on_path(self.root, beside)
        declared = make_spec(
            self.adapter,
            known,
            argv=facts.argv,
            cwd=facts.cwd,
            user=facts.user,
            environ=environ,
            limits=facts.limits,
            keyed=self._keyed,
        )
        self.redactor.learn(declared.spec, declared.secrets)
        return declared._replace(spec=declared.spec.model_copy(update={"beside": beside}))

    async def _asides(self, overlays: Sequence[str]) -> tuple[settle.Seen, ...]:
        """What may be in effect beside the command line.

        Only who holds the lease can make an aside, by `stage`. So while we hold it and have seen that there is none,
        there is none, and the host is not asked at every look.
        """
        if self.fenced is not None and self.aside_free and not self.has_asides and not overlays:
            return ()
        seen = await record.look(self.host, self.root, overlays)
        self.has_asides = self.has_asides or bool(seen)
        self.aside_free = self.fenced is not None
        return seen

    async def learn(self, spec: LaunchSpec) -> None:
        """Flags and version of a recorded server, which need not run just now."""
        await self._table(spec.argv, spec.cwd, self._environ(spec), spec.beside)

    def _environ(self, spec: LaunchSpec) -> dict[str, str]:
        """All variables of a spec, in clear."""
        return {name: revealed(value, self.secrets) for name, value in {**spec.hidden_env, **spec.env}.items()}

    async def _table(
        self, argv: tuple[str, ...], cwd: str, environ: Mapping[str, str], beside: tuple[Beside, ...]
    ) -> tuple[FlagTable, str]:
        """Flags and version of a program; each set of packages in front of its own makes another one of it."""
        folders = overlay.on_path(self.root, beside)
        if not folders and self.known is not None:
            return self.known, self.version
        if folders not in self.overlaid:
            self.overlaid[folders] = await self._learn(argv, cwd, overlay.in_front(self.root, beside, environ))
        if not folders or self.known is None:
            self.known, self.version = self.overlaid[folders]
        return self.overlaid[folders]

    async def _learn(self, argv: tuple[str, ...], cwd: str, environ: Mapping[str, str]) -> tuple[FlagTable, str]:
        """Flags and version, from the very program: started as it is, but without its arguments; or as kept of it."""
        program = self.adapter.program(argv)
        kept = {name: environ[name] for name in LOADER_VARIABLES if name in environ}
        # A question leaves no compiled files behind.
        words = ["env", "-i", "PYTHONDONTWRITEBYTECODE=1", *(f"{name}={value}" for name, value in kept.items())]

        def in_place(command: Sequence[str]) -> str:
            if self.container is not None:
                return f"{{ {in_place_sh(self.holder, self.root, self.container, command)}\n}} 2>&1 </dev/null"
            return f"cd {shlex.quote(cwd)} && {quote([*words, *command])} 2>&1 </dev/null"

        commands = self.adapter.help_command(program), self.adapter.version_command(program)
        signed = await signature(self.host, in_place, program[0], self.adapter.packages)
        place = "" if self.container is None else self.container.id
        key = None if signed is None else key_of(signed, list(map(list, commands)), cwd, kept, place)
        said = None if key is None else await self.helps.find(self.root, key)
        if said is None:
            said = [(await self.host.check(in_place(command), timeout_s=120)).text for command in commands]
        learned = self.adapter.parse_help(said[0]), self.adapter.parse_version(said[1])
        if key is not None:
            self.helps.note(key, said)
            if self.prepared:
                await self.helps.keep(self.root)
        return learned

    async def _generates(self, timeout_s: float) -> probe.Liveness:
        return await probe.generates(
            self.host,
            self.settings.python,
            self.adapter,
            self.settings.url,
            model=self.settings.model,
            timeout_s=timeout_s,
            api_key_file=self.settings.api_key_file,
        )

    async def _ready(self, key: str, facts: ProcessFacts) -> Ready:
        """Read the running configuration back and compare it with what was asked."""
        spec = (await self._declare(facts)).spec
        log = await self._log(key)
        looks = self.adapter.health_requests(self.settings.url, self.settings.api_key_file)
        answers = {a.id: a for a in await probe.http(self.host, self.settings.python, looks)}
        differs = self.adapter.mismatches(spec, self.adapter.effective(answers, log))
        uptime = (await ask(self.host, MachineFact())).uptime_s
        started = facts.process.start_ticks / _clock_ticks()
        return Ready(process=facts.process, load_s=max(0.0, uptime - started), mismatches=differs)

    async def _as_asked(self, facts: ProcessFacts) -> Failure | None:
        """A Failure when a manager started an experiment in another configuration, such as by a later drop-in.

        Of the original this is not asked: it is what it is.
        """
        recorded = await launch_of(self.host, self.root, facts.process) if self.holder.kind != "process" else None
        if recorded is None or self.original is None or recorded.fingerprint == self.original.process_fingerprint:
            return None
        spec = (await self._declare(facts)).spec
        if spec.process_fingerprint == recorded.fingerprint:
            return None
        cause = f"{self.holder} started another configuration than was asked for: {' '.join(spec.argv)}"
        return Failure(failure_class=FailureClass.CONFIG_INVALID, cause=cause, tail="", action=Action.REJECT)

    async def _launch_key(self, facts: ProcessFacts) -> str | None:
        """The launch that this process is; what a manager started for us is known by its follower's record."""
        if self.holder.kind != "process" and (recorded := await launch_of(self.host, self.root, facts.process)):
            return recorded.key
        environ = facts.environ or {}
        folder, _, key = (environ.get("RATCHET_JOB") or environ.get(MARK, "")).rstrip("/").rpartition("/")
        return key if key and folder == f"{self.root}/jobs" else None

    async def _is_foreign(self, facts: ProcessFacts) -> bool:
        return await self._launch_key(facts) is None and facts.process != self.adopted

    async def _refuse_changed(self, spec: LaunchSpec) -> None:
        """Nobody else's edits are overwritten, and no server is stopped to find that out."""
        told = await self.host.run(settle.foreign(self.root, spec).render(), timeout_s=SETTLE_S)
        if not told.ok:
            raise ForeignChange(
                "what a change of ours is about was changed by somebody else",
                where={"host": self.host.name, "records": f"{self.root}/asides"},
                tail=told.tail,
                do="put the file back as it was (its original lies in the records) or as we left it, then `resume`",
            )

    def _foreign(self, facts: ProcessFacts) -> ForeignChange:
        """Without its arguments, which may hold a secret."""
        return ForeignChange(
            f"port {self.settings.port} is held by a process that is not ours",
            where={
                "host": self.host.name,
                "process": facts.process.pid,
                "user": facts.user,
                "program": facts.exe or facts.name,
            },
            do="find out who started it; it was left alone",
        )

    def _keyed(self, text: str) -> str:
        return hmac.new(self.hash_key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()[:16]

    async def _diagnosed(self, key: str, code: int | None) -> Failure:
        """Why a launch failed; the log is redacted first, since what is told of it is cut to length."""
        return diagnose(self.adapter.engine, self.redactor.text(await self._log(key)), code)

    async def _log(self, key: str) -> str:
        """The start of the server's log and its end: causes stand early, reports late. A cut line is left out."""
        texts = []
        for name in ("stdout", "stderr"):
            path = f"{jobs.job_dir(self.root, key)}/{name}"
            head = await self.host.get(path, limit=CHUNK_BYTES // 4)
            if len(head) < CHUNK_BYTES // 4:
                texts.append(head.decode("utf-8", "replace"))
                continue
            texts.append(head.rpartition(b"\n")[0].decode("utf-8", "replace"))
            texts.append(await jobs.tail(self.host, self.root, key, name, 400))
        return "\n".join(texts)

    async def _client_key(self) -> None:
        """Know the client's own key, to keep it out of texts; a file that cannot be read is told by its first use."""
        if self.settings.api_key_file is None:
            return
        with unquoted():
            read = await self.host.run(f"cat {shlex.quote(self.settings.api_key_file)}")
        for line in read.text.splitlines() if read.ok else ():
            self.redactor.hide(CLIENT_KEY, line)

    async def _file(self, name: str) -> bytes | None:
        """A file of our directory, None when it is not there; one that is there but cannot be read is an error."""
        path = f"{self.root}/{name}"
        there = await self.host.run(f"[ -e {shlex.quote(path)} ]")
        with unquoted():
            return await self.host.get(path) if there.ok else None

    def _read(self, name: str, stored: bytes, parse: Callable[[bytes], Known]) -> Known:
        """A file of ours; a power cut can leave one empty."""
        try:
            return parse(stored)
        except ValueError as error:
            raise HostError(
                f"our file {name} on the host is damaged: {error}",
                where={"host": self.host.name, "path": f"{self.root}/{name}", "bytes": len(stored)},
                do="put it back from a backup; without one, end the session, remove the folder and `start` anew",
            ) from error

    async def _whole(self, path: str) -> bytes:
        parts: list[bytes] = []
        while not parts or len(parts[-1]) == CHUNK_BYTES:
            parts.append(await self.host.get(path, offset=sum(map(len, parts))))
        return b"".join(parts)

    async def _left(self, key: str) -> dict[str, bytes]:
        """The files that the client left of those it should; only the first is sure to be there."""
        sure, *others = self.bench.leaves
        files = {sure: await self._whole(f"{jobs.job_dir(self.root, key)}/{sure}")}
        for name in others:
            with suppress(CommandFailed):
                files[name] = await self._whole(f"{jobs.job_dir(self.root, key)}/{name}")
        return files

    def _storable(self, result: RunResult, key: str) -> RunResult:
        """The result without secrets; its figures are those of what is stored, as a later check reads them again."""
        answers = tuple(
            one.model_copy(update={"error": self.redactor.text(one.error)}) if one.error else one
            for one in result.answers
        )
        raw = self.redactor.data(result.raw)
        told = result if raw == result.raw else self.bench.again(raw, key)
        return told.model_copy(update={"answers": answers})

    async def _hardware(self, machine: Machine) -> str:
        gpus = await ask(self.host, GpuFact())
        names = ", ".join(gpu.name for gpu in gpus.gpus) or "no GPU"
        return f"{machine.cores} × {machine.cpu_model}, {machine.mem_total_mb / 1024:.0f} GiB, {names}"


def _not_begun(why: str) -> str:
    """The start of a launch script that only a person may go on with: what it needs was not brought about."""
    said = shlex.quote(why or "what the configuration needs beside its command line could not be brought into effect")
    return f'[ -z "${{RATCHET_JOB:-}}" ] || [ -n "${{RATCHET_CLEAN:-}}" ] || {{ echo {said} >&2; exit 78; }}\n'


def _obstacles(facts: ProcessFacts, machine: Machine, holder: Holder) -> tuple[str, ...]:
    """Why a process that nobody holds could not be started again as it is; a manager brings user and streams along."""
    if holder.kind != "process":
        return ()
    found = []
    if facts.has_tty:
        found.append("it is attached to a terminal")
    if facts.user != machine.user:
        found.append(f"it runs as {facts.user}, the login is {machine.user}")
    return tuple(found)


def _key(stored: bytes) -> bytes:
    key = bytes.fromhex(stored.decode())
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, here are {len(key)}")
    return key


def _secrets(stored: bytes) -> dict[str, str]:
    found = json.loads(stored)
    if not isinstance(found, dict):
        raise ValueError("it holds no names with values")
    return found


def _clock_ticks() -> int:
    """Ticks per second of /proc/PID/stat: 100 on every Linux that this runs on (proc(5), USER_HZ)."""
    return 100
