"""The session file: what a person may say about one session, read and checked in full; it must not touch the target.

`load` either returns a SessionConfig that makes sense as a whole or raises one ConfigError that names every problem
with its line. `python -m agent.config --schema` prints the JSON schema that editors use.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from agent.config_checks import contradictions
from agent.config_lines import KeyPath, locate
from agent.config_model import ModelSection
from agent.config_problems import (
    Problem,
    missing_key,
    nearest,
    problems_error,
    syntax_error,
    unknown_key,
    unwanted_values,
    validation_problems,
)
from agent.config_schema import schema_text
from state.errors import ConfigError
from state.models import (
    Budget,
    Disruption,
    DisruptionField,
    Experiment,
    Frozen,
    Idea,
    JudgeRule,
    LoadHint,
    Policy,
    Source,
    ValidityRule,
    Workload,
    canonical_json,
    digest,
)
from tools.manners import Draining
from tools.servers.generic import GenericRules

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PLAIN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def seconds(value: object) -> object:
    """`"8h"`, `"30m"`, `"90s"` or `"1d"` as seconds; numbers pass, anything else is a ValueError."""
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value)
    if found is None:
        raise ValueError('expected a duration such as "8h", "30m" or "90s", or a number of seconds')
    return float(found[1]) * _SECONDS[found[2]]


def _disruption_name(value: object) -> object:
    names = [level.name.lower() for level in Disruption]
    if isinstance(value, Disruption):
        return value
    if not isinstance(value, str) or value.lower() not in names:
        raise ValueError(f"expected one of {', '.join(names)}{nearest(str(value), names)}")
    return value


def _load_hint(value: object) -> object:
    names = [hint.value for hint in LoadHint]
    if value not in names:
        raise ValueError(f"expected one of {', '.join(names)}{nearest(str(value), names)}")
    return LoadHint(value)


def _expanded(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("expected the path of a file on this machine")
    return Path(value).expanduser()


def _plain_url(value: str) -> str:
    advice = "expected a plain http:// or https:// address of host and port, as seen from the target's host"
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable or (parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port))
    except ValueError as impossible:
        raise ValueError(advice) from impossible
    if not usable or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(advice)
    return value.rstrip("/")


LocalPath = Annotated[Path, PlainValidator(_expanded), WithJsonSchema({"type": "string"})]
Duration = Annotated[
    float,
    BeforeValidator(seconds),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": r"^\d.*[smhd]$"}]}
    ),
]
MaxDisruption = Annotated[
    DisruptionField,
    BeforeValidator(_disruption_name),
    WithJsonSchema({"type": "string", "enum": [level.name.lower() for level in Disruption]}),
]


class TargetSection(Frozen):
    """The host, and how to reach it; `~/.ssh/config` is not read, so that a session means the same everywhere."""

    name: str = Field(pattern=_PLAIN_NAME, description="short id of this target, used for the names of folders")
    host: str = Field(min_length=1, description="host name or address that SSH connects to")
    port: int = Field(default=22, ge=1, le=65535, description="port of the SSH server")
    user: str = Field(min_length=1, description="user to log in as; it must be allowed to stop and start the server")
    identity_file: LocalPath | None = Field(default=None, description="private key on this machine; ~ is expanded")
    known_hosts: LocalPath | None = Field(
        default=None, description="file on this machine that holds the host's key; by default ~/.ssh/known_hosts"
    )
    directory: str = Field(default="~/.ratchet", min_length=1, description="where all our files live on the host")
    lease_s: int = Field(
        default=300, ge=5, description="silence of the agent after which the host itself puts known-good back"
    )
    reconnect_s: float = Field(
        default=1800.0, ge=0, description="how long to wait for a host that cannot be reached any more before giving up"
    )
    python: str = Field(default="python3", min_length=1, description="Python 3.8 or later on the host")


class ServerSection(Frozen):
    """The one inference server that may be stopped and started: whoever listens on the url's port, or the pid."""

    engine: Literal["llamacpp", "vllm", "sglang", "generic"] = Field(
        default="llamacpp", description="which kind of server it is; generic: any other, described in server.generic"
    )
    url: Annotated[str, AfterValidator(_plain_url)] = Field(
        default="http://127.0.0.1:8102",
        description="address of the server as seen from the host; tcp://host:port for a generic one without HTTP",
    )
    model: str | None = Field(default=None, description="model name sent in requests; by default none is sent")
    start_deadline_s: float = Field(default=120.0, gt=0, description="how long a launch may take until it generates")
    stop_grace_s: float = Field(default=20.0, gt=0, description="time between asking the server to end and forcing it")
    pid: int | None = Field(default=None, ge=1, description="process id, only where the port cannot tell")
    api_key_file: str | None = Field(default=None, description="path on the host of a file that holds the API key")
    generic: GenericRules = Field(
        default=GenericRules(), description="of an engine without an adapter: what may be changed and what proves life"
    )

    @property
    def port(self) -> int:
        """Port that the server listens on, from the url."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


class BudgetSection(Budget):
    """Ceilings of one session; the restore alone is exempt from them."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    time_s: Duration = Field(
        default=8 * 3600.0, gt=0, validation_alias="time", description='"8h", "30m", "90s" or a number of seconds'
    )


