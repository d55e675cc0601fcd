"""What becomes of a person's words: each is obeyed once, or it is written down why it cannot be; it asks no host.

A word changes the list and nothing else. While an experiment is being judged nothing is obeyed, since the number of
experiments that are left decides how much evidence each of them needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.config_checks import RESERVED
from agent.inbox import letters, put_away
from agent.policy import admission
from state import events as ev
from state.models import Decision, DecisionKind, Policy, Purpose, Todo, TodoStatus, Who
from state.words import AddWord, ApproveWord, DropWord, PriorityWord, Word

if TYPE_CHECKING:
    from agent.hands import Hands

WAITS = frozenset({TodoStatus.PENDING, TodoStatus.GATED})
"""Status of a todo whose turn is still to come."""
ENDING = "the session is at its end, so it is for the next one (`start --continue-from`)"


def listen(hands: Hands, ending: bool = False) -> None:
    """Obey what was said since the last time. `ending`: nothing more is tried in this session."""
    store, session_id = hands.store, hands.session_id
    under_way = store.open_comparison(session_id)
    if under_way is not None and under_way.experiment.tries:
        return
    for letter in letters(store.path, session_id):
        if letter.word is None:
            text = f"a word in the inbox cannot be read and was set aside: {letter.file.name}"
            hands.write(ev.Noted(text=text, subject=session_id))
        elif letter.word.id not in {word.id for word in store.words(session_id)}:
            _hear(hands, letter.word, ending)
        put_away(letter)


def obstacle(word: Word, todos: Sequence[Todo]) -> str | None:
    """Why a word cannot be obeyed with this list, None when it can."""
    todo = next((one for one in todos if one.id == word.todo), None)
    if isinstance(word, AddWord):
        return None if todo is None else f"there is a todo {word.todo} already; an id is used once"
    if todo is None:
        return f"there is no todo {word.todo}"
    if todo.id in RESERVED or todo.experiment.purpose is not Purpose.TRY:
        return f"{todo.id} is a check that the session makes for itself"
    if isinstance(word, ApproveWord) and todo.status is TodoStatus.PENDING:
        return f"{todo.id} needs no approval (any more): it is pending"
    wanted = {TodoStatus.GATED} if isinstance(word, ApproveWord) else WAITS
    if todo.status in wanted:
        return None
    return f"{todo.id} is {todo.status.value.replace('_', ' ')}" + (f": {todo.reason}" if todo.reason else "")


def outcome(word: Word, todos: Sequence[Todo], policy: Policy) -> tuple[list[ev.Event], str]:
    """What a word does to the list, and how that is explained."""
    against = obstacle(word, todos)
    if against is not None:
        return [], f"it cannot be obeyed: {against}" + (f"; it was said because: {word.reason}" if word.reason else "")
    because = f"{_VERBS[word.kind]} by a person" + (f": {word.reason}" if word.reason else "")
    if isinstance(word, AddWord):
        admitted = admission(word.experiment, policy)
        added = ev.TodoAdded(experiment=word.experiment, status=admitted.status, reason=admitted.reason or because)
        return [added], f"{because}; {admitted.status.value}" + (f": {admitted.reason}" if admitted.reason else "")
    return [_changed(word, because)], because


_VERBS = {"add": "added", "drop": "dropped", "priority": "reordered", "approve": "approved"}


def _changed(word: DropWord | PriorityWord | ApproveWord, because: str) -> ev.TodoChanged:
    status, priority = None, None
    if isinstance(word, PriorityWord):
        priority = word.priority
    else:
        status = TodoStatus.SKIPPED if isinstance(word, DropWord) else TodoStatus.PENDING
    return ev.TodoChanged(experiment_id=word.todo, status=status, priority=priority, reason=because, by=Who.PERSON)


def _hear(hands: Hands, word: Word, ending: bool) -> None:
    """Write down the word with what follows from it, in one go."""
    todos = hands.store.todos(hands.session_id)
    happened, reason = outcome(word, todos, hands.config.policy)
    decision: Decision = hands.store.decide(
        hands.session_id,
        kind=DecisionKind.PERSON,
        subject=word.todo,
        what=str(word),
        reason=f"{reason}; {ENDING}" if ending and happened else reason,
        evidence=(word.id,),
    )
    hands.write(ev.WordHeard(word=word), *happened, ev.DecisionMade(decision=decision))
