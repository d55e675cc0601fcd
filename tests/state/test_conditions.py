"""What the sampler saw, in words."""

from __future__ import annotations

from typing import Any

import pytest

from state.conditions import machine, preemptions, throttled
from state.models import Telemetry


def span(mean: float, most: float | None = None) -> dict[str, float]:
    return {"mean": mean, "min": mean, "max": mean if most is None else most}


def board(**fields: Any) -> dict[str, Any]:
    whole = {
        "index": "0",
        "power_w": span(330.4),
        "power_limit_w": span(700.0),
        "sm_mhz": span(2301.0),
        "util_pct": span(98.0),
        "memory_mb": span(70000.0, 72704.0),
        "temperature_c": span(60.0, 61.0),
        "throttle_reasons": ["0x0000000000000001"],
    }
    return whole | fields


def seen(*boards: dict[str, Any], **fields: Any) -> Telemetry:
    return Telemetry.model_validate({"gpu": boards or None, **fields})


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ((seen(board()),), "330 W of 700 W, 98 %, 2301 MHz, 71.0 GiB, 61 °C"),
        (
            (seen(board(throttle_reasons=["0x0000000000000004", "0x0000000000000060"])),),
            "330 W of 700 W, 98 %, 2301 MHz, 71.0 GiB, 61 °C,"
            " slowed by power cap, software thermal limit, hardware thermal limit",
        ),
        (
            (seen(board(), board(index="1", power_w=span(130.4))),),
            "2 GPUs, each 230 W of 700 W, 98 %, 2301 MHz, 71.0 GiB, 61 °C",
        ),
        ((seen(board()), seen(board(util_pct=span(50.0)))), "330 W of 700 W, 74 %, 2301 MHz, 71.0 GiB, 61 °C"),
        ((seen({"index": "0"}),), ""),
        ((seen(board(power_limit_w=None, sm_mhz=None, memory_mb=None, temperature_c=None)),), "330 W, 98 %"),
        ((seen(server_cpu_cores=3.94), seen(server_cpu_cores=4.06)), "server on 4.0 cores"),
        ((seen(),), ""),
        ((), ""),
    ],
)
def test_the_machine_in_words(runs: tuple[Telemetry, ...], said: str) -> None:
    assert machine(*runs) == said


def test_idleness_and_clocks_that_somebody_set_are_no_throttling() -> None:
    assert throttled(seen(board(throttle_reasons=["0x0000000000000113", "[N/A]", ""]))) == ()


def test_preemptions_are_averaged_over_the_runs_that_tell() -> None:
    assert preemptions([seen(preemptions=4), seen(), seen(preemptions=0)]) == 2.0
    assert preemptions([seen()]) is None
