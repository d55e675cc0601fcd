"""Which database a command means."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.places import database_for, find_database, state_home
from state.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and an empty working folder, so that nobody's own databases are seen."""
    monkeypatch.delenv("RATCHET_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path / "state" / "ratchet"


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_state_home_follows_xdg(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert state_home() == home
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("XDG_STATE_HOME")
        else:
            monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert state_home() == tmp_path / "home" / ".local" / "state" / "ratchet"


def test_a_target_has_its_own_folder_unless_a_database_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert database_for("box", None) == home / "box" / "state.db"
    monkeypatch.setenv("RATCHET_STATE", str(tmp_path / "env.db"))
    assert database_for("box", None) == tmp_path / "env.db"
    assert database_for("box", tmp_path / "given.db") == tmp_path / "given.db"


def test_a_folder_means_the_database_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert database_for("box", tmp_path) == tmp_path / "state.db"
    assert find_database(tmp_path) == tmp_path / "state.db"
    monkeypatch.setenv("RATCHET_STATE", str(tmp_path))
    assert find_database(None) == tmp_path / "state.db"


def test_what_is_named_wins_over_what_is_found(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made(home / "box" / "state.db")
    monkeypatch.setenv("RATCHET_STATE", str(tmp_path / "env.db"))
    assert find_database(None) == tmp_path / "env.db"
    assert find_database(tmp_path / "given.db") == tmp_path / "given.db"


def test_an_empty_variable_names_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_STATE", "")
    assert find_database(made(home / "box" / "state.db")) == home / "box" / "state.db"
    assert find_database(None) == home / "box" / "state.db"


@pytest.mark.parametrize("where", ["demo", "target"])
def test_the_only_database_there_is_needs_no_name(home: Path, where: str) -> None:
    path = Path(".ratchet/state.db") if where == "demo" else home / "box" / "state.db"
    made(path)
    assert find_database(None) == path


def test_with_none_the_error_says_where_it_looked(home: Path) -> None:
    with pytest.raises(ConfigError, match="no session database yet") as caught:
        find_database(None)
    assert str(home) in caught.value.where["looked in"]
    assert "--db" in caught.value.do


def test_with_several_all_are_named(home: Path) -> None:
    paths = [made(home / "a" / "state.db"), made(home / "b" / "state.db"), made(Path(".ratchet/state.db"))]
    with pytest.raises(ConfigError, match="more than one session database") as caught:
        find_database(None)
    assert all(str(path) in caught.value.where["found"] for path in paths)
