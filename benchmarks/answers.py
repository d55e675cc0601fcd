"""Does the judge tell a harmless change of the numbers from a broken model? Real servers, each with one change.

It must not tune the judge, and leaves no server behind. Every server is the demo's, with the demo's model; the fixed
prompts are asked by the client that measures, in its own way: each launch is asked with 1, 2 and 4 at once. The parent
is launched twice. Each candidate is launched once and judged three times: all its passes against all of the parent's,
one pass against one of the parent's, and these two without their logprobs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent.judge.answers import Likeness, likeness
from state.models import Answer, LoadPoint, Objective, ProcessId, Workload
from tools.benches import builtin
from tools.demo import model
from tools.target import RunRequest

HERE = Path(__file__).resolve().parent
SERVER = HERE.parent / "tools" / "demo" / "llama_server.py"
CLIENT = HERE.parent / "tools" / "benches" / "stream_client.py"
BASE = "--threads 1 --parallel 4 --ctx-size 4096 --flash-attn off --fit off"
AT_ONCE = (1, 2, 4)
PARENT_LAUNCHES = 2
START_S = 120.0
HEADER = 1 / 10
"""No damage is done in this first part of the model's file, where its names and sizes stand."""

Pass = tuple[Answer, ...]


class Case(NamedTuple):
    """A change of the server: what it is called, what it must (not) be called, its flags, what its model suffers."""

    name: str
    kind: str
    """`harmless` and `lossy` (fewer bits on purpose) must not be called broken, `broken` must be; `between` may be."""
    flags: str = ""
    random_bytes: float = 0.0
    """Share of the model's bytes that are replaced by random ones."""
    zeroed: float = 0.0
    """Share of the model that is one piece of zeros."""


CASES = (
    Case("nothing", "harmless"),
    Case("two threads", "harmless", "--threads 2"),
    Case("two slots", "harmless", "--parallel 2"),
    Case("batches of 8", "harmless", "--ubatch-size 8"),
    Case("batches of 1", "harmless", "--ubatch-size 1"),
    Case("flash attention", "harmless", "--flash-attn on"),
    Case("no prompt cache", "harmless", "--no-cache-prompt"),
    Case("n-gram speculation", "harmless", "--spec-type ngram-simple"),
    Case("K cache f32", "harmless", "--cache-type-k f32"),
    Case("K cache bf16", "harmless", "--cache-type-k bf16"),
    Case("K cache q8_0", "lossy", "--cache-type-k q8_0"),
    Case("K and V cache q8_0", "lossy", "--cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on"),
    Case("K cache q5_1", "lossy", "--cache-type-k q5_1"),
    Case("K cache q4_0", "lossy", "--cache-type-k q4_0"),
    Case("K and V cache q4_0", "lossy", "--cache-type-k q4_0 --cache-type-v q4_0 --flash-attn on"),
    Case("RoPE frequencies x 0.9", "between", "--rope-freq-scale 0.9"),
    Case("RoPE base 10000", "between", "--rope-freq-base 10000"),
    Case("weights: 10 random bytes", "between", random_bytes=1e-7),
    Case("weights: 0.2 % zeros", "between", zeroed=0.002),
    Case("RoPE frequencies x 0.5", "broken", "--rope-freq-scale 0.5"),
    Case("RoPE frequencies x 0.25", "broken", "--rope-freq-scale 0.25"),
    Case("RoPE base 100", "broken", "--rope-freq-base 100"),
    Case("weights: 1 % zeros", "broken", zeroed=0.01),
    Case("weights: 5 % zeros", "broken", zeroed=0.05),
    Case("weights: 20 % zeros", "broken", zeroed=0.20),
    Case("weights: 1 byte in 1,000,000 random", "broken", random_bytes=1e-6),
    Case("weights: 1 byte in 100,000 random", "broken", random_bytes=1e-5),
)
PARENT = Case("parent", "harmless")
COLUMNS = {
    "change": "name",
    "kind": "kind",
    "equal": "exact",
    "edit": "edit",
    "prefix": "prefix",
    "drift": "drift",
    "gap": "gap",
    "bad": "bad",
    "unlisted": "unlisted",
    "word": "word",
    "of one pass": "one_pass",
    "of texts": "texts",
}


# --- asking ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(folder: Path, flags: str, weights: Path) -> Iterator[tuple[int, str]]:
    """A running server's pid and base URL; ended with the block."""
    log = folder / "server.log"
    words = [sys.executable, str(SERVER), "--model", str(weights), "--port", "0", *BASE.split(), *flags.split()]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    environment = {**ours, "OMP_WAIT_POLICY": "passive"}
    with log.open("wb") as sink, subprocess.Popen(words, stdout=sink, stderr=sink, env=environment) as process:
        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start with {flags!r}:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield process.pid, found.group(1)
        finally:
            process.kill()


