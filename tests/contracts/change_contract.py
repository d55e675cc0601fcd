"""What every kind of change beside the command line must do; a subclass gives the fixture `host`.

The host's state is observed from outside: bytes, modes and owners of files, what a program answers. A settling shell is
really killed before each of its steps: stand-ins for the programs that it calls count, and kill its whole group.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from state.errors import PolicyRefused
from state.models import Beside, CommandChange, HotCall, LaunchSpec, PatchChange
from tests.contracts.host_contract import seen
from tools.changes import record, settle, staging
from tools.servers.generic import DeclaredHot, Generic, GenericRules
from tools.shell import CommandResult, Host

pytestmark = pytest.mark.anyio

PROGRAMS = ("cat", "cp", "mkdir", "mv", "rm", "sync", "touch")
"""What changes the host when it is called by the scripts."""
MOST_STEPS = 200
ORIGINAL = b"wait = 1\r\nname = 'caf\xc3\xa9'\x0c\nlast line without an end"
DIFF = """\
--- a/engine/loop.py
+++ b/engine/loop.py
@@ -1,3 +1,4 @@
-wait = 1\r
+wait = 0\r
+more = True
 name = 'café'\x0c
-last line without an end
\\ No newline at end of file
+last line with one
diff --git a/plain.cfg b/plain.cfg
--- a/plain.cfg
+++ b/plain.cfg
@@ -2 +2 @@
-two
+zwei
"""


class LiveServer:
    """A server with one live setting, and a count of how often it was made."""

    def __init__(self) -> None:
        self.value, self.made = "1", 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(json.dumps({"state": [{"beat": float(owner.value)}]}))

            def do_POST(self) -> None:
                owner.value = str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["beat"])
                owner.made += 1
                self._answer("{}")

            def _answer(self, text: str) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass
class Ground:
    """A folder of a host's with something to change in it, and our own root beside."""

    host: Host
    folder: Path
    server: LiveServer
    shims: Path = field(init=False)

    def __post_init__(self) -> None:
        self.source = self.folder / "source"
        (self.source / "engine").mkdir(parents=True)
        (self.source / "engine" / "loop.py").write_bytes(ORIGINAL)
        (self.source / "engine" / "loop.py").chmod(0o640)
        (self.source / "plain.cfg").write_bytes(b"one\ntwo\nthree\n")
        os.utime(self.source / "engine" / "loop.py", (1_600_000_000, 1_600_000_000))
        (self.folder / "cache").mkdir()
        (self.folder / "cache" / "compiled").write_text("for the original")
        self.root = self.folder / "root"
        self.root.mkdir()
        (self.root / "jobs").mkdir()
        self._make_shims()

    def _make_shims(self) -> None:
        self.shims = self.folder / "shims"
        self.shims.mkdir()
        for name in PROGRAMS:
            real = shutil.which(name)
            shim = self.shims / name
            shim.write_text(f"""#!/bin/sh
count=$({shutil.which("cat")} "{self.folder}/count" 2>/dev/null)
count=$((${{count:-0}} + 1))
echo $count >"{self.folder}/count"
if [ "$count" = "$KILL_AT" ]; then
  set -- $({shutil.which("cat")} /proc/$$/stat)
  kill -KILL "-$5"
fi
exec {real} "$@"
""")
            shim.chmod(0o755)

    def adapter(self) -> Generic:
        hot = DeclaredHot(
            name="beat",
            set_path="/beat",
            set_body='{"beat": {value}}',
            read_path="/state",
            read_key=("state", "0", "beat"),
        )
        return Generic(GenericRules(hot=(hot,)), self.server.url)

    def patch(self, diff: str = DIFF, **fields: object) -> PatchChange:
        return PatchChange.model_validate({"directory": str(self.source), "diff": diff} | fields)

    def spec(self, *beside: Beside) -> LaunchSpec:
        words = (sys.executable, "-m", "engine")
        return LaunchSpec(
            engine="generic", program=words, flags={}, argv=words, cwd=str(self.folder), user="me", beside=beside
        )

    def host_path(self, name: str) -> str:
        return shlex.quote(f"{self.root}/{name}")

    async def stage(self, spec: LaunchSpec, in_container: bool = False) -> None:
        """As the target does it."""
        ground = staging.Ground(
            host=self.host,
            root=str(self.root),
            session_id="S",
            login="me",
            python=sys.executable,
            adapter=self.adapter(),
            url=self.server.url,
            api_key_file=None,
            environ={"PATH": os.environ["PATH"]},
            in_container=in_container,
        )
        await staging.make_ready(ground, spec)

    def script(self, spec: LaunchSpec) -> str:
        """All that a launch does: before the start, and once the server generates."""
        root = str(self.root)
        steps = [settle.before_start(root, spec, None), settle.while_serving(root, spec, None)]
        return "\n".join(f"{step.render()} || exit 1" for step in steps)

    async def settle(self, *beside: Beside) -> CommandResult:
        return await self.host.run(self.script(self.spec(*beside)), timeout_s=300)

    async def settle_killed(self, at: int, *beside: Beside) -> bool:
        """Settle, and die before the step with this number; whether there was one."""
        (self.folder / "count").unlink(missing_ok=True)
        prefix = f'export KILL_AT={at} PATH={shlex.quote(str(self.shims))}:"$PATH"\n'
        done = await self.host.run(prefix + self.script(self.spec(*beside)), timeout_s=300)
        assert done.ok or done.signal == "KILL" or done.exit == 137, done.tail
        return not done.ok


