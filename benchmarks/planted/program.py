"""The program behind `benchmarks/real_night.py`: nights, their lines, and the comparison with the goals."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import interrupt_on_sigterm, place
from benchmarks.planted import share
from benchmarks.planted.nights import (
    FLAGS,
    KINDS,
    NO_OPS,
    SLOW,
    Night,
    Planted,
    Size,
    environment,
    nights,
    program,
    session_text,
)
from benchmarks.planted.server import VARIABLE
from state.errors import RatchetError
from state.models import Arm, DecisionKind, Measurement, MeasurementStatus, Outcome, Purpose, Role
from state.store import Store
from tests.e2e.rig import Agent, Rig, rig
from tests.ssh_servers import descendants
from tools.demo import model

GOALS = Path(__file__).resolve().parents[1] / "goals.toml"
GAINS = 10
ROUNDS = 6
POLL_S = 1.0
NIGHT_S = 3600.0
"""After which an agent hangs."""
LEAVING_S = 15.0
NIGHT_MIN, EXPERIMENT_MIN, GAIN_MIN, ROUND_MIN = 0.6, 0.4, 1.3, 0.6
"""What they take about on two idle cores."""
Figures = dict[str, Any]


def play(night: Night, folder: Path, gguf: Path, size: Size, busy: bool) -> Figures:
    """Play one night in `folder`, which is removed when nothing is broken and kept when something is."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    with rig(folder, gguf, program()) as host:
        host.start_server(*FLAGS.split(), program=(*environment(night.share), *host.program))
        settings = host.sshd.settings
        session = folder / "session.toml"
        text = session_text(
            night,
            size,
            busy,
            seed=1 + sum(map(ord, night.name)),
            host=settings.host,
            ssh_port=settings.port,
            user=settings.user,
            identity=settings.identity_file,
            known_hosts=settings.known_hosts,
            root=host.root,
            python=host.python,
            port=host.port,
            key_file=host.key_file,
        )
        session.write_text(text)
        agent = host.agent("start", str(session), "--db", str(host.database))
        watch(agent, host, night)
        rows = experiments(host.database, night)
        figures = {
            "night": night.name,
            "kind": night.kind,
            "busy": busy,
            "exit": agent.process.returncode,
            "experiments": rows,
            **ending(host.database),
            "broken": [*broken(host, agent)],
            "minutes": round((time.monotonic() - began) / 60, 2),
        }
    if figures["broken"]:
        figures["kept_in"] = str(folder)
    else:
        shutil.rmtree(folder)
    return figures


def watch(agent: Agent, host: Rig, night: Night) -> None:
    """Until the agent ends; a line for each experiment as soon as it is judged."""
    said: set[str] = set()
    deadline = time.monotonic() + NIGHT_S
    while True:
        over = agent.process.poll() is not None
        for row in experiments(host.database, night):
            if row["id"] not in said and (row["outcome"] or over):
                said.add(row["id"])
                print(line(night.name, row), flush=True)
        if over:
            return
        if time.monotonic() > deadline:
            agent.kill()
        time.sleep(POLL_S)


def experiments(database: Path, night: Night) -> list[Figures]:
    """What came of each so far; an outcome of None is one that was not judged."""
    with contextlib.suppress(RatchetError), Store.read(database) as store:
        session = store.latest_session().id
        verdicts = store.verdicts(session)
        kept = {row["subject"] for row in store.decisions(session) if row["kind"] == DecisionKind.KEEP.value}
        taken = store.measurements(session)
        return [row_of(planted, verdicts.get(planted.id), planted.id in kept, taken) for planted in night.experiments]
    return [row_of(planted, None, False, []) for planted in night.experiments]


def row_of(planted: Planted, verdict: Any, kept: bool, taken: Sequence[Measurement]) -> Figures:
    """One experiment as data."""
    own = [one for one in taken if one.experiment_id == planted.id]
    valid = [one for one in own if one.arm is Arm.CANDIDATE and one.status is MeasurementStatus.VALID]
    objective = None if verdict is None else verdict.objective
    return {
        "id": planted.id,
        "effect": planted.effect,
        "outcome": None if verdict is None else verdict.outcome.value,
        "kept": kept,
        "estimate": None if objective is None else objective.estimate,
        "interval": None if objective is None else [objective.low, objective.high],
        "shown": "" if objective is None else objective.percent,
        "reason": "" if verdict is None else verdict.reason,
        "runs": len(valid),
        "launches": len({one.trial_id for one in valid}),
        "void": sum(one.status is MeasurementStatus.INVALID for one in own),
    }