def ask(folder: Path, pid: int, url: str, at_once: int) -> Pass:
    """One pass over the fixed prompts, after a measured run that is as short as can be."""
    point = LoadPoint(name="few", concurrency=at_once, requests=1, prompt_tokens=8, output_tokens=2)
    workload = Workload(load_points=(point,), objective=Objective(at=("few",)))
    process = ProcessId(pid=pid, start_ticks=0, boot_id="")
    request = RunRequest(point=point, workload=workload, seed=1, process=process, answers=True)
    asked, told = folder / "request.json", folder / "result.json"
    asked.write_text(json.dumps(builtin.request_json("pass", request, url, None, None)))
    subprocess.run([sys.executable, str(CLIENT), "--request", str(asked), "--result", str(told)], check=True)
    return builtin.parse(told.read_bytes(), "pass").answers


def launch(case: Case) -> list[Pass]:
    """The passes of one launch, one for each load."""
    weights = model.fetch()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if case.random_bytes or case.zeroed:
            weights = damaged(weights, folder / "damaged.gguf", case)
        with server(folder, case.flags, weights) as (pid, url):
            return [ask(folder, pid, url, at_once) for at_once in AT_ONCE]


def damaged(weights: Path, copy: Path, case: Case) -> Path:
    """A copy of the model as the case wants it; the same each time."""
    content, draw = bytearray(weights.read_bytes()), random.Random(1)
    begin = int(len(content) * HEADER)
    for _ in range(round(len(content) * case.random_bytes)):
        content[draw.randrange(begin, len(content))] = draw.randrange(256)
    middle, length = len(content) // 2, int(len(content) * case.zeroed)
    content[middle : middle + length] = bytes(length)
    copy.write_bytes(content)
    return copy


def passes(case: Case, number: int, out: Path) -> list[Pass]:
    """The passes of a case's launch, asked unless `out` has them already."""
    kept = out / f"{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}-{number}.json"
    if not kept.exists():
        told = [[answer.model_dump() for answer in one] for one in launch(case)]
        kept.write_text(json.dumps(told))
    return [tuple(Answer.model_validate(answer) for answer in one) for one in json.loads(kept.read_text())]


# --- judging -----------------------------------------------------------------------------------------------------


def texts(one: Pass) -> Pass:
    """A pass as of a server that gives no logprobs."""
    return tuple(answer.model_copy(update={"tokens": (), "logprobs": (), "tops": ()}) for answer in one)


def row(case: Case, parent: Sequence[Pass], candidate: Sequence[Pass]) -> dict[str, Any]:
    """A line of the table, with the reason that the judge gives."""
    whole = likeness(parent, candidate)
    single = likeness(parent[-1:], candidate[-1:])
    bare = likeness([texts(parent[-1])], [texts(candidate[-1])])
    words = {"word": whole.word, "one_pass": single.word, "texts": bare.word, "reason": whole.reason}
    return {"name": case.name, "kind": case.kind, **spread(whole), **words}


def spread(found: Likeness) -> dict[str, Any]:
    """The candidate's figures."""
    return {} if found.candidate is None else found.candidate.model_dump()


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """Each word that may not stand where it stands; on texts alone a broken model may stay unknown."""
    found = []
    for each in rows:
        for column in ("word", "one_pass", "texts"):
            word = each[column]
            missed = each["kind"] == "broken" and word not in ("broken", *(["unknown"] if column == "texts" else []))
            alarm = each["kind"] in ("harmless", "lossy") and word == "broken"
            if missed or alarm:
                found.append(f"{each['name']} is {each['kind']} and was called {word} ({column})")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(shown(each.get(key)) for key in COLUMNS.values()) + " |" for each in rows]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A cell."""
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def parse_options() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description="Whether the judge of answers tells harmless changes from broken models."
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--out", type=Path, help="keep each launch's answers in this folder, and ask only what is missing"
    )
    parser.add_argument("--only", action="append", metavar="CHANGE", help="only this change; may be repeated")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    return parser.parse_args()


def main() -> int:
    """Asks, judges, prints the table, compares with the goals."""
    options = parse_options()
    goal = tomllib.loads((HERE / "goals.toml").read_text())["answers"]
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        parent = [one for number in range(PARENT_LAUNCHES) for one in passes(PARENT, number, out)]
        rows = [
            row(case, parent, passes(case, 0, out)) for case in CASES if not options.only or case.name in options.only
        ]
    print(table(rows))
    mistakes = wrong(rows)
    for mistake in mistakes:
        print(mistake)
    met = len(mistakes) <= goal["max_wrong"]
    if options.json:
        options.json.write_text(json.dumps({"goal": goal, "met": met, "wrong": mistakes, "rows": rows}, indent=1))
    judged = 3 * len(rows)
    print(
        f"answers: {len(mistakes)} of {judged} words are wrong (goal {goal['max_wrong']}: {'met' if met else 'MISSED'})"
    )
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
