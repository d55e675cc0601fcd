"""What is wrong with a session file, said so that a person can mend it; it must not read files or know the sections.

A problem is a key path with a sentence. All of them become one ConfigError, in the order of the file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agent.config_lines import KeyPath, line_of
from agent.config_schema import description
from state.errors import ConfigError

SHOWN = 60
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class Problem(NamedTuple):
    """One thing to mend: where, and what was expected there."""

    path: KeyPath
    message: str


def syntax_error(name: str, text: str, message: str) -> ConfigError:
    """The ConfigError for what tomllib said, with line, column and the text of the line."""
    lines = text.splitlines() or [""]
    found = _PLACE.search(message)
    line, column = (int(found[1]), int(found[2])) if found and found[1] else (len(lines), len(lines[-1]) + 1)
    said = _PLACE.sub("", message)
    shown = lines[line - 1] if line <= len(lines) else ""
    return ConfigError(
        f"{name} is not valid TOML; nothing was touched\n"
        f"  line {line}, column {column}: {said[:1].lower() + said[1:]}\n"
        f"    {shown}\n"
        f"    {' ' * (column - 1)}^",
        do=f"mend line {line} of {name}; strings need quotes, tables a closing bracket",
    )


def problems_error(name: str, problems: Sequence[Problem], lines: Mapping[KeyPath, int]) -> ConfigError:
    """One ConfigError that lists every problem with its line."""
    placed = sorted((line_of(problem.path, lines) or math.inf, index) for index, problem in enumerate(problems))
    said = [f"  {_place(problems[index], lines)}{problems[index].message}" for _, index in placed]
    count = "1 problem" if len(said) == 1 else f"{len(said)} problems"
    return ConfigError(
        "\n".join([f"{name} has {count}; nothing was touched", *said]),
        do=f"mend {name} and start again; `ratchet doctor` checks it without touching the server",
    )


def _place(problem: Problem, lines: Mapping[KeyPath, int]) -> str:
    line = line_of(problem.path, lines)
    key = shown_path(problem.path)
    return f"line {line}: {key}: " if line is not None else f"{key}: "


def shown_path(path: KeyPath) -> str:
    """`workload.load_points[1].requests`; items count from 0, as in every log of Ratchet."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def unwanted_values(value: object, path: KeyPath = ()) -> Iterator[Problem]:
    """Values that TOML allows and no key of ours takes: infinite numbers and what is not a number."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from unwanted_values(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from unwanted_values(item, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"expected a finite number, got {value}")


def validation_problems(error: ValidationError, prefix: KeyPath, model: type[BaseModel]) -> list[Problem]:
    """Complaints of pydantic about one section, in the file's own words; `model` is that of the whole file."""
    found = []
    for detail in error.errors():
        path = (*prefix, *detail["loc"])
        # pydantic counts the items that were valid; a list long enough in the file is not too short.
        if detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]:
            continue
        _, written = _walk(path, model)
        found.append(Problem(written, _worded(detail, path, model)))
    return found


def _worded(detail: ErrorDetails, path: KeyPath, model: type[BaseModel]) -> str:
    got, kind = _shown(detail["input"]), detail["type"]
    if kind == "extra_forbidden":
        return unknown_key(path, model)
    if kind == "missing":
        return missing_key(path, model)
    if kind == "value_error":
        return f"{detail['ctx']['error']}, got {got}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        members, _ = _walk(path, model)
        return f"expected a table whose key kind is one of {', '.join(tag for m in members for tag in _tags(m))}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"expected a table, got {got}"
    if kind == "tuple_type":
        return f"expected a list, got {got}"
    if kind == "too_short":
        return f"expected at least {detail['ctx']['min_length']} item, got {got}"
    said = detail["msg"].replace("Input should be ", "expected ")
    said = re.sub("^String should match pattern", "expected a text of the form", said)
    said = re.sub("^String should have", "expected a text with", said)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(detail["ctx"]["expected"]))
        return f"{said}, got {got}{nearest(str(detail['input']), choices)}"
    return f"{said}, got {got}"


def _shown(value: object) -> str:
    if isinstance(value, bool | int | float | str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, dict):
        text = "a table"
    elif isinstance(value, tuple):
        text = "a list" if value else "an empty list"
    else:
        text = str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def nearest(word: str, choices: Sequence[str]) -> str:
    """` (did you mean "…"?)` for the closest choice, or nothing when none is close."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f' (did you mean "{close[0]}"?)' if close else ""


def unknown_key(path: KeyPath, model: type[BaseModel]) -> str:
    """Says which key was meant: the nearest of its table, else the table where a key of that name belongs."""
    word = str(path[-1])
    here = sorted(keys_at(path[:-1], model))
    guess = nearest(word, here)
    if not guess:
        homes = [shown_path(home) for home in _tables(model) if word in keys_at(home, model)]
        guess = f' (the key "{word}" belongs in [{homes[0]}])' if homes else ""
    return f"unknown key{guess}; the keys here are {', '.join(here)}"


def missing_key(path: KeyPath, model: type[BaseModel]) -> str:
    """Says what the missing key is for."""
    owner = _table_at(path[:-1], model)
    purpose = description(owner, str(path[-1]), _keys(owner).get(str(path[-1]))) if owner is not None else None
    return f"is missing: {purpose}" if purpose else "is missing"


def keys_at(path: KeyPath, model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Keys of the table at a path, as they are spelled in the file; none where free names are allowed."""
    here = _table_at(path, model)
    return _keys(here) if here is not None else {}


def _table_at(path: KeyPath, model: type[BaseModel]) -> type[BaseModel] | None:
    tables, _ = _walk(path, model)
    return tables[0] if tables else None


def _walk(path: KeyPath, model: type[BaseModel]) -> tuple[list[type[BaseModel]], KeyPath]:
    """The tables that may stand at a path, and the path as in the file: pydantic puts the chosen kind of table in."""
    here: list[type[BaseModel]] = [model]
    written: KeyPath = ()
    for part in path:
        chosen = [table for table in here if len(here) > 1 and part in _tags(table)]
        if chosen:
            here = chosen
            continue
        written = (*written, part)
        if isinstance(part, str):
            field = next((keys[part] for table in here if part in (keys := _keys(table))), None)
            here = list(_models_in(field.annotation)) if field is not None else []
    return here, written


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Values of the key `kind` that mean this table and no other."""
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind is not None else ()


def _keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {str(field.validation_alias or name): field for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _tables(model: type[BaseModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, field in _keys(model).items():
        inner = next(_models_in(field.annotation), None)
        if inner is not None:
            yield (*path, key)
            yield from _tables(inner, (*path, key))
