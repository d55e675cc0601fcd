"""A stored session computed once more and held against what was written; it must not ask a host or write anything.

Tables are folded again from the events, runs read again from the client's results, and each verdict is asked for again
on a store that stands where the real one stood just before it; then the decision that follows from it. What was put on
the list by what was learned is asked for again in the same way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib.metadata import version

from pydantic import ValidationError

from agent.config import SessionConfig
from agent.decisions import Ids, consequences
from agent.evidence import comparison_of, comparison_with, known
from agent.refine import label
from agent.refiner import refine
from agent.remeasured import remeasured
from agent.verdicts import final_verdict, scope
from state import events as ev
from state.differences import ABSENT, Difference, changed_rows, differences
from state.errors import StoreDamaged
from state.models import DecisionKind, Frozen, Purpose, Role, Verdict, digest
from state.projection import TABLES
from state.scratch import Scratch
from state.store import Store, StoredEvent

FOLLOWS = frozenset(
    {
        DecisionKind.KEEP,
        DecisionKind.LEAVE_OUT,
        DecisionKind.ADJUST,
        DecisionKind.VOID,
        DecisionKind.PIVOT,
        DecisionKind.BASELINE,
        DecisionKind.SENTINEL,
    }
)
"""Decisions that nothing but a verdict leads to."""


class Kind(StrEnum):
    """What is checked."""

    LOG = "event log"
    TABLE = "table"
    RUN = "run"
    VERDICT = "verdict"
    DECISION = "decision"


class Result(StrEnum):
    """What came of a check."""

    SAME = "same"
    DIFFERENT = "different"
    UNVERIFIABLE = "cannot be verified"


class Check(Frozen):
    """One thing that was computed again; `trusted` is what it rests on that nothing stored can tell again."""

    kind: Kind
    subject: str
    result: Result = Result.SAME
    differences: tuple[Difference, ...] = ()
    why: str = ""
    trusted: tuple[str, ...] = ()
    stored: Verdict | None = None
    recomputed: Verdict | None = None


class Audit(Frozen):
    """All checks of one session: its log, what happened in its order, the tables."""

    session: str
    checks: tuple[Check, ...]

    @property
    def clean(self) -> bool:
        """Whether all of it was computed again and is the same."""
        return all(check.result is Result.SAME for check in self.checks)

    @property
    def summary(self) -> str:
        """How many of each kind were checked and what came of it, in one line."""
        kinds = Counter(check.kind for check in self.checks)
        results = Counter(check.result for check in self.checks)
        checked = ", ".join(f"{kinds[kind]} {kind}{'s' if kinds[kind] > 1 else ''}" for kind in Kind if kinds[kind])
        found = [f"{results[result]} {result}" for result in Result if result is not Result.SAME and results[result]]
        return f"{checked}: {', '.join(found) or 'all the same'}"


def verify(store: Store, session_id: str) -> Audit:
    """Compute a session again. Raises ConfigError when there is none of that id, StoreDamaged for unreadable events."""
    with store.snapshot():
        events = store.events(store.session(session_id).id)
        own = [stored for stored in events if stored.session_id == session_id]
        checks = [_log(own, store.missing_events())]
        if own and isinstance(own[0].event, ev.SessionOpened):
            try:
                checks += _judged(store, session_id, own)
                checks += _tables(store, events, session_id)
            except StoreDamaged as broken:  # whether the log can have been written like this is what was asked
                checks.append(Check(kind=Kind.LOG, subject="order", result=Result.DIFFERENT, why=broken.what))
    return Audit(session=session_id, checks=tuple(checks))


def config_of(own: Sequence[StoredEvent]) -> SessionConfig | str:
    """The configuration with which a session was opened, or why it cannot be read."""
    opened = own[0].event if own else None
    if not isinstance(opened, ev.SessionOpened):
        return "its log does not begin with its opening"
    try:
        return SessionConfig.model_validate(opened.config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        return f"its configuration is that of another version ({key}: {first['msg']})"


# --- the log and the tables --------------------------------------------------------------------------------


def _log(own: Sequence[StoredEvent], missing: Sequence[int]) -> Check:
    """No event is missing, and the session's configuration is still the one that was hashed when it was opened."""
    found = [Difference(where=f"event {seq}", stored=ABSENT, recomputed="an event") for seq in missing]
    opened = own[0].event if own else None
    if isinstance(opened, ev.SessionOpened):
        found += differences(opened.config_revision, digest(opened.config), "config_revision")
        found += differences(opened.workload_revision, digest(opened.config["workload"]), "workload_revision")
    else:
        first = ABSENT if opened is None else opened.kind
        found.append(Difference(where="first event of the session", stored=first, recomputed="session-opened"))
    return _checked(Kind.LOG, "all events", found)


def _tables(store: Store, events: Sequence[StoredEvent], session_id: str) -> Iterator[Check]:
    """Each table is the fold of the events."""
    with Scratch(store.path) as scratch:
        for stored in events:
            scratch.put(stored)
        for table in TABLES:
            yield _checked(Kind.TABLE, table, changed_rows(store, scratch.store, table, session_id))


