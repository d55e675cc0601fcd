"""Shows a running session: a live picture on a terminal, plain lines in a log; it must not write to the store.

The one place, with the command line, that imports rich.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agent.evidence import BUILT_IN
from agent.manners import LASTING
from agent.selftest import ENOUGH, SelfTest
from agent.verify import Audit, Kind, Result
from agent.what_if import WhatIf
from state import events as ev
from state.models import DecisionKind, MeasurementStatus, Outcome, Todo, TodoStatus, Verdict
from state.store import Store

ROWS = 14
LINE = 280
FIRST = 120

COLOURS = {
    DecisionKind.KEEP: "bold green",
    DecisionKind.REVERT: "yellow",
    DecisionKind.LEAVE_OUT: "yellow",
    DecisionKind.BLOCK: "red",
    DecisionKind.ADJUST: "yellow",
    DecisionKind.PIVOT: "cyan",
    DecisionKind.VOID: "red",
    DecisionKind.HEAL: "red",
    DecisionKind.PERSON: "magenta",
    DecisionKind.CARRY: "magenta",
    DecisionKind.INTERRUPTED: "magenta",
    DecisionKind.RESUME: "magenta",
    DecisionKind.END: "bold cyan",
}
MARKS = {
    TodoStatus.PENDING: ("·", "dim"),
    TodoStatus.IN_PROGRESS: ("▶", "bold cyan"),
    TodoStatus.DONE: ("✓", "green"),
    TodoStatus.BLOCKED: ("✗", "red"),
    TodoStatus.SKIPPED: ("–", "dim"),
    TodoStatus.GATED: ("?", "magenta"),
}


def story(event: ev.Event) -> tuple[str, str] | None:
    """One line for an event with its colour, None for events that only matter to the store."""
    if isinstance(event, ev.DecisionMade):
        made = event.decision
        return shortened(f"{made.kind.value:<11} {made.what} — {made.reason}"), COLOURS.get(made.kind, "")
    if isinstance(event, ev.MeasurementClosed):
        return _run_line(event), "dim"
    if isinstance(event, ev.TrialClosed):
        trial = event.trial
        if trial.failure is not None:
            return f"{trial.kind:<11} {trial.id} failed: {trial.failure.cause}", "red"
        if trial.kind == "adjust":
            return f"adjust      {trial.id} generates", "dim"
        return f"launch      {trial.id} generates after {trial.load_s or 0.0:.1f} s", "dim"
    if isinstance(event, ev.ExchangeClosed):
        reply = event.reply
        outcome = f"answered, {reply.tokens} tokens" if reply.silence is None else f"{reply.silence}: {reply.detail}"
        return shortened(f"model       {event.exchange_id} {outcome}"), "dim"
    if isinstance(event, ev.Noted):  # commands for a person stand at the end
        return None if event.subject == LASTING else (f"note        {event.text}", "dim")
    if isinstance(event, ev.SessionMoved):
        return f"session     {event.status.value}: {event.reason}", "bold"
    return None


def shortened(line: str) -> str:
    """A line that does not drown the others; `replay` has it whole."""
    return line if len(line) <= LINE else f"{line[:LINE]}… (all of it: replay)"


def _run_line(event: ev.MeasurementClosed) -> str:
    taken = event.measurement
    rate = taken.metrics.output_tok_s if taken.metrics is not None else None
    figures = f"{rate:.1f} tok/s" if rate is not None else "no figures"
    line = f"run         {taken.id} {taken.experiment_id} {taken.arm.value} at {taken.load_point}: {figures}"
    return line if taken.status is MeasurementStatus.VALID else f"{line} ({taken.status}: {'; '.join(taken.reasons)})"


class PlainLines:
    """Progress as lines with the time in front: for logs, pipes and `nohup`."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self.say = say
        self.clock = clock

    def phase(self, text: str) -> None:
        """Not a line of its own: what comes of a phase is."""

    def tick(self, text: str, done: float, of: float) -> None:
        """Not a line of its own."""

    def happened(self, event: ev.Event) -> None:
        """One line for each event that a reader wants."""
        line = story(event)
        if line is not None:
            stamp = time.strftime("%H:%M:%S", time.localtime(self.clock()))
            self.say(f"{stamp} {line[0]}")


