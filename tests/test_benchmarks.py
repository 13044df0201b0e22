"""The benchmarks run and say what they promise. How fast anything is, is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHROMIUM

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("module", "arguments", "keys"),
    [
        (
            "replay",
            ["--cluster", "8p8d", "--policy", "conductor+predictive", "--reference-requests", "30"],
            {
                "requests",
                "seconds",
                "requests_per_second",
                "reference_seconds",
                "dynamo_seconds",
                "first_step_seconds",
            },
        ),
        (
            "env_steps",
            ["--clusters", "8", "--cluster", "2p2d", "--steps", "50"],
            {"steps_per_second", "bytes_per_cluster"},
        ),
        (
            "learning",
            ["--cluster", "2p2d", "--steps", "4096", "--envs", "8"],
            {"steps", "steps_per_second", "environment_share"},
        ),
        ("scale", ["--requests", "2000"], {"decision_us"}),
        pytest.param(
            "replay_page",
            ["--requests", "60"],
            {"requests", "policies", "bytes", "drawn_ms"},
            marks=pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium"),
        ),
    ],
)
def test_json_interface(module: str, arguments: list[str], keys: set[str]) -> None:
    command = [sys.executable, "-m", f"benchmarks.{module}", "--runs", "1", "--json", "-", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert keys <= set(result)
    for key in keys - {"dynamo_seconds", "decision_us"}:
        assert result[key] > 0
    if module == "scale":
        assert set(result["decision_us"]) == {"8", "64", "256"}


def test_only_compiled_policies_replay() -> None:
    command = [sys.executable, "-m", "benchmarks.replay", "--policy", "tests.policies.test_policies:Slots"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "only compiled policies" in done.stderr
