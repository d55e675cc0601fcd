"""Ratchet's command line: parses, calls `agent`, prints; it must not decide anything about a session.

Exit codes: 0 done · 1 a bug · 2 configuration · 3 host or server not usable · 4 stopped, resumable ·
5 refused for safety · 6 needs a human. Heavy imports stand inside the commands that need them, so that `status`
and `replay` answer at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from state.errors import ConfigError, RatchetError

if TYPE_CHECKING:
    from state.store import Store

app = typer.Typer(
    name="ratchet",
    help="Tunes an LLM inference server over SSH, unattended: judged against noise, back to known-good whatever dies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

todo_app = typer.Typer(no_args_is_help=True, help="A person's word on the list of a session: look, add, drop, reorder.")
app.add_typer(todo_app, name="todo")

Db = Annotated[
    Path | None, typer.Option("--db", help="Session database (file or folder); RATCHET_STATE names it as well.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
SessionFile = Annotated[Path, typer.Argument(help="The session file.", show_default="session.toml")]
SessionId = Annotated[str | None, typer.Argument(help="A session's id; the latest by default.")]
OfSession = Annotated[str | None, typer.Option("--session", help="A session's id; the latest by default.")]
TodoId = Annotated[str, typer.Argument(help="A todo's id, as `todo list` shows it.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it stands in the log.")]


def main() -> None:
    """Run the command line; our own errors become a message and their exit code, never a traceback."""
    code: int | str | None = 0
    unwritten = None
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    except RatchetError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        unwritten = error
    unwritten = _write_out() or unwritten
    if unwritten is not None:
        print(f"ratchet: the output could not be written: {unwritten.strerror}", file=sys.stderr)
        print("  what you can do: free some space; `replay` and `report` tell it again at any time", file=sys.stderr)
    sys.exit(code or (3 if unwritten is not None else 0))


def _write_out() -> OSError | None:
    """Write out what was printed; what cannot be is given up, so that the interpreter does not try it again."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None if isinstance(error, BrokenPipeError) else error  # a reader that left has seen enough
    return None


@app.command()
def start(
    session_file: SessionFile = Path("session.toml"),
    db: Db = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the estimate, touch nothing.")] = False,
    continue_from: Annotated[
        str | None,
        typer.Option(
            "--continue-from",
            metavar="SESSION",
            help='Take over list, findings and blocks of an earlier session on this target; "latest" for the newest.',
        ),
    ] = None,
) -> None:
    """Tune the server that the session file names, unattended, and leave the better or the original one serving."""
    from agent.config import load

    if dry_run and continue_from is not None:
        raise ConfigError("--dry-run knows nothing of earlier sessions", do="leave out --dry-run or --continue-from")

    config = load(session_file)
    from rich.console import Console

    from agent import operate
    from agent.places import database_for

    database = database_for(config.target.name, db)
    if dry_run:
        _print_diagnosis(asyncio.run(operate.preflight(config, database)), as_json=False)
        return
    raise typer.Exit(asyncio.run(operate.start(config, database, Console(), continues=continue_from)))


@app.command()
def resume(session: SessionId = None, db: Db = None) -> None:
    """Take an interrupted session up again: look at the host first, repeat nothing that was finished."""
    from rich.console import Console

    from agent import operate

    raise typer.Exit(asyncio.run(operate.resume(_find(db), session, Console())))


@app.command()
def status(session: SessionId = None, db: Db = None, as_json: Json = False) -> None:
    """Where a session stands: what it does, the list, what came of it, time used."""
    from agent.status import summary
    from state.store import Store

    with Store.read(_find(db)) as store:
        found = summary(store, _session_id(store, session))
        if as_json:
            _print_json(found)
            return
        from rich.console import Console

        from agent.live import todo_table

        console = Console()
        head = f"{found['target']} session {found['session']}: {found['status']} {found['reason']}"
        console.print(head, style="bold", markup=False, highlight=False)
        console.print(found["headline"], markup=False, highlight=False)
        console.print(
            f"{found['active_s'] / 60:.1f} of {found['budget_s'] / 60:.0f} min, {found['experiments_judged']} judged, "
            f"{found['restarts']} restarts, {found['downtime_s']:.0f} s of downtime"
        )
        if found["waits"] is not None:
            console.print(found["waits"], markup=False, highlight=False)
        console.print(todo_table(store, found["session"]))
        if found["waits_for_approval"]:
            console.print(
                f"waits for `approve`: {', '.join(found['waits_for_approval'])}", markup=False, highlight=False
            )
        console.print(f"next: {found['next_step']}")