class LivePicture:
    """Progress as a picture that is redrawn: what it does, the list, the last events, time and budget."""

    def __init__(self, store: Store, session_id: str, console: Console) -> None:
        self.store = store
        self.session_id = session_id
        self.console = console
        self.text = "starting"
        self.bar: tuple[float, float] | None = None
        self.live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[LivePicture]:
        """Draw while the block runs; the last picture stays on the screen."""
        with Live(self._picture(), console=self.console, refresh_per_second=4, transient=False) as live:
            self.live = live
            yield self
            self.bar = None
            live.update(self._picture())

    def phase(self, text: str) -> None:
        """See `Progress.phase`."""
        self.text, self.bar = text, None
        self._redraw()

    def tick(self, text: str, done: float, of: float) -> None:
        """See `Progress.tick`."""
        self.text, self.bar = text, (done, max(of, 1.0))
        self._redraw()

    def happened(self, event: ev.Event) -> None:
        """Print the event above the picture, and redraw."""
        line = story(event)
        if line is not None and self.live is not None:
            self.live.console.print(Text(line[0], style=line[1]), soft_wrap=False)
        self._redraw()

    def _redraw(self) -> None:
        if self.live is not None:
            self.live.update(self._picture())

    def _picture(self) -> RenderableType:
        row = self.store.session(self.session_id)
        used = self.store.active_s(self.session_id)
        budget = float(row.config["policy"]["budget"]["time_s"])
        head = Text.assemble(
            (f"{row.target} ", "bold"),
            f"session {row.id}   {used / 60:.1f} of {budget / 60:.0f} min   ",
            (self.text, "bold cyan"),
        )
        parts: list[RenderableType] = [head]
        if self.bar is not None:
            bar = ProgressBar(total=self.bar[1], completed=min(self.bar[0], self.bar[1]), width=60)
            parts.append(Padding(bar, (0, 0, 1, 0)))
        parts.append(todo_table(self.store, self.session_id, limit=ROWS))
        return Panel(Group(*parts), title="Ratchet", title_align="left", border_style="cyan")


def todo_table(store: Store, session_id: str, limit: int | None = None) -> Table:
    """The todo list with what came of each, those under way and just done first when it must be cut."""
    verdicts = store.verdicts(session_id)
    table = Table(box=None, padding=(0, 1), show_edge=False)
    for name in ("", "experiment", "priority", "outcome", "objective"):
        table.add_column(name, no_wrap=True)
    todos = [todo for todo in store.todos(session_id) if limit is None or todo.id not in BUILT_IN]
    shown = _most_telling(todos, limit)
    for todo in shown:
        verdict = verdicts.get(todo.id)
        mark, style = MARKS[todo.status]
        effect = verdict.objective.percent if verdict is not None and verdict.objective is not None else ""
        outcome = verdict.outcome.value if verdict is not None else todo.status.value
        bold = "bold green" if verdict is not None and verdict.outcome is Outcome.BETTER else style
        table.add_row(mark, Text(todo.experiment.title), f"{todo.priority:.2f}", outcome, Text(effect), style=bold)
    if len(shown) < len(todos):
        table.add_row("", f"… and {len(todos) - len(shown)} more", "", "", "", style="dim")
    return table


def _most_telling(todos: list[Todo], limit: int | None) -> list[Todo]:
    if limit is None or len(todos) <= limit:
        return todos
    order = (TodoStatus.IN_PROGRESS, TodoStatus.DONE, TodoStatus.BLOCKED, TodoStatus.GATED, TodoStatus.PENDING)
    ranked = sorted(todos, key=lambda todo: order.index(todo.status) if todo.status in order else len(order))
    keep = {todo.id for todo in ranked[:limit]}
    return [todo for todo in todos if todo.id in keep]


