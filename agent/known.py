"""What a session has learned so far, laid out for the functions that learn from it: data, and pure readings of it.

It asks no host and no database: `agent.evidence.known` fills it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field, SkipValidation

from state.models import (
    Arm,
    Failure,
    Frozen,
    LaunchSpec,
    Measurement,
    Outcome,
    Todo,
    Trial,
    TrialStatus,
    Verdict,
)
from tools.diagnose import Action
from tools.next_step import ADJUSTMENTS, RETRIES, next_step

ABANDONED = "abandoned"
"""Class of a launch that an interruption left open and that nobody wants any more; it says nothing of its setting."""

AGAIN = RETRIES | {Action.INVALIDATE}
"""Steps after which the same configuration has another try."""
BLAMES = ADJUSTMENTS | {Action.REJECT, Action.DISCARD}
"""Steps that hold a configuration to blame."""


class Trouble(NamedTuple):
    """The newest failure of a configuration, how often it has failed, and the step that this calls for."""

    failure: Failure
    times: int
    step: Action


class Known(Frozen):
    """Everything that is learned from: the list, verdicts in their order, launches and runs in theirs.

    `specs` are the launched configurations by fingerprint, `candidates` the fingerprint that each experiment tries,
    `complaints` the runs against which the server itself spoke, `lost_before` what the blocked todos of an earlier
    session showed to be missing. It is taken as it is: a long night's rows were read and checked one by one, and are
    not checked again at each step.
    """

    todos: SkipValidation[tuple[Todo, ...]]
    verdicts: SkipValidation[dict[str, Verdict]]
    trials: SkipValidation[tuple[Trial, ...]]
    specs: SkipValidation[dict[str, LaunchSpec]]
    candidates: SkipValidation[dict[str, str]]
    complaints: SkipValidation[tuple[Measurement, ...]]
    lost_before: dict[str, tuple[str, ...]] = Field(default_factory=dict)


def failed_start(trials: Sequence[Trial], experiment_id: str, fingerprint: str) -> Trouble | None:
    """What the failed launches of an experiment's candidate call for, None when none has failed."""
    return _newest(
        [
            trial.failure
            for trial in trials
            if trial.experiment_id == experiment_id
            and trial.fingerprint == fingerprint
            and trial.status is TrialStatus.FAILED
            and trial.failure is not None
            and trial.failure.failure_class != ABANDONED
        ]
    )


def under_load(
    runs: Sequence[Measurement], trials: Sequence[Trial], experiment_id: str, fingerprint: str
) -> Trouble | None:
    """What a candidate said while it was measured calls for, None when it never complained."""
    launches = {trial.id for trial in trials if trial.fingerprint == fingerprint}
    return _newest(
        [
            taken.complaint
            for taken in runs
            if taken.complaint is not None
            and taken.experiment_id == experiment_id
            and taken.arm is Arm.CANDIDATE
            and taken.trial_id in launches
        ]
    )


def blamed(known: Known, experiment_id: str, outcome: Outcome) -> Trouble | None:
    """The trouble to which an experiment's verdict is due, None when its figures are."""
    fingerprint = known.candidates.get(experiment_id, "")
    if outcome is Outcome.FAILED:
        return failed_start(known.trials, experiment_id, fingerprint)
    if outcome is not Outcome.WORSE:
        return None
    trouble = under_load(known.complaints, known.trials, experiment_id, fingerprint)
    return trouble if trouble is not None and trouble.step in BLAMES else None


def in_a_row(runs: Sequence[Measurement], trials: Sequence[Trial], fingerprint: str) -> int:
    """How many of a configuration's newest runs in a row the server complained of."""
    launches = {trial.id for trial in trials if trial.fingerprint == fingerprint}
    count = 0
    for taken in reversed([one for one in runs if one.trial_id in launches]):
        if taken.complaint is None:
            break
        count += 1
    return count


def told(failure: Failure) -> str:
    """A failure in a few words."""
    return f"{failure.failure_class}: {failure.cause}"


def _newest(failures: Sequence[Failure]) -> Trouble | None:
    if not failures:
        return None
    return Trouble(failures[-1], len(failures), next_step(failures[-1], len(failures)))
