"""What all external benchmark clients share: the job that escorts them, and their figures in our meaning; runs nothing.

Our own file leads the job (`stream_client.py`, class Escort): it warms the server up, starts the client in the folder
of the run, samples the machine beside it, ends it at the deadline, and asks the fixed prompts afterwards. So these are
the same whichever client measures, and a client's own word is checked against what was seen beside it.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from state.errors import CommandFailed
from state.models import Frozen, Metrics, Summary
from tools.benches import builtin
from tools.benches.base import RESULT, Place
from tools.target import RunRequest, RunResult

PRINTED = "client.out"
"""What the client printed, errors included: some log their progress as errors."""
BUSY_CORES = 0.8
"""Beyond this share of its one core a client was probably the limit itself."""
ROUNDED = 0.0051
"""By this much a figure printed with two digits may differ from the full one."""
CONSISTENT = 0.01
"""By this fraction a client's throughput may differ from its own tokens over its own duration."""

ENGINE_KEY = ("OPENAI_API_KEY", "API_KEY")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""A run must not wait for, or depend on, a model hub."""


class Asked(Frozen):
    """What a run was to do, from the request that lies beside its result."""

    concurrency: int
    requests: int
    output_tokens: int


class Figures:
    """Numbers of a client's own result by name; collects those that are there but measure nothing."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = told
        self.unusable: list[str] = []

    def get(self, path: str) -> Any:
        """Whatever stands at `a.b.c`, None where there is nothing."""
        value: Any = self.told
        for step in path.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        return value

    def number(self, path: str) -> float | None:
        """A finite number at or above zero, else None; what is no such number is noted."""
        value = self.get(path)
        if value is None or isinstance(value, bool):
            return None
        if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
            return float(value)
        self.unusable.append(f"{path} = {value}")
        return None

    def needed(self, path: str) -> float:
        """As `number`; ValueError when the client does not tell it."""
        value = self.number(path)
        if value is None:
            raise ValueError(f"the client does not tell {path}, or tells no number: {self.get(path)!r}")
        return value

    def count(self, path: str) -> int | None:
        """As `number`, a whole one."""
        value = self.number(path)
        return None if value is None else round(value)

    def latency(self, paths: Mapping[str, str], scale: float = 1.0) -> Summary:
        """A summary in ms by the names of its parts; a latency of 0 was not measured."""
        found = {part: self.number(path) for part, path in paths.items()}
        return Summary.model_validate({part: value * scale for part, value in found.items() if value})


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
            "environment": dict(self.environment),
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
            metrics = metrics.model_copy(
                update={
                    **rates(metrics),
                    "unusable": tuple(told.unusable),
                    "client_bottleneck": self._bottleneck(escort),
                    "stopped_early": _stopped(escort) or metrics.stopped_early,
                    "server_output_tokens": server_tokens(escort.get("counters"), metrics.output_tokens),
                }
            )
            telemetry = builtin.read_telemetry({"telemetry": escort.get("telemetry"), "client": {}})
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


def server_tokens(counters: Mapping[str, Any] | None, claimed: int) -> int | None:
    """What the server counted for the run, by its own counters; None where it has none.

    It counted between `least`, from the moment that the client said it began, and `most`, from before it was started:
    the client's own trials lie between. A claim inside these bounds is taken as counted, else the bound it misses.
    """
    before, begin, after = (builtin.counted((counters or {}).get(at)) for at in ("before", "begin", "after"))
    if before is None or after is None:
        return None
    most = after - before
    least = 0 if begin is None else after - begin
    return min(max(claimed, least), most)


def result_part(printed: str, rows: str | None) -> str:
    """Of a long output what tells the result: the rows, or the last block; the rest is progress and noise."""
    if rows is not None:
        return "\n".join(line for line in printed.splitlines() if re.search(rows, line))
    heads = list(re.finditer(r"^=+ .*Result.* =+$", printed, re.MULTILINE))
    block = printed[heads[-1].start() :] if heads else ""
    foot = re.search(r"^={20,}\s*$", block, re.MULTILINE)
    return block[: foot.end()] if foot else block[:20_000]


