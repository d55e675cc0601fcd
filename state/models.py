"""The nouns of a tuning session as frozen data; nothing here reads, writes, waits or decides.

Units stand in the names: `_s` seconds, `_ms` milliseconds, `_tok_s` tokens per second, `_mb` MiB. Gains and
tolerances are fractions (0.02 = 2 %), effects are natural logarithms of ratios unless a name says otherwise.
"""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer


class Frozen(BaseModel):
    """Immutable data; an unknown key is an error, so that a typo can never be silently ignored.

    What was given stands in no error text, for it may be a secret.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def canonical_json(value: object) -> str:
    """One spelling for equal data: sorted keys, no spaces, NaN refused. Basis of every fingerprint."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: object, length: int = 16) -> str:
    """Hex sha256 of the canonical JSON, cut to `length` characters."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


# --- changes -----------------------------------------------------------------------------------------------


class Disruption(IntEnum):
    """What an experiment costs the people who use the server; the order is the order of choice."""

    READ = 0
    LOAD = 1
    HOT = 2
    RESTART = 3
    PATCH = 4
    HOST = 5


def _disruption_from(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.upper() not in Disruption.__members__:
        raise ValueError(f"expected one of {', '.join(level.name.lower() for level in Disruption)}")
    return Disruption[value.upper()]


DisruptionField = Annotated[
    Disruption,
    BeforeValidator(_disruption_from),
    PlainSerializer(lambda value: Disruption(value).name.lower(), return_type=str),
]


def _host_folder(value: str) -> str:
    if not value.startswith("/") or value == "/" or "\0" in value or "\n" in value:
        raise ValueError("expected the absolute path of a folder on the host, other than /")
    if posixpath.normpath(value) != value or value.startswith("//"):
        raise ValueError(f'expected a path without detours: "{posixpath.normpath(value).replace("//", "/")}"')
    return value


def _inside(value: str) -> str:
    if value.startswith("/") or ".." in value.split("/") or posixpath.normpath(value) != value or "\n" in value:
        raise ValueError('expected a relative path without detours, or "."')
    return value


def _pinned(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(\[[\w.,-]+\])?==[0-9][\w.+!-]*", value):
        raise ValueError('expected a package with its exact version, such as "sglang==0.5.12"')
    return value


HostFolder = Annotated[str, AfterValidator(_host_folder)]
Inside = Annotated[str, AfterValidator(_inside)]
Pinned = Annotated[str, AfterValidator(_pinned)]


class FlagChange(Frozen):
    """Set (or with `value = None` and `remove` drop) one command-line flag, by its canonical name."""

    kind: Literal["flag"] = Field(default="flag", description="a command-line flag")
    name: str = Field(description="canonical spelling, as in the server's own --help")
    value: str | None = Field(default=None, description="None for a flag that takes no value")
    remove: bool = Field(default=False, description="drop the flag instead of setting it")

    def __str__(self) -> str:
        if self.remove:
            return f"without {self.name}"
        return self.name if self.value is None else f"{self.name} {self.value}"


class EnvChange(Frozen):
    """Set (or with `value = None` unset) one environment variable of the server."""

    kind: Literal["env"] = Field(default="env", description="an environment variable")
    name: str = Field(description="name of the variable")
    value: str | None = Field(default=None, description="None unsets the variable")

    def __str__(self) -> str:
        return f"unset {self.name}" if self.value is None else f"{self.name}={self.value}"


class HotCall(Frozen):
    """A live setting of the running server; `undo` is the value that takes it back."""

    kind: Literal["hot"] = Field(default="hot", description="a live setting, made through the server's own API")
    name: str = Field(pattern=r"^[A-Za-z_][\w.:-]*$", description="what is set; the server's adapter knows which exist")
    value: str = Field(description="what it is set to")
    undo: str = Field(description="the value that takes it back: what is set now")

    live: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"live {self.name}={self.value}"

    @property
    def subject(self) -> str:
        """What only one change of a configuration can be about."""
        return f"hot:{self.name}"

    @property
    def setting(self) -> str:
        """What it does to its subject."""
        return self.value


class PatchChange(Frozen):
    """Edit files on the host by a unified diff; the original bytes come back when it is taken back."""

    kind: Literal["patch"] = Field(default="patch", description="a unified diff of files on the host")
    directory: HostFolder = Field(description="absolute folder on the host that the diff's paths are relative to")
    diff: str = Field(min_length=1, description="unified diff; it must fit exactly, and all of its files must exist")
    clear: tuple[HostFolder, ...] = Field(
        default=(), description="absolute cache folders that are set aside while it is applied, and put back afterwards"
    )

    live: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"patch {self.setting} in {self.directory}"

    @property
    def subject(self) -> str:
        """See `HotCall.subject`."""
        return f"patch:{self.directory}"

    @property
    def setting(self) -> str:
        """See `HotCall.setting`."""
        return digest([self.diff, self.clear], 8)


class PackageChange(Frozen):
    """Python packages in a folder of ours that the server finds first; what is installed is not touched."""

    kind: Literal["package"] = Field(default="package", description="Python packages that the server finds first")
    requirements: tuple[Pinned, ...] = Field(min_length=1, description='exactly pinned, such as "sglang==0.5.12"')
    options: tuple[str, ...] = Field(default=(), description='options for pip, such as "--no-index"')

    live: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"packages {self.setting}"

    @property
    def subject(self) -> str:
        """See `HotCall.subject`."""
        names = {re.sub(r"[-_.]+", "-", re.split(r"[=\[]", one)[0]).lower() for one in self.requirements}
        return f"package:{','.join(sorted(names))}"

    @property
    def setting(self) -> str:
        """See `HotCall.setting`."""
        return " ".join(self.requirements)


class CheckoutChange(Frozen):
    """A commit of a git repository in a folder of ours that the server finds first; the repository stays as it is."""

    kind: Literal["checkout"] = Field(default="checkout", description="a commit that the server finds first")
    repository: HostFolder = Field(description="absolute path of a git repository on the host")
    commit: str = Field(pattern=r"^[0-9A-Za-z][\w./-]*$", description="commit, tag or branch")
    path: Inside = Field(default=".", description="subfolder of it that holds the Python packages")

    live: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.repository} at {self.commit}"

    @property
    def subject(self) -> str:
        """See `HotCall.subject`."""
        return f"checkout:{self.repository}"

    @property
    def setting(self) -> str:
        """See `HotCall.setting`."""
        return self.commit


class CommandChange(Frozen):
    """Anything else on the host, with the way back; commands are run without a shell."""

    kind: Literal["command"] = Field(default="command", description="commands on the host, with the way back")
    name: str = Field(pattern=r"^[A-Za-z0-9][\w.:-]*$", description="short name of what they change")
    do: tuple[str, ...] = Field(min_length=1, description="program and arguments that bring it into effect")
    undo: tuple[str, ...] = Field(min_length=1, description="program and arguments that take it back")
    probe: tuple[str, ...] = Field(min_length=1, description="program that ends with 0 exactly while it is in effect")
    restart: bool = Field(default=False, description="the server has to be started anew for it")

    def __str__(self) -> str:
        return f"command {self.name}"

    @property
    def live(self) -> bool:
        """Whether it takes effect without a restart."""
        return not self.restart

    @property
    def subject(self) -> str:
        """See `HotCall.subject`."""
        return f"command:{self.name}"

    @property
    def setting(self) -> str:
        """See `HotCall.setting`."""
        return "on"


Beside = Annotated[HotCall | PatchChange | PackageChange | CheckoutChange | CommandChange, Field(discriminator="kind")]
"""Changes that stand beside the command line."""
Change = Annotated[
    FlagChange | EnvChange | HotCall | PatchChange | PackageChange | CheckoutChange | CommandChange,
    Field(discriminator="kind"),
]

CHANGE_DISRUPTION = {
    "flag": Disruption.RESTART,
    "env": Disruption.RESTART,
    "hot": Disruption.HOT,
    "patch": Disruption.PATCH,
    "package": Disruption.PATCH,
    "checkout": Disruption.PATCH,
    "command": Disruption.HOST,
}


def needs_restart(change: Change) -> bool:
    """Whether the server has to be started anew for a change to take effect."""
    return isinstance(change, FlagChange | EnvChange) or not change.live


def with_beside(beside: tuple[Beside, ...], change: Beside) -> tuple[Beside, ...]:
    """The changes with one more: patches add up in their order, of all others the newest of a subject stands."""
    if change in beside:
        return beside
    if isinstance(change, PatchChange):
        return arranged((*beside, change))
    return arranged((*(one for one in beside if one.subject != change.subject), change))


def arranged(beside: Iterable[Beside]) -> tuple[Beside, ...]:
    """In the one order that equal sets share: patches as they were applied, then the rest by subject."""
    given = tuple(beside)
    patches = [one for one in given if isinstance(one, PatchChange)]
    return (*patches, *sorted((one for one in given if one not in patches), key=lambda one: one.subject))


class LaunchSpec(Frozen):
    """The complete declared configuration of a server: what is desired and what is observed have this one type.

    `argv` is what was found or is executed, byte for byte; `program` and `flags` are its canonical reading, and
    only the reading is compared, so that spelling and order never make two of one configuration.
    """

    engine: str
    program: tuple[str, ...] = Field(description="argv up to the first flag, positional arguments included")
    flags: dict[str, tuple[str, ...]] = Field(description="canonical name → values; () for a bare flag")
    argv: tuple[str, ...]
    cwd: str
    user: str
    env: dict[str, str] = Field(default_factory=dict, description="the engine's own variables, in clear")
    hidden_env: dict[str, str] = Field(default_factory=dict, description="all others, as keyed hashes")
    limits: dict[str, str] = Field(default_factory=dict, description="soft:hard by name; umask, niceness, affinity")
    hot: dict[str, str] = Field(default_factory=dict, description="always empty; live state stands under `beside`")
    beside: tuple[Beside, ...] = Field(default=(), description="changes that do not stand on the command line")

    @property
    def fingerprint(self) -> str:
        """Identity of the configuration: equal whatever the spelling or the order of flags."""
        return digest(self._compared())

    @property
    def process_fingerprint(self) -> str:
        """Identity of what a process was started as: without all that takes effect on a running one."""
        return self.as_started.fingerprint

    @property
    def as_started(self) -> LaunchSpec:
        """The configuration without its live part."""
        stays = tuple(change for change in self.beside if not change.live)
        return self.model_copy(update={"beside": stays})

    @property
    def live(self) -> tuple[Beside, ...]:
        """What takes effect on a running process, and has to be done again after each start."""
        return tuple(change for change in self.beside if change.live)

    def differences(self, other: LaunchSpec) -> list[str]:
        """Readable list of what differs, `self` first; empty exactly when the fingerprints are equal."""
        found: list[str] = []
        mine = self.model_dump(mode="json", exclude={"argv", "beside"})
        theirs = other.model_dump(mode="json", exclude={"argv", "beside"})
        for field, left in mine.items():
            right = theirs[field]
            if left == right:
                continue
            if isinstance(left, dict):
                keys = sorted(k for k in {*left, *right} if left.get(k) != right.get(k))
                found += [f"{field}.{k}: {_shown(left, k)} ≠ {_shown(right, k)}" for k in keys]
            else:
                found.append(f"{field}: {left} ≠ {right}")
        added = [f"beside: {change} ≠ absent" for change in self.beside if change not in other.beside]
        missing = [f"beside: absent ≠ {change}" for change in other.beside if change not in self.beside]
        moved = ["beside: the same patches in another order"] if self.beside != other.beside else []
        return [*found, *((added + missing) or moved)]

    def _compared(self) -> dict[str, Any]:
        """What identifies it; without changes beside the command line as it was before there were any."""
        return self.model_dump(mode="json", exclude={"argv"} if self.beside else {"argv", "beside"})


def _shown(values: dict[str, Any], key: str) -> str:
    value = values.get(key, "absent")
    return " ".join(value) or "set" if isinstance(value, list) else str(value)


# --- what to try -------------------------------------------------------------------------------------------


class Source(Frozen):
    """Where an idea or a fact comes from."""

    kind: Literal["catalogue", "model", "person", "refinement", "built-in"] = Field(description="who had the idea")
    ref: str = Field(default="", description="public page, issue, help text or measurement behind it")


class LoadHint(StrEnum):
    """At which load a hypothesis expects its effect."""

    LOW = "low"
    HIGH = "high"
    ANY = "any"


class Idea(Frozen):
    """One hypothesis and the change that tests it; no changes means an observation of the parent."""

    title: str = Field(description="what is tried, in a few words")
    hypothesis: str = Field(description="why it could help")
    changes: tuple[Change, ...] = Field(default=(), description="what is set or unset; nothing for an observation")
    tags: tuple[str, ...] = Field(default=(), description="topics; a result moves the priorities of its relatives")
    tier: int = Field(default=1, ge=1, le=3, description="1 is tried before 2, 2 before 3, at equal disruption")
    priority: float = Field(default=0.5, ge=0, le=1, description="the higher is tried first within a tier")
    expected_gain: float = Field(default=0.0, description="hoped fraction at the objective, 0.1 = 10 %")
    confidence: float = Field(default=0.5, ge=0, le=1, description="how sure that hope is: 0 a mere guess, 1 certain")
    risk: str = Field(default="", description="what could go wrong")
    needs: tuple[str, ...] = Field(
        default=(), description="capabilities, the one that it is about first; what lacks one of them is blocked"
    )
    load_hint: LoadHint = Field(default=LoadHint.ANY, description="at which load an effect is expected")
    numerics: bool = Field(
        default=False, description="it changes the numbers that the model computes with: its answers must be compared"
    )
    disruption: DisruptionField = Disruption.RESTART
    source: Source = Source(kind="built-in")

    @property
    def hope(self) -> float:
        """The expected gain, weighed with how sure it is."""
        return self.expected_gain * self.confidence


class Purpose(StrEnum):
    """What an experiment is for; it decides how its runs are laid out and what its verdict may change."""

    TRY = "try"
    SENTINEL = "sentinel"
    WITHOUT = "without"
    CLOSE_OUT = "close-out"


class Experiment(Idea):
    """An idea on the list, or one of the comparisons that the loop itself makes."""

    id: str = ""
    purpose: Purpose = Purpose.TRY
    again: str = Field(default="", description="the experiment that came to no clear end, of which this is a repeat")

    @property
    def observes(self) -> bool:
        """Whether it only looks at what runs now."""
        return self.purpose is Purpose.TRY and not self.changes

    @property
    def tries(self) -> bool:
        """Whether it tries a change that could be kept: these share the night's error."""
        return self.purpose is Purpose.TRY and bool(self.changes)


