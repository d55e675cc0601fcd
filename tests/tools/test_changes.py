"""Changes beside the command line: the contract on this machine and over SSH, overlays, and what is pure about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from state.errors import PolicyRefused
from state.models import (
    Beside,
    CheckoutChange,
    CommandChange,
    EnvChange,
    FlagChange,
    HotCall,
    LaunchSpec,
    PackageChange,
    PatchChange,
    arranged,
    needs_restart,
    with_beside,
)
from tests.contracts.change_contract import ChangeContract, Ground, LiveServer
from tests.local_host import LocalHost
from tests.ssh_servers import openssh
from tools.changes import overlay, record
from tools.changes.base import planned
from tools.changes.diff import parsed, patched
from tools.changes.hot_probe import Untold, alike, shown
from tools.servers.generic import GenericRules
from tools.services.process import BareProcess
from tools.shell import Host
from tools.ssh import SshHost


class TestHere(ChangeContract):
    stride = 3

    @pytest.fixture
    def host(self) -> LocalHost:
        return LocalHost()


@pytest.mark.slow  # the same at every single step
class TestHereAtEveryStep(TestHere):
    stride = 1


@pytest.mark.slow  # the same scripts as here, by another way
class TestOverSsh(ChangeContract):
    stride = 5

    @pytest.fixture
    async def host(self, tmp_path: Path) -> AsyncIterator[Host]:
        with openssh(tmp_path / "sshd") as server:
            async with await SshHost.connect(server.settings) as connected:
                yield connected


# --- packages and checkouts --------------------------------------------------------------------------------


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    server = LiveServer()
    server.close()
    return Ground(LocalHost(), tmp_path / "it's", server)


def wheel(folder: Path, version: str, text: str, module: str = "engine") -> None:
    """A package `engine` of one module, as a wheel that pip takes without building anything."""
    folder.mkdir(exist_ok=True)
    info = f"engine-{version}.dist-info"
    with zipfile.ZipFile(folder / f"engine-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: engine\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def repository(folder: Path) -> dict[str, str]:
    """Two commits of the same module; the first one is checked out. Commit by name."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        return subprocess.run(("git", "-C", folder, *who, *words), check=True, capture_output=True, text=True).stdout

    (folder / "python").mkdir(parents=True)
    git("init", "-q", "-b", "trunk")
    for version in ("old", "new"):
        (folder / "python" / "engine.py").write_text(f"print({version!r})\n")
        git("add", ".")
        git("commit", "-qm", version)
        git("tag", version)
    git("checkout", "-q", "old")
    return {name: git("rev-parse", name).strip() for name in ("old", "new")}


async def engine_says(ground: Ground, spec: LaunchSpec) -> str:
    """What the server's program prints when it is launched as the spec says."""
    script = BareProcess(str(ground.root), 1, 1.0).launch_script(spec, {}, "S-T1")
    (ground.root / "jobs" / "S-T1").mkdir(exist_ok=True)
    (ground.root / "jobs" / "S-T1" / "run.sh").write_text(script)
    told = await ground.host.run(f"sh {ground.host_path('jobs/S-T1/run.sh')}", timeout_s=60)
    return told.text.strip() or told.tail


async def look_as_target(ground: Ground, environ: dict[str, str]) -> tuple[dict[str, str], tuple[Beside, ...]]:
    bare, digests = overlay.parted(str(ground.root), environ)
    seen = await record.look(ground.host, str(ground.root), digests)
    return bare, arranged(change for one in seen for change in one.changes)


@pytest.mark.anyio
async def test_packages_are_found_first_and_nothing_installed_is_touched(ground: Ground) -> None:
    wheel(ground.folder / "wheels", "2.0", "print('two')\n")
    (ground.folder / "engine.py").write_text("print('one')\n")
    options = ("--no-index", "--find-links", str(ground.folder / "wheels"))
    change = PackageChange(requirements=("engine==2.0",), options=options)
    installed = {"PYTHONPATH": str(ground.folder)}
    spec = ground.spec(change).model_copy(update={"hidden_env": installed, "cwd": "/"})
    await ground.stage(spec)
    await ground.stage(spec)
    assert await engine_says(ground, spec.model_copy(update={"beside": ()})) == "one"
    assert await engine_says(ground, spec) == "two"
    place = Path(overlay.overlay_dir(str(ground.root), change))
    assert (place / "lock.txt").read_text().strip() == "engine==2.0"
    assert "pip==" in (place / "base.txt").read_text()
    environ = overlay.in_front(str(ground.root), (change,), installed)
    assert await look_as_target(ground, environ) == (installed, (change,))
    (place / "site").rename(place / "gone")
    assert "is gone" in await engine_says(ground, spec)


