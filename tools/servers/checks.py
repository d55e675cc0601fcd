"""Whether a proposed flag or variable can be right, judged from the server's own help before anything is stopped.

Pure: it returns the reason against a change, or None. It must not know any engine; what one forbids is passed in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from state.models import EnvChange, FlagChange, HotCall
from tools.servers.base import FlagTable, KnownFlag, names_secret

CODE_LOADING = re.compile(r"PATH|LIBRAR|PRELOAD|INJECT|TOOL|DEBUG|LLDB")
INT = re.compile(r"[+-]?\d+")
FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
SIZE = re.compile(r"[+-]?\d+|\d+(\.\d+)?[kmgtKMGT]i?")
NUMBER = {"int": INT, "float": FLOAT}


def fixed_by_name(flag: KnownFlag, globs: Mapping[str, str]) -> str | None:
    """Why no experiment may touch a flag, from reason → names (with * for anything); with a switch its negative."""
    names = [name.removeprefix("--") for name in (flag.name, flag.opposite) if name]
    wanted = ((reason, glob) for reason, listed in globs.items() for glob in listed.split())
    return next((reason for reason, glob in wanted if any(fnmatchcase(name, glob) for name in names)), None)


def check_flag(change: FlagChange, known: FlagTable, fixed: Mapping[str, str]) -> str | None:
    """Why the server would not accept the flag, or an experiment may not touch it (`fixed`: name → reason)."""
    flag = known.flags.get(change.name)
    if flag is None:
        return unknown_flag(change.name, known)
    if change.name in fixed:
        return f"{change.name} is not open to experiments: {fixed[change.name]}"
    if flag.removed and not change.remove:
        return f"{change.name} is refused or ignored by this server: {flag.text}"
    if change.remove:
        return f"{change.name} is to be dropped, which takes no value" if change.value is not None else None
    if not flag.takes_value:
        return None if change.value is None else f"{change.name} takes no value"
    if change.value is None:
        return None if flag.takes_value == "optional" else f"{change.name} needs a value ({expected(flag)})"
    return check_value(flag, change.value)


def unknown_flag(name: str, known: FlagTable) -> str:
    """Names the exact spelling: an alias or abbreviation would give one experiment two identities."""
    spelled = known.find(name) or known.find(re.sub(r"(?<!^)(?<!^-)_", "-", name))
    if spelled is not None:
        return f"{name} is another spelling of {spelled.name}: write {spelled.name}"
    longer = sorted(flag for flag in known.flags if name.startswith("--") and flag.startswith(name))
    if longer:
        return f"{name} is an abbreviation: write {' or '.join(longer[:5])}"
    nearest = known.nearest(name)
    return f"this server has no flag {name}" + (f"; the nearest is {nearest}" if nearest else "")


def check_value(flag: KnownFlag, value: str) -> str | None:
    """Why a value cannot be right for a flag, from choices, type and bounds."""
    parts = value.split() if flag.count != 1 else [value]
    if flag.count > 1 and len(parts) != flag.count:
        return f"{flag.name} takes {flag.count} values, got {len(parts)}"
    if any(ord(character) < 32 for character in value):
        return f"{flag.name}: control characters are not allowed in a value"
    if flag.separator:
        parts = [word for part in parts for word in part.split(flag.separator)]
    if not parts:
        return f"{flag.name} needs a value ({expected(flag)})"
    return next((reason for reason in (_check_part(flag, part) for part in parts) if reason), None)


def _check_part(flag: KnownFlag, part: str) -> str | None:
    wrong = f"{flag.name}: {part!r} is not {expected(flag)}"
    if part in (flag.choices or ()):
        return None
    if flag.type == "choice":
        return wrong
    if flag.type in NUMBER:
        fits = NUMBER[flag.type].fullmatch(part) and _within(float(part), flag.low, flag.high)
        return None if fits else wrong
    if flag.type == "size":
        return None if SIZE.fullmatch(part) else wrong
    if flag.type == "json":
        return None if _is_object(part) else wrong
    if re.match(r"-\D", part):
        return f"{flag.name}: {part!r} looks like another flag"
    return None if part.strip() else wrong


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _within(number: float, low: float | None, high: float | None) -> bool:
    return (-math.inf if low is None else low) <= number <= (math.inf if high is None else high)


def check_number(change: HotCall) -> str | None:
    """Why a live setting that takes a number cannot be made or taken back."""
    wrong = [text for text in (change.value, change.undo) if not FLOAT.fullmatch(text)]
    return f"{change.name}: {wrong[0]!r} is not a number" if wrong else None


def expected(flag: KnownFlag) -> str:
    """What a value may be, in words."""
    words = ", ".join(flag.choices or ())
    if flag.type == "choice":
        return f"one of {words}" if not flag.separator else f"a list of {words} joined by {flag.separator!r}"
    if flag.type == "json":
        return "a JSON object"
    if flag.type == "size":
        return "an integer, possibly with a unit such as k" + (f", or one of {words}" if words else "")
    if flag.type not in NUMBER:
        return "a text"
    noun = "an integer" if flag.type == "int" else "a number"
    span = "" if flag.low is None or flag.high is None else f" from {flag.low:g} to {flag.high:g}"
    return noun + span + (f" or one of {words}" if words else "")


def check_env(
    change: EnvChange, known: FlagTable, prefixes: Sequence[str], argument_prefix: str | None, fixed: Mapping[str, str]
) -> str | None:
    """Why a variable may not be set, or would be ignored; those under `argument_prefix` must be in the help.

    `fixed` holds names of flags and of variables (which may end with *), with the reason.
    """
    name = change.name
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"{name!r} is not the name of a variable"
    if not f"{name}=".startswith(tuple(prefixes)):
        own = ", ".join(prefix.removesuffix("=") if prefix.endswith("=") else f"{prefix}…" for prefix in prefixes)
        return f"{name} is not one of the engine's own variables ({own or 'none are declared'})"
    closed = next((reason for glob, reason in fixed.items() if fnmatchcase(name, glob)), None)
    if closed is not None:
        return f"{name} is not open to experiments: {closed}"
    if names_secret(name):
        return f"{name} is not open to experiments: it holds a secret"
    flag = known.flags.get(known.variables.get(name, ""))
    if flag is None and argument_prefix is not None and name.startswith(argument_prefix):
        nearest = FlagTable(flags={v: KnownFlag(name=v) for v in known.variables}).nearest(name)
        return f"this server does not read {name}" + (f"; the nearest is {nearest}" if nearest else "")
    if flag is not None and flag.name in fixed:
        return f"{name} is not open to experiments: {fixed[flag.name]}"
    if flag is None and CODE_LOADING.search(name):
        return f"{name} is not open to experiments: it names code, files or diagnostics, not a setting"
    if change.value is None:
        return None
    if flag is None or not flag.takes_value:
        return _check_plain(name, change.value, flag)
    reason = check_value(flag, change.value)
    return None if reason is None else f"{name}: {reason}"


def _check_plain(name: str, value: str, flag: KnownFlag | None) -> str | None:
    if any(ord(character) < 32 for character in value):
        return f"{name}: control characters are not allowed in a value"
    if flag is not None and value not in ("0", "1"):
        return f"{name}: {value!r} is not 0 or 1"
    return None
