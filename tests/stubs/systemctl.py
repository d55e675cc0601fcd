"""A stand-in for systemctl(1) and the user manager behind it, written from the manual pages: no recording of either.

It keeps units, really starts and ends their processes, and knows what the adapter relies on: drop-ins that count only
after `daemon-reload`, `Restart=`, start limits, `reset-failed`, the main process and how it ended. Everything lies in
`$XDG_RUNTIME_DIR/systemd`: `user/` with units and drop-ins, `stub/` with its own state; but for the drop-ins that a
reboot keeps, which lie in `$XDG_CONFIG_HOME/systemd/user/`. It must be run by tests only.
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

RUNTIME = Path(os.environ["XDG_RUNTIME_DIR"]) / "systemd"
UNITS, STATES = RUNTIME / "user", RUNTIME / "stub"
CONFIGURED = Path(os.environ.get("XDG_CONFIG_HOME", RUNTIME / "none")) / "systemd" / "user"
Settings = dict[str, list[str]]
NOTHING: dict[str, Any] = {
    "ActiveState": "inactive",
    "MainPID": 0,
    "ExecMainPID": 0,
    "ExecMainCode": 0,
    "ExecMainStatus": 0,
    "NRestarts": 0,
    "Result": "success",
    "supervisor": 0,
    "starts": [],
}


def main(words: list[str]) -> int:
    options = [word for word in words if word.startswith("-") and word != "--"]
    verb, *names = [word for word in words if not word.startswith("-")]
    if "--user" not in options:
        return refuse("this stand-in has a user manager only")
    STATES.mkdir(parents=True, exist_ok=True)
    if verb == "supervise":
        return supervise(names[0])
    if verb == "daemon-reload":
        for path in UNITS.glob("*.service"):
            (STATES / f"{path.name}.loaded").write_text(json.dumps(on_disk(path.name)))
        return 0
    if verb == "show":
        return show(names[1], names[0].split(","))
    unit = names[0]
    if not (UNITS / unit).exists():
        return refuse(f"Unit {unit} not found.", 5)
    return {"start": start, "stop": stop, "kill": kill, "reset-failed": reset_failed}[verb](unit, options)


def refuse(what: str, code: int = 1) -> int:
    print(what, file=sys.stderr)
    return code


def on_disk(unit: str) -> Settings:
    """The unit's settings with its drop-ins in the order of their names; an empty assignment clears a list."""
    found: Settings = {}
    drop_ins = [path for folder in (UNITS, CONFIGURED) for path in (folder / f"{unit}.d").glob("*.conf")]
    for path in [UNITS / unit, *sorted(drop_ins, key=lambda one: one.name)]:
        for line in path.read_text().splitlines():
            name, equals, value = line.partition("=")
            if not equals or line.startswith(("#", ";", "[")):
                continue
            found[name] = [*found.get(name, []), value] if value else []
    return found


def loaded(unit: str) -> Settings:
    path = STATES / f"{unit}.loaded"
    if not path.exists():
        path.write_text(json.dumps(on_disk(unit)))
    known: Settings = json.loads(path.read_text())
    return known


def state_of(unit: str) -> dict[str, Any]:
    path = STATES / f"{unit}.state"
    return {**NOTHING, **(json.loads(path.read_text()) if path.exists() else {})}


def note(unit: str, **changes: Any) -> None:
    path = STATES / f"{unit}.state"
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({**state_of(unit), **changes}))
    part.replace(path)


def show(unit: str, wanted: list[str]) -> int:
    there = (UNITS / unit).exists()
    settings = loaded(unit) if there else {}
    known = {
        **state_of(unit),
        "Id": unit,
        "LoadState": "loaded" if there else "not-found",
        "FragmentPath": str(UNITS / unit) if there else "",
        "Transient": "no",
        "NeedDaemonReload": "yes" if there and on_disk(unit) != settings else "no",
        "Type": (settings.get("Type") or ["simple"])[-1],
        "ExecStartEx": "".join(f"{{ path={line.split()[0]} ; flags= ; }}" for line in settings.get("ExecStart", [])),
    }
    for name in wanted:
        if name in known:
            print(f"{name}={known[name]}")
    return 0