def list_table(todos: Sequence[Mapping[str, Any]]) -> Table:
    """What is known of each todo, a row each; what comes next stands first."""
    table = Table(box=None, padding=(0, 1))
    for name in ("", "turn", "id", "from", "level", "tier", "priority", "hoped", "sure", "min"):
        table.add_column(name, no_wrap=True)
    table.add_column("why, risk, needs", overflow="fold")
    for todo in todos:
        mark, style = MARKS[TodoStatus(todo["status"])]
        tries = bool(todo["changes"])
        remarks = [_first(todo["why"]), todo["risk"] and f"risk: {todo['risk']}"]
        remarks.append(todo["needs"] and f"needs {', '.join(todo['needs'])}")
        table.add_row(
            f"{mark} {todo['status'].replace('_', ' ')}",
            "" if todo["turn"] is None else str(todo["turn"]),
            todo["id"],
            todo["source"],
            todo["disruption"],
            str(todo["tier"]),
            f"{todo['priority']:.2f}",
            f"{todo['expected_gain']:+.0%}" if tries else "",
            f"{todo['confidence']:.0%}" if tries else "",
            f"{todo['cost_min']:.1f}",
            Text("; ".join(filter(None, remarks))),
            style=style,
        )
    return table


def _first(why: str) -> str:
    """The first part of a reason; `todo show` has it whole."""
    part = why.split("; ")[0].split(", chance of")[0]
    return part if len(part) <= FIRST else f"{part[:FIRST]}…"


def todo_facts(todo: Mapping[str, Any]) -> Table:
    """One todo in full."""
    facts = Table(box=None, padding=(0, 1), show_header=False)
    source = f"{todo['source']} {todo['source_ref']}".strip()
    for name, text in (
        (todo["id"], todo["title"]),
        ("status", ": ".join(filter(None, (todo["status"].replace("_", " "), todo["why"])))),
        ("hypothesis", todo["hypothesis"]),
        ("changes", ", ".join(todo["changes"]) or "none: it observes what runs"),
        ("from", source),
        ("hoped", f"{todo['expected_gain']:+.1%}, {todo['confidence']:.0%} sure, about {todo['cost_min']:.1f} min"),
        ("level", f"{todo['disruption']}, tier {todo['tier']}, priority {todo['priority']:.2f}"),
        ("tags, needs", f"{', '.join(todo['tags']) or '–'}; {', '.join(todo['needs']) or '–'}"),
        ("risk", todo["risk"] or "–"),
    ):
        facts.add_row(Text(name, style="bold"), Text(text))
    return facts


def history_table(history: Sequence[Mapping[str, Any]]) -> Table:
    """Every change of mind about a todo, a row each."""
    table = Table(box=None, padding=(0, 1))
    for name in ("time (UTC)", "by", "status", "priority", "why"):
        table.add_column(name, overflow="fold")
    for step in history:
        status = _step(*(None if s is None else s.replace("_", " ") for s in (step["status_before"], step["status"])))
        priority = _step(*(None if p is None else f"{p:.2f}" for p in (step["priority_before"], step["priority"])))
        table.add_row(step["at"], step["who"], status, priority, Text(step["reason"]))
    return table


def _step(before: str | None, now: str | None) -> str:
    """From what to what; empty where nothing was said about it."""
    if now is None:
        return ""
    return now if before is None or before == now else f"{before} → {now}"


def decision_table(log: list[dict[str, Any]]) -> Table:
    """The decision log as a table."""
    table = Table(box=None, padding=(0, 1))
    for name in ("id", "time (UTC)", "decision", "what", "because", "evidence"):
        table.add_column(name, overflow="fold")
    for entry in log:
        style = COLOURS.get(DecisionKind(entry["kind"]), "")
        names = (item["id"] for item in entry["evidence"])
        lines = (f"{item['id']}: {item['says']}" for item in entry["evidence"])
        # What was said to a language model is told nowhere else on this page.
        evidence = Text("\n".join(lines) if entry["kind"] == DecisionKind.CONSULT else ", ".join(names))
        # As Text, because a quoted log line may hold what rich would take for markup.
        what, reason = Text(entry["what"]), Text(entry["reason"])
        table.add_row(entry["id"], entry["at"][11:19], entry["kind"], what, reason, evidence, style=style)
    return table


