"""What is read of cgroups, units and containers, and what is written for them; the contract runs it all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from state.errors import ServerError
from state.models import Adoption, Holder, LaunchSpec, ProcessId
from tests.local_host import LocalHost
from tools.facts import MachineFact, ProcessFact, ask
from tools.services.container import InContainer, base_name
from tools.services.container_options import read_container
from tools.services.finding import Cgroup, command_obstacles, find, read_cgroup, read_properties, unit_obstacles
from tools.services.held import launch_of
from tools.services.systemd import SystemdUnit, exec_start

ID = "a" * 64
PROCESS = ProcessId(pid=7, start_ticks=8, boot_id="b")


def spec(*argv: str, **fields: object) -> LaunchSpec:
    base = {"engine": "e", "program": argv[:1], "flags": {"all": argv[1:]}, "argv": argv, "cwd": "/", "user": "llm"}
    return LaunchSpec.model_validate(base | fields)


# --- cgroups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0::/system.slice/llm.service", Cgroup(unit="llm.service")),
        ("0::/system.slice/system-llm.slice/llm@gpu0.service/sub", Cgroup(unit="llm@gpu0.service")),
        ("2:cpu:/\n1:name=systemd:/system.slice/llm.service\n0::/system.slice/llm.service", Cgroup(unit="llm.service")),
        (
            "0::/user.slice/user-1001.slice/user@1001.service/app.slice/llm.service",
            Cgroup(unit="llm.service", of_user=1001),
        ),
        ("0::/user.slice/user-1001.slice/session-4.scope", Cgroup()),
        ("0::/user.slice/user-1001.slice/user@1001.service/app.slice/run-r1.scope", Cgroup()),
        ("0::/system.slice/ssh.service", Cgroup()),
        ("0::/system.slice/sshd@3-10.0.0.1:22-10.0.0.2:5.service", Cgroup()),
        (f"0::/system.slice/docker-{ID}.scope", Cgroup(container=ID, engine="docker")),
        (f"12:pids:/docker/{ID}\n0::/system.slice/docker.service", Cgroup(container=ID, engine="docker")),
        (f"0::/machine.slice/libpod-{ID}.scope/container", Cgroup(container=ID, engine="libpod")),
        (
            f"0::/system.slice/llm.service/libpod-payload-{ID}",
            Cgroup(container=ID, engine="libpod", unit="llm.service"),
        ),
        (f"0::/kubepods.slice/cri-containerd-{ID}.scope", Cgroup(container=ID, engine="cri-containerd")),
        ("0::/", Cgroup()),
        ("", Cgroup()),
    ],
)
def test_a_cgroup_tells_who_holds_a_process(text: str, wanted: Cgroup) -> None:
    assert read_cgroup(text) == wanted


@pytest.mark.anyio
async def test_a_process_of_the_login_is_held_by_nobody() -> None:
    host = LocalHost()
    facts = await ask(host, ProcessFact(os.getpid()))
    assert facts is not None
    found = await find(host, facts, await ask(host, MachineFact()))
    assert (found.holder, found.container, found.obstacles) == (Holder(), None, ())


@pytest.mark.anyio
async def test_the_proxy_of_a_published_port_is_told_from_a_server() -> None:
    host = LocalHost()
    facts = await ask(host, ProcessFact(os.getpid()))
    assert facts is not None
    with pytest.raises(ServerError, match="published through docker-proxy"):
        await find(host, facts.model_copy(update={"name": "docker-proxy"}), await ask(host, MachineFact()))


# --- units -------------------------------------------------------------------------------------------------

SHOWN = {
    "LoadState": "loaded",
    "Transient": "no",
    "NeedDaemonReload": "no",
    "Type": "simple",
    "MainPID": "7",
    "ExecStartEx": "{ path=/usr/bin/llm ; argv[]=/usr/bin/llm --port 1 ; flags= ; start_time=[n/a] ; pid=0 }",
}


def test_an_ordinary_unit_has_no_obstacle() -> None:
    text = "".join(f"{name}={value}\n" for name, value in SHOWN.items())
    assert list(unit_obstacles(read_properties(text), 7)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"LoadState": "not-found"}, "nothing to start it from"),
        ({"Transient": "yes"}, "transient"),
        ({"NeedDaemonReload": "yes"}, "daemon-reload"),
        ({"Type": "forking"}, "of the type forking"),
        ({"MainPID": "6"}, "main process of its unit is 6"),
        ({"ExecStartEx": "{ path=/x ; argv[]=/x ; flags=privileged ; pid=0 }"}, "prefix (privileged)"),
    ],
)
def test_what_a_unit_cannot_bring_back_is_an_obstacle(changed: dict[str, str], words: str) -> None:
    (told,) = unit_obstacles(SHOWN | changed, 7)
    assert words in told


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("/usr/bin/llm", "--port", "1"), '"/usr/bin/llm" "--port" "1"'),
        (("/usr/bin/llm", "", "a b", "it's", ";"), '"/usr/bin/llm" "" "a b" "it\'s" ";"'),
        (
            ("/usr/bin/llm", '"', "\\", "%n", "$HOME", "a\nb\t"),
            '"/usr/bin/llm" "\\"" "\\\\" "%%n" "$$HOME" "a\\x0ab\\x09"',
        ),
        (("python3", "-m", "llm"), '"/usr/bin/env" "python3" "-m" "llm"'),
        (("/opt/$x/llm",), '"/usr/bin/env" "/opt/$$x/llm"'),
    ],
)
def test_a_command_line_is_quoted_for_systemd(command: tuple[str, ...], line: str) -> None:
    assert exec_start(command) == line


def test_a_drop_in_holds_no_more_than_the_changes_and_the_secrets_stay_out_of_it(tmp_path: Path) -> None:
    original = spec("/bin/llm", env={"LLM_A": "1", "LLM_B": "2"}, hidden_env={"KEY": "«secret:1»"})
    service = SystemdUnit(str(tmp_path), 1, 1.0, Holder(kind="systemd", scope="system", name="llm.service"), original)
    desired = original.model_copy(update={"argv": ("/bin/llm", "-x"), "env": {"LLM_A": "3"}})
    script = service.launch_script(desired, {"«secret:1»": "the value"}, "S-T1")
    assert "the value" not in script
    assert 'LLM_A="3"' in script
    assert "UnsetEnvironment=LLM_B" in script
    assert "/run/systemd/system/llm.service.d/zz-ratchet-S.env" in script
    back = service.launch_script(original, {}, "S-T2")
    assert "ExecStart" not in back
    assert "zz-ratchet-S.conf" in back


# --- containers --------------------------------------------------------------------------------------------

INSPECTED = {
    "Id": ID,
    "Name": "/llm",
    "Image": "sha256:5",
    "Path": "vllm",
    "Args": ["serve", "model"],
    "State": {"Pid": 7},
    "Mounts": [
        {"Type": "bind", "Source": "/models", "Destination": "/m", "RW": False, "Propagation": "rprivate"},
        {"Type": "volume", "Name": "cache", "Source": "/var/lib/x", "Destination": "/c", "RW": True},
    ],
    "Config": {"Env": [], "Labels": {"team": "a b"}, "User": "1000:1000", "StopSignal": "SIGINT"},
    "HostConfig": {"NetworkMode": "host", "RestartPolicy": {"Name": "always"}},
}
"""The keys of `docker inspect` that matter, as the Engine's API describes them; no recording."""


