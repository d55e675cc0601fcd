"""The program behind `benchmarks/search_live.py`: searches on a real server, and the comparison of what they left."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from agent import operate
from agent.validity import invalid_reasons
from benchmarks.kept import interrupt_on_sigterm, place
from benchmarks.searching import ours, rivals
from benchmarks.searching.outcome import Moment, Search, read
from benchmarks.searching.scores import OURS, SLACK, share_above
from benchmarks.searching.sessions import HALF_IN_FLIGHT, session_config
from benchmarks.searching.spaces import Setting, Space
from state.errors import StoppedByOperator
from state.models import Adoption, ProcessId, ValidityRule, digest
from state.store import Store
from tests.e2e import runs
from tests.e2e.rig import Rig, rig
from tools.demo import model
from tools.remote import RemoteTarget
from tools.target import Ready

BENCHMARKS = Path(__file__).resolve().parents[1]
PROGRAM = (sys.executable, str(BENCHMARKS.parent / "tools" / "demo" / "llama_server.py"))
AGAINST = ("tpe", "random")
PLANNERS = (OURS, *AGAINST)
VOCAB_HIGH = 8000
SLOWEST_START_S = 5.0
"""No start of this server takes longer on two idle cores."""
BUSY = {"max_foreign_cpu_cores": 1000.0, "max_steal_share": 1.0, "min_concurrency_share": 0.0}
"""Only to see whether the program works: nothing is proven on a busy machine."""
RULE = ValidityRule.model_validate(HALF_IN_FLIGHT)
TRIES = 3
"""How often a run of the final comparison is taken until a session would count it."""
ROUND_MIN = 0.2
"""What a setting takes in one round of the final comparison, about."""

Figures = dict[str, Any]


class Host:
    """One rig and what was adopted on it: launches and runs, each under a name of its own."""

    def __init__(self, space: Space, target: RemoteTarget, adoption: Adoption, seed: str) -> None:
        self.space, self.target, self.adoption, self.seed = space, target, adoption, seed
        self.process: ProcessId | None = adoption.process
        self.launches = 0
        self.taken = 0

    async def launch(self, setting: Setting) -> float:
        """Seconds until it serves, or until it has failed; then nobody serves."""
        began = time.monotonic()
        self.launches += 1
        key = f"{self.seed}-{self.launches}-T"  # a letter tells a launch from a run
        await self.target.launch(key, self.target.derive(self.adoption.spec, self.space.changes_of(setting)))
        outcome = await self.target.await_ready(key)
        self.process = outcome.process if isinstance(outcome, Ready) else None
        return time.monotonic() - began

    async def value(self, tries: int = 1) -> float:
        """The objective from one run at every load point; a void one is taken again while there are tries left."""
        assert self.process is not None, "somebody serves"
        logs = []
        for point in self.space.points:
            for left in reversed(range(tries)):
                self.taken += 1
                workload = runs.workload_of(point, vocab_high=VOCAB_HIGH)
                key = f"{self.seed}-M{self.taken}"
                result = await runs.ran(self.target, key, self.process, workload, int(digest(key, 8), 16) % 2**31)
                if not left or not invalid_reasons(result.metrics, result.telemetry, point, RULE):
                    break
            logs.append(math.log(result.metrics.output_tok_s or 1e-9))
        return fmean(logs)


@contextlib.asynccontextmanager
async def held(host: Rig, space: Space, name: str) -> Any:
    """A fresh rig's server, as the space finds it, held as `start` holds it."""
    async with runs.held(host, name) as target:
        yield Host(space, target, await target.adopt(), name)


def begin(host: Rig, space: Space) -> None:
    """Start the server as it is found."""
    flags, env = space.command_line(space.found)
    host.around_server = env
    host.start_server(*(word for name, values in flags.items() for word in (name, *values)))


# --- the searches ------------------------------------------------------------------------------------------


async def searched(
    host: Rig, space: Space, planner: str, seed: int, budget_s: float, validity: Mapping[str, float]
) -> Search:
    """One search within the wall time; a session counts runs by the rule, or by what of it is given otherwise."""
    if planner == OURS:
        return await _session(host, space, seed, budget_s, validity)
    async with held(host, space, f"{planner}-{seed}") as there:
        return await _trials(there, rivals.RIVALS[planner](space, seed), budget_s)


