"""What a running llama.cpp server shows of itself, next to what it was asked for; pure, it asks nothing.

/props and /slots show less than one would think: neither threads nor flash attention nor the kind of speculation, so
the start log is read too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from state.models import LaunchSpec
from tools.servers import completions
from tools.servers.base import HttpAnswer, asked

TWINS = {
    "--alias": "LLAMA_ARG_ALIAS",
    "--api-prefix": "LLAMA_ARG_API_PREFIX",
    "--ctx-size": "LLAMA_ARG_CTX_SIZE",
    "--host": "LLAMA_ARG_HOST",
    "--model": "LLAMA_ARG_MODEL",
    "--parallel": "LLAMA_ARG_N_PARALLEL",
    "--port": "LLAMA_ARG_PORT",
    "--spec-type": "LLAMA_ARG_SPEC_TYPE",
    "--ssl-cert-file": "LLAMA_ARG_SSL_CERT_FILE",
    "--threads": "LLAMA_ARG_THREADS",
}
ENDPOINTS = {"--metrics": "endpoint_metrics", "--props": "endpoint_props", "--slots": "endpoint_slots"}

LOG_SLOTS = re.compile(r"n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(true|false)'")
LOG_FACTS = {
    "--port": re.compile(r"listening on \S+:(\d+)"),
    "--threads": re.compile(r"threadpool init, n_threads = (\d+)"),
    "info:config_file": re.compile(r"using config file: (.+)"),
}
REMARK = re.compile(
    r"^warn: .*overwritten|using config file|DEPRECATED| W .*(rounding|capping|ignor|disabl|not support|unsupported"
    r"|fall(ing)? back|overrid|forc|reduc|clamp|failed to fit|training context)"
)


def counters(answers: Mapping[str, HttpAnswer]) -> dict[str, float]:
    """Token and decode counts of /metrics, else what each busy slot shows of its progress."""
    metrics = answers.get("metrics")
    if metrics is not None and metrics.ok:
        found = re.findall(r"^llamacpp:((?:\w+_tokens|tokens_predicted|n_decode)_total) (\S+)$", metrics.text, re.M)
        return {name: float(value) for name, value in found}
    slots = completions.json_of(answers, "slots").get("", [])
    progress = ("n_prompt_tokens", "n_prompt_tokens_processed")
    return {f"slot {slot['id']} {key}": float(slot[key]) for slot in slots for key in progress if key in slot}


def in_flight(answers: Mapping[str, HttpAnswer]) -> int | None:
    """Requests processed and waiting by /metrics, else the busy slots of /slots; None where both are closed."""
    metrics = answers.get("metrics")
    if metrics is not None and metrics.ok:
        found = re.findall(r"^llamacpp:requests_(?:processing|deferred) (\S+)$", metrics.text, re.M)
        if found:
            return int(sum(map(float, found)))
    slots = completions.json_of(answers, "slots").get("")
    return None if slots is None else sum(bool(slot.get("is_processing")) for slot in slots)


def effective(answers: Mapping[str, HttpAnswer], log: str) -> dict[str, str]:
    """From /props and /slots, and from the start log where those say nothing."""
    facts = _from_log(log)
    props = completions.json_of(answers, "props")
    if props:
        facts |= _from_props(props)
    slots = completions.json_of(answers, "slots").get("", [])
    if slots:
        facts["info:speculative"] = str(any(slot.get("speculative") for slot in slots)).lower()
    return facts


def mismatches(spec: LaunchSpec, shown: Mapping[str, str]) -> tuple[str, ...]:
    """Asked and not running, in words; what the server does not show is not judged."""
    found = [_port(spec), _context(spec, shown), _speculation(spec, shown), _model(spec, shown), _alias(spec, shown)]
    for name in ("--parallel", "--threads"):
        want, have = number_asked(spec, name), shown.get(name)
        if want > 0 and have and want != int(have):
            found.append(f"{name}: asked {want}, runs {have}")
    found += [f"{name}: asked, but off" for name in ENDPOINTS if name in spec.flags and shown.get(name) == "off"]
    return tuple(text for text in found if text)


def remarks(log: str) -> tuple[str, ...]:
    """Lines in which the server overrides, ignores or deprecates something."""
    return tuple(line.strip() for line in log.splitlines() if REMARK.search(line))


def asked_for(spec: LaunchSpec, name: str) -> str | None:
    """What the spec asks for, by flag or by the flag's variable."""
    return asked(spec, name, TWINS.get(name))


