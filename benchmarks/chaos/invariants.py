"""What must hold after every round, looked at from outside: witnesses, procfs, job folders, plain SQL, exit codes.

    I1  the server ends as the session says, and generates     I6  one server at a time, nothing of ours is left
    I2  no committed event is lost or changed                  I7  nobody else's process was ended
    I3  no launch and no run happens twice                     I8  everything is bounded
    I4  every effect has its intent before and its outcome     I9  `replay` says the same twice, without the host
    I5  only sound measurements count                          I10 exit codes and report say what happened

Nothing of Ratchet is imported to find out, and nothing is put right.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos import record
from benchmarks.chaos.faults import Plan
from benchmarks.chaos.ground import FILLER, Ground
from benchmarks.chaos.story import Run, Story, not_serving
from tests.e2e.witness import start_ticks
from tests.ssh_servers import comm, descendants

CODES = frozenset({0, 3, 4, 5})
LAUNCHES = 60
FOLDER_MB = 64
LEAVE_S = 12.0
"""A job's wrapper looks every 5 s whether its session is empty."""
CLOCK_SLACK_S = 0.1
"""Time stamps of files are a few milliseconds coarse."""

Broken = list[tuple[str, str]]


def check(plan: Plan, ground: Ground, story: Story, original: list[str], but: tuple[str, ...] = ()) -> Broken:
    """Every invariant that does not hold, with what was seen; empty when all do. `but` names some to leave out."""
    seen = record.read(ground.host.database)
    if seen is None or seen.session is None:
        return [*story.noticed, ("I2", "there is no session in the database")]
    broken = list(story.noticed)
    for name, look in LOOKS.items():
        if name in but:
            continue
        try:
            broken += [(name, what) for what in look(Look(plan, ground, story, seen, original))]
        except Exception as error:  # a look that fails is a finding, and must not hide the others
            broken.append((name, f"could not be looked at: {type(error).__name__}: {error}"))
    return broken


class Look:
    """Everything that the checks read."""

    def __init__(self, plan: Plan, ground: Ground, story: Story, seen: record.Record, original: list[str]) -> None:
        self.plan, self.ground, self.story, self.seen, self.original = plan, ground, story, seen, original
        self.host = ground.host

    def launches(self) -> list[str]:
        """The name of every start of the server but the operator's own."""
        return [start.launch for start in self.host.starts() if start.launch != "operator"]

    def job(self, item_id: str) -> Path:
        """A job's folder on the host."""
        return self.host.root / "jobs" / f"{self.seen.id}-{item_id}"


def server(look: Look) -> Iterator[str]:
    """I1."""
    session = look.seen.session
    assert session is not None
    if session["status"] != "done":
        yield f"the session is {session['status']}: {session['reason']}"
    if "final" not in look.seen.roles:
        yield "no configuration was declared final"
        return
    if look.seen.roles["final"] not in (look.seen.roles["known-good"], look.seen.roles["original"]):
        yield "the final configuration is neither known-good nor the original"
    wrong = not_serving(look.ground, look.seen.argv("final"))
    if wrong is not None:
        yield wrong
    if look.seen.roles["final"] == look.seen.roles["original"]:
        wrong = not_serving(look.ground, look.original)
        if wrong is not None:
            yield f"the original is not as it was found: {wrong}"


def record_is_whole(look: Look) -> Iterator[str]:
    """I2."""
    if look.seen.intact != "ok":
        yield f"the database is damaged: {look.seen.intact}"
    numbers = [event["seq"] for event in look.seen.events]
    if numbers != list(range(1, len(numbers) + 1)):
        yield "the events have gaps"
    for number, earlier in enumerate(look.story.snapshots):
        if look.seen.events[: len(earlier)] != earlier:
            yield f"events that agent {number + 1} left behind are lost or changed"
    told = [json.loads(e["body"])["decision"]["id"] for e in look.seen.events if e["kind"] == "decision-made"]
    if told != [decision["id"] for decision in look.seen.decisions]:
        yield "the table of decisions is not what the events tell"


