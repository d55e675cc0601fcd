"""A stand-in for docker(1) and its daemon, written from Docker's manual pages: no recording of either.

Its containers are plain processes in the host's own file system and network. It keeps names, labels, images, restart
policies and exit codes, really starts and ends the processes, and knows only the options that are listed here: any
other one is refused. Everything lies in the folder `STUB_DOCKER`. It must be run by tests only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STORE = Path(os.environ["STUB_DOCKER"])
IMAGE = {"Id": "sha256:" + "5" * 64, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "OF_IMAGE=yes"]}
FLAGS = ("--init", "--rm", "-d", "--detach", "--tty", "--privileged")
KNOWN = (
    "--cap-add", "--entrypoint", "--env", "--env-file", "--label", "--name", "--network", "--restart", "--shm-size",
    "--stop-signal", "--stop-timeout", "--ulimit", "--user", "--volume", "--mount", "--workdir",
)  # fmt: skip
Options = dict[str, list[str]]


def main(words: list[str]) -> int:
    STORE.mkdir(parents=True, exist_ok=True)
    verb, rest = words[0], words[1:]
    verbs = {
        "create": create, "run": run, "start": start, "stop": stop, "restart": restart, "rename": rename, "rm": remove,
        "update": update, "inspect": inspect, "ps": ps, "logs": logs, "supervise": supervise,
    }  # fmt: skip
    return verbs[verb](rest)


def refuse(what: str, code: int = 1) -> int:
    print(f"Error response from daemon: {what}", file=sys.stderr)
    return code


def everything() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(STORE.glob("*.json"))]


def container(wanted: str) -> dict[str, Any]:
    for one in everything():
        if wanted == one["Name"].lstrip("/") or one["Id"].startswith(wanted):
            return one
    sys.exit(refuse(f"No such container: {wanted}"))


def keep(one: dict[str, Any]) -> None:
    part = STORE / f"{one['Id']}.{os.getpid()}.part"
    part.write_text(json.dumps(one))
    part.replace(STORE / f"{one['Id']}.json")


def note(wanted: str, **state: Any) -> None:
    one = container(wanted)
    keep({**one, "State": {**one["State"], **state}})


def parsed(words: list[str]) -> tuple[Options, list[str]]:
    """Options up to the first word that is none, as docker's own parser reads them."""
    found: Options = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        name = {"-e": "--env", "-v": "--volume"}.get(name, name)
        at += 1
        if name in FLAGS:
            found[name] = ["yes"]
            continue
        if name not in KNOWN:
            sys.exit(refuse(f"unknown flag: {name}", 125))
        if not equals:
            value, at = words[at], at + 1
        found.setdefault(name, []).append(value)
    return found, words[at:]


def create(words: list[str]) -> int:
    options, (_, *command) = parsed(words)
    last = {name: values[-1] for name, values in options.items()}
    name = last.get("--name", os.urandom(4).hex())
    if any(one["Name"] == f"/{name}" for one in everything()):
        return refuse(f'Conflict. The container name "/{name}" is already in use.')
    given = [line for path in options.get("--env-file", []) for line in Path(path).read_text().splitlines()]
    environ = {**dict(line.partition("=")[::2] for line in [*IMAGE["Env"], *given, *options.get("--env", [])])}
    program = [last["--entrypoint"], *command] if "--entrypoint" in last else command
    ulimits = [re.fullmatch(r"(\w+)=(\d+):(\d+)", text) for text in options.get("--ulimit", [])]
    one = {
        "Id": os.urandom(32).hex(),
        "Name": f"/{name}",
        "Image": IMAGE["Id"],
        "Path": program[0],
        "Args": program[1:],
        "State": {"Pid": 0, "Running": False, "ExitCode": 0},
        "Mounts": [],
        "Config": {
            "Env": [f"{name}={value}" for name, value in environ.items()],
            "Labels": dict(text.partition("=")[::2] for text in options.get("--label", [])),
            "User": last.get("--user", ""),
            "WorkingDir": last.get("--workdir", "/"),
            "Entrypoint": [last["--entrypoint"]] if "--entrypoint" in last else None,
            "StopSignal": last.get("--stop-signal", "SIGTERM"),
        },
        "HostConfig": {
            "AutoRemove": "--rm" in options,
            "CapAdd": options.get("--cap-add"),
            "NetworkMode": last.get("--network", "bridge"),
            "RestartPolicy": {"Name": last.get("--restart", "no"), "MaximumRetryCount": 0},
            "Runtime": "runc",
            "ShmSize": int(last.get("--shm-size", "67108864").removesuffix("b")),
            "Ulimits": [{"Name": m[1], "Soft": int(m[2]), "Hard": int(m[3])} for m in ulimits if m],
        },
    }
    keep(one)
    print(one["Id"])
    return 0


