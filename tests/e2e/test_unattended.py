"""Whole unattended nights on a real llama.cpp server, and on the native one where it was built; see unattended.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.rig import MODEST, WITNESSED, Rig, rig
from tests.e2e.unattended import FAILED, INVENTED, KEPT, REVERTED, Night, UnattendedNight, idea, lived_through

pytestmark = [pytest.mark.real, pytest.mark.slow]

IDEAS = "".join(
    (
        idea(
            KEPT,
            "Two threads, and batches of 256 tokens",
            "one thread, and prompts read one token at a time, are slow on purpose",
            '{ kind = "flag", name = "--threads", value = "2" }, '
            '{ kind = "flag", name = "--ubatch-size", value = "256" }',
            0.9,
            0.5,
        ),
        INVENTED,
        idea(
            FAILED,
            "Values in 8 bits without flash attention",
            "half the memory for values",
            '{ kind = "flag", name = "--cache-type-v", value = "q8_0" }',
            0.7,
        ),
        idea(
            REVERTED,
            "Batches of one token",
            "the first answer does not wait for the prompts of others",
            '{ kind = "flag", name = "--ubatch-size", value = "1" }',
            0.6,
        ),
    )
)


def lived(host: Rig) -> Night:
    host.start_server(*MODEST.split())
    session = host.write_session(IDEAS, baseline_runs=3, max_blocks=4, retries=10)
    return lived_through(host, session, "flash_attn", ("--threads 2", "--ubatch-size 256"))


class TestLlamaCpp(UnattendedNight):
    @pytest.fixture(scope="class")
    @classmethod
    def night(cls, tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Night]:
        with rig(tmp_path_factory.mktemp("unattended"), demo_model, WITNESSED) as host:
            yield lived(host)


@pytest.mark.skipif("RATCHET_LLAMA_SERVER" not in os.environ, reason="RATCHET_LLAMA_SERVER names no llama-server")
class TestNativeLlamaServer(UnattendedNight):
    @pytest.fixture(scope="class")
    @classmethod
    def night(cls, tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Night]:
        binary = str(Path(os.environ["RATCHET_LLAMA_SERVER"]).resolve())
        with rig(tmp_path_factory.mktemp("unattended"), demo_model, (binary,)) as host:
            yield lived(host)
