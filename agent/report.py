"""The morning report as Markdown, from the store alone; it must not judge anything anew."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from agent.built_in import kept, sentinels
from agent.calibration import Guess, calibration
from agent.evidence import BASELINE, CLOSE_OUT
from agent.manners import LASTING, UNMEASURED
from agent.planners.spend import used
from agent.report_machine import machine_section
from agent.todo_list import gated
from state.models import DecisionKind, LaunchSpec, Outcome, Role, SessionStatus, Todo, TodoStatus, Verdict
from state.replay import iso
from state.store import SessionRow, Store
from state.waits import WAITING, waits


def markdown(store: Store, session_id: str) -> str:
    """The whole report, ready to be written to a file."""
    row = store.session(session_id)
    parts = [
        *_head(store, row),
        *_configuration(store, row),
        *_lasting(store, row),
        *_experiments(store, row),
        *_never_approved(store, row),
        *_turns(store, row),
        *machine_section(store, row),
        *_findings(store, row),
        *_downtime(store, row),
        *_language_model(store, row),
        *_method(store, row),
    ]
    return "\n".join(parts) + "\n"


def headline(store: Store, session_id: str) -> str:
    """The one sentence that the morning begins with."""
    row = store.session(session_id)
    verdict = store.verdicts(session_id).get(CLOSE_OUT)
    if verdict is not None and verdict.outcome is Outcome.BETTER and verdict.objective is not None:
        return f"Kept an improvement of {verdict.objective.percent} (95 % interval) over what was found."
    if row.status is SessionStatus.DONE and row.config["planner"]["kind"] == "selftest":
        return "A self-test: the unchanged server was measured, nothing was tried."
    if "too noisy to judge" in row.reason:
        return f"Nothing was changed: {row.reason}."
    if verdict is not None:
        return "The final comparison did not confirm the kept changes, so the original configuration serves."
    if row.status is SessionStatus.DONE:
        return "Nothing better was found; the original configuration serves."
    why = row.reason.splitlines()[0] if row.reason else "under way"
    return f"Session {row.status.value}: {why}."


def _head(store: Store, row: SessionRow) -> Iterator[str]:
    yield f"# Tuning report: {row.target}"
    yield ""
    yield f"**{headline(store, row.id)}**"
    yield ""
    if "\n" in row.reason:
        yield from ("```text", row.reason, "```", "")
    ended = iso(row.ended_at) if row.ended_at is not None else "not ended"
    yield f"- session `{row.id}`, {row.status.value}, {iso(row.started_at)} to {ended}"
    adoption = row.adoption
    yield f"- server {adoption.spec.engine} {adoption.engine_version}, hardware: {adoption.hardware or 'unknown'}"
    counts = [f"{sum(1 for d in store.decisions(row.id) if d['kind'] == kind)} {kind}" for kind in _KINDS]
    yield f"- decisions: {', '.join(counts)}"
    yield ""


_KINDS = ("keep", "revert", "block", "adjust", "skip", "void", "pivot")


def _configuration(store: Store, row: SessionRow) -> Iterator[str]:
    original, known_good = store.role(row.id, Role.ORIGINAL), store.role(row.id, Role.KNOWN_GOOD)
    if original is None or known_good is None:
        return
    was, now = store.spec(original), store.spec(known_good)
    yield "## Configuration"
    yield ""
    if was.fingerprint == now.fingerprint:
        yield "The original configuration serves, unchanged."
    else:
        yield "What differs from the original:"
        yield ""
        yield from (f"- `{line}` (now ≠ before)" for line in now.differences(was))
    yield ""
    proven = row.status not in (SessionStatus.NEEDS_HUMAN, SessionStatus.REFUSED)
    first = "Serving now" if proven else "What should serve (not proven, see above)"
    yield f"{first}, and the way back (in a shell on the host, after stopping the other one; without hidden variables):"
    yield ""
    yield "```sh"
    yield f"# now\n{command(now)}"
    yield f"# original\n{command(was)}"
    yield "```"
    yield ""
    if was.beside or now.beside:
        yield "The commands do not bring about or take back what stands beside them: `ratchet restore` and"
        yield "`ratchet restore --original` do."
        yield ""


def lasting(store: Store, session_id: str) -> str:
    """The commands with which a person makes the winner outlive a reboot; empty where there is nothing to do."""
    noted = store.notes(session_id, LASTING)
    return noted[-1] if noted and store.session(session_id).status is SessionStatus.DONE else ""


def _lasting(store: Store, row: SessionRow) -> Iterator[str]:
    commands = lasting(store, row.id)
    if commands:
        yield from (
            "## To make it last",
            "",
            "A reboot ends the winner. On the host, for whatever starts the server then",
        )
        yield from ("(`$NAME` stands for a value that only the host knows):", "", "```sh", commands, "```", "")


def command(spec: LaunchSpec) -> str:
    """The spec as a command line for a person; hidden variables are not in it."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(spec.env.items())]
    return f"cd {shlex.quote(spec.cwd)} && {' '.join([*words, shlex.join(spec.argv)])}"


