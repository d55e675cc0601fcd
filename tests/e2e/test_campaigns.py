"""Whole tuning campaigns, lived through alone by the agent on a made-up host with an SGLang server and eight GPUs.

The agent, sshd and all processes are real; the server, its bench client and nvidia-smi are the stand-ins of
`tests/e2e/sglang_host`, whose figures come from a scenario. What is asserted is what the decision log tells and what
the host's own witness saw. docs/explanation/campaigns.md retells the stories.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.verify import Result, verify
from state.models import Arm, DecisionKind, Disruption, Measurement, Outcome, Role, Todo, TodoStatus, Trial, Verdict
from state.store import Store
from tests.e2e.rig import assert_at_most_one_server
from tests.e2e.sglang_host.host import GATE, NEWEST, Scenario, SglangHost, scenario, sglang_host

LIMIT_S = 2400
"""After which a campaign hangs; no test asserts a time."""
NOT_KEPT = (Outcome.NO_DIFFERENCE, Outcome.INCONCLUSIVE)


class Story(NamedTuple):
    """What is left of a campaign: the host, how the agent ended, what its database tells."""

    host: SglangHost
    code: int
    said: str
    original: list[str]
    before: dict[str, str]
    after: dict[str, str]
    final: list[str]
    decisions: list[dict[str, Any]]
    todos: dict[str, Todo]
    trials: list[Trial]
    measurements: list[Measurement]
    verdicts: dict[str, Verdict]
    findings: list[str]

    def told(self, kind: DecisionKind, subject: str | None = None) -> list[dict[str, Any]]:
        """Decisions of a kind, about a subject or all."""
        return [one for one in self.decisions if one["kind"] == kind and subject in (None, one["subject"])]

    def launches(self, experiment: str) -> list[dict[str, Any]]:
        """What the host saw of every launch that was made for an experiment, whichever side's."""
        keys = {trial.id for trial in self.trials if trial.experiment_id == experiment}
        return [start for start in self.host.seen("start") if start["launch"].rpartition("-")[2] in keys]

    def place(self, kind: DecisionKind, subject: str) -> int:
        """Where in the log the first such decision stands."""
        return self.decisions.index(self.told(kind, subject)[0])


def lived_through(folder: Path, numbers: Scenario, *names: str) -> Iterator[Story]:
    with sglang_host(folder, numbers) as host:
        host.start_server()
        original, before = host.argv(), host.sources()
        agent = host.agent("start", str(host.session_file(*names)), "--db", str(host.database))
        agent.process.wait(LIMIT_S)
        with host.store() as store:
            yield told_by(store, host, agent.process.returncode, agent.said, original, before)


def told_by(store: Store, host: SglangHost, code: int, said: str, original: list[str], before: dict[str, str]) -> Story:
    session = store.latest_session().id
    return Story(
        host=host,
        code=code,
        said=said,
        original=original,
        before=before,
        after=host.sources(),
        final=host.argv(),
        decisions=store.decisions(session),
        todos={todo.id: todo for todo in store.todos(session)},
        trials=store.trials(session),
        measurements=store.measurements(session),
        verdicts=store.verdicts(session),
        findings=[finding.statement for finding in store.findings(session)],
    )


# --- campaign A ------------------------------------------------------------------------------------------------------

CAMPAIGN_A = ("campaign-a", "campaign-a-source")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield from lived_through(tmp_path_factory.mktemp("first"), scenario("campaign-a"), *CAMPAIGN_A)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    numbers = scenario("campaign-a", altered="campaign-a-altered")
    yield from lived_through(tmp_path_factory.mktemp("other"), numbers, *CAMPAIGN_A)


@pytest.mark.slow
def test_it_ends_alone_and_every_verdict_follows_from_what_was_measured(first: Story) -> None:
    assert first.code == 0, first.said
    with first.host.store() as store:
        session = store.latest_session().id
        audit = verify(store, session)
        final = store.role(session, Role.FINAL)
        assert final is not None
        assert list(store.spec(final).argv) == first.final
    assert [check for check in audit.checks if check.result is not Result.SAME] == []
    assert audit.checks


