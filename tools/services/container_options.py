"""What a container was made with, read from the engine's `inspect`, as the options that make it again; pure reading.

Each setting is carried over, known not to matter, or an obstacle: one that is not known here and not at its default
makes the container one that could not be made again as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import Field

from state.models import Frozen

Json = Mapping[str, Any]


class Container(Frozen):
    """A container as it can be made again: everything but its command line and its environment."""

    id: str
    name: str
    image: str = Field(description="id of the image, which no later tag changes")
    options: tuple[str, ...]
    command: tuple[str, ...] = Field(description="entrypoint and arguments as the engine started them")
    init: bool = Field(description="the main process is a small init of the engine, the server its child")
    restart: str = Field(default="", description="its restart policy, as `--restart` takes it")
    obstacles: tuple[str, ...]


def read_container(inspected: Json) -> Container:
    """From one object of `docker inspect` or `podman inspect`. Raises KeyError for what is no container."""
    host, config = inspected["HostConfig"], inspected["Config"]
    obstacles = [*_obstacles(inspected, host, config)]
    options = [*_config_options(host, config), *_mounts(inspected, host)]
    for name, value in sorted(host.items()):
        if name in IGNORED or _empty(value) or value in DEFAULTS.get(name, ()):
            continue
        if name in CARRIED:
            options += CARRIED[name](value, host)
        else:
            obstacles.append(f"its setting {name} ({value}) cannot be carried over")
    return Container(
        id=inspected["Id"],
        name=inspected["Name"].lstrip("/"),
        image=inspected["Image"],
        options=tuple(options),
        command=(inspected["Path"], *(inspected["Args"] or ())),
        init=_init(host, config),
        restart=_restart(host),
        obstacles=tuple(obstacles),
    )


def _empty(value: object) -> bool:
    return value in (None, "", 0, False, [], {}, [0, 0])


def _init(host: Json, config: Json) -> bool:
    told = (config.get("Annotations") or {}).get("io.podman.annotations.init", "FALSE")
    return bool(host.get("Init")) or told == "TRUE"


def _restart(host: Json) -> str:
    policy = host.get("RestartPolicy") or {}
    name, tries = policy.get("Name") or "", policy.get("MaximumRetryCount") or 0
    return f"{name}:{tries}" if name == "on-failure" and tries else name


def _obstacles(inspected: Json, host: Json, config: Json) -> Iterator[str]:
    labels = config.get("Labels") or {}
    if host.get("AutoRemove"):
        yield "it is removed as soon as it stops (--rm)"
    if host.get("NetworkMode") != "host":
        yield f"its network is {host.get('NetworkMode')!r}; only containers in the host's network are handled"
    if inspected.get("Pod"):
        yield "it belongs to a pod"
    if inspected.get("IsInfra"):
        yield "it is the infrastructure of a pod"
    if config.get("Secrets"):
        yield "it uses secrets of the engine"
    for label, owner in OWNERS.items():
        if label in labels:
            yield f"{owner} holds it ({label}={labels[label]}) and would start it again by itself"


def _config_options(host: Json, config: Json) -> Iterator[str]:
    """What stands in Config. The host's network brings the host's name along."""
    for name, value in sorted((config.get("Labels") or {}).items()):
        yield f"--label={name}={value}"
    yield f"--network={host['NetworkMode']}"
    if config.get("User"):
        yield f"--user={config['User']}"
    if config.get("Tty"):
        yield "--tty"
    if config.get("OpenStdin"):
        yield "--interactive"
    if config.get("StopSignal"):
        yield f"--stop-signal={config['StopSignal']}"
    if config.get("StopTimeout") is not None:
        yield f"--stop-timeout={config['StopTimeout']}"
    if _init(host, config):
        yield "--init"
    if host.get("Cgroups") == "disabled":
        yield "--cgroups=disabled"


def _mounts(inspected: Json, host: Json) -> Iterator[str]:
    """The mounts as they are, anonymous volumes by their names. Temporary file systems stand in HostConfig."""
    for mount in inspected.get("Mounts") or ():
        kind = mount["Type"]
        if kind not in ("bind", "volume"):
            continue
        source = mount["Source"] if kind == "bind" else mount["Name"]
        words = [f"type={kind}", f"source={source}", f"destination={mount['Destination']}"]
        words += [] if mount.get("RW", True) else ["readonly"]
        if kind == "bind" and mount.get("Propagation"):
            words.append(f"bind-propagation={mount['Propagation']}")
        yield "--mount=" + ",".join(f'"{word}"' if "," in word else word for word in words)


Render = Callable[[Any, Json], list[str]]


def _one(option: str) -> Render:
    return lambda value, host: [f"--{option}={value}"]


def _each(option: str) -> Render:
    return lambda values, host: [f"--{option}={value}" for value in values]


def _flag(option: str) -> Render:
    return lambda value, host: [f"--{option}"]


def _bytes(option: str) -> Render:
    return lambda value, host: [f"--{option}={value}b" if value > 0 else f"--{option}={value}"]


def _pairs(option: str) -> Render:
    return lambda values, host: [f"--{option}={name}={value}" for name, value in sorted(values.items())]


def _unless_privileged(render: Render) -> Render:
    """A privileged container has every capability and device already."""
    return lambda value, host: [] if host.get("Privileged") else render(value, host)


def _ulimits(values: Any, host: Json) -> list[str]:
    return [f"--ulimit={one['Name'].removeprefix('RLIMIT_').lower()}={one['Soft']}:{one['Hard']}" for one in values]


def _devices(values: Any, host: Json) -> list[str]:
    return [
        f"--device={one['PathOnHost']}:{one['PathInContainer']}:{one.get('CgroupPermissions') or 'rwm'}"
        for one in values
    ]


def _gpus(values: Any, host: Json) -> list[str]:
    """Requests as `--gpus` makes them; its value is a line of CSV."""
    found = []
    for one in values:
        words = [f"driver={one['Driver']}"] if one.get("Driver") else []
        if one.get("DeviceIDs"):
            words.append(f'"device={",".join(one["DeviceIDs"])}"')
        else:
            words.append("count=all" if one.get("Count") == -1 else f"count={one.get('Count')}")
        kinds = [kind for group in one.get("Capabilities") or () for kind in group if kind != "gpu"]
        words += [f'"capabilities={",".join(kinds)}"'] if kinds else []
        found.append("--gpus=" + ",".join(words))
    return found


def _tmpfs(values: Any, host: Json) -> list[str]:
    return [f"--tmpfs={place}:{how}" if how else f"--tmpfs={place}" for place, how in sorted(values.items())]


def _cpus(value: Any, host: Json) -> list[str]:
    """Podman shows a quota as a number of CPUs as well."""
    return [] if host.get("CpuQuota") else [f"--cpus={value / 1e9:g}"]


def _unless_host_ipc(value: Any, host: Json) -> list[str]:
    return [] if host.get("IpcMode") == "host" else [f"--shm-size={value}b"]


def _with_cgroups(render: Render) -> Render:
    return lambda value, host: [] if host.get("Cgroups") == "disabled" else render(value, host)


CARRIED: dict[str, Render] = {
    "CapAdd": _unless_privileged(_each("cap-add")),
    "CapDrop": _unless_privileged(_each("cap-drop")),
    "CgroupParent": _with_cgroups(_one("cgroup-parent")),
    "CgroupnsMode": _with_cgroups(_one("cgroupns")),
    "CpuPeriod": _with_cgroups(_one("cpu-period")),
    "CpuQuota": _with_cgroups(_one("cpu-quota")),
    "CpuShares": _with_cgroups(_one("cpu-shares")),
    "CpusetCpus": _with_cgroups(_one("cpuset-cpus")),
    "CpusetMems": _with_cgroups(_one("cpuset-mems")),
    "DeviceCgroupRules": _each("device-cgroup-rule"),
    "DeviceRequests": _gpus,
    "Devices": _unless_privileged(_devices),
    "Dns": _each("dns"),
    "DnsOptions": _each("dns-option"),
    "DnsSearch": _each("dns-search"),
    "ExtraHosts": _each("add-host"),
    "GroupAdd": _each("group-add"),
    "IpcMode": _one("ipc"),
    "Memory": _with_cgroups(_bytes("memory")),
    "MemoryReservation": _with_cgroups(_bytes("memory-reservation")),
    "MemorySwap": _with_cgroups(_bytes("memory-swap")),
    "NanoCpus": _with_cgroups(_cpus),
    "OomScoreAdj": _one("oom-score-adj"),
    "PidMode": _one("pid"),
    "PidsLimit": _with_cgroups(_one("pids-limit")),
    "Privileged": _flag("privileged"),
    "ReadonlyRootfs": _flag("read-only"),
    "Runtime": _one("runtime"),
    "SecurityOpt": _each("security-opt"),
    "ShmSize": _unless_host_ipc,
    "Sysctls": _pairs("sysctl"),
    "Tmpfs": _tmpfs,
    "UTSMode": _one("uts"),
    "Ulimits": _ulimits,
    "UsernsMode": _one("userns"),
}
"""Keys of HostConfig → the options of `create` that set them."""
DEFAULTS: dict[str, tuple[object, ...]] = {
    "CgroupnsMode": ("private", "host"),
    "Cgroups": ("default", "disabled"),
    "IpcMode": ("private", "shareable"),
    "Isolation": ("default",),
    "MemorySwappiness": (-1,),
    "PidMode": ("private",),
    "PidsLimit": (-1, 2048),
    "Runtime": ("runc", "oci", "crun", "io.containerd.runc.v2"),
    "UTSMode": ("private",),
    "VolumeDriver": ("local",),
}
"""Values that need no option; the engine's own defaults."""
IGNORED = frozenset(
    {
        "AutoRemove",  # an obstacle, see above
        "Binds",  # stand in Mounts, as do the next ones
        "Mounts",
        "VolumesFrom",
        "Cgroup",
        "CgroupConf",
        "CgroupManager",
        "CgroupMode",
        "ConsoleSize",
        "ContainerIDFile",
        "Init",
        "LogConfig",  # the output of an experiment is copied into the launch's folder
        "MaskedPaths",
        "NetworkMode",
        "PortBindings",  # without effect in the host's network
        "PublishAllPorts",
        "ReadonlyPaths",
        "RestartPolicy",  # none for experiments; the original keeps its own
    }
)
OWNERS = {
    "PODMAN_SYSTEMD_UNIT": "a unit of systemd",
    "com.docker.swarm.service.id": "a swarm",
    "io.kubernetes.pod.name": "Kubernetes",
}
"""Labels that tell of somebody who would start the container again."""
