"""Hypothesis draws other examples every time, but the same ones in CI: a change is judged by what it changes."""

from __future__ import annotations

import os

from hypothesis import settings

# Read by torch when it is first imported: its threads gain nothing on networks this small and fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
