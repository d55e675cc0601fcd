"""The catalogue: every entry is sound, every flag is real, and only what applies to a host is proposed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from agent.catalogue import CatalogueFacts, experiments, fitted, numbers
from agent.catalogue.entries import Book, Entry, ModelTrait, book, engines, read_book
from agent.planners.base import View
from agent.planners.catalogue import CataloguePlanner
from agent.policy import needed_disruption
from state.errors import ConfigError
from state.models import Disruption, Experiment, LaunchSpec
from tools.target import TargetFacts

DATA = Path(__file__).parents[1] / "data"
HELPS = {
    "llamacpp": DATA / "llamacpp" / "help_native.txt",
    "sglang": DATA / "sglang" / "help_0.5.17.txt",
    "vllm": DATA / "vllm" / "help_0.25.1.txt",
}
PROGRAMS = {"llamacpp": "llama-server --help", "sglang": "sglang serve --help", "vllm": "vllm serve --help"}
BOTTLENECKS = frozenset(
    {"communication", "compute", "memory", "scheduling", "launch-overhead", "speculation", "host", "observation"}
)
ENTRIES = book("llamacpp").experiments
EVERY = [(engine, entry) for engine in HELPS for entry in book(engine).experiments]


def options(engine: str) -> dict[str, bool]:
    """Each option of a recorded help by its first long spelling, and each negative one: whether it takes a value."""
    found = {}
    for line in HELPS[engine].read_text().splitlines():
        if not re.match(r"--?\w" if engine == "llamacpp" else r"  --\w", line):
            continue
        # The text begins two blanks after the names; the blanks after a short name end within the first eight columns.
        line = line.lstrip() if engine != "llamacpp" else line
        written = line[:8] + re.split(r"\s{2,}", line[8:].lstrip() if engine == "llamacpp" else line[8:])[0]
        names = re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", written)
        takes_value = re.search(r"(--[a-z][a-z0-9-]*) (?!-)\S", written) is not None
        found |= {name: takes_value for name in (*names[:1], *(name for name in names if name.startswith("--no-")))}
    return found


OPTIONS = {engine: options(engine) for engine in HELPS}
FLAT = {engine: re.sub(r"\s+", " ", path.read_text()) for engine, path in HELPS.items()}
KNOWN = frozenset(OPTIONS["llamacpp"])


def host(
    cores: int = 2,
    flags: dict[str, tuple[str, ...]] | None = None,
    env: dict[str, str] | None = None,
    gpus: int = 0,
    known: frozenset[str] = KNOWN,
    sm: int | None = None,
    version: str = "test",
    model: frozenset[ModelTrait] | None = None,
) -> CatalogueFacts:
    """A small host whose server runs with one thread and one slot, unless told otherwise."""
    return CatalogueFacts(
        cores=cores,
        known_flags=known,
        flags={"--threads": ("1",), "--parallel": ("1",), "--ctx-size": ("2048",)} if flags is None else flags,
        env=env or {},
        mem_available_mb=128000.0,
        gpus=gpus,
        engine_version=version,
        sm=sm,
        model=model,
    )


def by_id(facts: CatalogueFacts) -> dict[str, Experiment]:
    return {experiment.id: experiment for experiment in experiments("llamacpp", facts).experiments}


def changes(facts: CatalogueFacts, name: str) -> list[str]:
    return [str(change) for change in by_id(facts)[name].changes]


def reason(facts: CatalogueFacts, name: str) -> str:
    return dict(experiments("llamacpp", facts).dropped)[name]


def knobs(engine: str) -> set[str]:
    """Distinct flags and variables; of flags that hold JSON, each key."""
    found = set()
    for entry in book(engine).experiments:
        for change in entry.changes:
            keys = re.findall(r'"(\w+)":', change.value or "")
            found |= {f"{change.flag}.{key}" for key in keys} or {change.flag or change.env or ""}
    return found


@pytest.mark.parametrize(("engine", "least"), [("llamacpp", 20), ("sglang", 60), ("vllm", 60)])
def test_there_are_enough_knobs(engine: str, least: int) -> None:
    assert len(knobs(engine)) >= least
    assert any(not entry.changes for entry in book(engine).experiments)


SGLANG = (
    "NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_BUFFSIZE NCCL_ALGO NCCL_PROTO --enable-mscclpp "
    "--disable-custom-all-reduce --enable-single-batch-overlap --enable-two-batch-overlap "
    "--cuda-graph-backend-prefill --cuda-graph-backend-decode --cuda-graph-max-bs-decode --ep-size "
    "--moe-runner-backend --attention-backend --enable-fused-moe-sum-all-reduce "
    "--flashinfer-allreduce-fusion-backend --speculative-algorithm --num-continuous-decode-steps "
    "--chunked-prefill-size --max-running-requests --mem-fraction-static --disable-radix-cache --schedule-policy "
    "--schedule-conservativeness --kv-cache-dtype --quantization --enable-torch-compile --page-size"
)
VLLM = (
    "NCCL_MAX_NCHANNELS NCCL_BUFFSIZE NCCL_ALGO NCCL_PROTO --disable-custom-all-reduce --enable-dbo "
    "--compilation-config.cudagraph_mode --compilation-config.fuse_allreduce_rms --compilation-config.mode "
    "--enable-expert-parallel --moe-backend --attention-backend --speculative-config.method --async-scheduling "
    "--max-num-batched-tokens --max-num-seqs --block-size --gpu-memory-utilization --no-enable-prefix-caching "
    "--no-enable-chunked-prefill --kv-cache-dtype --quantization --optimization-level --enforce-eager"
)


@pytest.mark.parametrize(("engine", "wanted"), [("sglang", SGLANG), ("vllm", VLLM)])
def test_the_knobs_that_campaigns_turn_are_there(engine: str, wanted: str) -> None:
    assert set(wanted.split()) - knobs(engine) == set()


def test_every_way_of_speculating_is_there() -> None:
    for engine, ways in {"sglang": ("NEXTN", "EAGLE", "EAGLE3", "NGRAM"), "vllm": ("mtp", "eagle3", "ngram")}.items():
        tried = {
            str(change.value) for entry in book(engine).experiments for one in entry.each() for change in one.changes
        }
        assert all(any(way == value or f'"{way}"' in value for value in tried) for way in ways)


@pytest.mark.parametrize(("engine", "entry"), EVERY, ids=lambda one: one if isinstance(one, str) else one.id)
def test_an_entry_uses_real_flags_and_says_where_it_comes_from(engine: str, entry: Entry) -> None:
    known, program = OPTIONS[engine], PROGRAMS[engine]
    for change in entry.changes:
        if change.flag is not None:
            assert change.flag in known
            assert change.remove or known[change.flag] == (change.value is not None)
    for name in (*entry.conflicts, *entry.requires):
        assert not name.startswith("--") or name in known
    assert re.match(rf"https://|{program}: --", entry.source)
    if entry.source.startswith(program):
        assert entry.source.split(": ")[1] in known
    assert entry.hypothesis.endswith(".")
    assert "%" not in entry.hypothesis, "numbers of a campaign have no place here"
    assert engine == "llamacpp" or set(entry.tags) & BOTTLENECKS


@pytest.mark.parametrize("entry", book("vllm").experiments, ids=lambda entry: entry.id)
def test_a_value_that_is_json_is_json(entry: Entry) -> None:
    for one in entry.each():
        for change in one.changes:
            if change.value and change.value.startswith('{"'):
                assert isinstance(json.loads(change.value), dict)


@pytest.mark.parametrize(("engine", "entry"), EVERY, ids=lambda one: one if isinstance(one, str) else one.id)
def test_a_value_of_a_list_of_choices_is_on_it(engine: str, entry: Entry) -> None:
    for one in entry.each():
        for change in one.changes:
            choices = re.search(rf" {change.flag} \{{([^}}]+)\}}", FLAT[engine]) if change.flag else None
            if choices and change.value:
                assert change.value in choices[1].split(",")


def test_defaults_are_those_of_the_help_text() -> None:
    for flag, value in book("llamacpp").defaults.items():
        names = rf"{flag}(?: |,)"
        assert flag in KNOWN
        after = re.split(names, FLAT["llamacpp"], maxsplit=1)[1]
        stated = re.search(r"default: '?([^,)']+)'?[,)]|(\w+) \(default\)", after)
        assert stated is not None
        assert value in stated.groups()


def test_vllms_defaults_are_those_of_its_help_text() -> None:
    for flag, value in book("vllm").defaults.items():
        after = FLAT["vllm"].split(f" {flag} ", maxsplit=1)[1]
        assert re.search(r"\(default: ([^)]+)\)", after)[1] == value  # type: ignore[index]


def test_sglangs_defaults_are_those_that_a_running_server_told() -> None:
    told = json.loads((DATA / "sglang" / "server_info_0.5.17.json").read_text())
    for flag, value in book("sglang").defaults.items():
        name = flag.removeprefix("--").replace("-", "_")
        # What is settled only when the server knows the model is null there; the help names it.
        after = FLAT["sglang"].split(f" {flag} ", maxsplit=1)[1]
        named = re.search(r"'(\w+)' \(default", after) or re.search(r"default value is (\d+)", after)
        assert str(told.get(name)) == value or (named and named[1] == value)


PLACES = {
    "llamacpp": ({}, {"--parallel": ("2",), "--ctx-size": ("4096",), "--threads": ("8",)}, {"--spec-type": ("x",)}),
    "sglang": (
        {"--tp-size": ("8",)},
        {"--tp-size": ("8",), "--ep-size": ("8",), "--speculative-draft-model-path": ("d",)},
    ),
    "vllm": (
        {"--tensor-parallel-size": ("4",)},
        {"--data-parallel-size": ("2",), "--speculative-config": ("{}",), "--spec-model": ("d",)},
    ),
}
"""Configurations that differ in what can be tried on them."""
MACHINES = (
    (2, 0, None, "x"),
    (8, 0, None, "x"),
    (64, 8, 90, "9"),
    (64, 8, 100, "9"),
    (64, 8, 120, "9"),
    (64, 8, 90, "0.5.12"),
    (64, 8, 90, "0.26.0"),
)
"""Cores, GPUs, compute capability, version of the engine."""


@pytest.mark.parametrize(("engine", "entry"), EVERY, ids=lambda one: one if isinstance(one, str) else one.id)
def test_every_entry_applies_to_some_host(engine: str, entry: Entry) -> None:
    needed = {name: ("x",) for name in entry.requires}
    removed = {change.flag: () for change in entry.changes if change.remove and change.flag}
    alone = Book(experiments=(entry,), defaults=book(engine).defaults)
    found = set()
    for cores, gpus, sm, version in MACHINES:
        for flags in ({"--threads": ("1",), "--parallel": ("1",), "--ctx-size": ("2048",)}, *PLACES[engine]):
            facts = host(
                cores, removed | flags | needed, gpus=gpus, known=frozenset(OPTIONS[engine]), sm=sm, version=version
            )
            found |= {experiment.id for experiment in fitted(alone, facts).experiments}
    assert {one.id for one in entry.each()} <= found


def test_every_entry_is_proposed_or_dropped_with_a_reason() -> None:
    found = experiments("llamacpp", host())
    ids = [experiment.id for experiment in found.experiments] + [name for name, _ in found.dropped]
    assert sorted(ids) == sorted(one.id for entry in ENTRIES for one in entry.each())
    assert all(text for _, text in found.dropped)


def test_the_order_and_the_result_are_those_of_the_file() -> None:
    first, second = experiments("llamacpp", host()), experiments("llamacpp", host())
    assert first == second
    order = [one.id for entry in ENTRIES for one in entry.each()]
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
        ('value = "{half_cores}"', 'value = "{value}"', "exactly when there are values"),
        ('risk = "none"', 'risk = "none"\nvalues = ["1"]', "exactly when there are values"),
        ('value = "{half_cores}"', 'remove = true, value = "1"', "what is removed has no value"),
        ('risk = "none"', 'risk = "none"\nspan = [4, 2]', "span 4 to 2 does not hold anything"),
        ('risk = "none"', 'risk = "none"\nsince = "new"', "String should match pattern"),
        ('risk = "none"', 'risk = "none"\nmodel = ["small"]', "Input should be 'moe'"),
    ],
)
def test_a_wrong_catalogue_is_refused(old: str, new: str, complaint: str) -> None:
    assert old in ONE
    with pytest.raises(ValidationError, match=complaint):
        read_book(ONE.replace(old, new))


def test_ids_are_unique() -> None:
    with pytest.raises(ValidationError, match="more than one experiment has the id one"):
        read_book(ONE + ONE)


# --- candidates, removals, versions, models ----------------------------------------------------------------

SEVERAL = ONE.replace('"{half_cores}"', '"{value}"').replace(
    'risk = "none"', 'risk = "none"\nspan = [1, 64]\nvalues = ["2", "4", "{spare_cores}"]'
)


def test_candidates_are_one_experiment_each() -> None:
    found = fitted(read_book(SEVERAL.replace('"One"', '"{value} threads"')), host(cores=8)).experiments
    assert [(one.id, one.title, str(one.changes[0])) for one in found] == [
        ("one-2", "2 threads", "--threads-http 2"),
        ("one-4", "4 threads", "--threads-http 4"),
        ("one-spare-cores", "7 threads", "--threads-http 7"),
    ]


def test_a_candidate_outside_the_span_is_refused() -> None:
    with pytest.raises(ValidationError, match="span 1 to 3 does not hold 4"):
        read_book(SEVERAL.replace("[1, 64]", "[1, 3]"))


def test_the_candidate_that_holds_already_is_not_proposed() -> None:
    found = fitted(read_book(SEVERAL), host(cores=8, flags={"--threads-http": ("4",)}))
    assert [one.id for one in found.experiments] == ["one-2", "one-spare-cores"]
    assert found.dropped == (("one-4", "nothing to change: --threads-http 4 holds already"),)


def test_a_removal_is_proposed_only_where_there_is_something_to_remove() -> None:
    written = read_book(ONE.replace('value = "{half_cores}"', "remove = true"))
    assert fitted(written, host()).dropped == (("one", "nothing to change: without --threads-http holds already"),)
    found = fitted(written, host(flags={"--threads-http": ("2",)})).experiments
    assert [(change.name, change.remove) for change in found[0].changes if change.kind == "flag"] == [
        ("--threads-http", True)
    ]


def test_what_is_required_must_be_set() -> None:
    written = read_book(ONE.replace('risk = "none"', 'risk = "none"\nrequires = ["--threads"]'))
    assert len(fitted(written, host()).experiments) == 1
    bare = fitted(written, host(flags={}))
    assert bare.dropped == (("one", "makes sense only beside --threads, which is not set"),)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.5.12", None),
        ("0.5.9.post1", "known from version 0.5.10 on, this is 0.5.9.post1"),
        ("0.5.17", "from version 0.5.17 on it does nothing or is spelled anew, this is 0.5.17"),
        ("0.10.0", "from version 0.5.17 on it does nothing or is spelled anew, this is 0.10.0"),
        ("main", None),
    ],
)
def test_a_version_decides_about_a_variable(version: str, reason: str | None) -> None:
    written = ONE.replace('flag = "--threads-http"', 'env = "SOME_VARIABLE"')
    written = written.replace('risk = "none"', 'risk = "none"\nsince = "0.5.10"\nuntil = "0.5.17"')
    found = fitted(read_book(written), host(version=version))
    assert found.dropped == ((("one", reason),) if reason else ())


def test_whether_a_flag_is_there_yet_is_asked_of_the_server_alone() -> None:
    written = read_book(ONE.replace('risk = "none"', 'risk = "none"\nsince = "9.0"'))
    assert len(fitted(written, host(version="1.0")).experiments) == 1


def test_a_model_that_is_not_of_the_kind_is_a_reason_and_an_unknown_one_is_not() -> None:
    written = read_book(ONE.replace('risk = "none"', 'risk = "none"\nmodel = ["moe", "fp4"]'))
    assert fitted(written, host(model=frozenset({"moe"}))).dropped == (("one", "is for models that are fp4"),)
    assert len(fitted(written, host(model=frozenset({"moe", "fp4"}))).experiments) == 1
    assert len(fitted(written, host()).experiments) == 1


def test_what_changes_the_numbers_says_so() -> None:
    marked = {entry.id for _, entry in EVERY if entry.numerics}
    assert {"kv-q8", "kv-fp8", "weights-fp8", "attention-triton", "moe-triton"} <= marked
    assert not marked & {"spec-ngram", "spec-nextn", "spec-mtp", "mscclpp", "running-requests", "seqs"}
    assert by_id(host())["kv-q8"].numerics and not by_id(host())["threads-all"].numerics


def test_numbers_of_every_engine_are_read() -> None:
    flags = {"--tp-size": ("8",), "--max-num-seqs": ("64",), "--chunked-prefill-size": ("-1",)}
    known = numbers(host(flags=flags, gpus=8, sm=120))
    assert (known["tp"], known["dp"], known["ep"], known["running"], known["sm"]) == (8, 1, 1, 64, 120)
    assert "step_tokens" not in known
    assert "sm" not in numbers(host(gpus=8)) and numbers(host(gpus=0))["sm"] == 0
    assert numbers(host(flags={"--tensor-parallel-size": ("2",), "--spec-method": ("mtp",)}))["speculates"] == 1


def test_engines_with_a_catalogue_are_known_by_name() -> None:
    assert engines() == tuple(sorted(HELPS))


def test_the_planner_asks_with_what_is_known_of_gpu_and_model_and_leaves_numerics_out() -> None:
    facts = TargetFacts(
        cores=64,
        mem_available_mb=500000.0,
        gpus=8,
        known_flags=frozenset(OPTIONS["sglang"]),
        engine_version="0.5.17",
        compute=12.0,
        model={"num_experts": 256, "quantization_config": {"quant_algo": "NVFP4"}},
    )
    spec = LaunchSpec(
        engine="sglang", program=("sglang", "serve"), flags={"--tp-size": ("8",)}, argv=("x",), cwd="/", user="llm"
    )
    proposal = CataloguePlanner().propose(View(engine="sglang", spec=spec, facts=facts))
    ids, dropped = {one.id for one in proposal.experiments}, dict(proposal.dropped)
    assert {"mscclpp", "expert-parallel", "moe-flashinfer-cutlass", "piecewise-graphs"} <= ids
    assert dropped["moe-flashinfer-trtllm"] == "wants sm below 120, it is 120"
    assert dropped["spec-nextn"] == "is for models that are mtp"
    assert dropped["weights-fp8"] == "is not for models that are fp4"
    exact = CataloguePlanner(skip=("numerics",)).propose(View(engine="sglang", spec=spec, facts=facts))
    left = {one.id for one in exact.experiments}
    assert "mscclpp" in left and not left & {"moe-flashinfer-cutlass", "kv-fp8-fp8-e4m3"}


def test_without_a_gpu_nothing_for_gpus_is_proposed() -> None:
    found = experiments("vllm", host(flags={}, known=frozenset(OPTIONS["vllm"]))).experiments
    ids = {experiment.id for experiment in found}
    assert {"seqs-64", "cpu-kv-space-4", "cpu-reserved-1", "spec-ngram-3"} <= ids
    assert not {name for name in ids if name.startswith(("attention-", "moe-", "nccl-", "gpu-", "kv-fp8", "weights-"))}


def test_an_engine_without_a_catalogue_has_what_a_person_wrote_down() -> None:
    facts = TargetFacts(cores=2, mem_available_mb=1.0, gpus=0, known_flags=frozenset(), engine_version="1")
    spec = LaunchSpec(engine="abacus", program=("abacus",), flags={}, argv=("abacus",), cwd="/", user="u")
    own = Experiment(id="mine", title="mine", hypothesis="It helps.")
    proposal = CataloguePlanner(own=(own,)).propose(View(engine="abacus", spec=spec, facts=facts))
    assert proposal.experiments == (own,)
    assert proposal.reason == "there is no catalogue for abacus, 1 are from the session file"