def inspected(**host: object) -> dict[str, object]:
    return {**INSPECTED, "HostConfig": {**INSPECTED["HostConfig"], **host}}  # type: ignore[dict-item]


def test_labels_user_mounts_and_network_are_carried_over() -> None:
    container = read_container(INSPECTED)
    assert container.obstacles == ()
    assert container.options == (
        "--label=team=a b",
        "--network=host",
        "--user=1000:1000",
        "--stop-signal=SIGINT",
        "--mount=type=bind,source=/models,destination=/m,readonly,bind-propagation=rprivate",
        "--mount=type=volume,source=cache,destination=/c",
    )
    assert (container.name, container.image, container.command) == ("llm", "sha256:5", ("vllm", "serve", "model"))


@pytest.mark.parametrize(
    ("host", "option"),
    [
        ({"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}]}, "--gpus=count=all"),
        ({"DeviceRequests": [{"DeviceIDs": ["0", "2"], "Capabilities": [["gpu"]]}]}, '--gpus="device=0,2"'),
        (
            {"DeviceRequests": [{"Driver": "nvidia", "Count": 2, "Capabilities": [["gpu", "utility"]]}]},
            '--gpus=driver=nvidia,count=2,"capabilities=utility"',
        ),
        (
            {"Devices": [{"PathOnHost": "/dev/kfd", "PathInContainer": "/dev/kfd", "CgroupPermissions": "rwm"}]},
            "--device=/dev/kfd:/dev/kfd:rwm",
        ),
        ({"IpcMode": "host", "ShmSize": 67108864}, "--ipc=host"),
        ({"ShmSize": 17179869184}, "--shm-size=17179869184b"),
        ({"Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}]}, "--ulimit=memlock=-1:-1"),
        ({"NanoCpus": 2500000000}, "--cpus=2.5"),
        ({"MemorySwap": -1}, "--memory-swap=-1"),
        ({"Runtime": "nvidia"}, "--runtime=nvidia"),
        ({"Tmpfs": {"/t": "size=1g"}}, "--tmpfs=/t:size=1g"),
        ({"SecurityOpt": ["seccomp=unconfined"]}, "--security-opt=seccomp=unconfined"),
    ],
)
def test_a_setting_becomes_the_option_that_makes_it(host: dict[str, object], option: str) -> None:
    container = read_container(inspected(**host))
    assert container.obstacles == ()
    assert [one for one in container.options if one not in read_container(INSPECTED).options] == [option]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"AutoRemove": True}, "removed as soon as it stops"),
        ({"NetworkMode": "bridge"}, "only containers in the host's network"),
        ({"Links": ["/db:db"]}, "its setting Links"),
        ({"SomethingNew": 5}, "its setting SomethingNew (5) cannot be carried over"),
    ],
)
def test_what_cannot_be_carried_over_is_an_obstacle(host: dict[str, object], words: str) -> None:
    (told,) = read_container(inspected(**host)).obstacles
    assert words in told


