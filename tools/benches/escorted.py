"""What all external benchmark clients share: the job that escorts them, and their figures in our meaning; runs nothing.

Our own file leads the job (`stream_client.py`, class Escort): it warms the server up, starts the client in the folder
of the run, samples the machine beside it, ends it at the deadline, and asks the fixed prompts afterwards. So these are
the same whichever client measures, and a client's own word is checked against what was seen beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from state.errors import CommandFailed
from state.models import Metrics
from tools.benches import builtin, stream_client
from tools.benches.base import COUNTED, REQUESTS_COUNTED, RESULT, Place
from tools.benches.told import Asked, Figures, differences, labels, loads, only_printed, rates, result_part
from tools.target import RunRequest, RunResult

PRINTED = "client.out"
"""What the client printed, errors included: some log their progress as errors."""
BUSY_CORES = 0.8
"""Beyond this share of its one core a client was probably the limit itself."""

ENGINE_KEY = ("OPENAI_API_KEY", "API_KEY")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""A run must not wait for, or depend on, a model hub."""


class EscortedClient(ABC):
    """An external client: a subclass knows its words, its files and its names."""

    name: ClassVar[str]
    result: ClassVar[str]
    """The client's own result file; each run has a folder of its own, so the name is the same in all."""
    begin: ClassVar[str | None]
    """What it prints when it begins to measure, after all it loads."""
    end: ClassVar[str | None]
    """What it prints when it has measured."""
    one_process: ClassVar[bool]
    """Whether all load comes from one thread, so that its CPU use says whether it kept up."""
    rows: ClassVar[str | None] = None
    """Lines that are kept of what it prints, as a pattern; None for one block with a head and a foot."""
    printed_as: ClassVar[Mapping[str, str]] = {}
    """Labels of its printed result and the names under which it writes the same figures."""
    needed_labels: ClassVar[tuple[str, ...]] = ()
    """Labels without which it printed no result."""
    environment: ClassVar[Mapping[str, str]] = OFFLINE
    key_variables: ClassVar[tuple[str, ...]] = ()
    """Where it looks for an API key; () when it takes one only where everybody can read it."""
    lacks: tuple[str, ...]
    progress: str | None = None

    def __init__(self, command: Sequence[str], args: Sequence[str] = (), tokenizer: str = "") -> None:
        self.command, self.args, self.tokenizer = tuple(command), tuple(args), tokenizer

    @property
    def leaves(self) -> tuple[str, ...]:
        """See `BenchClient.leaves`."""
        return (RESULT, self.result, PRINTED)

    @abstractmethod
    def words(self, request: RunRequest, at: Place) -> tuple[str, ...]:
        """The options of one run, after `command`."""

    @abstractmethod
    def version_command(self) -> tuple[str, ...]:
        """See `BenchClient.version_command`."""

    @abstractmethod
    def condensed(self, text: str, asked: Asked) -> dict[str, Any]:
        """Of the client's own result what its figures need, as plain JSON. ValueError when it is none of its kind."""

    @abstractmethod
    def figures(self, told: Figures, asked: Asked) -> Metrics:
        """The condensed result in our meaning, without throughputs. ValueError when a needed figure is missing."""

    @abstractmethod
    def contradictions(self, told: Figures, printed: str) -> Iterable[str]:
        """Where what it wrote does not agree with itself or with what it printed, in words."""

    def script(self, key: str, request: RunRequest, at: Place) -> str:
        """See `BenchClient.script`."""
        asked = builtin.request_json(key, request, at.url, at.model, at.api_key_file)
        asked["escort"] = {
            "command": [*self.command, *self.words(request, at), *self.args],
            "environment": {**self.environment, **dict.fromkeys(("no_proxy", "NO_PROXY"), urlsplit(at.url).hostname)},
            "key_variables": list(self.key_variables),
            "printed": PRINTED,
            "fresh": [self.result],
            "begin": self.begin,
            "end": self.end,
        }
        return builtin.script(at.python, at.client, asked)

    def parse(self, files: Mapping[str, bytes], key: str) -> RunResult:
        """See `BenchClient.parse`."""
        escort: dict[str, Any] = {}
        try:
            escort = _json(files.get(RESULT, b"").decode("utf-8", "replace"))
            answers = builtin.read_answers(escort.pop("answers", None))
            printed = files.get(PRINTED, b"").decode("utf-8", "replace")
            if self.result not in files:
                raise ValueError(f"the client wrote no {self.result} ({ending(escort)})")
            text = files[self.result].decode("utf-8", "replace")
            raw = {
                "run_id": escort.get("run_id"),
                "client": self.name,
                "told": self.condensed(text, _asked(escort)),
                "printed": result_part(printed, self.rows),
                "escort": escort,
            }
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            raise _unusable(wrong, key, self.name, escort) from wrong
        return self.again(raw, key).model_copy(update={"answers": answers})

    def again(self, raw: Mapping[str, Any], key: str) -> RunResult:
        """See `BenchClient.again`."""
        escort = raw.get("escort") or {}
        try:
            if raw["run_id"] != key:
                raise ValueError(f"it belongs to run {raw['run_id']}")
            if raw["client"] != self.name:
                raise ValueError(f"it was written by {raw['client']}")
            shown = labels(raw["printed"])
            told, asked = Figures({**only_printed(shown, self.printed_as), **raw["told"]}), _asked(escort)
            metrics = self.figures(told, asked)
            differs = [f"it did not print {label}" for label in self.needed_labels if label not in shown]
            differs += [*differences(told, shown, self.printed_as), *self.contradictions(told, raw["printed"])]
            if differs:
                more = f" (and {len(differs) - 3} more)" if len(differs) > 3 else ""
                raise ValueError(f"the client contradicts itself: {'; '.join(differs[:3])}{more}")
            counters = escort.get("counters")
            metrics = metrics.model_copy(
                update={
                    **rates(metrics),
                    "unusable": tuple(told.unusable),
                    "client_bottleneck": self._bottleneck(escort),
                    "stopped_early": _stopped(escort) or metrics.stopped_early,
                    "server_output_tokens": server_count(counters, metrics.output_tokens),
                    "server_requests": server_count(counters, metrics.completed + metrics.failed, REQUESTS_COUNTED),
                }
            )
            telemetry = builtin.read_telemetry(
                {
                    "telemetry": escort.get("telemetry"),
                    "client": {},
                    "server_counters": in_between(counters),
                }
            )
            telemetry = telemetry.model_copy(update={"client_cpu_share": self._cpu_share(escort)})
            return RunResult(metrics=metrics, telemetry=telemetry, raw=dict(raw))
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            raise _unusable(wrong, key, self.name, escort) from wrong

    def _cpu_share(self, escort: Mapping[str, Any]) -> float | None:
        """Of one core, in the measured window; None where the client has several processes or told no window."""
        seen = escort.get("telemetry") or {}
        if not self.one_process or "begin" not in escort.get("marks", ()):
            return None
        share = (seen.get("client_cpu_cores") or {}).get("mean")
        return None if share is None else float(share)

    def _bottleneck(self, escort: Mapping[str, Any]) -> str | None:
        limits, share = escort.get("limits") or {}, self._cpu_share(escort)
        if limits.get("nofile_low"):
            return f"it may open only {limits['nofile']} files, too few for its streams"
        return f"it used {share:.0%} of a core" if share is not None and share > BUSY_CORES else None


