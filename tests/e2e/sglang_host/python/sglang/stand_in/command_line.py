"""The server's command line, made from its recorded help: the same flags, the same refusals, the same exit codes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
HEAD = re.compile(r"  (-\S.*?)(?:  +.*)?$")
NAME = re.compile(r"(?:^|, )(--?[A-Za-z][\w.-]*)(?= |,|$)")
USAGE = "sglang serve [-h] --model-path MODEL_PATH [--tokenizer-path TOKENIZER_PATH] [...]"


def help_text() -> str:
    """What `--help` prints."""
    return (DATA / "help.txt").read_text()


def given(words: list[str]) -> dict[str, str | bool | list[str]]:
    """Each flag that the words give, by its first long name; SystemExit with code 2 for what the help does not have."""
    parser = argparse.ArgumentParser(prog="sglang serve", usage=USAGE, add_help=False, conflict_handler="resolve")
    names = {}
    for spellings, hint in _options(help_text()):
        name = next(spelling for spelling in spellings if spelling.startswith("--"))
        made = parser.add_argument(*spellings, default=None, **_meaning(hint), required=name == "--model-path")
        names[made.dest] = name
    return {names[dest]: value for dest, value in vars(parser.parse_args(words)).items() if value is not None}


def _options(text: str) -> Iterator[tuple[list[str], str]]:
    """Spellings and value hint of every option that the help lists."""
    for line in text.splitlines():
        head = HEAD.match(line)
        found = list(NAME.finditer(head[1])) if head else []
        if head and any(name[1].startswith("--") and name[1] != "--help" for name in found):
            end = found[1].start() if len(found) > 1 else None
            yield [name[1] for name in found], head[1][found[0].end() : end].strip(" ,")


def _meaning(hint: str) -> dict[str, Any]:
    """How argparse reads a value with this hint; without one the option is a switch."""
    if not hint:
        return {"action": "store_true"}
    if hint.endswith("...]"):
        return {"nargs": "+"}
    if hint.startswith("["):
        return {"nargs": "?", "const": ""}
    choices = re.fullmatch(r"\{([^{}]+)\}", hint)
    return {"choices": choices[1].split(",")} if choices else {}
