"""Real traces for the tests: found beside the repository, never part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

REAL_TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """Folder of the public traces; tests that need it are skipped, visibly, where it is absent."""
    if not REAL_TRACES.is_dir():
        pytest.skip(f"public traces absent: {REAL_TRACES}")
    return REAL_TRACES
