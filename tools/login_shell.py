"""Our script through anybody's login shell: pure text in, pure text out; it must not run anything.

sshd hands a command to the user's login shell, which may be fish or csh, and whose start-up files may print. Here the
command line is built that makes any of them start /bin/sh with our script, and their noise is cut off again.
"""

from __future__ import annotations

import string

COMMAND_LIMIT_BYTES = 120_000
"""Linux takes at most 128 KiB in one argument; longer texts travel by `put`."""

PLAIN = frozenset(string.ascii_letters + string.digits + " _./:,=+@-")


def login_command(script: str, token: str) -> str:
    """The command line that makes any login shell start /bin/sh, which prints `token` twice and runs `script`.

    The script is carried in octal wherever shells disagree: fish and csh read quotes, backslashes, `!` and newlines in
    their own ways. The token goes to both streams. The script runs in the very process that sshd watches, so that
    exit status and signals are its own. Raises
    ValueError when it contains NUL or does not fit into one argument.
    """
    if "\0" in script:
        raise ValueError("a script cannot contain NUL")
    text = f"printf %s {token}; printf %s {token} >&2\n{script}\n"
    coded = "".join(chr(b) if chr(b) in PLAIN else f"\\0{b:03o}" for b in text.encode("utf-8", "surrogateescape"))
    if len(coded) > COMMAND_LIMIT_BYTES:
        raise ValueError(f"a script of {len(coded)} bytes is too long for a command line: put it into a file")
    return f'exec /bin/sh -c \'eval "$(printf %b "{coded}")"\''


def after_token(token: str, data: bytes) -> bytes | None:
    """What follows the token, or None when it was never printed: then the script did not start."""
    _, found, payload = data.partition(token.encode())
    return payload if found else None
