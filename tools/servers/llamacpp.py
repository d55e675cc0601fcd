"""The llama.cpp server: its flags, questions and answers; pure, it neither runs nor asks anything.

It serves the native `llama-server` and every program with the same command line, such as the demo's launcher.
What was learned from llama.cpp's `common/arg.cpp` and from trials with build 11434 stands at each rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from state.errors import ServerError
from state.models import Change, EnvChange, FlagChange, HotCall, LaunchSpec
from tools.changes.hot_probe import ONLY
from tools.servers import argv as words
from tools.servers import checks, completions, llamacpp_help
from tools.servers import llamacpp_state as state
from tools.servers.apply import applied
from tools.servers.base import FlagTable, HotSetting, HttpAnswer, HttpRequest, KnownFlag, Reading

SYNTAX = words.Syntax(
    underscores=True,
    accumulating=frozenset(
        {
            "--api-key",
            "--control-vector",
            "--control-vector-scaled",
            "--logit-bias",
            "--lora",
            "--lora-scaled",
            "--override-kv",
            "--override-tensor",
            "--reverse-prompt",
            "--spec-type",
        }
    ),
)
"""`--a_b` is read as `--a-b`; neither `--flag=value` nor an abbreviation is read; a value is whatever comes next."""

SERVES = "it decides what is served, where and to whom, not how fast"
ANSWERS = "it changes what is answered"
REACHES = "it lets the server download, write, run or load something"
REPORTS = "it ends the program or changes what the program tells of itself, which Ratchet reads"
FIXED_NAMES = {
    SERVES: "model* docker-repo hf-* spec-draft-hf alias tags host port reuse-port api-* path cors-* ssl-* "
    "lora* control-vector* mmproj* embedding rerank pooling",
    ANSWERS: "predict keep rope-* yarn-* override-kv spec-synth-* context-shift special jinja chat-template* "
    "reasoning* skip-chat-parsing reverse-prompt escape prefill-assistant spm-infill",
    REACHES: "tools* mcp-* agent ui-* rpc slot-save-path media-path video-ffmpeg-dir lookup-cache-* *-default fim-*",
    REPORTS: "help version cache-list completion-bash list-devices log-* verbos* metrics props slots",
}
"""Reason → names (with * for anything) of flags that no experiment may touch; a switch's negative goes with it."""
LOOK_TIMEOUT_S = 5.0
ADAPTER_SCALE = re.compile(r"lora:(\d+)")
SAMPLING_SECTION = "sampling params"


