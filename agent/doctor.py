"""The pre-flight: what `start` would find and be allowed to do, by reading only; it must not change anything."""

from __future__ import annotations

import os
import shlex
from collections.abc import Awaitable
from pathlib import Path
from typing import Literal

from agent import chooser
from agent.config import SessionConfig
from agent.config_model import api_key
from agent.manners import unmeasured, within_ceiling
from agent.open_files import server_limit, shortages
from agent.planners.base import Planner, View
from agent.policy import (
    SLACK,
    Costs,
    Spent,
    awaits_approval,
    broken_constraints,
    close_out_s,
    comparison_s,
    forbidden,
    needed_disruption,
    observation_s,
    whole_s,
)
from agent.room import refuse_no_room_here, refuse_no_room_there
from agent.window import closes_in, opens_in, spoken, time_of_day, window_from
from state.errors import ConfigError, HostError, PolicyRefused, RatchetError
from state.models import Adoption, Disruption, Experiment, Frozen, Todo, TodoStatus
from tools.services.finding import UNVERIFIED
from tools.target import Target


class Check(Frozen):
    """One thing looked at."""

    name: str
    status: Literal["ok", "warning", "failed"]
    text: str
    do: str = ""


class PlannedItem(Frozen):
    """One experiment as `start` would order it today."""

    id: str
    title: str
    disruption: str
    expected_gain: float
    verdict: str
    changes: bool = True


