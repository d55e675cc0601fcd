"""Tells a session what a person wants: checks a word at once as far as possible and leaves it in the inbox.

It must not write the database: the session does that when it hears the word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.config import SessionConfig
from agent.inbox import leave_word, new_word_id, waiting
from agent.new_todo import from_file, worded
from agent.policy import admission
from agent.spoken import obstacle
from agent.todo_list import unknown
from state.errors import ConfigError
from state.models import SessionStatus, Todo, TodoStatus
from state.store import SessionRow, Store
from state.words import AddWord, ApproveWord, DropWord, PriorityWord, Word


def add(
    database: Path,
    session: str | None,
    changes: Sequence[str],
    file: Path | None,
    fields: Mapping[str, Any],
    reason: str,
) -> str:
    """Ask for an experiment, worded as changes with fields or read from a file. Raises ConfigError."""
    given = [name for name, value in fields.items() if value is not None]
    if file is not None and (changes or given):
        raise ConfigError("--file holds the whole experiment", do="leave out the other options, or --file")

    def word(todos: Sequence[Todo]) -> Word:
        taken = {todo.id for todo in todos}
        experiment = from_file(file) if file is not None else worded(changes, fields, taken)
        return AddWord(id=new_word_id(), at=time.time(), reason=reason, experiment=experiment)

    return _tell(database, session, word)


def drop(database: Path, session: str | None, todo: str, reason: str) -> str:
    """Ask that a todo is not tried; what happens when. Raises ConfigError."""
    return _tell(database, session, lambda _: DropWord(id=new_word_id(), at=time.time(), reason=reason, todo=todo))


def reprioritise(database: Path, session: str | None, todo: str, priority: float, reason: str) -> str:
    """Ask for another priority of a todo; what happens when. Raises ConfigError."""
    if not 0 <= priority <= 1:
        raise ConfigError(f"{priority:g} is no priority", do="give a number from 0 to 1")
    word = PriorityWord(id=new_word_id(), at=time.time(), reason=reason, todo=todo, priority=priority)
    return _tell(database, session, lambda _: word)


def approve(database: Path, session: str | None, todo: str, reason: str) -> str:
    """Approve a gated todo; what happens when. Raises ConfigError."""
    return _tell(database, session, lambda _: ApproveWord(id=new_word_id(), at=time.time(), reason=reason, todo=todo))


def _tell(database: Path, session: str | None, word: Callable[[Sequence[Todo]], Word]) -> str:
    """Leave a word, unless it can be seen at once that it can't be obeyed; what happens when."""
    with Store.read(database) as store:
        row = store.session(session) if session is not None else store.latest_session()
        _refuse_over(row)
        todos = _after_those_waiting(store, row)
    made = word(todos)
    against = obstacle(made, todos)
    if against is not None and not isinstance(made, AddWord) and made.todo not in {todo.id for todo in todos}:
        raise unknown(made.todo, [todo.id for todo in todos])
    if against is not None:
        raise ConfigError(f"{made}: {against}", do="`todo list` shows where each stands")
    _leave(database, row, made)
    return f"{made}\n{_when(row)}"


def _leave(database: Path, row: SessionRow, word: Word) -> None:
    """A session that ends in this very moment does not look into its inbox again: then the word is taken back."""
    file = leave_word(database, row.id, word)
    with Store.read(database) as store:
        now = store.session(row.id)
        if now.status is not SessionStatus.DONE or word.id in {heard.id for heard in store.words(row.id)}:
            return
    with suppress(OSError):
        file.unlink(missing_ok=True)
    _refuse_over(now)


def _refuse_over(row: SessionRow) -> None:
    if row.status is SessionStatus.DONE:
        do = "`start --continue-from latest` takes its list over; then say it again"
        raise ConfigError(f"session {row.id} is over: {row.reason}", do=do)


def _after_those_waiting(store: Store, row: SessionRow) -> list[Todo]:
    """The list as it will be once the words that wait already are heard."""
    todos = {todo.id: todo for todo in store.todos(row.id)}
    policy = SessionConfig.model_validate(row.config).policy
    for word in waiting(store.path, row.id):
        if obstacle(word, [*todos.values()]) is not None:
            continue
        if isinstance(word, AddWord):
            status, reason = admission(word.experiment, policy)
            made = Todo(experiment=word.experiment, priority=word.experiment.priority, status=status, reason=reason)
            todos[word.todo] = made
        elif not isinstance(word, PriorityWord):
            status = TodoStatus.SKIPPED if isinstance(word, DropWord) else TodoStatus.PENDING
            reason = "you said so just now" if status is TodoStatus.SKIPPED else ""
            todos[word.todo] = todos[word.todo].model_copy(update={"status": status, "reason": reason})
    return [*todos.values()]


def _when(row: SessionRow) -> str:
    if row.status is SessionStatus.RUNNING:
        return f"session {row.id} (process {row.agent_pid}) picks it up at its next choice"
    return f"session {row.id} is {row.status.value}: it is picked up by the next `resume`"
