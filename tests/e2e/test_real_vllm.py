"""A whole unattended night on a real vLLM, where there is one; see unattended.py and docs/how-to/vllm.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import real_vllm
from tests.e2e.rig import CANARY, rig
from tests.e2e.unattended import FAILED, INVENTED, KEPT, REVERTED, Night, UnattendedNight, idea, lived_through

pytestmark = [pytest.mark.real, pytest.mark.slow, real_vllm.needed]

FLAGS = "--served-model-name small --max-model-len 512 --max-num-seqs 1 --enforce-eager --dtype bfloat16"
IDEAS = "".join(
    (
        idea(
            KEPT,
            "Eight sequences at a time",
            "one at a time lets seven of eight streams wait",
            '{ kind = "flag", name = "--max-num-seqs", value = "8" }',
            0.9,
            1.0,
        ),
        INVENTED,
        idea(
            FAILED,
            "A cache of 500 GiB",
            "more cache, fewer evictions",
            '{ kind = "env", name = "VLLM_CPU_KVCACHE_SPACE", value = "500" }',
            0.7,
        ),
        idea(
            REVERTED,
            "Two sequences at a time",
            "fewer at a time are slowed down less by each other",
            '{ kind = "flag", name = "--max-num-seqs", value = "2" }',
            0.6,
        ),
    )
)


class TestVllm(UnattendedNight):
    @pytest.fixture(scope="class")
    @classmethod
    def night(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
        with rig(tmp_path_factory.mktemp("unattended"), Path(real_vllm.MODEL), (real_vllm.PROGRAM,)) as host:
            words = [real_vllm.PROGRAM, "serve", real_vllm.MODEL, "--host", "127.0.0.1", "--port", str(host.port)]
            words += ["--api-key", f"{CANARY}-key", *FLAGS.split()]
            for name in ("home", "tmp"):
                (host.folder / name).mkdir()
            own = {"HOME": str(host.folder / "home"), "TMPDIR": str(host.folder / "tmp"), **real_vllm.OWN}
            witnessing = str(Path(__file__).with_name("witnessing"))
            host.start_detached(words, host.port, limit_s=real_vllm.START_S, PYTHONPATH=witnessing, **own)
            session = host.write_session(
                IDEAS,
                engine="vllm",
                concurrency=8,
                requests=16,
                prompt_tokens=16,
                output_tokens=16,
                request_deadline_s=600,
                run_deadline_s=1200,
                baseline_runs=3,
                max_blocks=3,
                retries=10,
                start_deadline_s=real_vllm.START_S,
            )
            yield lived_through(host, session, "Available memory on node", ("--max-num-seqs 8",))