def ending(database: Path) -> Figures:
    """How the session ended, whether the final comparison bore what was kept, and what its own checks said."""
    with Store.read(database) as store:
        session = store.latest_session()
        verdicts = store.verdicts(session.id)
        close = verdicts.get("close-out")
        moved = store.role(session.id, Role.FINAL) != store.role(session.id, Role.ORIGINAL)
        checks = [todo.id for todo in store.todos(session.id) if todo.experiment.purpose is Purpose.SENTINEL]
        return {
            "status": session.status.value,
            "ended": session.reason,
            "confirmed": close is not None and close.outcome is Outcome.BETTER and moved,
            "final": None if close is None or close.objective is None else close.objective.percent,
            "sentinels": {name: verdicts[name].outcome.value for name in checks if name in verdicts},
            "measurements": [told(one) for one in store.measurements(session.id)],
        }


def told(taken: Measurement) -> Figures:
    """One run, for whoever wants to know how noisy the night was."""
    return {
        "id": taken.id,
        "experiment": taken.experiment_id,
        "arm": taken.arm.value,
        "launch": taken.trial_id,
        "status": taken.status.value,
        "reasons": taken.reasons,
        "tok_s": None if taken.metrics is None else taken.metrics.output_tok_s,
        "foreign_cpu_cores": None if taken.telemetry is None else taken.telemetry.foreign_cpu_cores,
    }


def broken(host: Rig, agent: Agent) -> Iterator[str]:
    """What a night must leave behind and does not: a proven server in the final configuration, and nothing else."""
    if agent.process.returncode != 0:
        yield f"the agent ended with {agent.process.returncode}: {agent.said[-2000:]}"
    pid = host.listener()
    if pid is None:
        yield "nobody serves"
        return
    if not host.generates():
        yield "the server does not generate"
    with Store.read(host.database) as store:
        final = store.role(store.latest_session().id, Role.FINAL)
        wanted = None if final is None else store.spec(final).env.get(VARIABLE)
    if host.environ().get(VARIABLE) != wanted:
        yield f"{VARIABLE} of the server is {host.environ().get(VARIABLE)}, of the final configuration {wanted}"
    deadline = time.monotonic() + LEAVING_S
    while left := strangers(host, pid):
        if time.monotonic() > deadline:
            yield f"processes are left: {left}"
            return
        time.sleep(0.2)


def strangers(host: Rig, server: int) -> dict[int, str]:
    """Living processes of the rig that are neither the server's nor the SSH server's: pid → command line."""
    known = {host.sshd.process.pid, *descendants(host.sshd.process.pid), server, *descendants(server)}
    parent = server
    with contextlib.suppress(OSError):
        while parent > 1:  # the job that the server was launched in
            parent = int(Path(f"/proc/{parent}/stat").read_bytes().rpartition(b")")[2].split()[1])
            known.add(parent)
    found = {}
    for pid in set(host.ours()) - known:
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return found


def line(night: str, row: Figures) -> str:
    """One experiment in one line."""
    outcome = row["outcome"] or "not judged"
    verdict = "kept" if row["kept"] else ""
    if row["kept"] and row["effect"] <= 0:
        verdict = "FALSE KEEP"
    elif not row["kept"] and row["effect"] > 0:
        verdict = "missed"
    return (
        f"{night:8} {row['id']:9} planted {row['effect']:+6.1%}  {outcome:22}  {row['shown']:28}"
        f" runs {row['runs']}, launches {row['launches']}, void {row['void']}  {verdict}"
    ).rstrip()


def figures_of(night: Night, out: Path, gguf: Path, size: Size, busy: bool) -> Figures:
    """The night's figures, played unless `out` has them already."""
    kind = f"{len(night.experiments)}-{size.name}" + "-busy" * busy
    path = out / f"night-{night.name}-{kind}.json"
    if path.exists():
        figures = dict(json.loads(path.read_text()))
        print("\n".join(line(night.name, row) for row in figures["experiments"]), flush=True)
        return figures
    folder = out / f"host-{night.name}"
    try:
        figures = play(night, folder, gguf, size, busy)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    path.write_text(json.dumps(figures, indent=1))
    return figures


def summed(rows: Sequence[Figures]) -> Figures:
    """The counts that the goals are about."""
    each = {kind: [one for row in rows if row["kind"] == kind for one in row["experiments"]] for kind in KINDS}
    everything = [one for of in each.values() for one in of]
    judged = [one for one in everything if one["outcome"] is not None]
    return {
        **{f"{kind}_experiments": len(of) for kind, of in each.items()},
        **{f"{kind}_kept": sum(one["kept"] for one in of) for kind, of in each.items()},
        "judged": len(judged),
        "not_judged": len(everything) - len(judged),
        "confirmed": sum(row["confirmed"] for row in rows if row["kind"] == "gain"),
        "runs": sum(len(row["measurements"]) for row in rows),
        "minutes": round(sum(row["minutes"] for row in rows), 1),
        "broken": [f"{row['night']}: {what}" for row in rows for what in row["broken"]],
    }


