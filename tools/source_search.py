"""A literal text searched for in source files on the host, as POSIX sh around `grep`; it must not leave the roots.

The text and the pattern of names are quoted words, never options or paths. Links are not followed, hidden files and our
own folder are left out, and lines, bytes, time and processor priority are bounded.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

LINES = 40
PER_FILE = 10
BYTES = 16 * 1024
LONGEST_LINE = 240
SECONDS = 10
TOOLS_SH = """
for tool in timeout nice; do
  command -v "$tool" >/dev/null || { echo "this host has no $tool" >&2; exit 1; }
done
grep -q --include=x --exclude-dir=x -e x /dev/null 2>/dev/null
[ $? -le 1 ] || { echo "the grep of this host cannot choose files" >&2; exit 1; }
"""


def search_sh(roots: Sequence[str], text: str, files: str, ours: str) -> str:
    """Prints `path:line:text` of what matches, path by path; `ours` is the folder of ours that is never searched."""
    own = shlex.quote(ours.rstrip("/").rpartition("/")[2])
    words = (
        f"grep -F -n -r -I -H -m {PER_FILE} --include={shlex.quote(files)} --exclude='.*' --exclude-dir='.?*' "
        f"--exclude-dir={own} -e {shlex.quote(text)} ."
    )
    each = "".join(_in_root(root, words) for root in roots)
    return f"{TOOLS_SH}{{\n{each}}} | cut -c 1-{LONGEST_LINE} | head -n {LINES} | head -c {BYTES}\n"


def _in_root(root: str, words: str) -> str:
    """A root that is not there holds nothing; `timeout` and `nice` stand for what a careful person would type."""
    return f"( cd -P -- {shlex.quote(root)} 2>/dev/null && exec timeout {SECONDS} nice -n 19 {words} 2>/dev/null )\n"
