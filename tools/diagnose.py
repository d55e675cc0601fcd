"""From the log of a failed server to a failure class and what to do about it; pure, it reads no file of a host.

The rules are data (`diagnose_rules.toml`), each with its source. The whole log is searched, because usage texts and
wrappers ("engine core failed, see root cause above") push the cause far from the end. What no rule explains stays
`unknown`, with the tail kept: a guess would blame a setting for something that it did not do.
"""

from __future__ import annotations

import re
import tomllib
from enum import StrEnum
from functools import cache
from pathlib import Path

from pydantic import Field, model_validator

from state.models import Failure, Frozen

TAIL_LINES = 40
TAIL_CHARACTERS = 6000
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class FailureClass(StrEnum):
    """What kind of thing went wrong."""

    CONFIG_INVALID = "config-invalid"
    OOM_INIT = "oom-init"
    OOM_RUNTIME = "oom-runtime"
    UNSUPPORTED_HW = "unsupported-hw"
    ENVIRONMENT = "environment"
    TRANSIENT_INFRA = "transient-infra"
    CRASH_AT_LOAD = "crash-at-load"
    HANG = "hang"
    NUMERICS = "numerics"
    UNKNOWN = "unknown"


class Action(StrEnum):
    """What the failure calls for; a rejection holds for one fingerprint, engine version and hardware only."""

    REJECT = "reject"
    RETRY_ONCE = "retry once"
    ADJUST_UP = "adjust up"
    ADJUST_DOWN = "adjust down"
    CLEAN_AND_RETRY_ONCE = "clean up and retry once"
    INVALIDATE = "invalidate the measurement"
    SKIP = "skip, the setting is not to blame"
    RESTORE = "restore and go on"
    ABORT = "restore and stop"
    ESCALATE = "restore, stop and call a person"


class Layer(StrEnum):
    """How near a line is to what went wrong; a cause outranks every symptom, wherever they stand."""

    CAUSE = "cause"
    SYMPTOM = "symptom"


class Rule(Frozen):
    """One signature. `pattern` is searched line by line, its group `cause` (if any) is what is told."""

    id: str
    engines: tuple[str, ...] = Field(default=(), description="empty for every engine")
    layer: Layer = Layer.CAUSE
    pattern: str | None = None
    exits: tuple[int, ...] = Field(default=(), description="exit codes that the rule is limited to")
    unless: str | None = Field(default=None, description="text that speaks against the rule, anywhere in the log")
    cause: str = Field(default="", description="what is told for a rule without a pattern")
    failure_class: FailureClass
    action: Action
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _is_complete(self) -> Rule:
        if self.pattern is None and not (self.exits and self.cause):
            raise ValueError(f"rule {self.id}: without a pattern it needs exits and a cause")
        for text in (self.pattern, self.unless):
            try:
                re.compile(text or "")
            except re.error as wrong:
                raise ValueError(f"rule {self.id}: {wrong} in {text!r}") from wrong
        return self

    def applies(self, engine: str, exit_code: int | None) -> bool:
        """Whether the rule is about this engine and ending."""
        return (not self.engines or engine in self.engines) and (not self.exits or exit_code in self.exits)

    def match(self, log: str) -> tuple[int, str] | None:
        """Where in the log the rule speaks and what it tells; position at the end for a rule without a pattern."""
        if self.unless is not None and re.search(self.unless, log, re.MULTILINE):
            return None
        if self.pattern is None:
            return len(log), self.cause
        found = re.search(self.pattern, log, re.MULTILINE)
        if found is None:
            return None
        told = found.groupdict().get("cause") or _line_at(log, found.start())
        return found.start(), told.strip()


class RuleBook(Frozen):
    """All rules, and lines that tell nothing when no rule matches."""

    rule: tuple[Rule, ...]
    wrappers: tuple[str, ...] = Field(default=(), description="lines that only report that something failed")

    @model_validator(mode="after")
    def _has_no_doubles(self) -> RuleBook:
        ids = [rule.id for rule in self.rule]
        doubles = {name for name in ids if ids.count(name) > 1}
        if doubles:
            raise ValueError(f"rules that exist twice: {', '.join(sorted(doubles))}")
        return self


@cache
def rules() -> RuleBook:
    """The packaged rules."""
    return RuleBook.model_validate(tomllib.loads(Path(__file__).with_name("diagnose_rules.toml").read_text("utf-8")))


def diagnose(engine: str, log: str, exit_code: int | None) -> Failure:
    """The innermost cause in a log: causes before symptoms, then whatever was said first.

    `exit_code` is the shell's (128 + n for signal n), -n for signal n as Python has it, None when it did not end.
    """
    text = ANSI.sub("", log).replace("\r\n", "\n").replace("\r", "\n")
    code = 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code
    found = []
    for order, rule in enumerate(rules().rule):
        match = rule.match(text) if rule.applies(engine, code) else None
        if match is not None:
            found.append((rule.layer is not Layer.CAUSE, match[0], order, rule, match[1]))
    if not found:
        return _failure(FailureClass.UNKNOWN, unknown_cause(text, code), code, text, Action.RETRY_ONCE)
    *_, rule, cause = min(found, key=lambda entry: entry[:3])
    return _failure(rule.failure_class, cause, code, text, rule.action)


def _failure(failure_class: FailureClass, cause: str, code: int | None, log: str, action: Action) -> Failure:
    return Failure(failure_class=failure_class, cause=cause, exit_code=code, tail=tail(log), action=action)


def unknown_cause(log: str, code: int | None) -> str:
    """The last line that is more than a wrapper's report, said to be unexplained."""
    wrappers = [re.compile(pattern) for pattern in rules().wrappers]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if not any(wrapper.search(line) for wrapper in wrappers)]
    ended = "it did not end" if code is None else f"exit {code}"
    if not lines:
        return f"no rule explains it: {ended}, and the log is empty"
    return f"no rule explains it: {ended}, last said {(telling or lines)[-1][:300]!r}"


def tail(log: str) -> str:
    """The last lines, bounded."""
    return "\n".join(log.rstrip().splitlines()[-TAIL_LINES:])[-TAIL_CHARACTERS:]


def _line_at(log: str, position: int) -> str:
    start = log.rfind("\n", 0, position) + 1
    end = log.find("\n", position)
    return log[start : end if end >= 0 else len(log)][:500]
