"""Everything that can happen in a session, as typed events; they carry facts and must not carry behaviour.

The list is append-only and complete: every other table is a projection of it (`state.store.project`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from state.exchanges import Ask, Reply
from state.models import (
    Adoption,
    Answer,
    Decision,
    Experiment,
    Finding,
    Frozen,
    HostClock,
    LaunchSpec,
    Measurement,
    Role,
    SessionStatus,
    TodoStatus,
    Trial,
    Verdict,
    Who,
)
from state.words import Word


class SessionOpened(Frozen):
    """A session began: its target, the whole configuration as it was, and what was adopted."""

    kind: Literal["session-opened"] = "session-opened"
    target: str
    config: dict[str, Any]
    config_revision: str
    workload_revision: str
    adoption: Adoption


class SessionMoved(Frozen):
    """The session's status changed."""

    kind: Literal["session-moved"] = "session-moved"
    status: SessionStatus
    reason: str
    exit_code: int | None = None


class AgentAttached(Frozen):
    """An agent process took the session up (at start and at every resume)."""

    kind: Literal["agent-attached"] = "agent-attached"
    pid: int
    version: str


class SpecSeen(Frozen):
    """A configuration was observed or derived; `fingerprint` is how everything else refers to it."""

    kind: Literal["spec-seen"] = "spec-seen"
    fingerprint: str
    spec: LaunchSpec


class RoleSet(Frozen):
    """A spec took a role; setting known-good after a keep opens a new baseline epoch."""

    kind: Literal["role-set"] = "role-set"
    role: Role
    fingerprint: str
    reason: str


class TodoAdded(Frozen):
    """An experiment entered the list; `origin` is the session that it was carried over from."""

    kind: Literal["todo-added"] = "todo-added"
    experiment: Experiment
    status: TodoStatus = TodoStatus.PENDING
    reason: str = ""
    origin: str = ""


class TodoChanged(Frozen):
    """A todo's status or priority changed, by whom, and why; None leaves a field as it is."""

    kind: Literal["todo-changed"] = "todo-changed"
    experiment_id: str
    status: TodoStatus | None = None
    priority: float | None = None
    identity: str | None = None
    reason: str
    by: Who = Who.EVIDENCE


class ComparisonOpened(Frozen):
    """An experiment was begun: which spec is compared with which, fixed from here to its verdict."""

    kind: Literal["comparison-opened"] = "comparison-opened"
    experiment_id: str
    parent: str
    candidate: str


class EffectIntended(Frozen):
    """Something is about to be done to the world."""

    kind: Literal["effect-intended"] = "effect-intended"
    key: str
    intent: dict[str, Any]


class EffectClosed(Frozen):
    """What was done; `by` tells whether we acted, found that it had happened, or do not want it any more."""

    kind: Literal["effect-closed"] = "effect-closed"
    key: str
    by: Literal["act", "observe", "abandon"]
    outcome: dict[str, Any]


class TrialOpened(Frozen):
    """A launch was allotted an id."""

    kind: Literal["trial-opened"] = "trial-opened"
    trial: Trial


class TrialClosed(Frozen):
    """A launch generates, or failed."""

    kind: Literal["trial-closed"] = "trial-closed"
    trial: Trial


class MeasurementOpened(Frozen):
    """A benchmark run was allotted an id."""

    kind: Literal["measurement-opened"] = "measurement-opened"
    measurement: Measurement


class MeasurementClosed(Frozen):
    """A benchmark run's figures are in, or it is lost; `raw` is the client's result, `answers` to the fixed prompts."""

    kind: Literal["measurement-closed"] = "measurement-closed"
    measurement: Measurement
    raw: dict[str, Any] | None = None
    answers: tuple[Answer, ...] = ()


class VerdictReached(Frozen):
    """The judge spoke."""

    kind: Literal["verdict-reached"] = "verdict-reached"
    verdict: Verdict


class DecisionMade(Frozen):
    """The agent decided; `objections` are what else it would have put on the list then, and why that cannot be made."""

    kind: Literal["decision-made"] = "decision-made"
    decision: Decision
    objections: dict[str, str] = Field(default_factory=dict)


class FindingMade(Frozen):
    """Something was learned."""

    kind: Literal["finding-made"] = "finding-made"
    finding: Finding


class ExchangeOpened(Frozen):
    """A language model is about to be asked."""

    kind: Literal["exchange-opened"] = "exchange-opened"
    ask: Ask


class ExchangeClosed(Frozen):
    """What the language model answered, or why it did not; written before anything of it is used."""

    kind: Literal["exchange-closed"] = "exchange-closed"
    exchange_id: str
    reply: Reply


class ClockRead(Frozen):
    """The host's clock did not show what its last reading led to expect, or was read for the first time."""

    kind: Literal["clock-read"] = "clock-read"
    clock: HostClock
    window: str = Field(description="the window that is kept by it")


class WindowAwaited(Frozen):
    """So long the session only waited for its window; no budget pays for that."""

    kind: Literal["window-awaited"] = "window-awaited"
    seconds: float


class WordHeard(Frozen):
    """A person's word was taken from the inbox; what came of it is a decision."""

    kind: Literal["word-heard"] = "word-heard"
    word: Word


class CarriedOver(Frozen):
    """An earlier session's list was taken over: these todos; `lost` says what each blocked one showed to be missing."""

    kind: Literal["carried-over"] = "carried-over"
    origin: str
    todos: tuple[str, ...] = ()
    lost: dict[str, tuple[str, ...]]


class Noted(Frozen):
    """Something worth reading in the morning that is neither decision nor finding."""

    kind: Literal["noted"] = "noted"
    text: str
    subject: str = ""


Event = Annotated[
    SessionOpened
    | SessionMoved
    | AgentAttached
    | SpecSeen
    | RoleSet
    | TodoAdded
    | TodoChanged
    | ComparisonOpened
    | EffectIntended
    | EffectClosed
    | TrialOpened
    | TrialClosed
    | MeasurementOpened
    | MeasurementClosed
    | VerdictReached
    | DecisionMade
    | FindingMade
    | ExchangeOpened
    | ExchangeClosed
    | ClockRead
    | WindowAwaited
    | WordHeard
    | CarriedOver
    | Noted,
    Field(discriminator="kind"),
]

EVENT: TypeAdapter[Event] = TypeAdapter(Event)