@pytest.mark.slow
def test_the_baseline_comes_first_at_every_level_one_at_a_time(first: Story) -> None:
    assert first.told(DecisionKind.CHOOSE)[0]["subject"] == "baseline"
    seen = first.host.seen()
    own = [line["concurrency"] for line in seen if line["event"] == "run" and line["launch"] == 1]
    assert {1, 10, 256, 1024} <= set(own)
    second = next(place for place, line in enumerate(seen) if line["event"] == "start" and line["number"] == 2)
    assert sum(line["event"] == "run" for line in seen[:second]) == len(own)
    assert own.count(1) >= 3 and own.count(1024) >= 3


@pytest.mark.slow
def test_a_gain_of_two_percent_is_told_from_the_noise_and_kept(first: Story) -> None:
    verdict = first.verdicts["mscclpp"]
    assert verdict.outcome is Outcome.BETTER, verdict.reason
    assert verdict.objective is not None
    assert 0.005 < verdict.objective.estimate < 0.035
    assert verdict.objective.low > 0
    assert set(verdict.points) == {"one", "ten", "busy", "full"}
    assert first.told(DecisionKind.KEEP, "mscclpp")
    assert "--enable-mscclpp" in first.final


@pytest.mark.slow
def test_overlap_does_nothing_on_top_of_what_was_kept(first: Story) -> None:
    verdict = first.verdicts["single-batch-overlap"]
    assert verdict.outcome in NOT_KEPT
    assert {"busy", "full"} <= set(verdict.points)
    tried = first.launches("single-batch-overlap")
    assert tried and all("--enable-mscclpp" in start["argv"] for start in tried)
    assert "--enable-single-batch-overlap" not in first.final


@pytest.mark.slow
def test_piecewise_graphs_are_blocked_with_their_cause_and_so_is_what_needs_them(first: Story) -> None:
    blocked = first.todos["piecewise-graphs"]
    assert blocked.status is TodoStatus.BLOCKED
    assert "torch._dynamo.exc.Unsupported" in blocked.reason
    assert_never_launched(first, "graph-compiler", "piecewise-graphs")


@pytest.mark.slow
def test_expert_parallelism_crashes_on_the_tile_and_its_relatives_are_not_tried(first: Story) -> None:
    blocked = first.todos["expert-parallel"]
    assert blocked.status is TodoStatus.BLOCKED
    assert "shared memory, Required: 147456, Hardware limit: 101376" in blocked.reason
    assert_never_launched(first, "expert-parallel-exchange", "expert-parallel")


def assert_never_launched(story: Story, experiment: str, because: str) -> None:
    todo = story.todos[experiment]
    assert todo.status in (TodoStatus.BLOCKED, TodoStatus.SKIPPED)
    assert because in todo.reason
    assert story.launches(experiment) == []


@pytest.mark.slow
def test_two_communication_experiments_that_do_nothing_change_the_direction(first: Story) -> None:
    pivot = next(one for one in first.told(DecisionKind.PIVOT) if one["what"].startswith("turn away"))
    assert "communication" in pivot["what"]
    tried = ("single-batch-overlap", "nccl-max-channels-8", "nccl-algo-tree")
    named = [name for name in tried if name in pivot["reason"]]
    assert len(named) == 2
    runs = {one.id for one in first.measurements if one.experiment_id in named}
    assert runs & set(pivot["evidence"])
    assert any(statement.startswith("communication is not the bottleneck here") for statement in first.findings)
    at = first.decisions.index(pivot)
    assert all(first.place(DecisionKind.REVERT, name) < at for name in named)
    assert at < first.place(DecisionKind.CHOOSE, "fusion-on-this-gpu"), "what is left of the topic"


@pytest.mark.slow
def test_parameters_are_tried_instead_of_patches(first: Story) -> None:
    for name in ("nccl-max-channels-8", "nccl-algo-tree", "decode-steps"):
        assert first.verdicts[name].outcome in NOT_KEPT
        assert first.place(DecisionKind.CHOOSE, name) < first.place(DecisionKind.CHOOSE, "fusion-on-this-gpu")


