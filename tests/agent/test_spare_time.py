"""While a server loads its time is used, in the order of the log: asked, checked, and nothing in a measured window."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.report import markdown
from agent.session import Runner
from state import events as ev
from state.exchanges import Silence
from state.journal import FaultPoint, no_fault
from state.models import DecisionKind, Outcome, TodoStatus
from state.replay import decision_log
from state.waits import WAITING, waits
from tests.agent.model_sessions import NOTHING, change, idea, model_session, plan
from tests.agent.sim import flag
from tests.agent.test_llm import no_proxy  # noqa: F401
from tests.agent.test_loop import Killed, outcomes
from tests.agent.test_model_sessions import assert_went_well
from tests.stubs.chat import Handler, Move, Server, says, serving, status
from tools.simulated import HOLD

pytestmark = pytest.mark.anyio
KEPT = flag("--threads", "2")
SLOTS = plan(idea(change("--parallel", "4"), title="four slots"))
POLL = plan(idea(change("--poll", "10"), title="poll less"))


def letting_go(folder: Path, move: Move) -> Move:
    """A move with which the server that loads is ready."""

    def moves(handler: Handler) -> None:
        (folder / "world" / HOLD).unlink(missing_ok=True)
        move(handler)

    return moves


@contextmanager
def slow_session(folder: Path, server: Server, *experiments: object, then: FaultPoint = no_fault) -> Iterator[Runner]:
    """A session on a server whose launches load until they are let go, from its second experiment on."""
    begun = 0

    def point(name: str) -> None:
        nonlocal begun
        begun += "comparison-opened" in name
        if "comparison-opened" in name and begun == 3:  # the baseline's is the first
            (folder / "world" / HOLD).touch()
        then(name)

    listed = experiments or (KEPT,)
    with model_session(folder, server.url, *listed, fault=point) as runner:  # type: ignore[arg-type]
        assert runner.hands.spare is not None
        runner.hands.spare.grace_s = 0.2
        yield runner


def spans(runner: Runner, opens: type, closes: type, name: str) -> dict[str, tuple[int, int]]:
    """First and last place in the log of everything that is opened and closed there."""
    found: dict[str, tuple[int, int]] = {}
    for stored in runner.store.events(runner.session_id):
        event = stored.event
        if isinstance(event, opens):
            found[getattr(event, name).id] = (stored.seq, 10**9)
        elif isinstance(event, closes):
            item = event.exchange_id if isinstance(event, ev.ExchangeClosed) else getattr(event, name).id
            found[item] = (found[item][0], stored.seq)
    return found


def asked_in(runner: Runner) -> dict[str, tuple[int, int]]:
    return spans(runner, ev.ExchangeOpened, ev.ExchangeClosed, "ask")


def assert_nothing_asked_in_a_measured_window(runner: Runner) -> None:
    measured = spans(runner, ev.MeasurementOpened, ev.MeasurementClosed, "measurement").values()
    asked = asked_in(runner).values()
    assert measured and asked
    assert [(one, run) for one in asked for run in measured if one[0] < run[1] and run[0] < one[1]] == []


async def test_the_conversation_that_is_due_is_held_while_a_server_loads(tmp_path: Path) -> None:
    with (
        serving(says(SLOTS), letting_go(tmp_path, says(POLL)), says(NOTHING)) as server,
        slow_session(tmp_path, server) as runner,
    ):
        assert await runner.run() == 0
        assert outcomes(runner)["model-1"] is Outcome.BETTER
        assert "model-2" in outcomes(runner)
        asked, launched = asked_in(runner)["X2"], spans(runner, ev.TrialOpened, ev.TrialClosed, "trial")
        (during,) = [name for name, span in launched.items() if span[0] < asked[0] < span[1]]
        assert_nothing_asked_in_a_measured_window(runner)
        order = [d["kind"] for d in runner.store.decisions(runner.session_id)]
        consulted = [place for place, kind in enumerate(order) if kind == DecisionKind.CONSULT]
        assert order[consulted[1] + 1] == DecisionKind.CHOOSE, "its idea entered the list at the next choice"
        (wait,) = [wait for wait in waits(runner.store, runner.session_id) if wait.exchanges]
        assert (wait.trial_id, wait.exchanges) == (during, ("X2",))
        (noted,) = runner.store.notes(runner.session_id, WAITING)
        assert noted.startswith(f"{during} was loading: ") and "asked the language model (X2)" in noted
        says_ = [e["says"] for entry in decision_log(runner.store, runner.session_id) for e in entry["evidence"]]
        assert any(f"while {during} loaded" in text for text in says_)
        assert "in which launches loaded were used to ask it" in markdown(runner.store, runner.session_id)
        assert_went_well(runner, tmp_path)


async def test_an_answer_that_is_refused_is_told_back_later_if_the_server_is_ready(tmp_path: Path) -> None:
    wrong = plan(idea(change("--warp", "9")))
    moves = (says(SLOTS), letting_go(tmp_path, says(wrong)), says(POLL), says(NOTHING))
    with serving(*moves) as server, slow_session(tmp_path, server) as runner:
        assert await runner.run() == 0
        assert "model-2" in outcomes(runner)
        assert_nothing_asked_in_a_measured_window(runner)
        assert_went_well(runner, tmp_path)
    assert "Refused:" in server.said_to(2)[-1]
    assert server.requests[2]["messages"][:2] == server.requests[1]["messages"][:2]


async def test_a_model_that_fails_while_a_server_loads_holds_nothing_up(tmp_path: Path) -> None:
    failing = letting_go(tmp_path, status(500))
    with serving(says(SLOTS), failing, failing) as server, slow_session(tmp_path, server) as runner:
        assert await runner.run() == 0
        assert outcomes(runner)["model-1"] is Outcome.BETTER
        assert_nothing_asked_in_a_measured_window(runner)
        assert_went_well(runner, tmp_path)


@pytest.mark.parametrize(
    ("point", "lost"),
    [("wrote:exchange-opened", ["X2"]), ("X2:answered", ["X2"]), ("wrote:exchange-closed", [])],
)
async def test_who_takes_over_in_the_middle_of_a_wait_asks_nothing_again(
    point: str, lost: list[str], tmp_path: Path
) -> None:
    """Only an answer that died with the agent is asked for anew, as another exchange."""
    passed: list[str] = []

    def die(name: str) -> None:
        passed.append(name)
        if name == point and passed.count("wrote:exchange-opened") == 2:
            raise Killed(name)

    again = [letting_go(tmp_path, says(POLL))] * (2 if point == "X2:answered" else 1)
    with serving(says(SLOTS), *again, says(NOTHING)) as server:
        with pytest.raises(Killed), slow_session(tmp_path, server, then=die) as runner:
            await runner.run()
        (tmp_path / "world" / HOLD).unlink(missing_ok=True)
        with model_session(tmp_path, server.url, KEPT) as runner:
            assert await runner.run() == 0
            assert {"model-1", "model-2"} <= set(outcomes(runner))
            exchanges = runner.store.exchanges(runner.session_id)
            assert_nothing_asked_in_a_measured_window(runner)
            assert_went_well(runner, tmp_path)
    assert [one.id for one in exchanges if one.reply is not None and one.reply.silence is Silence.LOST] == lost
    assert [one.ask.round for one in exchanges].count(2) == 1 + len(lost)


async def test_what_can_not_be_run_is_known_before_its_turn(tmp_path: Path) -> None:
    last = flag("--warp", "9", tier=3, priority=0.01, expected_gain=0.001)
    others = [flag("--poll", str(n), tier=2) for n in range(2)]

    hold = tmp_path / "world" / HOLD

    def known(runner: Runner) -> bool:
        todos = {todo.id: todo.status for todo in runner.store.todos(runner.session_id)}
        found = runner.hands.spare is not None and last.id in runner.hands.spare.refused
        return hold.exists() and (found or todos[last.id] is TodoStatus.BLOCKED)

    async def let_go(runner: Runner) -> None:
        for _ in range(3000):
            if known(runner):
                break
            await asyncio.sleep(0.02)
        hold.unlink()

    with serving(says(NOTHING)) as server, slow_session(tmp_path, server, KEPT, *others, last) as runner:
        code, _ = await asyncio.gather(runner.run(), let_go(runner))
        assert code == 0
        (todo,) = [todo for todo in runner.store.todos(runner.session_id) if todo.id == last.id]
        subjects = [d["subject"] for d in runner.store.decisions(runner.session_id)]
        notes = runner.store.notes(runner.session_id, WAITING)
        assert_went_well(runner, tmp_path)
    assert todo.status is TodoStatus.BLOCKED
    assert subjects.index(last.id) < subjects.index(others[-1].id)
    assert any(f"{last.id} can't be run" in note for note in notes)
