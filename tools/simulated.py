"""A simulated target: one JSON file is the world, one log file the outside witness; it never touches a real host.

For speed and for faults that cannot be had otherwise. The world outlives the agent (a SIGKILL leaves it as it is),
figures are drawn from the names of launch and run, so that asking twice gives the same answer, and every launch
and run is written to `world.log` by the world itself, where tests count them. A recorded server can be played instead
of a scenario's effects: then the world's clock goes on by what its launches and runs took, and the world, of which
nothing but one long session is asked, stays in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from state.errors import CommandFailed, ForeignChange, PolicyRefused, ServerNotFound
from state.models import (
    Adoption,
    Answer,
    Change,
    Failure,
    FlagChange,
    Frozen,
    HostClock,
    LaunchSpec,
    ProcessId,
    with_beside,
)
from tools.benches import builtin
from tools.diagnose import Action, FailureClass, diagnose
from tools.servers.base import FlagTable, KnownFlag
from tools.servers.checks import check_flag
from tools.simulated_answers import Likeness, simulated_answers
from tools.target import Drained, Ready, Room, RunRequest, RunResult, RunState, Serving, TargetFacts, unheard

BOOT = "simulated-boot"
CORES = 4
LOAD_LOOK_S = 0.5
LOOK_S = 0.02
HOLD = "hold"
LOOKS = 8
"""How often a run of a recorded server is seen running, about."""


class SimEffect(Frozen):
    """Setting `name` to `value` multiplies output tok/s by `ratio` (per load point, "*" for all others).

    A change beside the command line is named by its subject, such as `hot:poll` or `patch:/opt/engine`.
    What the server says is diagnosed by the same rules as a real one's log.
    """

    name: str
    value: str = Field(description="as text; '*' for any value")
    ratio: dict[str, float] = Field(default_factory=lambda: {"*": 1.0})
    answers: Likeness = Field(default="same", description="what it does to the answers to the fixed prompts")
    fails: int = Field(default=0, ge=0, description="so many requests of each run are answered with an error")
    refuses: str | None = Field(default=None, description="the server ends at start with this log")
    unstageable: str | None = Field(default=None, description="the change is refused before anything is stopped")
    slow_s: float = Field(default=0.0, ge=0, description="a launch with it generates so much later")
    exit_code: int = Field(default=1, description="with which it ends then")
    says: str | None = Field(default=None, description="what its log says during a run")
    dies: bool = Field(default=False, description="it ends under a run, having said so")
    times: int | None = Field(default=None, description="so many launches end, or runs are spoilt, and no more")
    above: float | None = Field(default=None, description="only for a value above it")
    below: float | None = Field(default=None, description="only for a value below it")
    when: tuple[str, str] | None = Field(default=None, description="name and value that it takes as well")
    unless: tuple[str, str] | None = Field(default=None, description="name and value that take the effect away")

    def holds(self, settings: Mapping[str, str]) -> bool:
        """Whether a server with these settings shows it."""
        value = settings.get(self.name)
        if value is None or self.value not in ("*", value):
            return False
        if self.above is not None and not float(value) > self.above:
            return False
        if self.below is not None and not float(value) < self.below:
            return False
        if self.when is not None and settings.get(self.when[0]) != self.when[1]:
            return False
        return self.unless is None or settings.get(self.unless[0]) != self.unless[1]


class Scenario(Frozen):
    """A simulated server: its flags, its speed at each load point, what changes do to it, and its noise."""

    engine: str = Field(default="llamacpp", description="whose failure rules apply")
    flags: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    known_flags: frozenset[str]
    env: dict[str, str] = Field(default_factory=dict)
    env_prefixes: tuple[str, ...] = ()
    cores: int = CORES
    gpus: int = 0
    knobs: tuple[KnownFlag, ...] = Field(default=(), description="of these flags the values are checked too")
    base_tok_s: dict[str, float]
    effects: tuple[SimEffect, ...] = ()
    run_noise: float = 0.01
    launch_noise: float = 0.005
    foreign_cores: float = 0.0
    polls_per_run: int = Field(default=2, description="how often a run is seen running before it has ended")
    launch_s: float = 1.0
    clock: HostClock = Field(default=HostClock(unix=0.0), description="what the host's clock shows as the world begins")
    source: dict[str, str] = Field(default_factory=dict, description="files of the engine's source, by path")
    drain_fails: bool = Field(default=False, description="the command that drains ends with an error")
    undrain_fails: int = Field(default=0, description="so many times the command that gives it back does")
    seed: int = 1


class RecordedStart(Frozen):
    """How a launch of a recorded server goes: how long until it serves or ends, and the log with which it ends."""

    seconds: float
    refused: str | None = None


class RecordedRun(Frozen):
    """How a run of a recorded server goes: its figure, its measured window, and what it takes beyond that."""

    tok_s: float
    measured_s: float
    idle_s: float = 0.0


class Recorded(Protocol):
    """A recorded server: the same names always get the same answer."""

    def start(self, launch: str, spec: LaunchSpec) -> RecordedStart:
        """What comes of a launch."""
        ...

    def run(self, launch: str, run: str, spec: LaunchSpec, request: RunRequest) -> RecordedRun:
        """What comes of a run on a launch."""
        ...


class SimulatedTarget:
    """A Target whose world is the folder `path`, or in memory where a recorded server is played."""

    def __init__(self, path: Path, scenario: Scenario, recorded: Recorded | None = None) -> None:
        self.name = "simulated"
        self.path = path
        self.scenario = scenario
        self.recorded = recorded
        self._remembered: dict[str, Any] = {}
        path.mkdir(parents=True, exist_ok=True)
        if not self._file.exists():
            self._save({"pids": 100, "clock": 0.0, "server": self._process("adopted", self._original(), 100)})

    # --- the Target protocol -------------------------------------------------------------------------------

    async def guard(self, known_good: LaunchSpec) -> None:
        """The world notes what it would put back; it does so when the lease is handed over, never by time."""
        world = self._load()
        world["guarded"], world["marker"] = known_good.model_dump(mode="json"), None
        self._save(world)

    async def acquire(self, session_id: str, holder: str, predecessor: str | None = None) -> None:
        """See `renew`."""

    async def renew(self) -> None:
        """Nobody else ever takes a simulated target."""

    async def adopt_again(self, process: ProcessId) -> None:
        """The world knows its processes."""

    async def hand_over(self) -> None:
        """What the watcher of a real host does, done by the world itself: known-good serves again."""
        world = self._load()
        if world.get("guarded") is not None and world["server"] is not None and world["server"]["key"] != "foreign":
            world["pids"] += 1
            good = LaunchSpec.model_validate(world["guarded"])
            world["server"] = self._process("watcher", good, world["pids"])
            world["marker"] = f"restored: known-good serves as process {world['pids']}"
            self._log("watcher", "restored", good.fingerprint)
            self._give_back(world)
            self._save(world)

    def by_hand(self, key: str) -> str:
        """A simulated server is started by nobody else."""
        return f"make the simulated world accept launch {key}"

    async def boot_id(self) -> str:
        """Whichever boot the world is in."""
        return str(self._load().get("boot", BOOT))

    async def clock(self) -> HostClock:
        """What it showed as the world began, and the world's own time since."""
        began = self.scenario.clock
        unix = began.unix + self._load()["clock"]
        if began.turns_at is not None and unix >= began.turns_at:
            return HostClock(unix=unix, offset_s=began.turned_s)
        return began.model_copy(update={"unix": unix})

    async def leave_word(self, text: str) -> None:
        """Into the log that outlives the agent."""
        self._log("word", text.replace("\n", " "))

    async def release(self) -> None:
        """See `renew`."""

    async def restored_meanwhile(self) -> str | None:
        """What the world did after a lease was handed over."""
        marker: str | None = self._load().get("marker")
        return marker

    async def adopt(self) -> Adoption:
        """What serves at the start."""
        serving = await self.serving()
        if serving is None:
            raise ServerNotFound("no simulated server runs", do="delete the simulated world to begin again")
        return Adoption(process=serving.process, spec=serving.spec, engine_version="sim-1", hardware="simulated")

    async def room(self) -> Room:
        """The world is small."""
        return Room(path=str(self.path), free_mb=10_000)

    async def client(self) -> str:
        """The world measures itself."""
        return "builtin"

    async def open_files(self) -> int | None:
        """As many as it likes."""
        return None

    async def facts(self) -> TargetFacts:
        """A small, fixed host."""
        return TargetFacts(
            cores=self.scenario.cores,
            mem_available_mb=8192,
            gpus=self.scenario.gpus,
            known_flags=self.scenario.known_flags,
            engine_version="sim-1",
            knobs=self.scenario.knobs,
            env_prefixes=self.scenario.env_prefixes,
        )

    def derive(self, spec: LaunchSpec, changes: tuple[Change, ...]) -> LaunchSpec:
        """Set flags and variables, and all that stands beside; a flag the scenario does not know is refused."""
        flags, env, beside = dict(spec.flags), dict(spec.env), spec.beside
        for change in changes:
            if change.kind == "flag":
                if change.name not in self.scenario.known_flags:
                    raise PolicyRefused(f"the server does not know {change.name}", where={"host": self.name})
                self._check_value(change)
                flags.pop(change.name, None)
                if not change.remove:
                    flags[change.name] = () if change.value is None else (change.value,)
            elif change.kind == "env":
                env.pop(change.name, None)
                if change.value is not None:
                    env[change.name] = change.value
            else:
                beside = with_beside(beside, change)
        argv = (*spec.program, *(token for name, values in flags.items() for token in (name, *values)))
        return spec.model_copy(update={"flags": flags, "env": env, "argv": argv, "beside": beside})

    async def stage(self, spec: LaunchSpec) -> None:
        """Nothing has to be prepared; what the scenario says cannot be is refused."""
        refused = next((e.unstageable for e in self._effects(spec) if e.unstageable), None)
        if refused is not None:
            raise PolicyRefused(refused, where={"host": self.name})

    async def serving(self) -> Serving | None:
        """Whoever the world says."""
        world = self._load()
        server = world["server"]
        if server is None or server["state"] == "failed":
            return None
        return Serving(
            process=ProcessId(pid=server["pid"], start_ticks=server["pid"], boot_id=world.get("boot", BOOT)),
            key=None if server["key"] in ("adopted", "foreign") else server["key"],
            spec=LaunchSpec.model_validate(server["spec"]),
        )

    async def launch(self, key: str, spec: LaunchSpec, stopped: Callable[[], None] = unheard) -> str:
        """Replace the server; a server that is neither adopted nor ours is left alone."""
        world = self._load()
        if key in world.setdefault("launches", []):
            return ""
        if world["server"] is not None and world["server"]["key"] == "foreign":
            raise ForeignChange("somebody else's server holds the port", where={"host": self.name})
        world["server"] = None
        self._save(world)
        stopped()
        world["launches"].append(key)
        world.setdefault("began", {})[key] = world["clock"]
        world["pids"] += 1
        start = self._start(key, spec.as_started, world)
        world["server"] = self._process(key, spec.as_started, world["pids"]) | start
        world["clock"] += start["load_s"]
        slow_s = sum(effect.slow_s for effect in self._effects(spec.as_started))
        world["server"] |= {"slow_s": slow_s, "loads_until": world["clock"] + slow_s}
        self._log("launch", key, spec.fingerprint)
        self._save(world)
        return ""

    async def launched(self, key: str) -> bool:
        """Whether the world saw that launch."""
        return key in self._load().get("launches", [])

    async def await_ready(self, key: str) -> Ready | Failure:
        """At once, but for a server that its scenario slows down, or while a file `hold` is in the world's folder."""
        while True:
            if not (self.path / HOLD).exists():
                break
            await asyncio.sleep(LOOK_S)
        world = self._load()
        while world["server"] is not None and world["clock"] < world["server"].get("loads_until", 0.0):
            await self.pause(LOAD_LOOK_S)
            world = self._load()
        server = world["server"]
        if server is None or server["key"] != key:
            return Failure(failure_class="vanished", cause=f"launch {key} is not running", action=Action.RETRY_ONCE)
        if server.get("refused") is not None:
            world["server"]["state"] = "failed"
            self._save(world)
            return diagnose(self.scenario.engine, server["refused"], server["exit"])
        process = ProcessId(pid=server["pid"], start_ticks=server["pid"], boot_id=world.get("boot", BOOT))
        return Ready(process=process, load_s=server.get("load_s", self.scenario.launch_s) + server.get("slow_s", 0.0))

    async def adjust(self, key: str, spec: LaunchSpec) -> Failure | None:
        """Set what is live of the spec, once."""
        world = self._load()
        server = world["server"]
        if server is not None and server["key"] == "foreign":
            raise ForeignChange("somebody else's server holds the port", where={"host": self.name})
        if server is None or server["state"] == "failed":
            return Failure(failure_class="vanished", cause="nobody serves", action=Action.RETRY_ONCE)
        now = LaunchSpec.model_validate(server["spec"])
        refused = self._refusal(spec, world).get("refused")
        if refused is not None or now.process_fingerprint != spec.process_fingerprint:
            cause = refused or "another configuration has to be started anew"
            return Failure(failure_class=FailureClass.CONFIG_INVALID, cause=cause, action=Action.REJECT)
        if now.live != spec.live:
            world["server"]["spec"] = spec.model_dump(mode="json")
            self._log("adjust", key, spec.fingerprint)
            self._save(world)
        return None

    async def trouble(self) -> str | None:
        """A hung server says nothing."""
        server = self._load()["server"]
        return "no answer to a real request" if server is not None and server["state"] == "hung" else None

    async def begin_run(self, key: str, request: RunRequest) -> None:
        """Note the run; its figures follow from its name."""
        world = self._load()
        if key in world.setdefault("runs", {}):
            return
        world["runs"][key] = {
            "polls": self.scenario.polls_per_run,
            "request": request.model_dump(mode="json"),
            "launch": world["server"]["key"],
            "spec": world["server"]["spec"],
            "said": self._spoilt(world) if request.launch == world["server"]["key"] else "",
            **self._timed(key, request, world),
        }
        world.setdefault("began", {})[key] = world["clock"]
        self._log("run", key, request.point.name)
        self._save(world)

    async def look_run(self, key: str) -> RunState:
        """Running for a few looks, then ended."""
        world = self._load()
        run = world.get("runs", {}).get(key)
        if run is None:
            return RunState(phase="absent")
        if run.get("ends_at") is not None:
            return _seen(run, world["clock"])
        if run["polls"] > 0:
            run["polls"] -= 1
            self._save(world)
            return RunState(phase="running", elapsed_s=0.1, done=0)
        return RunState(phase="ended", elapsed_s=1.0)

    async def collect_run(self, key: str) -> RunResult:
        """The figures that belong to this launch and this run."""
        run = self._load().get("runs", {}).get(key)
        if run is None:
            raise CommandFailed(f"run {key} left no result", where={"host": self.name, "key": key})
        request = RunRequest.model_validate(run["request"])
        spec = LaunchSpec.model_validate(run["spec"])
        rate = run["tok_s"] if "tok_s" in run else self._drawn(spec, run["launch"], key, request)
        failed = sum(effect.fails for effect in self._effects(spec))
        result = _result(key, request, rate, self.scenario.foreign_cores, failed)
        return result.model_copy(update={"answers": self._answers(spec)}) if request.answers else result

    async def said_during(self, key: str) -> str:
        """What the effects of its settings say."""
        return str(self._load().get("runs", {}).get(key, {}).get("said", ""))

    async def stop_run(self, key: str) -> None:
        """End it now."""
        world = self._load()
        if key in world.get("runs", {}):
            world["runs"][key] |= {"polls": 0, "ends_at": None}
            self._save(world)

    async def foreign_cores(self) -> float | None:
        """As the scenario says."""
        return self.scenario.foreign_cores

    async def foreign_traffic(self, max_rps: float = 0.0) -> str | None:
        """As many requests of others as the world says, or as many a second."""
        world = self._load()
        if max_rps:
            rps = world.get("rps", 0.0)
            return None if rps <= max_rps else f"{rps:.2f} requests a second, where {max_rps:g} are allowed,"
        requests = world.get("traffic", 0)
        return f"{requests} requests in flight" if requests else None

    async def drained(self) -> Drained:
        """As the world says, with a probe that always works."""
        drained = bool(self._load().get("drained"))
        return Drained(ours=drained, seen=drained)

    async def drain(self) -> str:
        """The world counts how often it was taken out and given back."""
        if self.scenario.drain_fails:
            raise CommandFailed("a remote command failed", where={"host": self.name}, tail="balancer: no such pool")
        world = self._load()
        if not world.get("drained"):
            world["drained"], world["drains"] = True, world.get("drains", 0) + 1
            self._log("out", str(world["drains"]))
            self._save(world)
        return ""

    async def undrain(self) -> str:
        """See `drain`."""
        world = self._load()
        world["undrains"] = world.get("undrains", 0) + 1
        self._save(world)
        if world["undrains"] <= self.scenario.undrain_fails:
            raise CommandFailed("a remote command failed", where={"host": self.name}, tail="balancer: try again later")
        self._give_back(world)
        self._save(world)
        return ""

    def lasting(self, spec: LaunchSpec) -> str:
        """Its command line."""
        return " ".join(spec.argv)

    async def persist(self, spec: LaunchSpec, key: str) -> str | None:
        """The world remembers what would come back."""
        world = self._load()
        world["persisted"] = spec.fingerprint
        self._log("persist", key, spec.fingerprint)
        self._save(world)
        return "the world starts it"

    async def unpersist(self) -> None:
        """The world starts what was found."""
        world = self._load()
        world["persisted"] = None
        self._save(world)

    async def log_end(self, key: str) -> str:
        """Why it ended, or what it said during its runs."""
        world = self._load()
        server = world["server"]
        refused = server.get("refused") if server is not None and server["key"] == key else None
        said = [run["said"] for run in world.get("runs", {}).values() if run["launch"] == key]
        return "\n".join([refused or "", *said]).strip()

    async def search_source(self, roots: tuple[str, ...], text: str, files: str) -> str:
        """In the scenario's own files."""
        named = [(path, body) for path, body in self.scenario.source.items() if path.startswith(roots)]
        lines = [(path, n, line) for path, body in named for n, line in enumerate(body.splitlines(), 1) if text in line]
        return "\n".join(f"{path}:{n}:{line}" for path, n, line in lines if fnmatch(path.rpartition("/")[2], files))

    async def pause(self, seconds: float) -> None:
        """Advance the world's clock instead of waiting."""
        world = self._load()
        world["clock"] += max(seconds, self._patience_s(world))
        self._save(world)
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Nothing is held."""

    # --- the world -----------------------------------------------------------------------------------------

    def true_tok_s(self, spec: LaunchSpec, point: str) -> float:
        """Output tok/s of a spec without noise: what the judge tries to find out."""
        rate = self.scenario.base_tok_s[point]
        for effect in self._effects(spec):
            rate *= effect.ratio.get(point, effect.ratio.get("*", 1.0))
        return rate

    @property
    def passed_s(self) -> float:
        """Seconds that have passed in the world."""
        return float(self._load()["clock"])

    def _start(self, key: str, spec: LaunchSpec, world: dict[str, Any]) -> dict[str, Any]:
        """How long a launch that begins now loads, and with which log and exit code it ends if it does."""
        if self.recorded is None:
            return {"load_s": self.scenario.launch_s} | self._refusal(spec, world)
        start = self.recorded.start(key, spec)
        ends = {} if start.refused is None else {"refused": start.refused, "exit": 1}
        return {"load_s": start.seconds} | ends

    def _timed(self, key: str, request: RunRequest, world: dict[str, Any]) -> dict[str, Any]:
        """Figures and end of a recorded server's run that begins now."""
        if self.recorded is None:
            return {}
        spec = LaunchSpec.model_validate(world["server"]["spec"])
        run = self.recorded.run(world["server"]["key"], key, spec, request)
        world["under_way"] = key
        seconds = run.measured_s + run.idle_s
        return {**run.model_dump(), "seconds": seconds, "ends_at": world["clock"] + seconds}

    def _patience_s(self, world: dict[str, Any]) -> float:
        """How much later a run under way is looked at again: often enough to end a collapse early."""
        run = world.get("runs", {}).get(world.get("under_way"), {})
        if run.get("ends_at") is None:
            return 0.0
        return float(min(run["seconds"] / LOOKS, max(0.0, run["ends_at"] - world["clock"])))

    def _drawn(self, spec: LaunchSpec, launch: str, run: str, request: RunRequest) -> float:
        rate = self.true_tok_s(spec, request.point.name)
        rate *= self._draw(self.scenario.launch_noise, launch, request.point.name)
        return rate * self._draw(self.scenario.run_noise, launch, run, str(request.seed))

    def _check_value(self, change: FlagChange) -> None:
        typed = FlagTable(flags={flag.name: flag for flag in self.scenario.knobs})
        reason = check_flag(change, typed, {}) if change.name in typed.flags else None
        if reason is not None:
            raise PolicyRefused(f"a change is refused: {change}", where={"host": self.name, "reason": reason})

    def _effects(self, spec: LaunchSpec) -> list[SimEffect]:
        settings = {name: " ".join(values) for name, values in spec.flags.items()} | spec.env
        settings |= {change.subject: change.setting for change in spec.beside}
        return [effect for effect in self.scenario.effects if effect.holds(settings)]

    def _answers(self, spec: LaunchSpec) -> tuple[Answer, ...]:
        """As the effect that changes them most makes them."""
        done = {effect.answers for effect in self._effects(spec)}
        worst: Likeness = "broken" if "broken" in done else "close" if "close" in done else "same"
        return simulated_answers(self.scenario.seed, worst)

    def _refusal(self, spec: LaunchSpec, world: dict[str, Any]) -> dict[str, Any]:
        """With which log and exit code a launch that begins now will end; nothing for one that starts."""
        for effect in self._effects(spec):
            if effect.refuses is not None and self._once_more(effect, world):
                return {"refused": effect.refuses, "exit": effect.exit_code}
        return {}

    def _spoilt(self, world: dict[str, Any]) -> str:
        """What the server says during a run that begins now, under which it may end."""
        said = ""
        for effect in self._effects(LaunchSpec.model_validate(world["server"]["spec"])):
            if effect.says is not None and self._once_more(effect, world):
                said += f"{effect.says}\n"
                world["server"]["state"] = "failed" if effect.dies else world["server"]["state"]
        return said

    def _once_more(self, effect: SimEffect, world: dict[str, Any]) -> bool:
        """Whether an effect that wears off still shows; counted in the world."""
        shown = world.setdefault("shown", {})
        number = str(self.scenario.effects.index(effect))
        shown[number] = shown.get(number, 0) + 1
        return effect.times is None or bool(shown[number] <= effect.times)

    def _give_back(self, world: dict[str, Any]) -> None:
        if world.get("drained"):
            world["drained"] = False
            self._log("in", str(world["drains"]))

    def _original(self) -> LaunchSpec:
        argv = ("sim-server", *(token for name, values in self.scenario.flags.items() for token in (name, *values)))
        flags = dict(self.scenario.flags)
        return LaunchSpec(
            engine=self.scenario.engine,
            program=("sim-server",),
            flags=flags,
            env=self.scenario.env,
            argv=argv,
            cwd="/",
            user="sim",
        )

    def _process(self, key: str, spec: LaunchSpec, pid: int) -> dict[str, Any]:
        return {"key": key, "pid": pid, "spec": spec.model_dump(mode="json"), "state": "running"}

    def _draw(self, sigma: float, *names: str) -> float:
        seed = hashlib.sha256("/".join([str(self.scenario.seed), *names]).encode()).digest()
        return float(2.718281828459045 ** random.Random(seed).gauss(0.0, sigma))

    @property
    def _file(self) -> Path:
        return self.path / "world.json"

    def _load(self) -> dict[str, Any]:
        if self._remembered:
            return self._remembered
        loaded: dict[str, Any] = json.loads(self._file.read_text())
        return loaded

    def _save(self, world: dict[str, Any]) -> None:
        if self.recorded is not None:
            self._remembered = world
            return
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(world))
        os.replace(temporary, self._file)

    def _log(self, *words: str) -> None:
        with (self.path / "world.log").open("a") as log:
            log.write(" ".join(words) + "\n")


