"""The JSON schema of the session file, for editors that complete and check it; it must not read a session file."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

TITLE = "Ratchet session file"

# What the models of the store leave to their names; a description there wins.
DESCRIPTIONS = {
    "Budget.experiments": "the most experiments that change something",
    "Budget.restarts": "the most restarts of the server, those of baselines and of the close-out included",
    "Guards.ttft_p90_ms": "ceiling for the 90th percentile of the time to first token at every load point",
    "LoadPoint.name": "short id; the objective names it",
    "LoadPoint.concurrency": "requests in flight at any time",
    "LoadPoint.requests": "measured requests of one run; at least as many as are in flight",
    "LoadPoint.prompt": "random token ids, or a passage that repeats and rewards speculation",
    "LoadPoint.prompt_tokens": "length of each prompt",
    "LoadPoint.output_tokens": "length of each answer",
    "LoadPoint.warmup_requests": "requests before the measured ones, not counted",
    "Objective.metric": "what is maximised",
    "Objective.at": "names of the load points over which it is averaged",
    "Workload.load_points": "levels of load at which every configuration is measured",
    "Workload.objective": "what is maximised, and at which load points",
    "Workload.guards": "what a gain must not cost",
    "Workload.endpoint": "path of the completions API",
    "Workload.vocab_low": "lowest token id of random prompts",
    "Workload.vocab_high": "token id that random prompts stay below",
    "Workload.request_deadline_s": "a request that takes longer has failed",
    "Workload.run_deadline_s": "a run that takes longer is ended",
    "Workload.client": "which benchmark client measures",
    "Workload.client_command": "words that start an external client on the host, without the options of a run",
    "Workload.client_args": "further words for an external client, after those of a run",
    "Workload.tokenizer": "path on the host of the model's tokenizer, for an external client",
    "ValidityRule.max_foreign_cpu_cores": "cores kept busy by neither the server nor us beyond which a run is void",
    "ValidityRule.max_steal_share": "share of CPU time taken by the hypervisor beyond which a run is void",
    "ValidityRule.max_failed_share": "share of failed requests beyond which a run is void",
}


def schema_text(model: type[BaseModel]) -> str:
    """The schema as published: sorted nowhere, so that keys stand in the order of the file; ends with a newline."""
    return json.dumps(schema(model), indent=2, ensure_ascii=False) + "\n"


def schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the model, every property described."""
    found = model.model_json_schema()
    for owner in [found, *found.get("$defs", {}).values()]:
        for key, field in owner.get("properties", {}).items():
            field.pop("title", None)
            noted = DESCRIPTIONS.get(_noted_as(owner["title"], key))
            if noted is not None:
                field.setdefault("description", noted)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": TITLE}


def description(owner: type[BaseModel], key: str, field: FieldInfo | None) -> str | None:
    """What a key is for, by its model or by the notes above."""
    return (field.description if field is not None else None) or DESCRIPTIONS.get(_noted_as(owner.__name__, key))


def _noted_as(model_name: str, key: str) -> str:
    return f"{model_name.removesuffix('Section')}.{key}"
