"""Who listens on a TCP port and who is connected to it, from procfs alone; it opens no connection itself."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from pydantic import Field

from state.models import Frozen
from tools.facts.base import Fact, as_text
from tools.procfs import LISTENING_SH

ESTABLISHED, LISTENING = "01", "0A"
"""TCP_ESTABLISHED and TCP_LISTEN in /proc/net/tcp."""
VISIT_LOOK_S = 0.2


class Listener(Frozen):
    """One listening socket; no pids means that its owner may not be seen by us, not that it has none."""

    address: str = Field(description="the address bound to, e.g. 127.0.0.1, 0.0.0.0 or ::")
    pids: tuple[int, ...] = Field(description="processes that hold the socket, parents and forked children alike")


class PortFacts(Frozen):
    """Who listens on a port in our network namespace; `observed` is False where the kernel's table cannot be read."""

    port: int
    observed: bool
    listeners: tuple[Listener, ...] = ()

    @property
    def free(self) -> bool:
        """True only when it was seen that nobody listens."""
        return self.observed and not self.listeners


@dataclass(frozen=True)
class ListenersFact(Fact[PortFacts]):
    """Which processes listen on a TCP port."""

    port: int

    def command(self) -> str:
        """The listening rows of that port, then which /proc/PID/fd lead to their sockets."""
        return f"""{LISTENING_SH}
for table in tcp tcp6; do [ -r /proc/net/$table ] && echo "table $table"; done
found=$(listening {self.port:04X})
[ -n "$found" ] || exit 0
echo "$found" | while read -r row; do echo "socket $row"; done
set --
for inode in $(echo "$found" | cut -d ' ' -f 2); do set -- "$@" -e "socket:\\[$inode\\]"; done
LC_ALL=C ls -l /proc/[0-9]*/fd 2>/dev/null | grep -e '^/proc/[0-9]*/fd:' "$@" | grep -B 1 "$@"
:
"""

    def parse(self, output: bytes) -> PortFacts:
        """Holders are printed beneath the folder of their process."""
        sockets: dict[str, str] = {}
        holders: dict[str, list[int]] = {}
        observed = False
        pid = 0
        for line in as_text(output).splitlines():
            if line.startswith("table "):
                observed = True
            elif line.startswith("socket "):
                _, local, inode = line.split()
                sockets[inode] = _address(local.partition(":")[0])
            elif folder := re.match(r"/proc/(\d+)/fd:", line):
                pid = int(folder[1])
            elif (link := re.search(r"socket:\[(\d+)\]$", line)) and pid not in holders.setdefault(link[1], []):
                holders[link[1]].append(pid)
        return PortFacts(
            port=self.port,
            observed=observed,
            listeners=tuple(Listener(address=a, pids=tuple(holders.get(i, ()))) for i, a in sockets.items()),
        )


@dataclass(frozen=True)
class ConnectionsFact(Fact[int | None]):
    """How many connections to a TCP port are open, idle ones included; None where the tables cannot be read."""

    port: int

    def command(self) -> str:
        """The server's ends of the connections, one line each, after a line for each table that could be read."""
        return f"""
for table in tcp tcp6; do
  exec 3</proc/net/$table || continue
  echo table
  while read -r slot local remote state rest <&3; do
    case $local:$state in *:{self.port:04X}:{ESTABLISHED}) echo open ;; esac
  done
  exec 3<&-
done 2>/dev/null
:
"""

    def parse(self, output: bytes) -> int | None:
        """Count the lines."""
        said = as_text(output).split()
        return said.count("open") if "table" in said else None


@dataclass(frozen=True)
class VisitorsFact(Fact[int]):
    """How many connections to a TCP port came within a window; those that were there at its beginning don't count.

    One that came and went between two looks is still seen while its end is waited for, if the server closed it.
    """

    port: int
    window_s: float

    @property
    def timeout_s(self) -> float:  # type: ignore[override]
        """The window and time for the readings."""
        return 2 * self.window_s + 30

    def command(self) -> str:
        """The other ends of the port's connections at each look, until the window is over by the host's clock."""
        return f"""
look() {{
  echo look
  for table in tcp tcp6; do
    exec 3</proc/net/$table || continue
    while read -r slot local remote state rest <&3; do
      case $local:$state in *:{self.port:04X}:{LISTENING}) ;; *:{self.port:04X}:*) echo "$remote" ;; esac
    done
    exec 3<&-
  done 2>/dev/null
}}
hundredths() {{ read -r up _ </proc/uptime; now=${{up%.*}}${{up#*.}}; }}
hundredths
end=$((now + {round(100 * self.window_s)}))
while [ "$now" -lt $end ]; do
  look
  sleep {VISIT_LOOK_S} 2>/dev/null || sleep 1
  hundredths
done
look
"""

    def parse(self, output: bytes) -> int:
        """Ends that the first look did not show."""
        _, first, *others = as_text(output).split("look\n")
        return len({end for look in others for end in look.split()} - set(first.split()))


def _address(raw: str) -> str:
    """An address as in /proc/net/tcp: hexadecimal words of 32 bits in the host's (little-endian) order."""
    words = [bytes.fromhex(raw[start : start + 8])[::-1] for start in range(0, len(raw), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
