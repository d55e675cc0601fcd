"""Every point on the simulated target, killed by a real SIGKILL, and looked at from outside after the next resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash import witness
from tests.crash.kinds import kind
from tests.crash.lives import KILLED, life, two_at_a_time
from tests.crash.nights import CHANGES, Night, shortened
from tests.crash.report import Case, Ledger

STOPPED = 4
STRIDE = 7
"""Of what is not tried at every point, every seventh is: a prime, so that all kinds have their turn."""
FEW = 3 * STRIDE
MOST_RESUMES = 3


class Undisturbed(NamedTuple):
    """A session to which nothing happened."""

    night: Night
    broken: Path
    """Where the files of sessions lie that did not end as they must."""
    points: tuple[str, ...]
    """Names of all points in the order in which they were passed."""
    outcomes: dict[str, str]
    effects: Counter[tuple[str, str]]
    """How often each configuration was launched and each load point run."""
    todos: dict[str, tuple[str, float]]
    """Status and priority of each todo."""
    decided: Counter[tuple[str, str]]
    """How often the list was refined, a person heard, something chosen and something kept, and what of."""


class Wish(NamedTuple):
    """One life that is to be disturbed, and what somebody does to its files afterwards."""

    command: str
    fault: str
    row: str
    delete_checkpoint: bool = False


def undisturbed(folder: Path, broken: Path, night: Night) -> Undisturbed:
    """Live through a session without faults."""
    names = folder.with_suffix(".points")
    code = life(folder, night, fault=f"list:{names}")
    if code != 0:
        raise RuntimeError(f"a session without faults ended with {code}: {(folder / 'said').read_text()}")
    database = folder / "state.db"
    return Undisturbed(
        night,
        broken,
        tuple(names.read_text().splitlines()),
        witness.outcomes(database),
        _effects(folder),
        witness.todos(database),
        witness.decided(database),
    )


# --- what is tried -----------------------------------------------------------------------------------------------


def every_point(scratch: Path, ledger: Ledger, night: Night, nested: str, short: bool = False) -> Undisturbed:
    """Kill a session at every point, and again in its resume: `nested` says where (no, first, all).

    first: at the points of the resume until it is back where an undisturbed session would be. SIGTERM, `restore` and
    a deleted checkpoint file come beside. Of a night that is about one thing only every seventh point is killed again
    in the resume, unless all are asked for, and SIGTERM comes at every seventh node. `short` leaves out what the
    night can do without, and nearly all of what comes beside.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    whole = undisturbed(scratch / "undisturbed", ledger.path.parent / "broken", shortened(night) if short else night)
    step = 1 if night is CHANGES or nested == "all" else STRIDE
    tasks: list[Task] = [
        partial(_one_point, scratch, whole, number, nested if number % step == 0 else "no")
        for number in range(1, len(whole.points) + 1)
    ]
    asked = {*range(1, _nodes(whole) + 1, FEW if short else step), _before_candidate(whole)}
    tasks += [partial(_term, scratch, whole, number) for number in sorted(asked)]
    if not short:
        tasks += [partial(_beside, scratch, whole, number) for number in range(1, len(whole.points) + 1, STRIDE)]
    known = set(ledger.cases)
    two_at_a_time([partial(_kept, ledger.path, known, task) for task in tasks])
    ledger.reload()
    return whole


Task = Callable[[set[str]], Iterator[Case]]
"""Makes cases, but for those whose names it is given."""


def _kept(path: Path, known: set[str], task: Task) -> None:
    """Run a task's cases in this process and add those that are new to the ledger's file."""
    ledger = Ledger(path)
    for case in task(known):
        ledger.add(case)


