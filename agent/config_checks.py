"""Contradictions between the keys of a session file that are each fine alone; pure, and it must not word types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agent.config_lines import KeyPath
from agent.config_problems import Problem, nearest
from state.models import Disruption, JudgeRule, Policy, Workload
from tools.benches.choice import unfit
from tools.redaction import URL_PASSWORD

Sections = Mapping[str, Any]

# What the loop itself puts on the list or names launches by; an experiment of that name would be taken for it.
RESERVED = ("adopted", "baseline", "close-out", "confirm", "restore")
RESERVED_BEGINNINGS = ("sentinel-", "without-", "model-", "refine-")


def contradictions(sections: Sections, workload: object) -> list[Problem]:
    """Everything that cannot hold together; a check whose sections are not all valid by themselves is left out.

    Names are compared in `workload`, the section as plain data, which may still be wrong in other ways: a typo in a
    name is to be told together with those in numbers.
    """
    found = list(_names(workload)) if isinstance(workload, Mapping) else []
    for needed, check in _CHECKS:
        if all(name in sections for name in needed):
            found += check(*(sections[name] for name in needed))
    return found


def _names(workload: Mapping[str, Any]) -> Iterator[Problem]:
    points, objective = workload.get("load_points"), workload.get("objective")
    if not isinstance(points, list | tuple):
        return
    names = [str(point.get("name")) if isinstance(point, Mapping) else "" for point in points]
    for index, name in enumerate(names):
        if name in names[:index]:
            message = f'"{name}" is the name of load point {names.index(name)} already'
            yield Problem(("workload", "load_points", index, "name"), message)
    yield from _known_points(objective, ("workload", "objective"), names)
    guards = workload.get("guards")
    ceilings = guards.get("slo") if isinstance(guards, Mapping) else None
    for index, ceiling in enumerate(ceilings if isinstance(ceilings, list | tuple) else ()):
        yield from _known_points(ceiling, ("workload", "guards", "slo", index), names)


def _known_points(holder: object, place: KeyPath, names: Sequence[str]) -> Iterator[Problem]:
    """Whatever is wrong with the load points that `holder.at` names."""
    at = holder.get("at") if isinstance(holder, Mapping) else None
    wanted = [str(name) for name in at] if isinstance(at, list | tuple) else []
    for index, name in enumerate(wanted):
        path: KeyPath = (*place, "at", index)
        if name not in names:
            known = ", ".join(dict.fromkeys(names))
            yield Problem(path, f'there is no load point "{name}"{nearest(name, names)}; there are {known}')
        elif name in wanted[:index]:
            yield Problem(path, f'"{name}" stands here twice and would count double')


def _load_points(workload: Workload) -> Iterator[Problem]:
    for index, point in enumerate(workload.load_points):
        if point.requests < point.concurrency:
            message = f"{point.requests} requests can never be {point.concurrency} at once; expected at least that many"
            yield Problem(("workload", "load_points", index, "requests"), message)


def _requests(workload: Workload) -> Iterator[Problem]:
    if not workload.endpoint.startswith("/"):
        message = f'expected a path that begins with "/", got "{workload.endpoint}"'
        yield Problem(("workload", "endpoint"), message)
    if workload.vocab_low >= workload.vocab_high:
        message = f"expected less than vocab_high ({workload.vocab_high}), got {workload.vocab_low}"
        yield Problem(("workload", "vocab_low"), message)
    if workload.request_deadline_s > workload.run_deadline_s:
        message = f"expected at most run_deadline_s ({workload.run_deadline_s:g}), got {workload.request_deadline_s:g}"
        yield Problem(("workload", "request_deadline_s"), message)


def _client(workload: Workload, server: Any) -> Iterator[Problem]:
    for path, message in unfit(workload, server.model, server.api_key_file is not None):
        yield Problem(path, message)


def _blocks(judge: JudgeRule) -> Iterator[Problem]:
    if judge.max_blocks < judge.min_blocks:
        message = f"expected at least min_blocks ({judge.min_blocks}), got {judge.max_blocks}"
        yield Problem(("judge", "max_blocks"), message)


def _close_out(policy: Policy, judge: JudgeRule) -> Iterator[Problem]:
    """A session that may restart must be able to pay one experiment and the close-out that is reserved before it."""
    budget = policy.budget
    needed = 2 * judge.min_blocks + 2 * judge.close_out_blocks + 1
    if policy.max_disruption >= Disruption.RESTART and budget.experiments and budget.restarts < needed:
        yield Problem(
            ("policy", "budget", "restarts"),
            f"{budget.restarts} restarts cannot pay for one experiment and the close-out, which need {needed}; "
            'raise it, or set policy.max_disruption = "load" for a session that only observes',
        )


def _planner(planner: Any) -> Iterator[Problem]:
    for index, name in enumerate(planner.skip):
        if name in planner.only:
            yield Problem(("planner", "skip", index), f'"{name}" stands in planner.only as well')
    yield from _language_model(planner)


def _language_model(planner: Any) -> Iterator[Problem]:
    section, place = planner.model, ("planner", "model")
    if section is None:
        if planner.kind == "model":
            yield Problem(("planner", "kind"), "a language model needs a section [planner.model]")
        return
    if section.api_key_env is not None and section.api_key_file is not None:
        yield Problem((*place, "api_key_file"), "a key is named by api_key_env already")
    if section.max_cost is not None and (section.price_in is None or section.price_out is None):
        yield Problem((*place, "max_cost"), "a ceiling of the cost needs both prices, price_in and price_out")
    if section.max_tokens <= section.answer_tokens:
        message = f"expected more than one answer may have ({section.answer_tokens}), got {section.max_tokens}"
        yield Problem((*place, "max_tokens"), message)


def _experiments(experiments: Sequence[Any]) -> Iterator[Problem]:
    ids = [experiment.id for experiment in experiments]
    for index, name in enumerate(ids):
        path: KeyPath = ("experiments", index, "id")
        if name in RESERVED:
            yield Problem(path, f'"{name}" is a name that Ratchet uses itself; so are {", ".join(RESERVED)}')
        elif name.startswith(RESERVED_BEGINNINGS):
            yield Problem(path, f'"{name}" begins like a name that Ratchet gives itself; choose another beginning')
        elif name in ids[:index]:
            yield Problem(path, f'"{name}" is the id of experiment {ids.index(name)} already')


def _package_options(experiments: Sequence[Any]) -> Iterator[Problem]:
    """The session file is stored and shown; pip finds passwords in a file of its own on the host."""
    for index, experiment in enumerate(experiments):
        for change in experiment.changes:
            if any(URL_PASSWORD.search(option) for option in getattr(change, "options", ())):
                message = "an address with a password; put that into pip.conf or ~/.netrc on the host"
                yield Problem(("experiments", index, "changes"), message)


def _generic(server: Any) -> Iterator[Problem]:
    rules = server.generic
    if server.engine != "generic":
        if server.url.startswith("tcp:"):
            yield Problem(("server", "url"), f'a tcp address is for engine "generic", here it is "{server.engine}"')
        if rules != type(rules)():
            message = f'this is for engine "generic", here it is "{server.engine}"'
            yield Problem(("server", "generic"), message)
    if rules.health_path and server.url.startswith("tcp:"):
        message = "a tcp address has no paths; give an http address as server.url, or a health_command"
        yield Problem(("server", "generic", "health_path"), message)
    names = [name for flag in rules.flags for name in (flag.name, *flag.aliases)]
    for index, flag in enumerate(rules.flags):
        place: KeyPath = ("server", "generic", "flags", index)
        if names.count(flag.name) > 1:
            yield Problem((*place, "name"), f'"{flag.name}" is declared twice')
        if flag.type == "choice" and not flag.choices:
            yield Problem((*place, "type"), "a choice needs choices")
        if flag.opposite and flag.type != "switch":
            yield Problem((*place, "opposite"), "only a switch has an opposite")
    yield from _hot(rules.hot, server.url)


def _hot(declared: Sequence[Any], url: str) -> Iterator[Problem]:
    """A live setting can be made and read back, each in one way."""
    for index, one in enumerate(declared):
        place: KeyPath = ("server", "generic", "hot", index)
        if [other.name for other in declared].count(one.name) > 1:
            yield Problem((*place, "name"), f'"{one.name}" is declared twice')
        for verb in ("set", "read"):
            command, path = getattr(one, f"{verb}_command"), getattr(one, f"{verb}_path")
            if bool(command) == bool(path):
                yield Problem((*place, f"{verb}_command"), f"expected either this or {verb}_path, and not both")
            if path and url.startswith("tcp:"):
                yield Problem((*place, f"{verb}_path"), "a tcp address has no paths; give a command")
        if one.set_path and not any("{value}" in text for text in (one.set_path, one.set_body or "")):
            yield Problem((*place, "set_path"), "neither it nor set_body says where {value} goes")
        if one.set_command and not any("{value}" in word for word in one.set_command):
            yield Problem((*place, "set_command"), "it does not say where {value} goes")


def _manners(manners: Any) -> Iterator[Problem]:
    for given, missing in (("drain", "undrain"), ("undrain", "drain"), ("drained", "drain")):
        if getattr(manners, given) and not getattr(manners, missing):
            yield Problem(("manners", given), f"it is of no use without {missing}")
    for name in ("drain", "undrain", "drained"):
        words = getattr(manners, name)
        if words and not words[0]:
            yield Problem(("manners", name, 0), "expected the name of a program")
    if manners.drain and not manners.drained and not manners.drain_idempotent:
        message = (
            "without a probe (drained) it is run again after an interruption; say drain_idempotent = true if it may"
        )
        yield Problem(("manners", "drain"), message)
    if manners.drain_for == "load" and not manners.drain:
        yield Problem(("manners", "drain_for"), "there is no drain command that could be run")


def _ceiling(workload: Workload, manners: Any) -> Iterator[Problem]:
    """What is judged must be measured: only other load points may be left out, and only where nothing drains."""
    if manners.max_concurrency is None or manners.drain:
        return
    beyond = {point.name for point in workload.load_points if point.concurrency > manners.max_concurrency}
    holders: list[tuple[KeyPath, Sequence[str]]] = [(("workload", "objective"), workload.objective.at)]
    holders += [(("workload", "guards", "slo", at), one.at) for at, one in enumerate(workload.guards.slo)]
    for place, names in holders:
        for index, name in enumerate(names):
            if name in beyond:
                message = f'"{name}" is above manners.max_concurrency ({manners.max_concurrency}), and nothing drains'
                yield Problem((*place, "at", index), message)


_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Problem]]], ...] = (
    (("server",), _generic),
    (("workload",), _load_points),
    (("workload",), _requests),
    (("workload", "server"), _client),
    (("judge",), _blocks),
    (("policy", "judge"), _close_out),
    (("manners",), _manners),
    (("workload", "manners"), _ceiling),
    (("planner",), _planner),
    (("experiments",), _experiments),
    (("experiments",), _package_options),
)
