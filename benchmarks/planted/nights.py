"""What is planted and expected in each night; data only, it starts nothing and reads nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.planted.server import VARIABLE

KINDS = ("aa", "slow", "gain")
NO_OPS, SLOW = 20, 10
SLOW_SHARE = 0.05
GAIN = 0.10
GAIN_SHARE = 1 - 1 / (1 + GAIN)
"""Of a parent that does a tenth more work once nothing holds it still."""
FLAGS = "--threads 1 --parallel 4 --ctx-size 1024 --flash-attn off --metrics"

SESSION = """\
seed = {seed}

[target]
name = "planted"
host = "{host}"
port = {ssh_port}
user = "{user}"
identity_file = "{identity}"
known_hosts = "{known_hosts}"
directory = "{root}"
python = "{python}"

[server]
url = "http://127.0.0.1:{port}"
api_key_file = "{key_file}"
start_deadline_s = 60
stop_grace_s = 5

[workload]
vocab_high = 8000

[[workload.load_points]]
name = "few"
concurrency = 4
requests = {requests}
prompt_tokens = 16
output_tokens = {output_tokens}

[workload.objective]
at = ["few"]

[workload.guards]
answers = "off"              # nothing that is planted touches an answer

[judge]
baseline_runs = 3            # the nights are short; what a keep needs is as it always is
close_out_blocks = 1

[planner]
refine = false
only = ["nothing-of-the-catalogue"]
"""
BUSY = """
[validity]                   # only to see whether the program works: nothing is proven on a busy machine
max_foreign_cpu_cores = 1000
max_steal_share = 1.0
min_concurrency_share = 0.0
"""


class Planted(NamedTuple):
    """One experiment; `effect` is what it truly does to the speed, a fraction. A value of None unsets the variable."""

    id: str
    changes: tuple[tuple[str, str | None], ...]
    effect: float

    def toml(self) -> str:
        """As it stands in the session file, which does not tell what is planted."""
        changes = ", ".join(map(_change, self.changes))
        return (
            f'\n[[experiments]]\nid = "{self.id}"\ntitle = "{self.id}"\nhypothesis = "to be found out"\n'
            f"changes = [{changes}]\nexpected_gain = 0.05\n"
        )


def _change(planted: tuple[str, str | None]) -> str:
    name, value = planted
    return f'{{ kind = "env", name = "{name}"' + ("" if value is None else f', value = "{value}"') + " }"


class Night(NamedTuple):
    """One session; `share` is the part of the time for which its parent is held still."""

    name: str
    kind: str
    share: float
    experiments: tuple[Planted, ...]


class Size(NamedTuple):
    """How large a run is."""

    requests: int = 8
    output_tokens: int = 32

    @property
    def name(self) -> str:
        """Short, for the names of files: figures of two sizes are never taken for one."""
        return f"{self.requests}x{self.output_tokens}"


def no_op(number: int) -> tuple[str, str]:
    """A variable that no engine reads; each is another configuration."""
    return f"LLAMA_NOOP_{number:02}", "1"


def nights(no_ops: int, slow: int, gains: int) -> Iterator[Night]:
    """All of them, with so many experiments that do nothing, that slow down, and so many sessions with a gain."""
    if no_ops:
        yield Night("aa", "aa", 0.0, tuple(Planted(f"no-op-{n:02}", (no_op(n),), 0.0) for n in range(1, no_ops + 1)))
    if slow:
        share = ((VARIABLE, str(SLOW_SHARE)),)
        yield Night(
            "slow",
            "slow",
            0.0,
            tuple(Planted(f"slow-{n:02}", (*share, no_op(n)), -SLOW_SHARE) for n in range(1, slow + 1)),
        )
    for number in range(1, gains + 1):
        yield Night(f"gain-{number:02}", "gain", GAIN_SHARE, (Planted("unheld", ((VARIABLE, None),), GAIN),))


def session_text(night: Night, size: Size, busy: bool, **fields: object) -> str:
    """The whole session file of a night."""
    head = SESSION.format(**size._asdict(), **fields) + (BUSY if busy else "")
    return head + "".join(planted.toml() for planted in night.experiments)


def environment(share: float) -> tuple[str, ...]:
    """The beginning of a command line that gives the server its planted share."""
    return ("/usr/bin/env", f"{VARIABLE}={share:.6f}") if share else ()


def program() -> tuple[str, ...]:
    """The server that knows how to be held still."""
    return (sys.executable, str(Path(__file__).with_name("server.py")))
