"""The only door to `openai` and its transport: one request to a chat endpoint, one reply or a named silence.

It has no memory, retries nothing and judges nothing. The time of a request is bounded out here: the library's own
timeouts are of single reads, and a stream that drips would never break one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
import openai

from agent.config_model import NO_KEY, ModelSection, api_key
from agent.planners.answer import read_body, tidy
from state.errors import ConfigError
from state.exchanges import Ask, Reply, Silence

LONGEST_BODY = 512 * 1024
"""An answer of the tokens that were asked for is far shorter."""
NAME = "plan"


class ChatEndpoint:
    """An OpenAI-compatible endpoint; its key is read for each request and kept nowhere."""

    def __init__(self, section: ModelSection, environ: Mapping[str, str]) -> None:
        self.section = section
        self.environ = environ

    async def reply(self, ask: Ask, schema: Mapping[str, Any], within_s: float) -> Reply:
        """See `Endpoint.reply`."""
        try:
            key = api_key(self.section, self.environ)
        except ConfigError as missing:
            return Reply(silence=Silence.UNAUTHORISED, detail=missing.what)
        found = await self._bounded(key, ask, schema, within_s)
        return found.model_copy(update={name: _without(key, getattr(found, name)) for name in _WORDS})

    async def _bounded(self, key: str, ask: Ask, schema: Mapping[str, Any], within_s: float) -> Reply:
        try:
            async with asyncio.timeout(within_s):
                return await self._request(key, ask, schema, within_s)
        except openai.APIStatusError as error:
            return _refused(error)
        except (TimeoutError, openai.APITimeoutError, httpx2.TimeoutException):
            return Reply(silence=Silence.TIMEOUT, detail=f"nothing whole within {within_s:.0f} s")
        except openai.APIConnectionError as error:
            return Reply(silence=Silence.UNREACHABLE, detail=_words(error.__cause__ or error))
        except (openai.OpenAIError, httpx2.HTTPError, httpx2.StreamError, OSError, ValueError) as error:
            return Reply(silence=Silence.CUT, detail=_words(error))

    async def _request(self, key: str, ask: Ask, schema: Mapping[str, Any], within_s: float) -> Reply:
        """The answer's bytes as they come, no more of them than an answer can have."""
        client = openai.AsyncOpenAI(
            api_key=key, base_url=self.section.base_url, max_retries=0, timeout=within_s, default_headers=_PLAIN
        )
        async with client:
            asking = client.chat.completions.with_streaming_response.create(**self._body(ask, schema))
            async with asking as response:
                body = bytearray()
                async for piece in response.iter_bytes():
                    body += piece
                    if len(body) > LONGEST_BODY:
                        return Reply(silence=Silence.TOO_LONG, detail=f"more than {LONGEST_BODY // 1024} KiB")
        return read_body(bytes(body))

    def _body(self, ask: Ask, schema: Mapping[str, Any]) -> dict[str, Any]:
        strict = {"type": "json_schema", "json_schema": {"name": NAME, "strict": True, "schema": schema}}
        formats: dict[str, dict[str, Any]] = {"exact": strict, "schema": strict, "object": {"type": "json_object"}}
        wanted = formats.get(ask.form)
        return {
            "model": ask.model,
            "messages": [message.model_dump() for message in ask.messages],
            "max_tokens": ask.answer_tokens,
            **({} if wanted is None else {"response_format": wanted}),
            **({} if self.section.temperature is None else {"temperature": self.section.temperature}),
        }


_PLAIN = {"Accept-Encoding": "identity"}
"""A small packed body could unfold to any size."""
_WORDS = ("detail", "text", "refusal")


def _refused(error: openai.APIStatusError) -> Reply:
    status = error.status_code
    kind = Silence.SERVER_ERROR if status >= 500 else _STATUS.get(status, Silence.REJECTED)
    wait_s = _retry_after(error.response.headers.get("retry-after"))
    return Reply(silence=kind, detail=f"HTTP {status}: {_words(error)}", retry_after_s=wait_s)


_STATUS = {
    401: Silence.UNAUTHORISED,
    403: Silence.UNAUTHORISED,
    408: Silence.SERVER_ERROR,
    409: Silence.SERVER_ERROR,
    429: Silence.RATE_LIMITED,
}


def _retry_after(text: str | None) -> float | None:
    """Seconds from the header, which holds them or a date; None when it says nothing that can be read."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _words(error: BaseException) -> str:
    return tidy(str(error), 200) or type(error).__name__


def _without(key: str, text: str) -> str:
    """An endpoint may repeat the key that it refuses."""
    return text if key == NO_KEY else text.replace(key, "«key»")
