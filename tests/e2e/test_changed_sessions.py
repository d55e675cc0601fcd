"""Whole sessions that change more than the command line: real OpenSSH, real llama.cpp, files, packages and commands.

The operator's launcher is a Python program with a module of its own, from which it takes more arguments; the module is
what is patched and overlaid. Nothing that is asserted depends on what an experiment yields.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from state.models import LaunchSpec, Role, TodoStatus
from tests.contracts.change_contract import look_at
from tests.e2e.rig import LIMIT_S, PROJECT, Rig, assert_at_most_one_server, rig
from tests.e2e.test_real_session import database
from tests.e2e.test_silence import markers, watchers
from tests.tools.test_changes import wheel

pytestmark = pytest.mark.real

LAUNCHER = """\
import runpy
import sys

import tuning

with open({starts!r}, "a") as log:
    log.write(tuning.NAME + "\\n")
sys.argv[1:] = [*sys.argv[1:], *tuning.MORE]
sys.argv[0] = {program!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
INSTALLED = 'NAME = "installed"\nMORE = ()\n'
SLOW = 'NAME = "patched"\nMORE = ("--threads", "1", "--ubatch-size", "1")\n'
BRISK = ("--threads", "2", "--parallel", "2", "--ctx-size", "1024", "--ubatch-size", "256", "--metrics")
POLICY = """
[policy]
max_disruption = "host"
approved = ["command"]
"""
PATCH = """
[[experiments]]
id = "slow"
title = "One thread, from inside"
hypothesis = "it is slower"
priority = 0.9
[[experiments.changes]]
kind = "patch"
directory = "{site}"
clear = ["{cache}"]
diff = '''
--- a/tuning.py
+++ b/tuning.py
@@ -1,2 +1,2 @@
-NAME = "installed"
-MORE = ()
+NAME = "patched"
+MORE = ("--threads", "1", "--ubatch-size", "1")
'''
"""
OTHERS = """
[[experiments]]
id = "package"
title = "Another version of the module"
hypothesis = "it does the same"
[[experiments.changes]]
kind = "package"
requirements = ["engine==2.0"]
options = ["--no-index", "--find-links", "{wheels}"]

[[experiments]]
id = "missing"
title = "A version that there is not"
hypothesis = "pip does not find it"
[[experiments.changes]]
kind = "package"
requirements = ["engine==9.9"]
options = ["--no-index", "--find-links", "{wheels}"]

[[experiments]]
id = "checkout"
title = "A commit of the module"
hypothesis = "it does the same"
[[experiments.changes]]
kind = "checkout"
repository = "{repository}"
commit = "other"

[[experiments]]
id = "command"
title = "A mark on the host"
hypothesis = "it does nothing"
[[experiments.changes]]
kind = "command"
name = "mark"
do = ["sh", "-c", "echo do >>'{log}' && touch '{mark}'"]
undo = ["sh", "-c", "echo undo >>'{log}' && rm -f '{mark}'"]
probe = ["test", "-e", "{mark}"]
"""


class Place:
    """A rig whose launcher has a module that can be changed."""

    def __init__(self, host: Rig) -> None:
        self.host = host
        self.site, self.cache = host.folder / "site", host.folder / "cache"
        self.wheels, self.repository = host.folder / "wheels", host.folder / "repository"
        self.mark, self.log, self.names = host.folder / "mark", host.folder / "log", host.folder / "names"
        for folder in (self.site, self.cache, self.repository):
            folder.mkdir()
        (self.site / "tuning.py").write_text(INSTALLED)
        (self.cache / "compiled").write_text("for what is installed")
        self.launcher = host.folder / "launcher.py"
        witness = str(PROJECT / "tests" / "e2e" / "witness.py")
        self.launcher.write_text(LAUNCHER.format(starts=str(self.names), program=witness))

    def start(self) -> None:
        path = f"PYTHONPATH={self.site}"
        plain = "PYTHONDONTWRITEBYTECODE=1"
        self.host.start_server(*BRISK, program=("env", path, plain, sys.executable, str(self.launcher)))

    def offer_others(self) -> None:
        """A wheel and a repository with modules of the same name."""
        wheel(self.wheels, "2.0", INSTALLED.replace("installed", "package"), module="tuning")
        (self.repository / "tuning.py").write_text(INSTALLED.replace("installed", "checkout"))
        for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "other"), ("tag", "other")):
            who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
            subprocess.run(("git", "-C", self.repository, *who, *words), check=True, capture_output=True)

    def experiments(self, *texts: str) -> str:
        places = {name: str(value) for name, value in vars(self).items() if isinstance(value, Path)}
        return POLICY + "".join(text.format(**places) for text in texts)

    def started(self) -> list[str]:
        """Which module each start of the program had, that of `--help` included."""
        return self.names.read_text().split() if self.names.exists() else []


