"""Whether a server answers and really generates, asked from its own host; it changes nothing and restarts nothing.

The questions travel with `http_probe.py` to the host, through the Host seam and without leaving a file there, so no
tunnel is needed and the server may listen on loopback. Liveness is a real completion: a health endpoint says 200 long
after generation has died.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from state.errors import CommandFailed
from state.models import Frozen
from tools.servers.base import HttpAnswer, HttpRequest, ServerAdapter
from tools.shell import Host, quote

LOOK_S = 10.0
"""For all looks at state and counters together, before and again after a completion."""

SPARE_S = 15.0
"""Beyond the requests' own deadline: to start an interpreter on a busy host and to bring the answers back."""

ANSWERS = TypeAdapter(list[HttpAnswer])


class Liveness(Frozen):
    """What a real completion showed. `busy`: it did not come, but token counters moved meanwhile."""

    state: Literal["alive", "busy", "loading", "dead"]
    reason: str
    tokens: int = 0
    ms: float | None = Field(default=None, description="of the completion, None when it never came")


@cache
def probe_source() -> str:
    """The program that the host's interpreter runs."""
    return Path(__file__).with_name("http_probe.py").read_text("utf-8")


async def http(
    host: Host, python: str, requests: Sequence[HttpRequest], *, deadline_s: float | None = None
) -> list[HttpAnswer]:
    """Send the requests one after another from the host; an answer for each, in order.

    `python` is an interpreter on the host. All requests together end by `deadline_s` (default: the sum of their own
    timeouts). A server that does not answer is an answer with `error`;
    CommandFailed means that the probe itself did not run.
    """
    deadline_s = sum(request.timeout_s for request in requests) if deadline_s is None else deadline_s
    body = json.dumps([request.model_dump() for request in requests]).encode()
    command = quote([python, "-c", probe_source(), f"{deadline_s:g}"])
    result = await host.check(f"exec {command}", stdin=body, timeout_s=deadline_s + SPARE_S)
    try:
        return ANSWERS.validate_json(result.stdout)
    except ValidationError as error:
        raise CommandFailed(
            "the probe on the host printed something other than its answers",
            where={
                "host": host.name,
                "command": f"{python} -c (the probe)",
                "ended": result.ending,
                "error": str(error).splitlines()[0],
            },
            tail=result.text[:2000] or result.tail,
            do=f"run {python} on the host by hand and see what it prints",
        ) from error


async def generates(
    host: Host,
    python: str,
    adapter: ServerAdapter,
    base_url: str,
    *,
    model: str | None = None,
    prompt: Sequence[int] | str = "The capital of France is",
    max_tokens: int = 1,
    timeout_s: float = 30.0,
    look_s: float = LOOK_S,
    api_key_file: str | None = None,
) -> Liveness:
    """Ask for a real completion, between two looks at the server's counters. Never call it in a measured window.

    Without `model` the server's own first name is used. It takes at most `timeout_s` + 2 `look_s` on the host. Raises
    CommandFailed, HostUnreachable or OutcomeUnknown when the host could not be asked; a server that cannot is a result.
    """
    looks = adapter.health_requests(base_url, api_key_file)
    before = {answer.id: answer for answer in await http(host, python, looks, deadline_s=look_s)}
    name = model or adapter.model_name(before) or ""
    wanted = adapter.generate_request(
        base_url, name, prompt, max_tokens=max_tokens, timeout_s=timeout_s, api_key_file=api_key_file
    )
    generated, *rest = await http(host, python, (wanted, *looks), deadline_s=timeout_s + look_s)
    return judge(adapter, before, generated, {answer.id: answer for answer in rest})


def judge(
    adapter: ServerAdapter,
    before: Mapping[str, HttpAnswer],
    generated: HttpAnswer,
    after: Mapping[str, HttpAnswer],
) -> Liveness:
    """The liveness that answers show; pure."""
    tokens = adapter.tokens(generated)
    if tokens:
        return Liveness(state="alive", reason=f"generated {tokens} token(s)", tokens=tokens, ms=generated.ms)
    if adapter.is_loading(generated):
        return Liveness(state="loading", reason="the model is still being loaded")
    old, new = adapter.counters(before), adapter.counters(after)
    moved = sorted(name for name in new if name in old and new[name] != old[name])
    waited = generated.error in ("timeout", "deadline") or generated.status == 503
    if waited and moved:
        return Liveness(state="busy", reason=f"no completion in time, but {', '.join(moved)} moved")
    return Liveness(state="dead", reason=_why_dead(generated, before.get("health"), bool(old and new)))


def _why_dead(generated: HttpAnswer, health: HttpAnswer | None, counted: bool) -> str:
    if generated.error in ("timeout", "deadline"):
        well = "/health says 200, but " if health is not None and health.ok else ""
        still = " and no token counter moved" if counted else "; it shows no token counters"
        return f"{well}no completion came ({generated.detail}){still}"
    if generated.error is not None:
        return f"{generated.error}: {generated.detail}"
    if generated.ok:
        return f"answered {generated.status} without a token: {generated.text[:200]!r}"
    return f"answered {generated.status}: {generated.text[:200]!r}"