def once(look: Look) -> Iterator[str]:
    """I3."""
    for what, seen in (("launch", look.launches()), ("run", look.host.runs())):
        yield from (f"{what} {key} happened {n} times" for key, n in Counter(seen).items() if n > 1)
    operators = len(look.host.starts()) - len(look.launches())
    if operators != 1:
        yield f"the server was started {operators} times without a launch of ours"
    known = {f"{look.seen.id}-{row['id']}" for row in (*look.seen.trials, *look.seen.measurements)}
    for key in {*look.launches(), *look.host.runs()}:
        if key not in known and not key.startswith(f"{look.seen.id}-Tw"):
            yield f"{key} happened but stands nowhere in the log"
    identities = Counter(todo["identity"] for todo in look.seen.todos if todo["identity"])
    if any(n > 1 for n in identities.values()):
        yield "one configuration was tried as two experiments"


def journalled(look: Look) -> Iterator[str]:
    """I4."""
    effects = {row["key"]: row for row in look.seen.effects}
    yield from (f"{key} has no outcome" for key, row in effects.items() if row["outcome"] is None)
    own_clock = not look.host.around_agents
    for kind, keys in (("launch", look.launches()), ("run", look.host.runs())):
        for key in keys:
            item = key.removeprefix(f"{look.seen.id}-")
            if item.startswith("Tw"):
                continue
            effect = effects.get(f"{look.seen.id}/{item}/{kind}")
            if effect is None:
                yield f"{key} has no intent"
            elif own_clock and effect["intended_at"] > (look.job(item) / "begun").stat().st_mtime + CLOCK_SLACK_S:
                yield f"{key} began before its intent was written"


def sound(look: Look) -> Iterator[str]:
    """I5."""
    for row in look.seen.measurements:
        if row["status"] == "open":
            yield f"{row['id']} was never closed"
        if row["status"] != "valid":
            continue
        taken, told = json.loads(row["body"])["metrics"], result_of(look.job(row["id"]))
        if told is None:
            yield f"{row['id']} counts, but the host has no result of it"
        elif not told["requested"] == told["completed"] == 4 or told["failed"] or told["stopped_early"]:
            yield f"{row['id']} counts, but its client says {told['completed']} of {told['requested']}"
        elif told["output_tok_s"] != taken["output_tok_s"]:
            yield f"{row['id']} has another figure than its client's"
    arms = {row["id"]: row["arm"] for row in look.seen.measurements if row["status"] == "valid"}
    for decision in look.seen.decisions:
        if decision["kind"] == "keep":
            counted = Counter(arms[name] for name in json.loads(decision["evidence"]) if name in arms)
            if counted["candidate"] < (1 if decision["subject"] == "close-out" else 2) or counted["baseline"] < 1:
                yield f"keep {decision['id']} rests on {dict(counted)} runs that count"


def result_of(job: Path) -> dict[str, Any] | None:
    """What a benchmark client left behind."""
    try:
        return dict(json.loads((job / "result.json").read_text()))
    except (OSError, ValueError):
        return None


def nothing_left(look: Look) -> Iterator[str]:
    """I6."""
    crowded = [start.launch for start in look.host.starts() if start.living]
    if crowded:
        yield f"another server still lived when these began: {', '.join(crowded)}"
    deadline = time.monotonic() + LEAVE_S
    while (left := strays(look)) and time.monotonic() < deadline:
        time.sleep(0.2)
    yield from (f"process {pid} is left: {command_of(pid)}" for pid in left)
    for folder in (look.host.root, look.host.database.parent):
        for path in folder.rglob("*"):
            if path.name.endswith(".part") or path.name.startswith((".taker", ".watcher")):
                yield f"a temporary file is left: {path.relative_to(look.host.folder)}"
    epochs = sorted(int(path.name) for path in (look.host.root / "lease" / "epochs").iterdir())
    if not (look.host.root / "lease" / f"done-{epochs[-1]}").exists():
        yield f"epoch {epochs[-1]} of the lease was not ended"


