"""Asks a language model and puts on the list what passes; it can't touch the target, and nothing depends on it.

Every request is written before it is sent and every answer before it is used, so that an agent which takes over goes on
in the same conversation and asks nothing a second time. Whatever fails, the catalogue's experiments are there already.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, TypeVar

import prompts
from agent.briefing import bounds, briefing, proposals_made, shelf
from agent.config_model import ModelSection
from agent.evidence import situation
from agent.hands import POLL_S, Hands
from agent.planners.answer import schema
from agent.planners.base import Endpoint
from agent.planners.look_ups import looked_up
from agent.planners.screen import screen
from agent.planners.spend import charged, reserve, used
from agent.planners.table import names, table
from agent.planners.talk import Next, Standing, Talk, form_to_use, standing
from agent.policy import unaffordable
from agent.todo_list import on_the_list
from state import events as ev
from state.errors import StoppedByOperator
from state.exchanges import Ask, Exchange, Message, Reply, Silence
from state.models import DecisionKind, Disruption, Experiment, FlagChange, Purpose
from tools.target import TargetFacts

Awaited = TypeVar("Awaited")
PROMPT = "planner"
LEARNED = frozenset({DecisionKind.KEEP.value, DecisionKind.REVERT.value, DecisionKind.BLOCK.value})
ENDING = frozenset({Purpose.WITHOUT, Purpose.CLOSE_OUT})
ANYTHING = Experiment(title="any", hypothesis="any", changes=(FlagChange(name="--any"),))


class Round(NamedTuple):
    """One conversation that is being held."""

    number: int
    section: ModelSection
    endpoint: Endpoint
    schema: Mapping[str, Any]
    ends_at: float


class Counsel:
    """The language model of one session; without an endpoint it is never asked."""

    def __init__(self, hands: Hands, endpoint: Endpoint | None = None) -> None:
        self.hands = hands
        self.endpoint = endpoint

    def due(self, idle: bool) -> bool:
        """Whether to ask now: once at the beginning, then each time that nothing is ready and something was learned.

        A conversation in the middle of which an agent died is always brought to its end.
        """
        section, kinds = self.hands.config.planner.model, self._decisions()
        if self.endpoint is None or section is None:
            return False
        if self._exchanges(1 + kinds.count(DecisionKind.CONSULT.value)):
            return True
        if not self._could_try(section):
            return False
        if DecisionKind.CONSULT.value not in kinds:
            return True
        since = kinds[len(kinds) - kinds[::-1].index(DecisionKind.CONSULT.value) :]
        return idle and bool(LEARNED & set(since))

    async def take(self, facts: TargetFacts) -> None:
        """Hold one conversation (or the rest of it), and put on the list what passed."""
        section, hands = self.hands.config.planner.model, self.hands
        assert section is not None and self.endpoint is not None, "only what is due is taken"
        number = 1 + self._decisions().count(DecisionKind.CONSULT.value)
        self._close_lost(section, number)
        told = briefing(hands.store, hands.session_id, hands.config, facts)
        talk = self._talk(table(told), facts, section, number)
        spent_s = sum(e.reply.seconds for e in self._exchanges(number) if e.reply is not None)
        ends_at = hands.store.clock() + section.deadline_s - spent_s
        held = Round(number, section, self.endpoint, schema(names(told)), ends_at)
        obstacle: str | None = None
        while True:
            stands = standing(talk, self._exchanges(number))
            if stands.next is None or obstacle is not None:
                break
            obstacle = await self._turn(held, stands.next)
        self._conclude(stands, number, obstacle)

    # --- when ----------------------------------------------------------------------------------------------

    def _could_try(self, section: ModelSection) -> bool:
        """Whether anything that the model may propose could still be tried, and a request still be paid."""
        hands = self.hands
        todos = hands.store.todos(hands.session_id)
        calls = used(hands.store.exchanges(hands.session_id)).calls
        if calls >= section.max_calls or proposals_made(hands.store, hands.session_id) >= section.max_proposals:
            return False
        ending = any(todo.experiment.purpose in ENDING for todo in todos)
        if ending or hands.config.policy.max_disruption < Disruption.RESTART:
            return False
        now = situation(hands.store, hands.session_id, hands.config)
        return unaffordable(ANYTHING, now.policy, now.spent, now.workload, now.rule, now.costs) is None

    def _decisions(self) -> list[str]:
        return [decision["kind"] for decision in self.hands.store.decisions(self.hands.session_id)]

    # --- one conversation ----------------------------------------------------------------------------------

    def _exchanges(self, number: int) -> list[Exchange]:
        """Those of one conversation."""
        return [e for e in self.hands.store.exchanges(self.hands.session_id) if e.ask.round == number]

    def _talk(self, told: str, facts: TargetFacts, section: ModelSection, number: int) -> Talk:
        hands = self.hands
        limits = bounds(hands.store, hands.session_id, hands.config, facts, hands.target)
        texts = shelf(hands.store, hands.session_id, facts)
        earlier = [e for e in hands.store.exchanges(hands.session_id) if e.ask.round < number]
        return Talk(
            opening=(
                Message(role="system", content=prompts.load(PROMPT).text),
                Message(role="user", content=told),
            ),
            screen=lambda said, before: screen(said.experiments, limits, before),
            look=lambda said: looked_up(said.look_ups, texts) if section.look_ups else "Look-ups are switched off.",
            form=form_to_use(earlier),
        )

    async def _turn(self, held: Round, following: Next) -> str | None:
        """Send one request and store what came of it; why not, when time or budget do not allow it."""
        hands, section = self.hands, held.section
        if following.wait_s >= held.ends_at - hands.store.clock():
            return f"the {section.deadline_s:.0f} s of a conversation are over"
        size = len(json.dumps(held.schema)) if following.form == "schema" else 0
        set_aside = reserve(section, hands.store.exchanges(hands.session_id), following.messages, size)
        if isinstance(set_aside, str):
            return set_aside
        if following.wait_s:
            await self._unless_stopped(asyncio.sleep(following.wait_s))
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
        try:
            reply = await self._unless_stopped(held.endpoint.reply(ask, held.schema, max(0.0, held.ends_at - began)))
        except StoppedByOperator:
            self._close(held.section, ask, Reply(silence=Silence.LOST, detail="stopped on request"))
            raise
        self.hands.journal.fault(f"{ask.id}:answered")
        seconds = max(0.0, self.hands.store.clock() - began)
        self._close(held.section, ask, reply.model_copy(update={"seconds": seconds}))

    async def _unless_stopped(self, waiting: Awaitable[Awaited]) -> Awaited:
        """Wait, but not longer than until somebody asks to stop."""
        task = asyncio.ensure_future(waiting)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                self.hands.check_stop()
            return task.result()
        finally:
            task.cancel()

    def _close_lost(self, section: ModelSection, number: int) -> None:
        """A request whose answer nobody waited for: what it cost is not known, and it is not sent again as it was."""
        for exchange in self._exchanges(number):
            if exchange.reply is None:
                lost = Reply(silence=Silence.LOST, detail="the agent ended before the answer came")
                self._close(section, exchange.ask, lost)

    def _close(self, section: ModelSection, ask: Ask, reply: Reply) -> None:
        self.hands.write(ev.ExchangeClosed(exchange_id=ask.id, reply=charged(section, ask, reply)))

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
