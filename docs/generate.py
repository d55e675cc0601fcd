"""Writes the reference pages that follow from the code, `cli.md` and `session-file.md`; it must not word prose pages.

`python docs/generate.py` writes them, `--check` writes nothing and exits 1 naming every page that is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import run_agent
from agent.config import SessionConfig
from agent.config_schema import schema

REFERENCE = Path(__file__).resolve().parent / "reference"
BANNER = "<!-- Written by `make docs` from the code. Do not edit by hand. -->"

CLI_HEAD = """\
# Command line

Every command is `ratchet COMMAND`; after `make install` the program is `.venv/bin/ratchet`, and
`.venv/bin/python run_agent.py COMMAND` is the same. `ratchet COMMAND --help` prints what stands here. Exit codes are
explained in [exit-codes.md](exit-codes.md), the session file in [session-file.md](session-file.md).

Commands that read (`status`, `sessions`, `replay`, `report`) open the database read-only and never wait for a running
session. Where no `--db` is given and `RATCHET_STATE` is not set, they take the one database found in `./.ratchet/` or
in `$XDG_STATE_HOME/ratchet/*/` (by default `~/.local/state/ratchet/*/`), and ask for a name when there are several.
"""

SESSION_HEAD = """\
# Session file

A TOML file, by default `session.toml`, read by `start` and `doctor`. Unknown keys, wrong types and contradictions are
errors: all of them are reported at once, each with its line, with exit code 2 and before anything is touched. The whole
file is stored with the session, so `resume` and `restore` need no file and ignore later edits.

`agent/session.schema.json` is the same as a JSON schema, for editors that complete and check TOML. A small example is
in [the guide to your own server](../how-to/own-server.md). In TOML, leave out a key to get what is called None here.

**Accepted but without effect today:** the levels `patch` and `host` of `policy.max_disruption` (no experiment needs
them yet). Changes of kind `hot` are refused and their experiment is blocked: no engine has a live API for settings that
are worth an experiment. A server that is found stopped is refused with exit code 3.
"""


def cli_page() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(run_agent.app)
    commands: dict[str, Any] = vars(root)["commands"]
    parts = [BANNER, "", CLI_HEAD]
    for name, command in commands.items():
        parts += [f"## {name}", "", command.help, "", f"    ratchet {name}{_synopsis(command.params)}", ""]
        parts += [*_table(("", "what it is", "default"), [_parameter(one) for one in command.params]), ""]
    return "\n".join(parts).rstrip() + "\n"


def _synopsis(parameters: list[Any]) -> str:
    words = []
    for one in parameters:
        shown = one.name.upper() if one.param_type_name == "argument" else one.opts[0] + _operand(one)
        words.append(f" [{shown}]" if not one.required else f" {shown}")
    return "".join(words)


def _operand(option: Any) -> str:
    return "" if isinstance(option.default, bool) else f" {option.name.upper()}"


def _parameter(one: Any) -> tuple[str, str, str]:
    name = one.name.upper() if one.param_type_name == "argument" else ", ".join(one.opts)
    default = "" if one.default in (None, False) else f"`{one.default}`"
    return f"`{name}`", one.help or "", default


def session_page() -> str:
    """Every key of the session file, section by section."""
    whole = schema(SessionConfig)
    parts = [BANNER, "", SESSION_HEAD]
    for heading, text, model in _sections("", "the top of the file", whole, whole["$defs"], many=False):
        rows = [_key(name, field, model) for name, field in model["properties"].items()]
        parts += [heading, "", text, "", *_table(("key", "type", "default", "what it is"), rows), ""]
    return "\n".join(parts).rstrip() + "\n"


def _sections(
    path: str, text: str, model: dict[str, Any], known: dict[str, Any], many: bool
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The model, then every model that it holds, each as heading, text and schema, in the order of the file."""
    bracketed = f"[[{path}]]" if many else f"[{path}]"
    kind = model["properties"].get("kind", {}).get("const")
    heading = f"## `{bracketed}`{f' of kind `{kind}`' if many and kind else ''}" if path else "## Top level"
    held = {name: _held(field, known) for name, field in model["properties"].items()}
    plain = {name: _whole(field, known) for name, field in model["properties"].items() if not held[name]}
    yield heading, _sentence(text), {**model, "properties": plain}
    for name, inner_models in held.items():
        field = model["properties"][name]
        for inner in inner_models:
            about = inner["description"] if len(inner_models) > 1 else field.get("description", inner["description"])
            yield from _sections(
                f"{path}.{name}" if path else name, about, inner, known, many=field.get("type") == "array"
            )


def _held(field: dict[str, Any], known: dict[str, Any]) -> list[dict[str, Any]]:
    """The models that a field holds, directly, as an alternative or as items."""
    inside = field.get("items", field)
    found = [_whole(one, known) for one in (inside, *inside.get("anyOf", ()), *inside.get("oneOf", ()))]
    return [one for one in found if "properties" in one]


def _whole(field: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The field with what it refers to; its own words win."""
    return {**known[field["$ref"].rsplit("/", 1)[1]], **field} if "$ref" in field else field


def _key(name: str, field: dict[str, Any], model: dict[str, Any]) -> tuple[str, str, str, str]:
    default = "**required**" if name in model.get("required", ()) else _default(field)
    return f"`{name}`", _type(field), default, _sentence(field.get("description", ""))


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if isinstance(value, int) and "enum" in field:
        value = field["enum"][value]
    return "" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(field: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "anyOf" in field:
        kinds = [_type(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("type") == "object":
        return "table of strings"
    return str(field["type"]) + _range(field)


def _range(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return f", {', '.join(bounds)}" if bounds else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith((".", "?")) else ".")


def _table(head: tuple[str, ...], rows: list[Any]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def main() -> int:
    """Write the pages, or with `--check` only compare them."""
    parser = argparse.ArgumentParser(description="The reference pages that follow from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, text in (("cli.md", cli_page()), ("session-file.md", session_page())):
        path = REFERENCE / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
    if stale:
        print(f"{'out of date, run `make docs`' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
