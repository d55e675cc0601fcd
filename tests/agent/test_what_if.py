"""Other thresholds on the same runs: the words that they would have said, and none where runs are missing."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agent.evidence import BASELINE, CLOSE_OUT
from agent.what_if import Alternative, WhatIf, askable, changed_config, what_if
from state.errors import ConfigError, StoreDamaged
from state.models import Outcome
from state.store import Store
from tests.agent.sessions import FASTER, disturbed, finished, late, noise, traffic
from tests.agent.sim import CONFIG, SCENARIO

UNCHANGED = {"judge.minimal_effect": str(CONFIG.judge.minimal_effect)}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("improved"))


def asked(path: Path, **wishes: str) -> WhatIf:
    """`judge__min_blocks="3"` asks for judge.min_blocks."""
    with Store.read(path) as store:
        return what_if(store, store.latest_session().id, {key.replace("__", "."): wishes[key] for key in wishes})


def rows(found: WhatIf) -> dict[str, Alternative]:
    return {one.experiment: one for one in found.alternatives}


# --- the same rule ---


def test_the_rule_of_then_says_the_words_of_then(database: Path) -> None:
    before = database.read_bytes()
    with Store.read(database) as store:
        session = store.latest_session().id
        found = what_if(store, session, UNCHANGED)
        said = {name: (verdict.outcome, verdict.reason) for name, verdict in store.verdicts(session).items()}
    assert {one.experiment: (one.would_be, one.why) for one in found.alternatives} == said
    assert found.changed == {"judge.minimal_effect": 0.02}
    assert found.summary.startswith(f"0 of {len(said)} verdicts differ; each is judged by itself")
    assert database.read_bytes() == before


@pytest.mark.parametrize(
    ("end", "change"),
    [("M6:collected", noise), ("M6:collected", traffic), ("end:closed", late)],
    ids=["noise", "traffic", "late"],
)
def test_it_does_so_too_where_something_went_wrong(end: str, change: object, tmp_path: Path) -> None:
    path = disturbed(tmp_path, "M6/run:after-outcome", end, change)  # type: ignore[arg-type]
    found = asked(path, judge__minimal_effect="0.02")
    assert [one for one in found.alternatives if one.differs or "under the rule" in one.why] == []


# --- another rule ---


def test_a_gain_that_is_not_worth_having_any_more_ends_sooner(database: Path) -> None:
    found = rows(asked(database, judge__minimal_effect="0.9"))
    one = found["threads-2"]
    assert (one.decided, one.would_be) == (Outcome.BETTER, Outcome.NO_DIFFERENCE)
    assert "a gain of 90%" in one.why
    assert "; known after " in one.why
    assert not found["threads-64"].differs
    assert not found[BASELINE].differs


def test_under_a_budget_that_nothing_can_meet_nothing_is_kept(database: Path) -> None:
    found = rows(asked(database, judge__false_keep_budget="1e-30"))
    assert found["threads-2"].decided is found[CLOSE_OUT].decided is Outcome.BETTER
    assert Outcome.BETTER not in {one.would_be for one in found.values()}
    assert found[CLOSE_OUT].would_be is None
    assert found[CLOSE_OUT].why.startswith("would have gone on: candidate, launch 3")


def test_a_rule_that_wants_another_run_gets_no_verdict(database: Path) -> None:
    found = rows(asked(database, judge__baseline_runs="5"))
    assert found[BASELINE].would_be is None
    assert found[BASELINE].why == "would have gone on: baseline, launch 1, run 4, at c8"


def test_a_guard_that_tolerates_more_does_not_veto(database: Path) -> None:
    one = rows(asked(database, workload__guards__other_points_tolerance="0.5"))["spec-ngram"]
    assert one.decided is Outcome.WORSE
    assert one.differs


def test_several_keys_are_changed_together(database: Path) -> None:
    found = asked(database, judge__min_blocks="4", judge__max_blocks="8", workload__guards__ttft_p90_ms="1.0")
    assert found.changed == {"judge.min_blocks": 4, "judge.max_blocks": 8, "workload.guards.ttft_p90_ms": 1.0}
    assert rows(found)["threads-2"].differs


def test_a_key_that_holds_tables_is_written_as_in_the_file(database: Path) -> None:
    slo = '[{ metric = "tpot", percentile = "p50", max_ms = 24.0, at = ["c1"] }]'
    one = rows(asked(database, workload__guards__other_points_tolerance="0.5", workload__guards__slo=slo))["spec-ngram"]
    assert one.would_be is Outcome.WORSE
    assert "tpot" in one.why


def test_a_run_that_would_count_is_counted(tmp_path: Path) -> None:
    path = disturbed(tmp_path, "M6/run:after-outcome", "M6:collected", noise)
    found = rows(asked(path, validity__max_foreign_cpu_cores="2"))
    assert "; valid under the rule: M6" in found[FASTER.id].why
    assert not found[BASELINE].differs


def test_runs_that_would_not_count_make_a_verdict_invalid(tmp_path: Path) -> None:
    path = finished(tmp_path, FASTER, scenario=SCENARIO.model_copy(update={"foreign_cores": 0.1}))
    found = rows(asked(path, validity__max_foreign_cpu_cores="0.05"))
    one = found[BASELINE]
    assert (one.decided, one.would_be) == (Outcome.OBSERVED, Outcome.INVALID)
    assert one.why.startswith("4 runs in a row do not count: noisy host: 0.10 cores were busy with other work")
    assert "; invalid under the rule: M1, " in one.why


def test_a_log_with_holes_is_not_judged(database: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy2(database, tmp_path / "state.db"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TRIGGER events_are_never_deleted")
        connection.execute("DELETE FROM events WHERE json_extract(body, '$.trial.id') = 'T1'")
    with pytest.raises(StoreDamaged) as refused:
        asked(path, judge__minimal_effect="0.5")
    assert "T1 is missing" in refused.value.what


# --- what cannot be asked ---

WRONG = [
    pytest.param("judge.minimal_efect", "0.1", '(did you mean "judge.minimal_effect"?)', id="typo"),
    pytest.param("minimal_effect", "0.1", '(did you mean "judge.minimal_effect"?)', id="no section"),
    pytest.param("judge.max_steal_share", "0.1", '(did you mean "validity.max_steal_share"?)', id="other section"),
    pytest.param("seed", "2", "cannot be changed", id="another key"),
    pytest.param("policy.budget.time", '"1h"', "keys under judge, validity, workload.guards can", id="policy"),
    pytest.param("validity.quiet_wait_s", "1", "decides what is measured and when", id="waiting"),
    pytest.param("judge.sentinel_every", "1", "decides what is measured and when", id="sentinels"),
    pytest.param("workload.guards.slo", '[{ metric = "ttft", max = 5 }]', "slo[0].max_ms: is missing", id="table"),
    pytest.param("judge.minimal_effect", "5%", "expected a value as in a session file, got 5%", id="no TOML"),
    pytest.param("judge.minimal_effect", '"0.1"', "expected a valid number", id="text"),
    pytest.param("judge.minimal_effect", "2", "expected less than 1, got 2", id="too large"),
    pytest.param("judge.noise_prior", "inf", "expected a finite number", id="infinite"),
    pytest.param("judge.min_blocks", "2.5", "expected a valid integer", id="fraction"),
    pytest.param("judge.min_blocks", "9", "expected at least min_blocks (9), got 5", id="contradiction"),
]


@pytest.mark.parametrize(("key", "value", "said"), WRONG)
def test_a_wrong_wish_is_answered_with_what_can_be_asked(key: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed_config(CONFIG, {key: value})
    assert said in refused.value.what
    assert refused.value.do


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        changed_config(CONFIG, {"judge.min_blocks": "1", "validity.retrys": "1", "workload.guards.tpot_p90_ms": "0"})
    for key in ("judge.min_blocks", "validity.retrys", "workload.guards.tpot_p90_ms"):
        assert f"  {key}: " in refused.value.what


def test_every_key_that_can_be_asked_about_is_changed_alone() -> None:
    assert len(askable()) > 15
    changed = changed_config(CONFIG, {"workload.guards.tpot_p90_ms": "30.5"})
    assert changed.workload.guards.tpot_p90_ms == 30.5
    assert changed.model_copy(update={"workload": CONFIG.workload}) == CONFIG