def _experiments(store: Store, row: SessionRow) -> Iterator[str]:
    verdicts = store.verdicts(row.id)
    yield "## Experiments"
    yield ""
    yield "| experiment | outcome | objective (95 % interval) | hoped | why |"
    yield "|---|---|---|---|---|"
    for todo in store.todos(row.id):
        yield _experiment_row(todo, verdicts.get(todo.id))
    yield ""


def _experiment_row(todo: Todo, verdict: Verdict | None) -> str:
    outcome = verdict.outcome.value if verdict is not None else todo.status.value
    effect = verdict.objective.percent if verdict is not None and verdict.objective is not None else "–"
    hoped = f"{todo.experiment.expected_gain:+.0%}" if todo.experiment.changes else "–"
    why = verdict.reason if verdict is not None else todo.reason
    return f"| {todo.experiment.title} | {outcome} | {effect} | {hoped} | {why.replace('|', '/') or '–'} |"


def _never_approved(store: Store, row: SessionRow) -> Iterator[str]:
    """What waited for a person to the end; nothing where nothing did."""
    waits = gated(store.todos(row.id))
    if not waits:
        return
    yield "## Waiting for approval"
    yield ""
    yield "Not tried, since nobody approved it. `ratchet approve ID` does so in a session that is not over;"
    yield "`policy.approved` does it beforehand."
    yield ""
    for todo in waits:
        changes = ", ".join(map(str, todo.experiment.changes))
        yield f"- **{todo.id}** {todo.experiment.title}: {changes}. {_sentence(todo.reason)}."
    yield ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


_TURNS = {
    DecisionKind.BLOCK: "blocked",
    DecisionKind.ADJUST: "another value",
    DecisionKind.SKIP: "skipped",
    DecisionKind.PIVOT: "direction",
    DecisionKind.PERSON: "a person's word",
    DecisionKind.CARRY: "from an earlier session",
}


def _turns(store: Store, row: SessionRow) -> Iterator[str]:
    """What failures and evidence did to the list, in their order; nothing when they left it alone."""
    made = [decision for decision in store.decisions(row.id) if decision["kind"] in _TURNS]
    if not made:
        return
    yield "## What was learned on the way"
    yield ""
    for decision in made:
        word = _TURNS[DecisionKind(decision["kind"])]
        yield f"- **{decision['id']}** {word}: {decision['what']}. {decision['reason']}."
    yield ""


def _findings(store: Store, row: SessionRow) -> Iterator[str]:
    found = store.findings(row.id)
    yield "## Findings"
    yield ""
    yield from (f"- **{f.id}** {f.statement}. Evidence: {', '.join(f.evidence)}. Scope: {f.scope}." for f in found)
    if not found:
        yield "None yet."
    yield ""


def _downtime(store: Store, row: SessionRow) -> Iterator[str]:
    begun = [trial for trial in store.trials(row.id) if not trial.adopted]
    launches = [trial for trial in begun if trial.kind == "launch"]
    total = sum(trial.down_s for trial in launches)
    yield "## Downtime"
    yield ""
    yield f"{len(launches)} launches, {total:.0f} s in all without a generating server."
    if len(begun) > len(launches):
        yield f"The running server was brought into another state {len(begun) - len(launches)} times."
    yield ""
    for trial in begun:
        if trial.failure is not None:
            yield f"- {trial.id} for {trial.experiment_id}: {trial.failure.failure_class}: {trial.failure.cause}"
    yield ""


