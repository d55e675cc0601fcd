"""The budget of a language model in one session: reserved before each request, and closed when in doubt; pure."""

from __future__ import annotations

from collections.abc import Sequence

from agent.config_model import ModelSection
from state.exchanges import Ask, Exchange, Message, Reply, Silence
from state.models import Frozen

BYTES_PER_TOKEN = 2
"""English has about four bytes to a token: what is reserved is more than what is used."""
PER_MESSAGE = 8
FREE = frozenset({Silence.UNREACHABLE, Silence.UNAUTHORISED, Silence.RATE_LIMITED, Silence.REJECTED})
"""Where the endpoint never began to work. After anything else it may have, and what was reserved is spent."""


class Used(Frozen):
    """What the session's requests took so far; one under way takes all that was reserved for it."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0


class Reserve(Frozen):
    """What is set aside for the next request."""

    tokens: int
    cost: float


def used(exchanges: Sequence[Exchange]) -> Used:
    """The sum over all requests."""
    return Used(
        calls=len(exchanges),
        tokens=sum(e.ask.reserved_tokens if e.reply is None else e.reply.tokens for e in exchanges),
        cost=sum(e.ask.reserved_cost if e.reply is None else e.reply.cost for e in exchanges),
    )


def reserve(
    section: ModelSection, exchanges: Sequence[Exchange], messages: Sequence[Message], schema_bytes: int
) -> Reserve | str:
    """What the next request may take at most, or why the budget does not cover it."""
    already = used(exchanges)
    size = schema_bytes + sum(len(message.content.encode("utf-8", "replace")) for message in messages)
    sent = size // BYTES_PER_TOKEN + PER_MESSAGE * (len(messages) + 1)
    tokens, cost = sent + section.answer_tokens, _cost(section, sent, section.answer_tokens)
    if already.calls >= section.max_calls:
        return f"all {section.max_calls} requests of its budget are used"
    if already.tokens + tokens > section.max_tokens:
        return f"up to {tokens} tokens more would exceed its budget of {section.max_tokens}, {already.tokens} are used"
    if section.max_cost is not None and already.cost + cost > section.max_cost:
        return f"up to {cost:.4g} more would exceed its budget of {section.max_cost:g}, {already.cost:.4g} are used"
    return Reserve(tokens=tokens, cost=cost)


def charged(section: ModelSection, ask: Ask, reply: Reply) -> Reply:
    """The reply with what it takes of the budget: as the endpoint counted, else all that was reserved."""
    if reply.silence in FREE:
        return reply
    if reply.prompt_tokens is None or reply.output_tokens is None:
        return reply.model_copy(update={"tokens": ask.reserved_tokens, "cost": ask.reserved_cost})
    cost = _cost(section, reply.prompt_tokens, reply.output_tokens)
    return reply.model_copy(update={"tokens": reply.prompt_tokens + reply.output_tokens, "cost": cost})


def _cost(section: ModelSection, sent: int, answered: int) -> float:
    return ((section.price_in or 0.0) * sent + (section.price_out or 0.0) * answered) / 1000
