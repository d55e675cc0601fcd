"""From an earlier session to the next on the same target: finds it and lays out what it knew; it writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from agent.carry_over import Earlier, Ground, carried_over
from agent.config import SessionConfig
from agent.decisions import Ids, following
from agent.evidence import known
from state import events as ev
from state.errors import ConfigError, RatchetError
from state.models import Adoption, Change, Role, TodoStatus, Who
from state.store import SessionRow, Store
from tools.target import Target

LATEST = "latest"


def session_to_continue(store: Store, wanted: str, target: str) -> SessionRow:
    """The session of that id, or the latest one on the target. Raises ConfigError."""
    there = [row for row in store.sessions() if row.target == target]
    if wanted == LATEST and there:
        return there[-1]
    if wanted == LATEST:
        raise ConfigError(
            f"there is no earlier session on {target} in {store.path}", do="start without --continue-from"
        )
    row = store.session(wanted)
    if row.target != target:
        raise ConfigError(
            f"session {wanted} was on {row.target}, not on {target}",
            do=f"sessions on {target}: {', '.join(one.id for one in there) or 'none'}",
        )
    return row


def earlier(store: Store, row: SessionRow) -> Earlier:
    """All that can come over from a session."""
    known_good = store.role(row.id, Role.KNOWN_GOOD)
    assert known_good is not None, "known-good is set when a session opens"
    movers: dict[str, tuple[tuple[Who, TodoStatus], ...]] = {}
    for stored in store.events(row.id):
        event = stored.event
        if isinstance(event, ev.TodoChanged) and event.status is not None:
            movers[event.experiment_id] = (*movers.get(event.experiment_id, ()), (event.by, event.status))
    return Earlier(
        id=row.id,
        known=known(store, row.id),
        findings=tuple(store.findings(row.id)),
        workload_revision=row.workload_revision,
        adoption=row.adoption,
        known_good=known_good,
        movers=movers,
    )


async def take_over(
    store: Store, row: SessionRow, config: SessionConfig, adoption: Adoption, target: Target
) -> Sequence[ev.Event]:
    """What comes over, as events of a session that is about to be opened."""
    await target.facts()  # without the server's own list of flags no change can be tried on

    def would_be(changes: tuple[Change, ...]) -> str | None:
        try:
            return target.derive(adoption.spec, changes).fingerprint
        except RatchetError:
            return None

    ground = Ground(
        workload_revision=config.workload.revision,
        adoption=adoption,
        policy=config.policy,
        own={own.id: own.experiment() for own in config.experiments},
        would_be=would_be,
    )
    # The opening's own decision comes first.
    ids = Ids(decision=following(store.next_id("decisions", "D")), finding=store.next_id("findings", "F"), scope="")
    return carried_over(earlier(store, row), ground, ids)
