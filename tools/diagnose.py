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
from typing import NamedTuple

from pydantic import Field, model_validator

from state.models import Failure, Frozen

TAIL_LINES = 40
TAIL_CHARACTERS = 6000
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PREFIX = re.compile(
    r"^(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8} \S+ [\w.@-]+\[\d+\]: )?"  # the journal: time, host, program
    r"(?:\([A-Za-z][\w-]*(?: [\w-]+)* pid=\d+\) ?)?"  # vLLM: the process that speaks
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\] ?)?"  # vLLM: level, time, place
    r"(?:\[\d{4}-\d\d-\d\d [\d:]+(?: [A-Z]+\d+)*\] ?)?",  # SGLang: time and rank
    re.MULTILINE,
)
EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Unsupported): .+$")


class FailureClass(StrEnum):
    """What kind of thing went wrong."""

    CONFIG_INVALID = "config-invalid"
    OOM_INIT = "oom-init"
    OOM_RUNTIME = "oom-runtime"
    UNSUPPORTED_HW = "unsupported-hw"
    ENVIRONMENT = "environment"
    TRANSIENT_INFRA = "transient-infra"
    CRASH_AT_LOAD = "crash-at-load"
    CRASH_WHILE_SERVING = "crash-while-serving"
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
    DISCARD = "invalidate the measurement and reject"
    SKIP = "skip, the setting is not to blame"
    RESTORE = "restore and go on"
    ABORT = "restore and stop"
    ESCALATE = "restore, stop and call a person"


class Layer(StrEnum):
    """How near a line is to what went wrong; a cause outranks every symptom, wherever they stand."""

    CAUSE = "cause"
    SYMPTOM = "symptom"


class Told(NamedTuple):
    """What a rule found: where, its words, and a value of its knob that is known to be too small or too large."""

    position: int
    cause: str
    bound: float | None = None


class Rule(Frozen):
    """One signature. `pattern` is searched line by line, its group `cause` (if any) is what is told."""

    id: str
    engines: tuple[str, ...] = Field(default=(), description="empty for every engine")
    layer: Layer = Layer.CAUSE
    pattern: str | None = None
    exits: tuple[int, ...] = Field(default=(), description="exit codes that the rule is limited to")
    unless: str | None = Field(default=None, description="text that speaks against the rule, anywhere in the log")
    after: str | None = Field(default=None, description="text that must stand before the line")
    while_serving: bool = Field(default=False, description="it speaks of a server that still runs, too")
    cause: str = Field(default="", description="what is told for a rule without a pattern")
    failure_class: FailureClass
    action: Action
    again: Action | None = Field(default=None, description="what a second time calls for; None is the usual")
    knob: str = Field(default="", description="flag or variable that an adjustment is of")
    capability: str = Field(default="", description="what does not work here, whichever experiment showed it")
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _is_complete(self) -> Rule:
        if self.pattern is None and not (self.exits and self.cause):
            raise ValueError(f"rule {self.id}: without a pattern it needs exits and a cause")
        if {self.action, self.again} & {Action.ADJUST_UP, Action.ADJUST_DOWN} and not self.knob:
            raise ValueError(f"rule {self.id}: an adjustment is of a knob")
        for text in (self.pattern, self.unless, self.after):
            try:
                re.compile(text or "")
            except re.error as wrong:
                raise ValueError(f"rule {self.id}: {wrong} in {text!r}") from wrong
        return self

    def applies(self, engine: str, exit_code: int | None) -> bool:
        """Whether the rule is about this engine and ending."""
        return (not self.engines or engine in self.engines) and (not self.exits or exit_code in self.exits)

    def match(self, log: str, *, up: bool = False) -> Told | None:
        """Where in the log the rule speaks and what it tells; position at the end for a rule without a pattern.

        `up`: the server was up when the text began, so what has to stand before a line was said earlier.
        """
        if self.unless is not None and re.search(self.unless, log, re.MULTILINE):
            return None
        begin = 0
        if self.after is not None and not up:
            before = re.search(self.after, log, re.MULTILINE)
            if before is None:
                return None
            begin = before.end()
        if self.pattern is None:
            return Told(len(log), self.cause)
        found = re.compile(self.pattern, re.MULTILINE).search(log, begin)
        if found is None:
            return None
        groups = found.groupdict()
        bound = groups.get("bound")
        told = groups.get("cause") or _line_at(log, found.start())
        return Told(found.start(), told.strip(), None if bound is None else float(bound))