class LlamaCpp:
    """llama-server's command line and HTTP API."""

    engine: ClassVar[str] = "llamacpp"
    packages: ClassVar[tuple[str, ...]] = ()
    env_prefixes: ClassVar[tuple[str, ...]] = (
        "LLAMA_", "GGML_", "OMP_", "GOMP_", "KMP_", "CUDA_VISIBLE_DEVICES", "CUDA_SCALE_", "HIP_VISIBLE_DEVICES",
    )  # fmt: skip
    secret_flags: ClassVar[frozenset[str]] = frozenset({"--api-key", "--hf-token", "--mcp-servers-json"})

    def program(self, argv: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.program`."""
        return tuple(argv[: words.program_length(argv)])

    def help_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.help_command`."""
        return (*program, "--help")

    def version_command(self, program: Sequence[str]) -> tuple[str, ...]:
        """See `ServerAdapter.version_command`; llama-server prints it to stderr."""
        return (*program, "--version")

    def parse_help(self, text: str) -> FlagTable:
        """See `ServerAdapter.parse_help`."""
        return llamacpp_help.parse_help(text)

    def parse_version(self, text: str) -> str:
        """What follows `version: `, for example `0.6.0-dev (build 0, commit unknown)`."""
        found = re.search(r"^version: (.+)$", text, re.MULTILINE)
        if not found:
            raise ServerError(
                "the output of llama-server's --version holds no version",
                tail=text,
                do="run the program with --version by hand",
            )
        return found[1].strip()

    def read_argv(self, argv: Sequence[str], known: FlagTable) -> Reading:
        """See `ServerAdapter.read_argv`."""
        return words.read(argv, known, SYNTAX)

    def edit_argv(self, argv: Sequence[str], known: FlagTable, change: FlagChange) -> tuple[str, ...]:
        """See `ServerAdapter.edit_argv`."""
        return words.edit(argv, known, SYNTAX, change)

    def mask_argv(self, argv: Sequence[str], known: FlagTable, hide: Callable[[str, str], str]) -> tuple[str, ...]:
        """See `ServerAdapter.mask_argv`."""
        return words.mask(argv, known, SYNTAX, self.secret_flags, hide)

    def check_change(self, change: Change, known: FlagTable) -> str | None:
        """See `ServerAdapter.check_change`."""
        if isinstance(change, FlagChange):
            flag = known.flags.get(change.name)
            reason = None if flag is None else _fixed(flag)
            return checks.check_flag(change, known, {} if reason is None else {change.name: reason})
        if isinstance(change, EnvChange):
            return checks.check_env(change, known, self.env_prefixes, "LLAMA_ARG_", fixed_flags(known))
        if isinstance(change, HotCall) and not ADAPTER_SCALE.fullmatch(change.name):
            return "of llama-server's live settings only a LoRA adapter's scale is used: lora:ID"
        return checks.check_number(change) if isinstance(change, HotCall) else None

    def hot_setting(self, base_url: str, name: str, value: str, api_key_file: str | None = None) -> HotSetting | None:
        """See `ServerAdapter.hot_setting`: the scale of the only adapter, since a call sets all others to 0."""
        named = ADAPTER_SCALE.fullmatch(name)
        if named is None:
            return None
        url = f"{base_url}/lora-adapters"
        body = json.dumps([{"id": int(named[1]), "scale": completions.number(value)}])
        headers = {"Content-Type": "application/json"}
        request = HttpRequest(id="set", method="POST", url=url, body=body, headers=headers, api_key_file=api_key_file)
        read = HttpRequest(id="read", url=url, api_key_file=api_key_file)
        return HotSetting(request=request, reads=(read,), where=(ONLY, "scale"))

    def apply(self, spec: LaunchSpec, changes: Sequence[Change], known: FlagTable) -> LaunchSpec:
        """See `ServerAdapter.apply`."""
        return applied(self, spec, changes, known)

    def base_url(self, spec: LaunchSpec) -> str:
        """See `ServerAdapter.base_url`; a port beyond 65535 is taken modulo 65536, as the server's socket does."""
        host = (state.asked_for(spec, "--host") or "127.0.0.1").split(",")[0].strip()
        port = state.asked_for(spec, "--port") or "8080"
        if host.endswith(".sock") or not re.fullmatch(r"\d+", port):
            raise ServerError(
                "the server does not listen on a TCP port that can be asked",
                where={"host": host, "port": port},
                do="start it with a numeric --port and an IP address as --host",
            )
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "https" if state.asked_for(spec, "--ssl-cert-file") else "http"
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{int(port) % 65536}{(state.asked_for(spec, '--api-prefix') or '').rstrip('/')}"

    def health_requests(self, base_url: str, api_key_file: str | None = None) -> tuple[HttpRequest, ...]:
        """State, properties, slots, names and counters; /metrics answers 501 unless started with --metrics."""
        paths = {
            "health": "/health",
            "props": "/props",
            "slots": "/slots",
            "models": "/v1/models",
            "metrics": "/metrics",
        }
        return tuple(
            HttpRequest(id=name, url=base_url + path, api_key_file=api_key_file) for name, path in paths.items()
        )

    def generate_request(
        self,
        base_url: str,
        model: str,
        prompt: Sequence[int] | str,
        *,
        max_tokens: int = 1,
        timeout_s: float = 30.0,
        api_key_file: str | None = None,
    ) -> HttpRequest:
        """A deterministic completion that cannot end early and does not lean on the prompt cache."""
        return completions.completion_request(
            base_url,
            model,
            prompt,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            api_key_file=api_key_file,
            cache_prompt=False,
        )

    def tokens(self, answer: HttpAnswer) -> int:
        """See `ServerAdapter.tokens`."""
        return completions.completion_tokens(answer)

    def model_name(self, answers: Mapping[str, HttpAnswer]) -> str | None:
        """The first id of /v1/models."""
        return completions.first_name(answers)

    def is_loading(self, answer: HttpAnswer) -> bool:
        """503 with its own words; any other 503 is not loading."""
        return answer.status == 503 and "Loading model" in answer.text

    def counters(self, answers: Mapping[str, HttpAnswer]) -> dict[str, float]:
        """See `ServerAdapter.counters`."""
        return state.counters(answers)

    def in_flight(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """See `ServerAdapter.in_flight`."""
        return state.in_flight(answers)

    def requests(self, answers: Mapping[str, HttpAnswer]) -> int | None:
        """It counts tokens, no requests."""
        return None

    def effective(self, answers: Mapping[str, HttpAnswer], log: str = "") -> dict[str, str]:
        """See `ServerAdapter.effective`."""
        return state.effective(answers, log)

    def mismatches(self, spec: LaunchSpec, effective: Mapping[str, str]) -> tuple[str, ...]:
        """See `ServerAdapter.mismatches`."""
        return state.mismatches(spec, effective)

    def remarks(self, log: str) -> tuple[str, ...]:
        """See `ServerAdapter.remarks`."""
        return state.remarks(log)


def fixed_flags(known: FlagTable) -> dict[str, str]:
    """Flags of this server that no experiment may touch, with the reason."""
    reasons = {flag.name: _fixed(flag) for flag in known.flags.values()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _fixed(flag: KnownFlag) -> str | None:
    if flag.section == SAMPLING_SECTION and flag.name != "--backend-sampling":
        return ANSWERS
    return checks.fixed_by_name(flag, FIXED_NAMES)