@pytest.mark.anyio
async def test_a_package_that_pip_does_not_find_is_refused_in_its_words(ground: Ground) -> None:
    (ground.folder / "wheels").mkdir()
    options = ("--no-index", "--find-links", str(ground.folder / "wheels"))
    change = PackageChange(requirements=("engine==9.9",), options=options)
    for _ in range(2):
        with pytest.raises(PolicyRefused, match="could not be made") as caught:
            await ground.stage(ground.spec(change))
        assert "No matching distribution found for engine==9.9" in caught.value.tail


@pytest.mark.anyio
async def test_a_console_script_leads_to_its_interpreter(ground: Ground) -> None:
    wheel(ground.folder / "wheels", "2.0", "print('two')\n")
    options = ("--no-index", "--find-links", str(ground.folder / "wheels"))
    change = PackageChange(requirements=("engine==2.0",), options=options)
    program = ground.folder / "bin" / "engine-serve"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport engine\n")
    program.chmod(0o755)
    spec = ground.spec(change).model_copy(update={"argv": (str(program),), "program": (str(program),)})
    await ground.stage(spec)
    assert await engine_says(ground, spec) == "two"
    shell = ground.spec(PackageChange(requirements=("engine==2.0", "other==1"), options=options))
    with pytest.raises(PolicyRefused) as caught:
        await ground.stage(shell.model_copy(update={"argv": ("/bin/true",)}))
    assert "no Python program" in caught.value.tail


@pytest.mark.anyio
async def test_a_commit_is_found_first_and_the_repository_stays_where_it_is(ground: Ground) -> None:
    commits = repository(ground.folder / "repo")
    change = CheckoutChange(repository=str(ground.folder / "repo"), commit="new", path="python")
    spec = ground.spec(change).model_copy(
        update={"hidden_env": {"PYTHONPATH": str(ground.folder / "repo" / "python")}, "cwd": "/"}
    )
    for _ in range(2):
        await ground.stage(spec)
    assert await engine_says(ground, spec) == "new"
    assert await engine_says(ground, spec.model_copy(update={"beside": ()})) == "old"
    place = Path(overlay.overlay_dir(str(ground.root), change))
    locked = [(place / name).read_text().strip() for name in ("lock.txt", "base.txt")]
    assert locked == [commits["new"], commits["old"]]
    with pytest.raises(PolicyRefused, match="could not be made"):
        await ground.stage(ground.spec(change.model_copy(update={"commit": "no-such-tag"})))


@pytest.mark.anyio
async def test_in_a_container_only_commands_and_live_settings_are_possible(ground: Ground) -> None:
    with pytest.raises(PolicyRefused, match="container"):
        await ground.stage(ground.spec(ground.patch()), in_container=True)
    command = CommandChange(name="c", do=("true",), undo=("true",), probe=("false",))
    await ground.stage(ground.spec(command), in_container=True)


@pytest.mark.anyio
async def test_a_server_of_another_user_gets_no_package_from_our_folder(ground: Ground) -> None:
    spec = ground.spec(PackageChange(requirements=("engine==1",))).model_copy(update={"user": "somebody"})
    with pytest.raises(PolicyRefused, match="runs as somebody"):
        await ground.stage(spec)


@pytest.mark.parametrize(
    ("before", "words"),
    [({}, ()), ({"PYTHONPATH": ""}, ("",)), ({"PYTHONPATH": "/a:/b"}, ("/a", "/b")), ({"A": "1"}, ())],
)
def test_the_search_path_is_parted_again_as_it_was_joined(before: dict[str, str], words: tuple[str, ...]) -> None:
    changes = (
        PackageChange(requirements=("engine==1",)),
        CheckoutChange(repository="/srv/repo", commit="v1", path="python/sub"),
        CheckoutChange(repository="/srv/other", commit="v1"),
    )
    joined = overlay.in_front("/root/of us", changes, before)
    assert joined["PYTHONPATH"].split(":")[3:] == list(words)
    bare, digests = overlay.parted("/root/of us", joined)
    assert bare == before
    assert digests == tuple(overlay.overlay_digest(change) for change in changes)
    assert overlay.in_front("/root/of us", (), before) == before


