"""The chaos benchmark: its draws, its wire, that each of its checks can fail, and one short round for real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.chaos import faults, invariants, program, record
from benchmarks.chaos.faults import KINDS, Fault, Plan
from benchmarks.chaos.ground import Disk, Network, ground, lacking
from benchmarks.chaos.invariants import Look
from benchmarks.chaos.link import Link
from benchmarks.chaos.story import Round
from tests.e2e.rig import PROJECT

ROUNDS = 50
SHORT = """
[[experiments]]
id = "refused"
title = "Values in 8 bits without flash attention"
hypothesis = "the server refuses to start like this"
changes = [{ kind = "flag", name = "--cache-type-v", value = "q8_0" }]
"""


# --- what is drawn --------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_rounds_again() -> None:
    assert [faults.plan(7, n) for n in range(1, 20)] == [faults.plan(7, n) for n in range(1, 20)]
    assert [faults.plan(7, n).faults for n in range(1, 20)] != [faults.plan(8, n).faults for n in range(1, 20)]


def test_fifty_rounds_leave_no_fault_and_no_early_or_late_moment_out() -> None:
    plans = [faults.plan(1, number) for number in range(1, ROUNDS + 1)]
    first = Counter(plan.faults[0].kind.name for plan in plans)
    assert set(first) == set(KINDS)
    assert min(first.values()) >= ROUNDS // len(KINDS)
    moments = {plan.faults[0].after_events for plan in plans}
    assert min(moments) <= 1
    assert max(moments) >= faults.EVENTS - 2
    assert any(len(plan.faults) == 2 for plan in plans)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_can_be_asked_for(name: str) -> None:
    (only,) = faults.plan(1, 3, only=name).faults
    assert only.kind.name == name


# --- the wire -------------------------------------------------------------------------------------------------------


@pytest.fixture
def wire() -> Iterator[tuple[Link, socket.socket]]:
    """A link to a server that echoes, and one connection through it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo(one: socket.socket) -> None:
        with one:
            while data := one.recv(4096):
                one.sendall(data)

    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(one,), daemon=True).start()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    link = Link(listener.getsockname()[1])
    with socket.create_connection(("127.0.0.1", link.port), 10) as near:
        yield link, near
    link.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    server.join(10)


def echoed(near: socket.socket, wait_s: float = 10.0) -> bytes:
    near.settimeout(wait_s)
    near.sendall(b"ping")
    return near.recv(4)


def test_a_stall_holds_bytes_back_and_loses_none(wire: tuple[Link, socket.socket]) -> None:
    link, near = wire
    assert echoed(near) == b"ping"
    link.stall()
    with pytest.raises(TimeoutError):
        echoed(near, 0.3)
    link.flow()
    near.settimeout(10)
    assert near.recv(4) == b"ping"


def test_a_stranded_connection_is_told_nothing_while_new_ones_work(wire: tuple[Link, socket.socket]) -> None:
    link, near = wire
    assert echoed(near) == b"ping"
    link.strand()
    with pytest.raises(TimeoutError):
        echoed(near, 0.3)
    with socket.create_connection(("127.0.0.1", link.port), 10) as another:
        assert echoed(another) == b"ping"


def test_a_cut_ends_connections_and_new_ones_work(wire: tuple[Link, socket.socket]) -> None:
    link, near = wire
    assert echoed(near) == b"ping"
    link.cut()
    near.settimeout(10)
    try:
        left = near.recv(1)
    except ConnectionError:
        left = b""
    assert left == b""
    with socket.create_connection(("127.0.0.1", link.port), 10) as another:
        assert echoed(another) == b"ping"


def test_a_delayed_wire_still_carries_everything(wire: tuple[Link, socket.socket]) -> None:
    link, near = wire
    link.delay(0.05)
    assert echoed(near) == b"ping"


# --- small disks and lossy networks ---------------------------------------------------------------------------------


