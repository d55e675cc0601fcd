"""Writes the reference pages that follow from code and data: commands, session file, catalogue, failure rules.

It must not word prose pages.

`python docs/generate.py` writes them, `--check` writes nothing and exits 1 naming every page that is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import run_agent
from agent.catalogue.entries import ChangeEntry, Entry, book, engines
from agent.config import SessionConfig
from agent.config_schema import schema
from state.models import CHANGE_DISRUPTION, Disruption
from tools.diagnose import Rule, rules

REFERENCE = Path(__file__).resolve().parent / "reference"
BANNER = "<!-- Written by `make docs` from the code. Do not edit by hand. -->"

CLI_HEAD = """\
# Command line

Every command is `ratchet COMMAND`; after `make install` the program is `.venv/bin/ratchet`, and
`.venv/bin/python run_agent.py COMMAND` is the same. `ratchet COMMAND --help` prints what stands here. Exit codes are
explained in [exit-codes.md](exit-codes.md), the session file in [session-file.md](session-file.md).

Commands that read (`status`, `sessions`, `replay`, `report`, `todo list`, `todo show`) open the database read-only and
never wait for a running session. Those that say something to a session (`stop`, `approve` and the rest of `todo`) leave
a file beside it. Where no `--db` is given and `RATCHET_STATE` is not set, they take the one database found in
`./.ratchet/` or in `$XDG_STATE_HOME/ratchet/*/` (by default `~/.local/state/ratchet/*/`), and ask for a name when there
are several.
"""

SESSION_HEAD = """\
# Session file

A TOML file, by default `session.toml`, read by `start` and `doctor`. Unknown keys, wrong types and contradictions are
errors: all of them are reported at once, each with its line, with exit code 2 and before anything is touched. The whole
file is stored with the session, so `resume` and `restore` need no file and ignore later edits.

`agent/session.schema.json` is the same as a JSON schema, for editors that complete and check TOML. A small example is
in [the guide to your own server](../how-to/own-server.md). In TOML, leave out a key to get what is called None here.

Changes beside the command line are explained in [changes](../explanation/changes.md), with examples in
[patches and packages](../how-to/patches-and-packages.md). A server that is found stopped is refused with exit code 3.
"""

CATALOGUE_HEAD = """\
# Catalogue