def missed(sums: Figures, shares: Sequence[Figures], goal: Figures) -> list[str]:
    """What the goals ask for and the nights don't show; kinds that were not played are not asked for."""
    found = list(sums["broken"])
    if sums["aa_kept"] > goal["max_aa_kept"]:
        found.append(f"{sums['aa_kept']} of {sums['aa_experiments']} experiments without any effect were kept")
    if sums["slow_kept"] > goal["max_slow_kept"]:
        found.append(f"{sums['slow_kept']} of {sums['slow_experiments']} experiments that slow down were kept")
    if sums["gain_kept"] < goal["min_gain_share"] * sums["gain_experiments"]:
        found.append(f"only {sums['gain_kept']} of {sums['gain_experiments']} gains were kept")
    if sums["not_judged"] > goal["max_not_judged"]:
        found.append(f"{sums['not_judged']} experiments were not judged")
    for row in shares:
        off = abs(row["lost_cpu"] - row["share"])
        if off > goal["max_share_error"]:
            found.append(f"planted {row['share']:.2%}, but {row['lost_cpu']:.2%} of the server's CPU time are missing")
    return found


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Whole sessions on a real server with a truth planted in it.")
    parser.add_argument("--only", choices=("share", *KINDS), help="one kind of night, or the proof of the share")
    parser.add_argument("--no-ops", type=int, default=NO_OPS, help="experiments of the night without any effect")
    parser.add_argument("--slow", type=int, default=SLOW, help="experiments of the night that slow down")
    parser.add_argument("--gains", type=int, default=GAINS, help="nights with one gain")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of the proof of the share")
    parser.add_argument("--requests", type=int, default=Size().requests, help="requests of a run")
    parser.add_argument("--output-tokens", type=int, default=Size().output_tokens, help="length of an answer")
    parser.add_argument("--busy", action="store_true", help="void no run for other work: a trial, and no proof")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="keep each night in this folder, and skip the nights that are there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    return parser.parse_args()


def estimate(wanted: Sequence[Night], rounds: int) -> float:
    """Minutes on a quiet machine."""
    each = sum(
        NIGHT_MIN + (GAIN_MIN if night.kind == "gain" else EXPERIMENT_MIN) * len(night.experiments) for night in wanted
    )
    return each + ROUND_MIN * rounds


def main() -> int:
    """Plays the nights, prints lines and sums, compares with the goals."""
    options = parse_options()
    goal = tomllib.loads(GOALS.read_text())["real_night"]
    interrupt_on_sigterm()
    size = Size(options.requests, options.output_tokens)
    wanted = [n for n in nights(options.no_ops, options.slow, options.gains) if options.only in (None, n.kind)]
    rounds = options.rounds if options.only in (None, "share") else 0
    many = sum(len(night.experiments) for night in wanted)
    print(
        f"{many} experiments in {len(wanted)} sessions and {rounds} rounds of the proof:"
        f" about {estimate(wanted, rounds):.0f} min when nothing is there yet",
        flush=True,
    )
    gguf = model.fetch()
    with place(options.out, "nights-") as out:
        shares = list(share.measured(rounds, size, out, out / "host-share", gguf)) if rounds else []
        for row in shares:
            print(share.told(row), flush=True)
        rows = [figures_of(night, out, gguf, size, options.busy) for night in wanted]
    sums = summed(rows)
    lacking = missed(sums, shares, goal)
    for what in lacking:
        print(f"missed: {what}")
    if options.json:
        figures = {"goal": goal, "missed": lacking, "cores": os.cpu_count(), "shares": shares, **sums, "nights": rows}
        options.json.write_text(json.dumps(figures, indent=1))
    print(
        f"real_night: kept {sums['aa_kept']} of {sums['aa_experiments']} no-ops, {sums['slow_kept']} of"
        f" {sums['slow_experiments']} losses, {sums['gain_kept']} of {sums['gain_experiments']} gains"
        f" ({sums['confirmed']} confirmed), {sums['not_judged']} not judged, {sums['runs']} runs,"
        f" {sums['minutes']:.0f} min ({'goals met' if not lacking else f'{len(lacking)} MISSED'})"
    )
    return 1 if options.check and lacking else 0
