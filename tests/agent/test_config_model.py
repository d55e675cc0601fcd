"""The section of a language model, and the key that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from agent.config import SessionConfig, load
from agent.config_model import NO_KEY, api_key
from agent.connect import endpoint_for
from state.errors import ConfigError
from tests.agent.model_sessions import section, with_model
from tests.agent.sim import CONFIG

DATA = Path(__file__).parents[1] / "data" / "config"


@pytest.mark.parametrize(
    "url",
    ["llm.example.net", "ftp://x/v1", "https://user:pass@x/v1", "https://x/v1?key=1", "https://", "http://[::1", "/v1"],
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="expected the address of an OpenAI-compatible API"):
        section(url)


def test_a_language_model_needs_its_section(tmp_path: Path) -> None:
    path = tmp_path / "session.toml"
    path.write_text((DATA / "least.toml").read_text() + '\n[planner]\nkind = "model"\n')
    with pytest.raises(ConfigError, match=r"needs a section \[planner\.model\]"):
        load(path)


def test_keys_come_from_a_variable_or_a_file(tmp_path: Path) -> None:
    assert api_key(section("http://x/v1"), {"STUB_KEY": " sk-1 \n"}) == "sk-1"
    (tmp_path / "key").write_text("sk-2\n")
    named = section("http://x/v1", api_key_env=None, api_key_file=str(tmp_path / "key"))
    assert api_key(named, {}) == "sk-2"
    assert api_key(section("http://x/v1", api_key_env=None), {}) == NO_KEY


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "sk-\x00", "schlüssel", "a\nb"])
def test_what_is_no_key_is_said_before_anything_is_begun_and_never_repeated(value: str | None) -> None:
    environ = {} if value is None else {"STUB_KEY": value}
    with pytest.raises(ConfigError) as refused:
        api_key(section("http://x/v1"), environ)
    assert "STUB_KEY" in str(refused.value)
    assert not value or not value.strip() or value not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    named = section("http://x/v1", api_key_env=None, api_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none"):
        api_key(named, {})


def test_only_a_session_that_asks_for_a_language_model_has_one() -> None:
    asked = with_model("http://x/v1", CONFIG)
    assert endpoint_for(CONFIG, {}) is None
    assert endpoint_for(asked, {}) is not None
    selftest = asked.model_copy(update={"planner": asked.planner.model_copy(update={"kind": "selftest"})})
    assert endpoint_for(selftest, {}) is None


def test_a_stored_configuration_of_an_older_version_has_none() -> None:
    stored = CONFIG.model_dump(mode="json")
    del stored["planner"]["model"]
    assert SessionConfig.model_validate(stored).planner.model is None
