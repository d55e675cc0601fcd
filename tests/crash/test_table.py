"""The table of docs/explanation/effects.md names a test in each row; they must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs/explanation/effects.md").read_text().partition("## Who died when")[2].partition("\n## ")[0]
ROWS = [line for line in SECTION.splitlines() if line.startswith("|")][2:]


def test_the_table_has_rows() -> None:
    assert len(ROWS) > 10


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_a_test_that_exists(row: str) -> None:
    named = re.search(r"`(tests/\S+\.py)::(test_\w+)` \|$", row)
    assert named is not None, row
    assert re.search(rf"^(async )?def {named[2]}\(", (ROOT / named[1]).read_text(), re.MULTILINE)
