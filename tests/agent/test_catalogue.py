"""The catalogue: every entry is sound, every flag is real, and only what applies to a host is proposed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from agent.catalogue import CatalogueFacts, experiments, fitted, numbers
from agent.catalogue.entries import Entry, book, read_book
from agent.policy import needed_disruption
from state.errors import ConfigError
from state.models import Disruption, Experiment

HELP = (Path(__file__).parents[1] / "data" / "llamacpp" / "help_native.txt").read_text()
ENTRIES = book("llamacpp").experiments
OPTIONS = [line for line in HELP.splitlines() if re.match(r"--?\w", line)]


def known_flags() -> frozenset[str]:
    """First long spelling of each option in the recorded help, and each negative spelling."""
    found = set()
    for line in OPTIONS:
        # The text begins two blanks after the names; the blanks after a short name end within the first eight columns.
        names = re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", line[:8] + re.split(r"\s{2,}", line[8:].lstrip())[0])
        found |= {*names[:1], *(name for name in names if name.startswith("--no-"))}
    return frozenset(found)


KNOWN = known_flags()


def host(
    cores: int = 2,
    flags: dict[str, tuple[str, ...]] | None = None,
    env: dict[str, str] | None = None,
    gpus: int = 0,
    known: frozenset[str] = KNOWN,
) -> CatalogueFacts:
    """A small host whose server runs with one thread and one slot, unless told otherwise."""
    return CatalogueFacts(
        cores=cores,
        known_flags=known,
        flags={"--threads": ("1",), "--parallel": ("1",), "--ctx-size": ("2048",)} if flags is None else flags,
        env=env or {},
        mem_available_mb=8000.0,
        gpus=gpus,
        engine_version="test",
    )


def by_id(facts: CatalogueFacts) -> dict[str, Experiment]:
    return {experiment.id: experiment for experiment in experiments("llamacpp", facts).experiments}


def changes(facts: CatalogueFacts, name: str) -> list[str]:
    return [str(change) for change in by_id(facts)[name].changes]


def reason(facts: CatalogueFacts, name: str) -> str:
    return dict(experiments("llamacpp", facts).dropped)[name]


def test_there_are_enough_ideas() -> None:
    assert len(ENTRIES) >= 20
    assert any(not entry.changes for entry in ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_uses_real_flags_and_says_where_it_comes_from(entry: Entry) -> None:
    for change in entry.changes:
        if change.flag is not None:
            assert change.flag in KNOWN
            takes_value = any(re.search(rf"{change.flag} [^\s-]", line[:60]) for line in OPTIONS)
            assert takes_value == (change.value is not None)
    for name in entry.conflicts:
        assert not name.startswith("--") or name in KNOWN
    assert re.match(r"https://|llama-server --help: --", entry.source)
    if entry.source.startswith("llama-server"):
        assert entry.source.split(": ")[1] in KNOWN
    assert entry.hypothesis.endswith(".")
    assert "%" not in entry.hypothesis, "numbers of a campaign have no place here"


def test_defaults_are_those_of_the_help_text() -> None:
    flat = re.sub(r"\s+", " ", HELP)
    for flag, value in book("llamacpp").defaults.items():
        names = rf"{flag}(?: |,)"
        assert flag in KNOWN
        after = re.split(names, flat, maxsplit=1)[1]
        stated = re.search(r"default: '?([^,)']+)'?[,)]|(\w+) \(default\)", after)
        assert stated is not None
        assert value in stated.groups()


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.changes], ids=lambda entry: entry.id)
def test_every_entry_applies_to_some_host(entry: Entry) -> None:
    hosts = [
        host(),
        host(cores=32, gpus=2),
        host(cores=8, flags={"--threads": ("8",), "--parallel": ("2",), "--ctx-size": ("4096",)}),
    ]
    assert any(entry.id in by_id(facts) for facts in hosts)


def test_every_entry_is_proposed_or_dropped_with_a_reason() -> None:
    found = experiments("llamacpp", host())
    ids = [experiment.id for experiment in found.experiments] + [name for name, _ in found.dropped]
    assert sorted(ids) == sorted(entry.id for entry in ENTRIES)
    assert all(text for _, text in found.dropped)


def test_the_order_and_the_result_are_those_of_the_file() -> None:
    first, second = experiments("llamacpp", host()), experiments("llamacpp", host())
    assert first == second
    order = [entry.id for entry in ENTRIES]
    assert sorted(by_id(host()), key=order.index) == list(by_id(host()))


def test_proposals_carry_everything_a_person_wants_to_know() -> None:
    for experiment in by_id(host(cores=8, gpus=2)).values():
        assert experiment.hypothesis and experiment.risk and experiment.tags
        assert experiment.source.kind == "catalogue" and experiment.source.ref
        assert "{" not in experiment.title + "".join(map(str, experiment.changes))
        assert needed_disruption(experiment) == experiment.disruption


def test_an_observation_costs_load_and_changes_nothing() -> None:
    observation = by_id(host())["observe-load-points"]
    assert observation.changes == ()
    assert observation.disruption is Disruption.LOAD


def test_values_follow_the_host() -> None:
    assert changes(host(cores=2), "threads-all") == ["--threads 2"]
    assert changes(host(cores=16), "threads-half") == ["--threads 8"]
    assert by_id(host(cores=16))["threads-all"].title == "One thread per core (16)"


def test_slots_keep_the_context_of_each_request() -> None:
    assert changes(host(), "slots-4") == ["--parallel 4", "--ctx-size 8192"]
    two = host(flags={"--parallel": ("2",), "--ctx-size": ("4096",)})
    assert changes(two, "slots-8") == ["--parallel 8", "--ctx-size 16384"]
    assert reason(two, "slots-2") == "wants slots below 2, it is 2"


def test_slots_that_share_a_context_go_on_sharing_it() -> None:
    shared = host(flags={"--parallel": ("2",), "--ctx-size": ("4096",), "--kv-unified": ()})
    assert reason(shared, "slots-4") == "wants unified below 1, it is 1"
    assert changes(shared, "slots-4-shared") == ["--parallel 4"]


def test_without_a_stated_context_it_is_not_guessed() -> None:
    bare = host(flags={"--parallel": ("1",)})
    assert reason(bare, "slots-4") == "ctx_per_slot is not stated by the running configuration"
    assert changes(bare, "slots-4-shared") == ["--parallel 4", "--kv-unified"]


def test_a_server_that_chooses_its_slots_has_four_that_share() -> None:
    known = numbers(host(flags={"--ctx-size": ("8192",)}))
    assert (known["slots"], known["unified"], known["ctx_per_slot"]) == (4, 1, 8192)
    assert numbers(host(flags={"--parallel": ("-1",)}))["slots"] == 4


def test_a_flag_that_the_server_lacks_is_a_reason() -> None:
    facts = host(known=KNOWN - {"--spec-type"})
    assert reason(facts, "spec-ngram-mod") == "this server has no --spec-type"


@pytest.mark.parametrize(
    ("flags", "env", "name"),
    [
        ({"--poll": ("0",)}, {}, "poll-none"),
        ({"--no-repack": ()}, {}, "no-repack"),
        ({}, {"OMP_WAIT_POLICY": "passive"}, "omp-wait-passive"),
        ({"--ubatch-size": ("2048",), "--batch-size": ("2048",)}, {}, "ubatch-2048"),
        ({"--flash-attn": ("on",), "--cache-type-k": ("q8_0",), "--cache-type-v": ("q8_0",)}, {}, "kv-q8"),
    ],
)
def test_what_holds_already_is_not_proposed(flags: dict[str, tuple[str, ...]], env: dict[str, str], name: str) -> None:
    assert reason(host(flags=flags, env=env, gpus=1), name).startswith("nothing to change: ")


def test_only_what_differs_is_changed() -> None:
    assert changes(host(flags={"--flash-attn": ("on",)}), "kv-q8") == ["--cache-type-k q8_0", "--cache-type-v q8_0"]
    assert changes(host(gpus=1), "ubatch-2048") == ["--ubatch-size 2048"]


def test_what_clashes_with_the_configuration_is_left_out() -> None:
    facts = host(env={"OMP_PROC_BIND": "true"})
    assert reason(facts, "cpu-strict") == "does not go with OMP_PROC_BIND, which is set"
    quantised = host(flags={"--flash-attn": ("on",), "--cache-type-v": ("q8_0",)})
    assert reason(quantised, "flash-attn-off") == "wants quantised_v below 1, it is 1"


def test_two_entries_that_mean_the_same_here_are_one() -> None:
    written = read_book(ONE + ONE.replace('"one"', '"two"').replace('"{half_cores}"', '"{spare_cores}"'))
    found = fitted(written, host(cores=2))
    assert [experiment.id for experiment in found.experiments] == ["one"]
    assert found.dropped == (("two", "on this host it is the same as one"),)
    assert len(fitted(written, host(cores=8)).experiments) == 2


def test_nothing_is_known_of_a_generic_server() -> None:
    assert experiments("generic", host()).experiments == ()


def test_an_engine_without_a_catalogue_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match='no catalogue for the engine "abacus"'):
        experiments("abacus", host())


ONE = """
[[experiments]]
id = "one"
title = "One"
hypothesis = "It helps."
changes = [{ flag = "--threads-http", value = "{half_cores}" }]
tags = ["threads"]
tier = 1
priority = 0.5
expected_gain = 0.1
risk = "none"
load_hint = "any"
source = "llama-server --help: --threads-http"
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("{half_cores}", "{moon}", "moon: not among the names"),
        ('risk = "none"', 'risk = "none"\nwhen = { below = { moon = 1 } }', "moon: not among the names"),
        ('risk = "none"', 'risk = "none"\nwhen = { below = { slots = "moon" } }', "moon: not among the names"),
        ('flag = "--threads-http", ', 'flag = "--threads-http", env = "A", ', "one flag or of one variable"),
        ('{ flag = "--threads-http", value = "{half_cores}" }', '{ env = "A" }', "a variable needs a value"),
        ('[{ flag = "--threads-http", value = "{half_cores}" }]', "[]", "an observation says what it costs"),
        ('"--threads-http", value', '"-t", value', "String should match pattern"),
        ('source = "llama', 'surce = "llama', "surce"),
    ],
)
def test_a_wrong_catalogue_is_refused(old: str, new: str, complaint: str) -> None:
    assert old in ONE
    with pytest.raises(ValidationError, match=complaint):
        read_book(ONE.replace(old, new))


def test_ids_are_unique() -> None:
    with pytest.raises(ValidationError, match="more than one experiment has the id one"):
        read_book(ONE + ONE)
