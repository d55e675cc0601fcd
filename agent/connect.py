"""From a session file to live things: the target behind SSH, the planner, the language model; chosen here only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent.config import ServerSection, SessionConfig
from agent.planners.base import Endpoint, Planner
from agent.planners.catalogue import CataloguePlanner
from agent.planners.selftest import SelftestPlanner
from tools.benches.choice import bench_client
from tools.remote import RemoteSettings, RemoteTarget
from tools.servers.base import ServerAdapter
from tools.servers.generic import Generic
from tools.servers.llamacpp import LlamaCpp
from tools.servers.sglang import Sglang
from tools.servers.vllm import Vllm
from tools.ssh import SshHost
from tools.ssh_settings import SshSettings

ADAPTERS: dict[str, Callable[[], ServerAdapter]] = {"llamacpp": LlamaCpp, "sglang": Sglang, "vllm": Vllm}


def adapter_for(server: ServerSection) -> ServerAdapter:
    """The adapter of the engine that the session file names."""
    return Generic(server.generic, server.url) if server.engine == "generic" else ADAPTERS[server.engine]()


async def connect(config: SessionConfig, kind: type[RemoteTarget] = RemoteTarget) -> RemoteTarget:
    """A connected target. Raises HostUnreachable, HostKeyRejected, LoginRejected."""
    at, server = config.target, config.server
    host = await SshHost.connect(
        SshSettings(
            host=at.host, port=at.port, user=at.user, identity_file=at.identity_file, known_hosts=at.known_hosts
        )
    )
    settings = RemoteSettings(
        name=at.name,
        directory=at.directory,
        python=at.python,
        url=server.url,
        port=server.port,
        model=server.model,
        start_deadline_s=server.start_deadline_s,
        stop_grace_s=server.stop_grace_s,
        lease_s=at.lease_s,
        pid=server.pid,
        api_key_file=server.api_key_file,
        draining=config.manners.draining,
    )
    return kind(host, adapter_for(server), settings, bench_client(config.workload))


def planner_for(config: SessionConfig) -> Planner:
    """The planner that the session file asks for, with the person's own experiments first."""
    if config.planner.kind == "selftest":
        return SelftestPlanner(config.planner.relaunches)
    return CataloguePlanner(
        config.planner.only, config.planner.skip, tuple(own.experiment() for own in config.experiments)
    )


def endpoint_for(config: SessionConfig, environ: Mapping[str, str]) -> Endpoint | None:
    """The language model that the session file asks for, None for a session without one."""
    section = config.planner.model
    if config.planner.kind != "model" or section is None:
        return None
    # Its client takes a second to load, which no session without a language model shall pay.
    from agent.planners.llm import ChatEndpoint  # noqa: PLC0415

    return ChatEndpoint(section, environ)