class TodoStatus(StrEnum):
    """Life of a todo: pending → in_progress → done | blocked | skipped; gated waits for a person."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    DONE = "done"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    GATED = "gated"


class Who(StrEnum):
    """Who changed a todo's status or priority."""

    PERSON = "person"
    EVIDENCE = "evidence"
    PIVOT = "pivot"
    MODEL = "model"
    BUDGET = "budget"
    AGENT = "agent"


class Todo(Frozen):
    """An experiment on the list, with where it stands."""

    experiment: Experiment
    status: TodoStatus = TodoStatus.PENDING
    priority: float
    reason: str = ""
    identity: str = Field(default="", description="digest of full spec, workload, engine version, hardware")

    @property
    def id(self) -> str:
        """The experiment's id."""
        return self.experiment.id


# --- how it is measured ------------------------------------------------------------------------------------


class LoadPoint(Frozen):
    """One level of load: how many streams, what they send, how long the answers are."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    concurrency: int = Field(ge=1)
    requests: int = Field(ge=1)
    prompt: Literal["random", "repetitive"] = "random"
    prompt_tokens: int = Field(default=64, ge=1)
    output_tokens: int = Field(default=32, ge=2)
    warmup_requests: int = Field(default=1, ge=0)


class Objective(Frozen):
    """What is maximised: the mean log-ratio of output tok/s over the load points `at`."""

    metric: Literal["output_tok_s"] = "output_tok_s"
    at: tuple[str, ...] = Field(min_length=1)


class Ceiling(Frozen):
    """An SLO: a latency that must stay below a limit."""

    metric: Literal["ttft", "tpot", "itl", "e2e"] = Field(description="which latency")
    percentile: Literal["mean", "p50", "p90", "p99"] = Field(default="p90", description="of the requests of one run")
    max_ms: float = Field(gt=0, description="the ceiling")
    at: tuple[str, ...] = Field(default=(), description="load points at which it holds; none means all")

    @property
    def series(self) -> str:
        """Name of the measured figure, such as `ttft_p90_ms`."""
        return f"{self.metric}_{self.percentile}_ms"


class Guards(Frozen):
    """What a gain must not cost."""

    other_points_tolerance: float = Field(default=0.05, gt=0, lt=1, description="allowed loss of output tok/s")
    keep_unguarded: bool = Field(
        default=True, description="keep a gain though a loss elsewhere beyond the tolerance can't be excluded"
    )
    ttft_p90_ms: float | None = Field(default=None, gt=0, description="ceiling at every load point")
    tpot_p90_ms: float | None = Field(default=None, gt=0, description="ceiling at every load point")
    slo: tuple[Ceiling, ...] = Field(default=(), description="further ceilings")
    answers: Literal["same", "close", "off"] = Field(
        default="close",
        description="how answers to fixed prompts may change: not beyond the parent's own spread, only as other "
        "numerics change them, or not asked but of changes that must be compared",
    )
    keep_unproven_slo: bool = Field(
        default=False, description="keep a gain though a ceiling can't be shown to hold; a broken one always vetoes"
    )

    @property
    def ceilings(self) -> tuple[Ceiling, ...]:
        """All ceilings, those in short form first."""
        short = [Ceiling(metric="ttft", max_ms=self.ttft_p90_ms)] if self.ttft_p90_ms is not None else []
        short += [Ceiling(metric="tpot", max_ms=self.tpot_p90_ms)] if self.tpot_p90_ms is not None else []
        return (*short, *self.slo)


class Workload(Frozen):
    """Load points, objective and guards; hashed, so that numbers of two workloads are never compared."""

    load_points: tuple[LoadPoint, ...] = Field(min_length=1)
    objective: Objective
    guards: Guards = Guards()
    endpoint: str = "/v1/completions"
    vocab_low: int = Field(default=1000, ge=0)
    vocab_high: int = Field(default=30000, ge=2)
    request_deadline_s: float = Field(default=60.0, gt=0)
    run_deadline_s: float = Field(default=300.0, gt=0)
    client: Literal["builtin", "sglang", "vllm", "guidellm", "aiperf"] = "builtin"
    client_command: tuple[str, ...] = ()
    client_args: tuple[str, ...] = ()
    tokenizer: str | None = None

    @property
    def revision(self) -> str:
        """Identity of the method: a correction of it makes a new one and retires the old numbers."""
        return digest(self.model_dump(mode="json"))

    def point(self, name: str) -> LoadPoint:
        """The load point of that name (KeyError when there is none)."""
        return {point.name: point for point in self.load_points}[name]


class Summary(Frozen):
    """Mean and percentiles of a latency in ms; None where nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Span(Frozen):
    """A reading over one run."""

    mean: float
    min: float
    max: float