def _one_point(scratch: Path, whole: Undisturbed, number: int, nested: str, known: set[str]) -> Iterator[Case]:
    """A kill at one point, and kills in the resume after it."""
    first = Wish("resume", f"nth:{number}", kind(whole.points[number - 1]))
    name = f"point {number} {whole.points[number - 1]}"
    base = scratch / f"base-{number}"
    lived = _lived(base, first, whole)
    if name not in known:
        yield _case(_copy(base, scratch / f"point-{number}"), name, (first,), whole, lived=lived)
    if nested != "no":
        passed = _points(_copy(base, scratch / f"list-{number}"), whole)
        until = len(passed) if nested == "all" else _back_on_line(passed, whole.points)
        for again in range(1, until + 1):
            second = Wish("resume", f"nth:{again}", kind(passed[again - 1]))
            twice = f"{name}, then {again} {passed[again - 1]}"
            if twice not in known:
                yield _case(_copy(base, scratch / f"twice-{number}"), twice, (first, second), whole, lived=lived)
    shutil.rmtree(base)


def _term(scratch: Path, whole: Undisturbed, number: int, known: set[str]) -> Iterator[Case]:
    """SIGTERM at one node, and a kill at each point of the drain."""
    node = [name for name in whole.points if name.startswith("node:")][number - 1]
    asked = Wish("resume", f"term:{number}", f"SIGTERM at {kind(node)}")
    name = f"SIGTERM at node {number} {node}"
    if name not in known:
        yield _case(scratch / f"term-{number}", name, (asked,), whole)
    if number % STRIDE != 1 and number != _before_candidate(whole):
        return
    drained = _points(scratch / f"drain-list-{number}", whole, fault=f"term:{number},list:")
    for at, point in enumerate(drained, start=1):
        killed = Wish("resume", f"term:{number},nth:{at}", _within("drain", point))
        case = f"{name}, killed at {at} {point} of the drain"
        if case not in known:
            yield _case(scratch / f"drain-{number}", case, (killed,), whole)


def _beside(scratch: Path, whole: Undisturbed, number: int, known: set[str]) -> Iterator[Case]:
    """After a kill: the checkpoint file is deleted; `restore` comes before `resume`, and is killed too at a few."""
    row, name = kind(whole.points[number - 1]), f"point {number} {whole.points[number - 1]}"
    first = Wish("resume", f"nth:{number}", row)
    gone = f"{name}, graph.db deleted"
    if gone not in known:
        deleted = first._replace(row="graph.db deleted", delete_checkpoint=True)
        yield _case(scratch / f"gone-{number}", gone, (deleted,), whole)
    for command in ("restore", "restore --original"):
        base = scratch / f"restore-base-{number}"
        lived = _lived(base, first, whole)
        if command.endswith("--original") and witness.status(base / "state.db") == "done":
            shutil.rmtree(base)
            continue
        passed = _points(_copy(base, scratch / f"restore-list-{number}"), whole, command)
        few = passed if number % FEW == 1 else []
        steps = [Wish(command, f"nth:{at}", _within("restore", point)) for at, point in enumerate(few, start=1)]
        for at, step in enumerate([Wish(command, "", f"then {command}"), *steps]):
            case = f"{name}, then {command}" + (f", killed at {at} {passed[at - 1]}" if at else "")
            if case not in known:
                then = (first, step) if at == 0 else (first, step, Wish(command, "", f"then {command}"))
                yield _case(_copy(base, scratch / f"restore-{number}"), case, then, whole, lived=lived)
        shutil.rmtree(base)


# --- one case ----------------------------------------------------------------------------------------------------


