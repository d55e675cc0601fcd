"""When two experiments are one and the same: equal results of full configuration and ground; pure."""

from __future__ import annotations

from state.models import Adoption, digest


def identity(fingerprint: str, workload_revision: str, adoption: Adoption) -> str:
    """Digest of the configuration that would run, the method, the engine's version and the hardware."""
    return digest([fingerprint, workload_revision, adoption.engine_version, adoption.hardware])