async def _session(host: Rig, space: Space, seed: int, budget_s: float, validity: Mapping[str, float]) -> Search:
    settings = host.sshd.settings
    target = {
        "host": settings.host,
        "port": settings.port,
        "user": settings.user,
        "identity_file": settings.identity_file,
        "known_hosts": settings.known_hosts,
        "directory": str(host.root),
        "python": str(host.python),
    }
    server = {"url": f"http://127.0.0.1:{host.port}", "api_key_file": str(host.key_file), "stop_grace_s": 5}
    config = session_config(
        space,
        seed,
        budget_s,
        SLOWEST_START_S,
        target=target,
        server=server,
        workload={"vocab_high": VOCAB_HIGH},
        validity=validity,
    )
    said = io.StringIO()
    code = await operate.start(config, host.database, Console(file=said))
    if code == StoppedByOperator.exit_code:
        raise KeyboardInterrupt  # the session takes the signals that end this program
    assert code == 0, f"the session of seed {seed} ended with {code}\n{said.getvalue()[-2000:]}"
    with Store.read(host.database) as store:
        return ours.told(store, store.latest_session().id, space)


async def _trials(there: Host, rival: rivals.Rival, budget_s: float) -> Search:
    """Ask, launch, run, tell; what the budget cuts off is not known to the rival."""
    began, down_s, failed = time.monotonic(), 0.0, 0
    serving: Setting | None = there.space.found
    incumbents = [Moment(0.0, there.space.found)]
    best: tuple[float, Setting] | None = None
    while time.monotonic() - began < budget_s and (setting := rival.ask()) is not None:
        if there.launches or setting != serving:
            down_s += await there.launch(setting)
            serving = setting
            if there.process is None:
                failed, serving = failed + 1, None
                rival.tell(setting, None)
                continue
        value = await there.value()
        at_s = time.monotonic() - began
        if at_s > budget_s:
            break
        rival.tell(setting, value)
        if best is None or value > best[0]:
            best = (value, setting)
            incumbents.append(Moment(at_s, setting))
    final = best[1] if best is not None else there.space.found
    experiments, seconds = there.launches, time.monotonic() - began
    if serving != final:
        down_s += await there.launch(final)
    return Search(
        final=final,
        incumbents=tuple(incumbents),
        seconds=seconds,
        restarts=there.launches,
        down_s=down_s,
        experiments=experiments,
        failed=failed,
    )


# --- the comparison ----------------------------------------------------------------------------------------


async def compared(host: Rig, space: Space, settings: Sequence[Setting], rounds: int, seed: int) -> list[Figures]:
    """Every setting launched and measured in every round, each round beginning with another one."""
    rows: list[Figures] = []
    async with held(host, space, f"finals-{seed}") as there:
        for number in range(rounds):
            turn = number % len(settings)
            for setting in (*settings[turn:], *settings[:turn]):
                await there.launch(setting)
                value = None if there.process is None else await there.value(TRIES)
                rows.append({"round": number, "setting": list(setting), "value": value})
    return rows


def seed_row(seed: int, searches: Mapping[str, Search], rows: Sequence[Figures]) -> Figures:
    """What the comparison says of one seed: by how much our setting is better; the same setting is no better."""

    def worth(name: str) -> float:
        found = [row["value"] for row in rows if tuple(row["setting"]) == searches[name].final]
        return fmean(value for value in found if value is not None)

    return {
        "seed": seed,
        "planners": {name: search.row() for name, search in searches.items()},
        "tok_s": {name: math.exp(worth(name)) for name in searches},
        "ahead": {name: worth(OURS) - worth(name) for name in searches if name != OURS},
    }


# --- the program -------------------------------------------------------------------------------------------


def once(path: Path, work: Any) -> Any:
    """What is kept at `path`, made by `work` if it is not there."""
    if not path.exists():
        path.write_text(json.dumps(work()))
    return json.loads(path.read_text())


