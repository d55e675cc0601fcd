"""The seam between judgement and the world: what can be done to a target, whatever it is; no implementation here.

Every method that changes the world is idempotent by its key, so that doing it again after a crash changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from pydantic import Field

from state.models import (
    Adoption,
    Answer,
    Change,
    Failure,
    Frozen,
    HostClock,
    LaunchSpec,
    LoadPoint,
    Metrics,
    ProcessId,
    Telemetry,
    Workload,
)
from tools.servers.base import KnownFlag


def unheard() -> None:
    """For a moment that nobody waits for."""


class TargetFacts(Frozen):
    """What a planner may know about the target without touching it again."""

    cores: int
    mem_available_mb: float
    gpus: int
    known_flags: frozenset[str]
    engine_version: str
    compute: float | None = Field(default=None, description="least compute capability of the GPUs; None if not known")
    model: dict[str, Any] | None = Field(default=None, description="the model's config.json; None if not found")
    knobs: tuple[KnownFlag, ...] = Field(default=(), description="flags that are open to experiments")
    env_prefixes: tuple[str, ...] = Field(default=(), description="how variables begin that are open to experiments")


class Room(Frozen):
    """What a host offers for our files; `obstacle` says why they cannot lie there."""

    path: str
    free_mb: float
    obstacle: str | None = None


class Serving(Frozen):
    """The process that listens on the server's port; `key` names the launch if it was ours."""

    process: ProcessId
    key: str | None
    spec: LaunchSpec


class Drained(Frozen):
    """Whether the server is out of its users' way: by our doing, and by what a person's probe says."""

    ours: bool = Field(description="we took it out, or began to")
    seen: bool | None = Field(description="what the probe says; None where there is none or it cannot tell")
    trouble: str = Field(default="", description="why the probe cannot tell")


class Ready(Frozen):
    """A launch that generates, with what its read-back configuration does differently from what was asked."""

    process: ProcessId
    load_s: float
    mismatches: tuple[str, ...] = ()


class RunRequest(Frozen):
    """One benchmark run to be made on the host."""

    point: LoadPoint
    workload: Workload
    seed: int
    process: ProcessId
    launch: str | None = Field(default=None, description="key of the launch that is measured; None if it is not ours")
    answers: bool = Field(default=False, description="ask the fixed prompts once the run is measured")


class RunState(Frozen):
    """Where a benchmark job stands; `vanished` means that it began and neither runs nor left a result."""

    phase: Literal["absent", "running", "ended", "vanished"]
    elapsed_s: float = 0.0
    done: int = 0
    output_tokens: int = 0


class RunResult(Frozen):
    """The figures of an ended run, what was answered to the fixed prompts, and the rest of the client's own result.

    A prompt that was not asked, or that our own deadline cut off, is not among the answers.
    """

    metrics: Metrics
    telemetry: Telemetry
    answers: tuple[Answer, ...] = ()
    raw: dict[str, Any]


