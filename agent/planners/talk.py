"""One conversation with a language model, replayed from its exchanges: what stands and what is to be said next; pure.

Nothing is remembered between two calls. Whoever stored the exchanges so far can go on, whatever died meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import prompts
from agent.planners.answer import LOOK_UPS, Fault, Misfit, Said, read_answer, tidy
from agent.planners.screen import Refused, Screened
from state.exchanges import Exchange, Form, Message, Reply, Silence
from state.models import Experiment, Frozen

AGAIN = 2
"""How often anything is asked again in one conversation: after a fault, or because something was refused."""
LOOKS = 2
ECHO = 4000
"""So much of an answer is shown to the model again."""
BACKOFF_S = 2.0
NEXT_FORM: dict[Form, Form] = {"exact": "schema", "schema": "object", "object": "plain"}
WAITS = frozenset({Silence.UNREACHABLE, Silence.RATE_LIMITED, Silence.SERVER_ERROR, Silence.CUT})
"""The same question may be answered a little later."""
HOPELESS = frozenset({Silence.UNAUTHORISED, Silence.REJECTED, Silence.TIMEOUT, Silence.TOO_LONG})
"""Asking again at once would bring the same, or the time for it is over."""


@dataclass(frozen=True)
class Talk:
    """How the conversation begins, and who judges what comes back."""

    opening: tuple[Message, ...]
    screen: Callable[[Said, Sequence[Experiment]], Screened]
    form: Form = "exact"


class Next(Frozen):
    """What is to be sent, after a pause; where something is to be looked up first, the last words are still missing."""

    messages: tuple[Message, ...]
    form: Form
    wait_s: float = 0.0
    look_ups: tuple[Any, ...] = ()

    def with_found(self, found: str) -> Next:
        """The same with what was looked up."""
        words = prompts.load("planner-looked-up").text.replace("{found}", found)
        messages = (*self.messages, Message(role="user", content=words))
        return self.model_copy(update={"messages": messages, "look_ups": ()})


class Standing(Frozen):
    """Where a conversation stands; it is over when there is nothing next."""

    accepted: tuple[Experiment, ...] = ()
    refused: tuple[Refused, ...] = ()
    faults: tuple[Fault, ...] = ()
    reason: str = ""
    next: Next | None = None


def form_to_use(exchanges: Sequence[Exchange]) -> Form:
    """The form that the endpoint took last: what it refused once is not tried in each conversation anew."""
    for exchange in reversed(exchanges):
        if exchange.reply is not None and exchange.reply.silence is None:
            return exchange.ask.form
    return "exact"


def standing(talk: Talk, exchanges: Sequence[Exchange]) -> Standing:
    """Go through the exchanges of the conversation, in order; each has a reply.

    What was said is what stands in the requests: neither table nor look-up is made a second time for it.
    """
    state = _State(talk)
    for exchange in exchanges:
        assert exchange.reply is not None, "an exchange is closed before the next step"
        state.messages = list(exchange.ask.messages)
        state.take(exchange.reply)
    return state.standing()


def look_ups_in(exchanges: Sequence[Exchange]) -> int:
    """How many texts were asked for in these exchanges, as far as any were to be had at once."""
    said = [read_answer(one.reply) for one in exchanges if one.reply is not None]
    return sum(min(len(one.look_ups), LOOK_UPS) for one in said if isinstance(one, Said) and _looks(one))


def _looks(said: Said) -> bool:
    return bool(said.look_ups) and not said.experiments


class _State:
    """The conversation while it is gone through."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.messages = list(talk.opening)
        self.form = talk.form
        self.wait_s = 0.0
        self.look_ups: tuple[Any, ...] = ()
        self.again = 0
        self.looks = 0
        self.told = False
        self.over = False
        self.reason = ""
        self.accepted: list[Experiment] = []
        self.refused: list[Refused] = []
        self.faults: list[Fault] = []

    def standing(self) -> Standing:
        following = Next(messages=tuple(self.messages), form=self.form, wait_s=self.wait_s, look_ups=self.look_ups)
        return Standing(
            accepted=tuple(self.accepted),
            refused=tuple(self.refused),
            faults=tuple(self.faults),
            reason=self.reason,
            next=None if self.over else following,
        )

    def take(self, reply: Reply) -> None:
        self.wait_s, self.look_ups = 0.0, ()
        said = read_answer(reply)
        if isinstance(said, Fault):
            self._fault(said, reply)
            return
        self.reason = tidy(said.reason, 300) or self.reason
        if _looks(said) and self.looks < LOOKS:
            self.looks += 1
            self.look_ups = said.look_ups
            self.messages.append(_echo(reply))
            return
        screened = self.talk.screen(said, self.accepted)
        self.accepted += screened.accepted
        self.refused += screened.refused
        if screened.refused and not self.told and self.again < AGAIN:
            self.told = True
            accepted = f"Accepted: {', '.join(e.title for e in screened.accepted)}. " if screened.accepted else ""
            told = "; ".join(map(str, screened.refused))
            self._ask_again(reply, f"{accepted}Refused: {told}. You may propose others, or none.")
            return
        self.over = True

    def _fault(self, fault: Fault, reply: Reply) -> None:
        if fault.kind is Silence.REJECTED and self.form in NEXT_FORM:
            self.form = NEXT_FORM[self.form]
            return
        self.faults.append(fault)
        if fault.kind in HOPELESS or self.again >= AGAIN:
            self.over = True
        elif isinstance(fault.kind, Misfit):
            self._ask_again(reply, f"What was wrong: {fault}.")
        else:
            self.again += 1
            self.wait_s = _pause(reply, self.again) if fault.kind in WAITS else 0.0

    def _ask_again(self, reply: Reply, why: str) -> None:
        self.again += 1
        self._say(reply, prompts.load("planner-again").text.replace("{why}", why))

    def _say(self, reply: Reply, words: str) -> None:
        """The answer as it was, and what is said to it."""
        self.messages += [_echo(reply), Message(role="user", content=words)]


def _echo(reply: Reply) -> Message:
    """The answer, cut short; an empty message is refused by some endpoints."""
    return Message(role="assistant", content=reply.text[:ECHO] or "(nothing)")


def _pause(reply: Reply, times: int) -> float:
    """As the endpoint asks, else a little longer each time."""
    return BACKOFF_S * 2.0 ** (times - 1) if reply.retry_after_s is None else reply.retry_after_s
