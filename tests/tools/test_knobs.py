"""Which flags of real servers are open to experiments, by their recorded help."""

from __future__ import annotations

import pytest

from agent.catalogue.entries import book
from state.models import FlagChange
from tests.tools import test_servers_llamacpp, test_servers_sglang
from tools.servers.base import FlagTable, ServerAdapter
from tools.servers.knobs import knobs

SERVERS = {
    "llamacpp": (test_servers_llamacpp.ADAPTER, test_servers_llamacpp.KNOWN),
    "sglang": (test_servers_sglang.ADAPTER, test_servers_sglang.KNOWN),
}
CLOSED = {
    "--model",
    "--model-path",
    "--host",
    "--port",
    "--api-key",
    "--log-file",
    "--log-level",
    "--trust-remote-code",
}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> tuple[ServerAdapter, FlagTable]:
    return SERVERS[request.param]


def test_what_serves_reaches_out_or_is_secret_is_not_open(server: tuple[ServerAdapter, FlagTable]) -> None:
    adapter, known = server
    names = {flag.name for flag in knobs(adapter, known)}
    assert names & (CLOSED | adapter.secret_flags) == set()
    assert len(names) > 30


def test_what_the_catalogue_tries_is_open(server: tuple[ServerAdapter, FlagTable]) -> None:
    adapter, known = server
    tried = {change.flag for entry in book(adapter.engine).experiments for change in entry.changes}
    listed = {name for name in tried if name in known.flags and not known.flags[name].removed}
    assert listed - {flag.name for flag in knobs(adapter, known)} == set()


def test_an_open_flag_may_be_dropped_and_a_closed_one_may_not(server: tuple[ServerAdapter, FlagTable]) -> None:
    adapter, known = server
    names = {flag.name for flag in knobs(adapter, known)}
    for flag in known.flags.values():
        refused = adapter.check_change(FlagChange(name=flag.name, remove=True), known)
        assert (flag.name in names) == (refused is None and not flag.removed), flag.name
