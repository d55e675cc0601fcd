"""What servers with an OpenAI-style API have in common: completions, names, metrics; pure, it asks nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from state.errors import ServerError
from tools.servers.base import HttpAnswer, HttpRequest

SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def completion_request(
    base_url: str,
    model: str,
    prompt: Sequence[int] | str,
    *,
    max_tokens: int,
    timeout_s: float,
    api_key_file: str | None,
    **more: object,
) -> HttpRequest:
    """A deterministic completion that cannot end early; `more` goes into its body."""
    body = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": False,
    }
    return HttpRequest(
        id="generate",
        method="POST",
        url=f"{base_url}/v1/completions",
        body=json.dumps(body | more),
        headers={"Content-Type": "application/json"},
        timeout_s=timeout_s,
        api_key_file=api_key_file,
    )


def completion_tokens(answer: HttpAnswer) -> int:
    """How many tokens an OpenAI-style completion holds; 0 for anything else, an error in a 200 included."""
    if not answer.ok:
        return 0
    try:
        value = json.loads(answer.text)
        return max(0, int(value["usage"]["completion_tokens"])) if value["choices"] else 0
    except (ValueError, KeyError, TypeError):
        return 0


def json_of(answers: Mapping[str, HttpAnswer], name: str) -> dict[str, Any]:
    """An answer's JSON object, a list under the key "", {} where there is no good answer. Raises ServerError."""
    answer = answers.get(name)
    if answer is None or not answer.ok:
        return {}
    try:
        value = json.loads(answer.text)
    except ValueError as wrong:
        raise ServerError(
            f"the server's answer to {name!r} is not JSON",
            where={"status": answer.status, "error": wrong},
            tail=answer.text[:2000],
            do="check that the port belongs to a server of the engine that server.engine names",
        ) from wrong
    return value if isinstance(value, dict) else {"": value}


def first_model(answers: Mapping[str, HttpAnswer]) -> dict[str, Any]:
    """The first entry of /v1/models, {} where there is none."""
    models = json_of(answers, "models").get("data")
    found = models[0] if isinstance(models, list) and models else {}
    return found if isinstance(found, dict) else {}


def first_name(answers: Mapping[str, HttpAnswer]) -> str | None:
    """The first id of /v1/models."""
    name = first_model(answers).get("id")
    return name if isinstance(name, str) else None


def samples(answers: Mapping[str, HttpAnswer], names: Sequence[str]) -> Iterator[tuple[str, dict[str, str], float]]:
    """The samples of /metrics with these names: name, labels, value. None where it does not answer."""
    metrics = answers.get("metrics")
    if metrics is None or not metrics.ok:
        return
    for name, labels, value in SAMPLE.findall(metrics.text):
        if name in names:
            yield name, dict(LABEL.findall(labels)), float(value)


def sums(answers: Mapping[str, HttpAnswer], names: Sequence[str]) -> dict[str, float]:
    """Each metric summed over its labels; those that the server does not show are absent."""
    found: dict[str, float] = {}
    for name, _, value in samples(answers, names):
        found[name] = found.get(name, 0.0) + value
    return found


def total(answers: Mapping[str, HttpAnswer], name: str) -> int | None:
    """One metric summed over its labels, None where the server does not show it."""
    found = sums(answers, (name,)).get(name)
    return None if found is None else int(found)


def number(text: str) -> int | float:
    """The number that a text spells, whole where it is written so."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