def start(unit: str, options: list[str]) -> int:
    state = state_of(unit)
    if state["ActiveState"] in ("active", "activating"):
        return 0
    settings = loaded(unit)
    interval = float((settings.get("StartLimitIntervalSec") or ["10"])[-1])
    recent = [at for at in state["starts"] if time.time() - at < interval]
    if interval and len(recent) >= int((settings.get("StartLimitBurst") or ["5"])[-1]):
        note(unit, ActiveState="failed", Result="start-limit-hit")
        return refuse(f"Job for {unit} failed.\n{unit}: Start request repeated too quickly.")
    note(unit, starts=[*recent, time.time()], ActiveState="activating", NRestarts=0, Result="success", MainPID=0)
    clean = {name: os.environ[name] for name in ("PATH", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME") if name in os.environ}
    words = [sys.executable, __file__, "--user", "supervise", unit]
    with open(os.devnull, "r+b") as nothing:
        subprocess.Popen(words, env=clean, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    while state_of(unit)["ActiveState"] == "activating":
        time.sleep(0.01)
    return 0


def stop(unit: str, options: list[str]) -> int:
    supervisor = state_of(unit)["supervisor"]
    if supervisor:
        os.kill(supervisor, signal.SIGTERM)
    while "--no-block" not in options and state_of(unit)["supervisor"]:
        time.sleep(0.01)
    return 0


def kill(unit: str, options: list[str]) -> int:
    number = signal.Signals[next(word for word in options if word.startswith("--signal=")).replace("--signal=", "SIG")]
    if state_of(unit)["MainPID"]:
        os.killpg(state_of(unit)["MainPID"], number)
    return 0


def reset_failed(unit: str, options: list[str]) -> int:
    state = "inactive" if state_of(unit)["ActiveState"] == "failed" else state_of(unit)["ActiveState"]
    note(unit, ActiveState=state, Result="success", NRestarts=0, starts=[])
    return 0


def supervise(unit: str) -> int:
    """The manager's part for one unit: from its start until nobody is to start it again."""
    asked_to_stop: list[int] = []
    process: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: object) -> None:
        asked_to_stop.append(number)
        if process and process[-1].poll() is None:
            process[-1].terminate()

    signal.signal(signal.SIGTERM, end)
    note(unit, supervisor=os.getpid())
    settings = loaded(unit)
    last = {name: values[-1] for name, values in settings.items() if values}
    while True:
        try:
            process.append(spawned(settings, last))
        except OSError:
            failed = {"Result": "exit-code", "ExecMainCode": 1, "ExecMainStatus": 203}
            note(unit, ActiveState="failed", MainPID=0, supervisor=0, **failed)
            return 0
        pid = process[-1].pid
        note(unit, ActiveState="active", MainPID=pid, ExecMainPID=pid, ExecMainCode=0, ExecMainStatus=0)
        if asked_to_stop:
            process[-1].terminate()
        code = process[-1].wait()
        ended = {"MainPID": 0, "ExecMainCode": 2 if code < 0 else 1, "ExecMainStatus": abs(code)}
        clean = code in (0, -signal.SIGTERM)
        again = last.get("Restart", "no") == "always" or (last.get("Restart") == "on-failure" and not clean)
        if asked_to_stop or not again:
            good = bool(asked_to_stop) or clean
            result = "success" if good else "signal" if code < 0 else "exit-code"
            note(unit, ActiveState="inactive" if good else "failed", Result=result, supervisor=0, **ended)
            return 0
        note(unit, ActiveState="activating", NRestarts=state_of(unit)["NRestarts"] + 1, **ended)
        time.sleep(float(last.get("RestartSec", "0.1")))


def spawned(settings: Settings, last: dict[str, str]) -> subprocess.Popen[bytes]:
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "INVOCATION_ID": os.urandom(16).hex()}
    for line in settings.get("Environment", []):
        environ |= dict(word.partition("=")[::2] for word in split(line))
    for path in settings.get("EnvironmentFile", []):
        environ |= environment_file(expanded(path))
    for line in settings.get("UnsetEnvironment", []):
        for name in split(line):
            environ.pop(name, None)
    places = [last.get(name, "").removeprefix("append:") for name in ("StandardOutput", "StandardError")]
    words = [re.sub(r"\$\$", "$", word) for word in split(settings["ExecStart"][-1])]
    names = [expanded(place) if place else os.devnull for place in places]
    with open(names[0], "ab") as out, open(names[1], "ab") as err:
        folder = last.get("WorkingDirectory", "/")
        return subprocess.Popen(
            words, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


def expanded(text: str) -> str:
    return (
        text.replace("%t", os.environ["XDG_RUNTIME_DIR"])
        .replace("%E", os.environ.get("XDG_CONFIG_HOME", "%E"))
        .replace("%%", "%")
    )


def split(line: str) -> list[str]:
    """Words in quotes with C escapes, and specifiers, as systemd.service(5) has them under COMMAND LINES."""
    quoted = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [expanded(re.sub(r"\\(x[0-9a-f]{2}|.)", unescaped, one or other)) for one, other in quoted]


def unescaped(match: re.Match[str]) -> str:
    word = match[1]
    return chr(int(word[1:], 16)) if len(word) == 3 else {"n": "\n", "t": "\t"}.get(word, word)


def environment_file(path: str) -> dict[str, str]:
    """Names with values in double quotes, as systemd.exec(5) has them under EnvironmentFile=."""
    pairs = re.findall(r'^(\w+)="((?:[^"\\]|\\.)*)"$', Path(path).read_text(), re.MULTILINE | re.DOTALL)
    return {name: re.sub(r'\\(["\\`$])', r"\1", value) for name, value in pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
