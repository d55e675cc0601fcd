"""Whether server and client may open as many files as a session's load asks for: each connection is one; pure."""

from __future__ import annotations

from collections.abc import Iterator

from state.errors import HostError
from state.models import Adoption, Frozen, Workload

RESERVE = 1024
"""For all that is no connection: libraries, devices, channels between an engine's processes."""
FEW_STREAMS = 64
"""Up to here the usual limit of 1024 does."""
SERVER = "raise `ulimit -n`, LimitNOFILE= of its unit or --ulimit of its container, and start the server anew"
CLIENT = "raise the login's hard limit on the host (limits.conf, or LimitNOFILE= of the SSH server's unit)"


class Shortage(Frozen):
    """One limit below what is wise; `hopeless` when requests are sure to fail for it."""

    text: str
    do: str
    hopeless: bool


def shortages(adoption: Adoption, workload: Workload, client: int | None) -> tuple[Shortage, ...]:
    """Limits of the adopted server and of a client's process (None: any number) that the load does not fit into."""
    return tuple(_shortages(adoption, max(point.concurrency for point in workload.load_points), client))


def refuse_hopeless(found: tuple[Shortage, ...]) -> None:
    """Raise HostError for a load that cannot be carried, before anything is touched."""
    for shortage in found:
        if shortage.hopeless:
            raise HostError(shortage.text, do=shortage.do)


def server_limit(adoption: Adoption) -> int | None:
    """How many files the server may open, None for any number or where it is not known."""
    soft = adoption.spec.limits.get("nofile", "unlimited").partition(":")[0]
    return int(soft) if soft.isdigit() else None


def _shortages(adoption: Adoption, streams: int, client: int | None) -> Iterator[Shortage]:
    wise = 2 * streams + RESERVE if streams > FEW_STREAMS else RESERVE
    server = server_limit(adoption)
    if server is not None and server < wise:
        text = f"the server may open only {server} files, {wise} are wise for {streams} streams"
        yield Shortage(text=text, do=SERVER, hopeless=server < streams)
    if client is not None and client < wise:
        text = f"the benchmark client may open only {client} files, {wise} are wise for {streams} streams"
        yield Shortage(text=text, do=CLIENT, hopeless=client < 2 * streams + FEW_STREAMS)