def on_a_rig(folder: Path, gguf: Path, space: Space, work: Any) -> Any:
    """What `work` makes of a fresh rig, of which nothing stays unless something goes wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    interrupt_on_sigterm()  # a session takes that signal for itself, and leaves it without a handler
    try:
        with rig(folder, gguf, PROGRAM) as host:
            begin(host, space)
            made = asyncio.run(work(host))
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)
    return made


def play(space: Space, seed: int, options: argparse.Namespace, out: Path, gguf: Path) -> Figures:
    """One seed: each planner's search, then the settings that they left, side by side."""
    searches: dict[str, Search] = {}
    for name in PLANNERS:

        async def search(host: Rig, name: str = name) -> Figures:
            return (await searched(host, space, name, seed, 60 * options.minutes, BUSY if options.busy else {})).row()

        path = out / f"{name}-{options.minutes:g}m-{seed}.json"
        folder = out / f"host-{name}-{seed}"
        searches[name] = read(once(path, lambda w=search, at=folder: on_a_rig(at, gguf, space, w)))
        print(line(seed, name, searches[name]), flush=True)
    finals = list(dict.fromkeys(search.final for search in searches.values()))

    async def compare(host: Rig) -> list[Figures]:
        return await compared(host, space, finals, options.rounds, seed)

    path = out / f"finals-{options.minutes:g}m-{options.rounds}-{seed}.json"
    rows = once(path, lambda: on_a_rig(out / f"host-finals-{seed}", gguf, space, compare))
    told = seed_row(seed, searches, rows)
    print("  " + ", ".join(f"{name} {rate:.1f} tok/s" for name, rate in told["tok_s"].items()), flush=True)
    return told


def line(seed: int, name: str, search: Search) -> str:
    """A search in one line."""
    return (
        f"seed {seed} {name:8} {' '.join(search.final):44} {search.experiments:3} tried, {search.restarts:3} restarts,"
        f" {search.down_s / 60:.2f} min down, {search.failed} failed, {search.seconds / 60:.1f} min"
    )


def summed(rows: Sequence[Figures]) -> Figures:
    """By how much and how often we are ahead of each rival."""
    return {
        name: {
            "mean": fmean(row["ahead"][name] for row in rows),
            "as_good": share_above([row["ahead"][name] for row in rows], math.log(1 - SLACK)),
        }
        for name in AGAINST
    }


def missed(sums: Mapping[str, Any], goal: Mapping[str, Any]) -> Iterator[str]:
    """What the goals ask for and the seeds don't show."""
    for name, told in sums.items():
        if told["mean"] < goal["min_mean"]:
            yield f"{told['mean']:+.2%} against {name} in the mean"
        if told["as_good"] < goal["min_as_good"]:
            yield f"at most 1 % below {name} in only {told['as_good']:.0%} of seeds"


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description="Ratchet, TPE and random search on the demo's real server.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="wall time of each search; the demo has as much")
    parser.add_argument("--rounds", type=int, default=4, help="of the final comparison")
    parser.add_argument("--space", type=Path, default=BENCHMARKS / "data" / "llamacpp_space.json")
    parser.add_argument("--busy", action="store_true", help="void no run for other work: a trial, and no proof")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--out", type=Path, help="keep each search in this folder, and skip those that are there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    return parser.parse_args()


def main() -> int:
    """Plays what is missing, prints lines and sums, compares with the goals."""
    options = parse_options()
    goal = tomllib.loads((BENCHMARKS / "goals.toml").read_text())["search_live"]
    each = len(PLANNERS) * (options.minutes + 0.5 + options.rounds * ROUND_MIN)
    print(f"{options.seeds} seeds, about {options.seeds * each:.0f} min when nothing is there yet", flush=True)
    space = Space("llamacpp", json.loads(options.space.read_text()))
    gguf = model.fetch()
    with place(options.out, "search-live-") as out:
        rows = [play(space, seed, options, out, gguf) for seed in range(options.seeds)]
    sums = summed(rows)
    lacking = list(missed(sums, goal))
    for what in lacking:
        print(f"missed: {what}")
    if options.json:
        told = {"goal": goal, "missed": lacking, "minutes": options.minutes, "sums": sums, "seeds": rows}
        options.json.write_text(json.dumps(told, indent=1))
    ahead = ", ".join(f"{told['mean']:+.1%} against {name} ({told['as_good']:.0%})" for name, told in sums.items())
    verdict = "goals met" if not lacking else f"{len(lacking)} MISSED"
    print(f"search_live: {len(rows)} seeds of {options.minutes:g} min, in the mean {ahead} ({verdict})")
    return 1 if options.check and lacking else 0