class Board(Frozen):
    """One GPU during one run; None for what its driver does not tell."""

    index: str
    power_w: Span | None = None
    power_limit_w: Span | None = Field(default=None, description="what the board may draw")
    sm_mhz: Span | None = None
    util_pct: Span | None = None
    memory_mb: Span | None = None
    temperature_c: Span | None = None
    throttle_reasons: tuple[str, ...] = Field(default=(), description="each mask that the driver showed")


class Telemetry(Frozen):
    """What the host did during one run; None where it could not be observed."""

    foreign_cpu_cores: float | None = Field(default=None, description="busy cores that are neither server nor us")
    foreign_cpu_cores_max: float | None = None
    steal_share: float | None = Field(default=None, description="share of all CPU time taken by the hypervisor")
    server_cpu_cores: float | None = None
    client_cpu_share: float | None = Field(default=None, description="of one core")
    mem_available_mb: float | None = None
    server_rss_mb: float | None = None
    gpu: tuple[Board, ...] | None = None
    preemptions: int | None = Field(
        default=None, description="how often the server set a request aside for want of room, by its own counters"
    )


class Metrics(Frozen):
    """The figures of one benchmark run, the same from every client."""

    requested: int
    completed: int
    failed: int
    failures: dict[str, int] = Field(default_factory=dict)
    short_outputs: int = 0
    duration_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    retokenized_tokens: int | None = Field(
        default=None, description="output tokens by the client's own tokenizer, from the text that came"
    )
    cached_tokens: int | None = None
    output_tok_s: float | None
    total_tok_s: float | None = None
    requests_s: float | None = None
    ttft_ms: Summary = Summary()
    tpot_ms: Summary = Summary()
    itl_ms: Summary = Summary()
    e2e_ms: Summary = Summary()
    peak_concurrency: int | None = None
    mean_concurrency: float | None = None
    client_bottleneck: str | None = Field(default=None, description="the client's own reason, None when it kept up")
    stopped_early: str | None = None
    server_output_tokens: int | None = Field(default=None, description="by the server's own counters")
    server_requests: int | None = Field(
        default=None, description="requests that ended in the run's window, by the server's own count"
    )
    unusable: tuple[str, ...] = Field(
        default=(), description="figures that the client told but that measure nothing: not finite, or below zero"
    )