class Target(Protocol):
    """A host with one server on it."""

    name: str

    async def guard(self, known_good: LaunchSpec) -> None:
        """See that the host itself brings `known_good` back when we fall silent; repeating it replaces the spec."""
        ...

    async def renew(self) -> None:
        """Say that we are still here. Raises LeasePassedOn when the host or another agent took over."""
        ...

    async def acquire(self, session_id: str, holder: str, predecessor: str | None = None) -> None:
        """Take the target for a session. Raises TargetLocked while somebody else holds it.

        `predecessor` begins the names of holders that are known to be dead.
        """
        ...

    async def adopt_again(self, process: ProcessId) -> None:
        """The adopted server lives on as another process, after a boot of the host."""
        ...

    async def hand_over(self) -> None:
        """Let the host put known-good back now, as if we had fallen silent long ago; we must not act afterwards."""
        ...

    def by_hand(self, key: str) -> str:
        """What a person has to type to begin launch `key` without us."""
        ...

    async def boot_id(self) -> str:
        """Which boot of the host this is."""
        ...

    async def clock(self) -> HostClock:
        """What the host's own clock shows, and by which time zone; reads only."""
        ...

    async def leave_word(self, text: str) -> None:
        """Leave a note on the host for the person who has to look; taking the target again removes it."""
        ...

    async def release(self) -> None:
        """Nobody has to watch any more: what serves is what shall serve."""
        ...

    async def restored_meanwhile(self) -> str | None:
        """What the host's watcher did last since the session's first agent came, None when nothing; always the same
        words for the same deed, so that an agent can see whether a former one has told it already.
        """
        ...

    async def adopt(self) -> Adoption:
        """Look at the running server and describe it; reads only. Raises ServerNotFound."""
        ...

    async def room(self) -> Room:
        """Whether our files can lie on the host; reads only."""
        ...

    async def client(self) -> str:
        """The benchmark client's name and version, and what it lacks, in words; reads only.

        Raises HostError when it cannot be started there.
        """
        ...

    async def open_files(self) -> int | None:
        """How many files a benchmark client may open there, None for any number; reads only."""
        ...

    async def facts(self) -> TargetFacts:
        """What planners may know; reads only."""
        ...

    def derive(self, spec: LaunchSpec, changes: tuple[Change, ...]) -> LaunchSpec:
        """The spec with the changes applied. Raises PolicyRefused for a flag or value the server does not know."""
        ...

    async def stage(self, spec: LaunchSpec) -> None:
        """Make everything ready that a launch of the spec needs beside the command line, while the old server serves.

        May be repeated. Raises PolicyRefused with the reason when it cannot be had; nothing that serves was touched.
        """
        ...

    async def serving(self) -> Serving | None:
        """Who listens on the server's port now, None when nobody does."""
        ...

    async def launch(self, key: str, spec: LaunchSpec, stopped: Callable[[], None] = unheard) -> str:
        """Stop the server that serves, if it is the adopted one or ours, and begin `spec` as launch `key`.

        Returns what was out of the ordinary on the way, in words. `stopped` is called in between, when nobody serves.
        What is live of the spec is left to `adjust`. Does nothing when launch `key` has begun already.
        Raises ForeignChange when somebody else's process serves, or a file that a change is about was changed by
        somebody else; nothing was stopped then.
        """
        ...

    async def launched(self, key: str) -> bool:
        """Whether launch `key` ever began."""
        ...

    async def await_ready(self, key: str) -> Ready | Failure:
        """Wait until launch `key` generates; a Failure when it ended or its deadline passed."""
        ...

    async def adjust(self, key: str, spec: LaunchSpec) -> Failure | None:
        """Bring the serving process into the live state of the spec, as trial `key`; it is not started anew.

        Nothing is done twice. A Failure when it is another process or does not generate afterwards. Raises
        ForeignChange when somebody else's process serves.
        """
        ...

    async def trouble(self) -> str | None:
        """Why the serving process does not generate now, None when it does."""
        ...

    async def begin_run(self, key: str, request: RunRequest) -> None:
        """Begin a detached benchmark job; does nothing when it has begun already."""
        ...

    async def look_run(self, key: str) -> RunState:
        """Where the job stands."""
        ...

    async def collect_run(self, key: str) -> RunResult:
        """The result of an ended job. Raises CommandFailed when it left none."""
        ...

    async def said_during(self, key: str) -> str:
        """What the server of our own launch wrote to its log from the begin of run `key` until now, else nothing."""
        ...

    async def stop_run(self, key: str) -> None:
        """End the job, if it runs."""
        ...

    async def foreign_cores(self) -> float | None:
        """How many cores are busy with work that is neither the server's nor ours, None when unobservable."""
        ...

    async def foreign_traffic(self, max_rps: float = 0.0) -> str | None:
        """Who else uses the server just now, in words; to be asked only while nothing of ours asks it anything.

        Up to `max_rps` requests a second of others are nobody; seeing how many there are takes some seconds then.
        """
        ...

    async def drained(self) -> Drained:
        """Whether the server is out of its users' way; reads only. Not to be asked where nothing can drain it."""
        ...

    async def drain(self) -> str:
        """Take the server out of its users' way, unless it is; what was out of the ordinary, in words.

        Raises CommandFailed when it is not out afterwards.
        """
        ...

    async def undrain(self) -> str:
        """Give the server back to its users if it was us who took it out. Raises CommandFailed when it still is."""
        ...

    def lasting(self, spec: LaunchSpec) -> str:
        """What a person has to type so that `spec` outlives a reboot; secrets stand there as $NAME."""
        ...

    async def persist(self, spec: LaunchSpec, key: str) -> str | None:
        """See that `spec`, which serves as launch `key`, comes back after a reboot; what was done, in words.

        None where nobody starts the server at a reboot. Raises CommandFailed.
        """
        ...

    async def unpersist(self) -> None:
        """Take back what `persist` did in this session; does nothing when that was nothing."""
        ...

    async def log_end(self, key: str) -> str:
        """The last lines that the server of launch `key` has written to its log by now; empty when it left none."""
        ...

    async def search_source(self, roots: tuple[str, ...], text: str, files: str) -> str:
        """Lines of files under the folders `roots` that hold a literal text; `files` is a pattern of their names.

        Few lines, for a short time, and nothing outside the roots. Raises CommandFailed when it cannot be searched.
        """
        ...

    async def pause(self, seconds: float) -> None:
        """Let time pass on the target; the only way in which judgement waits."""
        ...

    async def close(self) -> None:
        """Let go of the connection; the target keeps doing what it does."""
        ...
