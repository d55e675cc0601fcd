"""The schema of an answer: what fits it names real flags with values that could be right, in words that all take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from agent.briefing import hints
from agent.planners.dials import dials
from agent.planners.screen import screen
from agent.planners.shape import GAINS, MOST_NAMES, exact, general, wishes
from agent.planners.table import Briefing, open_flags, open_variables
from state.models import Todo
from tests.agent.model_sessions import change, idea
from tests.agent.sim import flag
from tests.agent.test_screen import BOUNDS, PARENT, derived
from tests.agent.test_table import BRIEFING

TOLD: Briefing = BRIEFING.model_copy(update={"spec": PARENT, "variables": ("OMP_WAIT_POLICY", "OMP_PLACES")})


def schema(*todos: Todo, least: int = 1) -> dict[str, Any]:
    """Of the real help text's flags, through JSON as it is sent."""
    turned = dials(open_flags(TOLD), open_variables(TOLD), TOLD.spec, hints(TOLD, list(todos)))
    granted = wishes(["--threads"], ["e1"], source=True)
    found: dict[str, Any] = json.loads(json.dumps(exact(turned, granted, least)))
    return found


def branches(of: Mapping[str, Any]) -> list[dict[str, Any]]:
    change = of["properties"]["experiments"]["items"]["properties"]["changes"]["items"]
    return [branch["properties"] for branch in change["anyOf"]]


def samples(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Values at the edges of what a schema allows."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from samples(one)
    elif "const" in schema:
        yield schema["const"]
    elif "enum" in schema:
        yield from schema["enum"]
    elif schema["type"] == "integer":
        yield from {schema["minimum"], schema["maximum"]}
    elif schema["type"] == "null":
        yield None
    else:
        yield "0"


def test_whatever_fits_the_schema_is_a_change_that_the_live_server_takes() -> None:
    wrong = []
    for branch in branches(schema()):
        for name in samples(branch["name"]):
            for value in samples(branch["value"]):
                said = {key: branch[key]["const"] for key in ("kind", "action")} | {"name": name, "value": value}
                refused = screen([idea(said)], BOUNDS).refused
                wrong += [str(one.why) for one in refused if not re.search(ALLOWED, one.why)]
    assert wrong == []


ALLOWED = r"which would (not )?be set|already runs like this|is for models that|outside what is sensible|overrules"
"""What one value alone cannot know: its partners, and that a default has another spelling."""


def test_only_words_are_used_that_endpoints_agree_on() -> None:
    used = set(re.findall(r'"([a-zA-Z]+)": (?=[\[{"0-9tf])', json.dumps(schema())))
    known = {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "minItems",
        "maxItems",
        "anyOf",
        "const",
    }
    fields = {"name", "kind", "action", "value", "title", "hypothesis", "changes", "risk", "reason", "experiments"}
    fields |= {"expected_gain", "look_ups", "of", "files"}
    assert used - fields == known | {"enum", "pattern", "minimum", "maximum"}
    for branch in branches(schema()):
        assert next(iter(branch)) == "name"


def test_it_stays_within_what_a_hosted_service_takes() -> None:
    def listed(part: object) -> int:
        if isinstance(part, dict):
            return len(part.get("enum", ())) + sum(map(listed, part.values()))
        return sum(map(listed, part)) if isinstance(part, list) else 0

    assert listed(schema()) < 1000
    names = [branch["name"]["const"] for branch in branches(schema()) if "const" in branch["name"]]
    assert len(names) == len(set(names))


def test_bounds_come_from_the_help_the_catalogue_and_what_runs() -> None:
    values = {b["name"].get("const"): b["value"] for b in branches(schema())}
    assert values["--poll"] == {"type": "integer", "minimum": 0, "maximum": 100}
    assert values["--spec-draft-n-max"] == {"type": "integer", "minimum": 1, "maximum": 64}
    assert values["--threads"]["maximum"] == 4 * TOLD.facts.cores
    assert values["--cpu-strict"]["enum"] == ["0", "1"]
    assert values["OMP_WAIT_POLICY"]["enum"] == ["passive", "active"]
    assert "--ctx-size" not in values, "the session keeps it"


def test_what_was_tried_alone_is_not_offered_again() -> None:
    todos = [
        Todo(experiment=flag("--flash-attn", "on"), priority=0.5),
        Todo(experiment=flag("--poll", "0"), priority=1),
    ]
    values = {b["name"].get("const"): b["value"] for b in branches(schema(*todos))}
    before = {b["name"].get("const"): b["value"] for b in branches(schema())}
    assert set(before["--flash-attn"]["enum"]) - set(values["--flash-attn"]["enum"]) == {"on"}
    assert values["--poll"] == before["--poll"]


def test_an_answer_has_at_least_as_many_ideas_as_asked_for() -> None:
    experiments = schema(least=2)["properties"]["experiments"]
    assert (experiments["minItems"], experiments["maxItems"]) == (2, 3)
    assert experiments["items"]["properties"]["expected_gain"]["enum"] == list(GAINS)


def test_texts_are_bounded_by_their_pattern() -> None:
    title = schema()["properties"]["experiments"]["items"]["properties"]["title"]["pattern"]
    assert re.fullmatch(title, "Two threads, not one (2 cores)")
    assert not re.fullmatch(title, "x" * 61)
    assert not re.fullmatch(title, 'end"of text')


def test_only_what_may_be_looked_up_can_be_asked_for() -> None:
    kinds = [one["properties"]["kind"]["const"] for one in wishes(["--threads"], ["e1"], source=False)]
    assert kinds == ["help", "log", "telemetry"]
    assert schema()["properties"]["look_ups"]["maxItems"] == 3
    turned = dials(open_flags(TOLD), (), TOLD.spec, {})
    assert exact(turned, (), 0)["properties"]["look_ups"]["maxItems"] == 0


def test_without_anything_to_change_the_general_form_stands_in() -> None:
    assert exact((), (), 0) == general(())


def test_the_general_schema_names_what_may_be_changed_unless_that_is_too_much() -> None:
    few, many = general(["--threads", "OMP_NUM_THREADS"]), general([f"--{n}" for n in range(MOST_NAMES + 1)])
    names = [
        one["properties"]["experiments"]["items"]["properties"]["changes"]["items"]["properties"]["name"]
        for one in (few, many)
    ]
    assert names == [{"type": "string", "enum": ["--threads", "OMP_NUM_THREADS"]}, {"type": "string"}]


@pytest.mark.parametrize("made", [general(["--threads"]), schema()], ids=["general", "exact"])
def test_every_object_of_a_schema_is_strict(made: Mapping[str, Any]) -> None:
    def objects(part: object) -> list[dict[str, Any]]:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        own = [part] if isinstance(part, dict) and part.get("type") == "object" else []
        return own + [found for one in inner for found in objects(one)]

    found = objects(made)
    assert len(found) >= 4
    for one in found:
        assert one["additionalProperties"] is False
        assert one["required"] == list(one["properties"])


def test_a_change_that_was_made_up_for_the_schema_is_one() -> None:
    assert derived(screen([idea(change("--threads", "2"))], BOUNDS).accepted[0].changes).flags["--threads"] == ("2",)
