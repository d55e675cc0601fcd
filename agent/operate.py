"""The commands that reach a target: start, resume, restore and the pre-flight, each from a connection to an end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from agent.config import SessionConfig
from agent.connect import connect, planner_for
from agent.doctor import Diagnosis, examine
from agent.live import LivePicture, PlainLines
from agent.progress import Silent
from agent.report import headline, markdown
from agent.session import (
    Runner,
    holder_of,
    new_session_id,
    open_session,
    refuse_ended,
    refuse_unfinished,
    refuse_unusable,
)
from state.errors import RatchetError
from state.models import Trial
from state.store import SessionRow, Store
from tools.remote import RemoteTarget


@asynccontextmanager
async def connected(config: SessionConfig) -> AsyncIterator[RemoteTarget]:
    """A target that is let go of at the end."""
    target = await connect(config)
    try:
        yield target
    finally:
        await target.close()


async def start(config: SessionConfig, database: Path, console: Console, again: str | None = None) -> int:
    """Adopt what runs and tune it; the exit code. `again` is what to type to go on after a stop."""
    with Store.write(database) as store:
        refuse_unfinished(store)
        async with connected(config) as target:
            refuse_unusable(config, await target.adopt(), await target.trouble())
            await target.prepare()
            adoption = await target.adopt()
            session_id = new_session_id(store.clock())
            await target.acquire(session_id, holder_of(session_id, os.getpid()))
            try:
                open_session(store, session_id, config, adoption)
            except RatchetError:
                await target.release()
                raise
            return await _drive(store, session_id, target, config, console, again)


async def resume(database: Path, session: str | None, console: Console, again: str | None = None) -> int:
    """Take a session up again; the exit code."""
    with Store.write(database) as store:
        row = _row(store, session)
        refuse_ended(row)
        config = SessionConfig.model_validate(row.config)
        async with connected(config) as target:
            await _take_up(target, row)
            return await _drive(store, row.id, target, config, console, again)


async def restore(database: Path, session: str | None, original: bool) -> Trial:
    """Put known-good (or the original) back; the trial that serves."""
    with Store.write(database) as store:
        row = _row(store, session)
        config = SessionConfig.model_validate(row.config)
        async with connected(config) as target:
            await _take_up(target, row)
            runner = Runner(store, row.id, target, config, planner_for(config), Silent())
            return await runner.put_back(original)


async def preflight(config: SessionConfig) -> Diagnosis:
    """What `start` would find; touches nothing."""
    async with connected(config) as target:
        return await examine(target, config, planner_for(config))


async def _take_up(target: RemoteTarget, row: SessionRow) -> None:
    """Give the target back what an earlier agent process knew of it, and take it over.

    That process is dead for sure: its lock on the database is ours now.
    """
    await target.prepare(row.adoption)
    await target.learn(row.adoption.spec)
    predecessor = None if row.agent_pid is None else holder_of(row.id, row.agent_pid)
    await target.acquire(row.id, holder_of(row.id, os.getpid()), predecessor)


async def _drive(
    store: Store, session_id: str, target: RemoteTarget, config: SessionConfig, console: Console, again: str | None
) -> int:
    """Run with a live picture on a terminal, with lines elsewhere; the report is written however it ends."""
    planner = planner_for(config)
    report = store.path.with_name(f"report-{session_id}.md")
    try:
        if console.is_terminal:
            picture = LivePicture(store, session_id, console)
            with picture.shown():
                code = await Runner(store, session_id, target, config, planner, picture).run()
        else:
            lines = PlainLines(lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
            code = await Runner(store, session_id, target, config, planner, lines).run()
    finally:
        report.write_text(markdown(store, session_id))
    console.print(headline(store, session_id), style="bold", highlight=False, markup=False)
    console.print(f"report: {report}", f"log: ratchet replay --db {store.path}", sep="    ", soft_wrap=True)
    if code == 4:
        console.print(f"go on with: {again or f'ratchet resume --db {store.path}'}", soft_wrap=True)
    return code


def _row(store: Store, session: str | None) -> SessionRow:
    return store.session(session) if session is not None else store.latest_session()
