"""The seam of benchmark clients: what each one must give, in one meaning of every figure; it runs nothing itself.

A client measures one load point against one server, as a detached job in a folder of its own. Its figures mean what
`Metrics` says, whatever the client calls them: TTFT from the send to the first content, TPOT = (E2E - TTFT) /
(output tokens - 1) of each request, ITL the gaps between chunks. What a client does not tell is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from state.models import Frozen
from tools.target import RunRequest, RunResult

REQUEST, RESULT, PROGRESS = "request.json", "result.json", "progress.json"
"""Files of our own client in the folder of a run; an external client's run has the first two as well."""

COUNTED = ("llamacpp:tokens_predicted_total", "vllm:generation_tokens_total", "sglang:generation_tokens_total")
"""Output tokens, by engine."""
REQUESTS_COUNTED = ("vllm:request_success_total", "sglang:num_requests_total")
PREEMPTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
"""SGLang has a gauge of nearly the same name as well, which begins anew with each of its reports."""


class Place(Frozen):
    """Where a run happens: the interpreter and our client file on the host, and the server as seen from there."""

    python: str
    client: str
    url: str
    model: str | None
    api_key_file: str | None


class BenchClient(Protocol):
    """One kind of benchmark client."""

    @property
    def name(self) -> str:
        """As `workload.client` names it."""
        ...

    @property
    def leaves(self) -> tuple[str, ...]:
        """Files in the folder of a run that `parse` reads; the first is there after every run that ended by itself."""
        ...

    @property
    def progress(self) -> str | None:
        """A file that is rewritten while it measures, None where only alive and ended can be told apart."""
        ...

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it cannot do or tell, each in words."""
        ...

    def script(self, key: str, request: RunRequest, at: Place) -> str:
        """Sh of the job; the folder of the run is its working directory, and the job becomes the client."""
        ...

    def version_command(self) -> tuple[str, ...]:
        """Words that print the client's version on the host; () where it has none of its own."""
        ...

    def parse(self, files: Mapping[str, bytes], key: str) -> RunResult:
        """The figures of an ended run from those of `leaves` that are there.

        Raises CommandFailed for a missing, broken or foreign result, and for a client that contradicts itself.
        """
        ...

    def again(self, raw: Mapping[str, Any], key: str) -> RunResult:
        """The same from `RunResult.raw` as it was stored; the answers are not in it. Raises CommandFailed."""
        ...
