"""An experiment worded by a person: what is understood, and how a mistake is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.new_todo import from_file, worded
from state.errors import ConfigError
from state.models import Disruption, EnvChange, FlagChange

WHOLE = """
[[experiments]]
id = "spin"
title = "Spin while waiting"
hypothesis = "waking a core costs more than a token"
changes = [{ kind = "hot", name = "poll", value = "100", undo = "50" }]
confidence = 0.8
"""


def test_changes_are_worded_as_on_a_command_line() -> None:
    words = ["flag:--threads=4", "flag:--no-mmap", "env:A=b=c", "without:--mlock", "without:OLD"]
    made = worded(words, {"priority": 0.9, "tags": ("x",), "tier": None}, {"threads-4"})
    assert made.changes == (
        FlagChange(name="--threads", value="4"),
        FlagChange(name="--no-mmap"),
        EnvChange(name="A", value="b=c"),
        FlagChange(name="--mlock", remove=True),
        EnvChange(name="OLD"),
    )
    assert (made.priority, made.tags, made.tier) == (0.9, ("x",), 1)
    assert made.source.kind == "person"
    assert made.disruption is Disruption.RESTART
    assert made.title == "--threads 4, --no-mmap, A=b=c, no --mlock, no OLD"


def test_an_id_that_nobody_gave_is_made_and_is_nobody_elses() -> None:
    assert worded(["flag:--threads=4"], {}, ()).id == "threads-4"
    assert worded(["flag:--threads=4"], {}, {"threads-4", "threads-4-2"}).id == "threads-4-3"
    assert worded(["without:--mlock"], {}, ()).id == "no-mlock"


@pytest.mark.parametrize(
    ("words", "fields", "said"),
    [
        ([], {}, "an experiment needs a change"),
        (["--threads=4"], {}, "--change --threads=4 is no change"),
        (["flag:threads=4"], {}, "is no change"),
        (["env:A"], {}, "is no change"),
        (["without:"], {}, "is no change"),
        (["patch:/srv/x"], {}, "is no change"),
        (["flag:--threads=4"], {"priority": 2.0}, "experiments[0].priority: expected"),
        (["flag:--threads=4"], {"id": "baseline"}, '"baseline" is a name that Ratchet uses itself'),
        (["flag:--threads=4"], {"id": "no id"}, "experiments[0].id: expected a text of the form"),
    ],
)
def test_a_mistake_in_the_words_is_told(words: list[str], fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        worded(words, fields, ())
    assert said in str(raised.value) and raised.value.do


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_holds_one_entry_as_in_a_session_file(as_json: bool, tmp_path: Path) -> None:
    path = tmp_path / ("own.json" if as_json else "own.toml")
    change = {"kind": "hot", "name": "poll", "value": "100", "undo": "50"}
    entry = {"id": "spin", "title": "Spin while waiting", "hypothesis": "h", "changes": [change], "confidence": 0.8}
    path.write_text(json.dumps(entry) if as_json else WHOLE)
    made = from_file(path)
    assert (made.id, made.confidence, made.disruption) == ("spin", 0.8, Disruption.HOT)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "[[experiments]\n", "is not valid TOML"),
        ("a.json", "{\n", "is not valid JSON"),
        ("a.json", "[1]", "holds no experiment"),
        ("a.toml", WHOLE + WHOLE, "holds 2 experiments, expected one"),
        ("a.toml", f"seed = 1\n{WHOLE}", "holds more than experiments: seed"),
        ("a.toml", WHOLE.replace("title", "titel"), "line 4: experiments[0].titel: unknown key"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        from_file(tmp_path / name)
    assert said in str(raised.value)


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        from_file(tmp_path / "none.toml")
