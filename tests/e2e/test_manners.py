"""Nights in which the users of the server are spared: drained, waited for, given back, whoever dies. All of it is real.

The balancer is an operator's script, and its own log the witness of the order of things.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.faults import VARIABLE
from state.models import SessionStatus
from tests.balancer import AT_ONCE, Balancer
from tests.e2e.rig import CANARY, FASTER, Rig, assert_at_most_one_server, rig
from tests.e2e.runs import held
from tests.e2e.test_others import somebody_uses
from tests.e2e.test_real_session import REFUSED, candidate_at_work, database
from tests.e2e.test_silence import LEASE_S, markers
from tools.manners import MARK

pytestmark = pytest.mark.real


@pytest.fixture
def host(tmp_path: Path, demo_model: Path) -> Iterator[Rig]:
    with rig(tmp_path / "mannered", demo_model) as one:
        one.start_server()
        yield one


@pytest.fixture
def balancer(host: Rig) -> Balancer:
    return Balancer(host.folder)


def assert_in_turns(host: Rig, balancer: Balancer) -> None:
    """Taken out and given back in turns, given back at the end, and no server started but while it was out."""
    told = balancer.told
    assert [one.word for one in told] == ["out", "in"] * (len(told) // 2), told
    assert not balancer.out
    assert told[0].starts == 1, "the operator's own start"
    between = [later.starts - earlier.starts for earlier, later in itertools.pairwise(told) if later.word == "out"]
    assert between == [0] * len(between), told
    assert told[-1].starts == len(host.starts())
    assert not (host.root / MARK).exists()


@pytest.mark.slow
def test_a_night_with_a_balancer_restarts_nothing_under_its_users(host: Rig, balancer: Balancer) -> None:
    session = str(host.write_session(REFUSED + balancer.section(), requests=2))
    diagnosis = json.loads(host.command("doctor", session, "--json").out.read_text())
    (check,) = [check for check in diagnosis["checks"] if check["name"] == "drain"]
    assert check["status"] == "ok" and "it is not drained now" in check["text"]
    assert balancer.told == [], "doctor only asks the probe"
    night = host.command("start", session, *database(host))
    assert night.process.returncode == 0, night.said
    assert_in_turns(host, balancer)
    assert_at_most_one_server(host)
    restored = host.command("restore", "--original", *database(host))
    assert restored.process.returncode == 0, restored.said
    assert_in_turns(host, balancer)


@pytest.mark.slow
def test_killed_while_drained_and_never_resumed_the_host_itself_gives_it_back(host: Rig, balancer: Balancer) -> None:
    original = host.argv()
    session = host.write_session(FASTER + balancer.section(), lease_s=LEASE_S, requests=2)
    agent = host.agent("start", str(session), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    agent.kill()
    assert balancer.out
    host.until(lambda: bool(markers(host)))
    assert [marker[0] for marker in markers(host)] == ["restored"]
    assert host.argv() == original
    assert host.generates()
    assert_in_turns(host, balancer)
    resumed = host.agent("resume", *database(host))
    host.until(lambda: candidate_at_work(host), resumed)
    assert [one.word for one in balancer.told] == ["out", "in", "out"]
    resumed.process.terminate()  # quicker than the whole night
    assert resumed.wait() == 4, resumed.said
    assert_in_turns(host, balancer)
    assert host.argv() == original


@pytest.mark.slow
def test_killed_between_a_drain_and_its_outcome_it_is_drained_once(host: Rig, balancer: Balancer) -> None:
    host.around_agents = {VARIABLE: "at:drain-1:after-act"}
    session = host.write_session(FASTER + balancer.section(), requests=2)
    agent = host.command("start", str(session), *database(host))
    assert agent.process.returncode == -9, agent.said
    assert [one.word for one in balancer.told] == ["out"]
    assert len(host.starts()) == 1
    host.around_agents = {}
    resumed = host.agent("resume", *database(host))
    host.until(lambda: candidate_at_work(host), resumed)
    assert [one.word for one in balancer.told] == ["out"]
    resumed.process.terminate()  # quicker than the whole night
    assert resumed.wait() == 4, resumed.said
    assert_in_turns(host, balancer)


def test_a_drain_that_fails_leaves_the_server_untouched(host: Rig, balancer: Balancer) -> None:
    before = host.listener()
    balancer.spoil("fail-out")
    agent = host.command("start", str(host.write_session(FASTER + balancer.section())), *database(host))
    assert agent.process.returncode == 5, agent.said
    assert "could not be drained for a restart" in agent.said and "no such pool" in agent.said
    assert "Traceback" not in agent.said
    assert (host.listener(), len(host.starts())) == (before, 1)
    assert balancer.told == []
    with host.store() as store:
        assert store.latest_session().status is SessionStatus.REFUSED


CLIENT = """\
import http.client, json, os, sys
folder, port, key = sys.argv[1:]
link = http.client.HTTPConnection("127.0.0.1", int(port), timeout=300)
body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}
link.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {key}"})
answer, events = link.getresponse(), 0
try:
    for line in answer:
        events += line.startswith(b"data: {")
        open(f"{folder}/first", "a").close()
finally:
    with open(f"{folder}/starts") as starts, open(f"{folder}/client.part", "w") as told:
        json.dump({"events": events, "starts": len(starts.readlines())}, told)
    os.rename(f"{folder}/client.part", f"{folder}/client")
"""
"""Somebody whose answer is under way when the server is taken out."""


@pytest.mark.slow
def test_an_answer_under_way_is_waited_for(host: Rig) -> None:
    (host.folder / "client.py").write_text(CLIENT)
    client = f'"{sys.executable}" "$here/client.py" "$here" {host.port} {CANARY}-key'
    begun = f'[ -e "$here/first" ] || {{ {client} & until [ -e "$here/first" ]; do sleep 0.05; done; }}; {AT_ONCE}'
    balancer = Balancer(host.folder, out=begun)
    session = host.write_session(FASTER + balancer.section("wait_inflight_s = 300"), close_out_blocks=1)
    agent = host.agent("start", str(session), *database(host))
    host.until(lambda: candidate_at_work(host), agent)
    told = json.loads((host.folder / "client").read_text())
    assert told["starts"] == 1, "it ended before another server was started"
    assert told["events"] >= 300, "and had all of its answer"
    agent.process.terminate()
    assert agent.wait() == 4, agent.said
    assert_in_turns(host, balancer)


@pytest.mark.slow
@pytest.mark.anyio
async def test_requests_of_others_are_counted(host: Rig) -> None:
    async with held(host, f"rps-{os.getpid()}") as target:
        assert await target.foreign_traffic(0.1) is None
        with somebody_uses(host):
            host.until(lambda: host.generates())
            said = await target.foreign_traffic(0.1)
            assert said is not None and "requests a second, where 0.1 are allowed" in said
            assert await target.foreign_traffic(1000.0) is None
        host.until(lambda: host.generates())
        assert await target.foreign_traffic(0.1) is None