def labels(printed: str) -> dict[str, str]:
    """`Label:   value` lines of the text by label; the last one of a name counts."""
    found = re.findall(r"^([^:\n]+):[ \t]+(\S+)[ \t]*$", printed, re.MULTILINE)
    return {label.strip(): value for label, value in found}


def only_printed(shown: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Any]:
    """Printed figures by the names under which newer versions write them; what is no number stays a word."""
    return {path: _number(shown[label]) for label, path in names.items() if label in shown}


def _number(word: str) -> float | str:
    try:
        found = float(word)
    except ValueError:
        return word
    return found if math.isfinite(found) else word


def differences(told: Figures, printed: Mapping[str, str], names: Mapping[str, str]) -> Iterable[str]:
    """Printed numbers (label → path) that differ from the written ones; a label that was not printed says nothing."""
    for label, path in names.items():
        if label in printed and isinstance(written := told.get(path), int | float):
            shown = _number(printed[label])
            if isinstance(shown, str) or not abs(shown - written) <= ROUNDED:
                yield f"{label} is printed as {printed[label]}, written as {written}"


def inconsistent(told: Figures, path: str, amount: float, duration_s: float) -> Iterable[str]:
    """A throughput of the client's that does not follow from its own tokens over its own duration."""
    said = told.get(path)
    if isinstance(said, int | float) and duration_s > 0 and not abs(said * duration_s - amount) <= CONSISTENT * amount:
        yield f"{path} is {said:g}, its tokens over its duration are {amount / duration_s:g}"


def rates(metrics: Metrics) -> dict[str, float | None]:
    """The three throughputs from counts and duration; None without a duration or a completed request."""
    seconds, output, prompt = metrics.duration_s, metrics.output_tokens, metrics.prompt_tokens
    if not seconds or not metrics.completed:
        return dict.fromkeys(("output_tok_s", "total_tok_s", "requests_s"))
    return {
        "output_tok_s": output / seconds,
        "total_tok_s": (output + prompt) / seconds if prompt else None,
        "requests_s": metrics.completed / seconds,
    }


def names(what: str) -> dict[str, str]:
    """Where the clients that grew from one benchmark script tell the parts of a latency."""
    parts = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
    return {part: f"{name}_{what}_ms" for part, name in parts.items()}


def missing_answers(output: int, completed: int, asked: Asked) -> int:
    """How many answers must have been short at least, where only the sum of tokens is told."""
    return max(0, math.ceil((completed * asked.output_tokens - output) / asked.output_tokens))


def kind_of(error: str) -> str:
    """One short word for a failed request, from what the client kept of it."""
    last = ([line.strip() for line in error.splitlines() if line.strip()] or ["failed"])[-1]
    return re.sub(r"\W+", "_", last.partition(":")[0].rpartition(".")[2])[:40].strip("_").lower() or "failed"


def ending(escort: Mapping[str, Any]) -> str:
    """How the client ended, in words."""
    code = escort.get("exit")
    return str(escort.get("error") or escort.get("stopped_early") or f"it ended with exit code {code}")


WRITTEN = ("completed", "duration", "total_output_tokens")


def single_figures(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A flat result without its lists; ValueError when it does not tell, itself, what every version writes."""
    missing = [name for name in WRITTEN if name not in whole]
    if missing:
        raise ValueError(f"the client's result does not tell {', '.join(missing)}")
    return {name: value for name, value in whole.items() if not isinstance(value, list | dict)}


def loads(text: str) -> Any:
    """JSON as benchmark clients write it: `NaN` and `Infinity` become words, which no reader takes for numbers."""
    return json.loads(text, parse_constant=str)


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