class PolicySection(Policy):
    """What the agent may do to the target."""

    max_disruption: MaxDisruption = Field(
        default=Disruption.RESTART, description="the most that an experiment may cost the users of the server"
    )
    budget: BudgetSection = Field(default=BudgetSection(), description="ceilings of the session")


class MannersSection(Frozen):
    """How the people who use the server are spared, and what stays when the session has ended."""

    drain: tuple[str, ...] = Field(
        default=(), description="program and arguments, run on the host, that take the server out of its users' way"
    )
    undrain: tuple[str, ...] = Field(default=(), description="program and arguments that give it back to them")
    drained: tuple[str, ...] = Field(
        default=(), description="program and arguments that end with 0 exactly while the server is drained; a probe"
    )
    drain_idempotent: bool = Field(
        default=False, description="drain and undrain may be run twice in a row; needed where there is no probe"
    )
    drain_deadline_s: float = Field(
        default=120.0, gt=0, description="how long each of these commands, and the probe until it agrees, may take"
    )
    drain_for: Literal["restart", "load"] = Field(
        default="restart", description="drained for restarts and loads above max_concurrency, or for every run as well"
    )
    wait_inflight_s: float = Field(
        default=60.0,
        ge=0,
        description="how long a restart waits for requests in flight to end; 0 restarts without looking",
    )
    when_busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="what becomes of an experiment whose restart waited in vain: it waits on, or is void",
    )
    max_foreign_rps: float = Field(
        default=0.0, ge=0, description="requests of others a second beside which a run still counts; 0: none at all"
    )
    max_concurrency: int | None = Field(
        default=None, ge=1, description="the most streams that we add while others may use the server; None: any number"
    )
    persist: bool = Field(
        default=False, description="see that a better configuration comes back after a reboot (units and containers)"
    )

    @property
    def draining(self) -> Draining | None:
        """The commands together, None where nothing drains the server."""
        if not self.drain:
            return None
        return Draining(drain=self.drain, undrain=self.undrain, drained=self.drained, deadline_s=self.drain_deadline_s)


class PlannerSection(Frozen):
    """Where the experiments come from."""

    kind: Literal["catalogue", "model", "selftest"] = Field(
        default="catalogue",
        description="which planner proposes experiments; model: the catalogue, and a language model beside it; "
        "selftest only launches what runs already",
    )
    only: tuple[str, ...] = Field(default=(), description="ids or tags of experiments; none means all")
    skip: tuple[str, ...] = Field(
        default=(), description='ids or tags of experiments that are left out; "numerics" for all that change answers'
    )
    refine: bool = Field(
        default=True,
        description="whether what was learned may add experiments: other values of what worked, and settings together",
    )
    relaunches: int = Field(default=0, ge=0, description="launches of the unchanged server in a selftest")
    model: ModelSection | None = Field(
        default=None, description="the language model that is asked where kind is model, and its budget in one session"
    )


class NotifySection(Frozen):
    """Who is told when a session ends."""

    urls_file: LocalPath | None = Field(
        default=None,
        description="file on this machine with one apprise address a line, such as mail, ntfy or Slack",
    )
    when: Literal["needed", "always"] = Field(
        default="needed", description="needed: only when the session waits for a person (exit code 5 or 6)"
    )


class OwnExperiment(Idea):
    """An experiment that a person wrote into the session file."""

    id: str = Field(pattern=_PLAIN_NAME, description="short name, used in the list and in the log")
    load_hint: Annotated[LoadHint, BeforeValidator(_load_hint)] = Field(
        default=LoadHint.ANY, description="at which load an effect is expected"
    )
    disruption: MaxDisruption = Field(
        default=Disruption.RESTART,
        description="what it costs the users of the server; by default what its changes cost, never less",
    )
    source: Source = Field(default=Source(kind="person"), description="where the idea comes from")

    @model_validator(mode="before")
    @classmethod
    def _live_changes_cost_less(cls, given: object) -> object:
        """An experiment of live settings alone needs no restart, unless it says so."""
        if not isinstance(given, Mapping) or "disruption" in given:
            return given
        changes = given.get("changes")
        kinds = {change.get("kind") for change in changes or () if isinstance(change, Mapping)}
        return {**given, "disruption": Disruption.HOT} if kinds == {"hot"} else given

    def experiment(self) -> Experiment:
        """As it goes on the list."""
        return Experiment.model_validate(self.model_dump())


