"""Asks a language model and puts on the list what passes; it can't touch the target, and nothing depends on it.

Every request is written before it is sent and every answer before it is used, so that an agent which takes over goes on
in the same conversation and asks nothing a second time. Whatever fails, the catalogue's experiments are there already.
A conversation may be held while a server loads; what came of it enters the list at the next choice.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

import prompts
from agent.briefing import bounds, briefing, hints, proposals_made
from agent.config_model import ModelSection
from agent.evidence import learned_since, takes_more
from agent.hands import POLL_S, Hands
from agent.looking import looked_up
from agent.planners.base import Endpoint
from agent.planners.dials import dials
from agent.planners.screen import screen
from agent.planners.shape import Schema, exact, general, wishes
from agent.planners.spend import charged, reserve, used
from agent.planners.table import Briefing, names, open_flags, open_variables, table
from agent.planners.talk import Next, Standing, Talk, form_to_use, look_ups_in, standing
from agent.todo_list import on_the_list
from state import events as ev
from state.errors import StoppedByOperator
from state.exchanges import Ask, Exchange, Form, Message, Reply, Silence
from state.models import DecisionKind
from state.tables import DECISIONS, KIND
from tools.target import TargetFacts

Awaited = TypeVar("Awaited")
PROMPT = "planner"
SOON = "the wait was over before the answer came"

Over = Callable[[], bool]
"""Whether the time in which a conversation may go on is over."""


def never() -> bool:
    """For a conversation that may take all of its own time."""
    return False


class Round(NamedTuple):
    """One conversation that is being held."""

    number: int
    section: ModelSection
    endpoint: Endpoint
    facts: TargetFacts
    schemas: Mapping[Form, Schema]
    ends_at: float


class Counsel:
    """The language model of one session; without an endpoint it is never asked."""

    def __init__(self, hands: Hands, endpoint: Endpoint | None = None) -> None:
        self.hands = hands
        self.endpoint = endpoint
        self.facts: TargetFacts | None = None
        """As seen when the last conversation began; a host whose server loads shows less."""

    def due(self, idle: bool) -> bool:
        """Whether to ask now: once at the beginning, then each time that nothing is ready and something was learned.

        A conversation in the middle of which an agent died is always brought to its end.
        """
        section = self.hands.config.planner.model
        if self.endpoint is None or section is None:
            return False
        if self._exchanges(self._number()):
            return True
        if not self._could_try(section):
            return False
        learned = learned_since(self.hands.store, self.hands.session_id, DecisionKind.CONSULT)
        return learned is None or (idle and bool(learned))

    async def take(self, facts: TargetFacts) -> None:
        """Hold one conversation (or the rest of it), and put on the list what passed."""
        number = self._number()
        stands, obstacle = await self._converse(number, facts, never)
        self._conclude(stands, number, obstacle)

    async def go_on(self, over: Over) -> None:
        """Hold as much of a conversation as the time allows; what came of it is looked at when it is taken."""
        if self.facts is not None:
            await self._converse(self._number(), self.facts, over)

    async def _converse(self, number: int, facts: TargetFacts, over: Over) -> tuple[Standing, str | None]:
        """Say what is to be said until nothing is, and why it ended before that, if it did."""
        section, hands = self.hands.config.planner.model, self.hands
        assert section is not None and self.endpoint is not None, "only what is due is taken"
        self.facts = facts
        told = briefing(hands.store, hands.session_id, hands.config, facts)
        talk = self._talk(table(told), facts, number)
        spent_s = sum(e.reply.seconds for e in self._exchanges(number) if e.reply is not None)
        ends_at = hands.store.clock() + section.deadline_s - spent_s
        held = Round(number, section, self.endpoint, facts, self._schemas(told, section), ends_at)
        obstacle: str | None = None
        while True:
            stands = standing(talk, self._exchanges(number))
            if stands.next is None or obstacle is not None or over():
                return stands, obstacle
            obstacle = await self._turn(held, stands.next, over)

    def lost(self) -> list[ev.Event]:
        """The end of each request whose answer nobody waited for: what it cost is not known, so it is paid in full."""
        section = self.hands.config.planner.model
        open_ = [one.ask for one in self.hands.store.exchanges(self.hands.session_id) if one.reply is None]
        reply = Reply(silence=Silence.LOST, detail="the agent ended before the answer came")
        return [] if section is None else [_closed(section, ask, reply) for ask in open_]

    # --- when ----------------------------------------------------------------------------------------------

    def _could_try(self, section: ModelSection) -> bool:
        """Whether anything that the model may propose could still be tried, and a request still be paid."""
        hands = self.hands
        calls = used(hands.store.exchanges(hands.session_id)).calls
        if calls >= section.max_calls or proposals_made(hands.store, hands.session_id) >= section.max_proposals:
            return False
        return takes_more(hands.store, hands.session_id, hands.config)

    def _number(self) -> int:
        """Of the conversation that is under way, or is the next."""
        return 1 + self.hands.store.count(self.hands.session_id, DECISIONS, (KIND, DecisionKind.CONSULT.value))

    # --- one conversation ----------------------------------------------------------------------------------

    def _exchanges(self, number: int) -> list[Exchange]:
        """Those of one conversation."""
        return [e for e in self.hands.store.exchanges(self.hands.session_id) if e.ask.round == number]

    def _schemas(self, told: Briefing, section: ModelSection) -> dict[Form, Schema]:
        """Those of the forms that have one."""
        flags, todos = open_flags(told), self.hands.store.todos(self.hands.session_id)
        turned = dials(flags, open_variables(told), told.spec, hints(told, todos))
        granted: tuple[Schema, ...] = ()
        if section.look_ups:
            ids = [one.id for one in told.tried]
            granted = wishes([flag.name for flag in flags], ids, bool(section.source_roots))
        return {"exact": exact(turned, granted, section.min_per_answer), "schema": general(names(told))}

    def _talk(self, told: str, facts: TargetFacts, number: int) -> Talk:
        hands = self.hands
        limits = bounds(hands.store, hands.session_id, hands.config, facts, hands.target)
        earlier = [e for e in hands.store.exchanges(hands.session_id) if e.ask.round < number]
        return Talk(
            opening=(
                Message(role="system", content=prompts.load(PROMPT).text),
                Message(role="user", content=told),
            ),
            screen=lambda said, before: screen(said.experiments, limits, before),
            form=form_to_use(earlier),
        )

    async def _turn(self, held: Round, following: Next, over: Over) -> str | None:
        """Send one request and store what came of it; why not, when time or budget do not allow it."""
        hands, section = self.hands, held.section
        if following.wait_s >= held.ends_at - hands.store.clock():
            return f"the {section.deadline_s:.0f} s of a conversation are over"
        if following.wait_s and not await self._paused(following.wait_s, over):
            return None
        if following.look_ups:
            left = section.max_look_ups - look_ups_in(self._answered())
            following = following.with_found(await looked_up(hands, held.facts, following.look_ups, left))
        schema = held.schemas.get(following.form, {})
        size = len(json.dumps(schema)) if schema else 0
        set_aside = reserve(section, hands.store.exchanges(hands.session_id), following.messages, size)
        if isinstance(set_aside, str):
            return set_aside
        ask = Ask(
            id=hands.store.next_id("exchanges", "X"),
            round=held.number,
            model=section.model,
            prompt=prompts.load(PROMPT).label,
            form=following.form,
            messages=following.messages,
            answer_tokens=section.answer_tokens,
            reserved_tokens=set_aside.tokens,
            reserved_cost=set_aside.cost,
        )
        hands.write(ev.ExchangeOpened(ask=ask))
        hands.progress.phase(f"asking the language model, {ask.id}")
        await self._send(held, ask)
        return None

    async def _send(self, held: Round, ask: Ask) -> None:
        began = self.hands.store.clock()
        within_s = max(0.0, held.ends_at - began)
        try:
            reply = await self._unless_stopped(held.endpoint.reply(ask, held.schemas.get(ask.form, {}), within_s))
        except (StoppedByOperator, asyncio.CancelledError) as ended:
            detail = "stopped on request" if isinstance(ended, StoppedByOperator) else SOON
            self._close(held.section, ask, Reply(silence=Silence.LOST, detail=detail))
            raise
        self.hands.journal.fault(f"{ask.id}:answered")
        seconds = max(0.0, self.hands.store.clock() - began)
        self._close(held.section, ask, reply.model_copy(update={"seconds": seconds}))

    async def _unless_stopped(self, waiting: Awaitable[Awaited]) -> Awaited:
        """Wait, but not longer than until somebody asks to stop."""
        task = asyncio.ensure_future(waiting)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                self.hands.check()
            return task.result()
        finally:
            task.cancel()

    async def _paused(self, seconds: float, over: Over) -> bool:
        """Wait before a request is sent; False when the time for it is over before that."""
        ends_at = self.hands.store.clock() + seconds
        while (left := ends_at - self.hands.store.clock()) > 0:
            if over():
                return False
            await self._unless_stopped(asyncio.sleep(min(left, POLL_S)))
        return True

    def _answered(self) -> list[Exchange]:
        """All exchanges of the session whose look-ups were answered: those that another one follows."""
        found = self.hands.store.exchanges(self.hands.session_id)
        return [one for one, later in itertools.pairwise(found) if one.ask.round == later.ask.round]

    def _close(self, section: ModelSection, ask: Ask, reply: Reply) -> None:
        self.hands.write(_closed(section, ask, reply))

    def _conclude(self, stands: Standing, number: int, obstacle: str | None) -> None:
        """The decision that ends the conversation, with the experiments that go on the list by it."""
        told = [f"it says: {stands.reason}"] if stands.reason else []
        told += [f"not asked further: {obstacle}"] if obstacle else []
        told += [f"of no use: {fault}" for fault in stands.faults]
        told += [f"refused: {one}" for one in stands.refused]
        decision = self.hands.store.decide(
            self.hands.session_id,
            kind=DecisionKind.CONSULT,
            subject=self.hands.session_id,
            what=f"{len(stands.accepted)} experiments of the language model go on the list",
            reason="; ".join(told) or "it says nothing more",
            evidence=tuple(exchange.id for exchange in self._exchanges(number)),
        )
        added = [on_the_list(experiment, self.hands.config.policy) for experiment in stands.accepted]
        self.hands.write(*added, ev.DecisionMade(decision=decision))


def _closed(section: ModelSection, ask: Ask, reply: Reply) -> ev.ExchangeClosed:
    return ev.ExchangeClosed(exchange_id=ask.id, reply=charged(section, ask, reply))
