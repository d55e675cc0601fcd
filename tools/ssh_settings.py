"""How to reach a host over SSH, as data; it must stay importable without asyncssh and must not connect."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from state.models import Frozen


class SshSettings(Frozen):
    """Everything needed to reach a host; `~/.ssh/config` is not read, so that what is used is what is written here."""

    host: str
    port: int = Field(default=22, ge=1, le=65535)
    user: str
    identity_file: Path | None = Field(default=None, description="private key; None: the agent and ~/.ssh/id_*")
    known_hosts: Path | None = Field(default=None, description="None: ~/.ssh/known_hosts and the system's own file")
    connect_timeout_s: float = Field(default=15.0, gt=0)
    keepalive_s: float = Field(default=5.0, gt=0, description="interval of the checks that the peer still answers")
    keepalive_max: int = Field(default=3, ge=1, description="unanswered checks after which a connection is lost")
    max_channels: int = Field(default=6, ge=1, description="commands at a time; the server's MaxSessions is often 10")
    reconnect_s: float = Field(default=60.0, ge=0, description="how long a lost host is sought again")

    @property
    def address(self) -> str:
        """`host`, or `host:port` when the port is not 22."""
        return self.host if self.port == 22 else f"{self.host}:{self.port}"

    @property
    def known_as(self) -> str:
        """How known_hosts files spell this host."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def known_hosts_files(self) -> tuple[Path, ...]:
        """Where this host's key is looked up."""
        if self.known_hosts is not None:
            return (self.known_hosts.expanduser(),)
        return (Path.home() / ".ssh" / "known_hosts", Path("/etc/ssh/ssh_known_hosts"))

    def where(self) -> dict[str, object]:
        """The facts that every error about the connection carries."""
        return {"host": self.host, "port": self.port, "user": self.user}
