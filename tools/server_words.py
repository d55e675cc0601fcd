"""What a server said, at the end of its log or while a run was made, as POSIX sh; it must not read any meaning into it.

The run's job leaves a mark beside its other files before it begins: how long the log was, and where it lies. Nothing
more is asked of the host inside the measured window.
"""

from __future__ import annotations

import shlex

MARK = "server.mark"
LIMIT_BYTES = 256 * 1024
"""Of each of the two files at most; a long run's end tells as much as its beginning."""


END_LINES, END_BYTES = 40, 16 * 1024
"""Of each of the two files at most."""


def end_sh(launch: str) -> str:
    """Prints the last lines of a launch's log as it is now; nothing of a launch that has none."""
    folder = shlex.quote(launch)
    return f"""
for name in stdout stderr; do
  tail -n {END_LINES} <{folder}/$name 2>/dev/null | tail -c {END_BYTES}
done 2>/dev/null
:
"""


def mark_sh(launch: str) -> str:
    """For the head of a run's script, in the run's own folder: notes where the log of the launch folder ends now."""
    folder = shlex.quote(launch)
    sizes = f"for name in stdout stderr; do wc -c <{folder}/$name || echo 0; done"
    return f"{{ {sizes}; printf '%s\\n' {folder}; }} >{MARK}.part 2>/dev/null && mv -f {MARK}.part {MARK}\n"


def said_sh(run: str) -> str:
    """Prints what the server wrote since the mark in a run's folder; nothing when there is none."""
    mark = shlex.quote(f"{run}/{MARK}")
    return f"""
[ -s {mark} ] || exit 0
{{ read -r out; read -r err; IFS= read -r at; }} <{mark}
tail -c "+$((out + 1))" "$at/stdout" 2>/dev/null | tail -c {LIMIT_BYTES}
echo
tail -c "+$((err + 1))" "$at/stderr" 2>/dev/null | tail -c {LIMIT_BYTES}
:
"""
