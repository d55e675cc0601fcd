"""Where a target's database lies on this machine; it must not open it."""

from __future__ import annotations

import os
from pathlib import Path

from state.errors import ConfigError

DATABASE = "state.db"


def state_home() -> Path:
    """`$XDG_STATE_HOME/ratchet`, by default `~/.local/state/ratchet`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "ratchet"


def database_for(target: str, given: Path | None) -> Path:
    """The database of a named target: `--db`, else RATCHET_STATE, else the target's folder in the state home."""
    chosen = given or (Path(os.environ["RATCHET_STATE"]) if os.environ.get("RATCHET_STATE") else None)
    return _file(chosen) if chosen is not None else state_home() / target / DATABASE


def find_database(given: Path | None) -> Path:
    """The database that a reading command means when no target is named. Raises ConfigError when it is not clear."""
    chosen = given or (Path(os.environ["RATCHET_STATE"]) if os.environ.get("RATCHET_STATE") else None)
    if chosen is not None:
        return _file(chosen)
    demo = Path(".ratchet") / DATABASE
    known = [demo, *sorted(state_home().glob(f"*/{DATABASE}"))]
    found = [path for path in known if path.exists()]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            "there is no session database yet",
            where={"looked in": f"./.ratchet and {state_home()}"},
            do="run `start` or `demo` first, or name a database with --db or RATCHET_STATE",
        )
    raise ConfigError(
        "there is more than one session database",
        where={"found": ", ".join(map(str, found))},
        do="name one of them with --db or RATCHET_STATE",
    )


def _file(path: Path) -> Path:
    return path / DATABASE if path.is_dir() else path
