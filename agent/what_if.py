"""What other thresholds would have decided about the runs that were made; it must not ask a host or write anything.

Each verdict is asked for again under the changed rule, on what had been measured when it was reached: as soon as the
rule would have spoken, else at the end of the experiment. Where the rule would have wanted a run that was never made,
there is no verdict, and none is made up.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from agent.config import SessionConfig
from agent.config_checks import contradictions
from agent.config_problems import Problem, shown_path, unwanted_values, validation_problems
from agent.evidence import comparison_of, comparison_with
from agent.judge import Comparison, assess, close
from agent.remeasured import remeasured
from agent.verdicts import verdict_now
from agent.verify import config_of
from state import events as ev
from state.errors import ConfigError, StoreDamaged
from state.models import Frozen, Guards, JudgeRule, Outcome, ValidityRule, Verdict
from state.scratch import Scratch
from state.store import Store, StoredEvent

Section = tuple[str, ...]
SECTIONS: dict[Section, type[BaseModel]] = {
    ("judge",): JudgeRule,
    ("validity",): ValidityRule,
    ("workload", "guards"): Guards,
}
PLANS = frozenset({"validity.quiet_wait_s", "judge.sentinel_every"})
"""Keys of these sections that decide what is done and when; no verdict follows from them."""


class Alternative(Frozen):
    """One verdict under another rule; `would_be` is None where the rule would have gone on."""

    experiment: str
    decided: Outcome
    would_be: Outcome | None
    why: str

    @property
    def differs(self) -> bool:
        """Whether the word is another one."""
        return self.would_be is not self.decided


class WhatIf(Frozen):
    """All verdicts of a session under changed keys."""

    session: str
    changed: dict[str, Any]
    alternatives: tuple[Alternative, ...]

    @property
    def summary(self) -> str:
        """How many differ, and what that means, in one line."""
        differ = sum(alternative.differs for alternative in self.alternatives)
        how = "each is judged by itself, on what was measured then and against its parent of then"
        return f"{differ} of {len(self.alternatives)} verdicts differ; {how}"


def what_if(store: Store, session_id: str, wishes: Mapping[str, str]) -> WhatIf:
    """Judge a session's runs again with some keys of its session file changed; values are written as in TOML.

    Raises ConfigError for a key or value that cannot be asked about, or when the session is unknown or too old;
    StoreDamaged when events are missing.
    """
    with store.snapshot():
        events = store.events(store.session(session_id).id)
    own = [stored for stored in events if stored.session_id == session_id]
    config = config_of(own)
    if isinstance(config, str):
        do = "ask the version that wrote it; `replay --verify` tells what is there"
        raise ConfigError(f"session {session_id} cannot be judged again: {config}", do=do)
    changed = changed_config(config, wishes)
    values = {key: _at(changed, key) for key in wishes}
    today = {one.experiment: one for one in _Rejudged(store, session_id, config).all(own)}
    alternatives = [_marked(one, today[one.experiment]) for one in _Rejudged(store, session_id, changed).all(own)]
    return WhatIf(session=session_id, changed=values, alternatives=tuple(alternatives))


def _marked(alternative: Alternative, unchanged: Alternative) -> Alternative:
    """Where this version has another word even for the unchanged rule, the change is not to blame."""
    if not unchanged.differs:
        return alternative
    said = unchanged.would_be or "that it would have gone on"
    return alternative.model_copy(update={"why": f"{alternative.why}; unchanged, this version says {said}"})


# --- the changed rule --------------------------------------------------------------------------------------


def changed_config(config: SessionConfig, wishes: Mapping[str, str]) -> SessionConfig:
    """The configuration with some keys changed, checked like a session file; ConfigError names all that is wrong."""
    sections, problems = _sections(wishes)
    valid: dict[Section, BaseModel] = {}
    for path, values in sections.items():
        before = config.workload.guards if path == ("workload", "guards") else getattr(config, path[0])
        try:
            text = json.dumps({**before.model_dump(mode="json"), **values}, default=str)
            valid[path] = SECTIONS[path].model_validate_json(text, strict=True)
        except ValidationError as error:
            problems += validation_problems(error, path, SessionConfig)
    changed = _with(config, valid)
    found = {name: getattr(changed, name) for name in SessionConfig.model_fields}
    problems += contradictions(found, changed.workload.model_dump())
    if problems:
        said = [f"  {shown_path(problem.path)}: {problem.message}" for problem in problems]
        raise ConfigError(
            "\n".join(["this cannot be asked with --what-if", *said]),
            do="give KEY=VALUE with a key and a value that a session file may have there",
        )
    return changed


def _sections(wishes: Mapping[str, str]) -> tuple[dict[Section, dict[str, Any]], list[Problem]]:
    """The wished values by section, and what is wrong with the others."""
    sections: dict[Section, dict[str, Any]] = {}
    problems: list[Problem] = []
    for key, text in wishes.items():
        if key not in askable():
            problems.append(Problem((key,), _unknown(key)))
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            problems.append(Problem((key,), f"expected a value as in a session file, got {text}"))
            continue
        problems += unwanted_values(value, (key,))
        section, _, name = key.rpartition(".")
        sections.setdefault(tuple(section.split(".")), {})[name] = value
    return sections, problems


def askable() -> list[str]:
    """Every key of the session file that may be changed."""
    keys = [f"{'.'.join(path)}.{name}" for path, model in SECTIONS.items() for name in model.model_fields]
    return [key for key in keys if key not in PLANS]


def _unknown(key: str) -> str:
    if key in PLANS:
        return "decides what is measured and when, so no verdict follows from it"
    names = {other.rpartition(".")[2]: other for other in askable()}
    meant = difflib.get_close_matches(key.rpartition(".")[2], names, n=1, cutoff=0.6)
    guess = f' (did you mean "{names[meant[0]]}"?)' if meant else ""
    return f"cannot be changed{guess}; keys under {', '.join('.'.join(path) for path in SECTIONS)} can"


def _with(config: SessionConfig, sections: Mapping[Section, BaseModel]) -> SessionConfig:
    updates: dict[str, Any] = {path[0]: model for path, model in sections.items() if len(path) == 1}
    guards = sections.get(("workload", "guards"))
    if guards is not None:
        updates["workload"] = config.workload.model_copy(update={"guards": guards})
    return config.model_copy(update=updates)


def _at(config: SessionConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


# --- the session once more ---------------------------------------------------------------------------------


class _Rejudged:
    """A session played again under another configuration, asked wherever the session itself asked."""

    def __init__(self, store: Store, session_id: str, config: SessionConfig) -> None:
        self.store = store
        self.session_id = session_id
        self.config = config
        self.spoken: tuple[Verdict, int] | None = None
        """The first verdict on the experiment under way, and on how many of its runs it rests."""
        self.notes: dict[str, str] = {}
        """What became of runs under the rule, by id."""

    def all(self, own: Sequence[StoredEvent]) -> list[Alternative]:
        """The alternative to each verdict, in order."""
        found = []
        with Scratch(self.store.path) as scratch:
            for stored in own:
                event = instead = stored.event
                if isinstance(event, ev.MeasurementClosed):
                    instead = self._recounted(scratch.store, event)
                elif isinstance(event, ev.VerdictReached):
                    scratch.stand_at(stored.at)
                    alternative, instead = self._judged(scratch.store, event)
                    found.append(alternative)
                scratch.put(stored, instead)
                if isinstance(event, ev.ComparisonOpened | ev.MeasurementClosed | ev.TrialClosed):
                    self._ask(scratch.store)
        return found

    def _ask(self, now: Store) -> None:
        under_way = now.open_comparison(self.session_id)
        if self.spoken is None and under_way is not None:
            comparison = self._comparison(now, under_way.experiment.id)
            verdict = verdict_now(now, self.session_id, self.config, comparison)
            self.spoken = None if verdict is None else (verdict, len(comparison.own))

    def _comparison(self, now: Store, experiment_id: str) -> Comparison:
        try:
            return comparison_of(now, self.session_id, self.config, experiment_id)
        except KeyError as gone:
            what = f"{experiment_id} cannot be judged again: {gone.args[0]} is missing in {self.store.path}"
            raise StoreDamaged(what, do="`replay --verify` names all that is wrong with it") from gone

    def _recounted(self, now: Store, event: ev.MeasurementClosed) -> ev.MeasurementClosed:
        """The end of a run with the status that it has under the rule."""
        taken = event.measurement
        comparison = comparison_with(now, self.session_id, self.config, taken)
        key, config = f"{self.session_id}-{taken.id}", self.config
        rate = config.manners.max_foreign_rps
        again = remeasured(taken, event.raw, key, config.workload, config.validity, comparison, rate)
        if again.unread:
            self.notes[taken.id] = "as written, for the result cannot be read again"
        elif again.measurement.status is not taken.status:
            self.notes[taken.id] = f"{again.measurement.status} under the rule"
        return event.model_copy(update={"measurement": again.measurement})

    def _judged(self, now: Store, event: ev.VerdictReached) -> tuple[Alternative, ev.VerdictReached]:
        """The alternative, and the stored verdict with what the rule would have spent of the night's error.

        Outcome and parent stay those of then: the next experiment was measured against what served.
        """
        stored = event.verdict
        comparison = self._comparison(now, stored.experiment_id)
        own = comparison.own
        verdict, runs = self.spoken or (verdict_now(now, self.session_id, self.config, comparison), len(own))
        self.spoken = None
        if verdict is None:
            need = assess(comparison).need
            assert need is not None, "the judge speaks or wants a run"
            why = f"would have gone on: {need.arm}, launch {need.block + 1}, run {need.run + 1}, at {need.load_point}"
        else:
            why = verdict.reason
        if runs < len(own):
            why += f"; known after {runs} of its {len(own)} runs"
        noted = [self.notes[taken.id] for taken in own if taken.id in self.notes]
        for note in dict.fromkeys(noted):
            why += f"; {note}: {', '.join(taken.id for taken in own if self.notes.get(taken.id) == note)}"
        alternative = Alternative(
            experiment=stored.experiment_id,
            decided=stored.outcome,
            would_be=None if verdict is None else verdict.outcome,
            why=why,
        )
        paid = verdict or close(comparison, stored.outcome, stored.reason)
        charged = stored.model_copy(update={"rule": paid.rule})
        return alternative, event.model_copy(update={"verdict": charged})