def _checked(kind: Kind, subject: str, found: Sequence[Difference]) -> Check:
    result = Result.DIFFERENT if found else Result.SAME
    return Check(kind=kind, subject=subject, result=result, differences=tuple(found))


# --- runs, verdicts and what followed ----------------------------------------------------------------------


def _judged(store: Store, session_id: str, own: Sequence[StoredEvent]) -> Iterator[Check]:
    """Go through the session event by event, with the runs as their raw results tell them."""
    config = config_of(own)
    writer = next((e.event.version for e in own if isinstance(e.event, ev.AgentAttached)), version("ratchet-tuner"))
    explained: set[int] = set()
    with Scratch(store.path) as scratch:
        for place, stored in enumerate(own):
            scratch.stand_at(stored.at)
            event = instead = stored.event
            if isinstance(event, ev.AgentAttached):
                writer = event.version
            elif isinstance(event, ev.SpecSeen) and event.fingerprint != event.spec.fingerprint:
                other = differences(event.fingerprint, event.spec.fingerprint, f"event {stored.seq}, fingerprint")
                yield _of_version(_checked(Kind.LOG, f"configuration {event.fingerprint}", other), writer)
            elif isinstance(event, ev.MeasurementClosed):
                check, instead = _run(scratch.store, event, config, session_id)
                yield _of_version(check, writer)
            elif isinstance(event, ev.VerdictReached):
                asked = _of_version(_verdict(scratch.store, session_id, config, event.verdict), writer)
                check, followers = _followed(scratch.store, session_id, event.verdict, own[place:])
                explained.update(range(place, place + followers))
                yield from (asked, _of_version(check, writer, asked))
            elif isinstance(event, ev.DecisionMade) and event.decision.kind is DecisionKind.REFINE:
                check, followers = _refined(scratch.store, session_id, config, own[place:])
                explained.update(range(place, place + followers))
                yield _of_version(check, writer)
            elif place not in explained:
                yield from _loose(scratch.store, session_id, own[place - 1].event, event)
            scratch.put(stored, instead)


def _judge(verdict: Verdict) -> tuple[object, set[str]]:
    """What tells judges apart: their revision, which the oldest did not write, and which numbers they were given."""
    return verdict.rule.get("judge"), {*verdict.rule}


def _of_version(check: Check, writer: str, cause: Check | None = None) -> Check:
    """What another version wrote may differ because the program does: that proves nothing. Nor does what follows."""
    if check.result is Result.DIFFERENT and cause is not None and cause.result is Result.UNVERIFIABLE:
        return check.model_copy(update={"result": Result.UNVERIFIABLE, "why": cause.why})
    now = version("ratchet-tuner")
    before, after = check.stored, check.recomputed
    other_rules = before is not None and after is not None and _judge(before) != _judge(after)
    if check.result is not Result.DIFFERENT or not (other_rules or writer != now):
        return check
    why = f"version {writer} wrote it, this is {now}" if writer != now else "a judge with other rules wrote it"
    return check.model_copy(update={"result": Result.UNVERIFIABLE, "why": why})


def _run(
    store: Store, event: ev.MeasurementClosed, config: SessionConfig | str, session_id: str
) -> tuple[Check, ev.Event]:
    """A run's figures and status, and the event as its raw result has it."""
    taken = event.measurement
    if isinstance(config, str):
        return Check(kind=Kind.RUN, subject=taken.id, result=Result.UNVERIFIABLE, why=config), event
    comparison = comparison_with(store, session_id, config, taken)
    key, rate = f"{session_id}-{taken.id}", config.manners.max_foreign_rps
    again = remeasured(taken, event.raw, key, config.workload, config.validity, comparison, rate)
    if again.unread:
        return Check(kind=Kind.RUN, subject=taken.id, result=Result.UNVERIFIABLE, why=again.unread), event
    found = differences(taken.model_dump(mode="json"), again.measurement.model_dump(mode="json"))
    check = _checked(Kind.RUN, taken.id, found).model_copy(update={"trusted": again.trusted})
    return check, event.model_copy(update={"measurement": again.measurement})


def _verdict(store: Store, session_id: str, config: SessionConfig | str, stored: Verdict) -> Check:
    """A verdict, asked for again as the session asked for it."""
    name = stored.experiment_id
    if isinstance(config, str):
        return Check(kind=Kind.VERDICT, subject=name, result=Result.UNVERIFIABLE, why=config, stored=stored)
    under_way = store.open_comparison(session_id)
    if under_way is None or under_way.experiment.id != name:
        found = "none" if under_way is None else under_way.experiment.id
        loose = Difference(where="the experiment under way", stored=name, recomputed=found)
        return _checked(Kind.VERDICT, name, [loose]).model_copy(update={"stored": stored})
    try:
        comparison = comparison_of(store, session_id, config, name)
    except KeyError as gone:
        lost = Difference(where="what it rests on", stored=ABSENT, recomputed=str(gone.args[0]))
        return _checked(Kind.VERDICT, name, [lost]).model_copy(update={"stored": stored})
    again = final_verdict(store, session_id, config, comparison)
    differing = differences(stored.model_dump(mode="json"), again.model_dump(mode="json"), tolerant=True)
    return _checked(Kind.VERDICT, name, differing).model_copy(update={"stored": stored, "recomputed": again})


