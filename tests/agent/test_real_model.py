"""A real, very small language model plans a session: whatever it says, the session ends well."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from state.models import FlagChange
from tests.agent.model_sessions import KNOBS, model_session
from tests.agent.test_llm import no_proxy  # noqa: F401
from tests.agent.test_model_sessions import assert_went_well, consultations
from tests.tools.test_demo_llama_server import Running

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.slow]
PROGRAM = [sys.executable, "-m", "tools.demo.llama_server"]


@pytest.fixture
def endpoint(demo_model: Path, tmp_path: Path) -> Iterator[str]:
    """The demo's server as an OpenAI-compatible endpoint, with room for one conversation."""
    words = ("--model", str(demo_model), "--ctx-size", "8192", "--parallel", "1", "--threads", "2")
    server = Running(PROGRAM, tmp_path / "llama.log", *words).wait()
    yield f"{server.address}/v1"
    server.process.terminate()
    server.process.wait()


async def test_a_small_model_with_constrained_answers_plans_a_session(endpoint: str, tmp_path: Path) -> None:
    limits = {"api_key_env": None, "deadline_s": 300.0, "answer_tokens": 500, "max_calls": 6, "temperature": 0.0}
    with model_session(tmp_path / "session", endpoint, **limits) as runner:
        assert await runner.run() == 0
        assert_went_well(runner, tmp_path / "session")
        exchanges = runner.store.exchanges(runner.session_id)
        own = [t.experiment for t in runner.store.todos(runner.session_id) if t.experiment.source.kind == "model"]
        assert consultations(runner)
    replies = [exchange.reply for exchange in exchanges if exchange.reply is not None]
    answers = [reply.text for reply in replies if reply.finish == "stop"]
    assert [reply.silence for reply in replies if reply.silence is not None] == []
    assert all(set(json.loads(text)) == {"look_ups", "experiments", "reason"} for text in answers)
    for experiment in own:
        assert all(isinstance(one, FlagChange) for one in experiment.changes)
        assert {one.name for one in experiment.changes} <= {knob.name for knob in KNOBS}