class Answer(Frozen):
    """What the server said to one fixed prompt at temperature 0; each step is one token, alike in all three lists."""

    prompt: str = Field(description="id of the prompt; a text that changes gets a new one")
    text: str = ""
    tokens: tuple[str, ...] = Field(default=(), description="as text, `#ID` where a token has none; () if not told")
    logprobs: tuple[float | None, ...] = Field(default=(), description="natural logarithm of each token's probability")
    tops: tuple[dict[str, float], ...] = Field(default=(), description="token → logprob of the likeliest at each step")
    error: str | None = Field(default=None, description="why there is no answer; the request itself was made")


class MeasurementStatus(StrEnum):
    """A measurement is open until its job's result is in; an invalid one is kept but never judged."""

    OPEN = "open"
    VALID = "valid"
    INVALID = "invalid"
    LOST = "lost"


class Arm(StrEnum):
    """Which side of a comparison a measurement serves."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"


class Measurement(Frozen):
    """One benchmark run of one launch at one load point, made for one experiment."""

    id: str
    experiment_id: str
    trial_id: str
    arm: Arm
    block: int = Field(description="how many launches of this arm the experiment had before, from 0")
    load_point: str
    run: int = Field(default=0, description="how many valid runs of this launch came before at the load point")
    seed: int
    status: MeasurementStatus = MeasurementStatus.OPEN
    reasons: tuple[str, ...] = ()
    metrics: Metrics | None = None
    telemetry: Telemetry | None = None
    seconds: float | None = Field(default=None, description="wall time from start of the job to its collection")
    complaint: Failure | None = Field(default=None, description="what the server itself said against its figures")


class TrialStatus(StrEnum):
    """A launch is open until it generates; failed means that it never did."""

    OPEN = "open"
    READY = "ready"
    FAILED = "failed"


class ProcessId(Frozen):
    """A process that cannot be mistaken for another: pid, start time in clock ticks, boot id."""

    pid: int
    start_ticks: int
    boot_id: str


class Trial(Frozen):
    """One launch of one spec, or (`adopted`) the process that was found, which Ratchet did not launch.

    `adjust`: not launched anew, but the running process brought into another configuration.
    """

    id: str
    experiment_id: str = Field(description="what it was launched for; later experiments may measure it too")
    fingerprint: str
    status: TrialStatus = TrialStatus.OPEN
    adopted: bool = False
    kind: Literal["launch", "adjust"] = "launch"
    process: ProcessId | None = None
    load_s: float | None = None
    down_s: float = Field(default=0.0, description="time without a generating server that this launch cost")
    failure: Failure | None = None


class Failure(Frozen):
    """Why a launch or a run failed, as read from its log."""

    failure_class: str
    cause: str
    exit_code: int | None = None
    tail: str = ""
    action: str = ""
    rule: str = Field(default="", description="id of the rule that explains it; empty when none does")
    knob: str = Field(default="", description="flag or variable that an adjustment is of")
    bound: float | None = Field(default=None, description="value of the knob that the server named as the limit")


# --- what came of it ---------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """The judge's possible words."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no relevant difference"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"
    COLLAPSED = "collapsed"
    FAILED = "failed to start"
    OBSERVED = "observed"


