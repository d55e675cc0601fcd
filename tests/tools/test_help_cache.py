"""Help is asked for once as long as nothing of the program changes, and again whenever something may have."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from state.errors import ServerError
from state.models import LaunchSpec
from tests.local_host import LocalHost
from tools.help_cache import KEPT, HelpCache, interpreter, key_of, signature
from tools.remote import RemoteSettings, RemoteTarget
from tools.servers.sglang import Sglang

pytestmark = pytest.mark.anyio

HELP = Path(__file__).resolve().parents[1] / "data" / "sglang" / "help_0.5.17.txt"
SERVER = """\
import sys
from pathlib import Path
here = Path(__file__).parent
with (here.parent / "asked").open("a") as log:
    log.write("asked\\n")
print((here.parent / "help.txt").read_text())
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with an engine in it that notes each time when its help is printed."""
    package = tmp_path / "place" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text('__version__ = "0.5.17"\n')
    (package / "launch_server.py").write_text(SERVER)
    (package.parent / "help.txt").write_text(HELP.read_text())
    return package.parent


def in_place(place: Path):  # type: ignore[no-untyped-def]
    def rendered(command: Sequence[str]) -> str:
        return f"cd {shlex.quote(str(place))} && {shlex.join(command)} 2>&1 </dev/null"

    return rendered


async def signed(place: Path, program: str = sys.executable, package: str = "sglang") -> str | None:
    return await signature(LocalHost(), in_place(place), program, (package,))


async def test_the_signature_changes_with_every_file_of_the_package_and_with_nothing_else(place: Path) -> None:
    first = await signed(place)
    assert first is not None and first == await signed(place)
    (place / "beside.txt").write_text("no part of it")
    (place / "sglang" / "__pycache__").mkdir(exist_ok=True)
    (place / "sglang" / "__pycache__" / "x.pyc").write_text("made by running it")
    assert await signed(place) == first
    seen = {first}
    for change in ("edit", "same size and time", "new", "removed", "distribution"):
        file = place / "sglang" / "version.py"
        if change == "edit":
            file.write_text('__version__ = "0.5.18"\n')
        elif change == "same size and time":
            before = file.stat()
            file.write_text('__version__ = "0.5.19"\n')
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif change == "new":
            (place / "sglang" / "more.py").write_text("")
        elif change == "removed":
            (place / "sglang" / "more.py").unlink()
        else:
            (place / "torch-9.dist-info").mkdir()
        now = await signed(place)
        if change != "removed":
            assert now is not None and now not in seen, change
            seen.add(now)


async def test_a_script_is_known_by_its_interpreter(place: Path) -> None:
    script = place / "serve"
    script.write_text(f"#!{sys.executable}\nimport sglang\n")
    script.chmod(0o755)
    of_script = await signature(LocalHost(), in_place(place), str(script), ("json",))
    assert of_script is not None
    assert of_script == await signature(LocalHost(), in_place(place), "./serve", ("json",))


@pytest.mark.parametrize("program", ["/bin/sh", "no-such-program"])
async def test_what_cannot_be_told_is_not_kept(place: Path, program: str) -> None:
    assert await signed(place, program) is None


async def test_a_package_that_is_not_there_or_none_at_all_is_not_kept(place: Path) -> None:
    assert await signed(place, package="no_such_package") is None
    assert await signature(LocalHost(), in_place(place), sys.executable, ()) is None


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("#!/opt/venv/bin/python3.12\n", "/opt/venv/bin/python3.12"),
        ("#! /usr/bin/env python3\n", "python3"),
        ("#!/bin/sh\n", None),
        ("#!/usr/bin/python3 -sP\n", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_the_interpreter_of_a_script(line: str, program: str | None) -> None:
    assert interpreter(line) == program


async def test_the_newest_answers_are_kept_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    cache, root = HelpCache(LocalHost()), str(tmp_path)
    keys = [key_of("s", number) for number in range(KEPT + 4)]
    for age, key in enumerate(keys):
        cache.note(key, [f"help {age}", "version"])
        await cache.keep(root)
        if (tmp_path / "help" / f"{key}.json").exists():
            os.utime(tmp_path / "help" / f"{key}.json", (1000 + age, 1000 + age))
    assert len(list((tmp_path / "help").iterdir())) == KEPT
    assert await cache.find(root, keys[-1]) == [f"help {len(keys) - 1}", "version"]
    assert await cache.find(root, keys[0]) is None
    for damaged in ("", "{}", '["half', "[1]"):
        (tmp_path / "help" / f"{keys[-1]}.json").write_text(damaged)
        assert await cache.find(root, keys[-1]) is None


async def test_what_cannot_be_written_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "help").write_text("a file where the folder should be")
    cache = HelpCache(LocalHost())
    cache.note("k", ["help"])
    await cache.keep(str(tmp_path))
    assert await cache.find(str(tmp_path), "k") is None


# --- as a target uses it ---------------------------------------------------------------------------------------------


def target(place: Path) -> RemoteTarget:
    settings = RemoteSettings(
        name="t",
        directory=str(place.parent / "ours"),
        python=sys.executable,
        url="http://127.0.0.1:1",
        port=1,
        model=None,
        start_deadline_s=1.0,
        stop_grace_s=1.0,
        lease_s=5,
        pid=None,
        api_key_file=None,
    )
    return RemoteTarget(LocalHost(), Sglang(), settings)


def spec(place: Path) -> LaunchSpec:
    argv = (sys.executable, "-m", "sglang.launch_server", "--model-path", "/m")
    return LaunchSpec(engine="sglang", program=argv[:3], flags={}, argv=argv, cwd=str(place), user="u")


def asked(place: Path) -> int:
    return len((place / "asked").read_text().splitlines())


async def test_a_target_asks_once_and_again_after_an_upgrade_in_place(place: Path) -> None:
    looking = target(place)
    await looking.look_around()
    await looking.learn(spec(place))
    assert asked(place) == 1
    assert not (place.parent / "ours").exists(), "looking leaves nothing on the host"
    await looking.prepare()
    assert len(list((place.parent / "ours" / "help").iterdir())) == 1
    again = target(place)
    await again.look_around()
    await again.learn(spec(place))
    assert asked(place) == 1
    assert again.known == looking.known
    assert again.version == looking.version
    (place / "sglang" / "version.py").write_text('__version__ = "0.5.99"\n')
    (place / "help.txt").write_text(HELP.read_text().replace("--schedule-policy", "--another-policy"))
    later = target(place)
    await later.look_around()
    await later.learn(spec(place))
    assert asked(place) == 2
    assert later.known is not None and "--another-policy" in later.known.flags


async def test_an_answer_that_cannot_be_read_is_not_kept(place: Path) -> None:
    (place / "help.txt").write_text("Segmentation fault")
    broken = target(place)
    await broken.prepare()
    with pytest.raises(ServerError):
        await broken.learn(spec(place))
    assert not (place.parent / "ours" / "help").exists()
