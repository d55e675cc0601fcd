"""Which service holds a process: read from its cgroup, then asked of the manager or the engine; it changes nothing.

What could not be started again as it was found is an obstacle, in words for a person.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from state.errors import ServerError
from state.models import Frozen, Holder
from tools.facts import Machine, ProcessFacts, ask
from tools.facts.base import Fact, as_text
from tools.services.container import base_name
from tools.services.container_options import Container, read_container
from tools.services.stop_unit import manager_sh
from tools.shell import Host

LOGINS = re.compile(r"(ssh|sshd|sshd@.*|ssh@.*)\.service")
"""What was started through SSH may lie in the SSH server's unit, which does not restart it."""
ENGINES = frozenset({"docker.service", "containerd.service", "podman.service"})
CONTAINER = re.compile(r"(docker|libpod|crio|cri-containerd|containerd)[-/](?:payload-)?([0-9a-f]{12,64})")
PROXIES = frozenset({"docker-proxy", "rootlessport", "conmon", "slirp4netns", "pasta", "pasta.avx2"})
"""Programs that hold a container's published port on the host's side."""
SHOWN = ("LoadState", "Transient", "NeedDaemonReload", "Type", "MainPID", "ExecStartEx")
TYPES = frozenset({"simple", "exec", "notify", "notify-reload", "idle"})
"""Kinds of units whose main process is the one that ExecStart= names."""


UNVERIFIED = {"docker": "written from Docker's manual pages and tested on a stand-in; never run on a real daemon"}
"""Scopes of holders that were never seen to work on the real thing, and what was done instead."""


class Found(Frozen):
    """Who holds the process, how its container is made, and what stands in the way of starting it again."""

    holder: Holder = Holder()
    container: Container | None = None
    obstacles: tuple[str, ...] = ()


class Cgroup(Frozen):
    """What the path of a cgroup tells."""

    container: str = ""
    engine: str = ""
    unit: str = ""
    of_user: int | None = None


def read_cgroup(text: str) -> Cgroup:
    """From /proc/PID/cgroup, of either version. What logins and container engines run in does not count as a unit."""
    container = CONTAINER.search(text)
    user = re.search(r"/user@(\d+)\.service(/.*)?$", text, re.MULTILINE)
    paths = [user[2] or ""] if user else [line.split(":", 2)[-1] for line in text.splitlines()]
    parts = [part for path in paths for part in path.split("/") if part.endswith(".service")]
    units = [part for part in parts if not LOGINS.fullmatch(part) and part not in ENGINES]
    return Cgroup(
        container=container[2] if container else "",
        engine=container[1] if container else "",
        unit=units[-1 if user else 0] if units else "",
        of_user=int(user[1]) if user and units else None,
    )


@dataclass(frozen=True)
class CgroupsFact(Fact[tuple[Cgroup, Cgroup, bool]]):
    """Cgroups of a process and of the login, and whether both see the same file systems."""

    pid: int

    def command(self) -> str:
        """Two files and two links."""
        return f"""
cat /proc/{self.pid:d}/cgroup; echo; cat /proc/self/cgroup; echo
readlink /proc/{self.pid:d}/ns/mnt; readlink /proc/$$/ns/mnt; :"""

    def parse(self, output: bytes) -> tuple[Cgroup, Cgroup, bool]:
        """Blocks are divided by empty lines; a link that cannot be read counts as the same."""
        theirs, ours, links = as_text(output).split("\n\n")
        return read_cgroup(theirs), read_cgroup(ours), len(set(links.split())) < 2


async def find(host: Host, facts: ProcessFacts, machine: Machine) -> Found:
    """Who holds the process; a login in the same cgroup, such as one inside the container, sees a bare process.

    Raises ServerError for the proxy of a container's published port.
    """
    if facts.name in PROXIES:
        raise ServerError(
            f"the server's port is a container's, published through {facts.name}",
            where={"host": host.name, "process": facts.process.pid},
            do="only containers in the host's network (--network host) are handled; nothing was touched",
        )
    theirs, ours, same_files = await ask(host, CgroupsFact(facts.process.pid))
    if theirs == ours:
        theirs = Cgroup()
    if theirs.engine in ("crio", "containerd", "cri-containerd"):
        said = f"it runs in the container {theirs.container[:12]}, which Kubernetes or containerd holds"
        return Found(obstacles=(said,))
    if theirs.container and theirs.unit:
        said = f"it runs in a container that the unit {theirs.unit} holds and would start again by itself"
        return Found(obstacles=(said,))
    if theirs.unit:
        return await _unit(host, facts, machine, theirs)
    if theirs.container or not same_files:
        return await _container(host, facts, machine, theirs)
    return Found()


# --- systemd -----------------------------------------------------------------------------------------------


async def _unit(host: Host, facts: ProcessFacts, machine: Machine, seen: Cgroup) -> Found:
    scope: Literal["user", "system"] = "system" if seen.of_user is None else "user"
    holder = Holder(kind="systemd", scope=scope, name=seen.unit)
    if scope == "user" and seen.of_user != machine.uid:
        return Found(
            holder=holder,
            obstacles=(f"it belongs to {holder} of the user {seen.of_user}; log in as that user",),
        )
    if scope == "system" and machine.uid != 0:
        sudo = await host.run("sudo -n true")
        if not sudo.ok:
            said = f"it belongs to {holder}, and the login is neither root nor may use `sudo -n` ({_last(sudo.tail)})"
            return Found(holder=holder, obstacles=(said,))
        holder = holder.model_copy(update={"sudo": True})
    shown = await host.run(f'{manager_sh(holder)}\nmgr show -p {",".join(SHOWN)} -- "$unit"')
    if not shown.ok:
        return Found(holder=holder, obstacles=(f"systemctl tells nothing about {holder}: {_last(shown.tail)}",))
    return Found(holder=holder, obstacles=tuple(unit_obstacles(read_properties(shown.text), facts.process.pid)))