@app.command()
def sessions(db: Db = None, as_json: Json = False) -> None:
    """All sessions of a database, oldest first."""
    from agent.report import headline
    from state.replay import iso
    from state.store import Store

    with Store.read(_find(db)) as store:
        rows = [
            {
                "session": row.id,
                "target": row.target,
                "status": row.status.value,
                "started": iso(row.started_at),
                "ended": iso(row.ended_at) if row.ended_at is not None else None,
                "headline": headline(store, row.id),
            }
            for row in store.sessions()
        ]
    if as_json:
        _print_json(rows)
        return
    for row in rows:
        print(f"{row['session']}  {row['target']}  {row['status']:<12} {row['started']}  {row['headline']}")


@app.command()
def replay(
    session: SessionId = None,
    db: Db = None,
    as_json: Json = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute every verdict again instead; exit code 1 for any difference.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="KEY=VALUE",
            help="Judge again with a key under judge, validity or workload.guards changed; repeatable.",
        ),
    ] = None,
) -> None:
    """The decision log with reasons and evidence, told from the store alone; or judged again from what was measured."""
    from state.store import Store

    if verify and what_if:
        raise ConfigError("--verify and --what-if are two questions", do="ask one after the other")
    with Store.read(_find(db)) as store:
        session_id = _session_id(store, session)
        if verify:
            raise typer.Exit(_verify(store, session_id, as_json))
        if what_if:
            _what_if(store, session_id, what_if, as_json)
            return
        from state.replay import decision_log

        log = decision_log(store, session_id)
    if as_json:
        _print_json(log)
        return
    from rich.console import Console

    from agent.live import decision_table

    Console().print(decision_table(log))


@app.command()
def report(
    session: SessionId = None,
    db: Db = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
) -> None:
    """The morning report as Markdown."""
    from agent.report import markdown
    from state.store import Store

    with Store.read(_find(db)) as store:
        text = markdown(store, _session_id(store, session))
    if output is None:
        print(text, end="")
    else:
        try:
            output.write_text(text)
        except OSError as error:
            raise ConfigError(
                f"the report could not be written: {error.strerror}", where={"file": output}, do="name another file"
            ) from error
        print(f"written to {output}")


@app.command()
def stop(session: SessionId = None, db: Db = None) -> None:
    """Ask a running session to stop: it brings known-good back first and can be resumed."""
    from agent.inbox import ask_to_stop
    from state.models import SessionStatus
    from state.store import Store

    path = _find(db)
    with Store.read(path) as store:
        row = store.session(_session_id(store, session))
    if row.status is not SessionStatus.RUNNING:
        print(f"session {row.id} is not running: {row.status.value} {row.reason}")
        return
    ask_to_stop(path, row.id)
    print(f"asked session {row.id} (process {row.agent_pid}) to stop; `status` shows when known-good serves")


@app.command()
def approve(todo: TodoId, reason: Reason = "", session: OfSession = None, db: Db = None) -> None:
    """Let a gated todo have its turn: what changes the host, or what the session file puts behind a gate."""
    from agent.telling import approve as approve_todo

    print(approve_todo(_find(db), session, todo, reason))


@todo_app.command("list")
def todo_list(session: SessionId = None, db: Db = None, as_json: Json = False) -> None:
    """The whole list in the order in which it would be worked off, with gain, confidence, cost, risk and needs."""
    from agent.todo_list import listing
    from state.store import Store

    with Store.read(_find(db)) as store:
        found = listing(store, _session_id(store, session))
    if as_json:
        _print_json(found)
        return
    from rich.console import Console

    from agent.live import list_table

    console = Console()
    console.print(list_table(found["todos"]))
    for word in found["waiting"]:
        console.print(f"said, and not heard by the session yet: {word}", markup=False, highlight=False)