def _followed(store: Store, session_id: str, verdict: Verdict, since: Sequence[StoredEvent]) -> tuple[Check, int]:
    """What was decided upon a verdict against what follows from it, and how many events that takes."""
    there = [stored.event for stored in since]
    ids = Ids(
        decision=next((e.decision.id for e in there if isinstance(e, ev.DecisionMade)), ABSENT),
        finding=next((e.finding.id for e in there if isinstance(e, ev.FindingMade)), ABSENT),
        scope=scope(store.session(session_id)),
    )
    try:
        row = store.comparison(session_id, verdict.experiment_id)
    except KeyError:
        loose = Difference(where=verdict.experiment_id, stored="judged", recomputed="never begun")
        return _checked(Kind.DECISION, ids.decision, [loose]), 1
    wanted = consequences(row, verdict, known(store, session_id), ids)
    found: list[Difference] = []
    for at, event in enumerate(wanted):
        written = there[at].model_dump(mode="json") if at < len(there) else {}
        found += differences(written, event.model_dump(mode="json"), event.kind)
    return _checked(Kind.DECISION, ids.decision, found), len(wanted)


def _refined(
    store: Store, session_id: str, config: SessionConfig | str, since: Sequence[StoredEvent]
) -> tuple[Check, int]:
    """What was put on the list by what was learned, against what follows from it, and how many events that takes.

    What fits a kept configuration, and what the server or the session objected to, is taken as the log has it.
    """
    there = [stored.event for stored in since]
    made = there[0]
    assert isinstance(made, ev.DecisionMade)
    name = made.decision.id
    if isinstance(config, str):
        return Check(kind=Kind.DECISION, subject=name, result=Result.UNVERIFIABLE, why=config), 1
    batch = itertools.takewhile(lambda event: isinstance(event, ev.TodoAdded | ev.TodoChanged), there[1:])
    added = [event.experiment for event in batch if isinstance(event, ev.TodoAdded)]
    new = [one for one in added if one.purpose is Purpose.TRY and one.source.kind not in ("refinement", "model")]
    try:
        wanted = refine(store, session_id, config, new, lambda setting: made.objections.get(label(setting)))
    except KeyError as gone:
        lost = Difference(where="what it rests on", stored=ABSENT, recomputed=str(gone.args[0]))
        return _checked(Kind.DECISION, name, [lost]), 1
    found: list[Difference] = []
    for at, event in enumerate(wanted):
        written = there[at].model_dump(mode="json") if at < len(there) else {}
        found += differences(written, event.model_dump(mode="json"), event.kind, tolerant=True)
    trusted = ("what the server said of its flags and its model then",) if made.objections or new else ()
    return _checked(Kind.DECISION, name, found).model_copy(update={"trusted": trusted}), len(wanted)


def _loose(store: Store, session_id: str, before: ev.Event, event: ev.Event) -> Iterator[Check]:
    """What moves a role or keeps something although no verdict asks for it."""
    if isinstance(event, ev.DecisionMade):
        made = event.decision
        returns = made.kind is DecisionKind.REVERT and made.subject == session_id
        if made.kind in FOLLOWS or (made.kind is DecisionKind.REVERT and not returns):
            unasked = Difference(where=made.kind, stored=made.subject, recomputed="no verdict asks for it")
            yield _checked(Kind.DECISION, made.id, [unasked])
    if isinstance(event, ev.TodoAdded) and event.experiment.source.kind == "refinement" and not event.origin:
        name = event.experiment.id
        unasked = Difference(where=name, stored="on the list", recomputed="no decision asks for it")
        yield _checked(Kind.DECISION, name, [unasked])
    if isinstance(event, ev.RoleSet):
        allowed = _may_be(store, session_id, before, event.role)
        if event.fingerprint != allowed:
            subject = f"role {event.role}"
            yield _checked(Kind.DECISION, subject, differences(event.fingerprint, allowed or ABSENT, subject))


def _may_be(store: Store, session_id: str, before: ev.Event, role: Role) -> str | None:
    """The only configuration that a role may be given now: what was found, what is known-good, or what gave up."""
    found = store.session(session_id).adoption.spec.fingerprint
    gave_up = isinstance(before, ev.DecisionMade) and before.decision.kind is DecisionKind.REVERT
    if role is Role.KNOWN_GOOD and gave_up:
        return store.role(session_id, Role.ORIGINAL)
    if role is Role.FINAL:
        return store.role(session_id, Role.KNOWN_GOOD)
    return store.role(session_id, role) or found