def server_count(counters: Mapping[str, Any] | None, claimed: int, names: Sequence[str] = COUNTED) -> int | None:
    """What the server counted for the run, by its own counters (output tokens by default); None where it has none.

    It counted between `least`, from the moment that the client said it began, and `most`, from before it was started:
    the client's own trials lie between. A claim inside these bounds is taken as counted, else the bound it misses.
    """
    before, begin, after = (builtin.counted((counters or {}).get(at), names) for at in ("before", "begin", "after"))
    if before is None or after is None:
        return None
    most = after - before
    least = 0 if begin is None else after - begin
    return min(max(claimed, least), most)


def in_between(counters: Mapping[str, Any] | None) -> dict[str, float] | None:
    """What the server counted while the client measured: from its mark on, or from its start where it gave none."""
    told = counters or {}
    before, after = told.get("begin") or told.get("before"), told.get("after")
    return stream_client.counter_deltas(before, after)


def ending(escort: Mapping[str, Any]) -> str:
    """How the client ended, in words."""
    code = escort.get("exit")
    return str(escort.get("error") or escort.get("stopped_early") or f"it ended with exit code {code}")


def _json(text: str) -> dict[str, Any]:
    found = loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"not a result: {text[:80]!r}")
    return found


def _asked(escort: Mapping[str, Any]) -> Asked:
    request = escort["request"]
    return Asked(**{name: request[name] for name in Asked.model_fields})


def _stopped(escort: Mapping[str, Any]) -> str | None:
    """Why the run did not go to its end; an exit code of 0 proves nothing, another one is a reason."""
    if escort.get("error") or escort.get("stopped_early") or escort.get("exit") != 0:
        return ending(escort)
    return None


def _unusable(wrong: Exception, key: str, client: str, escort: Mapping[str, Any]) -> CommandFailed:
    what = f"missing: {wrong}" if isinstance(wrong, KeyError) else str(wrong)
    return CommandFailed(
        f"the client's result cannot be used: {what}",
        where={"run": key, "client": client, **({"exit": escort["exit"]} if "exit" in escort else {})},
        do="look at the job's folder on the host",
    )