class SessionConfig(Frozen):
    """The whole session file."""

    seed: int = Field(default=1, ge=0, description="where the benchmark's random prompts start from")
    target: TargetSection = Field(description="the host, and how to reach it")
    server: ServerSection = Field(default=ServerSection(), description="the one server that may be restarted")
    workload: Workload = Field(description="how the server is measured: load points, objective and guards")
    policy: PolicySection = Field(default=PolicySection(), description="what the agent may do to the target")
    judge: JudgeRule = Field(default=JudgeRule(), description="how much evidence a keep needs")
    validity: ValidityRule = Field(default=ValidityRule(), description="when a measurement counts")
    manners: MannersSection = Field(default=MannersSection(), description="how the users of the server are spared")
    planner: PlannerSection = Field(default=PlannerSection(), description="where the experiments come from")
    notify: NotifySection = Field(default=NotifySection(), description="who is told when a session ends")
    experiments: tuple[OwnExperiment, ...] = Field(default=(), description="a person's own ideas, tried like any other")

    @property
    def canonical(self) -> str:
        """One text for equal configurations, whatever the order and the comments of the file."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def revision(self) -> str:
        """Digest of the canonical text; stored with the session, so that a changed file is noticed on resume.

        Never remembered: a copy with other values would carry the digest of what it was copied from.
        """
        return digest(self.model_dump(mode="json"))

    @model_validator(mode="after")
    def _makes_sense(self) -> SessionConfig:
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        found = contradictions(sections, self.workload.model_dump())
        if found:
            raise ValueError("; ".join(message for _, message in found))
        return self


def load(path: Path) -> SessionConfig:
    """The session file at `path`; a ConfigError names every problem with its line, and nothing is touched."""
    text = read_text(path)
    name = str(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise syntax_error(name, text, str(error)) from None
    sections, invalid = _sections(raw)
    unwanted = list(unwanted_values(raw))
    said = {problem.path for problem in unwanted}
    found = (*invalid, *contradictions(sections, raw.get("workload")))
    problems = unwanted + [problem for problem in found if problem.path not in said]
    if problems:
        raise problems_error(name, problems, locate(text))
    return SessionConfig(**sections)


def read_text(path: Path, what: str = "session file", page: str = "docs/how-to/own-server.md") -> str:
    """Text of the file; TOML is UTF-8, a byte order mark before it is tolerated. `page` shows how to write one."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {what} {path}", do=f"give the right path; {page} shows how to write one"
        ) from None
    except UnicodeDecodeError as error:
        said = f"{path} is not UTF-8: byte {error.start} cannot be read; nothing was touched"
        raise ConfigError(said, do="save the file as UTF-8") from None
    except OSError as error:
        said = f"the {what} {path} cannot be read: {error.strerror}"
        raise ConfigError(said, do="give the path of a readable TOML file") from None


def own_experiments(value: object) -> tuple[tuple[OwnExperiment, ...], list[Problem]]:
    """What stands under `experiments`, with everything that is wrong with it."""
    path: KeyPath = ("experiments",)
    try:
        adapter = TypeAdapter(tuple[OwnExperiment, ...])
        given = adapter.validate_python(_as_tuples(value), strict=True, by_name=False, by_alias=True)
    except ValidationError as error:
        return (), validation_problems(error, path, SessionConfig)
    return given, contradictions({"experiments": given}, None)


def _sections(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Each section that is valid by itself, and what is wrong with the others: one mistake must not hide the next."""
    sections: dict[str, Any] = {}
    known = SessionConfig.model_fields
    problems = [Problem((key,), unknown_key((key,), SessionConfig)) for key in raw if key not in known]
    for key, field in known.items():
        path: KeyPath = (key,)
        if key not in raw:
            if field.is_required():
                problems.append(Problem(path, missing_key(path, SessionConfig)))
            else:
                sections[key] = field.get_default(call_default_factory=True, validated_data={})
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
            sections[key] = adapter.validate_python(_as_tuples(raw[key]), strict=True, by_name=False, by_alias=True)
        except ValidationError as error:
            problems += validation_problems(error, path, SessionConfig)
    return sections, problems


def _as_tuples(value: object) -> object:
    """TOML's lists as the tuples that strict validation wants; strict, so that "2" is no number and 1 no switch."""
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in value.items()}
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


if __name__ == "__main__":
    if sys.argv[1:] != ["--schema"]:
        sys.exit("usage: python -m agent.config --schema")
    print(schema_text(SessionConfig), end="")