@todo_app.command("show")
def todo_show(todo: TodoId, session: OfSession = None, db: Db = None, as_json: Json = False) -> None:
    """One todo with its history: who changed it, when, from what to what, and why."""
    from agent.todo_list import shown
    from state.store import Store

    with Store.read(_find(db)) as store:
        found = shown(store, _session_id(store, session), todo)
    if as_json:
        _print_json(found)
        return
    from rich.console import Console

    from agent.live import history_table, todo_facts

    Console().print(todo_facts(found), history_table(found["history"]), sep="\n")


@todo_app.command("add")
def todo_add(
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="CHANGE",
            help="flag:--name=value, flag:--name, env:NAME=value, without:--name or without:NAME; repeatable.",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="TOML or JSON file of one [[experiments]] entry instead.")
    ] = None,
    todo_id: Annotated[str | None, typer.Option("--id", help="Its id; made from the changes by default.")] = None,
    title: Annotated[str | None, typer.Option("--title", help="What is tried, in a few words.")] = None,
    hypothesis: Annotated[str | None, typer.Option("--hypothesis", help="Why it could help.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Topic; repeatable.")] = None,
    tier: Annotated[int | None, typer.Option("--tier", help="1 is tried before 2, 2 before 3.")] = None,
    priority: Annotated[float | None, typer.Option("--priority", help="0 to 1; the higher is tried first.")] = None,
    gain: Annotated[float | None, typer.Option("--gain", help="Hoped fraction at the objective, 0.1 = 10 %.")] = None,
    numerics: Annotated[bool, typer.Option("--numerics", help="Answers can differ: they are compared.")] = False,
    reason: Reason = "",
    session: OfSession = None,
    db: Db = None,
) -> None:
    """Put an experiment of your own on the list of a session."""
    from agent.telling import add

    tags = None if tag is None else tuple(tag)
    fields: dict[str, object] = {"id": todo_id, "title": title, "hypothesis": hypothesis, "tags": tags, "tier": tier}
    fields |= {"priority": priority, "expected_gain": gain, "numerics": numerics or None}
    print(add(_find(db), session, change or (), file, fields, reason))


@todo_app.command("drop")
def todo_drop(todo: TodoId, reason: Reason = "", session: OfSession = None, db: Db = None) -> None:
    """Take a todo off the list: it is not tried, and stays visible with your reason."""
    from agent.telling import drop

    print(drop(_find(db), session, todo, reason))


@todo_app.command("priority")
def todo_priority(
    todo: TodoId,
    to: Annotated[float, typer.Argument(help="0 to 1; within its disruption and tier the higher is tried first.")],
    reason: Reason = "",
    session: OfSession = None,
    db: Db = None,
) -> None:
    """Give a todo another priority."""
    from agent.telling import reprioritise

    print(reprioritise(_find(db), session, todo, to, reason))


@app.command()
def restore(
    session: SessionId = None,
    db: Db = None,
    original: Annotated[bool, typer.Option("--original", help="The configuration that was found at first.")] = False,
) -> None:
    """Put the known-good (or the original) configuration back now."""
    from agent import operate

    trial = asyncio.run(operate.restore(_find(db), session, original))
    process = trial.process.pid if trial.process is not None else "unknown"
    print(f"the {'original' if original else 'known-good'} configuration serves as process {process}")


@app.command()
def doctor(session_file: SessionFile = Path("session.toml"), as_json: Json = False) -> None:
    """Read-only pre-flight: what would be found, allowed and done, and how long it would take."""
    from agent import operate
    from agent.config import load
    from agent.places import database_for

    config = load(session_file)
    diagnosis = asyncio.run(operate.preflight(config, database_for(config.target.name, None)))
    _print_diagnosis(diagnosis, as_json)
    raise typer.Exit(diagnosis.exit_code)