class Effect(Frozen):
    """A log-ratio candidate/baseline with its interval; `n_*` are valid runs, `launches_*` their launches."""

    estimate: float
    low: float
    high: float
    n_baseline: int
    n_candidate: int
    launches_baseline: int
    launches_candidate: int

    @property
    def percent(self) -> str:
        """`+12.3 % [+8.1, +16.7]`."""
        gain, low, high = (100 * math.expm1(x) for x in (self.estimate, self.low, self.high))
        return f"{gain:+.1f} % [{low:+.1f}, {high:+.1f}]"


class Verdict(Frozen):
    """What the measurements say about one experiment."""

    experiment_id: str
    outcome: Outcome
    reason: str
    objective: Effect | None = None
    points: dict[str, Effect] = Field(default_factory=dict)
    evidence: tuple[str, ...] = Field(default=(), description="ids of the measurements it rests on")
    rule: dict[str, float | str] = Field(default_factory=dict, description="the numbers that the judge was given")


class DecisionKind(StrEnum):
    """Everything that the agent decides."""

    START = "start"
    BASELINE = "baseline"
    SENTINEL = "sentinel"
    PLAN = "plan"
    CONSULT = "consult"
    REFINE = "refine"
    CHOOSE = "choose"
    KEEP = "keep"
    REVERT = "revert"
    LEAVE_OUT = "leave-out"
    BLOCK = "block"
    ADJUST = "adjust"
    SKIP = "skip"
    WAIT = "wait"
    VOID = "void"
    PIVOT = "pivot"
    HEAL = "heal"
    CLOSE_OUT = "close-out"
    RESTORE = "restore"
    PERSON = "person"
    CARRY = "carry"
    INTERRUPTED = "interrupted"
    RESUME = "resume"
    END = "end"


