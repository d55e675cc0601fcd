"""Which benchmark client a workload names, and what that client cannot measure; it reads no file and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator

from state.models import Workload
from tools.benches.aiperf import AiPerf
from tools.benches.base import BenchClient
from tools.benches.builtin import Builtin
from tools.benches.escorted import EscortedClient
from tools.benches.guidellm import GuideLlm
from tools.benches.sglang_bench import SglangBench
from tools.benches.vllm_bench import VllmBench
from tools.servers.base import names_secret

EXTERNAL: dict[str, type[EscortedClient]] = {kind.name: kind for kind in (SglangBench, VllmBench, GuideLlm, AiPerf)}
COMPLETIONS = "/v1/completions"


def bench_client(workload: Workload) -> BenchClient:
    """The client that measures this workload."""
    if workload.client not in EXTERNAL:
        return Builtin()
    return EXTERNAL[workload.client](workload.client_command, workload.client_args, workload.tokenizer or "")


def unfit(workload: Workload, model: str | None, with_key: bool) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Keys of the session file, each with why the chosen client cannot measure what they ask."""
    if workload.client not in EXTERNAL:
        for key in ("client_command", "client_args"):
            if getattr(workload, key):
                yield ("workload", key), "it is for an external client; name one as workload.client, or leave it out"
        return
    client = EXTERNAL[workload.client]
    if not workload.client_command:
        yield ("workload", "client"), f"{client.name} needs client_command, the words that start it on the host"
    if not workload.tokenizer:
        yield ("workload", "client"), f"{client.name} needs tokenizer, the path on the host of the model's tokenizer"
    if model is None:
        yield ("workload", "client"), f"{client.name} needs the model's name as server.model"
    if workload.endpoint != COMPLETIONS:
        yield ("workload", "endpoint"), f'{client.name} measures {COMPLETIONS}, got "{workload.endpoint}"'
    for word in workload.client_args:
        if names_secret(word.partition("=")[0].strip("-").replace("-", "_")) or "authorization" in word.lower():
            args = ("workload", "client_args")
            yield args, "a secret must not stand in the session file; name its file on the host as server.api_key_file"
    if with_key and not client.key_variables:
        yield ("workload", "client"), f"{client.name} takes an API key only where everybody on the host can read it"
    for index, point in enumerate(workload.load_points):
        if point.prompt != "random":
            path = ("workload", "load_points", index, "prompt")
            yield path, f'only the built-in client sends "{point.prompt}" prompts'
