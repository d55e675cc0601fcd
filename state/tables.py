"""The tables as ours: how the rows of each are asked for, ordered, read and found; it opens no database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter

from state.exchanges import Ask, Exchange, Reply
from state.models import (
    Adoption,
    Answer,
    Experiment,
    Finding,
    Frozen,
    Measurement,
    MeasurementStatus,
    SessionStatus,
    Todo,
    TodoStatus,
    Trial,
    Verdict,
)
from state.rows import Label

Row = TypeVar("Row")
Values = dict[str, Any]
"""A row as the database has it."""


class SessionRow(Frozen):
    """Where one session stands, as the sessions table has it."""

    id: str
    target: str
    status: SessionStatus
    reason: str
    exit_code: int | None
    started_at: float
    ended_at: float | None
    epoch: int
    config: dict[str, Any]
    config_revision: str
    workload_revision: str
    adoption: Adoption
    agent_pid: int | None
    attached: int


class ComparisonRow(Frozen):
    """Which specs an open experiment compares, by fingerprint."""

    experiment: Experiment
    parent: str
    candidate: str
    epoch: int


class EffectRow(Frozen):
    """An effect: open as long as `outcome` is None."""

    key: str
    intent: dict[str, Any]
    outcome: dict[str, Any] | None


class Listed(NamedTuple):
    """A todo, and what it compares once it was begun."""

    todo: Todo
    comparison: ComparisonRow | None


class Judged(NamedTuple):
    """A verdict, and when it was reached; Unix seconds."""

    verdict: Verdict
    at: float


class Answered(NamedTuple):
    """What a valid run has as answers to the fixed prompts."""

    measurement: str
    trial: str
    answers: tuple[Answer, ...]


class Table(NamedTuple, Generic[Row]):
    """How a session's rows are kept: the table and columns, the column of ids, each row's place, meaning and labels."""

    name: str
    source: str
    columns: str
    order: Callable[[Values], Any]
    parse: Callable[[Values], Row]
    labels: Callable[[Row], Iterable[Label]]
    where: str = "true"
    key: str = "id"


EXPERIMENT = "experiment"
STATUS = "status"
FINGERPRINT = "fingerprint"
PROCESS = "process"
TRIAL = "trial"
KIND = "kind"
IDENTITY = "identity"
PURPOSE = "purpose"
TRIED = "tried"
LAUNCHED: Label = ("launched", True)
COMPLAINED: Label = ("complained", True)
"""Names of labels; of them `TRIED` has the status of todos that change something, `LAUNCHED` the launches that are
ours, `COMPLAINED` the runs against which the server itself spoke."""


def _number(row: Values) -> int:
    return int(row["id"][1:])


def _listed(row: Values) -> Listed:
    experiment = Experiment.model_validate_json(row["body"])
    todo = Todo(
        experiment=experiment,
        status=TodoStatus(row["status"]),
        priority=row["priority"],
        reason=row["reason"],
        identity=row["identity"],
    )
    if row["parent"] is None:
        return Listed(todo, None)
    begun = ComparisonRow(experiment=experiment, parent=row["parent"], candidate=row["candidate"], epoch=row["epoch"])
    return Listed(todo, begun)


def _todo_labels(listed: Listed) -> Iterable[Label]:
    todo = listed.todo
    yield EXPERIMENT, todo.id
    yield STATUS, todo.status
    yield PURPOSE, todo.experiment.purpose
    if todo.experiment.tries:
        yield TRIED, todo.status
    if todo.identity:
        yield IDENTITY, todo.identity


def _trial_labels(trial: Trial) -> Iterable[Label]:
    yield EXPERIMENT, trial.experiment_id
    yield STATUS, trial.status
    yield FINGERPRINT, trial.fingerprint
    yield PROCESS, trial.process
    if trial.kind == "launch" and not trial.adopted:
        yield LAUNCHED


def _measurement_labels(taken: Measurement) -> Iterable[Label]:
    yield EXPERIMENT, taken.experiment_id
    yield TRIAL, taken.trial_id
    if taken.status is MeasurementStatus.OPEN:
        yield STATUS, taken.status
    if taken.complaint is not None:
        yield COMPLAINED


def _answered(row: Values) -> Answered:
    return Answered(row["id"], row["trial_id"], _ANSWERS.validate_json(row["answers"]))


_ANSWERS: TypeAdapter[tuple[Answer, ...]] = TypeAdapter(tuple[Answer, ...])

TODOS = Table(
    name="todos",
    source="todos",
    columns="*",
    order=lambda row: row["position"],
    parse=_listed,
    labels=_todo_labels,
)
TRIALS = Table(
    name="trials",
    source="trials",
    columns="id, opened_at, body",
    order=lambda row: (row["opened_at"], _number(row)),
    parse=lambda row: Trial.model_validate_json(row["body"]),
    labels=_trial_labels,
)
MEASUREMENTS = Table(
    name="measurements",
    source="measurements",
    columns="id, body",
    order=_number,
    parse=lambda row: Measurement.model_validate_json(row["body"]),
    labels=_measurement_labels,
)
ANSWERS = Table(
    name="answers",
    source="measurements",
    columns="id, trial_id, answers",
    where="answers IS NOT NULL AND status = 'valid'",
    order=_number,
    parse=_answered,
    labels=lambda answered: ((TRIAL, answered.trial),),
)
VERDICTS = Table(
    name="verdicts",
    source="verdicts",
    columns="experiment_id, at, body",
    key="experiment_id",
    order=lambda row: row["at"],
    parse=lambda row: Judged(Verdict.model_validate_json(row["body"]), row["at"]),
    labels=lambda judged: ((EXPERIMENT, judged.verdict.experiment_id),),
)
DECISIONS: Table[Values] = Table(
    name="decisions",
    source="decisions",
    columns="*",
    order=_number,
    parse=lambda row: {**row, "evidence": json.loads(row["evidence"])},
    labels=lambda made: ((EXPERIMENT, made["subject"]), (KIND, made["kind"])),
)


# --- rows that nothing keeps -------------------------------------------------------------------------------


def session_row(row: Values) -> SessionRow:
    """A session."""
    return SessionRow.model_validate(
        {**row, "config": json.loads(row["config"]), "adoption": Adoption.model_validate_json(row["adoption"])}
    )


def finding_row(row: Values) -> Finding:
    """A finding."""
    evidence = tuple(json.loads(row["evidence"]))
    return Finding(id=row["id"], statement=row["statement"], evidence=evidence, scope=row["scope"])


def exchange_row(row: Values) -> Exchange:
    """What was said to a language model."""
    reply = None if row["reply"] is None else Reply.model_validate_json(row["reply"])
    return Exchange(ask=Ask.model_validate_json(row["ask"]), reply=reply)


def effect_row(row: Values) -> EffectRow:
    """An effect."""
    outcome = None if row["outcome"] is None else json.loads(row["outcome"])
    return EffectRow(key=row["key"], intent=json.loads(row["intent"]), outcome=outcome)