class RuleBook(Frozen):
    """All rules, lines that tell nothing when no rule matches, and lines that no rule may read."""

    rule: tuple[Rule, ...]
    wrappers: tuple[str, ...] = Field(default=(), description="lines that only report that something failed")
    harmless: tuple[str, ...] = Field(default=(), description="lines with alarming words and no failure")

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
    """Why a server ended: the innermost cause, causes before symptoms, then whatever was said first.

    `exit_code` is the shell's (128 + n for signal n), -n for signal n as Python has it, None when it did not end.
    """
    text = readable(log)
    code = 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code
    found = _innermost([rule for rule in rules().rule if rule.applies(engine, code)], text)
    if found is None:
        failure = Failure(failure_class=FailureClass.UNKNOWN, cause=unknown_cause(text, code), action=Action.RETRY_ONCE)
    else:
        failure = found
    return failure.model_copy(update={"exit_code": code, "tail": tail(ANSI.sub("", log))})


def rule_named(name: str) -> Rule | None:
    """The rule with that id, None when there is none (any more)."""
    return next((rule for rule in rules().rule if rule.id == name), None)


def complaint(engine: str, log: str, *, up: bool = False) -> Failure | None:
    """What makes a server's figures worthless although it still runs, by its log; None when nothing does.

    `up`: the log holds only what was said after the server was up, such as during one run.
    """
    serving = [rule for rule in rules().rule if rule.while_serving and rule.applies(engine, None) and not rule.exits]
    found = _innermost(serving, readable(log), up=up)
    return None if found is None else found.model_copy(update={"tail": tail(ANSI.sub("", log))})


def readable(log: str) -> str:
    """The log without colours, carriage returns, the writers' prefixes, and the words of harmless lines."""
    text = ANSI.sub("", log).replace("\r\n", "\n").replace("\r", "\n")
    harmless = re.compile("|".join(rules().harmless) or r"(?!)")
    return "\n".join("" if harmless.search(line) else PREFIX.sub("", line) for line in text.split("\n"))


def _innermost(candidates: list[Rule], text: str, *, up: bool = False) -> Failure | None:
    found = []
    for order, rule in enumerate(candidates):
        told = rule.match(text, up=up)
        if told is not None:
            found.append((rule.layer is not Layer.CAUSE, told.position, order, rule, told))
    if not found:
        return None
    *_, rule, told = min(found, key=lambda entry: entry[:3])
    return Failure(
        failure_class=rule.failure_class,
        cause=told.cause,
        action=rule.action,
        rule=rule.id,
        knob=rule.knob,
        bound=told.bound,
    )


def unknown_cause(log: str, code: int | None) -> str:
    """The innermost exception, or else the last line, that is more than a wrapper's report, said to be unexplained."""
    wrappers = [re.compile(pattern) for pattern in rules().wrappers]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if not any(wrapper.search(line) for wrapper in wrappers)]
    ended = "it did not end" if code is None else f"exit {code}"
    if not lines:
        return f"no rule explains it: {ended}, and the log is empty"
    raised = [line for line in telling if EXCEPTION.match(line)]
    if raised:
        return f"no rule explains it: {ended}, first raised {raised[0][:300]!r}"
    return f"no rule explains it: {ended}, last said {(telling or lines)[-1][:300]!r}"


def tail(log: str) -> str:
    """The last lines, bounded."""
    return "\n".join(log.rstrip().splitlines()[-TAIL_LINES:])[-TAIL_CHARACTERS:]


def _line_at(log: str, position: int) -> str:
    start = log.rfind("\n", 0, position) + 1
    end = log.find("\n", position)
    return log[start : end if end >= 0 else len(log)][:500]
