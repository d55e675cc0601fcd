"""The session file: complete and minimal ones load, wrong ones name every problem with its line."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent.config import SessionConfig, load, seconds
from agent.config_checks import RESERVED
from agent.config_lines import KeyPath, line_of, locate
from agent.config_schema import schema, schema_text
from agent.evidence import BUILT_IN
from state.errors import ConfigError
from state.models import Budget, Disruption, LoadHint, Policy
from tools.benches.builtin import Builtin
from tools.benches.choice import bench_client
from tools.benches.sglang_bench import SglangBench

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "config"
WRONG = sorted(path for path in DATA.glob("*.toml") if "# expect: " in path.read_text())


def with_change(tmp_path: Path, old: str, new: str) -> Path:
    """The minimal session file with one piece of text replaced."""
    text = (DATA / "least.toml").read_text()
    assert old in text
    path = tmp_path / "session.toml"
    path.write_text(text.replace(old, new))
    return path


def test_every_key_of_a_full_file_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(DATA / "full.toml")
    assert config.target.identity_file == Path("/home/someone/.ssh/id_ratchet")
    assert config.server.url == "http://127.0.0.1:8080"
    assert config.server.port == 8080
    assert config.workload.point("busy").prompt == "repetitive"
    assert config.policy.max_disruption is Disruption.RESTART
    assert isinstance(config.policy, Policy)
    assert isinstance(config.policy.budget, Budget)
    assert config.policy.budget.time_s == 5400
    assert config.planner.only == ("threads",)
    assert config.planner.model is not None
    assert (config.planner.model.base_url, config.planner.model.max_cost) == ("https://llm.example.net/v1", 2.5)
    first, second, third = config.experiments
    assert [str(change) for change in first.changes] == [
        "--threads 2",
        "--no-mmap",
        "without --mlock",
        "OMP_PROC_BIND=close",
    ]
    assert (first.load_hint, first.disruption) == (LoadHint.HIGH, Disruption.RESTART)
    assert second.source.kind == "person"
    assert (second.disruption, third.disruption) == (Disruption.HOT, Disruption.RESTART)
    assert [change.kind for change in third.changes] == ["patch", "package", "checkout", "command"]
    assert [one.name for one in config.server.generic.hot] == ["work_mem", "workers"]


def test_a_full_file_mentions_every_section_and_key() -> None:
    raw = tomllib.loads((DATA / "full.toml").read_text())
    published = schema(SessionConfig)
    assert set(raw) == set(published["properties"])
    for name in ("target", "server", "manners", "planner", "notify"):
        assert set(raw[name]) == set(published["$defs"][f"{name.title()}Section"]["properties"])


def test_the_least_file_gets_the_defaults() -> None:
    config = load(DATA / "least.toml")
    assert config.server.url == "http://127.0.0.1:8102"
    assert config.policy.budget.time_s == 8 * 3600
    assert config.seed == 1


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_a_wrong_file_names_every_problem(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path)
    said = str(caught.value)
    for line in path.read_text().splitlines():
        if line.startswith("# expect: "):
            assert line.removeprefix("# expect: ") in said
    assert caught.value.exit_code == 2
    assert caught.value.do


@pytest.mark.parametrize(
    "name",
    [
        "wrong_keys",
        "wrong_values",
        "wrong_experiments",
        "wrong_generic",
        "wrong_model",
        "contradictions",
        "contradicting_manners",
    ],
)
def test_problems_stand_in_the_order_of_the_file_and_none_is_unexpected(name: str) -> None:
    path = DATA / f"{name}.toml"
    with pytest.raises(ConfigError) as caught:
        load(path)
    said = [line.split(":")[0].strip() for line in caught.value.what.splitlines()[1:]]
    lines = [int(text.removeprefix("line ")) for text in said]
    assert lines == sorted(lines)
    assert len(lines) == path.read_text().count("# expect: line ")


def test_no_experiment_of_a_person_can_be_taken_for_one_of_the_loop() -> None:
    assert set(RESERVED) >= BUILT_IN


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no session file") as caught:
        load(tmp_path / "none.toml")
    assert "own-server.md" in caught.value.do


def test_a_folder_is_not_a_session_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session.toml"
    path.write_bytes(b'name = "\xff"\n')
    with pytest.raises(ConfigError, match="is not UTF-8: byte 8"):
        load(path)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "session.toml"
    path.write_bytes(b"\xef\xbb\xbf" + (DATA / "least.toml").read_bytes().replace(b"\n", b"\r\n"))
    assert load(path) == load(DATA / "least.toml")


@pytest.mark.parametrize(
    ("text", "wanted"), [("8h", 28800.0), ("30m", 1800.0), ("90s", 90.0), (" 1.5 h ", 5400.0), ("1d", 86400.0)]
)
def test_durations_as_people_write_them(text: str, wanted: float) -> None:
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "8", "h", "8 hours", "-1h", "1e3s", "8h30m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        seconds(text)


@pytest.mark.parametrize(
    ("url", "port"), [("http://127.0.0.1:9000", 9000), ("https://box", 443), ("http://[::1]:8102/", 8102)]
)
def test_the_port_comes_from_the_url(tmp_path: Path, url: str, port: int) -> None:
    config = load(with_change(tmp_path, "[workload]", f'[server]\nurl = "{url}"\n[workload]'))
    assert config.server.port == port


@pytest.mark.parametrize(
    "url", ["box:80", "ftp://box", "http://", "http://u:p@box", "http://box/v1", "http://box:99999"]
)
def test_a_url_that_is_more_or_less_than_host_and_port_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"line 8: server\.url: expected a plain http"):
        load(with_change(tmp_path, "[workload]", f'[server]\nurl = "{url}"\n[workload]'))


def test_a_session_that_only_observes_needs_no_restarts(tmp_path: Path) -> None:
    budget = 'max_disruption = "load"\nbudget.restarts = 0'
    config = load(with_change(tmp_path, "[workload]", f"[policy]\n{budget}\n[workload]"))
    assert config.policy.max_disruption is Disruption.LOAD


def test_revision_ignores_comments_and_order_and_sees_values(tmp_path: Path) -> None:
    base = load(DATA / "least.toml")
    comment = load(with_change(tmp_path, "# The least", "# the very least"))
    order = load(with_change(tmp_path, 'host = "127.0.0.1"\nuser = "llm"', 'user = "llm"\nhost = "127.0.0.1"'))
    other = load(with_change(tmp_path, "requests = 2", "requests = 3"))
    assert base.revision == comment.revision == order.revision
    assert base.revision != other.revision


@pytest.mark.parametrize("name", ["full", "least"])
def test_the_canonical_text_is_the_same_configuration(name: str) -> None:
    config = load(DATA / f"{name}.toml")
    again = SessionConfig.model_validate_json(config.canonical)
    assert again == config
    assert again.revision == config.revision


def test_contradictions_are_refused_without_a_file_too() -> None:
    plain = json.loads(load(DATA / "least.toml").canonical)
    plain["workload"]["objective"]["at"] = ["two"]
    with pytest.raises(ValidationError, match='no load point "two"'):
        SessionConfig.model_validate(plain)


# --- the published schema ---


def test_the_published_schema_is_current() -> None:
    published = (ROOT / "agent" / "session.schema.json").read_text()
    assert published == schema_text(SessionConfig), "run: python -m agent.config --schema > agent/session.schema.json"


def test_the_schema_is_printed_on_demand() -> None:
    command = [sys.executable, "-m", "agent.config", "--schema"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == schema(SessionConfig)


def test_every_key_of_the_schema_is_described() -> None:
    whole = schema(SessionConfig)
    tables = {"": whole, **whole["$defs"]}
    bare = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key, field in table.get("properties", {}).items()
        if not field.get("description")
    ]
    assert bare == []


# --- where keys stand ---


def paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every path in parsed TOML."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths(item, (*path, index))


@pytest.mark.parametrize("path", sorted(DATA.glob("[!s]*.toml")), ids=lambda path: path.stem)
def test_every_key_of_a_file_is_located_on_a_line_that_shows_it(path: Path) -> None:
    text = path.read_text()
    lines, found = text.splitlines(), locate(text)
    parsed = list(paths(tomllib.loads(text)))
    assert set(parsed) == set(found)
    for key in parsed:
        if isinstance(key[-1], str):
            assert key[-1] in lines[found[key] - 1]


TRICKY = r'''
a.b."c.d" = 1 # [not.a.table]
'e f' = """
[nor.this]
key = "\""" \\""""" # ends with two quotes
"\u00e9" = 2
text = 'c:\' # a backslash
long = \'\'\'
x = [ "
'\'\'\'
list = [ # comment ]
  "one, ]", 2,
  [ 3, { in = 4, "of" = [ 5 ] } ], # }
]
date = 1979-05-27 07:32:00
[ tab . "le" ] # spaced
k = { x = { y = 1 } , z = "}" }
[[array]]
n = 1
[array.sub]
m = 1
[[array.deep]]
d = 1
[[array]]
n = 2
[[array.deep]]
d = 2
[[array.deep]]
d = 3
[last]
end = true'''.replace(r"\'\'\'", "'''")


def test_the_locator_follows_toml_where_it_is_tricky() -> None:
    found = locate(TRICKY)
    assert set(found) == set(paths(tomllib.loads(TRICKY)))
    wanted: dict[KeyPath, int] = {
        ("a",): 2,
        ("a", "b", "c.d"): 2,
        ("e f",): 3,
        ("é",): 6,
        ("text",): 7,
        ("long",): 8,
        ("list",): 11,
        ("list", 0): 12,
        ("list", 2, 1, "in"): 13,
        ("list", 2, 1, "of", 0): 13,
        ("date",): 15,
        ("tab", "le"): 16,
        ("tab", "le", "k", "x", "y"): 17,
        ("array",): 18,
        ("array", 0, "sub", "m"): 21,
        ("array", 0, "deep", 0, "d"): 23,
        ("array", 1): 24,
        ("array", 1, "deep", 0, "d"): 27,
        ("array", 1, "deep", 1, "d"): 29,
        ("last", "end"): 31,
    }
    assert {path: found[path] for path in wanted} == wanted


def test_what_is_not_there_has_the_line_of_what_holds_it() -> None:
    found = locate("[a]\nb = 1\n\n[a.c]\n")
    assert line_of(("a", "c", "missing"), found) == 4
    assert line_of(("a", "missing"), found) == 1
    assert line_of(("missing",), found) is None


EXTERNAL = """
[workload]
client = "sglang"
client_command = ["/srv/venv/bin/python", "-m", "sglang.bench_serving"]
tokenizer = "/srv/models/smollm2"
"""


def external(tmp_path: Path, old: str = "", new: str = "", server: str = 'model = "smollm2"') -> Path:
    text = (DATA / "least.toml").read_text().replace("[workload]\n", EXTERNAL) + f"[server]\n{server}\n"
    path = tmp_path / "session.toml"
    path.write_text(text.replace(old, new))
    return path


def test_another_client_makes_another_workload(tmp_path: Path) -> None:
    config, plain = load(external(tmp_path)), load(DATA / "least.toml")
    assert isinstance(bench_client(config.workload), SglangBench)
    assert isinstance(bench_client(plain.workload), Builtin)
    other = load(external(tmp_path, "/srv/models/smollm2", "/srv/models/other"))
    assert len({config.workload.revision, plain.workload.revision, other.workload.revision}) == 3


@pytest.mark.parametrize(
    ("old", "new", "server", "said"),
    [
        ('client = "sglang"\n', "", 'model = "m"', "workload.client_command: it is for an external client"),
        (
            'client_command = ["/srv/venv/bin/python", "-m", "sglang.bench_serving"]\n',
            "",
            'model = "m"',
            "client_command",
        ),
        ('tokenizer = "/srv/models/smollm2"\n', "", 'model = "m"', "sglang needs tokenizer"),
        ("", "", "start_deadline_s = 9", "sglang needs the model's name as server.model"),
        ("requests = 2", 'requests = 2, prompt = "repetitive"', 'model = "m"', 'only the built-in client sends "repet'),
        ('client = "sglang"', 'client = "sglang"\nendpoint = "/x"', 'model = "m"', "sglang measures /v1/completions"),
        ('client = "sglang"', 'client = "aiperf"', 'model = "m"\napi_key_file = "/k"', "where everybody on the host"),
        ('client = "sglang"', 'client = "sglnag"', 'model = "m"', "workload.client"),
        (
            'client = "sglang"',
            'client = "sglang"\nclient_args = ["--api-key=abc"]',
            'model = "m"',
            "workload.client_args: a secret must not stand in the session file",
        ),
        (
            'client = "sglang"',
            'client = "sglang"\nclient_args = ["--header", "Authorization: Bearer abc"]',
            'model = "m"',
            "a secret must not stand in the session file",
        ),
    ],
)
def test_what_a_client_cannot_measure_is_refused(tmp_path: Path, old: str, new: str, server: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(external(tmp_path, old, new, server))
    assert said in str(caught.value)


def test_an_address_with_a_password_is_no_option_for_a_file_that_is_shown(tmp_path: Path) -> None:
    text = (
        (DATA / "least.toml").read_text()
        + """
[[experiments]]
id = "newer"
title = "t"
hypothesis = "h"
changes = [
    { kind = "package", requirements = ["x==1"], options = ["--index-url", "https://me:hunter2@pypi.example/simple"] },
]
"""
    )
    path = tmp_path / "session.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="an address with a password"):
        load(path)
    path.write_text(text.replace("me:hunter2@", ""))
    assert load(path).experiments[0].id == "newer"