@pytest.fixture
def place(tmp_path: Path, demo_model: Path) -> Iterator[Place]:
    with rig(tmp_path / "changed", demo_model) as host:
        one = Place(host)
        one.start()
        yield one


@pytest.mark.slow  # five experiments
def test_a_night_of_patches_packages_commits_and_commands_leaves_what_was_kept_and_nothing_else(place: Place) -> None:
    host = place.host
    place.offer_others()
    site, cache = look_at(place.site), look_at(place.cache)
    more = place.experiments(PATCH, OTHERS)
    agent = host.agent("start", str(host.write_session(more, close_out_blocks=1)), *database(host))
    assert agent.wait(4 * LIMIT_S) == 0, agent.said
    with host.store() as store:
        session = store.latest_session().id
        todos = {todo.id: todo for todo in store.todos(session)}
        final = store.role(session, Role.FINAL)
        assert final is not None
        spec = store.spec(final)
    assert {name: todos[name].status for name in ("slow", "package", "checkout", "command")} == dict.fromkeys(
        ("slow", "package", "checkout", "command"), TodoStatus.DONE
    ), agent.said
    assert todos["missing"].status is TodoStatus.BLOCKED and "engine==9.9" in todos["missing"].reason
    assert {"installed", "patched", "package", "checkout"} <= set(place.started())
    assert [change.kind for change in spec.beside if change.kind == "patch"] == []
    assert look_at(place.site) == site
    assert look_at(place.cache) == cache
    told = place.log.read_text().split()
    assert told[0] == "do" and all(one != other for one, other in pairwise(told))
    assert_as_kept(place, spec)
    assert_at_most_one_server(host)
    assert watchers(host) == []


def assert_as_kept(place: Place, spec: LaunchSpec) -> None:
    """The commands and packages in effect are those of the final configuration."""
    kinds = [change.kind for change in spec.beside]
    assert place.mark.exists() == ("command" in kinds)
    overlays = [word for word in place.host.environ()["PYTHONPATH"].split(":") if word != str(place.site)]
    assert len(overlays) == kinds.count("package") + kinds.count("checkout")


@pytest.mark.slow
def test_killed_while_a_patched_server_serves_the_host_itself_puts_file_cache_and_server_back(place: Place) -> None:
    host = place.host
    original, site, cache = host.argv(), look_at(place.site), look_at(place.cache)
    session = str(host.write_session(place.experiments(PATCH), lease_s=5))
    agent = host.agent("start", session, *database(host))
    host.until(lambda: (place.site / "tuning.py").read_text() == SLOW and host.client_at_work(), agent)
    assert not place.cache.exists()
    agent.kill()
    host.until(lambda: bool(markers(host)))
    assert [marker[0] for marker in markers(host)] == ["restored"], markers(host)
    assert look_at(place.site) == site
    assert look_at(place.cache) == cache
    assert place.started()[-1] == "installed"
    assert host.argv() == original
    assert host.generates()
    restored = host.command("restore", *database(host))
    assert restored.process.returncode == 0, restored.said
    assert look_at(place.site) == site
    assert_at_most_one_server(host)
    assert watchers(host) == []


@pytest.mark.slow
def test_a_file_that_a_person_edits_meanwhile_stops_the_session_and_is_left_alone(place: Place) -> None:
    host = place.host
    agent = host.agent("start", str(host.write_session(place.experiments(PATCH))), *database(host))
    module = place.site / "tuning.py"
    host.until(lambda: module.read_text() == SLOW and host.client_at_work(), agent)
    module.write_text("# mine\n" + SLOW)
    assert agent.wait() == 5, agent.said
    assert "changed by somebody else" in agent.said
    assert "Traceback" not in agent.said
    assert module.read_text() == "# mine\n" + SLOW
    assert host.generates()
    assert watchers(host) == []
