"""What makes a winner outlive a reboot: the commands for a person, and the real thing on stand-ins for managers."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from state.models import Holder, LaunchSpec
from tests.ssh_servers import free_port
from tests.tools.test_service_kinds import UNIT, Prefixed, other_folder, stubbed, words
from tools import jobs
from tools.facts import ListenersFact, ProcessFact, ProcessFacts, ask
from tools.servers.base import is_volatile
from tools.services.base import Service, StopJobs
from tools.services.container import InContainer
from tools.services.container_options import Container, read_container
from tools.services.lasting import command_line
from tools.services.process import BareProcess
from tools.services.systemd import SystemdUnit
from tools.shell import Host

SECRET = "«secret:0123456789abcdef»"


def spec(*argv: str, **fields: object) -> LaunchSpec:
    base = {"engine": "e", "program": argv[:1], "flags": {"all": argv[1:]}, "argv": argv, "cwd": "/", "user": "llm"}
    return LaunchSpec.model_validate(base | fields)


# --- the commands for a person ------------------------------------------------------------------------------


def test_a_command_line_runs_in_a_shell_that_knows_the_secrets(tmp_path: Path) -> None:
    folder = tmp_path / 'an "odd" $place'
    folder.mkdir()
    show = 'import os, sys; print(os.getcwd(), os.environ["OWN"], os.environ["TOKEN"], *sys.argv[1:], sep="|")'
    whole = spec(
        sys.executable, "-c", show, "it's", "--api-key", SECRET, f"--other-key={SECRET}", "",
        cwd=str(folder), env={"OWN": "a b"}, hidden_env={"TOKEN": SECRET, "BASH_FUNC_f%%": SECRET},
    )  # fmt: skip
    line = command_line(whole)
    assert "«" not in line and 'TOKEN="$TOKEN"' in line
    known = {"TOKEN": "t $1", "API_KEY": "k k", "OTHER_KEY": "o"}
    done = subprocess.run(["/bin/sh", "-c", line], env=known, capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}|a b|t $1|it's|--api-key|k k|--other-key=o|\n"


@pytest.mark.parametrize(("scope", "place"), [("system", "/etc/systemd/system"), ("user", "~/.config/systemd/user")])
def test_the_drop_in_of_a_unit_can_be_made_by_hand(scope: str, place: str) -> None:
    original = spec("/bin/llm", "--api-key", SECRET, env={"LLM_A": "1", "LLM_B": "2"})
    desired = original.model_copy(update={"argv": ("/bin/llm", "-x", "--api-key", SECRET), "env": {"LLM_A": '3 "%" $'}})
    holder = Holder.model_validate({"kind": "systemd", "scope": scope, "name": "llm.service"})
    text = SystemdUnit("/srv/ratchet", 1, 1.0, holder, original).lasting(desired)
    lines = text.splitlines()
    assert 'ExecStart="/bin/llm" "-x" "--api-key" "${API_KEY}"' in lines
    assert 'Environment="LLM_A=3 \\"%%\\" $"' in lines
    assert "UnsetEnvironment=LLM_B" in lines
    assert f"cat >{place}/llm.service.d/ratchet.conf <<'END'" in lines
    assert "«" not in text
    assert lines[-1].endswith(
        "daemon-reload && " + ("systemctl " if scope == "system" else "systemctl --user ") + "restart llm.service"
    )


def test_a_container_can_be_made_by_hand() -> None:
    container = Container(
        id="a" * 64, name="llm", image="sha256:5", options=("--network=host", "--label=team=a b"),
        command=("vllm",), init=False, restart="always", obstacles=(),
    )  # fmt: skip
    holder = Holder(kind="container", scope="docker", name="llm", id="a" * 64)
    desired = spec("vllm", "serve", "m", cwd="/srv", env={"VLLM_A": "1 2"}, hidden_env={"HF_TOKEN": SECRET})
    text = InContainer("/r", 1, 1.0, holder, spec("vllm"), container).lasting(desired)
    made = shlex.split(text.splitlines()[-1])
    assert made[:3] == ["docker", "run", "-d"]
    assert made[-3:] == ["sha256:5", "serve", "m"]
    for option in ("--label=team=a b", "--name=llm", "--restart=always", "--workdir=/srv", "--entrypoint=vllm"):
        assert option in made
    assert "VLLM_A=1 2" in made and "HF_TOKEN=$HF_TOKEN" in made


def test_nobody_starts_a_bare_process() -> None:
    service = BareProcess("/r", 1, 1.0)
    assert service.persist_script(spec("llm"), {}, "S-T1") is None
    assert service.unpersist_script("S") is None


# --- stand-ins for managers -----------------------------------------------------------------------------------


async def serving(host: Host, port: int) -> ProcessFacts | None:
    seen = await ask(host, ListenersFact(port))
    pids = [pid for listener in seen.listeners for pid in listener.pids]
    return await ask(host, ProcessFact(min(pids))) if pids else None


async def until(host: Host, port: int, argv: tuple[str, ...]) -> ProcessFacts:
    for _ in range(300):
        facts = await serving(host, port)
        if facts is not None and facts.argv[-len(argv) :] == argv:
            return facts
        await asyncio.sleep(0.1)
    raise AssertionError(f"nobody serves as {argv}")


async def found(host: Host, port: int, argv: tuple[str, ...]) -> tuple[LaunchSpec, ProcessFacts]:
    facts = await until(host, port, argv)
    hidden = {name: value for name, value in (facts.environ or {}).items() if not is_volatile(name)}
    return spec(*facts.argv, cwd=facts.cwd or "/", user=facts.user, hidden_env=hidden), facts


async def launched(host: Host, root: str, service: Service, adopted: ProcessFacts, desired: LaunchSpec) -> None:
    script = service.launch_script(desired, {}, "S-T1")
    await jobs.prepare(host, root, "S-T1", script)
    for operation in service.plan(adopted.process, "S-T1"):
        await host.check(operation.render(), timeout_s=60)
    await jobs.start(host, root, "S-T1", script)


@pytest.mark.anyio
async def test_a_unit_comes_back_as_the_winner_until_that_is_taken_back(tmp_path: Path) -> None:
    port, root, runtime = free_port(), str(tmp_path / "root"), tmp_path / "runtime"
    units, kept = runtime / "systemd" / "user", tmp_path / "config" / "systemd" / "user" / "files.service.d"
    units.mkdir(parents=True)
    argv = words(tmp_path / "files", port)
    text = UNIT.format(folder=tmp_path, command=" ".join(argv))
    (units / "files.service").write_text(text)
    place = stubbed(tmp_path, "systemctl")
    lines = f"export PATH={place}:$PATH XDG_RUNTIME_DIR={runtime} XDG_CONFIG_HOME={tmp_path / 'config'}\n"
    host, holder = Prefixed(lines), Holder(kind="systemd", scope="user", name="files.service")
    await host.check("systemctl --user start files.service")
    try:
        original, adopted = await found(host, port, argv)
        service = SystemdUnit(root, port, 1.0, holder, original)
        changed = other_folder(argv)
        desired = original.model_copy(update={"argv": changed, "flags": {"changed": ()}, "env": {"ADDED": "a $b 100%"}})
        await launched(host, root, service, adopted, desired)
        winner = await until(host, port, changed)
        script = service.persist_script(desired, {}, "S-T1")
        assert script is not None
        for _ in range(2):
            assert f"{kept}/zy-ratchet-S.conf" in (await host.check(script)).text
        assert not (units / "files.service.d").exists(), "what a reboot forgets is gone already"
        assert (units / "files.service").read_text() == text
        assert [oct(path.stat().st_mode & 0o777) for path in kept.iterdir()] == ["0o600", "0o600"]
        now = await serving(host, port)
        assert now is not None and now.process == winner.process, "nothing is restarted for it"

        await host.check("systemctl --user stop files.service && systemctl --user start files.service")
        again = await until(host, port, changed)
        environ = again.environ or {}
        assert (environ["ADDED"], environ["RATCHET_SPEC"]) == ("a $b 100%", desired.fingerprint)
        assert environ["RATCHET_HELD"] == f"{root}/jobs/S-T1/", "so that it is known as ours"

        taken_back = service.unpersist_script("S")
        assert taken_back is not None
        for _ in range(2):
            await host.check(taken_back)
        assert not kept.exists()
        await host.check("systemctl --user stop files.service && systemctl --user start files.service")
        assert (await found(host, port, argv))[0] == original
    finally:
        await host.run("systemctl --user stop files.service")
        await host.run(StopJobs(root=root, shape="*-T*", grace_s=1).render(), timeout_s=60)


@pytest.mark.anyio
async def test_a_later_experiment_wins_over_an_earlier_winner(tmp_path: Path) -> None:
    """Drop-ins count in the order of their names."""
    holder = Holder(kind="systemd", scope="user", name="files.service")
    service = SystemdUnit(str(tmp_path), 1, 1.0, holder, spec("/bin/llm"))
    desired = spec("/bin/llm", "-x")
    kept, runtime = service.persist_script(desired, {}, "A-T1"), service.launch_script(desired, {}, "B-T1")
    assert kept is not None and "zy-ratchet-A.conf" in kept and "zz-ratchet-B.conf" in runtime
    assert sorted(["zz-ratchet-B.conf", "zy-ratchet-B.conf", "zy-ratchet-A.conf"])[-1] == "zz-ratchet-B.conf"


@pytest.mark.anyio
async def test_a_container_gets_the_restart_policy_that_was_found(tmp_path: Path) -> None:
    port, root = free_port(), str(tmp_path / "root")
    place = stubbed(tmp_path, "docker")
    host = Prefixed(f"export PATH={place}:$PATH STUB_DOCKER={tmp_path / 'store'}\n")
    argv = words(tmp_path / "files", port)
    made = f"--network host --restart always --workdir {tmp_path}"
    await host.check(f"docker run -d --name files {made} python {' '.join(argv)}")
    container = read_container(json.loads((await host.check("docker inspect files")).text)[0])
    assert container.restart == "always"
    holder = Holder(kind="container", scope="docker", name="files", id=container.id)

    async def policies() -> dict[str, str]:
        ids = (await host.check("docker ps -aq --no-trunc")).text.split()
        shown = json.loads((await host.check(f"docker inspect {' '.join(ids)}")).text)
        return {one["Id"]: one["HostConfig"]["RestartPolicy"]["Name"] for one in shown}

    try:
        original, adopted = await found(host, port, argv)
        service = InContainer(root, port, 1.0, holder, original, container)
        changed = other_folder(argv)
        await launched(
            host, root, service, adopted, original.model_copy(update={"argv": changed, "flags": {"changed": ()}})
        )
        await until(host, port, changed)
        before = await policies()
        assert sorted(before.values()) == ["always", "no"] and before[container.id] == "always"
        script, taken_back = service.persist_script(original, {}, "S-T1"), service.unpersist_script("S")
        assert script is not None and taken_back is not None
        for _ in range(2):
            assert "always" in (await host.check(script)).text
        assert {one: policy == "always" for one, policy in (await policies()).items()} == {
            one: one != container.id for one in before
        }
        for _ in range(2):
            await host.check(taken_back)
        assert (await policies())[container.id] == "always"
    finally:
        await host.run("for one in $(docker ps -q); do docker stop -t 1 $one; done")
        await host.run(StopJobs(root=root, shape="*-T*", grace_s=1).render(), timeout_s=60)