def _case(
    folder: Path, name: str, wishes: tuple[Wish, ...], whole: Undisturbed, lived: list[str] | None = None
) -> Case:
    """Live the wished lives, resume to the end, and look at what is there.

    `lived` is what was wrong with the first life if that is over.
    """
    told: list[list[witness.Event]] = []
    wrong = [*(lived or ())]
    for at, wish in enumerate(wishes):
        if at > 0 or lived is None:
            wrong += _lived(folder, wish, whole)
        told.append(witness.committed(folder / "state.db"))
    wrong += _to_the_end(folder, told, whole)
    end = witness.committed(folder / "state.db")
    lost = [text for before in told for text in witness.lost(before, end)]
    plain = all(wish.fault.startswith("nth:") and wish.command == "resume" for wish in wishes)
    rows = [wish.row for wish in wishes]
    case = Case(
        name,
        killed=tuple(rows if len(rows) == 1 else ()),
        again=tuple(rows[1:]),
        repeated=tuple(_repeated(folder, whole if plain else None)),
        lost=tuple(dict.fromkeys(lost)),
        wrong_end=tuple(wrong + _wrong_end(folder, whole, plain)),
        strays=tuple(f"process {pid}" for pid in witness.members(os.getpid()) if pid != os.getpid()),
    )
    if not case.ok:
        shutil.copytree(folder, whole.broken / re.sub(r"[^\w.-]+", "-", name), dirs_exist_ok=True)
    shutil.rmtree(folder)
    return case


def _lived(folder: Path, wish: Wish, whole: Undisturbed) -> list[str]:
    """Live one life and say what about its end is not as wished."""
    code = life(folder, whole.night, wish.command, wish.fault)
    if wish.delete_checkpoint:
        (folder / "graph.db").unlink(missing_ok=True)
    database = folder / "state.db"
    served = json.loads((folder / "world" / "world.json").read_text())["server"]
    wrong = []
    if wish.fault.startswith("term:") and "," not in wish.fault:
        done = witness.status(database) == "done"
        if code != (0 if done else STOPPED):
            wrong.append(f"after SIGTERM the exit code was {code}: {_said(folder)}")
    elif "nth:" in wish.fault and code != KILLED:
        wrong.append(f"not killed: exit code {code}: {_said(folder)}")
    elif not wish.fault and code != 0:
        wrong.append(f"`{wish.command}` ended with {code}: {_said(folder)}")
    if code in (0, STOPPED):
        role = "original" if wish.command.endswith("--original") else "known-good"
        if not _is(served, witness.spec(database, witness.roles(database)[role])):
            wrong.append(f"`{wish.command}` ended with {code} and the {role} does not serve")
    return wrong


def _to_the_end(folder: Path, told: list[list[witness.Event]], whole: Undisturbed) -> list[str]:
    for _ in range(MOST_RESUMES):
        if witness.status(folder / "state.db") == "done":
            return []
        code = life(folder, whole.night)
        if code != 0:
            return [f"`resume` ended with {code}: {_said(folder)}"]
        told.append(witness.committed(folder / "state.db"))
    return [f"not over after {MOST_RESUMES} resumes"]


def _wrong_end(folder: Path, whole: Undisturbed, plain: bool) -> list[str]:
    database = folder / "state.db"
    now, served = witness.roles(database), json.loads((folder / "world" / "world.json").read_text())["server"]
    wrong = [] if witness.status(database) == "done" else [f"the session is {witness.status(database)}"]
    if now.get("final") != now["known-good"]:
        wrong.append("final is not known-good")
    elif not _is(served, witness.spec(database, now["final"])):
        wrong.append("what serves is not the final configuration")
    wrong += _mismeasured(folder)
    wrong += _outside(folder, whole.night)
    wrong += [f"a word still waits: {file.name}" for file in (folder / "inbox").glob("word-*")]
    if witness.outcomes(database) != whole.outcomes:
        wrong.append(f"verdicts {witness.outcomes(database)}, undisturbed {whole.outcomes}")
    if plain:
        wrong += _otherwise(database, whole)
    return wrong + witness.disorder(database)


def _otherwise(database: Path, whole: Undisturbed) -> Iterator[str]:
    """What became of the list otherwise than in an undisturbed session."""
    if witness.todos(database) != whole.todos:
        yield f"todos {witness.todos(database)}, undisturbed {whole.todos}"
    now = witness.decided(database)
    yield from (f"{kind} of {of} {count} times too often" for (kind, of), count in (now - whole.decided).items())
    yield from (f"{kind} of {of} {count} times too rarely" for (kind, of), count in (whole.decided - now).items())