@pytest.mark.slow
def test_a_patch_that_collapses_is_undone_to_the_byte_with_its_cache(first: Story) -> None:
    verdict = first.verdicts["fusion-on-this-gpu"]
    assert verdict.outcome is Outcome.COLLAPSED, verdict.reason
    (tried,) = [start for start in first.launches("fusion-on-this-gpu") if start["fused"]]
    assert tried["gate"] == [9, 10, 12]
    assert first.after == first.before
    assert f"repository/{GATE}" in first.before
    later = [start for start in first.host.seen("start") if start["number"] > tried["number"]]
    assert later and all(start["gate"] == [9, 10] for start in later)


@pytest.mark.slow
def test_after_the_patch_the_parent_is_measured_again(first: Story) -> None:
    mine = [one for one in first.measurements if one.experiment_id == "fusion-on-this-gpu"]
    candidate = next(one for one in mine if one.arm is Arm.CANDIDATE)
    after = first.measurements[first.measurements.index(candidate) :]
    again = [one for one in after if one.arm is Arm.BASELINE and one.trial_id != candidate.trial_id]
    assert again and again[0].metrics is not None and again[0].metrics.output_tok_s is not None
    known = [
        one.metrics.output_tok_s
        for one in first.measurements[: first.measurements.index(candidate)]
        if one.experiment_id == "mscclpp" and one.arm is Arm.CANDIDATE and one.load_point == again[0].load_point
        if one.metrics is not None and one.metrics.output_tok_s is not None
    ]
    assert again[0].metrics.output_tok_s == pytest.approx(known[0], rel=0.1)


@pytest.mark.slow
def test_the_collapse_is_seen_in_the_power_too(first: Story) -> None:
    assert power(first, "fusion-on-this-gpu", Arm.CANDIDATE) == {125.0}
    assert power(first, "mscclpp", Arm.CANDIDATE) == {330.0}


def power(story: Story, experiment: str, arm: Arm) -> set[float]:
    """The most that any GPU drew in the runs of one side that were long enough to be sampled under load."""
    boards = [
        board
        for one in story.measurements
        if (one.experiment_id, one.arm) == (experiment, arm) and one.telemetry is not None
        for board in one.telemetry.gpu or ()
    ]
    seen = {board.power_w.max for board in boards if board.power_w is not None}
    return {watts for watts in seen if watts > 100}


@pytest.mark.slow
def test_the_newest_commit_is_kept_and_serves_in_the_end(first: Story) -> None:
    verdict = first.verdicts["newest-commit"]
    assert verdict.outcome is Outcome.BETTER, verdict.reason
    assert verdict.points["busy"].estimate == pytest.approx(0.69, abs=0.05)
    last = first.host.seen("start")[-1]
    assert last["version"] == NEWEST
    assert last["gate"] == [9, 10]
    assert last["package"].startswith(str(first.host.root))
    assert NEWEST not in (first.host.repository / "python" / "sglang" / "version.py").read_text()


@pytest.mark.slow
def test_what_disrupts_least_is_tried_first(first: Story) -> None:
    chosen = [one["subject"] for one in first.told(DecisionKind.CHOOSE) if first.todos[one["subject"]].experiment.tries]
    levels = [first.todos[name].experiment.disruption for name in chosen[: chosen.index("newest-commit") + 1]]
    assert levels == sorted(levels)
    assert levels[0] is Disruption.RESTART and levels[-1] is Disruption.PATCH


@pytest.mark.slow
def test_what_a_version_blocked_is_tried_once_more_with_the_next_one(first: Story) -> None:
    for experiment, flag in (("expert-parallel", "--ep-size"), ("piecewise-graphs", "--cuda-graph-backend-prefill")):
        tried = [start["version"] for start in first.launches(experiment) if flag in start["argv"]]
        assert tried == ["0.5.17", NEWEST], experiment
        again = first.told(DecisionKind.CHOOSE, experiment)[1]
        assert first.decisions.index(again) > first.place(DecisionKind.KEEP, "newest-commit")


@pytest.mark.slow
def test_no_start_ever_lacks_the_hard_constraint(first: Story) -> None:
    assert [start for start in first.host.seen("start") if start["env"].get("NCCL_P2P_DISABLE") != "1"] == []


@pytest.mark.slow
def test_servers_follow_each_other_and_are_asked_to_end(first: Story) -> None:
    assert_at_most_one_server(first.host)
    starts, stops, failed = (first.host.seen(event) for event in ("start", "stop", "failed"))
    assert len(starts) == len(stops) + len(failed) + 1


