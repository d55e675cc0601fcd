"""Specs are equal by meaning, not by spelling; changes know what they disturb."""

from __future__ import annotations

import pydantic
import pytest

from state.models import Disruption, Effect, Experiment, LaunchSpec, Policy, canonical_json


def spec(**changes: object) -> LaunchSpec:
    base: dict[str, object] = {
        "engine": "llamacpp",
        "program": ("s",),
        "flags": {"--threads": ("2",), "--metrics": ()},
        "argv": ("s", "-t", "2", "--metrics"),
        "cwd": "/",
        "user": "u",
    }
    return LaunchSpec.model_validate(base | changes)


def test_spelling_and_order_do_not_change_the_fingerprint() -> None:
    other = spec(flags={"--metrics": (), "--threads": ("2",)}, argv=("s", "--metrics", "--threads", "2"))
    assert other.fingerprint == spec().fingerprint
    assert other.differences(spec()) == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"flags": {"--threads": ("4",), "--metrics": ()}}, "flags.--threads: 4 ≠ 2"),
        ({"flags": {"--threads": ("2",)}}, "flags.--metrics: absent ≠ set"),
        ({"env": {"OMP_NUM_THREADS": "1"}}, "env.OMP_NUM_THREADS: 1 ≠ absent"),
        ({"cwd": "/tmp"}, "cwd: /tmp ≠ /"),
        ({"limits": {"nofile": "1:2"}}, "limits.nofile: 1:2 ≠ absent"),
    ],
)
def test_every_part_counts_and_is_named(change: dict[str, object], shown: str) -> None:
    assert spec(**change).fingerprint != spec().fingerprint
    assert spec(**change).differences(spec()) == [shown]


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="thread"):
        Policy.model_validate({"thread": 1})


def test_disruption_reads_and_writes_by_name() -> None:
    experiment = Experiment.model_validate({"title": "t", "hypothesis": "h", "disruption": "hot"})
    assert experiment.disruption is Disruption.HOT
    assert '"disruption":"hot"' in experiment.model_dump_json()


def test_nan_has_no_canonical_form() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"a": float("nan")})


def test_an_effect_is_shown_in_percent() -> None:
    effect = Effect(
        estimate=0.0, low=-0.1, high=0.1, n_baseline=1, n_candidate=1, launches_baseline=1, launches_candidate=1
    )
    assert effect.percent == "+0.0 % [-9.5, +10.5]"