def _outside(folder: Path, night: Night) -> Iterator[str]:
    """Launches and runs that the world saw outside the window, and a last launch that came up too late."""
    if night.open_s is None:
        return
    opens, closes = night.open_s
    world = json.loads((folder / "world" / "world.json").read_text())
    began: dict[str, float] = world.get("began", {})
    yield from (f"{key} began at {at:.0f} s" for key, at in began.items() if not opens <= at < closes)
    if world["server"]["loads_until"] >= closes:
        yield f"the last launch was up at {world['server']['loads_until']:.0f} s only"


def _mismeasured(folder: Path) -> Iterator[str]:
    """Runs that the world made on another launch than the one which the database names for them."""
    made = json.loads((folder / "world" / "world.json").read_text()).get("runs", {})
    for key, session, trial, adopted in witness.runs(folder / "state.db"):
        launch = "adopted" if adopted else f"{session}-{trial}"
        run = made.get(f"{session}-{key}")
        if run is not None and run["launch"] != launch:
            yield f"{key} is noted for {launch} and was made on {run['launch']}"


def _is(served: dict[str, Any] | None, spec: dict[str, Any]) -> bool:
    return served is not None and served["state"] == "running" and served["spec"] == spec


def _repeated(folder: Path, whole: Undisturbed | None) -> Iterator[str]:
    """By the world's own log; against an undisturbed session only where nothing but SIGKILL happened."""
    log = _log(folder)
    keys = Counter((what, key) for what, key, _ in log)
    yield from (f"{what} {key} {count} times" for (what, key), count in keys.items() if count > 1)
    intended = witness.intended(folder / "state.db")
    yield from (f"{what} {key} without an intent" for what, key in keys if key not in intended)
    if whole is not None:
        more, fewer = _effects(folder) - whole.effects, whole.effects - _effects(folder)
        yield from (f"{what} of {of} {count} times too often" for (what, of), count in more.items())
        yield from (f"{what} of {of} {count} times too rarely" for (what, of), count in fewer.items())


def _effects(folder: Path) -> Counter[tuple[str, str]]:
    return Counter((what, of) for what, _, of in _log(folder))


def _log(folder: Path) -> list[tuple[str, str, str]]:
    path = folder / "world" / "world.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(what, key, of) for what, key, of in (line.split(" ", 2) for line in lines)]


# --- small things ------------------------------------------------------------------------------------------------


def _points(folder: Path, whole: Undisturbed, command: str = "resume", fault: str = "list:") -> list[str]:
    """Names of all points of the next life after what happened in `folder`, which goes; none when it is over."""
    names = folder.with_suffix(".points")
    names.unlink(missing_ok=True)
    life(folder, whole.night, command, f"{fault}{names}")
    shutil.rmtree(folder)
    return names.read_text().splitlines() if names.exists() else []


def _within(what: str, point: str) -> str:
    """The row of a point that is passed in something else than the loop."""
    return kind(point) if point.startswith(what) else f"{what}: {kind(point)}"


def _back_on_line(passed: list[str], points: tuple[str, ...]) -> int:
    """How many points a resume passes until what follows is what an undisturbed session passes, that first one too."""
    same = 0
    while same < len(passed) and same < len(points) and passed[-1 - same] == points[-1 - same]:
        same += 1
    return min(len(passed), len(passed) - same + 1)


def _before_candidate(whole: Undisturbed) -> int:
    """Number of the node that makes the last run before the first candidate is launched.

    Nothing waits on a simulated target, so SIGTERM is noticed one run later: then a drain has something to put back.
    """
    launched = whole.points[: next(at for at, name in enumerate(whole.points) if "/launch:" in name)]
    last_run = len(launched) - 1 - launched[::-1].index("node:measure")
    return sum(name.startswith("node:") for name in launched[: last_run + 1])


def _nodes(whole: Undisturbed) -> int:
    return sum(name.startswith("node:") for name in whole.points)


def _copy(base: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(base, to))


def _said(folder: Path) -> str:
    path = folder / "said"
    return path.read_text()[-600:] if path.exists() else ""
