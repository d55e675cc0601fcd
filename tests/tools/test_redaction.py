"""Known secrets leave no text, whatever form a program prints them in, and nothing else is taken out."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from state.errors import CommandFailed, OutcomeUnknown, RatchetError
from state.models import Failure, LaunchSpec, ProcessId
from tools.diagnose import diagnose
from tools.redaction import Redactor, discreet, unquoted
from tools.target import Ready

KEY = "canary-5d1c07-api-key-of-the-server"
ODD = 'two "words" with \\ and é and a\ttab'


def placeholder(name: str) -> str:
    return f"«secret:{name}»"


def redactor(env: dict[str, str] | None = None, key: str | None = KEY, **fields: object) -> Redactor:
    """Of a server that was started with an API key and these hidden variables."""
    flag = () if key is None else ("--api-key", placeholder("--api-key"))
    spec = LaunchSpec.model_validate(
        {
            "engine": "llamacpp",
            "program": ("/opt/server",),
            "flags": {},
            "argv": ("/opt/server", "--alias", "smollm2", *flag),
            "cwd": "/srv/llm",
            "user": "llm",
            "hidden_env": {name: placeholder(name) for name in env or {}},
            **fields,
        }
    )
    made = Redactor()
    secrets = {placeholder(name): value for name, value in (env or {}).items()}
    made.learn(spec, secrets if key is None else {**secrets, placeholder("--api-key"): key})
    return made


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"server_args=ServerArgs(api_key='{KEY}', tp_size=8)", "server_args=ServerArgs(api_key='@', tp_size=8)"),
        (f"non-default args: {{'api_key': ['{KEY}']}}", "non-default args: {'api_key': ['@']}"),
        (f"Authorization: Bearer {KEY}", "Authorization: Bearer @"),
        (f"{KEY}{KEY}", "@@"),
        (f"cut in the middle: {KEY[:20]}", "cut in the middle: @"),
        (f"{KEY[-20:]} is how a tail may begin", "@ is how a tail may begin"),
        ("nothing of the kind", "nothing of the kind"),
        ("", ""),
    ],
)
def test_a_key_is_taken_out_of_what_a_server_prints(said: str, told: str) -> None:
    assert redactor().text(said) == told.replace("@", placeholder("--api-key"))


@pytest.mark.parametrize("shown", [ODD, json.dumps(ODD), json.dumps(ODD, ensure_ascii=False), repr(ODD), quote(ODD)])
def test_a_secret_is_known_in_every_form_that_programs_print(shown: str) -> None:
    text = redactor({"DB_PASSWORD": ODD}, key=None).text(f"value={shown}!")
    assert text.strip("\"'").startswith("value=")
    assert placeholder("DB_PASSWORD") in text
    assert "words" not in text


def test_bytes_that_are_no_utf8_are_known_as_a_log_shows_them() -> None:
    value = b"caf\xe9-and-more-of-it".decode("utf-8", "surrogateescape")
    assert redactor({"A_TOKEN": value}, key=None).text("token caf�-and-more-of-it") == f"token {placeholder('A_TOKEN')}"


def test_lines_parts_of_a_list_and_the_password_of_an_address_are_secrets_too() -> None:
    made = redactor(
        {"TLS_KEY": "first line of it\nsecond line of it", "URL": "postgres://me:hunter2000@db:5432/x"},
        key="key-of-one,key-of-two",
    )
    for text in ("second line of it", "key-of-two", "hunter2000"):
        assert "«secret:" in made.text(f"saw {text} here")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SECRET_CANARY", "canary-of-a-variable"),
        ("DATABASE", "postgres://db:5432/x"),
        ("HF_TOKEN", "hf_abcdefgh"),
        ("HF_TOKEN", "/looks/like/a/path"),
        ("MY_APIKEY", "smollm2"),
    ],
)
def test_hidden_variables_are_secrets(name: str, value: str) -> None:
    assert redactor({name: value}).text(f"it is {value}.") == f"it is {placeholder(name)}."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("HF_TOKEN", "none", id="short"),
        pytest.param("HF_TOKEN", "", id="empty"),
        pytest.param("MODEL", "smollm2", id="it stands in the command line in clear"),
        pytest.param("PATH", "/usr/local/bin:/usr/bin", id="paths"),
        pytest.param("LANG", "C.UTF-8", id="every machine has it"),
    ],
)
def test_what_is_no_secret_does_not_shred_texts(name: str, value: str) -> None:
    text = f"a nonetheless ordinary {value} line on C.UTF-8 under /usr/bin with smollm2"
    assert redactor({name: value}).text(text) == text


def test_a_short_secret_is_only_taken_where_it_stands_alone() -> None:
    made = redactor({"A_PASSWORD": "secret"}, key=None)
    assert made.text("secretary, secret; pass=secret") == f"secretary, {placeholder('A_PASSWORD')}; pass=" + (
        placeholder("A_PASSWORD")
    )


def test_secrets_of_other_launches_are_not_guessed_at() -> None:
    made = Redactor()
    spec = LaunchSpec(engine="e", program=("x",), flags={}, argv=("x",), cwd="/", user="u")
    made.learn(spec, {placeholder("of another"): "some other value"})
    assert made.text("some other value") == "some other value"


def test_a_failure_is_told_without_secrets_however_its_tail_is_cut() -> None:
    log = "\n".join([f"line {n} api_key='{KEY}'" for n in range(400)] + [f"RuntimeError: bad key {KEY}"])
    told = diagnose("sglang", redactor().text(log), 1)
    assert KEY[:16] not in told.model_dump_json()
    assert placeholder("--api-key") in told.cause
    again = redactor().result(Failure(failure_class="x", cause=f"said {KEY}", tail=KEY))
    assert (again.cause, again.tail) == (f"said {placeholder('--api-key')}", placeholder("--api-key"))


def test_plain_json_is_walked_and_numbers_stay() -> None:
    raw = {"a": [1, 2.5, None, True, f"x {KEY}"], KEY: {"b": KEY}}
    key = placeholder("--api-key")
    assert redactor().data(raw) == {"a": [1, 2.5, None, True, f"x {key}"], key: {"b": key}}
    untouched = {"requests": [[0.1, None, "ok"]], "n": 1}
    assert redactor().data(untouched) == untouched


@discreet
class Teller:
    """Says what it is given."""

    def __init__(self) -> None:
        self.redactor = redactor()

    async def say(self, text: str) -> str:
        """The text."""
        return text

    async def ready(self) -> Ready:
        """A launch that runs otherwise."""
        process = ProcessId(pid=1, start_ticks=1, boot_id="b")
        return Ready(process=process, load_s=1.0, mismatches=(f"--api-key: asked x, runs {KEY}",))

    async def fail(self) -> None:
        """With the key in every part of the story."""
        raise CommandFailed(f"no {KEY}", where={"command": f"serve {KEY}"}, tail=f"tail {KEY}", do=f"try {KEY}")

    async def _inner(self) -> str:
        return KEY


@pytest.mark.anyio
async def test_what_a_discreet_class_tells_holds_no_secret() -> None:
    teller = Teller()
    assert await teller.say(f"hello {KEY}") == f"hello {placeholder('--api-key')}"
    assert KEY not in (await teller.ready()).mismatches[0]
    with pytest.raises(CommandFailed) as caught:
        await teller.fail()
    assert KEY not in str(caught.value) + str(caught.value.args)
    assert str(caught.value).count(placeholder("--api-key")) == 4
    assert await teller._inner() == KEY


@pytest.mark.parametrize("kind", [CommandFailed, OutcomeUnknown])
def test_an_answer_that_is_secret_itself_is_not_quoted(kind: type[RatchetError]) -> None:
    with pytest.raises(kind, match="went wrong") as caught, unquoted():
        raise kind("went wrong", tail=KEY)
    assert KEY not in str(caught.value)


def test_secrets_that_begin_alike_are_told_apart() -> None:
    head = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9."
    made = redactor({"A_TOKEN": f"{head}first-and-longest", "B_TOKEN": f"{head}second"}, key=None)
    assert made.text(f"a {head}second b {head}first-and-longest c") == (
        f"a {placeholder('B_TOKEN')} b {placeholder('A_TOKEN')} c"
    )
