"""The commands that reach a target: start, resume, restore and the pre-flight, each from a connection to an end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rich.console import Console

from agent import notify
from agent.config import SessionConfig
from agent.config_model import api_key
from agent.connect import connect, endpoint_for, planner_for
from agent.continuing import session_to_continue, take_over
from agent.doctor import Diagnosis, examine
from agent.faults import fault_point
from agent.inbox import readdress
from agent.live import LivePicture, PlainLines
from agent.manners import unmeasured, within_ceiling
from agent.open_files import refuse_hopeless, shortages
from agent.policy import Costs
from agent.progress import Silent
from agent.report import headline, lasting, markdown
from agent.room import refuse_no_room_here, refuse_no_room_there
from agent.selftest import session_config
from agent.session import (
    Runner,
    adopted_now,
    new_session_id,
    open_session,
    refuse_ended,
    refuse_unfinished,
    refuse_unusable,
)
from agent.tenure import any_holder_of, holder_of
from state import events as ev
from state.errors import ConfigError, RatchetError, StoppedByOperator, StoreError
from state.journal import FaultPoint
from state.models import Role, Trial
from state.store import SessionRow, Store
from tools.remote import RemoteTarget


@asynccontextmanager
async def connected(config: SessionConfig, kind: type[RemoteTarget] = RemoteTarget) -> AsyncIterator[RemoteTarget]:
    """A target that is let go of at the end. Inside a session Ctrl-C is the Runner's; here it came before or after."""
    try:
        target = await connect(config, kind)
        try:
            yield target
        finally:
            await target.close()
    except asyncio.CancelledError:
        raise StoppedByOperator(
            "stopped on request, outside a session's steps",
            where={"target": config.target.name, "host": config.target.host},
            do="`status` says whether a session is open; `resume` goes on with it, `start` begins one",
        ) from None


async def start(
    config: SessionConfig,
    database: Path,
    console: Console,
    again: str | None = None,
    kind: type[RemoteTarget] = RemoteTarget,
    continues: str | None = None,
) -> int:
    """Adopt what runs and tune it; the exit code.

    `again` is what to type to go on after a stop, `continues` the session whose list is taken over (or `latest`).
    """
    fault = fault_point(os.environ)
    if config.planner.kind == "model" and config.planner.model is not None:
        api_key(config.planner.model, os.environ)  # at night nobody could mend it
    refuse_no_room_here(database)
    left_out, config = unmeasured(config), within_ceiling(config)
    with Store.write(database) as store:
        refuse_unfinished(store)
        earlier = None if continues is None else session_to_continue(store, continues, config.target.name)
        async with connected(config, kind) as target:
            await target.refuse_held()
            await refuse_no_room_there(target)
            found = await target.adopt()
            refuse_unusable(config, found, await target.trouble())
            files = shortages(found, config.workload, await target.open_files())
            refuse_hopeless(files)
            await target.client()
            await target.prepare()
            adoption = await target.adopt()
            session_id = new_session_id(store.clock())
            await target.acquire(session_id, holder_of(session_id, os.getpid()))
            try:
                carried = () if earlier is None else await take_over(store, earlier, config, adoption, target)
                open_session(store, session_id, config, adoption, left_out, carried)
                if files:
                    store.append(session_id, *(ev.Noted(text=one.text, subject=session_id) for one in files))
            except (RatchetError, asyncio.CancelledError):
                await target.release()
                raise
            fault("agent:opened")
            if earlier is not None:
                readdress(database, earlier.id, session_id)
            return await _drive(store, session_id, target, config, console, again, fault)


async def selftest(
    config: SessionConfig, database: Path, console: Console, relaunches: int, runs: int, experiments: int | None
) -> tuple[int, str, int]:
    """Measure the unchanged server in a session of its own: exit code, session and how many experiments a night has."""
    diagnosis = await preflight(config, database)
    failed = [check for check in diagnosis.checks if check.status == "failed"]
    if failed:
        _say(console, f"{failed[0].name}: {failed[0].text}; `doctor` says more")
        return diagnosis.exit_code, "", 0
    allowed = sum(1 for item in diagnosis.plan if item.verdict == "allowed" and item.changes)
    asked = session_config(config, relaunches, runs)
    _say(console, f"self-test: {_size(asked)}; the unchanged server {_treated(relaunches)}")
    code = await start(asked, database, console)
    with Store.read(database) as store:
        session_id = store.latest_session().id
    return code, session_id, experiments or max(1, min(allowed, config.policy.budget.experiments))


def _size(config: SessionConfig) -> str:
    """What a self-test will do, with a time that rests on guesses until runs were seen."""
    runs = config.judge.baseline_runs * len(config.workload.load_points)
    guess, relaunches = Costs(), config.planner.relaunches
    launches = relaunches * (guess.launch_s + 2 * guess.default_run_s)
    minutes = (runs * guess.default_run_s + launches) / 60
    return f"{runs} runs and {relaunches} launches, about {minutes:.0f} min if a run takes {guess.default_run_s:.0f} s"