# --- diffs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "diff", "after"),
    [
        ("a\nb\nc\n", "@@ -1,3 +1,3 @@\n a\n-b\n+B\n c", "a\nB\nc\n"),
        ("a\nb\n", "@@ -1,2 +1,4 @@\n+0\n a\n b\n+c", "0\na\nb\nc\n"),
        ("a\n", "@@ -0,0 +1 @@\n+0", "0\na\n"),
        ("a\nb\n", "@@ -2 +1,0 @@\n-b", "a\n"),
        ("a\nb\nc\nd\n", "@@ -1 +1 @@\n-a\n+A\n@@ -4 +4 @@\n-d\n+D", "A\nb\nc\nD\n"),
        ("a", "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a", "a\n"),
        ("a\n", "@@ -1 +1 @@\n-a\n+a\n\\ No newline at end of file", "a"),
        ("a\n\nb\n", "@@ -1,3 +1,2 @@\n a\n\n-b", "a\n\n"),
        ("a\x0cb\u2028c\r\nd\n", "@@ -1,2 +1,2 @@\n-a\x0cb\u2028c\r\n+x\r\n d", "x\r\nd\n"),
        ("-- a\n", "@@ -1 +1 @@\n--- a\n+++ b", "++ b\n"),
    ],
)  # fmt: skip
def test_a_diff_is_applied_to_the_byte(before: str, diff: str, after: str) -> None:
    (file,) = parsed(f"index 1..2\n--- a/x.py\t2020-01-01\n+++ b/x.py\n{diff}\n-- \n2.39\n")
    assert file.path == "x.py"
    assert patched(before.encode(), file.hunks) == after.encode()


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        ("@@ -2 +2 @@\n-a\n+b\n", "line 2 is 'b"),
        ("@@ -9 +9 @@\n-a\n+b\n", "the end of the file"),
        ("@@ -1 +1 @@\n-a \n+b\n", "the diff was made for 'a "),
        ("@@ -1,2 +1 @@\n-a\n", "ends in the middle"),
        ("@@ -1 +1 @@\n-a\n+b\n@@ -1 +1 @@\n-a\n+c\n", "overlap"),
        ("@@ -1 +1,2 @@\n-a\n+a\n\\ No newline at end of file\n+b\n", "behind one that has no line end"),
    ],
)
def test_a_diff_that_does_not_fit_says_where(diff: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        (file,) = parsed(f"--- a/x.py\n+++ b/x.py\n{diff}")
        patched(b"a\nb\nc\n", file.hunks)


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        ("", "no unified diff"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "renames"),
        ("rename from x\nrename to y\n", "more than edit"),
        ("deleted file mode 100644\n", "more than edit"),
        ("--- a/x\n+++ b/x\n", "nothing is said"),
        ("@@ -1 +1 @@\n-a\n+b\n", "in front of the first file name"),
        ("--- /etc/x\n+++ /etc/x\n@@ -1 +1 @@\n-a\n+b\n", "leads out"),
    ],
)
def test_a_diff_of_something_else_is_refused(diff: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parsed(diff)


# --- the nouns ---------------------------------------------------------------------------------------------

HOT = HotCall(name="beat", value="2", undo="1")
PATCH = PatchChange(directory="/srv/engine", diff="d1")
OTHER_PATCH = PatchChange(directory="/srv/engine", diff="d2")
PACKAGE = PackageChange(requirements=("engine==2.0",))
COMMAND = CommandChange(name="clocks", do=("do",), undo=("undo",), probe=("probe",))
BARE = LaunchSpec(engine="e", program=("p",), flags={}, argv=("p",), cwd="/", user="u")


def test_a_configuration_without_them_has_the_identity_that_it_always_had() -> None:
    assert BARE.fingerprint == "f0e3617a06dfe252"
    assert BARE.process_fingerprint == BARE.fingerprint


def test_what_is_live_makes_another_configuration_of_the_same_process() -> None:
    spec = BARE.model_copy(update={"beside": arranged([HOT, PATCH, COMMAND])})
    assert spec.live == (COMMAND, HOT)
    assert spec.as_started.beside == (PATCH,)
    assert len({spec.fingerprint, spec.process_fingerprint, BARE.fingerprint}) == 3
    assert spec.process_fingerprint == BARE.model_copy(update={"beside": (PATCH,)}).fingerprint
    assert LaunchSpec.model_validate_json(spec.model_dump_json()) == spec


def test_differences_name_what_stands_beside() -> None:
    spec = BARE.model_copy(update={"beside": (PATCH, HOT)})
    other = BARE.model_copy(update={"beside": (PATCH, PACKAGE)})
    assert spec.differences(other) == [
        "beside: live beat=2 ≠ absent",
        "beside: absent ≠ packages engine==2.0",
    ]
    one, two = (BARE.model_copy(update={"beside": order}) for order in ((PATCH, OTHER_PATCH), (OTHER_PATCH, PATCH)))
    assert one.differences(two) == ["beside: the same patches in another order"]
    assert one.differences(one) == []


def test_patches_add_up_and_of_all_others_the_newest_of_a_subject_stands() -> None:
    beside: tuple[Beside, ...] = ()
    faster = HotCall(name="beat", value="3", undo="1")
    newer = PackageChange(requirements=("Engine==2.1",))
    for change in (HOT, PATCH, PACKAGE, OTHER_PATCH, PATCH, faster, newer):
        beside = with_beside(beside, change)
    assert beside == (PATCH, OTHER_PATCH, faster, newer)


def test_only_live_changes_need_no_restart() -> None:
    live = [HOT, COMMAND]
    started = [
        PATCH,
        PACKAGE,
        COMMAND.model_copy(update={"restart": True}),
        FlagChange(name="--a"),
        EnvChange(name="A"),
    ]
    assert [needs_restart(change) for change in [*live, *started]] == [False] * 2 + [True] * 5


def test_asides_come_in_order_and_all_patches_are_one() -> None:
    restart = COMMAND.model_copy(update={"name": "first", "restart": True})
    spec = BARE.model_copy(update={"beside": arranged([HOT, PACKAGE, COMMAND, restart, PATCH, OTHER_PATCH])})
    found = [(plan.when, plan.changes) for plan in planned(spec)]
    assert found == [
        ("stopped", (PATCH, OTHER_PATCH)),
        ("stopped", (restart,)),
        ("live", (COMMAND,)),
        ("hot", (HOT,)),
    ]
    assert len({plan.digest for plan in planned(spec)}) == 4


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "patch", "directory": "relative", "diff": "d"},
        {"kind": "patch", "directory": "/", "diff": "d"},
        {"kind": "patch", "directory": "/a/../b", "diff": "d"},
        {"kind": "patch", "directory": "/a", "diff": "d", "clear": ("/a/",)},
        {"kind": "package", "requirements": ()},
        {"kind": "package", "requirements": ("engine>=2",)},
        {"kind": "package", "requirements": ("engine==2.*",)},
        {"kind": "package", "requirements": ("--index-url==1",)},
        {"kind": "checkout", "repository": "/r", "commit": "--force"},
        {"kind": "checkout", "repository": "/r", "commit": "v1", "path": "../x"},
        {"kind": "command", "name": "c", "do": ("a",), "undo": (), "probe": ("b",)},
        {"kind": "hot", "name": "a b", "value": "1", "undo": "0"},
    ],
)
def test_a_change_that_cannot_be_taken_back_or_leads_elsewhere_is_no_change(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LaunchSpec.model_validate(BARE.model_dump() | {"beside": (given,)})


# --- reading a live setting back ---------------------------------------------------------------------------


def answer(text: str, status: int | None = 200, **fields: object) -> dict[str, object]:
    return {"status": status, "text": text, "error": None} | fields


@pytest.mark.parametrize(
    ("answers", "keys", "value"),
    [
        ([answer(" 30 \n")], [], "30"),
        ([answer('{"a": {"b": [{"c": 1.5}]}}')], ["a", "b", "0", "c"], "1.5"),
        ([answer('[{"scale": 0.5}]')], ["(only)", "scale"], "0.5"),
        ([answer("", 404), answer('{"a": true}')], ["a"], "true"),
        ([answer("", None, error="refused")], ["a"], None),
    ],
)
def test_a_value_is_read_out_of_answers(answers: list[dict[str, object]], keys: list[str], value: str | None) -> None:
    assert shown(answers, keys) == value


@pytest.mark.parametrize(
    ("answers", "keys"),
    [
        ([answer("", 500)], []),
        ([answer("", None, error="timeout")], ["a"]),
        ([answer("{}")], ["a"]),
        ([answer("no json")], ["a"]),
        ([answer('[{"scale": 1}, {"scale": 2}]')], ["(only)", "scale"]),
    ],
)
def test_a_value_that_does_not_show_is_not_guessed(answers: list[dict[str, object]], keys: list[str]) -> None:
    with pytest.raises(Untold):
        shown(answers, keys)


def test_numbers_are_compared_as_such() -> None:
    assert alike("0.50", "0.5") and alike("True", "true") and not alike("1", "true") and not alike("a", "b")


def test_a_declared_live_setting_is_made_and_read_by_what_was_declared() -> None:
    rules = GenericRules.model_validate(
        {"hot": [{"name": "m", "set_command": ["set", "m={value}"], "read_command": ["show", "m"]}]}
    )
    setting = rules.hot[0].setting("http://127.0.0.1:1", "8", None)
    assert setting.request.command == ("set", "m=8")
    assert json.loads(setting.reads[0].model_dump_json())["command"] == ["show", "m"]
    assert os.path.basename(setting.request.url) == "127.0.0.1:1"
