"""Real traces and the papers' series for the tests: found beside the repository, never part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """Folder of the public traces; tests that need it are skipped, visibly, where it is absent."""
    if not (SHARED / "traces").is_dir():
        pytest.skip(f"public traces absent: {SHARED / 'traces'}")
    return SHARED / "traces"


@pytest.fixture(scope="session")
def paper_series() -> Path:
    """The papers' series as they were read off; tests that need them are skipped, visibly, where they are absent."""
    file = SHARED / "reference" / "paper_numbers.json"
    if not file.is_file():
        pytest.skip(f"the papers' series absent: {file}")
    return file