def _language_model(store: Store, row: SessionRow) -> Iterator[str]:
    """What it cost and how well it guessed; nothing where none was asked."""
    exchanges = store.exchanges(row.id)
    if not exchanges:
        return
    took = used(exchanges)
    silent = sum(exchange.reply is None or exchange.reply.silence is not None for exchange in exchanges)
    own = [todo for todo in store.todos(row.id) if todo.experiment.source.kind == "model"]
    yield "## Language model"
    yield ""
    yield (
        f"- {exchanges[-1].ask.model}: {took.calls} requests, {silent} of them unanswered, {took.tokens} tokens, "
        f"cost {took.cost:.4g}; {len(own)} of its experiments went on the list"
    )
    yield f"- {calibration(_guesses(own, store.verdicts(row.id)))}"
    launches = waits(store, row.id)
    waited_s, used_s = sum(wait.seconds for wait in launches), sum(wait.used_s for wait in launches)
    yield f"- {used_s:.0f} of {waited_s:.0f} s in which launches loaded were used to ask it"
    yield from (f"- {text}" for text in store.notes(row.id, WAITING))
    yield ""


def _guesses(own: list[Todo], verdicts: dict[str, Verdict]) -> list[Guess]:
    judged = [(todo, verdicts[todo.id].objective) for todo in own if todo.id in verdicts]
    return [
        Guess(experiment_id=todo.id, hoped=todo.experiment.expected_gain, effect=effect)
        for todo, effect in judged
        if effect is not None
    ]


def _method(store: Store, row: SessionRow) -> Iterator[str]:
    valid = [m for m in store.measurements(row.id) if m.reasons == () and m.metrics is not None]
    void = [m for m in store.measurements(row.id) if m.reasons]
    tried = [t for t in store.todos(row.id) if t.experiment.tries and t.status is TodoStatus.DONE]
    budget = row.config["judge"]["false_keep_budget"]
    yield "## How it was measured"
    yield ""
    yield f"- {len(valid)} valid benchmark runs, {len(void)} that do not count; workload `{row.workload_revision}`"
    yield (
        f"- each candidate against a re-measured baseline, interleaved; {len(tried)} judged; chance of one false keep "
        f"or more in the whole session at most {budget:.0%}; what dismissed candidates left of it went to the others"
    )
    yield _false_keeps(store, row, budget)
    checks = sentinels(store, row.id)
    if checks:
        won = sum(1 for verdict in checks if verdict.outcome is Outcome.BETTER)
        yield f"- {len(checks)} A/A sentinels, {won} looked like a gain (the unchanged server compared with itself)"
    yield from (f"- {text}" for text in store.notes(row.id, UNMEASURED))
    tolerated = row.config.get("manners", {}).get("max_foreign_rps", 0)
    if tolerated:
        yield f"- up to {tolerated:g} requests of others a second were tolerated beside each run"
    baseline = store.verdicts(row.id).get(BASELINE)
    if baseline is not None:
        yield f"- baseline: {baseline.reason}"
    yield "- the headline is the final, fresh comparison with the original, never the sum of the steps"


def _false_keeps(store: Store, row: SessionRow, budget: float) -> str:
    """What may be wrong with the keeps: by the evidence for each, and by the share of the budget that was used."""
    standing = kept(store, row.id)
    by_evidence = sum(float(verdict.rule.get("no_gain", 0.0)) for _, verdict in standing)
    tried = {todo.id for todo in store.todos(row.id) if todo.experiment.tries}
    shares = [verdict.rule for name, verdict in store.verdicts(row.id).items() if name in tried]
    used = sum(float(rule.get("share", 0.0)) - float(rule.get("given_back", 0.0)) for rule in shares)
    return (
        f"- Expected number of false keeps: {by_evidence:.2g} by the evidence (sum of the chances of no gain of the "
        f"{len(standing)} kept changes that stand), at most {budget:g} by design, of which {used:.2g} was used up"
    )
