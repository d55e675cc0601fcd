"""How a server is left: the right configuration brought up, proven, and confirmed by one benchmark; it decides nothing.

There is no second way to change the server in here: bringing up is `Hands.bring_up`, measuring is `Hands.measure`.
"""

from __future__ import annotations

import statistics

from agent.evidence import CONFIRM, RESTORE, costs
from agent.hands import Hands
from agent.judge import Comparison, Need
from agent.known import told
from state import events as ev
from state.errors import NeedsHuman
from state.models import Arm, Frozen, Measurement, MeasurementStatus, Trial, TrialStatus
from tools.next_step import next_step

SHUT = "not confirmed by a run: the window is closed, or closes before one would end"


class Proof(Frozen):
    """What was seen of the server that is left: its launch, the confirming runs, and both in words."""

    trial: Trial
    runs: tuple[Measurement, ...]
    words: str

    @property
    def evidence(self) -> tuple[str, ...]:
        """Ids of the launch and of the runs."""
        return (self.trial.id, *(run.id for run in self.runs))


async def bring_back(hands: Hands, fingerprint: str) -> Trial:
    """See that a configuration serves and generates; nothing is restarted when it does so already."""
    position = await hands.where()
    trial = position.trial
    if trial is not None and trial.fingerprint == fingerprint and trial.status is TrialStatus.READY:
        trouble = await hands.target.trouble()
        if trouble is None and trial.id not in hands.spoilt:
            return trial
        said = f"does not generate: {trouble}" if trouble is not None else "complained under load and starts anew"
        hands.write(ev.Noted(text=f"{trial.id} {said}", subject=trial.id))
    return await restore(hands, fingerprint)


async def restore(hands: Hands, fingerprint: str, failed: Trial | None = None) -> Trial:
    """Bring a configuration up that must come up: one retry from a clean slate, then a person is needed.

    `failed` is a launch of it that has just failed already.
    """
    await hands.manners.before_restore(fingerprint)
    trial = failed or await hands.bring_up(fingerprint, RESTORE)
    if trial.status is not TrialStatus.READY:
        why = f"{trial.id} did not come up ({_called(trial, 1)}), trying once more"
        hands.write(ev.Noted(text=why, subject=trial.id))
        trial = await hands.bring_up(fingerprint, RESTORE)
    if trial.status is TrialStatus.READY:
        return trial
    spec = hands.store.spec(fingerprint)
    raise NeedsHuman(
        "the known-good configuration does not start any more",
        where={
            "target": hands.target.name,
            "cwd": spec.cwd,
            "command": " ".join(spec.argv),
            "diagnosis": _called(trial, 2),
        },
        tail=trial.failure.tail if trial.failure is not None else "",
        do=f"{hands.target.by_hand(hands.key(trial.id))}, then run `resume`",
    )


def _called(trial: Trial, times: int) -> str:
    """Why a launch of known-good failed, and what that calls for."""
    failure = trial.failure
    assert failure is not None, "a launch that failed says why"
    return f"{told(failure)}; calls for: {next_step(failure, times, known_good=True)}"


async def proven(hands: Hands, fingerprint: str) -> Proof:
    """Bring a configuration back, confirm it by one run at each of the objective's load points, and say what was seen.

    A server that dies under the confirming run is brought back once more. Outside the window nothing is measured.
    """
    trial = await bring_back(hands, fingerprint)
    prices = costs(hands.store, hands.session_id, hands.config)
    if await hands.hours.look() < sum(map(prices.point_s, hands.config.workload.objective.at)):
        return Proof(trial=trial, runs=(), words=SHUT)
    runs = await confirm(hands, trial)
    again = await bring_back(hands, fingerprint)
    if again.id != trial.id:
        trial, runs = again, await confirm(hands, again)
    record = _record(hands, fingerprint)
    return Proof(trial=trial, runs=runs, words="; ".join(_said(run, record) for run in runs))


async def confirm(hands: Hands, trial: Trial) -> tuple[Measurement, ...]:
    """One run at each of the objective's load points on the launch that is left, as far as not made already."""
    runs = []
    for name in hands.config.workload.objective.at:
        known = hands.store.measurements(hands.session_id, CONFIRM)
        own = tuple(m for m in known if m.status is not MeasurementStatus.OPEN)  # an open one is taken up by its block
        made = [m for m in own if m.trial_id == trial.id and m.load_point == name and m.metrics is not None]
        if not made:
            await hands.manners.before_run(hands.config.workload.point(name))
            about = Comparison(experiment_id=CONFIRM, workload=hands.config.workload, rule=hands.config.judge, own=own)
            made = [await hands.measure(Need(arm=Arm.BASELINE, block=len(own), load_point=name), about, trial)]
        runs.append(made[-1])
    return tuple(runs)


def _record(hands: Hands, fingerprint: str) -> list[Measurement]:
    """All earlier valid runs of a configuration."""
    trials = {trial.id for trial in hands.store.trials(hands.session_id) if trial.fingerprint == fingerprint}
    return [
        m
        for m in hands.store.measurements(hands.session_id)
        if m.trial_id in trials and m.status is MeasurementStatus.VALID and m.experiment_id != CONFIRM
    ]


def _said(run: Measurement, record: list[Measurement]) -> str:
    """A confirming run in words, next to what the same configuration did before."""
    rate = _tok_s(run)
    if run.status is not MeasurementStatus.VALID or rate is None:
        return f"not confirmed at {run.load_point}: {'; '.join(run.reasons)}"
    earlier = [before for m in record if m.load_point == run.load_point and (before := _tok_s(m)) is not None]
    share = f", {rate / statistics.median(earlier):.0%} of its earlier runs" if earlier else ""
    return f"confirmed at {run.load_point}: {rate:.1f} tok/s{share}"


def _tok_s(run: Measurement) -> float | None:
    return run.metrics.output_tok_s or None if run.metrics is not None else None
