"""A literal text in source files on the host: found where it may be looked for, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from state.errors import CommandFailed
from tests.local_host import LocalHost
from tools.source_search import BYTES, LINES, LONGEST_LINE, PER_FILE, search_sh

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "an engine's source"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "core.py").write_text("one\nthreads = 4  # $(id)\n")
    (folder / "deep" / "er" / "more.cpp").write_text("int threads;\n")
    return folder


async def found(*roots: Path, text: str, files: str = "*", ours: str = "/home/x/.ratchet") -> list[str]:
    script = search_sh([str(root) for root in roots], text, files, ours)
    return (await LocalHost().check(script)).text.splitlines()


async def test_path_line_and_text_are_told(root: Path) -> None:
    assert await found(root, text="threads =") == ["./core.py:2:threads = 4  # $(id)"]
    assert await found(root, text="threads", files="*.cpp") == ["./deep/er/more.cpp:1:int threads;"]


async def test_the_text_is_literal_and_no_part_of_a_command(root: Path) -> None:
    assert await found(root, text="t.reads") == []
    assert await found(root, text="$(id)") == ["./core.py:2:threads = 4  # $(id)"]
    for text in ("'; touch pwned; '", "--version", "-e", "$(touch pwned)", "`touch pwned`", "threads\\"):
        assert await found(root, text=text) == []
    for files in ("*'; touch pwned; '", "$(touch pwned)"):
        assert await found(root, text="threads", files=files) == []
    assert list(root.parent.rglob("pwned")) == []


async def test_links_lead_nowhere_and_hidden_files_and_our_own_are_left_out(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("threads of a secret\n")
    (root / "link").symlink_to(outside)
    (root / "linked.py").symlink_to(outside / "secret.py")
    (root / ".env").write_text("threads=hidden\n")
    for folder in (".git", "ours"):
        (root / folder).mkdir()
        (root / folder / "file.py").write_text("threads\n")
    lines = await found(root, text="threads", ours=str(root / "ours"))
    assert sorted(lines) == ["./core.py:2:threads = 4  # $(id)", "./deep/er/more.cpp:1:int threads;"]


async def test_what_is_told_is_bounded(root: Path) -> None:
    (root / "long.py").write_text("needle " + "x" * 10_000 + "\n")
    (line,) = await found(root, text="needle")
    assert len(line) == LONGEST_LINE
    (root / "many.py").write_text("often\n" * 1000)
    assert len(await found(root, text="often")) == PER_FILE
    for n in range(20):
        (root / f"many{n}.py").write_text("often and long " + "y" * 500 + "\nand often\n" * 500)
    lines = await found(root, text="often")
    assert len(lines) == LINES
    assert sum(len(line) + 1 for line in lines) <= BYTES


async def test_a_root_that_is_not_there_holds_nothing_and_others_are_searched(root: Path, tmp_path: Path) -> None:
    assert await found(tmp_path / "gone", root, text="threads =") == ["./core.py:2:threads = 4  # $(id)"]


async def test_a_host_that_cannot_bound_a_search_says_so(root: Path, tmp_path: Path) -> None:
    script = f"PATH={tmp_path / 'empty'}\n" + search_sh([str(root)], "threads", "*", "/ours")
    with pytest.raises(CommandFailed, match="failed") as refused:
        await LocalHost().check(script)
    assert "this host has no timeout" in refused.value.tail