class Decision(Frozen):
    """One decision with its reason and the ids of what it rests on."""

    id: str
    kind: DecisionKind
    subject: str = Field(description="id of the experiment, trial or session that it is about")
    what: str
    reason: str
    evidence: tuple[str, ...] = ()


class Finding(Frozen):
    """Something learned, with the evidence and the scope in which it holds."""

    id: str
    statement: str
    evidence: tuple[str, ...]
    scope: str


class Role(StrEnum):
    """Roles that a spec can have in a session."""

    ORIGINAL = "original"
    KNOWN_GOOD = "known-good"
    FINAL = "final"


class SessionStatus(StrEnum):
    """Where a session stands; only the last three are ends."""

    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"
    REFUSED = "refused"
    NEEDS_HUMAN = "needs human"


class Budget(Frozen):
    """Ceilings of one session; the restore alone is exempt from them."""

    time_s: float = Field(default=8 * 3600, gt=0)
    experiments: int = Field(default=50, ge=0)
    restarts: int = Field(default=200, ge=0)


class HostClock(Frozen):
    """A host's own clock as it was read: Unix time, what its time zone adds, and when that changes within a day."""

    unix: float
    offset_s: int = Field(default=0, description="local time less UTC")
    turns_at: float | None = Field(default=None, description="Unix time of the change to or from daylight saving time")
    turned_s: int = Field(default=0, description="the offset from then on")


