"""The search benchmark: what it takes for true, that every planner is paid alike, its sessions, tables and goals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.searching import models, ours, rivals
from benchmarks.searching.outcome import Moment, Search, read
from benchmarks.searching.pooling import pooled
from benchmarks.searching.scores import arrival_s, missed, pair_row, planner_row, worth
from benchmarks.searching.sessions import session_config
from benchmarks.searching.surfaces import Surface, load
from state.exchanges import Ask
from state.models import FlagChange, LaunchSpec
from tests.benchmarks.surfaces import GAINS, REFUSED, SPACE, launches, planted, surface, write

pytestmark = pytest.mark.anyio
PROJECT = Path(__file__).resolve().parents[2]
DATA = PROJECT / "benchmarks" / "data"
GOAL = tomllib.loads((PROJECT / "benchmarks" / "goals.toml").read_text())["search"]
BEST = ("2", "on", "f16", "active")
REFUSING = ("1", "off", "q8_0", "passive")


# --- what is true --------------------------------------------------------------------------------------------


def test_pooling_draws_a_lucky_setting_towards_what_its_knobs_do() -> None:
    luck = np.random.default_rng(1)
    settings = [(a, b, c) for a in "01234" for b in "01234" for c in "0123" for _ in range(2)]
    truth = {one: 0.1 * int(one[0]) - 0.2 * int(one[1]) + 0.05 * int(one[2]) for one in settings}
    told = pooled(settings, [truth[one] + luck.normal(0, 0.05) for one in settings])
    off_raw = np.mean([(told.raw[one] - truth[one]) ** 2 for one in truth])
    off_pooled = np.mean([(told.estimate[one] - truth[one]) ** 2 for one in truth])
    assert off_pooled < off_raw / 1.3
    assert told.launch_sd == pytest.approx(0.05, rel=0.2)
    assert told.setting_sd < 0.03


def test_pooling_leaves_a_setting_alone_where_repeats_agree_and_the_fit_does_not() -> None:
    luck = np.random.default_rng(2)
    settings = [(a, b, c) for a in "0123" for b in "0123" for c in "0123" for _ in range(2)]
    own = {one: luck.normal(0, 0.3) for one in dict.fromkeys(settings)}
    told = pooled(settings, [own[one] + luck.normal(0, 0.01) for one in settings])
    for one in own:
        assert told.estimate[one] == pytest.approx(told.raw[one], abs=0.01)
    assert told.setting_sd == pytest.approx(0.3, rel=0.3)


def test_a_recording_is_read_as_what_was_planted() -> None:
    known = surface()
    assert known.best() == BEST
    assert known.truth(REFUSING) is None
    for setting in known.settings:
        value = known.truth(setting)
        if value is not None:
            assert value == pytest.approx(planted(setting) + math.log(2) / 2, abs=0.02)
    assert known.found == ("1", "off", "f16", "passive")


def test_launches_and_runs_show_what_was_recorded_and_the_same_names_the_same_luck() -> None:
    known = surface(noise=0.02)
    assert {known.launch(REFUSING, str(n)).failure for n in range(5)} == {REFUSED}
    assert {known.launch(BEST, str(n)).seconds for n in range(20)} == {1.0, 2.0}
    assert known.run(BEST, "one", "a", "1") == known.run(BEST, "one", "a", "1")
    values = [known.run(BEST, "one", str(launch), "1").log_tok_s for launch in range(400)]
    assert np.mean(values) == pytest.approx(known.log_tok_s(BEST, "one"), abs=0.01)
    assert np.std(values) == pytest.approx(0.02 * math.sqrt(2), rel=0.35)
    within = [known.run(BEST, "one", "same", str(run)).log_tok_s for run in range(400)]
    assert np.std(within) < np.std(values)
    ran = known.run(BEST, "eight", "a", "1")
    assert ran.seconds == pytest.approx(200 / ran.tok_s + 0.5)


def test_a_recording_without_a_repeat_says_that_nothing_is_known_of_the_noise() -> None:
    with pytest.raises(ValueError, match="nothing is known of the noise"):
        Surface("once", SPACE, [row for row in launches() if row["launch"] == 0])


@pytest.mark.parametrize("name", ["vllm_cpu", "vllm_h200", "sglang_h200"])
def test_a_menu_composes_what_it_lacks_and_fails_as_its_parts_do(name: str) -> None:
    known = load(DATA / f"{name}_space.json", DATA / f"{name}_surface.jsonl")
    given = json.loads((DATA / f"{name}_space.json").read_text())
    reference = tuple(given["reference"])
    assert known.composed
    for setting in known.composed:
        turned = [at for at, value in enumerate(setting) if value != reference[at]]
        parts = [(*reference[:at], setting[at], *reference[at + 1 :]) for at in turned]
        effects = [known.truth(part) for part in parts]
        if None in effects:
            assert known.truth(setting) is None
            assert known.launch(setting, "1").failure is not None
        else:
            base = known.truth(reference)
            assert base is not None
            together = base + sum(effect - base for effect in effects if effect is not None)
            assert known.truth(setting) == pytest.approx(together)


# --- who searches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_a_rival_is_paid_by_the_clock_and_ends_with_its_best(name: str) -> None:
    known = surface()
    found = rivals.searched(known, rivals.RIVALS[name](known, 1), f"{name}/1", 600.0)
    again = rivals.searched(known, rivals.RIVALS[name](known, 1), f"{name}/1", 600.0)
    assert found == again
    assert found.final == BEST
    times = [moment.at_s for moment in found.incumbents]
    assert times == sorted(times)
    assert times[-1] <= 600.0
    assert found.down_s >= found.restarts - 1
    short = rivals.searched(known, rivals.RIVALS[name](known, 1), f"{name}/1", 20.0)
    assert short.experiments < found.experiments
    assert short.seconds < 20.0 + 12.0


def test_every_rival_first_measures_what_serves_and_random_and_grid_try_nothing_twice() -> None:
    known = surface()
    for make in rivals.RIVALS.values():
        assert make(known, 3).ask() == known.found
    for make in (rivals.random_search, rivals.grid):
        listed = make(known, 3)
        asked = []
        while (setting := listed.ask()) is not None:
            asked.append(setting)
        assert len(set(asked)) == len(asked) == len(known.settings)


def test_the_session_file_has_every_value_once_by_the_catalogue_or_by_a_person() -> None:
    config = session_config(surface(), 1, 600.0, 2.0)
    assert set(config.planner.only) == {"threads-all", "flash-attn-on", "omp-wait-active"}
    (own,) = config.experiments
    assert own.changes == (FlagChange(name="--cache-type-v", value="q8_0"),)
    assert config.policy.budget.time_s == 600.0


def test_a_session_on_a_recording_finds_the_gain_in_virtual_time() -> None:
    known = surface()
    found = ours.searched(known, 1, 900.0)
    assert worth(known, found) - worth(known, Search(known.found, (), 0, 0, 0, 0, 0)) > GAINS["threads"]["2"]
    assert found.seconds <= 900.0
    assert found.restarts > 0
    assert found.down_s >= found.restarts
    assert found.incumbents[0] == Moment(0.0, known.found)
    assert found.incumbents[-1].setting == found.final


def test_what_was_not_recorded_is_refused_at_start() -> None:
    known = surface()
    spec = ours.scenario(known)
    played = ours.Played(known, "1")
    assert spec.flags["--threads"] == ("1",)
    strange = spec.flags | {"--threads": ("3",)}
    assert played.start("T1", _spec(strange, spec.env)).refused == ours.OFF_GRID
    assert played.start("T1", _spec(spec.flags, spec.env)).refused is None


def _spec(flags: dict[str, tuple[str, ...]], env: dict[str, str]) -> LaunchSpec:
    return LaunchSpec(engine="llamacpp", program=("s",), flags=flags, env=env, argv=("s",), cwd="/", user="u")


@pytest.mark.parametrize("kind", models.MODELS)
async def test_a_made_up_model_speaks_its_part_and_then_nothing_more(kind: str) -> None:
    waited: list[float] = []

    async def pause(seconds: float) -> None:
        waited.append(seconds)

    known = surface()
    texts = models.MODELS[kind](known)
    stub = models.Stub(texts, pause)
    ask = Ask(
        id="X1",
        round=1,
        model="stub",
        prompt="p",
        form="schema",
        messages=(),
        answer_tokens=100,
        reserved_tokens=100,
        reserved_cost=0.0,
    )
    said = [(await stub.reply(ask, {}, 60.0)).text for _ in range(len(texts) + 1)]
    assert said[:-1] == texts
    assert json.loads(said[-1])["experiments"] == []
    assert waited == [models.ANSWER_S] * len(said)


def test_the_good_model_names_the_best_setting_and_the_hostile_one_what_fails_and_worse() -> None:
    known = surface()
    (plan,) = [json.loads(text) for text in models.good(known)]
    named = {(c["name"], c["value"]) for idea in plan["experiments"] for c in idea["changes"]}
    assert named == {("--threads", "2"), ("--flash-attn", "on"), ("OMP_WAIT_POLICY", "active")}
    hostile = "".join(models.hostile(known))
    assert "/etc/shadow" in hostile
    assert "q8_0" in hostile


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["useless", "hostile"])
def test_a_bad_model_costs_a_session_little(kind: str) -> None:
    known = surface()
    alone, beside = ours.searched(known, 1, 1200.0), ours.searched(known, 1, 1200.0, kind)
    assert worth(known, beside) - worth(known, alone) > math.log(0.98)


# --- scores --------------------------------------------------------------------------------------------------


def search(final: tuple[str, ...], at_s: float = 60.0) -> Search:
    return Search(final, (Moment(0.0, ("1", "off", "f16", "passive")), Moment(at_s, final)), 600.0, 10, 15.0, 9, 1)


def test_scores_are_of_the_truth_and_never_arriving_counts_as_the_whole_budget() -> None:
    known = surface()
    second = ("2", "on", "f16", "passive")
    assert arrival_s(known, search(BEST), 600.0) == 60.0
    assert arrival_s(known, search(second), 600.0) == 600.0
    assert read(json.loads(json.dumps(search(BEST).row()))) == search(BEST)
    row = planner_row(known, {0: search(BEST), 1: search(second)}, 600.0)
    assert row["below_best"] == pytest.approx((1 - math.exp(-0.05)) / 2, abs=0.005)
    assert (row["arrived"], row["arrival_s"], row["restarts"]) == (0.5, 330.0, 10)
    pair = pair_row(known, {0: search(BEST), 1: search(second)}, {0: search(second), 1: search(BEST)})
    assert pair["as_good"] == 0.5
    assert pair["mean"] == pytest.approx(0.0)


def test_each_goal_can_be_missed() -> None:
    known = surface()
    second, worse = ("2", "on", "f16", "passive"), ("1", "on", "f16", "passive")

    def row(ours_at: Search, theirs: Search, beside: Search) -> dict[str, object]:
        each = {"ratchet": {0: ours_at}, "tpe": {0: theirs}, "ratchet+hostile": {0: beside}}
        return {
            "surface": "llamacpp",
            "minutes": GOAL["minutes"]["llamacpp"],
            "planners": {name: planner_row(known, found, 600.0) for name, found in each.items()},
            "pairs": {"tpe": pair_row(known, each["ratchet"], each["tpe"])},
            "models": {"ratchet+hostile": pair_row(known, each["ratchet+hostile"], each["ratchet"])},
        }

    assert missed(row(search(BEST, 60.0), search(second), search(BEST)), GOAL) == []
    behind = missed(row(search(second), search(BEST), search(second)), GOAL)
    for word, line in zip(("as good as tpe in 0%", "against tpe in the mean", "98 % of the best"), behind, strict=True):
        assert word in line
    late = missed(row(search(BEST, 500.0), search(BEST, 600.0), search(BEST)), GOAL)
    assert [line for line in late if "98 % of the best" in line]
    tied = missed(row(search(BEST, 60.0), search(BEST, 300.0), search(BEST)), GOAL)
    assert tied == []
    misled = missed(row(search(BEST), search(second), search(worse)), GOAL)
    assert [line for line in misled if "ratchet+hostile" in line]
    other_budget = {**row(search(second), search(BEST), search(second)), "minutes": 1}
    assert missed(other_budget, GOAL) == []


def played(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The program on the made-up recording, without our own sessions."""
    write(folder / "data")
    command = [sys.executable, str(PROJECT / "benchmarks" / "search.py"), "--data", str(folder / "data")]
    command += ["--only", "llamacpp", "--minutes", "20", "--seeds", "2", "--jobs", "1", "--out", str(folder / "out")]
    command += ["--planners", *(options or ("random", "greedy")), "--json", str(folder / "told.json"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)


def test_the_program_plays_what_is_missing_and_fails_the_check_when_a_session_ends_below_a_rival(
    tmp_path: Path,
) -> None:
    first = played(tmp_path)
    assert first.returncode == 0, first.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert set(told["rows"][0]["planners"]) == {"random", "greedy"}
    assert first.stdout.splitlines()[-1].startswith("search: 1 cases of 2 seeds")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert len(kept) == 4
    for seed in range(2):
        (path,) = (tmp_path / "out").glob(f"*-greedy-{seed}.json")
        row = {**json.loads(path.read_text()), "final": ["1", "off", "f16", "passive"], "incumbents": []}
        path.with_name(path.name.replace("greedy", "ratchet")).write_text(json.dumps(row))
    checked = played(tmp_path, "ratchet", "random", "greedy")
    assert checked.returncode == 1
    assert checked.stderr == ""
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for line in first.stdout.splitlines()[2:4]:
        assert line in checked.stdout
    assert "missed: llamacpp, 20 min: as good as greedy in 0% of seeds" in checked.stdout
    assert "MISSED" in checked.stdout.splitlines()[-1]
