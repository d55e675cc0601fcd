"""Sessions on the simulated target that a language model plans for, and the words of such models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.config import SessionConfig
from agent.config_model import ModelSection
from agent.connect import endpoint_for
from agent.session import Runner
from state.journal import FaultPoint, no_fault
from state.models import Experiment
from tests.agent.sim import ONE_POINT, SCENARIO, flag, sim_session
from tools.servers.base import KnownFlag
from tools.simulated import Scenario

KEY = "key-of-the-endpoint-4711"
ENVIRON = {"STUB_KEY": KEY}
KNOBS = (
    KnownFlag(name="--threads", takes_value=True, type="int", low=1, high=64, text="CPU threads used to generate"),
    KnownFlag(name="--poll", takes_value=True, type="int", low=0, high=100, text="how hard threads poll for work"),
    KnownFlag(name="--parallel", takes_value=True, type="int", low=1, high=32, text="server slots"),
    KnownFlag(name="--cache", takes_value=True, type="choice", choices=("f16", "q8_0"), text="type of the KV cache"),
)
TYPED = SCENARIO.model_copy(update={"knobs": KNOBS, "known_flags": SCENARIO.known_flags | {"--model"}})
"""The simulated server with a help text: `--model` is a flag that it knows and that is not open to experiments."""
LISTED = (flag("--poll", "0"),)
"""What the catalogue's part of the list holds: something that does nothing."""


def section(url: str, **fields: object) -> ModelSection:
    base = {"base_url": url, "model": "stub", "api_key_env": "STUB_KEY", "deadline_s": 20.0}
    return ModelSection.model_validate(base | fields)


def with_model(url: str, config: SessionConfig = ONE_POINT, **fields: object) -> SessionConfig:
    """The configuration with a language model beside the planner."""
    planner = config.planner.model_copy(update={"kind": "model", "model": section(url, **fields)})
    return config.model_copy(update={"planner": planner})


@contextmanager
def model_session(
    folder: Path,
    url: str,
    *experiments: Experiment,
    scenario: Scenario = TYPED,
    config: SessionConfig = ONE_POINT,
    fault: FaultPoint = no_fault,
    **fields: object,
) -> Iterator[Runner]:
    """A session whose language model answers at `url`."""
    asked = with_model(url, config, **fields)
    endpoint = endpoint_for(asked, ENVIRON)
    with sim_session(
        folder, *experiments or LISTED, scenario=scenario, config=asked, fault=fault, endpoint=endpoint
    ) as runner:
        yield runner


def change(name: str, value: str | None, kind: str = "flag", action: str = "set") -> dict[str, Any]:
    return {"kind": kind, "name": name, "action": action, "value": value}


def idea(*changes: Mapping[str, Any], gain: float = 0.3, title: str = "an idea") -> dict[str, Any]:
    return {
        "title": title,
        "hypothesis": "it may help",
        "changes": list(changes),
        "expected_gain": gain,
        "risk": "none",
    }


def plan(*ideas: Mapping[str, Any], reason: str = "because", look_ups: object = ()) -> dict[str, Any]:
    return {"look_ups": look_ups, "experiments": list(ideas), "reason": reason}


FASTER = idea(change("--threads", "2"), gain=0.5, title="two threads")
NOTHING = plan()