class Policy(Frozen):
    """What the agent may do to the target."""

    max_disruption: DisruptionField = Disruption.RESTART
    budget: Budget = Budget()
    window: str | None = Field(
        default=None,
        description='"01:00-05:00" on the host\'s own clock: only then is anything loaded, changed or restarted',
    )
    level_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="of the time left a level of disruption may use so much while a higher one has something ready",
    )
    keep_flags: tuple[str, ...] = Field(default=(), description="flags that no experiment may touch")
    keep_env: dict[str, str] = Field(default_factory=dict, description="variables that must have this value")
    drop: tuple[str, ...] = Field(default=(), description="tags that are not to be tried")
    gate: tuple[str, ...] = Field(
        default=(), description="ids, tags or disruption levels that wait for `ratchet approve`; host does so always"
    )
    approved: tuple[str, ...] = Field(default=(), description="ids or tags that are approved beforehand")


class JudgeRule(Frozen):
    """Numbers that the judge is given; stored with each verdict so that it can be judged again."""

    false_keep_budget: float = Field(default=0.05, gt=0, lt=0.5, description="for the whole session")
    minimal_effect: float = Field(default=0.02, gt=0, lt=1, description="smallest gain worth having, a fraction")
    min_blocks: int = Field(default=2, ge=2, description="candidate launches before a keep")
    max_blocks: int = Field(default=5, ge=2, description="candidate launches before giving up")
    max_runs: int = Field(default=8, ge=1, description="runs of one launch at the objective's load points, at most")
    baseline_runs: int = Field(default=6, ge=2, description="runs per load point before the first experiment")
    close_out_blocks: int = Field(default=2, ge=1, description="launches of each side in the final comparison")
    sentinel_every: int = Field(
        default=8, ge=0, description="experiments between two A/A checks with the unchanged parent; 0: none"
    )
    collapse_ratio: float = Field(default=0.5, gt=0, lt=1, description="one run below this share is a collapse")
    noise_prior: float = Field(default=0.02, gt=0, description="log-spread of one run, before anything is seen")
    noise_prior_df: float = Field(default=1.0, gt=0, description="how many runs the prior is worth")


