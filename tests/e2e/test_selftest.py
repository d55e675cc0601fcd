"""`selftest` on a real server: it restarts nothing unless it is asked to, and leaves the server as it found it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import Rig, rig

pytestmark = pytest.mark.real
FEW = ("--runs", "4", "--nights", "60", "--experiments", "5", "--json")


def told(host: Rig, *options: str) -> dict[str, Any]:
    agent = host.command("selftest", str(host.write_session()), "--db", str(host.database), *FEW, *options)
    assert agent.process.returncode == 0, agent.said
    answer: dict[str, Any] = json.loads(agent.out.read_text())
    return answer


def test_it_restarts_nothing_and_answers_with_the_noise_of_the_running_server(tmp_path: Path, demo_model: Path) -> None:
    with rig(tmp_path / "host", demo_model) as host:
        pid = host.start_server()
        answer = told(host)
        assert host.listener() == pid
        assert len(host.starts()) == 1
        assert answer["launches"] == 1
        assert answer["runs"] >= 4
        assert 0 < answer["run_spread"]["low"] <= answer["run_spread"]["high"]
        assert len(answer["found"]) >= 5
        again = host.command("selftest", "--of", answer["session"], "--db", str(host.database), "--nights", "60")
        assert again.process.returncode == 0, again.said
        assert "smallest gain that is found" in again.said
        assert host.listener() == pid


@pytest.mark.slow
def test_each_relaunch_is_of_the_unchanged_server(tmp_path: Path, demo_model: Path) -> None:
    with rig(tmp_path / "host", demo_model) as host:
        host.start_server()
        original = host.argv()
        answer = told(host, "--relaunches", "2")
        assert host.argv() == original
        assert host.generates()
        assert len(host.starts()) >= 3
        assert answer["launches"] >= 3
