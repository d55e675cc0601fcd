"""What is said to a language model and what comes back, as frozen data; nothing here asks, reads or decides."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from state.models import Frozen

Form = Literal["exact", "schema", "object", "plain"]
"""How the endpoint is asked to shape its answer: by a JSON schema that lists names and values, by one of the form
alone, as any JSON object, or not at all."""


class Message(Frozen):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Ask(Frozen):
    """One request to the endpoint, with the budget that was set aside for it before it was sent."""

    id: str
    round: int = Field(ge=1, description="the conversation that it belongs to")
    model: str
    prompt: str = Field(description="name, version and digest of the words that began the conversation")
    form: Form
    messages: tuple[Message, ...]
    answer_tokens: int = Field(description="ceiling of the answer")
    reserved_tokens: int
    reserved_cost: float


class Silence(StrEnum):
    """Why nothing came back that could be read at all."""

    UNREACHABLE = "endpoint not reached"
    UNAUTHORISED = "key refused"
    RATE_LIMITED = "too many requests"
    REJECTED = "request refused"
    SERVER_ERROR = "endpoint failed"
    TIMEOUT = "no answer in time"
    CUT = "answer cut off"
    TOO_LONG = "answer too long"
    NO_COMPLETION = "not a completion"
    LOST = "nobody waited for the answer"


class Reply(Frozen):
    """What came back of one request, or why nothing did; `tokens` and `cost` are what the budget pays for it."""

    silence: Silence | None = None
    detail: str = Field(default="", description="the endpoint's own words, cut short and without our key")
    retry_after_s: float | None = None
    text: str = ""
    finish: str = Field(default="", description="the endpoint's reason for ending the answer")
    refusal: str = ""
    prompt_tokens: int | None = Field(default=None, description="as the endpoint counted; None if it did not tell")
    output_tokens: int | None = None
    tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0


class Exchange(Frozen):
    """A request with what came of it; open as long as there is no reply."""

    ask: Ask
    reply: Reply | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.ask.id
