"""The demo's SSH server behaves like OpenSSH where Ratchet depends on it: bytes, exits, signals, lost connections."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import asyncssh
import pytest

PROJECT = Path(__file__).resolve().parents[2]
LIMIT_S = 20


def until[T](look: Callable[[], T]) -> T:
    """The first true value that `look` gives; fails the test if there is none for LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    pytest.fail(f"nothing came of {look} within {LIMIT_S} s")
