"""What a failure asks of the loop beside a verdict: known-good in between, or an end; it judges no experiment."""

from __future__ import annotations

from typing import NoReturn

from agent.ending import bring_back
from agent.hands import Hands
from agent.known import failed_start, in_a_row, told, under_load
from state.errors import NeedsHuman, StoppedByFailure
from state.models import Failure, Measurement, Role, Trial, TrialStatus
from state.store import ComparisonRow
from tools.diagnose import Action
from tools.next_step import FINAL, next_step


def restores_first(hands: Hands, row: ComparisonRow) -> bool:
    """Whether known-good has to serve before the candidate's next try: the newest launch, the candidate's, asks so."""
    trials = hands.store.trials(hands.session_id)
    newest = trials[-1]
    if newest.fingerprint != row.candidate:
        return False
    if newest.status is TrialStatus.FAILED:
        trouble = failed_start(trials, row.experiment.id, row.candidate)
    else:
        runs = hands.store.measurements(hands.session_id, row.experiment.id)
        trouble = under_load(runs, trials, row.experiment.id, row.candidate) if newest.id in hands.spoilt else None
    return trouble is not None and trouble.step is Action.RESTORE


async def heed(hands: Hands, taken: Measurement, trial: Trial) -> None:
    """End the session if what the server said during a run calls for that; else it is the judge's to weigh.

    Nothing of ours is to blame for a complaint of known-good: when its retry complains as well, trying on is useless.
    """
    if taken.complaint is None:
        return
    runs, trials = hands.store.measurements(hands.session_id), hands.store.trials(hands.session_id)
    times = in_a_row(runs, trials, trial.fingerprint)
    step = next_step(taken.complaint, times, known_good=trial.fingerprint == hands.role(Role.KNOWN_GOOD))
    if step in FINAL:
        await stop(hands, taken.complaint, step)


async def stop(hands: Hands, failure: Failure, step: Action) -> NoReturn:
    """Nothing else is tried. Raises StoppedByFailure, or once known-good serves again NeedsHuman."""
    if step is not Action.ESCALATE:
        raise StoppedByFailure(f"trying on cannot help: {told(failure)}", do="mend it, then `resume` goes on")
    trial = await bring_back(hands, hands.role(Role.KNOWN_GOOD))
    await hands.manners.at_rest()
    raise NeedsHuman(
        "something on the host wants a person; the known-good configuration serves",
        where={"target": hands.target.name, "diagnosis": told(failure), "serves": trial.id},
        tail=failure.tail,
        do="mend what the diagnosis names; `resume` then goes on",
    )
