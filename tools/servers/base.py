"""The seam between Ratchet and one kind of inference server: pure readings and renderings; it must not touch a host.

An adapter knows how its engine spells a configuration (flags, variables, help text) and how it answers. What it
returns is data: argv to be executed by a service adapter, requests to be sent by `tools.servers.probe`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from pydantic import Field

from state.errors import ServerError
from state.models import Change, FlagChange, Frozen, LaunchSpec

FlagType = Literal["int", "size", "float", "str", "json", "choice", "flag"]
"""`size`: an integer, possibly with a unit (`8k`)."""


class KnownFlag(Frozen):
    """One option as the server's own `--help` describes it."""

    name: str = Field(description="canonical: the first --long spelling of its line")
    aliases: tuple[str, ...] = Field(default=(), description="all other spellings")
    takes_value: bool | Literal["optional"] = False
    count: int = Field(default=1, ge=0, description="values per occurrence if it takes any; 0 is one or more")
    choices: tuple[str, ...] | None = Field(default=None, description="beside a numeric type: words accepted too")
    separator: str | None = Field(default=None, description="the value is a list of choices joined by this")
    type: FlagType = "flag"
    low: float | None = None
    high: float | None = None
    default: str | None = Field(default=None, description="as the help words it, which need not be a value")
    env: str | None = Field(default=None, description="variable that sets it where the flag is absent")
    opposite: str | None = Field(default=None, description="canonical name that undoes it")
    removed: bool = Field(default=False, description="listed, but the server refuses or ignores it")
    section: str = Field(default="", description="heading of the help under which it stands")
    text: str = ""


class FlagTable(Frozen):
    """All options of one server version, by canonical name."""

    flags: dict[str, KnownFlag]

    @cached_property
    def spellings(self) -> dict[str, str]:
        """Every spelling → canonical name."""
        return {word: flag.name for flag in self.flags.values() for word in (flag.name, *flag.aliases)}

    @cached_property
    def variables(self) -> dict[str, str]:
        """Environment variable → canonical name of the (positive) flag that it sets."""
        return {flag.env: flag.name for flag in reversed(self.flags.values()) if flag.env}

    def find(self, spelling: str) -> KnownFlag | None:
        """The flag with exactly this spelling, canonical or not."""
        name = self.spellings.get(spelling)
        return None if name is None else self.flags[name]

    def nearest(self, spelling: str) -> str | None:
        """The canonical name that a person most likely meant; None when nothing is close."""
        close = difflib.get_close_matches(spelling, self.spellings, n=1, cutoff=0.6)
        return self.spellings[close[0]] if close else None


class Reading(NamedTuple):
    """A command line without its accidents of spelling and order."""

    program: tuple[str, ...]
    flags: dict[str, tuple[str, ...]]


class HttpRequest(Frozen):
    """One request that the host sends to its own server; `api_key_file` is a path on the host."""

    id: str
    method: Literal["GET", "POST"] = "GET"
    url: str = Field(description="http or https; tcp only connects, which counts as status 200")
    command: tuple[str, ...] = Field(
        default=(), description="run on the host instead of asking: its exit 0 counts as status 200, any other as 500"
    )
    proof: Literal["tokens", "answer"] = Field(default="tokens", description="what of the answer proves a live server")
    body: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    timeout_s: float = Field(default=10.0, gt=0)
    api_key_file: str | None = None


class HotSetting(Frozen):
    """How a live setting is made, and where its value is read back."""

    request: HttpRequest = Field(description="makes it")
    reads: tuple[HttpRequest, ...] = Field(min_length=1, description="the first that is answered shows the value")
    where: tuple[str, ...] = Field(
        default=(), description="keys that lead to the value in a JSON answer; none: the whole answer"
    )


HttpError = Literal["refused", "timeout", "reset", "protocol", "unreachable", "key-file", "request", "deadline"]


