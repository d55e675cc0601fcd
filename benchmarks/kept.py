"""Where programs that play long rounds keep them, and how they end early; it knows no round."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def place(given: Path | None, prefix: str) -> Iterator[Path]:
    """The folder that was given, or one that stays only if a folder of something broken lies in it."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    scratch = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield scratch
    finally:
        if not any(path.is_dir() for path in scratch.iterdir()):
            shutil.rmtree(scratch)


def interrupt_on_sigterm() -> None:
    """SIGTERM as Ctrl-C, so that what is being played is cleaned up then, too."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
