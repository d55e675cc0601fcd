"""Whole unattended nights on a server that systemd or podman holds, all of it real; the agent is killed on the way.

The host is a contained part of this machine, see `tests/contained.py`; sshd and the manager run in it, the agent
outside. What is asserted does not depend on what an experiment yields.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shlex
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from state.models import Role, TodoStatus
from tests.contained import ContainedHost, contained, entering
from tests.e2e.rig import CANARY, FASTER, MODEST, PROJECT, WITNESSED, Rig, rig
from tests.e2e.test_real_session import REFUSED, candidate_at_work, database, spec_words, words_of
from tests.ssh_servers import openssh

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOTS = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
UNKNOWN = """
[[experiments]]
id = "unknown"
title = "A flag that the server does not have"
hypothesis = "it is refused before anything is stopped"
changes = [{ kind = "flag", name = "--no-such-flag", value = "1" }]
priority = 0.2
"""


class Kind(NamedTuple):
    """A way of holding the server, as an operator would set it up; all but the first two are shell scripts."""

    said: str
    needs: Path
    first: str
    end: str
    traces: str
    setup: str


UNITS = "/run/systemd/system"
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
SYSTEMD = Kind(
    said="held by the system unit llm.service",
    needs=Path("/usr/lib/systemd/systemd"),
    first=f"""
set -e
mkdir -p {UNITS} /run/sshd
printf '[Unit]\\nDefaultDependencies=no\\n' >{UNITS}/base.target
exec env -i container=ratchet SYSTEMD_UNIT_PATH={UNITS} "PATH=$PATH" /usr/lib/systemd/systemd --unit=base.target \\
  --log-target=console --log-level=info
""",
    end="systemctl stop llm",
    traces=f"ls {UNITS}/llm.service.d 2>/dev/null; :",
    setup=f"cat {UNITS}/llm.service; find {UNITS} | sort; systemctl show llm -p DropInPaths,NeedDaemonReload,NRestarts"
    ",ActiveState,Restart,StartLimitBurst,EnvironmentFiles",
)
PODMAN = Kind(
    said="held by the podman container llm",
    needs=Path("/usr/bin/podman"),
    first="""
set -e
mkdir -p /run/sshd
cp /usr/bin/podman /run/podman-itself
cat >/run/podman-here <<END
#!/bin/sh
unset TMPDIR
exec /run/podman-itself --root $0/store --runroot /run/podman --tmpdir /run/libpod --storage-driver vfs \\
  --cgroup-manager cgroupfs --events-backend file "\\$@"
END
chmod 755 /run/podman-here
mount --bind /run/podman-here /usr/bin/podman
while :; do sleep 1; done
""",
    end="for one in $(podman ps -q); do podman stop -t 1 $one; done",
    traces="podman ps -a --format '{{.Names}}' | grep -vx llm; :",
    setup="podman ps -a --format '{{.ID}} {{.Names}}'; podman inspect -f "
    "'{{json .Config}} {{json .HostConfig}} {{json .Mounts}} {{.Image}} {{.Path}} {{.Args}} {{.Created}}' llm",
)
"""Podman keeps everything in the world's folder, whoever calls it."""


def begun_by_systemd(host: Rig, words: list[str]) -> str:
    unit = UNIT.format(folder=host.folder, command=shlex.join(words))
    return f"printf %s {shlex.quote(unit)} >{UNITS}/llm.service; systemctl daemon-reload; systemctl start llm"