What is known about each engine's knobs: ideas that a session can try, never results. The data are the TOML files in
`agent/catalogue/`. What applies to your host, and why the rest does not, is what `ratchet doctor` tells; how the next
one is chosen stands in [how it decides](../explanation/how-it-decides.md#what-comes-next).

- A row with several values is one experiment for each; their ids end in the value. Numbers behind the change are the
  least and greatest sensible value. `{tp}`, `{cores}` and the like are filled in for the host.
- *Default* is what the server does when the flag is absent; "–" where it chooses by itself or the source names none.
- *Wants* must hold: `sm` is the GPU's compute capability times ten, `tp`, `dp` and `ep` are the degrees of tensor, data
  and expert parallelism. A number or a kind of model that is not known excludes nothing.
- *Seen* is the oldest version read that has it, and the first in which it does nothing or is spelled anew. Whether a
  flag is there is asked of the server's own `--help` in any case; the oldest version decides for variables only, which
  no list names.
- **N** marks what lets the model compute with other numbers, so that answers can differ: `planner.skip = ["numerics"]`
  leaves all of them out.
"""

FAILURES_HEAD = """\
# Failure rules

How a failed server's log is read, rule by rule. The data are `tools/diagnose_rules.toml`; how they are used, and what
the classes and actions mean, stands in [failures](../explanation/failures.md). "Serving" marks what makes the figures
of a server worthless that still runs. Sources that say "read, not met" were taken from the program's code.
"""


def cli_page() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(run_agent.app)
    parts = [BANNER, "", CLI_HEAD]
    for name, command in vars(root)["commands"].items():
        inner: dict[str, Any] = vars(command).get("commands", {})
        parts += [f"## {name}", "", command.help, ""]
        if not inner:
            parts += _usage(name, command)
        for word, one in inner.items():
            parts += [f"### {name} {word}", "", one.help, "", *_usage(f"{name} {word}", one)]
    return "\n".join(parts).rstrip() + "\n"


def _usage(name: str, command: Any) -> Iterator[str]:
    yield from (f"    ratchet {name}{_synopsis(command.params)}", "")
    yield from _table(("", "what it is", "default"), [_parameter(one) for one in command.params])
    yield ""


def _synopsis(parameters: list[Any]) -> str:
    words = []
    for one in parameters:
        shown = one.name.upper() if one.param_type_name == "argument" else one.opts[0] + _operand(one)
        words.append(f" [{shown}]" if not one.required else f" {shown}")
    return "".join(words)


def _operand(option: Any) -> str:
    return "" if isinstance(option.default, bool) else f" {option.metavar or option.name.upper()}"


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


def catalogue_page() -> str:
    """Every entry of every engine's catalogue."""
    parts = [BANNER, "", CATALOGUE_HEAD]
    head = ("id", "what", "change", "default", "cost", "wants", "seen", "source")
    for engine in engines():
        entries = book(engine).experiments
        knobs = {change.flag or change.env for entry in entries for change in entry.changes}
        count = sum(1 for entry in entries for _ in entry.each())
        parts += [f"## {engine}", "", f"{len(knobs)} flags and variables, {count} experiments.", ""]
        parts += [*_table(head, [_entry(entry, book(engine).defaults) for entry in entries]), ""]
    return "\n".join(parts).rstrip() + "\n"


def _entry(entry: Entry, defaults: dict[str, str]) -> tuple[str, ...]:
    what = _filled(entry.title, entry) + (" **N**" if entry.numerics else "")
    changes = "<br>".join(f"`{_change(change, entry)}`" for change in entry.changes)
    if entry.span is not None:
        changes += f" ({entry.span[0]:.10g} to {entry.span[1]:.10g})"
    default = ", ".join(dict.fromkeys(_default_of(change, defaults) for change in entry.changes))
    implied = [CHANGE_DISRUPTION["flag" if change.flag else "env"] for change in entry.changes]
    cost = max([*implied, entry.disruption or Disruption.READ]).name.lower()
    seen = " ".join(filter(None, (entry.since and f"from {entry.since}", entry.until and f"until {entry.until}")))
    return f"`{entry.id}`", what, changes, default, cost, _wants(entry), seen, _source(entry.source)


def _filled(text: str, entry: Entry) -> str:
    return text.replace("{value}", " / ".join(entry.values))


def _change(change: ChangeEntry, entry: Entry) -> str:
    name = change.flag or change.env or ""
    if change.remove:
        return f"without {name}"
    value = "" if change.value is None else _filled(change.value, entry)
    return f"{name}={value}" if change.env else f"{name} {value}".rstrip()


def _default_of(change: ChangeEntry, defaults: dict[str, str]) -> str:
    if change.flag is None or change.remove:
        return "–"
    if change.value is None:
        return "off"
    return f"`{defaults[change.flag]}`" if change.flag in defaults else "–"


def _wants(entry: Entry) -> str:
    words = [f"{name} ≥ {limit}" for name, limit in entry.when.at_least.items()]
    words += [f"{name} < {limit}" for name, limit in entry.when.below.items()]
    words += [f"model: {trait}" for trait in entry.model]
    words += [f"model: not {trait}" for trait in entry.not_model]
    words += [f"with `{name}`" for name in entry.requires]
    words += [f"without `{name}`" for name in entry.conflicts]
    return ", ".join(words)


def _source(text: str) -> str:
    """A web page as a short link, the help text as code."""
    on_github = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:pull|issues)/(\d+)", text)
    if on_github:
        return f"[{on_github[1]}#{on_github[2]}]({text})"
    if text.startswith("https://"):
        return f"[{text.removeprefix('https://').split('/')[0]}]({text})"
    return f"`{text}`"


def failures_page() -> str:
    """Every rule of the diagnosis."""
    groups: dict[str, list[Rule]] = {}
    for rule in rules().rule:
        groups.setdefault(", ".join(rule.engines) or "every engine, and the host", []).append(rule)
    parts = [BANNER, "", FAILURES_HEAD]
    for name, group in groups.items():
        head = ("rule", "class", "calls for", "a second time", "knob", "takes away", "layer", "source")
        parts += [f"## {name}", "", *_table(head, [_rule(rule) for rule in group]), ""]
    return "\n".join(parts).rstrip() + "\n"


def _rule(rule: Rule) -> tuple[str, ...]:
    layer = f"{rule.layer}, serving" if rule.while_serving else str(rule.layer)
    knob = f"`{rule.knob}`" if rule.knob else ""
    lost = f"`{rule.capability}`" if rule.capability else ""
    return f"`{rule.id}`", rule.failure_class, rule.action, rule.again or "", knob, lost, layer, rule.source


PAGES = {
    "cli.md": cli_page,
    "session-file.md": session_page,
    "catalogue.md": catalogue_page,
    "failure-rules.md": failures_page,
}


def main() -> int:
    """Write the pages, or with `--check` only compare them."""
    parser = argparse.ArgumentParser(description="The reference pages that follow from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
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