@pytest.mark.skipif(lacking("host-disk") is not None, reason=str(lacking("host-disk")))
def test_a_full_disk_takes_no_byte_until_it_is_emptied(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk")
    try:
        (disk.folder / "kept").write_text("kept")
        disk.fill()
        with pytest.raises(OSError, match="No space"):
            (disk.folder / "more").write_bytes(b"x")
        disk.empty()
        (disk.folder / "more").write_bytes(b"x")
    finally:
        disk.close()
    assert (disk.folder / "kept").read_text() == "kept"
    assert not disk.folder.is_mount()


@pytest.mark.skipif(lacking("network") is not None, reason=str(lacking("network")))
def test_a_namespace_reaches_us_over_its_own_wire_and_is_gone_afterwards() -> None:
    network = Network()
    try:
        ask = (
            "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 20).getsockname()[0])"
        )
        with socket.create_server((network.address, 0)) as listener:
            port = str(listener.getsockname()[1])
            command = [*network.within, sys.executable, "-c", ask, network.address, port]
            network.lose(5)
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
                listener.settimeout(30)
                listener.accept()[0].close()
                assert asking.stdout is not None
                assert asking.stdout.read().strip() == f"{network.address.rpartition('.')[0]}.2"
    finally:
        network.close()
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert network.outer not in links


# --- a round, and what its checks would find ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Look]:
    """A short session whose agent is killed in its first benchmark, looked at while its host still stands."""
    fault = Fault(KINDS["agent-kill"], after_events=1, delay_s=0.5, lasts_s=0.0, amount=0)
    plan = Plan(1, "fixed/1", (fault,), (0.0,))
    with ground(tmp_path_factory.mktemp("chaos") / "round", demo_model, experiments=SHORT) as made:
        a_round = Round(plan, made)
        story = a_round.play()
        seen = record.read(made.host.database)
        assert seen is not None
        yield Look(plan, made, story, seen, a_round.original)


@pytest.mark.real
def test_a_killed_agent_breaks_nothing(played: Look) -> None:
    assert [fault.hit_s is not None for fault in played.plan.faults] == [True]
    assert [run.exit for run in played.story.runs] == [-9, 0]
    broken = invariants.check(played.plan, played.ground, played.story, played.original, but=("I9",))
    assert broken == []


def lost_event(look: Look) -> None:
    look.seen.events.pop()


def changed_event(look: Look) -> None:
    look.story.snapshots[0][0]["body"] = "{}"


def launched_twice(look: Look) -> None:
    starts = look.host.folder / "starts"
    starts.write_text(starts.read_text() + starts.read_text().splitlines()[-1] + "\n")


def never_intended(look: Look) -> None:
    look.seen.effects.pop()


def false_figure(look: Look) -> None:
    valid = next(row for row in look.seen.measurements if row["status"] == "valid")
    result = look.job(valid["id"]) / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"completed": 3}))


def left_file(look: Look) -> None:
    (look.host.root / "something.part").touch()


def open_lease(look: Look) -> None:
    for path in (look.host.root / "lease").glob("done-*"):
        path.unlink()


def killed_bystander(look: Look) -> None:
    os.kill(look.ground.bystanders[0][0].pid, signal.SIGKILL)
    look.ground.bystanders[0][0].wait()


def false_code(look: Look) -> None:
    look.story.runs[0].exit = 1


def no_report(look: Look) -> None:
    for path in look.host.database.parent.glob("report-*.md"):
        path.unlink()


def hung_server(look: Look) -> None:
    look.ground.signal_server(signal.SIGKILL)
    look.host.until(lambda: look.host.listener() is None)


BREAKS: dict[Callable[[Look], None], str] = {
    lost_event: "I2",
    changed_event: "I2",
    never_intended: "I4",
    false_figure: "I5",
    left_file: "I6",
    open_lease: "I6",
    killed_bystander: "I7",
    false_code: "I10",
    no_report: "I10",
    launched_twice: "I3",
    hung_server: "I1",
}


@pytest.mark.real
@pytest.mark.parametrize("harm", BREAKS, ids=lambda harm: harm.__name__)
def test_each_check_can_fail(played: Look, harm: Callable[[Look], None]) -> None:
    """Run after the round, in this order: what is harmed is harmed for good, and only the named check is asked."""
    harm(played)
    assert list(invariants.LOOKS[BREAKS[harm]](played)) != []


# --- the program ----------------------------------------------------------------------------------------------------


def test_rounds_that_are_there_are_not_played_again(tmp_path: Path) -> None:
    for number in (1, 2):
        plan = faults.plan(5, number, only="cut")
        figures = {**program.told(plan), "skipped": None, "broken": [], "resumes": 1, "seconds": 60.0}
        figures |= {"exits": [4, 0], "end": "done, kept"}
        (tmp_path / f"round-5-{number}-cut.json").write_text(json.dumps(figures))
    command = [
        sys.executable,
        str(PROJECT / "benchmarks" / "chaos.py"),
        "--seed",
        "5",
        "--only",
        "cut",
        "--rounds",
        "2",
    ]
    told = tmp_path / "told.json"
    done = subprocess.run(
        [*command, "--check", "--out", str(tmp_path), "--json", str(told)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("chaos: 2 of 2 rounds of seed 5 held every invariant, 0 broken")
    assert len(json.loads(told.read_text())["rows"]) == 2


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut", "server-kill"])
def test_a_whole_round(tmp_path: Path, demo_model: Path, name: str) -> None:
    figures = program.play(faults.plan(1, 1, only=name), tmp_path / "round", demo_model)
    assert figures["broken"] == []