@pytest.mark.slow
def test_the_report_tells_the_findings(first: Story) -> None:
    told = first.host.command("report", "--db", str(first.host.database))
    assert told.process.returncode == 0, told.said
    for words in ("--enable-mscclpp", "--enable-single-batch-overlap", "torch._dynamo", "shared memory", "collapsed"):
        assert words in told.out.read_text(), words


# --- the same host with other effects --------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_other_effects_a_loss_is_reverted(other: Story) -> None:
    assert other.code == 0, other.said
    verdict = other.verdicts["mscclpp"]
    assert verdict.outcome in (Outcome.WORSE, *NOT_KEPT), verdict.reason
    assert verdict.objective is not None and verdict.objective.estimate < 0
    assert other.told(DecisionKind.REVERT, "mscclpp")
    assert "--enable-mscclpp" not in other.final


@pytest.mark.slow
def test_with_other_effects_a_gain_at_one_level_alone_is_found_and_kept(other: Story) -> None:
    verdict = other.verdicts["single-batch-overlap"]
    assert verdict.outcome is Outcome.BETTER, verdict.reason
    assert verdict.points["busy"].estimate == pytest.approx(0.077, abs=0.03)
    assert abs(verdict.points["full"].estimate) < 0.03
    assert "--enable-single-batch-overlap" in other.final


@pytest.mark.slow
def test_with_other_effects_the_patch_is_kept(other: Story) -> None:
    verdict = other.verdicts["fusion-on-this-gpu"]
    assert verdict.outcome is Outcome.BETTER, verdict.reason
    assert verdict.objective is not None
    assert verdict.objective.estimate == pytest.approx(0.058, abs=0.03)
    assert other.told(DecisionKind.KEEP, "fusion-on-this-gpu")


# --- campaign B ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield from lived_through(tmp_path_factory.mktemp("production"), scenario("campaign-b"), "campaign-b")


@pytest.mark.slow
def test_high_load_is_observed_before_anything_is_restarted(production: Story) -> None:
    assert production.code == 0, production.said
    chosen = production.told(DecisionKind.CHOOSE)
    assert [one["subject"] for one in chosen[:2]] == ["baseline", "observe-load-points"]
    assert "an observation blocks nothing" in chosen[0]["reason"]
    seen = production.host.seen()
    restart = next(place for place, line in enumerate(seen) if line["event"] == "start" and line["number"] == 2)
    watched = [line["concurrency"] for line in seen[:restart] if line["event"] == "run"]
    assert watched.count(1024) >= 2
    assert production.verdicts["observe-load-points"].outcome is Outcome.OBSERVED


@pytest.mark.slow
def test_a_hard_constraint_of_the_host_holds_against_every_idea(production: Story) -> None:
    asked = production.todos["peer-access"]
    assert asked.status is TodoStatus.SKIPPED
    assert asked.reason == "NCCL_P2P_DISABLE must stay 1"
    plan = production.told(DecisionKind.PLAN)[0]["reason"]
    assert "custom-all-reduce: does not go with NCCL_P2P_DISABLE, which is set" in plan
    assert [one["env"]["NCCL_P2P_DISABLE"] for one in production.host.seen("start")].count("1") == len(
        production.host.seen("start")
    )


@pytest.mark.slow
def test_drafts_that_are_not_accepted_lose_and_the_finding_says_on_which_workload(production: Story) -> None:
    verdict = production.verdicts["spec-nextn"]
    assert verdict.outcome is Outcome.WORSE, verdict.reason
    assert any("NEXTN" in statement and "worse" in statement for statement in production.findings)
    with production.host.store() as store:
        session = store.latest_session()
        scopes = {finding.scope for finding in store.findings(session.id)}
    assert all(session.workload_revision in scope for scope in scopes)


@pytest.mark.slow
def test_what_gains_nothing_leaves_production_as_it_was_found(production: Story) -> None:
    assert production.verdicts["fused-moe-sum-all-reduce"].outcome in NOT_KEPT
    assert production.final == production.original
    assert production.after == production.before
    assert_at_most_one_server(production.host)