def read_properties(text: str) -> dict[str, str]:
    """Lines of `systemctl show`."""
    return {name: value for name, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def unit_obstacles(shown: dict[str, str], pid: int) -> Iterator[str]:
    """Why a unit could not be started again as it is, or not in another configuration."""
    if shown.get("LoadState") != "loaded":
        yield f"its unit is {shown.get('LoadState', 'unknown')}: there is nothing to start it from"
        return
    if shown.get("Transient") == "yes":
        yield "its unit is transient: it vanishes when it stops"
    if shown.get("NeedDaemonReload") == "yes":
        yield (
            "its unit was changed on disk since it was loaded, so a restart would start something else; "
            "`systemctl daemon-reload` and restart it first"
        )
    if shown.get("Type") not in TYPES:
        yield f"its unit is of the type {shown.get('Type')}; handled are {', '.join(sorted(TYPES))}"
    if shown.get("MainPID") != str(pid):
        yield f"the main process of its unit is {shown.get('MainPID')}, not the server itself; let ExecStart= `exec` it"
    flags = {flag for found in re.findall(r"flags=([^;}]*)", shown.get("ExecStartEx", "")) for flag in found.split()}
    if odd := sorted(flags - {"no-env-expand", "ignore-failure"}):
        yield f"its ExecStart= has a prefix ({', '.join(odd)}) that a changed command would lose"


# --- containers --------------------------------------------------------------------------------------------


async def _container(host: Host, facts: ProcessFacts, machine: Machine, seen: Cgroup) -> Found:
    """The container among those that run whose main process is the server, or an init that is its parent."""
    engines: list[Literal["docker", "podman"]] = ["podman"] if seen.engine == "libpod" else ["docker", "podman"]
    said = []
    for engine in engines:
        for sudo in (False, True) if machine.uid != 0 else (False,):
            program = f"sudo -n {engine}" if sudo else engine
            listed = await host.run(_inspect_sh(program, seen.container), timeout_s=60)
            if not listed.ok:
                said.append(f"{program}: {_last(listed.tail)}")
                continue
            for one in _objects(listed.text):
                if one["State"]["Pid"] in (facts.process.pid, facts.ppid):
                    return _read(one, facts, Holder(kind="container", scope=engine, sudo=sudo))
            said.append(f"{program} knows no container with this process")
    if not seen.container:
        return Found()  # a bare process with file systems of its own
    told = f"it runs in the container {seen.container[:12]}, which cannot be looked at ({'; '.join(said)})"
    return Found(obstacles=(told,))


async def find_again(host: Host, holder: Holder) -> Container | None:
    """The container that an earlier look found, which may be stopped now. Raises ServerError when it is gone."""
    if holder.kind != "container":
        return None
    program = f"sudo -n {holder.scope}" if holder.sudo else holder.scope
    shown = await host.run(_inspect_sh(program, holder.id), timeout_s=60)
    if not shown.ok:
        raise ServerError(
            "the container that was found when the session began cannot be looked at",
            where={"host": host.name, "container": f"{holder.name} ({holder.id[:12]})"},
            tail=shown.tail,
            do="see whether somebody removed it; without it the original can't be started again",
        )
    return read_container(_objects(shown.text)[0])


def _inspect_sh(program: str, wanted: str) -> str:
    only = shlex.quote(wanted) if wanted else f"$({program} ps -q --no-trunc)"
    return f"""
command -v {program.split()[-1]} >/dev/null || {{ echo "it is not installed" >&2; exit 1; }}
{program} ps -q >/dev/null || exit 1
ids={only if wanted else f'"{only}"'}
[ -n "$ids" ] || {{ echo "[]"; exit 0; }}
{program} inspect --type container $ids"""


def _objects(text: str) -> list[dict[str, Any]]:
    found = json.loads(text)
    return [one for one in found if isinstance(one, dict)]


def _read(one: dict[str, Any], facts: ProcessFacts, holder: Holder) -> Found:
    try:
        container = read_container(one)
    except (KeyError, ValidationError) as error:
        return Found(obstacles=(f"its container cannot be read: {error}",))
    holder = holder.model_copy(update={"name": base_name(container.name), "id": container.id})
    return Found(
        holder=holder,
        container=container,
        obstacles=(*container.obstacles, *command_obstacles(container, facts, one["State"]["Pid"])),
    )


def command_obstacles(container: Container, facts: ProcessFacts, main: int) -> Iterator[str]:
    """Experiments start the server's own command line in place of the entrypoint: it must have come through whole."""
    arguments = container.command[1:]
    if facts.argv[-len(arguments) :] != arguments and arguments:
        yield "its entrypoint changes the command line, so another one could not be handed through it"
    if main != facts.process.pid and not container.init:
        yield "the container's main process is not the server itself; let its entrypoint `exec` it"
    if any("\n" in value for value in (facts.environ or {}).values()):
        yield "a variable of it holds a line end, which no container's environment file can carry"


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
