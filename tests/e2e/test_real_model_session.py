"""A real, very small language model plans a real session: llama.cpp asks llama.cpp, over SSH, with nothing made up.

What it says is mostly nonsense. What fits the schema is real flags with values that could be right, so some of it is
tried; the rest is refused, and the session ends as any other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.catalogue.entries import book
from agent.verify import verify
from state.exchanges import Exchange
from state.models import Disruption, SessionStatus, Todo
from state.store import Store
from tests.agent.test_llm import no_proxy  # noqa: F401
from tests.e2e.rig import Rig, assert_at_most_one_server, rig
from tests.tools.test_demo_llama_server import Running

pytestmark = [pytest.mark.real, pytest.mark.slow]
PROGRAM = [sys.executable, "-m", "tools.demo.llama_server"]
PLANNER = """[planner]
skip = {skip}
refine = false
kind = "model"

[planner.model]
base_url = "{url}"
model = "smollm2"
temperature = 1.2
deadline_s = 280
answer_tokens = 700
max_calls = 14
max_proposals = 4
min_per_answer = 1
look_ups = false

[policy.budget]
time = "20m"
"""


class Night(NamedTuple):
    """What is left of the session, and what was said."""

    host: Rig
    code: int
    replay: list[dict[str, Any]]
    log: str

    @property
    def consulted(self) -> list[dict[str, Any]]:
        """The conversations, as `replay` tells them."""
        return [entry for entry in self.replay if entry["kind"] == "consult"]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Night]:
    folder = tmp_path_factory.mktemp("planned")
    words = ("--model", str(demo_model), "--ctx-size", "8192", "--parallel", "1", "--threads", "2")
    endpoint = Running(PROGRAM, folder / "llm.log", *words).wait()
    try:
        with rig(folder / "host", demo_model) as host:
            host.start_server()
            session = host.write_session(max_blocks=2, concurrency=2, requests=2)
            skip = json.dumps([one.id for entry in book("llamacpp").experiments for one in entry.each()] + ["numerics"])
            planner = PLANNER.format(skip=skip, url=f"{endpoint.address}/v1")
            session.write_text(session.read_text().partition("[planner]")[0] + planner)
            database = ("--db", str(host.database))
            agent = host.agent("start", str(session), *database)
            code = agent.wait(900)
            replay = json.loads(host.command("replay", "--json", *database).out.read_text())
            yield Night(host, code, replay, agent.said)
    finally:
        endpoint.process.terminate()
        endpoint.process.wait()


@pytest.fixture
def store(night: Night) -> Iterator[Store]:
    with night.host.store() as opened:
        yield opened


def own(store: Store) -> list[Todo]:
    todos = store.todos(store.latest_session().id)
    return [todo for todo in todos if todo.experiment.source.kind == "model"]


def exchanges(store: Store) -> list[Exchange]:
    return store.exchanges(store.latest_session().id)


def test_the_session_ends_well(night: Night, store: Store) -> None:
    row = store.latest_session()
    assert (night.code, row.status) == (0, SessionStatus.DONE), night.log
    assert night.host.generates()
    assert_at_most_one_server(night.host)
    assert verify(store, row.id).clean


def test_at_least_three_of_its_proposals_are_run(night: Night, store: Store) -> None:
    sid = store.latest_session().id
    begun = {trial.experiment_id for trial in store.trials(sid)}
    judged = store.verdicts(sid)
    tried = [todo.id for todo in own(store) if todo.id in judged and todo.id in begun]
    assert len(tried) >= 3, night.consulted
    assert all(todo.experiment.disruption is Disruption.RESTART for todo in own(store))


def test_each_of_its_answers_has_the_form_that_was_asked_for(store: Store) -> None:
    asked = exchanges(store)
    assert {one.ask.form for one in asked} == {"exact"}
    whole = [one.reply for one in asked if one.reply is not None and one.reply.finish == "stop"]
    assert whole
    for reply in whole:
        said = json.loads(reply.text)
        assert set(said) == {"look_ups", "experiments", "reason"}
        assert 1 <= len(said["experiments"]) <= 3


def test_its_nonsense_is_refused_in_the_log(night: Night, store: Store) -> None:
    """A model of this size repeats itself: what it says twice is refused, as is what does not go together."""
    answers = [one.reply.text for one in exchanges(store) if one.reply is not None and one.reply.finish == "stop"]
    proposed = sum(len(json.loads(text)["experiments"]) for text in answers)
    refused = sum(entry["reason"].count("refused: ") for entry in night.consulted)
    assert len(own(store)) + refused == proposed, night.consulted


def test_the_log_shows_each_exchange(night: Night, store: Store) -> None:
    shown = {item["id"]: item["says"] for entry in night.consulted for item in entry["evidence"]}
    assert list(shown) == [one.id for one in exchanges(store)]
    assert all(text.startswith("smollm2 asked with planner 2 (") for text in shown.values()), shown
