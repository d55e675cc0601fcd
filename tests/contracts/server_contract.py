"""What every ServerAdapter must do; a subclass gives the fixture `case` with its engine's own texts and flags."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import NamedTuple

import pytest

from state.errors import PolicyRefused, ServerError
from state.models import EnvChange, FlagChange, HotCall, LaunchSpec
from tools.servers.base import Declared, FlagTable, HttpAnswer, ServerAdapter, make_spec


class ServerCase(NamedTuple):
    """An engine with recorded texts, a command line that it accepts, and flags to play with."""

    adapter: ServerAdapter
    help_text: str
    version_text: str
    version: str
    argv: tuple[str, ...]
    program: tuple[str, ...]
    number: str
    """A flag with an integer value that `argv` does not hold."""
    switch: str
    """A flag without a value that `argv` does not hold, with an opposite."""
    secret: str
    """A secret flag that `argv` does not hold."""
    own_variable: tuple[str, str]
    """A variable of the engine with a good value that no flag of `argv` overrules."""

    @property
    def known(self) -> FlagTable:
        return self.adapter.parse_help(self.help_text)


def keyed(text: str) -> str:
    return hmac.new(b"a test's key", text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()[:16]


def declared(case: ServerCase, *more: str, **environ: str) -> Declared:
    return make_spec(
        case.adapter,
        case.known,
        argv=(*case.argv, *more),
        cwd="/srv",
        user="serve",
        environ={"PATH": "/bin", **environ},
        limits={"nofile": "1024:4096"},
        keyed=keyed,
    )


def spec_of(case: ServerCase, *more: str, **environ: str) -> LaunchSpec:
    return declared(case, *more, **environ).spec


class ServerContract:
    # --- help and version

    def test_every_spelling_of_the_help_belongs_to_one_flag(self, case: ServerCase) -> None:
        known = case.known
        words = [word for flag in known.flags.values() for word in (flag.name, *flag.aliases)]
        assert len(words) == len(set(words)) > len(known.flags)
        assert all(known.flags[name].name == name for name in known.flags)
        assert all(known.find(word) is not None for word in words)

    def test_opposites_know_each_other(self, case: ServerCase) -> None:
        switches = [flag for flag in case.known.flags.values() if flag.opposite]
        assert switches
        assert all(case.known.flags[flag.opposite or ""].opposite == flag.name for flag in switches)

    @pytest.mark.parametrize("text", ["", "Segmentation fault\n", "usage: none of your business\n"])
    def test_a_help_without_options_is_an_error_not_an_empty_table(self, case: ServerCase, text: str) -> None:
        with pytest.raises(ServerError):
            case.adapter.parse_help(text)

    def test_version_is_read_or_an_error(self, case: ServerCase) -> None:
        assert case.adapter.parse_version(case.version_text) == case.version
        with pytest.raises(ServerError):
            case.adapter.parse_version("nothing of that kind\n")

    def test_commands_start_with_the_program(self, case: ServerCase) -> None:
        shown = case.adapter.help_command(case.program)
        assert shown[: len(case.program)] == case.program == case.adapter.program(case.argv)
        assert len(shown) > len(case.program)
        assert case.adapter.version_command(case.program)[0] == case.program[0]

    # --- reading and editing

    def test_the_program_is_told_from_its_flags(self, case: ServerCase) -> None:
        reading = case.adapter.read_argv(case.argv, case.known)
        assert reading.program == case.program
        assert set(reading.flags) <= set(case.known.flags)
        assert len(reading.flags) > 1

    def test_other_spellings_are_the_same_configuration(self, case: ServerCase) -> None:
        known = case.known
        number = known.flags[case.number]
        readings = [case.adapter.read_argv((*case.argv, word, "7"), known) for word in (number.name, *number.aliases)]
        assert all(reading == readings[0] for reading in readings)
        assert readings[0].flags[case.number] == ("7",)

    def test_a_foreign_word_is_an_error_that_names_it(self, case: ServerCase) -> None:
        with pytest.raises(ServerError, match="--no-such-flag-at-all"):
            case.adapter.read_argv((*case.argv, "--no-such-flag-at-all"), case.known)

    def test_setting_a_flag_changes_that_flag_only(self, case: ServerCase) -> None:
        change = FlagChange(name=case.number, value="7")
        before = case.adapter.read_argv(case.argv, case.known)
        edited = case.adapter.edit_argv(case.argv, case.known, change)
        after = case.adapter.read_argv(edited, case.known)
        assert after.flags == before.flags | {case.number: ("7",)}
        assert edited[: len(case.argv)] == case.argv
        assert case.adapter.edit_argv(edited, case.known, change) == edited

    def test_setting_replaces_every_alias_in_place(self, case: ServerCase) -> None:
        number = case.known.flags[case.number]
        argv = (*case.argv, number.aliases[0], "3", number.name, "4", case.switch)
        edited = case.adapter.edit_argv(argv, case.known, FlagChange(name=case.number, value="7"))
        assert edited == (*case.argv, number.name, "7", case.switch)

    def test_dropping_undoes_setting(self, case: ServerCase) -> None:
        edited = case.adapter.edit_argv(case.argv, case.known, FlagChange(name=case.number, value="7"))
        back = case.adapter.edit_argv(edited, case.known, FlagChange(name=case.number, remove=True))
        assert back == case.argv

    def test_a_switch_drives_out_its_opposite(self, case: ServerCase) -> None:
        switch = case.known.flags[case.switch]
        argv = (*case.argv, switch.name)
        edited = case.adapter.edit_argv(argv, case.known, FlagChange(name=switch.opposite or ""))
        assert edited == (*case.argv, switch.opposite)

    # --- specs

    def test_secrets_never_reach_the_spec(self, case: ServerCase) -> None:
        spec, secrets, _ = declared(case, case.secret, "hunter2-hunter2", HF_TOKEN="also-a-secret", SECRET="s3cr3t")
        stored = spec.model_dump_json()
        assert not any(word in stored for word in ("hunter2", "also-a-secret", "s3cr3t"))
        assert sorted(secrets.values()) == ["/bin", "also-a-secret", "hunter2-hunter2", "s3cr3t"]
        assert [secrets.get(word, word) for word in spec.argv] == [*case.argv, case.secret, "hunter2-hunter2"]
        assert {name: secrets[value] for name, value in spec.hidden_env.items()} == {
            "PATH": "/bin",
            "HF_TOKEN": "also-a-secret",
            "SECRET": "s3cr3t",
        }

    def test_a_changed_secret_is_another_configuration(self, case: ServerCase) -> None:
        one, two, again = (spec_of(case, case.secret, word) for word in ("first", "second", "first"))
        assert one.fingerprint != two.fingerprint
        assert one.fingerprint == again.fingerprint

    def test_equal_secrets_under_two_names_do_not_look_equal(self, case: ServerCase) -> None:
        hidden = spec_of(case, A_TOKEN="same", B_TOKEN="same").hidden_env
        assert hidden["A_TOKEN"] != hidden["B_TOKEN"]

    def test_what_belongs_to_a_login_is_left_out_and_noted(self, case: ServerCase) -> None:
        spec, _, ignored = declared(case, PWD="/x", SSH_CLIENT="1 2 3", RATCHET_JOB="k", INVOCATION_ID="f", _="/bin/x")
        assert spec.fingerprint == spec_of(case).fingerprint
        assert ignored == ("INVOCATION_ID", "PWD", "RATCHET_JOB", "SSH_CLIENT", "_")

    def test_the_engines_own_variables_are_in_clear(self, case: ServerCase) -> None:
        name, value = case.own_variable
        assert spec_of(case, **{name: value}).env == {name: value}

    def test_bytes_that_json_cannot_hold_are_refused(self, case: ServerCase) -> None:
        with pytest.raises(ServerError, match="UTF-8"):
            spec_of(case, **{case.own_variable[0]: "caf\udce9"})

    # --- changes

    def test_apply_is_pure_and_changes_the_fingerprint(self, case: ServerCase) -> None:
        spec = spec_of(case)
        before = spec.fingerprint, spec.model_dump()
        name, value = case.own_variable
        changes = (
            FlagChange(name=case.number, value="7"),
            FlagChange(name=case.switch),
            EnvChange(name=name, value=value),
        )
        changed = case.adapter.apply(spec, changes, case.known)
        assert (spec.fingerprint, spec.model_dump()) == before
        assert changed.fingerprint != before[0]
        assert changed.flags == spec.flags | {case.number: ("7",), case.switch: ()}
        assert changed.env == {name: value}
        assert case.adapter.apply(changed, (EnvChange(name=name),), case.known).env == {}

    def test_the_order_of_changes_makes_no_other_configuration(self, case: ServerCase) -> None:
        spec = spec_of(case)
        changes = (FlagChange(name=case.number, value="7"), FlagChange(name=case.switch))
        one, two = (case.adapter.apply(spec, order, case.known) for order in (changes, changes[::-1]))
        assert one.fingerprint == two.fingerprint

    def test_aliases_abbreviations_and_inventions_are_refused(self, case: ServerCase) -> None:
        known = case.known
        alias = known.flags[case.number].aliases[0]
        for name in (alias, case.number[:-1], case.number + "-please", "--no-such-flag-at-all", case.number[2:]):
            reason = case.adapter.check_change(FlagChange(name=name, value="7"), known)
            assert reason is not None and name in reason
            with pytest.raises(PolicyRefused):
                case.adapter.apply(spec_of(case), (FlagChange(name=name, value="7"),), known)

    @pytest.mark.parametrize("value", [None, "", "many", "7 8", "7;reboot", "7\n8", "--help", "1e3"])
    def test_a_wrong_value_is_refused(self, case: ServerCase, value: str | None) -> None:
        assert case.adapter.check_change(FlagChange(name=case.number, value=value), case.known)

    def test_a_value_for_a_bare_flag_is_refused(self, case: ServerCase) -> None:
        assert case.adapter.check_change(FlagChange(name=case.switch, value="1"), case.known)
        assert case.adapter.check_change(FlagChange(name=case.switch), case.known) is None

    def test_secret_flags_are_closed_to_experiments(self, case: ServerCase) -> None:
        assert case.adapter.check_change(FlagChange(name=case.secret, value="x"), case.known)

    @pytest.mark.parametrize("name", ["LD_PRELOAD", "PATH", "HOME", "A B", "", "X=Y", "lower\n"])
    def test_other_programs_variables_are_refused(self, case: ServerCase, name: str) -> None:
        assert case.adapter.check_change(EnvChange(name=name, value="1"), case.known)

    def test_an_unknown_live_call_is_refused(self, case: ServerCase) -> None:
        call = HotCall(name="no-such-call", value="1", undo="0")
        with pytest.raises(PolicyRefused):
            case.adapter.apply(spec_of(case), (call,), case.known)

    # --- requests

    def test_requests_go_to_the_server_itself(self, case: ServerCase) -> None:
        base = case.adapter.base_url(spec_of(case))
        looks = case.adapter.health_requests(base, "/srv/key")
        wanted = case.adapter.generate_request(base, "m", [1, 2, 3], max_tokens=4, api_key_file="/srv/key")
        assert len({request.id for request in (*looks, wanted)}) == len(looks) + 1
        assert all(request.url.startswith(f"{base}/") for request in (*looks, wanted))
        assert all(request.api_key_file == "/srv/key" for request in (*looks, wanted))
        body = json.loads(wanted.body or "")
        assert (wanted.method, body["model"], body["prompt"], body["max_tokens"]) == ("POST", "m", [1, 2, 3], 4)

    def test_only_tokens_prove_life(self, case: ServerCase) -> None:
        texts = ('{"choices": [{}], "usage": {"completion_tokens": 3}}', '{"choices": []}', '{"error": "x"}', "", "OK")
        assert [case.adapter.tokens(HttpAnswer(id="g", status=200, text=text)) for text in texts] == [3, 0, 0, 0, 0]
        assert case.adapter.tokens(HttpAnswer(id="g", status=503, text=texts[0])) == 0

    def test_no_answers_are_no_facts(self, case: ServerCase) -> None:
        assert case.adapter.effective({}) == {}
        assert case.adapter.counters({}) == {}
        assert case.adapter.in_flight({}) is None
        assert case.adapter.requests({}) is None
        assert case.adapter.model_name({}) is None
        assert case.adapter.mismatches(spec_of(case), {}) == ()