@pytest.mark.parametrize("label", ["PODMAN_SYSTEMD_UNIT", "com.docker.swarm.service.id", "io.kubernetes.pod.name"])
def test_a_container_that_somebody_would_start_again_is_an_obstacle(label: str) -> None:
    config = {**INSPECTED["Config"], "Labels": {label: "x"}}  # type: ignore[dict-item]
    (told,) = read_container({**INSPECTED, "Config": config}).obstacles
    assert "would start it again by itself" in told


@pytest.mark.anyio
async def test_an_entrypoint_that_changes_the_command_line_is_an_obstacle() -> None:
    facts = await ask(LocalHost(), ProcessFact(os.getpid()))
    assert facts is not None
    pid = facts.process.pid
    through = facts.model_copy(update={"argv": ("/usr/bin/python3", "/usr/bin/vllm", "serve", "model"), "environ": {}})
    assert list(command_obstacles(read_container(INSPECTED), through, pid)) == []
    other = facts.model_copy(update={"argv": ("vllm", "serve", "other"), "environ": {"A": "x\ny"}})
    told = list(command_obstacles(read_container(INSPECTED), other, pid + 1))
    assert [word for word in ("entrypoint changes", "main process is not", "line end") if word in "; ".join(told)] == [
        "entrypoint changes",
        "main process is not",
        "line end",
    ]


def test_a_variable_with_a_line_end_is_refused_before_anything_is_stopped(tmp_path: Path) -> None:
    holder = Holder(kind="container", scope="docker", name="llm", id=ID)
    service = InContainer(str(tmp_path), 1, 1.0, holder, spec("vllm"), read_container(INSPECTED))
    with pytest.raises(ServerError, match="line end"):
        service.launch_script(spec("vllm", "-x", hidden_env={"A": "x\ny"}), {}, "S-T1")


def test_a_container_set_aside_is_known_by_its_first_name() -> None:
    assert base_name(f"llm-ratchet-{ID[:12]}") == "llm"
    assert base_name("llm-ratchet-original") == "llm-ratchet-original"


# --- records -----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_record_names_exactly_one_process(tmp_path: Path) -> None:
    for key, line in {"S-T1": "7 80 b f1", "S-T2": "7 8 b f2", "S-T3": "17 8 b f3", "S-T4": "7 8 c f4"}.items():
        (tmp_path / "jobs" / key).mkdir(parents=True)
        (tmp_path / "jobs" / key / "held").write_text(line + "\n")
    found = await launch_of(LocalHost(), str(tmp_path), PROCESS)
    assert found is not None
    assert (found.key, found.fingerprint) == ("S-T2", "f2")
    assert await launch_of(LocalHost(), str(tmp_path), PROCESS.model_copy(update={"pid": 9})) is None


def test_an_adoption_of_before_reads_as_one_of_a_bare_process() -> None:
    known = Adoption(process=PROCESS, spec=spec("x"))
    old = {name: value for name, value in known.model_dump(mode="json").items() if name != "holder"}
    assert Adoption.model_validate_json(json.dumps(old)) == known