def _seen(run: Mapping[str, Any], clock: float) -> RunState:
    """A recorded server's run as it looks at a time of the world's clock."""
    elapsed_s = min(run["measured_s"], run["seconds"] - (run["ends_at"] - clock))
    phase: Literal["running", "ended"] = "running" if clock < run["ends_at"] else "ended"
    return RunState(phase=phase, elapsed_s=elapsed_s, output_tokens=int(run["tok_s"] * elapsed_s))


def _result(key: str, request: RunRequest, rate: float, foreign_cores: float, failed: int) -> RunResult:
    """What the benchmark client would have left, read as that is read."""
    point = request.point
    tokens = point.requests * point.output_tokens
    streams = min(point.concurrency, point.requests)
    tpot = 1000 * point.concurrency / rate
    latency = {"mean": tpot, "p50": tpot, "p90": 1.2 * tpot, "p99": 1.5 * tpot}
    raw = {
        "run_id": key,
        "requested": point.requests,
        "completed": point.requests - failed,
        "failed": failed,
        "failures": {"http-500": failed} if failed else {},
        "short_outputs": 0,
        "duration_s": tokens / rate,
        "prompt_tokens": point.requests * point.prompt_tokens,
        "output_tokens": tokens,
        "cached_tokens": None,
        "output_tok_s": rate,
        "total_tok_s": None,
        "requests_s": rate / point.output_tokens,
        "ttft_ms": latency,
        "tpot_ms": latency,
        "itl_ms": latency,
        "e2e_ms": {"mean": tpot * point.output_tokens},
        "peak_concurrency": streams,
        "mean_concurrency": float(streams),
        "client": {},
        "stopped_early": None,
        "error": None,
        "server_counters": {"llamacpp:tokens_predicted_total": tokens},
        "telemetry": {
            "cores": CORES,
            "foreign_cpu_cores": {"mean": foreign_cores, "max": foreign_cores},
            "steal_cores": {"mean": 0.0},
            "server_cpu_cores": None,
            "mem_available_mb_min": None,
            "server_rss_mb_max": None,
        },
    }
    return builtin.parse(json.dumps(raw).encode(), key)
