"""The report's table of the machine: parent beside candidate, and the server's counters where the two sides differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.report import markdown
from state import events as ev
from state.models import Arm, Measurement, Telemetry
from state.replay import decision_log
from state.store import Store
from tests.agent.sessions import FASTER, finished

Seen = Callable[[Measurement], dict[str, Any]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("plain"), FASTER)


def told(plain: Path, folder: Path, seen: Seen) -> tuple[list[str], list[dict[str, Any]]]:
    """Report and decision log of the same session, had the sampler seen this beside each run."""
    with Store.read(plain) as store:
        session = store.latest_session().id
        events = [stored.event for stored in store.events(session) if stored.session_id == session]
    with Store.write(folder / "state.db") as store:
        for event in events:
            if isinstance(event, ev.MeasurementClosed):
                run = event.measurement
                readings = seen(run)
                counts = {"server_requests": readings.pop("server_requests", None)}
                metrics = None if run.metrics is None else run.metrics.model_copy(update=counts)
                update = {"telemetry": Telemetry.model_validate(readings), "metrics": metrics}
                event = event.model_copy(update={"measurement": run.model_copy(update=update)})
            store.append(session, event)
        return markdown(store, session).splitlines(), decision_log(store, session)


def watts(mean: float) -> dict[str, Any]:
    span = {"mean": mean, "min": mean, "max": mean}
    return {"gpu": [{"index": "0", "power_w": span, "util_pct": {"mean": 98.0, "min": 98.0, "max": 98.0}}]}


def row(lines: list[str], title: str) -> str:
    section = lines[lines.index("## Machine") :]
    (found,) = [line for line in section if line.startswith(f"| {title} |")]
    return found


def test_each_experiment_has_its_readings_beside_its_parents(plain: Path, tmp_path: Path) -> None:
    lines, log = told(plain, tmp_path, lambda run: watts(125.0 if run.arm is Arm.CANDIDATE else 330.0))
    assert row(lines, "--threads 2") == "| --threads 2 | 330 W, 98 % | 125 W, 98 % |"
    says = [item["says"] for entry in log for item in entry["evidence"] if item["id"].startswith("M")]
    assert says and all(", 98 %" in text for text in says)
    assert any("; 125 W" in text for text in says)


def test_counters_are_named_where_the_two_sides_differ(plain: Path, tmp_path: Path) -> None:
    def seen(run: Measurement) -> dict[str, Any]:
        ours = run.arm is Arm.CANDIDATE
        served = 0 if run.metrics is None else run.metrics.completed
        counts = {"preemptions": 12 if ours else 0, "server_requests": served - ours}
        return {**counts, "server_cpu_cores": 2.0}

    lines, _ = told(plain, tmp_path, seen)
    found = row(lines, "--threads 2")
    assert "| server on 2.0 cores, 0 preemptions a run, 1.00 requests counted for each completed |" in found
    assert "| server on 2.0 cores, 12 preemptions a run, 0.94 requests counted for each completed |" in found


def test_counters_that_agree_are_not_worth_a_word(plain: Path, tmp_path: Path) -> None:
    lines, _ = told(plain, tmp_path, lambda run: {"preemptions": 3, "server_cpu_cores": 2.0})
    assert row(lines, "--threads 2") == "| --threads 2 | server on 2.0 cores | server on 2.0 cores |"


def test_where_nothing_was_observed_there_is_no_table(plain: Path) -> None:
    with Store.read(plain) as store:
        assert "## Machine" not in markdown(store, store.latest_session().id)