def selftest_table(told: SelfTest) -> RenderableType:
    """The judge's chances on a server: noise, false keeps, and for each gain how often it would be found."""
    launched = f"{told.launches} launches" if told.launches > 1 else "only the judge's prior: nothing was relaunched"
    facts = Table(box=None, padding=(0, 1), show_header=False)
    for name, text in (
        ("one run spreads by", f"{told.run_spread} (median and 90 % interval, {told.runs} runs)"),
        ("a launch adds", f"{told.launch_spread} ({launched})"),
        (
            "a night",
            f"{told.experiments} experiments, {told.judged:.1f} of them judged in {told.budget_s / 60:.0f} min",
        ),
        ("prices", f"a launch {told.launch_s:.0f} s, a run {told.run_s:.1f} s"),
        ("a no-op ends after", f"{told.null_runs:.1f} runs"),
        (
            "nights with a false keep",
            f"{told.false_nights:.1%} [{told.false_low:.1%}, {told.false_high:.1%}] of {told.nights} rehearsed",
        ),
    ):
        facts.add_row(Text(name, style="bold"), text)
    chances = Table(box=None, padding=(0, 1))
    for name in ("a true gain of", "is kept in", "", "runs", "launches"):
        chances.add_column(name)
    for one in told.found:
        bar = ProgressBar(total=1.0, completed=one.share, width=30)
        style = "green" if one.share >= ENOUGH else "dim"
        chances.add_row(
            f"{one.gain:+.0%}", f"{one.share:.0%}", bar, f"{one.runs:.1f}", f"{one.launches:.1f}", style=style
        )
    smallest = told.smallest
    word = f"{smallest:+.0%}" if smallest is not None else f"more than {told.found[-1].gain:+.0%}"
    last = Text(f"smallest gain that is found in {ENOUGH:.0%} of nights: {word}", style="bold")
    return Group(facts, Text(""), chances, last)


def audit_tables(audit: Audit) -> Iterator[Table]:
    """Each verdict then and now, then whatever was not the same or was taken on trust."""
    verdicts = Table(box=None, padding=(0, 1))
    for name in ("experiment", "decided then", "objective then", "computed again", "objective again", ""):
        verdicts.add_column(name, overflow="fold")
    for check in audit.checks:
        if check.kind is Kind.VERDICT:
            columns = (check.subject, *_said(check.stored), *_said(check.recomputed), check.result)
            verdicts.add_row(*map(Text, columns), style=_RESULTS[check.result])
    yield verdicts
    rest = Table(box=None, padding=(0, 1))
    for name in ("", "", "what"):
        rest.add_column(name, overflow="fold")
    for (kind, what, result), subjects in _remarks(audit).items():
        rest.add_row(kind, ", ".join(subjects), Text(what), style=_RESULTS[result])
    if rest.row_count:
        yield rest


def _said(verdict: Verdict | None) -> tuple[str, str]:
    if verdict is None:
        return "–", "–"
    return verdict.outcome, verdict.objective.percent if verdict.objective is not None else "–"


def _remarks(audit: Audit) -> dict[tuple[Kind, str, Result], list[str]]:
    """What is to be said, and of which runs, verdicts or tables; what can't be verified is not told value by value."""
    found: dict[tuple[Kind, str, Result], list[str]] = {}
    for check in audit.checks:
        said = []
        if check.result is Result.UNVERIFIABLE:
            said = [f"{check.result}: {check.why}" + "; it differs (--json tells where)" * bool(check.differences)]
        elif check.result is Result.DIFFERENT:
            said = [check.why, *map(str, check.differences)]
        if check.trusted:
            said.append(f"taken on trust: {'; '.join(check.trusted)}")
        for line in filter(None, said):
            found.setdefault((check.kind, line, check.result), []).append(check.subject)
    return found


_RESULTS = {Result.SAME: "", Result.DIFFERENT: "bold red", Result.UNVERIFIABLE: "yellow"}


def what_if_table(found: WhatIf) -> Table:
    """Each verdict then and under the changed rule."""
    table = Table(box=None, padding=(0, 1))
    for name in ("experiment", "decided then", "would be", "why"):
        table.add_column(name, overflow="fold")
    for one in found.alternatives:
        would_be = one.would_be or "no verdict yet"
        table.add_row(one.experiment, one.decided, would_be, Text(one.why), style="bold yellow" if one.differs else "")
    return table
