"""What every Host must do; a subclass gives the fixtures `host` (connected) and `folder` (an empty folder on it)."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from state.errors import CommandFailed, OutcomeUnknown
from tools.shell import Host, quote

pytestmark = pytest.mark.anyio

EVERY_BYTE = bytes(range(256)) * 5


async def seen(condition: Callable[[], bool]) -> bool:
    """Whether the condition came true, given ample time."""
    for _ in range(600):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.anyio
class HostContract:
    async def test_output_and_exit_come_back(self, host: Host) -> None:
        result = await host.run("echo out; echo err >&2; exit 3")
        assert (result.exit, result.signal, result.stdout, result.stderr) == (3, None, b"out\n", b"err\n")
        assert not result.ok
        assert result.text == "out\n"

    async def test_exit_255_is_the_commands_own(self, host: Host) -> None:
        assert (await host.run("exit 255")).exit == 255

    async def test_signal_death_is_told_apart_from_an_exit_code(self, host: Host) -> None:
        killed = await host.run("echo before; kill -9 $$")
        assert (killed.exit, killed.signal, killed.stdout) == (137, "KILL", b"before\n")
        assert not killed.ok
        exited = await host.run("exit 137")
        assert (exited.exit, exited.signal) == (137, None)

    async def test_a_script_is_posix_sh_whatever_it_contains(self, host: Host) -> None:
        awkward = "a'b\"c\\d$e`f`!g\th\ni%j*~é\\n"
        assert (await host.check(f"printf %s {quote([awkward])}")).text == awkward
        assert (await host.check("x=1\nif [ $x = 1 ]; then\n  cat <<E\n$x\\$x\nE\nfi")).text == "1$x\n"

    async def test_quote_keeps_words(self, host: Host) -> None:
        words = ["", "two words", "-n", "'", "a\nb", "$HOME", "*"]
        result = await host.check(f"""printf '%s\\0' {quote(words)}""")
        assert result.stdout.split(b"\0")[:-1] == [word.encode() for word in words]

    async def test_any_byte_passes_both_ways(self, host: Host) -> None:
        result = await host.run("tee /dev/stderr", stdin=EVERY_BYTE)
        assert result.stdout == EVERY_BYTE
        assert result.stderr == EVERY_BYTE
        assert (await host.run("printf '\\377'")).stdout == b"\xff"
        assert (await host.run("echo still there")).text == "still there\n"

    async def test_input_nobody_reads_is_no_error(self, host: Host) -> None:
        assert (await host.run("exit 4", stdin=b"x" * 3_000_000)).exit == 4

    async def test_one_line_of_3_mb(self, host: Host) -> None:
        result = await host.run("head -c 3000000 /dev/zero | tr '\\0' x")
        assert result.stdout == b"x" * 3_000_000

    async def test_20_mb_on_stderr_do_not_block(self, host: Host) -> None:
        result = await host.run("head -c 20000000 /dev/zero >&2; echo done")
        assert len(result.stderr) == 20_000_000
        assert result.text == "done\n"

    async def test_more_commands_at_a_time_than_sessions(self, host: Host) -> None:
        results = await asyncio.gather(*(host.run(f"sleep 0.05; echo {n}") for n in range(14)))
        assert [result.text for result in results] == [f"{n}\n" for n in range(14)]

    async def test_a_timeout_is_an_unknown_outcome(self, host: Host, folder: Path) -> None:
        script = f"echo begun; : >{folder}/begun; sleep 1; : >{folder}/done"
        with pytest.raises(OutcomeUnknown) as caught:
            await host.run(script, timeout_s=0.5)
        assert "may still be running" in str(caught.value)
        assert "host" in caught.value.where
        assert caught.value.tail == "begun"
        assert await seen((folder / "begun").exists)
        assert (await host.run("echo usable")).text == "usable\n"

    async def test_check_tells_the_whole_story(self, host: Host) -> None:
        with pytest.raises(CommandFailed) as caught:
            await host.check("echo the disk is full >&2; exit 7")
        assert caught.value.where["host"] == host.name
        assert caught.value.where["ended"] == "exit 7"
        assert "the disk is full" in caught.value.tail
        assert "exit 7" in caught.value.where["command"]

    async def test_put_and_get(self, host: Host, folder: Path) -> None:
        path = folder / "it's a file"
        await host.put(str(path), EVERY_BYTE, mode=0o750)
        assert path.read_bytes() == EVERY_BYTE
        assert path.stat().st_mode & 0o7777 == 0o750
        assert await host.get(str(path)) == EVERY_BYTE
        assert await host.get(str(path), offset=250, limit=10) == EVERY_BYTE[250:260]
        assert await host.get(str(path), offset=len(EVERY_BYTE)) == b""
        assert await host.get(str(path), offset=len(EVERY_BYTE) + 5) == b""

    async def test_put_replaces_and_leaves_nothing_else(self, host: Host, folder: Path) -> None:
        path = folder / "file"
        await host.put(str(path), b"long " * 1000)
        await host.put(str(path), b"")
        assert path.read_bytes() == b""
        assert os.listdir(folder) == ["file"]

    async def test_put_of_megabytes(self, host: Host, folder: Path) -> None:
        data = os.urandom(5_000_000)
        await host.put(str(folder / "big"), data)
        assert hashlib.sha256((folder / "big").read_bytes()).digest() == hashlib.sha256(data).digest()

    async def test_put_where_it_cannot_be_written(self, host: Host, folder: Path) -> None:
        with pytest.raises(CommandFailed) as caught:
            await host.put(str(folder / "absent" / "file"), b"x")
        assert caught.value.where["path"].endswith("absent/file")
        with pytest.raises(CommandFailed, match="is a directory"):
            await host.put(str(folder), b"x")
        assert os.listdir(folder) == []

    async def test_get_of_what_is_not_a_file(self, host: Host, folder: Path) -> None:
        with pytest.raises(CommandFailed) as caught:
            await host.get(str(folder / "absent"))
        assert caught.value.where["path"].endswith("absent")
        with pytest.raises(CommandFailed, match="is a directory"):
            await host.get(str(folder))