class Diagnosis(Frozen):
    """What doctor found; `exit_code` is what `start` would end with at once, 0 when it would begin."""

    checks: tuple[Check, ...]
    plan: tuple[PlannedItem, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    estimate_s: float = 0.0
    exit_code: int = 0


async def examine(target: Target, config: SessionConfig, planner: Planner, database: Path) -> Diagnosis:
    """Run every check that the target's state allows, in the order in which `start` would need them."""
    checks = [await _room("database", _here(database))]
    try:
        adoption = await target.adopt()
    except RatchetError as error:
        failed = Check(name="server", status="failed", text=error.what, do=error.do)
        return Diagnosis(checks=(*checks, failed), exit_code=error.exit_code)
    checks.append(Check(name="server", status="ok", text=f"process {adoption.process.pid}, {adoption.engine_version}"))
    checks.append(await _room("host's folder", refuse_no_room_there(target)))
    checks += [await _generates(target), await _client(target)]
    checks += [*_adoption_checks(adoption, config), await _open_files(target, adoption, config)]
    checks += [await _quiet(target, config), *await _manners(target, config), *_lasting(adoption, config)]
    config = within_ceiling(config)
    checks += await _window(target, config)
    facts = await target.facts()
    known = f"{len(facts.known_flags)} flags in its own --help"
    checks.append(Check(name="flags", status="ok" if facts.known_flags else "failed", text=known))
    checks += _language_model(config)
    plan, left_out = _plan(
        target, config, planner, adoption, View(engine=adoption.spec.engine, spec=adoption.spec, facts=facts)
    )
    return Diagnosis(
        checks=tuple(checks),
        plan=tuple(plan),
        left_out=left_out,
        estimate_s=_estimate(plan, config),
        exit_code=_exit_code(checks),
    )


async def _here(database: Path) -> float:
    return refuse_no_room_here(database)


async def _room(name: str, look: Awaitable[float]) -> Check:
    try:
        return Check(name=name, status="ok", text=f"{await look:.0f} MiB free")
    except RatchetError as error:
        return Check(name=name, status="failed", text=error.what, do=error.do)


async def _generates(target: Target) -> Check:
    trouble = await target.trouble()
    if trouble is None:
        return Check(name="generates", status="ok", text="a real request was answered")
    return Check(name="generates", status="failed", text=trouble, do="look at the server's log; nothing was touched")


async def _client(target: Target) -> Check:
    try:
        return Check(name="benchmark client", status="ok", text=await target.client())
    except HostError as error:
        return Check(name="benchmark client", status="failed", text=f"{error.what}: {error.tail}", do=error.do)


def _language_model(config: SessionConfig) -> list[Check]:
    """Whether its key is there; it is not asked, since that may cost something."""
    section = config.planner.model
    if config.planner.kind != "model" or section is None:
        return []
    try:
        api_key(section, os.environ)
    except ConfigError as missing:
        return [Check(name="language model", status="failed", text=missing.what, do=missing.do)]
    text = f"{section.model} at {section.base_url}, at most {section.max_calls} requests; not asked"
    return [Check(name="language model", status="ok", text=text)]


def _adoption_checks(adoption: Adoption, config: SessionConfig) -> list[Check]:
    checks = [_service(adoption)]
    if adoption.reproducible:
        text = "command, directory, user and environment can be reproduced"
        checks.append(Check(name="restorable", status="ok", text=text))
    else:
        hot = config.policy.max_disruption <= Disruption.HOT
        checks.append(
            Check(
                name="restorable",
                status="warning" if hot else "failed",
                text="; ".join(adoption.obstacles),
                do="start the server in a reproducible way, or set policy.max_disruption to hot",
            )
        )
    broken = broken_constraints(adoption.spec, config.policy)
    status: Literal["ok", "failed"] = "failed" if broken else "ok"
    checks.append(Check(name="constraints", status=status, text="; ".join(broken) or "kept by what runs now"))
    return checks


def _service(adoption: Adoption) -> Check:
    doubt = UNVERIFIED.get(adoption.holder.scope)
    if doubt is None:
        return Check(name="service", status="ok", text=f"held by {adoption.holder}")
    do = "watch the first experiment, or set policy.max_disruption to hot"
    return Check(name="service", status="warning", text=f"held by {adoption.holder}, unverified: {doubt}", do=do)


async def _open_files(target: Target, adoption: Adoption, config: SessionConfig) -> Check:
    client = await target.open_files()
    found = shortages(adoption, config.workload, client)
    if not found:
        server = server_limit(adoption)
        text = f"{_any_number(server)} by the server, {_any_number(client)} by the client"
        return Check(name="open files", status="ok", text=text)
    return Check(
        name="open files",
        status="failed" if any(one.hopeless for one in found) else "warning",
        text="; ".join(one.text for one in found),
        do="; ".join(one.do for one in found),
    )


def _any_number(limit: int | None) -> str:
    return "any number" if limit is None else str(limit)


async def _quiet(target: Target, config: SessionConfig) -> Check:
    busy = await target.foreign_cores()
    limit = config.validity.max_foreign_cpu_cores
    if busy is None:
        return Check(name="quiet host", status="warning", text="foreign CPU load cannot be observed")
    if busy <= limit:
        return Check(name="quiet host", status="ok", text=f"{busy:.2f} cores busy with other work")
    do = f"start would wait up to {config.validity.quiet_wait_s:.0f} s for it"
    return Check(name="quiet host", status="warning", text=f"{busy:.2f} cores busy, {limit:.2f} allowed", do=do)


async def _manners(target: Target, config: SessionConfig) -> list[Check]:
    """What would be done to spare the users of the server; the probe is run, nothing else."""
    rules, found = config.manners, []
    if left_out := unmeasured(config):
        do = "give drain and undrain commands, if these load points matter"
        found.append(Check(name="load ceiling", status="warning", text=left_out, do=do))
    elif rules.max_concurrency is not None:
        text = f"all load points are measured; above {rules.max_concurrency} streams only while drained"
        found.append(Check(name="load ceiling", status="ok", text=text))
    return [*found, await _drain(target, config)] if rules.drain else found


async def _drain(target: Target, config: SessionConfig) -> Check:
    rules, name = config.manners, "drain"
    when = "restarts and every run" if rules.drain_for == "load" else "restarts and the runs between them"
    would = f"`{shlex.join(rules.drain)}` before {when}"
    seen = await target.drained()
    if seen.trouble:
        do = "correct manners.drained: start would drain nothing, and end at the first restart"
        return Check(name=name, status="failed", text=f"{would}; {seen.trouble}", do=do)
    if seen.ours:
        do = "an earlier session left it so; start gives it back before it does anything"
        return Check(name=name, status="warning", text=f"{would}; the server is still drained by us", do=do)
    told = {True: "it is drained now, by somebody else", False: "it is not drained now", None: "there is no probe"}
    return Check(name=name, status="ok", text=f"{would}; {told[seen.seen]}")


async def _window(target: Target, config: SessionConfig) -> list[Check]:
    """When the session could begin, and whether a whole window has room for one experiment at least."""
    text = config.policy.window
    if text is None:
        return []
    window, clock = window_from(text), await target.clock()
    ahead, left = opens_in(window, clock), closes_in(window, clock)
    when = f"it opens in {spoken(ahead)}" if ahead else f"it is open, and closes in {spoken(left)}"
    said = f"{text}; the host's clock shows {time_of_day(clock)}: {when}"
    least_s = _least_s(config)
    if least_s > window.length_s:
        said += f"; one experiment and the close-out take about {spoken(least_s)}, longer than the window"
        return [Check(name="window", status="warning", text=said, do="make it longer, or the workload smaller")]
    if not ahead and least_s > left:
        do = "start before the window opens; in what is left of it no experiment would be begun"
        return [Check(name="window", status="warning", text=said, do=do)]
    return [Check(name="window", status="ok", text=said)]


def _least_s(config: SessionConfig) -> float:
    """The baseline, one experiment and the close-out, by guesses still."""
    rule, workload, costs = config.judge, config.workload, Costs(wait_s=config.manners.wait_inflight_s)
    one = observation_s(workload, rule, costs) + comparison_s(workload, rule, costs)
    return one + SLACK * close_out_s(workload, rule, costs) + costs.wait_s


def _lasting(adoption: Adoption, config: SessionConfig) -> list[Check]:
    if not config.manners.persist:
        return []
    if adoption.holder.kind == "process":
        do = "put the commands of the report into what starts the server"
        text = "nobody starts a bare process at a reboot, so a winner can't be made to last"
        return [Check(name="persist", status="warning", text=text, do=do)]
    return [Check(name="persist", status="ok", text=f"a winner would come back after a reboot, by {adoption.holder}")]


def _plan(
    target: Target, config: SessionConfig, planner: Planner, adoption: Adoption, view: View
) -> tuple[list[PlannedItem], tuple[tuple[str, str], ...]]:
    """Every proposed experiment in the order in which it would be taken if nothing were learned on the way."""
    proposal = planner.propose(view)
    ordered = chooser.in_order(
        chooser.Situation(
            todos=tuple(
                Todo(experiment=experiment, status=TodoStatus.PENDING, priority=experiment.priority)
                for experiment in proposal.experiments
            ),
            policy=config.policy,
            rule=config.judge,
            workload=config.workload,
            spent=Spent(elapsed_s=0, experiments=0, restarts=0),
            costs=Costs(),
        )
    )
    return [_item(todo.experiment, target, config, adoption) for todo in ordered], proposal.dropped


def _item(experiment: Experiment, target: Target, config: SessionConfig, adoption: Adoption) -> PlannedItem:
    verdict = forbidden(experiment, config.policy)
    if verdict is None:
        try:
            target.derive(adoption.spec, experiment.changes)
            gate = awaits_approval(experiment, config.policy)
            verdict = "allowed" if gate is None else f"waits for `approve`: {gate}"
        except PolicyRefused as refused:
            verdict = refused.what
    return PlannedItem(
        id=experiment.id,
        title=experiment.title,
        disruption=needed_disruption(experiment).name.lower(),
        expected_gain=experiment.expected_gain,
        verdict=verdict,
        changes=bool(experiment.changes),
    )


def _estimate(plan: list[PlannedItem], config: SessionConfig) -> float:
    """Seconds until the end if every experiment went the whole way, cut at the budget; prices are guesses still."""
    rule, workload, costs = config.judge, config.workload, Costs()
    allowed = min(sum(1 for item in plan if item.verdict == "allowed"), config.policy.budget.experiments)
    whole = observation_s(workload, rule, costs) + allowed * comparison_s(workload, rule, costs)
    return min(whole_s(config.policy), whole + close_out_s(workload, rule, costs))


def _exit_code(checks: list[Check]) -> int:
    failed = {check.name for check in checks if check.status == "failed"}
    if "language model" in failed:
        return 2
    if failed & {"restorable", "constraints"}:
        return 5
    return 3 if failed else 0
