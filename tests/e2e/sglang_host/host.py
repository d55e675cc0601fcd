"""A host with eight GPUs and an SGLang server, all of it made up: reached by SSH and HTTP alone, as a real one is.

sshd, git and the processes are real. The server, its bench client and nvidia-smi are the stand-ins of this folder;
their figures come from a scenario. What happened is told by the host's own witness, which knows nothing of Ratchet.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

from tests.e2e.rig import PROJECT, Rig, Start
from tests.e2e.witness import start_ticks
from tests.ssh_servers import SshServer, openssh

HERE = Path(__file__).parent
DATA = PROJECT / "tests" / "data"
CAMPAIGNS = DATA / "campaigns"
RECORDED = {"help.txt": "help_0.5.17.txt", "server_info.json": "server_info_0.5.17.json"}
"""Recordings of a real SGLang that its stand-in shows as its own."""

GATE = "python/sglang/srt/layers/flashinfer_comm_fusion.py"
NEWEST = "0.5.18.dev0"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Scenario = dict[str, Any]


def scenario(name: str, altered: str = "") -> Scenario:
    """The numbers of a campaign, or the same host with other effects."""
    told: Scenario = json.loads((CAMPAIGNS / f"{name}.json").read_text())
    if altered:
        told["effects"] |= json.loads((CAMPAIGNS / f"{altered}.json").read_text())
    return told


class SglangHost(Rig):
    """The host, its server and its session file; see `sglang_host`."""

    def __init__(self, folder: Path, sshd: SshServer, numbers: Scenario) -> None:
        self.interpreter = folder / "venv" / "bin" / "python"
        self.repository = folder / "repository"
        self.cache = folder / "cache" / "flashinfer"
        self.commits: dict[str, str] = {}
        _make_venv(folder / "venv", self.repository / "python")
        super().__init__(folder, sshd, folder / "models" / numbers["model"], (str(self.interpreter),))
        (folder / "scenario.json").write_text(json.dumps(numbers))
        self.numbers = numbers
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text(json.dumps(numbers["model_config"]))
        self._check_in()

    # --- what an operator does -----------------------------------------------------------------------------

    def start_server(
        self, *flags: str, program: tuple[str, ...] = (), port: int | None = None, stdin: str = "/dev/null"
    ) -> int:
        """Start the server detached and wait until it serves; its pid."""
        words = [*(program or self.program), "-m", "sglang.launch_server", "--model-path", str(self.model)]
        words += ["--served-model-name", self.numbers["model"], "--host", "127.0.0.1", "--port", str(port or self.port)]
        words += [*self.numbers["flags"], *flags]
        environ = {
            "PATH": f"{self.folder / 'stand-ins'}:{SYSTEM_PATH}",
            "SIMULATED_HOST": str(self.folder),
            **self.numbers["environment"],
        }
        detach = 'ulimit -n 4096; setsid "$@" </dev/null >>server.log 2>&1 & echo $!'
        command = ["/bin/sh", "-c", detach, "sh", *words]
        started = subprocess.run(command, cwd=self.folder, env=environ, stdout=subprocess.PIPE, check=True)
        pid = int(started.stdout)
        self.until(lambda: self.seen("ready") or start_ticks(pid) is None)
        assert self.listener() == pid, (self.folder / "server.log").read_text()
        return pid

    def session_file(self, *names: str) -> Path:
        """The session file that a person wrote for a campaign: its parts in order, with this host's places."""
        settings = self.sshd.settings
        known: dict[str, object] = {
            "host": settings.host,
            "ssh_port": settings.port,
            "user": settings.user,
            "identity": settings.identity_file,
            "known_hosts": settings.known_hosts,
            "root": self.root,
            "python": self.python,
            "port": self.port,
            "interpreter": self.interpreter,
            "model": self.numbers["model"],
            "model_path": self.model,
            "repository": self.repository,
            "newest": self.commits[NEWEST],
            "cache": self.cache,
        }
        text = "".join((CAMPAIGNS / f"{name}.toml").read_text() for name in ("host", *names))
        path = self.folder / "session.toml"
        path.write_text(Template(text).substitute(known))
        return path

    # --- what witnesses saw --------------------------------------------------------------------------------

    def seen(self, event: str = "") -> list[dict[str, Any]]:
        """What the host noted, of one kind or of all, in order."""
        path = self.folder / "witness.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == event or not event]

    def starts(self) -> list[Start]:
        """See `Rig.starts`."""
        return [Start(one["pid"], one["ticks"], one["launch"], tuple(one["living"])) for one in self.seen("start")]

    def sources(self) -> dict[str, str]:
        """Every file of the installed package and of the cache of compiled kernels, with a digest of its bytes."""
        files = [
            *(self.repository / "python").rglob("*.py"),
            *(path for path in self.cache.rglob("*") if path.is_file()),
        ]
        return {str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    # --- how it is made ------------------------------------------------------------------------------------

    def _python(self) -> Path:
        """The host's python for Ratchet's own programs; it notes every benchmark client that it is asked to run."""
        program = self.folder / "python-of-host"
        note = f'case "$1" in *stream_client.py) echo "$PWD" >>"{self.folder}/runs" ;; esac'
        program.write_text(f'#!/bin/sh\n{note}\nexec "{self.interpreter}" -I -S "$@"\n')
        program.chmod(0o755)
        return program

    def _check_in(self) -> None:
        """The source tree as a git repository with the installed version and, one commit later, the newest."""
        shutil.copytree(HERE / "python", self.repository / "python", ignore=shutil.ignore_patterns("__pycache__"))
        data = self.repository / "python" / "sglang" / "stand_in" / "data"
        data.mkdir()
        for name, recording in RECORDED.items():
            shutil.copy(DATA / "sglang" / recording, data / name)
        (self.repository / ".gitignore").write_text("__pycache__/\n")
        version = self.repository / "python" / "sglang" / "version.py"
        installed = version.read_text()
        self._git("init", "--quiet")
        for text, name in ((installed, "0.5.17"), (installed.replace("0.5.17", NEWEST), NEWEST)):
            version.write_text(text)
            self._git("add", "--all")
            self._git("commit", "--quiet", "--message", name)
            self.commits[name] = self._git("rev-parse", "HEAD").strip()
        self._git("checkout", "--quiet", self.commits["0.5.17"])

    def _git(self, *words: str) -> str:
        who = {f"GIT_{role}_{part}": "tests" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
        environ = {**os.environ, **who, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
        command = ["git", "-C", str(self.repository), *words]
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout


def _make_venv(place: Path, source: Path) -> None:
    """A virtual environment in which the source tree is installed to be edited, as `pip install -e` leaves it."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = place / "lib" / base.name / "site-packages"
    known = packages / "sglang-0.5.17.dist-info"
    known.mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "bin" / "python").symlink_to(base)
    (place / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (packages / "sglang.pth").write_text(f"{source}\n")
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n")
    (known / "top_level.txt").write_text("sglang\n")


@contextlib.contextmanager
def sglang_host(folder: Path, numbers: Scenario) -> Iterator[SglangHost]:
    """A host behind a real sshd, all of it in `folder`; no process of it outlives the block."""
    stand_ins = folder / "stand-ins"
    stand_ins.mkdir(parents=True)
    smi = stand_ins / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{HERE / "nvidia_smi.py"}" "{folder}" "$@"\n')
    smi.chmod(0o755)
    with openssh(folder / "sshd", environ={"PATH": f"{stand_ins}:{SYSTEM_PATH}"}) as sshd:
        made = SglangHost(folder, sshd, numbers)
        try:
            yield made
        finally:
            sshd.stop()
            made.clean_up()