def _treated(relaunches: int) -> str:
    return f"is launched anew {relaunches} times" if relaunches else "is only measured, nothing is restarted"


async def resume(database: Path, session: str | None, console: Console, again: str | None = None) -> int:
    """Take a session up again; the exit code."""
    _refuse_missing(database)
    fault = fault_point(os.environ)
    with Store.write(database) as store:
        row = _row(store, session)
        refuse_ended(row)
        config = SessionConfig.model_validate(row.config)
        async with connected(config) as target:
            await _take_up(store, target, row)
            fault("agent:took-over")
            return await _drive(store, row.id, target, config, console, again, fault)


async def restore(database: Path, session: str | None, original: bool) -> Trial:
    """Put known-good (or the original) back; the trial that serves."""
    _refuse_missing(database)
    fault = fault_point(os.environ)
    with Store.write(database) as store:
        row = _row(store, session)
        config = SessionConfig.model_validate(row.config)
        async with connected(config) as target:
            await _take_up(store, target, row)
            fault("agent:took-over")
            runner = Runner(store, row.id, target, config, planner_for(config), Silent(), fault)
            return await runner.put_back(original)


async def preflight(config: SessionConfig, database: Path) -> Diagnosis:
    """What `start` would find; touches nothing."""
    async with connected(config) as target:
        return await examine(target, config, planner_for(config), database)


async def _take_up(store: Store, target: RemoteTarget, row: SessionRow) -> None:
    """Give the target back what an earlier agent process knew of it, and take it over.

    All of the session's are dead for sure, also one that died before it could write its name: the lock on the database
    is ours now.
    """
    await target.prepare(adopted_now(store, row))
    await target.learn(row.adoption.spec)
    await target.acquire(row.id, holder_of(row.id, os.getpid()), any_holder_of(row.id))
    known_good = store.role(row.id, Role.KNOWN_GOOD)
    if known_good is not None:  # at once: the earlier agent's watcher has left, and what serves may be an experiment
        await target.guard(store.spec(known_good))


async def _drive(
    store: Store,
    session_id: str,
    target: RemoteTarget,
    config: SessionConfig,
    console: Console,
    again: str | None,
    fault: FaultPoint,
) -> int:
    """Run with a live picture on a terminal, with lines elsewhere; the report is written however it ends."""
    planner, endpoint = planner_for(config), endpoint_for(config, os.environ)
    report = store.path.with_name(f"report-{session_id}.md")
    try:
        if console.is_terminal:
            picture = LivePicture(store, session_id, console)
            with picture.shown():
                code = await Runner(store, session_id, target, config, planner, picture, fault, endpoint).run()
        else:
            lines = PlainLines(lambda text: _say(console, text))
            code = await Runner(store, session_id, target, config, planner, lines, fault, endpoint).run()
    finally:
        _write_report(store, session_id, report, console)
        _tell(store, session_id, config, console)
    _say(console, headline(store, session_id), style="bold")
    commands = lasting(store, session_id)
    if commands:
        _say(console, "to make it last beyond a reboot:", style="bold")
        _say(console, commands)
    _say(console, f"report: {report}    log: ratchet replay --db {store.path}")
    if code == 4:
        _say(console, f"go on with: {again or f'ratchet resume --db {store.path}'}")
    return code


def _tell(store: Store, session_id: str, config: SessionConfig, console: Console) -> None:
    """A message that cannot be sent is said here and changes nothing else."""
    row = store.session(session_id)
    trouble = notify.tell(config.notify, row.status, f"Ratchet on {row.target}: {row.status}", row.reason)
    if trouble is not None:
        _say(console, f"nobody could be told: {trouble}")


def _write_report(store: Store, session_id: str, report: Path, console: Console) -> None:
    """A report that cannot be written is only said to be so: the command `report` makes it at any time."""
    part = report.with_name(f".{report.name}.part")
    try:
        part.write_text(markdown(store, session_id))
        part.replace(report)
    except (OSError, StoreError) as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        _say(console, f"no report was written: {error}")


def _say(console: Console, text: str, style: str | None = None) -> None:
    """A log that takes no more lines, on a full disk for instance, must not end a session."""
    with suppress(OSError):
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _refuse_missing(database: Path) -> None:
    """Opening for writing would make an empty one, which then looks like a lost session."""
    if not database.exists():
        raise ConfigError(f"there is no database {database}", do="name the session's database with --db")


def _row(store: Store, session: str | None) -> SessionRow:
    return store.session(session) if session is not None else store.latest_session()
