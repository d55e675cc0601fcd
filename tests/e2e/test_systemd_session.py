"""A whole unattended night on a server that the real systemd holds: over SSH, with a real llama.cpp, the agent killed.

systemd is the first process of a contained part of this machine, see `tests/contained.py`; sshd runs in it too, the
agent outside. What is asserted does not depend on what an experiment yields.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from state.models import Role, TodoStatus
from tests.contained import ContainedHost, contained, entering
from tests.e2e.rig import CANARY, FASTER, MODEST, WITNESSED, Rig, rig
from tests.e2e.test_real_session import REFUSED, candidate_at_work, database, spec_words, words_of
from tests.ssh_servers import openssh

pytestmark = [pytest.mark.real, pytest.mark.slow]

UNKNOWN = """
[[experiments]]
id = "unknown"
title = "A flag that the server does not have"
hypothesis = "it is refused before anything is stopped"
changes = [{ kind = "flag", name = "--no-such-flag", value = "1" }]
priority = 0.2
"""
UNIT = """\
[Unit]
Description=A language model
DefaultDependencies=no
StartLimitIntervalSec=1000
StartLimitBurst=2

[Service]
WorkingDirectory={folder}
EnvironmentFile={folder}/environment
ExecStart={command}
Restart=always
"""
UNITS = "/run/systemd/system"
BEGIN_SH = f"""
set -e
mkdir -p {UNITS} /run/sshd
cp "$0"/units/* {UNITS}/
exec env -i container=ratchet SYSTEMD_UNIT_PATH={UNITS} "PATH=$PATH" /usr/lib/systemd/systemd --unit=base.target \\
  --log-target=console --log-level=info
"""


class Night(NamedTuple):
    """What was seen from outside."""

    host: Rig
    diagnosis: dict[str, object]
    original: list[str]
    candidate: list[str]
    drop_ins: list[str]
    watched: list[str]
    watched_drop_ins: list[str]
    marker: str
    end: int
    said: str
    final: list[str]
    restored: list[str]
    restored_environ: dict[str, str]
    restored_drop_ins: list[str]
    unit: str
    shown: str


def run(pid: int, script: str) -> str:
    """What a command says that an operator types on the host."""
    return asyncio.run(ContainedHost(pid, "").check(script, timeout_s=60)).text


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Night]:
    folder = tmp_path_factory.mktemp("systemd")
    world = folder / "world"
    given = folder / "units"
    given.mkdir()
    (given / "base.target").write_text("[Unit]\nDefaultDependencies=no\n")
    first = ["/bin/sh", "-c", BEGIN_SH, str(folder)]
    with contained(world, *first, environ={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, seen=sys.base_prefix) as pid:
        server = functools.partial(openssh, within=entering(pid))
        with rig(world / "rig", demo_model, ssh_server=server) as host:
            (host.folder / "environment").write_text(
                f"OMP_WAIT_POLICY=passive\nWITNESS={host.folder}/starts\nSECRET_CANARY={CANARY}-env\n"
            )
            words = [*WITNESSED, "--model", str(demo_model), "--port", str(host.port), "--api-key", f"{CANARY}-key"]
            unit = UNIT.format(folder=host.folder, command=shlex.join([*words, *MODEST.split()]))
            run(
                pid, f"printf %s {shlex.quote(unit)} >{UNITS}/llm.service; systemctl daemon-reload; systemctl start llm"
            )
            try:
                yield lived_through(host, pid)
            finally:
                run(pid, "systemctl stop llm")


def lived_through(host: Rig, pid: int) -> Night:
    def drop_ins() -> list[str]:
        return run(pid, f"ls {UNITS}/llm.service.d 2>/dev/null; :").split()

    host.until(host.listener)
    original = host.argv()
    session = str(host.write_session(FASTER + REFUSED + UNKNOWN, lease_s=20))
    diagnosis = json.loads(host.command("doctor", session, "--json").out.read_text())
    agent = host.agent("start", session, *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    candidate, candidates_drop_ins = host.argv(), drop_ins()
    host.until(lambda: list(host.root.glob("lease/marker-*")))
    marker = "".join(path.read_text() for path in host.root.glob("lease/marker-*"))
    watched, watched_drop_ins = host.argv(), drop_ins()
    end = host.command("resume", *database(host))
    final = host.argv()
    host.command("restore", "--original", *database(host))
    return Night(
        host=host,
        diagnosis=diagnosis,
        original=original,
        candidate=candidate,
        drop_ins=candidates_drop_ins,
        watched=watched,
        watched_drop_ins=watched_drop_ins,
        marker=marker,
        end=end.process.returncode,
        said=end.said,
        final=final,
        restored=host.argv(),
        restored_environ=host.environ(),
        restored_drop_ins=drop_ins(),
        unit=run(pid, f"cat {UNITS}/llm.service"),
        shown=run(pid, "systemctl show -p NRestarts,NeedDaemonReload,DropInPaths,ActiveState llm"),
    )


def test_doctor_names_the_unit_and_sees_no_obstacle(night: Night) -> None:
    checks = {check["name"]: check for check in night.diagnosis["checks"]}  # type: ignore[attr-defined, union-attr]
    assert (checks["service"]["status"], checks["restorable"]["status"]) == ("ok", "ok")
    assert checks["service"]["text"] == "held by the system unit llm.service"


def test_an_experiment_is_one_drop_in_and_its_variables(night: Night) -> None:
    assert "256" in night.candidate
    assert [name.rpartition(".")[2] for name in night.drop_ins] == ["conf", "env"]


def test_killed_the_hosts_watcher_brings_the_original_back_through_the_manager(night: Night) -> None:
    assert night.marker.startswith("restored"), night.marker
    assert night.watched == night.original
    assert night.watched_drop_ins == []


def test_resumed_it_ends_with_what_the_log_says_and_has_tried_everything(night: Night) -> None:
    assert night.end == 0, night.said
    with night.host.store() as store:
        assert words_of(night.final) == spec_words(store, Role.KNOWN_GOOD)
        session = store.latest_session().id
        todos = {todo.id: todo for todo in store.todos(session)}
        assert todos["refused"].status is TodoStatus.BLOCKED
        assert todos["unknown"].status is TodoStatus.BLOCKED
        assert todos["faster"].status is TodoStatus.DONE
        failures = [trial.failure for trial in store.trials(session) if trial.experiment_id == "refused"]
    assert failures and failures[0] is not None
    assert "flash_attn" in failures[0].cause + failures[0].tail


def test_the_original_comes_back_byte_for_byte(night: Night) -> None:
    assert night.restored == night.original
    assert night.restored_environ["SECRET_CANARY"] == f"{CANARY}-env"
    assert not any(name.startswith("RATCHET_") for name in night.restored_environ)
    assert night.restored_drop_ins == []
    assert "StartLimitBurst=2" in night.unit
    assert dict(line.split("=", 1) for line in night.shown.splitlines()) == {
        "NRestarts": "0",
        "NeedDaemonReload": "no",
        "DropInPaths": "",
        "ActiveState": "active",
    }


def test_no_two_servers_ever_ran_at_a_time(night: Night) -> None:
    starts = night.host.starts()
    assert len(starts) > 4, "beyond the unit's own start limit"
    assert [start for start in starts if start.living] == []
