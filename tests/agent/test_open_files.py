"""Limits of open files, held against the load of a session."""

from __future__ import annotations

import pytest

from agent.open_files import refuse_hopeless, shortages
from state.errors import HostError
from state.models import Adoption, LaunchSpec, LoadPoint, Objective, ProcessId, Workload


def adoption(nofile: str | None) -> Adoption:
    limits = {} if nofile is None else {"nofile": nofile}
    spec = LaunchSpec(engine="e", program=("x",), flags={}, argv=("x",), cwd="/", user="u", limits=limits)
    return Adoption(process=ProcessId(pid=1, start_ticks=1, boot_id="b"), spec=spec)


def workload(*streams: int) -> Workload:
    points = tuple(LoadPoint(name=f"c{n}", concurrency=n, requests=n) for n in streams)
    return Workload(load_points=points, objective=Objective(at=(points[0].name,)))


@pytest.mark.parametrize(
    ("server", "client", "streams", "said"),
    [
        pytest.param("1024:1048576", 1048576, 64, [], id="the usual limit does for few streams"),
        pytest.param("1024:1048576", 1048576, 256, [("server may open only 1024 files, 1536", False)], id="soft"),
        pytest.param("unlimited:unlimited", None, 4096, [], id="no limit"),
        pytest.param(None, None, 4096, [], id="not known"),
        pytest.param("65535:65535", 1024, 512, [("client may open only 1024 files, 2048", True)], id="client"),
        pytest.param("65535:65535", 1100, 512, [("client may open only 1100 files, 2048", False)], id="enough for it"),
        pytest.param("256:256", 65535, 512, [("server may open only 256 files, 2048", True)], id="fewer than streams"),
        pytest.param("64:64", 64, 8, [("server may", False), ("client may", True)], id="both"),
    ],
)
def test_what_the_load_does_not_fit_into_is_named(
    server: str | None, client: int | None, streams: int, said: list[tuple[str, bool]]
) -> None:
    found = shortages(adoption(server), workload(1, streams), client)
    assert len(found) == len(said)
    for one, (text, hopeless) in zip(found, said, strict=True):
        assert text in one.text
        assert one.hopeless is hopeless
        assert one.do
    if any(hopeless for _, hopeless in said):
        with pytest.raises(HostError, match="may open only"):
            refuse_hopeless(found)
    else:
        refuse_hopeless(found)
