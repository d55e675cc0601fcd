"""Secrets taken out of texts before these leave `tools/`: a known value becomes its placeholder; it stores nothing.

A server's start log may print its own arguments, a client the headers that it sends, a proxy what it was sent. What is
secret is known from the server's own launch, so nothing has to be guessed from the text. What stands in the launch's
clear part anyway, what every machine has (a path, a locale), and what is too short to be told from other words stays.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import quote

from state.errors import CommandFailed, OutcomeUnknown, RatchetError
from state.models import Failure, LaunchSpec
from tools.servers.base import names_secret
from tools.target import Ready

SHORTEST = 6
"""A shorter value would be found inside ordinary words."""
WORD_BELOW = 12
"""A value shorter than this is only taken for itself where no letter or digit touches it."""
HEAD = 16
"""So much of a long value gives it away where a text was cut in its middle."""
ORDINARY_NAMES = re.compile(
    r"(LANG|LANGUAGE|LC_\w+|TERM|COLORTERM|TZ|USER|LOGNAME|USERNAME|HOSTNAME|HOST|SHELL|EDITOR|PAGER|LS_COLORS|LESS\w*"
    r"|DEBIAN_FRONTEND|NO_PROXY|MAIL|DISPLAY|XDG_\w+|SYSTEMD_\w+|PYTHON\w*|CONDA_\w+|container)",
    re.IGNORECASE,
)
"""Variables that are full of words which any log says."""
PATHS = re.compile(r"/[^\s:'\"=&?]*(:/[^\s:'\"=&?]*)*")
URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")

Owner = TypeVar("Owner", bound=type)
Given = ParamSpec("Given")
Told = TypeVar("Told")


class Redactor:
    """Knows secret values and takes them out of whatever is about to be told."""

    def __init__(self) -> None:
        self._placeholders: dict[str, str] = {}
        self._longest_first: list[str] = []

    def learn(self, spec: LaunchSpec, secrets: Mapping[str, str]) -> None:
        """The values behind the placeholders of a launch, as far as they are worth hiding."""
        clear = "\n".join([*spec.argv, *spec.env.values(), spec.cwd, spec.user])
        names = {placeholder: name for name, placeholder in spec.hidden_env.items()}
        for placeholder, value in secrets.items():
            name = names.get(placeholder)
            if name is not None and not names_secret(name):
                plain = ORDINARY_NAMES.fullmatch(name) or PATHS.fullmatch(value) or value in clear
                self._keep(placeholder, [*([] if plain else [value]), *URL_PASSWORD.findall(value)])
            elif name is not None or placeholder in clear:
                self.hide(placeholder, value)

    def hide(self, placeholder: str, value: str) -> None:
        """A value that is surely a secret: whole, and each of its lines and of the parts of a list."""
        self._keep(placeholder, [value, *value.splitlines(), *value.split(","), *URL_PASSWORD.findall(value)])

    def text(self, text: str) -> str:
        """The text without the secrets; equal for one that holds none."""
        if len(text) < SHORTEST:
            return text
        for form in self._longest_first:
            text = _without(text, form, self._placeholders[form])
        for form in self._longest_first:  # after all whole ones: two secrets may begin alike
            if len(form) >= HEAD + SHORTEST:
                text = _without_parts(text, form, self._placeholders[form])
        return text

    def data(self, value: Any) -> Any:
        """The same for all texts in plain JSON; keys are texts too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.data(key): self.data(item) for key, item in value.items()}
        return [self.data(item) for item in value] if isinstance(value, list | tuple) else value

    def error(self, error: RatchetError) -> None:
        """Take the secrets out of an error's story, in place."""
        error.what, error.tail, error.do = self.text(error.what), self.text(error.tail), self.text(error.do)
        error.where = {key: self.text(value) for key, value in error.where.items()}
        error.args = (error.what,)

    def result(self, told: Told) -> Told:
        """What a target tells, of those kinds that quote a host; specs hold placeholders already and stay untouched."""
        shown: object = told
        if isinstance(told, str):
            shown = self.text(told)
        elif isinstance(told, Failure):
            shown = told.model_copy(update={"cause": self.text(told.cause), "tail": self.text(told.tail)})
        elif isinstance(told, Ready):
            shown = told.model_copy(update={"mismatches": tuple(map(self.text, told.mismatches))})
        return cast("Told", shown)

    def _keep(self, placeholder: str, values: list[str]) -> None:
        for value in values:
            for form in _forms(value.strip()):
                if len(form) >= SHORTEST:
                    self._placeholders[form] = placeholder
        self._longest_first = sorted(self._placeholders, key=len, reverse=True)


def discreet(owner: Owner) -> Owner:
    """For a class with a `redactor`: no public coroutine of it tells a secret, as its result or in an error."""
    for name, method in list(vars(owner).items()):
        if not name.startswith("_") and inspect.iscoroutinefunction(method):
            setattr(owner, name, _redacted(method))
    return owner


@contextmanager
def unquoted() -> Iterator[None]:
    """What the host was asked for in the block is secret itself: an error must not quote what came of the answer."""
    try:
        yield
    except (CommandFailed, OutcomeUnknown) as error:
        error.tail = ""
        raise


def _redacted(method: Callable[Given, Awaitable[Told]]) -> Callable[Given, Awaitable[Told]]:
    @functools.wraps(method)
    async def telling(*args: Given.args, **kwargs: Given.kwargs) -> Told:
        redactor: Redactor = args[0].redactor  # type: ignore[attr-defined]  # of the class that is decorated
        try:
            return redactor.result(await method(*args, **kwargs))
        except RatchetError as error:
            redactor.error(error)
            raise

    return telling


def _forms(value: str) -> set[str]:
    """A value as programs print it: plain, in JSON, by repr(), in a URL; bytes that are no UTF-8 as logs are read."""
    shown = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    url = quote(value, safe="", errors="surrogateescape")
    return {value, shown, json.dumps(value)[1:-1], json.dumps(shown, ensure_ascii=False)[1:-1], repr(value)[1:-1], url}


def _without(text: str, form: str, placeholder: str) -> str:
    """The text with the placeholder wherever the form stands; a short one only where it is a word of its own."""
    if len(form) >= WORD_BELOW:
        return text.replace(form, placeholder)
    before = "(?<![^\\W_])" if form[0].isalnum() else ""
    after = "(?![^\\W_])" if form[-1].isalnum() else ""
    return re.sub(before + re.escape(form) + after, lambda _: placeholder, text)


def _without_parts(text: str, form: str, placeholder: str) -> str:
    """The text without what is left of a long form where a text was cut in its middle."""
    cut = text.find(form[-HEAD:], 0, len(form)) + HEAD
    if cut >= HEAD and text.startswith(form[-cut:]):
        text = placeholder + text[cut:]
    parts, place = [], 0
    while (at := text.find(form[:HEAD], place)) >= 0:
        parts += [text[place:at], placeholder]
        place = at + _alike(text[at:], form)
    return "".join([*parts, text[place:]])


def _alike(text: str, form: str) -> int:
    """How many characters both begin with."""
    pairs = zip(text, form, strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), min(len(text), len(form)))