class HttpAnswer(Frozen):
    """What came back: a status and text, or the kind of failure with its words."""

    id: str
    status: int | None = None
    text: str = ""
    cut: bool = Field(default=False, description="the text was longer than the probe keeps")
    ms: float = 0.0
    error: HttpError | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True for a 2xx status."""
        return self.status is not None and 200 <= self.status < 300


class ServerAdapter(Protocol):
    """What must be known about an engine to configure it and to see whether it lives."""

    @property
    def engine(self) -> str:
        """Its name in session files and in LaunchSpec."""
        ...

    @property
    def env_prefixes(self) -> tuple[str, ...]:
        """Variables that start so are the engine's own: stored in clear and open to experiments.

        An entry that ends with `=` is a whole name.
        """
        ...

    @property
    def secret_flags(self) -> frozenset[str]:
        """Canonical names whose values are only ever stored as keyed hashes."""
        ...

    @property
    def packages(self) -> tuple[str, ...]:
        """Python packages from which the help comes, where printing it takes long; () where it is asked each time."""
        ...

    def program(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The leading words that start the program: interpreter, module or script, or the binary alone."""
        ...

    def help_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """Prints the options on stdout."""
        ...

    def version_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """Prints the version on stdout or stderr."""
        ...

    def parse_help(self, text: str) -> FlagTable:
        """Raises ServerError when no option is found: an empty table would refuse everything in silence."""
        ...

    def parse_version(self, text: str) -> str:
        """Raises ServerError when there is no version in it."""
        ...

    def read_argv(self, argv: Sequence[str], known: FlagTable) -> Reading:
        """The canonical reading. Raises ServerError for a token that `known` does not explain."""
        ...

    def edit_argv(self, argv: Sequence[str], known: FlagTable, change: FlagChange) -> tuple[str, ...]:
        """The command line with the change, everything else byte for byte. Assumes a checked change."""
        ...

    def mask_argv(self, argv: Sequence[str], known: FlagTable, hide: Callable[[str, str], str]) -> tuple[str, ...]:
        """The command line with each secret flag's value replaced by `hide(canonical name, value)`."""
        ...

    def check_change(self, change: Change, known: FlagTable) -> str | None:
        """Why the server would refuse or silently ignore the change; None when nothing speaks against it."""
        ...

    def hot_setting(self, base_url: str, name: str, value: str, api_key_file: str | None = None) -> HotSetting | None:
        """How a live setting is made and read back; None when the server has none of that name."""
        ...

    def apply(self, spec: LaunchSpec, changes: Sequence[Change], known: FlagTable) -> LaunchSpec:
        """The changed spec. Raises PolicyRefused with the reason of the first change that cannot be carried."""
        ...

    def base_url(self, spec: LaunchSpec) -> str:
        """Where the server answers, seen from its own host, without a trailing slash. Raises ServerError."""
        ...

    def health_requests(self, base_url: str, api_key_file: str | None = None) -> tuple[HttpRequest, ...]:
        """Cheap questions that show state and configuration; none of them generates."""
        ...

    def generate_request(
        self,
        base_url: str,
        model: str,
        prompt: Sequence[int] | str,
        *,
        max_tokens: int = 1,
        timeout_s: float = 30.0,
        api_key_file: str | None = None,
    ) -> HttpRequest:
        """A real completion (id `generate`), from token ids or text."""
        ...

    def tokens(self, answer: HttpAnswer) -> int:
        """How many tokens the answer to `generate_request` proves; 0 for anything that is no proof of life."""
        ...

    def model_name(self, answers: Mapping[str, HttpAnswer]) -> str | None:
        """The name under which the server wants to be asked, from the answers to `health_requests`."""
        ...

    def is_loading(self, answer: HttpAnswer) -> bool:
        """Whether the answer says that the model is still being loaded."""
        ...

    def counters(self, answers: Mapping[str, HttpAnswer]) -> dict[str, float]:
        """Counts that only grow while tokens are processed; empty when the server shows none."""
        ...

    def in_flight(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """How many requests are being processed or wait, from the answers to `health_requests`; None if unknown."""
        ...

    def requests(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """How many requests ended since the server began, from the answers to `health_requests`; None if unknown."""
        ...

    def effective(self, answers: Mapping[str, HttpAnswer], log: str = "") -> dict[str, str]:
        """What really runs, by canonical flag name (and `info:` facts), from answers and start log."""
        ...

    def mismatches(self, spec: LaunchSpec, effective: Mapping[str, str]) -> tuple[str, ...]:
        """Where the server runs something other than it was asked for, in words."""
        ...

    def remarks(self, log: str) -> tuple[str, ...]:
        """Log lines in which a running server says that it overrides, ignores or deprecates a setting."""
        ...


# --- from what was observed to a spec ----------------------------------------------------------------------

VOLATILE_NAMES = frozenset(
    {"PWD", "OLDPWD", "SHLVL", "_", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "XDG_SESSION_ID"}
    | {"LISTEN_PID", "MAINPID", "MANAGERPID", "WATCHDOG_PID"}
)
VOLATILE_PREFIXES = ("SSH_", "RATCHET_")
SECRET_NAME = re.compile(
    r"(^|_)(API)?(KEYS?|TOKEN|SECRETS?|PASS(WORD|WD|PHRASE)?|PWD|CREDENTIALS?|AUTH|COOKIE)$", re.IGNORECASE
)

KeyedHash = Callable[[str], str]


class Declared(NamedTuple):
    """A spec without secrets, the secrets by placeholder (for a 0600 file on the host only), and what was left out."""

    spec: LaunchSpec
    secrets: dict[str, str]
    ignored_env: tuple[str, ...]


def is_volatile(name: str) -> bool:
    """Whether a variable belongs to one login or one start, so that it says nothing about the configuration."""
    return name in VOLATILE_NAMES or name.startswith(VOLATILE_PREFIXES)


def in_clear(adapter: ServerAdapter, known: FlagTable, name: str) -> bool:
    """Whether a variable is the engine's own, and neither the twin of a secret flag nor a secret by its name."""
    own = f"{name}=".startswith(adapter.env_prefixes) and not names_secret(name)
    return own and known.variables.get(name) not in adapter.secret_flags


def names_secret(name: str) -> bool:
    """Whether a variable holds a secret, judging by how its name ends."""
    return SECRET_NAME.search(name) is not None


def make_spec(
    adapter: ServerAdapter,
    known: FlagTable,
    *,
    argv: Sequence[str],
    cwd: str,
    user: str,
    environ: Mapping[str, str],
    limits: Mapping[str, str],
    keyed: KeyedHash,
) -> Declared:
    """The spec of an observed process; `keyed` turns text into a hash that only the holder of its key can repeat.

    The hash covers the name with the value, so that equal secrets under two names do not look equal. Raises
    ServerError when the command line cannot be read, or holds bytes that no spec can hold.
    """
    secrets: dict[str, str] = {}

    def hide(name: str, value: str) -> str:
        placeholder = f"«secret:{keyed(name + chr(0) + value)}»"
        secrets[placeholder] = value
        return placeholder

    masked = adapter.mask_argv(argv, known, hide)
    reading = adapter.read_argv(masked, known)
    kept = {name: value for name, value in sorted(environ.items()) if not is_volatile(name)}
    own = {name: value for name, value in kept.items() if in_clear(adapter, known, name)}
    refuse_undecodable([*masked, cwd, *own.values(), *kept])
    spec = LaunchSpec(
        engine=adapter.engine,
        program=reading.program,
        flags=reading.flags,
        argv=masked,
        cwd=cwd,
        user=user,
        env=own,
        hidden_env={name: hide(name, value) for name, value in kept.items() if name not in own},
        limits=dict(limits),
    )
    return Declared(spec, secrets, tuple(sorted(name for name in environ if is_volatile(name))))


def refuse_undecodable(texts: Sequence[str]) -> None:
    """ServerError for text with bytes that are not UTF-8 (surrogates here): JSON could not give them back."""
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ServerError(
                "the server was started with bytes that are not UTF-8, so its start cannot be written down",
                where={"text": text.encode("utf-8", "backslashreplace").decode()},
                do="start it with a UTF-8 path or value, then adopt it again",
            )


def asked(spec: LaunchSpec, name: str, variable: str | None) -> str | None:
    """What the spec asks for: the flag's value (joined by blanks), else its variable's, else None."""
    if name in spec.flags:
        return " ".join(spec.flags[name])
    return spec.env.get(variable) if variable else None