def strays(look: Look) -> set[int]:
    """Living processes of the rig that are neither the serving launch nor sshd's own."""
    serving, sshd = look.host.listener(), look.host.sshd.process.pid
    allowed = {sshd, *(pid for pid in descendants(sshd) if comm(pid).startswith("sshd"))}
    if serving is not None:
        allowed |= {serving, leader_of(serving)}
    return set(look.host.ours()) - allowed


def others_live(look: Look) -> Iterator[str]:
    """I7."""
    for bystander, ticks in look.ground.bystanders:
        if start_ticks(bystander.pid) != ticks:
            yield f"somebody else's process was ended: {bystander.args!r}"


def bounded(look: Look) -> Iterator[str]:
    """I8."""
    if len(look.launches()) > LAUNCHES:
        yield f"{len(look.launches())} launches"
    files = [path for path in look.host.folder.rglob("*") if path.is_file() and path.name != FILLER]
    used_mb = sum(path.stat().st_size for path in files) / 1e6
    if used_mb > FOLDER_MB:
        yield f"{used_mb:.0f} MB were written"


def replayed(look: Look) -> Iterator[str]:
    """I9, with the host out of reach."""
    look.ground.link.close()
    before = look.host.starts(), look.host.runs()
    told = [look.host.command("replay", "--json", "--db", str(look.host.database)) for _ in range(2)]
    for agent in told:
        if agent.process.returncode != 0:
            yield f"replay ended with {agent.process.returncode}"
            return
    first, second = (agent.out.read_text() for agent in told)
    if first != second:
        yield "replay said two things"
    mine = [[row[key] for key in ("id", "kind", "subject", "what", "reason")] for row in look.seen.decisions]
    if mine != [[row[key] for key in ("id", "kind", "subject", "what", "reason")] for row in json.loads(first)]:
        yield "replay tells other decisions than the database has"
    if (look.host.starts(), look.host.runs()) != before:
        yield "replay touched the host"


def told_truly(look: Look) -> Iterator[str]:
    """I10."""
    for number, run in enumerate(look.story.runs, 1):
        yield from (f"agent {number} ({run.words[0]}): {what}" for what in ill_told(run))
    for agent in look.host.agents:
        if "Traceback" in agent.said:
            yield f"a traceback in {agent.err.name}"
    for fault in look.plan.faults:
        yield from (f"a {name} ended with {code}" for name, code in fault.rivals.items() if code != 5)
    session = look.seen.session
    assert session is not None
    if look.story.runs[-1].exit != 0 or session["exit_code"] != 0:
        yield f"the last agent ended with {look.story.runs[-1].exit}, the log says {session['exit_code']}"
    report = look.host.database.with_name(f"report-{look.seen.id}.md")
    text = report.read_text() if report.exists() else ""
    improved = look.seen.roles.get("final") != look.seen.roles["original"]
    if f"session `{look.seen.id}`, done" not in text:
        yield "the report does not say that the session is done"
    elif improved != ("Kept an improvement" in text):
        yield "the report and the final configuration disagree"


def ill_told(run: Run) -> Iterator[str]:
    """What is wrong with how an agent ended."""
    if run.killed and run.exit == -9:
        return
    if run.exit == -15 and not run.agent.said:
        return  # asked to end before it had begun
    if run.exit not in CODES:
        yield f"exit code {run.exit}"
    elif run.exit in (3, 5) and "ratchet: " not in run.agent.err.read_text():
        yield f"exit code {run.exit} without a message"
    elif run.exit == 4 and "ratchet: " not in run.agent.err.read_text() and "go on with" not in run.agent.said:
        yield "exit code 4 without a word on how to go on"


def leader_of(pid: int) -> int:
    """The leader of a process's session: of a launch, its wrapper."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[3])


def command_of(pid: int) -> str:
    """A command line, to be read by people."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone by now"
    return b" ".join(words).decode("utf-8", "replace")[:160].replace("\n", " ")


LOOKS = {
    "I1": server,
    "I2": record_is_whole,
    "I3": once,
    "I4": journalled,
    "I5": sound,
    "I6": nothing_left,
    "I7": others_live,
    "I8": bounded,
    "I9": replayed,
    "I10": told_truly,
}