class ValidityRule(Frozen):
    """When a measurement counts."""

    max_foreign_cpu_cores: float = Field(default=0.25, gt=0)
    max_steal_share: float = Field(default=0.05, gt=0, le=1)
    max_failed_share: float = Field(default=0.0, ge=0, lt=1)
    min_concurrency_share: float = Field(default=0.6, ge=0, le=1, description="mean in flight / asked")
    counter_tolerance: float = Field(default=0.05, ge=0, description="server's tokens may differ by this fraction")
    min_retokenized_share: float = Field(
        default=0.5, ge=0, le=1, description="tokens in the text that came / output tokens that a client counted"
    )
    retokenized_tolerance: float = Field(
        default=0.05, ge=0, description="the same share may differ from the parent's by this fraction"
    )
    implausible_ratio: float = Field(
        default=3.0, gt=1, description="a run so many times the parent's is measured once more before it counts"
    )
    retries: int = Field(default=3, ge=0, description="void runs repeated this often before giving up")
    quiet_wait_s: float = Field(default=300.0, ge=0, description="how long to wait for a quiet host")


class Holder(Frozen):
    """What keeps the adopted process alive, and what stops and starts it: nobody, a unit of systemd, a container."""

    kind: Literal["process", "systemd", "container"] = Field(default="process", description="process: nobody holds it")
    scope: Literal["", "system", "user", "docker", "podman"] = Field(default="", description="which manager or engine")
    name: str = Field(default="", description="of the unit or the container")
    id: str = Field(default="", description="of the container that was found; a name can be given to another one")
    sudo: bool = Field(default=False, description="the login reaches the manager by `sudo -n`")

    def __str__(self) -> str:
        if self.kind == "process":
            return "nobody: a bare process"
        if self.kind == "systemd":
            return f"the {self.scope} unit {self.name}"
        return f"the {self.scope} container {self.name}"


class Adoption(Frozen):
    """The one server that the session file names, as it was found; from here on Ratchet owns its restarts."""

    process: ProcessId
    spec: LaunchSpec
    engine_version: str = ""
    hardware: str = ""
    reproducible: bool = True
    obstacles: tuple[str, ...] = ()
    holder: Holder = Holder()


Trial.model_rebuild()
Measurement.model_rebuild()