def run(words: list[str]) -> int:
    code = create(words)
    newest = max(STORE.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return code or start([newest.stem])


def start(words: list[str]) -> int:
    one = container(words[0])
    if one["State"]["Running"]:
        return 0
    note(one["Id"], Running=True, Pid=0, ExitCode=0)
    clean = {"PATH": os.environ["PATH"], "STUB_DOCKER": str(STORE)}
    with open(os.devnull, "r+b") as nothing:
        subprocess.Popen(
            [sys.executable, __file__, "supervise", one["Id"]],
            env=clean, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True,
        )  # fmt: skip
    while (state := container(one["Id"])["State"])["Running"] and not state["Pid"]:
        time.sleep(0.01)
    print(words[0])
    return 0


def stop(words: list[str]) -> int:
    grace = float(words[words.index("-t") + 1]) if "-t" in words else 10.0
    one = container(words[-1])
    if one["State"]["Running"]:
        os.kill(one["State"]["Supervisor"], signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (state := container(one["Id"])["State"])["Running"]:
        if time.monotonic() > deadline and state["Pid"]:
            os.kill(state["Pid"], signal.SIGKILL)
        time.sleep(0.02)
    print(words[-1])
    return 0


def restart(words: list[str]) -> int:
    return stop(words) or start(words[-1:])


def rename(words: list[str]) -> int:
    one = container(words[0])
    if any(other["Name"] == f"/{words[1]}" for other in everything()):
        return refuse(f'Conflict. The container name "/{words[1]}" is already in use.')
    keep({**one, "Name": f"/{words[1]}"})
    return 0


def update(words: list[str]) -> int:
    options, names = parsed(words)
    for one in map(container, names):
        name, _, tries = options["--restart"][-1].partition(":")
        policy = {"Name": name, "MaximumRetryCount": int(tries or 0)}
        keep({**one, "HostConfig": {**one["HostConfig"], "RestartPolicy": policy}})
        print(one["Id"])
    return 0


def remove(words: list[str]) -> int:
    one = container(words[-1])
    if one["State"]["Running"]:
        return refuse(
            f"cannot remove container {one['Name']}: container is running: stop the container before removing"
        )
    (STORE / f"{one['Id']}.json").unlink()
    print(words[-1])
    return 0


def inspect(words: list[str]) -> int:
    template = words[words.index("-f") + 1] if "-f" in words else ""
    names = [word for word in words if not word.startswith("-") and word not in ("container", template)]
    found = [container(name) for name in names]
    for one in found if template else ():
        value: Any = one
        for part in template.strip("{}.").split("."):
            value = value[part]
        print(value)
    if not template:
        print(json.dumps(found))
    return 0


def ps(words: list[str]) -> int:
    label = words[words.index("--filter") + 1].removeprefix("label=") if "--filter" in words else ""
    for one in everything():
        if not one["State"]["Running"] and not any(word.startswith("-a") for word in words):
            continue
        name, _, value = label.partition("=")
        if not label or one["Config"]["Labels"].get(name) == value:
            print(one["Id"])
    return 0


def logs(words: list[str]) -> int:
    """All that the container wrote since it was started last, until it ends."""
    one = container(words[-1])
    place, at = STORE / f"{one['Id']}.log", 0
    while True:
        running = container(one["Id"])["State"]["Running"]
        text = place.read_bytes()
        sys.stderr.buffer.write(text[at:])
        sys.stderr.flush()
        at = len(text)
        if not running:
            return 0
        time.sleep(0.05)


def supervise(words: list[str]) -> int:
    """The daemon's part for one container."""
    one = container(words[0])
    stopping: list[int] = []
    process: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: object) -> None:
        stopping.append(number)
        if process and process[-1].poll() is None:
            process[-1].send_signal(signal.Signals[one["Config"]["StopSignal"]])

    signal.signal(signal.SIGTERM, end)
    note(one["Id"], Supervisor=os.getpid())
    environ = dict(text.partition("=")[::2] for text in one["Config"]["Env"])
    while True:
        with (STORE / f"{one['Id']}.log").open("wb") as log:
            process.append(
                subprocess.Popen(
                    [one["Path"], *one["Args"]],
                    env=environ,
                    cwd=one["Config"]["WorkingDir"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        note(one["Id"], Pid=process[-1].pid, Running=True)
        code = process[-1].wait()
        ended = 128 - code if code < 0 else code
        if stopping or one["HostConfig"]["RestartPolicy"]["Name"] != "always":
            note(one["Id"], Pid=0, Running=False, ExitCode=ended)
            return 0
        note(one["Id"], Pid=0, ExitCode=ended)
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
