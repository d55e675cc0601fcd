"""Any other server: what may be changed, and what proves that it lives, is declared by a person; pure, it runs nothing.

Only the declared flags are read as flags. All other words of the command line are kept as they are, in their order, as
part of the program. There is no generation: a check that a person declared stands for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from state.errors import ServerError
from state.models import Change, EnvChange, FlagChange, Frozen, HotCall, LaunchSpec
from tools.servers import argv as words
from tools.servers import checks
from tools.servers.apply import applied
from tools.servers.base import FlagTable, FlagType, HotSetting, HttpAnswer, HttpRequest, KnownFlag, Reading

HEADER = "flags that the session file declares:"
SECRET = "its value is a secret"
UNVERSIONED = "unversioned"
NAME = r"^--?[A-Za-z][\w.-]*$"


class DeclaredFlag(Frozen):
    """One flag that experiments may set."""

    name: str = Field(pattern=NAME, description="as it stands on the command line, dashes included")
    type: Literal["int", "float", "text", "choice", "switch"] = Field(
        default="text", description="what its value is; a switch takes none"
    )
    choices: tuple[str, ...] = Field(default=(), description="the values of a choice")
    low: float | None = Field(default=None, description="least number")
    high: float | None = Field(default=None, description="greatest number")
    joined: bool = Field(default=False, description="it is written --name=value, in one word")
    aliases: tuple[str, ...] = Field(default=(), description="other spellings of the same flag")
    opposite: str | None = Field(default=None, pattern=NAME, description="the switch that undoes this one")

    def known(self) -> list[KnownFlag]:
        """As the adapter knows it, with the opposite of a switch."""
        types: dict[str, FlagType] = {"text": "str", "switch": "flag", "int": "int", "float": "float"}
        flag = KnownFlag(
            name=self.name,
            aliases=self.aliases,
            takes_value=self.type != "switch",
            type=types.get(self.type, "choice"),
            choices=self.choices or None,
            low=self.low,
            high=self.high,
            opposite=self.opposite,
        )
        other = KnownFlag(name=self.opposite, opposite=self.name) if self.opposite else None
        return [flag] if other is None else [flag, other]


class DeclaredHot(Frozen):
    """One live setting; `{value}` stands for the value. It must be made in one way and read back in one."""

    name: str = Field(pattern=r"^[A-Za-z_][\w.:-]*$", description="what experiments call it")
    set_command: tuple[str, ...] = Field(default=(), description="program and arguments, run on the host, that set it")
    set_path: str | None = Field(default=None, pattern="^/", description="path under url that sets it, by POST")
    set_body: str | None = Field(default=None, description="what is sent to set_path")
    read_command: tuple[str, ...] = Field(
        default=(), description="program and arguments, run on the host, that print its value"
    )
    read_path: str | None = Field(default=None, pattern="^/", description="path under url that shows its value")
    read_key: tuple[str, ...] = Field(
        default=(), description="keys that lead to the value in a JSON answer; none: the whole answer is the value"
    )

    def setting(self, base_url: str, value: str, api_key_file: str | None) -> HotSetting:
        """How it is made and read back."""

        def filled(text: str) -> str:
            return text.replace("{value}", value)

        request = HttpRequest(
            id="set",
            method="POST",
            url=base_url + filled(self.set_path or ""),
            command=tuple(map(filled, self.set_command)),
            body=None if self.set_body is None else filled(self.set_body),
            headers={"Content-Type": "application/json"},
            api_key_file=api_key_file,
        )
        url = base_url + (self.read_path or "")
        read = HttpRequest(id="read", url=url, command=self.read_command, api_key_file=api_key_file)
        return HotSetting(request=request, reads=(read,), where=self.read_key)


class GenericRules(Frozen):
    """What a person says about a server that Ratchet has no adapter for."""

    flags: tuple[DeclaredFlag, ...] = Field(default=(), description="the flags that experiments may set")
    env: tuple[str, ...] = Field(
        default=(), description="the variables that experiments may set; their values are stored in clear"
    )
    secret_flags: tuple[str, ...] = Field(default=(), description="flags whose values are never stored")
    health_path: str | None = Field(
        default=None, pattern="^/", description="path under url that a live server answers with a 2xx status"
    )
    health_command: tuple[str, ...] = Field(
        default=(), description="program and arguments, run on the host, that end with 0 when the server is live"
    )
    version_command: tuple[str, ...] = Field(
        default=(), description="program and arguments that print the server's version"
    )
    hot: tuple[DeclaredHot, ...] = Field(default=(), description="what can be set while the server runs")


class Word(NamedTuple):
    """A declared flag with its value, or (`flag` None) a word that is kept as it is: argv[start:stop]."""

    start: int
    stop: int
    flag: KnownFlag | None
    value: str | None = None
    inline: bool = False


class Generic:
    """A server as a session file describes it; without a health check, a TCP connection to `url` is the proof."""

    engine: ClassVar[str] = "generic"
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, rules: GenericRules, url: str) -> None:
        self.rules = rules
        self.url = url

    @property
    def env_prefixes(self) -> tuple[str, ...]:
        """See `ServerAdapter.env_prefixes`; whole names here."""
        return tuple(f"{name}=" for name in self.rules.env)

    @property
    def secret_flags(self) -> frozenset[str]:
        """See `ServerAdapter.secret_flags`."""
        return frozenset(self.rules.secret_flags)

    def program(self, argv: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.program`."""
        return tuple(argv[: words.program_length(argv)])

    def help_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """The server is not asked: the declared names are."""
        return ("printf", "%s\\n", HEADER, *(flag.name for flag in self.rules.flags))

    def version_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.version_command`."""
        return self.rules.version_command or ("printf", "%s\\n", UNVERSIONED)

    def parse_help(self, text: str) -> FlagTable:
        """The declared flags, whatever the text says of them."""
        if HEADER not in text:
            raise ServerError(
                "the host could not print the flags that the session file declares",
                tail=text,
                do="see that printf is found on the host",
            )
        declared = [known for flag in self.rules.flags for known in flag.known()]
        secret = [KnownFlag(name=name, takes_value=True, type="str") for name in self.rules.secret_flags]
        return FlagTable(flags={flag.name: flag for flag in (*secret, *declared)})

    def parse_version(self, text: str) -> str:
        """The first line that says something."""
        line = next((line.strip() for line in text.splitlines() if line.strip()), None)
        if line is None:
            raise ServerError(
                "the command for the server's version printed nothing",
                where={"command": " ".join(self.rules.version_command)},
                do="correct server.generic.version_command in the session file",
            )
        return line

    def read_argv(self, argv: Sequence[str], known: FlagTable) -> Reading:
        """See `ServerAdapter.read_argv`; of a repeated flag the last one counts."""
        program = list(self.program(argv))
        flags: dict[str, tuple[str, ...]] = {}
        for word in self._words(argv, known):
            if word.flag is None:
                program += argv[word.start : word.stop]
                continue
            for name in (word.flag.name, word.flag.opposite or ""):
                flags.pop(name, None)
            flags[word.flag.name] = () if word.value is None else (word.value,)
        return Reading(tuple(program), flags)

    def edit_argv(self, argv: Sequence[str], known: FlagTable, change: FlagChange) -> tuple[str, ...]:
        """See `ServerAdapter.edit_argv`."""
        flag = known.flags[change.name]
        names = {flag.name} if change.remove else {flag.name, flag.opposite}
        new = () if change.remove else self._rendered(change)
        edited = list(self.program(argv))
        for word in self._words(argv, known):
            if word.flag is None or word.flag.name not in names:
                edited += argv[word.start : word.stop]
            else:
                edited += new
                new = ()
        return (*edited, *new)

    def mask_argv(self, argv: Sequence[str], known: FlagTable, hide: Callable[[str, str], str]) -> tuple[str, ...]:
        """See `ServerAdapter.mask_argv`."""
        masked = list(argv)
        for word in self._words(argv, known):
            if word.flag is None or word.value is None or word.flag.name not in self.secret_flags:
                continue
            hidden = hide(word.flag.name, word.value)
            last = argv[word.stop - 1]
            masked[word.stop - 1] = last.removesuffix(word.value) + hidden if word.inline else hidden
        return tuple(masked)

    def check_change(self, change: Change, known: FlagTable) -> str | None:
        """See `ServerAdapter.check_change`."""
        if isinstance(change, FlagChange):
            return checks.check_flag(change, known, dict.fromkeys(self.secret_flags, SECRET))
        if isinstance(change, EnvChange):
            return checks.check_env(change, known, self.env_prefixes, None, {})
        if isinstance(change, HotCall) and change.name not in {one.name for one in self.rules.hot}:
            return f"the session file declares no live setting {change.name}"
        return None

    def hot_setting(self, base_url: str, name: str, value: str, api_key_file: str | None = None) -> HotSetting | None:
        """See `ServerAdapter.hot_setting`; as declared."""
        found = next((one for one in self.rules.hot if one.name == name), None)
        return None if found is None else found.setting(base_url, value, api_key_file)

    def apply(self, spec: LaunchSpec, changes: Sequence[Change], known: FlagTable) -> LaunchSpec:
        """See `ServerAdapter.apply`."""
        return applied(self, spec, changes, known)

    def base_url(self, spec: LaunchSpec) -> str:
        """As the session file says."""
        return self.url

    def health_requests(self, base_url: str, api_key_file: str | None = None) -> tuple[HttpRequest, ...]:
        """None: nothing is known of the server's state."""
        return ()

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
        """The declared check: the command, else the path, else a connection."""
        rules = self.rules
        url = base_url + rules.health_path if rules.health_path else re.sub(r"^\w+://", "tcp://", base_url)
        return HttpRequest(
            id="generate",
            url=url,
            command=rules.health_command,
            proof="answer",
            timeout_s=timeout_s,
            api_key_file=api_key_file,
        )

    def tokens(self, answer: HttpAnswer) -> int:
        """1 for a check that succeeded."""
        return int(answer.ok)

    def model_name(self, answers: Mapping[str, HttpAnswer]) -> str | None:
        """There is none."""
        return None

    def is_loading(self, answer: HttpAnswer) -> bool:
        """503 is how HTTP says so."""
        return answer.status == 503

    def counters(self, answers: Mapping[str, HttpAnswer]) -> dict[str, float]:
        """None are known."""
        return {}

    def in_flight(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """Unknown; open connections are counted instead."""
        return None

    def requests(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """Unknown; connections that come are counted instead."""
        return None

    def effective(self, answers: Mapping[str, HttpAnswer], log: str = "") -> dict[str, str]:
        """Nothing is read back but the command line."""
        return {}

    def mismatches(self, spec: LaunchSpec, effective: Mapping[str, str]) -> tuple[str, ...]:
        """None can be seen."""
        return ()

    def remarks(self, log: str) -> tuple[str, ...]:
        """The log is not understood."""
        return ()

    def _words(self, argv: Sequence[str], known: FlagTable) -> Iterator[Word]:
        at = words.program_length(argv)
        while at < len(argv):
            name, has_value, value = argv[at].partition("=")
            flag = known.find(name)
            if flag is None or (has_value and not flag.takes_value):
                word = Word(at, at + 1, None)
            elif has_value or not flag.takes_value:
                word = Word(at, at + 1, flag, value if has_value else None, inline=bool(has_value))
            elif at + 1 == len(argv):
                raise ServerError(
                    "a command line ends before a flag has its value",
                    where={"program": argv[0], "flag": argv[at]},
                    do=f"correct {flag.name} in the session file: is it a switch?",
                )
            else:
                word = Word(at, at + 2, flag, argv[at + 1])
            yield word
            at = word.stop

    def _rendered(self, change: FlagChange) -> tuple[str, ...]:
        joined = any(flag.joined for flag in self.rules.flags if flag.name == change.name)
        if change.value is None:
            return (change.name,)
        return (f"{change.name}={change.value}",) if joined else (change.name, change.value)