def number_asked(spec: LaunchSpec, name: str) -> int:
    """The same as C++'s std::stoi reads it, trailing text ignored; 0 where nothing is asked for."""
    found = re.match(r"\s*[+-]?\d+", asked_for(spec, name) or "")
    return int(found[0]) if found else 0


def _from_props(props: Mapping[str, Any]) -> dict[str, str]:
    settings = props.get("default_generation_settings", {})
    shown = {
        "--parallel": props.get("total_slots"),
        "--alias": props.get("model_alias"),
        "--model": props.get("model_path"),
        "info:n_ctx_slot": settings.get("n_ctx"),
        "info:build": props.get("build_info"),
        "info:model_ftype": props.get("model_ftype"),
    }
    endpoints = {name: "on" if props[key] else "off" for name, key in ENDPOINTS.items() if key in props}
    return {name: str(value) for name, value in shown.items() if value is not None} | endpoints


def _from_log(log: str) -> dict[str, str]:
    facts = {name: found[-1].strip() for name, pattern in LOG_FACTS.items() if (found := pattern.findall(log))}
    if "--port" in facts:
        facts["--port"] = str(int(facts["--port"]) % 65536)
    slots = LOG_SLOTS.findall(log)
    if slots:
        facts |= dict(zip(("--parallel", "info:n_ctx_slot", "info:kv_unified"), slots[-1], strict=True))
    return facts


def _port(spec: LaunchSpec) -> str | None:
    port = number_asked(spec, "--port")
    if port <= 65535:
        return None
    return f"--port: asked {port}, which is no TCP port; the server listens on {port % 65536}"


def _context(spec: LaunchSpec, shown: Mapping[str, str]) -> str | None:
    """`--ctx-size` is the sum over slots, unless they share one KV buffer (the default when slots are automatic)."""
    want, per_slot, slots = number_asked(spec, "--ctx-size"), shown.get("info:n_ctx_slot"), shown.get("--parallel")
    if want <= 0 or not per_slot or not slots:
        return None
    automatic = number_asked(spec, "--parallel") <= 0 and "--no-kv-unified" not in spec.flags
    shared = shown.get("info:kv_unified", str("--kv-unified" in spec.flags or automatic).lower()) == "true"
    total = int(per_slot) * (1 if shared else int(slots))
    if total == want:
        return None
    moved = "raised" if total > want else "reduced"
    return f"--ctx-size: asked {want}, {moved} to {total} ({per_slot} for each of {slots} slots)"


def _speculation(spec: LaunchSpec, shown: Mapping[str, str]) -> str | None:
    want = asked_for(spec, "--spec-type")
    if not want or want == "none" or shown.get("info:speculative") != "false":
        return None
    return f"--spec-type: asked {want}, but no slot speculates"


def _model(spec: LaunchSpec, shown: Mapping[str, str]) -> str | None:
    want, have = asked_for(spec, "--model"), shown.get("--model")
    same = not want or not have or posixpath.join(spec.cwd, want) == posixpath.join(spec.cwd, have)
    return None if same else f"--model: asked {want}, runs {have}"


def _alias(spec: LaunchSpec, shown: Mapping[str, str]) -> str | None:
    want, have = asked_for(spec, "--alias"), shown.get("--alias")
    same = not want or not have or have in re.split(r"\s*,\s*", want)
    return None if same else f"--alias: asked {want}, runs {have}"
