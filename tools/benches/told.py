"""What a benchmark client tells, in its file and on its screen: figures by name, read with care; pure, and it must not
know any client.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from state.models import Frozen, Metrics, Summary

ROUNDED = 0.0051
"""By this much a figure printed with two digits may differ from the full one."""
CONSISTENT = 0.01
"""By this fraction a client's throughput may differ from its own tokens over its own duration."""


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