@dataclass
class Kind:
    """One change and how the world looks with regard to it."""

    change: Beside
    look: Callable[[], object]
    whole: Callable[[], bool]
    """Whether no file is half written just now."""
    acts: Callable[[], int | None]
    """How often it was brought about, where something counts that."""


def look_at(path: Path) -> dict[str, object]:
    """Bytes, mode, owner and, of files, the time of change: everything below a folder."""
    found: dict[str, object] = {}
    for one in sorted(path.rglob("*")):
        status = one.lstat()
        kept = (status.st_mode, status.st_uid, status.st_gid)
        name = str(one.relative_to(path))
        found[name] = (*kept, one.read_bytes(), int(status.st_mtime)) if one.is_file() else kept
    return found


@pytest.mark.anyio
class ChangeContract:
    stride = 1
    """Killed at every step, or at each so many."""

    @pytest.fixture
    def ground(self, host: Host, tmp_path: Path) -> Iterator[Ground]:
        server = LiveServer()
        yield Ground(host, tmp_path / "it's", server)
        server.close()

    @pytest.fixture(params=["patch", "command", "command with restart", "hot"])
    def kind(self, request: pytest.FixtureRequest, ground: Ground) -> Kind:
        if request.param == "patch":
            return self._patch(ground)
        if request.param == "hot":
            call = HotCall(name="beat", value="2.50", undo="1")
            return Kind(call, lambda: float(ground.server.value), lambda: True, lambda: None)
        return self._command(ground, restart=request.param.endswith("restart"))

    def _patch(self, ground: Ground) -> Kind:
        def look() -> object:
            kept = {name: one for name, one in look_at(ground.folder / "cache").items()}
            return look_at(ground.source), kept

        def whole() -> bool:
            texts = (ORIGINAL, patched_loop())
            return (ground.source / "engine" / "loop.py").read_bytes() in texts

        return Kind(ground.patch(clear=(str(ground.folder / "cache"),)), look, whole, lambda: None)

    def _command(self, ground: Ground, restart: bool) -> Kind:
        mark, log = ground.folder / "it's on", ground.folder / "log"
        log.touch()
        do = f'[ -e "$1" ] || echo did >>"{log}"; : >"$1"'
        change = CommandChange(
            name="mark",
            do=("sh", "-c", do, "sh", str(mark)),
            undo=("rm", "-f", str(mark)),
            probe=("test", "-e", str(mark)),
            restart=restart,
        )
        return Kind(change, mark.exists, lambda: True, lambda: len(log.read_text().splitlines()))

    # --- there and back

    async def test_it_is_brought_about_once_and_taken_back_byte_for_byte(self, ground: Ground, kind: Kind) -> None:
        before = kind.look()
        await ground.stage(ground.spec(kind.change))
        assert kind.look() == before
        assert (await ground.settle(kind.change)).ok
        there = kind.look()
        assert there != before
        (one,) = await record.look(ground.host, str(ground.root))
        assert (one.state, one.changes) == (0, (kind.change,))
        assert (await ground.settle(kind.change)).ok
        assert kind.look() == there
        assert kind.acts() in (None, 1)
        for _ in range(2):
            assert (await ground.settle()).ok
            assert kind.look() == before
            assert await record.look(ground.host, str(ground.root)) == ()

    async def test_it_can_be_had_again_after_it_was_taken_back(self, ground: Ground, kind: Kind) -> None:
        before = kind.look()
        for _ in range(2):
            await ground.stage(ground.spec(kind.change))
            assert (await ground.settle(kind.change)).ok
            assert (await ground.settle()).ok
            assert kind.look() == before

    async def test_killed_before_any_step_it_is_finished_or_taken_back_by_the_next(
        self, ground: Ground, kind: Kind
    ) -> None:
        before = kind.look()
        await ground.stage(ground.spec(kind.change))
        killed = 0
        for step in range(1, MOST_STEPS, self.stride):
            more = await ground.settle_killed(step, kind.change)
            assert kind.whole()
            if step % 2:
                assert (await ground.settle(kind.change)).ok
                (one,) = await record.look(ground.host, str(ground.root))
                assert one.state == 0
            done = await ground.settle()
            assert done.ok, done.tail
            assert kind.look() == before, f"killed before step {step}"
            killed += more
            if not more:
                break
        assert killed >= 2

    async def test_killed_while_it_is_taken_back_the_next_one_takes_it_back(self, ground: Ground, kind: Kind) -> None:
        before = kind.look()
        await ground.stage(ground.spec(kind.change))
        killed = 0
        for step in range(1, MOST_STEPS, self.stride):
            assert (await ground.settle(kind.change)).ok
            there = kind.look()
            more = await ground.settle_killed(step)
            assert kind.whole()
            if step % 2:
                again = await ground.settle(kind.change)
                assert again.ok, again.tail
                assert _without_times(kind.look()) == _without_times(there)
            done = await ground.settle()
            assert done.ok, done.tail
            assert kind.look() == before, f"killed before step {step}"
            killed += more
            if not more:
                break
        assert killed >= 2

    async def test_a_later_one_ends_an_earlier_one_that_hangs(self, ground: Ground) -> None:
        mark = ground.folder / "begun"
        slow = CommandChange(
            name="slow",
            do=("sh", "-c", f'echo $$ >"{mark}"; sleep 300'),
            undo=("rm", "-f", str(mark)),
            probe=("test", "-e", f"{mark}.done"),
        )
        await ground.stage(ground.spec(slow))
        hanging = asyncio.create_task(ground.settle(slow))
        assert await seen(lambda: mark.exists() and bool(mark.read_text().strip()))
        pid = int(mark.read_text())
        assert (await ground.settle()).ok
        assert not (await hanging).ok
        assert await seen(lambda: not Path(f"/proc/{pid}").exists())
        assert await record.look(ground.host, str(ground.root)) == ()

    async def test_nothing_is_done_once_the_lease_has_passed_on(self, ground: Ground, kind: Kind) -> None:
        await ground.stage(ground.spec(kind.change))
        before = kind.look()
        epochs = ground.root / "lease" / "epochs"
        epochs.mkdir(parents=True)
        (epochs / "7").touch()
        root = str(ground.root)
        for step in (
            settle.before_start(root, ground.spec(kind.change), 6),
            settle.while_serving(root, ground.spec(kind.change), 6),
        ):
            assert not (await ground.host.run(step.render(), timeout_s=60)).ok
        assert kind.look() == before

    async def test_what_was_never_made_ready_is_not_passed_over(self, ground: Ground, kind: Kind) -> None:
        assert not (await ground.settle(kind.change)).ok
        other = HotCall(name="beat", value="3", undo="1")
        await ground.stage(ground.spec(other))
        assert "never made ready" in (await ground.settle(kind.change)).tail

    async def test_operations_are_data_that_render_the_same_script(self, ground: Ground, kind: Kind) -> None:
        operation = settle.before_start(str(ground.root), ground.spec(kind.change), 3)
        assert type(operation).model_validate_json(operation.model_dump_json()).render() == operation.render()

    # --- patches

    async def test_a_file_that_somebody_else_changed_is_left_alone(self, ground: Ground) -> None:
        change, path = ground.patch(), ground.source / "plain.cfg"
        await ground.stage(ground.spec(change))
        assert (await ground.settle(change)).ok
        path.write_bytes(b"theirs\n")
        check = settle.foreign(str(ground.root), ground.spec()).render()
        told = await ground.host.run(check, timeout_s=60)
        assert not told.ok and str(path) in told.tail
        told = await ground.settle()
        assert not told.ok and "changed by somebody else" in told.tail
        assert path.read_bytes() == b"theirs\n"
        tolerant = settle.before_start(str(ground.root), ground.spec(), None, tolerant=True)
        assert (await ground.host.run(tolerant.render(), timeout_s=60)).ok
        assert path.read_bytes() == b"theirs\n"
        path.write_bytes(b"one\nzwei\nthree\n")
        assert (await ground.host.run(check, timeout_s=60)).ok
        assert (await ground.settle()).ok
        assert path.read_bytes() == b"one\ntwo\nthree\n"

    async def test_patches_of_one_file_add_up_and_each_set_begins_from_the_original(self, ground: Ground) -> None:
        path = ground.source / "plain.cfg"
        first = ground.patch("--- plain.cfg\n+++ plain.cfg\n@@ -2 +2 @@\n-two\n+zwei\n")
        second = ground.patch("--- plain.cfg\n+++ plain.cfg\n@@ -1,3 +1,3 @@\n-one\n+eins\n zwei\n three\n")
        before = look_at(ground.source)
        await ground.stage(ground.spec(first))
        assert (await ground.settle(first)).ok
        await ground.stage(ground.spec(first, second))
        assert (await ground.settle(first, second)).ok
        assert path.read_bytes() == b"eins\nzwei\nthree\n"
        with pytest.raises(PolicyRefused, match="does not fit"):
            await ground.stage(ground.spec(second))
        assert (await ground.settle(first)).ok
        assert path.read_bytes() == b"one\nzwei\nthree\n"
        assert (await ground.settle()).ok
        assert look_at(ground.source) == before

    async def test_caches_are_set_aside_kept_for_the_patch_and_put_back(self, ground: Ground) -> None:
        cache, absent = ground.folder / "cache", ground.folder / "other"
        change = ground.patch(clear=(str(cache), str(absent)))
        await ground.stage(ground.spec(change))
        for grown in ("", "for the patch"):
            assert (await ground.settle(change)).ok
            assert (cache / "compiled").read_text() == grown if grown else not cache.exists()
            cache.mkdir(exist_ok=True)
            absent.mkdir(exist_ok=True)
            (cache / "compiled").write_text("for the patch")
            (absent / "compiled").write_text("for the patch")
            assert (await ground.settle()).ok
            assert (cache / "compiled").read_text() == "for the original"
            assert not absent.exists()

    @pytest.mark.parametrize(
        ("diff", "said"),
        [
            ("--- plain.cfg\n+++ plain.cfg\n@@ -2 +2 @@\n-three\n+drei\n", "line 2 is 'two"),
            ("--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x\n", "makes or deletes a file"),
            ("--- a/../cache/compiled\n+++ b/../cache/compiled\n@@ -1 +1 @@\n-a\n+b\n", "leads out of the folder"),
            ("--- a/link.cfg\n+++ b/link.cfg\n@@ -2 +2 @@\n-two\n+zwei\n", "is a symbolic link"),
            ("--- a/away/compiled\n+++ b/away/compiled\n@@ -1 +1 @@\n-a\n+b\n", "is reached by a symbolic link"),
            ("--- a/gone.py\n+++ b/gone.py\n@@ -1 +1 @@\n-a\n+b\n", "there is no file"),
            ("just words\n", "no unified diff"),
        ],
    )
    async def test_a_patch_that_cannot_be_right_is_refused_before_anything_is_touched(
        self, ground: Ground, diff: str, said: str
    ) -> None:
        (ground.source / "link.cfg").symlink_to("plain.cfg")
        (ground.source / "away").symlink_to(ground.folder / "cache")
        before = look_at(ground.source)
        with pytest.raises(PolicyRefused) as caught:
            await ground.stage(ground.spec(ground.patch(diff)))
        assert said in str(caught.value)
        assert look_at(ground.source) == before
        assert await record.look(ground.host, str(ground.root)) == ()

    # --- what is there already

    async def test_a_live_setting_whose_way_back_is_wrong_is_refused(self, ground: Ground) -> None:
        with pytest.raises(PolicyRefused, match=r"it is 1\.0 now, and undo would make it 5"):
            await ground.stage(ground.spec(HotCall(name="beat", value="2", undo="5")))
        assert ground.server.made == 0

    async def test_a_live_setting_that_goes_on_from_another_one_is_fine(self, ground: Ground) -> None:
        first, second = (HotCall(name="beat", value=value, undo="1") for value in ("2", "3"))
        for change in (first, second, first):
            await ground.stage(ground.spec(change))
            assert (await ground.settle(change)).ok
            assert float(ground.server.value) == float(change.value)
        assert (await ground.settle()).ok
        assert float(ground.server.value) == 1

    async def test_without_a_server_there_is_nothing_live_to_take_back(self, ground: Ground) -> None:
        change = HotCall(name="beat", value="2", undo="1")
        await ground.stage(ground.spec(change))
        assert (await ground.settle(change)).ok
        ground.server.close()
        assert (await ground.settle()).ok
        assert await record.look(ground.host, str(ground.root)) == ()

    async def test_a_command_that_is_in_effect_already_is_refused(self, ground: Ground) -> None:
        always = CommandChange(name="c", do=("true",), undo=("true",), probe=("true",))
        with pytest.raises(PolicyRefused, match="in effect already"):
            await ground.stage(ground.spec(always))
        gone = CommandChange(name="c", do=("true",), undo=("true",), probe=("no-such-program-here",))
        with pytest.raises(PolicyRefused, match="cannot be run"):
            await ground.stage(ground.spec(gone))


def patched_loop() -> bytes:
    return b"wait = 0\r\nmore = True\nname = 'caf\xc3\xa9'\x0c\nlast line with one\n"


def _without_times(look: object) -> object:
    """A file that is patched again was changed at another time."""
    if not isinstance(look, tuple):
        return look
    return [{name: value[:4] if isinstance(value, tuple) else value for name, value in one.items()} for one in look]