@app.command()
def selftest(
    session_file: SessionFile = Path("session.toml"),
    db: Db = None,
    relaunches: Annotated[
        int, typer.Option("--relaunches", min=0, help="Launch the unchanged server anew so often; 0 restarts nothing.")
    ] = 0,
    runs: Annotated[int, typer.Option("--runs", min=2, help="Runs at each load point on the serving launch.")] = 12,
    experiments: Annotated[
        int | None,
        typer.Option("--experiments", min=1, help="Experiments of a night; by default what would be allowed."),
    ] = None,
    nights: Annotated[int, typer.Option("--nights", min=50, help="Nights to rehearse.")] = 400,
    of: Annotated[
        str | None, typer.Option("--of", help="Rehearse with the noise of this session; touches no host.")
    ] = None,
    as_json: Json = False,
) -> None:
    """On this server's own noise: how often the judge would err in a night, and the smallest gain it would find."""
    from agent.config import SessionConfig, load
    from agent.manners import within_ceiling

    if of is not None:
        database, session, number = _find(db), of, experiments or 20
    else:
        config = within_ceiling(load(session_file))
        from rich.console import Console

        from agent import operate
        from agent.places import database_for

        database = database_for(config.target.name, db)
        code, session, number = asyncio.run(
            operate.selftest(config, database, Console(stderr=as_json), relaunches, runs, experiments)
        )
        if code:
            raise typer.Exit(code)
    import numpy as np

    from agent.selftest import rehearse
    from state.store import Store

    with Store.read(database) as store:
        if of is not None:
            config = SessionConfig.model_validate(store.session(session).config)
        told = rehearse(store, session, config, number, nights, np.random.default_rng(config.seed))
    if as_json:
        _print_json({**told.model_dump(mode="json"), "session": session, "smallest": told.smallest})
        return
    from rich.console import Console

    from agent.live import selftest_table

    Console().print(selftest_table(told))


@app.command()
def demo(
    check: Annotated[bool, typer.Option("--check", help="Fail unless a gain was kept.")] = False,
    folder: Annotated[Path, typer.Option("--folder", help="Where its database and files go.")] = Path(".ratchet"),
) -> None:
    """The whole thing on this machine: real SSH, a real llama.cpp server, a real small model."""
    from rich.console import Console

    from agent.demo import run_demo

    raise typer.Exit(asyncio.run(run_demo(folder, check, Console())))


# --- parts -------------------------------------------------------------------------------------------------


def _verify(store: Store, session_id: str, as_json: bool) -> int:
    from agent.verify import verify

    audit = verify(store, session_id)
    if as_json:
        _print_json({**audit.model_dump(mode="json"), "clean": audit.clean, "summary": audit.summary})
    else:
        from rich.console import Console

        from agent.live import audit_tables

        Console().print(*audit_tables(audit), audit.summary, sep="\n", markup=False, highlight=False)
    return 0 if audit.clean else 1


def _what_if(store: Store, session_id: str, wishes: list[str], as_json: bool) -> None:
    from agent.what_if import what_if

    unclear = [wish for wish in wishes if "=" not in wish]
    if unclear:
        do = "write KEY=VALUE, as in judge.minimal_effect=0.05"
        raise ConfigError(f"--what-if {unclear[0]} names no value", do=do)
    found = what_if(store, session_id, {key.strip(): value for key, _, value in (w.partition("=") for w in wishes)})
    if as_json:
        _print_json({**found.model_dump(mode="json"), "summary": found.summary})
        return
    from rich.console import Console

    from agent.live import what_if_table

    Console().print(what_if_table(found), found.summary, sep="\n", markup=False, highlight=False)


def _print_diagnosis(diagnosis: Any, as_json: bool) -> None:
    if as_json:
        _print_json(diagnosis.model_dump(mode="json"))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    marks = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failed": "[red]failed[/red]"}
    checks = Table(box=None, padding=(0, 1))
    for name in ("check", "", "found", "what you can do"):
        checks.add_column(name, overflow="fold")
    for check in diagnosis.checks:
        checks.add_row(check.name, marks[check.status], escape(check.text), escape(check.do))
    console.print(checks)
    plan = Table(box=None, padding=(0, 1), title="plan, least disruptive first", title_justify="left")
    for name in ("experiment", "disruption", "hoped", "would be"):
        plan.add_column(name, overflow="fold")
    for item in diagnosis.plan:
        plan.add_row(escape(item.title), item.disruption, f"{item.expected_gain:+.0%}", escape(item.verdict))
    if diagnosis.plan:
        console.print(plan)
        console.print(f"at most about {diagnosis.estimate_s / 60:.0f} min, less when experiments end early")


def _find(given: Path | None) -> Path:
    from agent.places import find_database

    return find_database(given)


def _session_id(store: Store, given: str | None) -> str:
    return store.session(given).id if given is not None else store.latest_session().id


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
