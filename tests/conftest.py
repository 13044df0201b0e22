"""What all tests share: how Hypothesis draws, and a browser for the pages.

Hypothesis draws other examples every time, but the same ones in CI: a change is judged by what it changes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import settings

# Read by torch when it is first imported: its threads gain nothing on networks this small and fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    """A real headless Chromium."""
    playwright = pytest.importorskip("playwright.async_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        await chromium.close()