def begun_by_podman(host: Rig, words: list[str]) -> str:
    """The image has folders and links alone; the programs are those of this machine, mounted."""
    model = Path(words[words.index("--model") + 1]).parent
    places = {place.resolve() for place in (PROJECT, Path(sys.prefix), Path(sys.base_prefix), model)}
    mounts = " ".join(f"-v {place}:{place}:ro" for place in [Path("/usr"), *sorted(places)])
    made = "--network host --cgroups disabled --ulimit nofile=512:1024 --ulimit nproc=4000:4000"
    made += f" --restart always --workdir {host.folder} --env-file {host.folder}/environment --label 'team=a b'"
    image = host.folder / "image.tar"
    with tarfile.open(image, "w") as root:
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            root.addfile(link)
        for name in ("tmp", "etc", "usr"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            root.addfile(folder)
    run = f"podman run -d --name llm {made} {mounts} -v {host.folder}:{host.folder} llm {shlex.join(words)}"
    return f"podman import {image} llm && {run}"


KINDS = {"systemd": (SYSTEMD, begun_by_systemd), "podman": (PODMAN, begun_by_podman)}


class Night(NamedTuple):
    """What was seen from outside."""

    kind: Kind
    host: Rig
    diagnosis: dict[str, Any]
    original: list[str]
    setup: str
    candidate: list[str]
    traces: list[str]
    watched: list[str]
    watched_traces: list[str]
    marker: str
    end: int
    said: str
    final: list[str]
    restored: list[str]
    restored_environ: dict[str, str]
    restored_setup: str


def run(pid: int, script: str) -> str:
    """What a command says that an operator types on the host."""
    return asyncio.run(ContainedHost(pid, "").check(script, timeout_s=120)).text


@pytest.fixture(scope="module", params=list(KINDS))
def night(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, request: pytest.FixtureRequest
) -> Iterator[Night]:
    folder, (kind, begun) = tmp_path_factory.mktemp("held"), KINDS[request.param]
    if not kind.needs.exists():
        pytest.skip(f"{kind.needs} is not installed")
    first = ["/bin/sh", "-c", kind.first, str(folder / "world")]
    with contained(folder / "world", *first, environ=ROOTS, seen=sys.base_prefix) as pid:
        run(pid, "until [ -d /run/sshd ]; do sleep 0.1; done")
        server = functools.partial(openssh, within=entering(pid))
        with rig(folder / "world" / "rig", demo_model, ssh_server=server) as host:
            (host.folder / "environment").write_text(
                f"OMP_WAIT_POLICY=passive\nWITNESS={host.folder}/starts\nSECRET_CANARY={CANARY}-env\n"
            )
            words = [*WITNESSED, "--model", str(demo_model.resolve()), "--port", str(host.port)]
            words += ["--api-key", f"{CANARY}-key", *MODEST.split()]
            run(pid, begun(host, words))
            try:
                yield lived_through(host, pid, kind)
            finally:
                run(pid, kind.end)


def lived_through(host: Rig, pid: int, kind: Kind) -> Night:
    host.until(host.listener)
    original, setup = host.argv(), run(pid, kind.setup)
    session = str(host.write_session(FASTER + REFUSED + UNKNOWN, lease_s=20))
    diagnosis = json.loads(host.command("doctor", session, "--json").out.read_text())
    agent = host.agent("start", session, *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    candidate, traces = host.argv(), run(pid, kind.traces).split()
    host.until(lambda: list(host.root.glob("lease/marker-*")))
    marker = "".join(path.read_text() for path in host.root.glob("lease/marker-*"))
    watched, watched_traces = host.argv(), run(pid, kind.traces).split()
    end = host.command("resume", *database(host))
    final = host.argv()
    host.command("restore", "--original", *database(host))
    return Night(
        kind=kind,
        host=host,
        diagnosis=diagnosis,
        original=original,
        setup=setup,
        candidate=candidate,
        traces=traces,
        watched=watched,
        watched_traces=watched_traces,
        marker=marker,
        end=end.process.returncode,
        said=end.said,
        final=final,
        restored=host.argv(),
        restored_environ=host.environ(),
        restored_setup=run(pid, kind.setup),
    )


def test_doctor_names_the_holder_and_sees_no_obstacle(night: Night) -> None:
    checks = {check["name"]: check for check in night.diagnosis["checks"]}
    assert (checks["service"]["status"], checks["restorable"]["status"]) == ("ok", "ok"), checks["restorable"]
    assert checks["service"]["text"] == night.kind.said


def test_an_experiment_leaves_traces_that_the_watcher_takes_away(night: Night) -> None:
    assert "256" in night.candidate
    assert night.traces and all("ratchet" in name for name in night.traces)
    assert night.marker.startswith("restored"), night.marker
    assert night.watched == night.original
    assert night.watched_traces == []


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
    assert night.restored_setup == night.setup


def test_no_two_servers_ever_ran_at_a_time(night: Night) -> None:
    if night.kind is PODMAN:
        pytest.skip("the server sees only itself in its container")
    starts = night.host.starts()
    assert len(starts) > 4, "beyond the unit's own start limit"
    assert [start for start in starts if start.living] == []
