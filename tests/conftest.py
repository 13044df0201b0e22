"""Hypothesis draws other examples every time, but the same ones in CI: a change is judged by what it changes."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
