"""How large the leaderboard's static site is, and how long a browser takes to open it from a disk.

The result is made up: as many policies and cells as a large run has. Milliseconds are the browser's own, from the
start of the navigation to the end of the load event. It takes Playwright and a Chromium.

    python -m benchmarks.leaderboard_site
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from envs.metrics import QUANTILES
from leaderboard_site import write_site

from .report import entry, median, parser, report

TRACES, CLUSTERS, LOADS = ("conversation", "synthetic", "toolagent"), ("8p8d", "4p4d"), (0.8, 1.0, 1.5, 2.0)


def made_up(policies: int, cells: int, seed: int = 0) -> dict[str, Any]:
    """A result as `leaderboard.as_json` has it, of figures that are drawn: every cell with eight seeds and a bound."""
    rng = np.random.default_rng(seed)
    names = [f"conductor:threshold={1 + i / 100:g}+predictive:threshold={1 - i / 100:g}" for i in range(policies)]
    paired = {"policy": names[0], "baseline": names[-1], "mean": 0.1, "low": 0.05, "high": 0.15}
    about_cells, rows = [], []
    for i in range(cells):
        load = LOADS[i % len(LOADS)]
        trace = TRACES[i // len(LOADS) % len(TRACES)]
        cluster = CLUSTERS[i // (len(LOADS) * len(TRACES)) % len(CLUSTERS)]
        cell = {
            "cell": f"{trace}-{cluster}-{i}",
            "description": f"{trace} (test) on {cluster}, load {load:g}",
            "load": load * 0.9,
            "winner": names[0],
            "bound": 1.0,
        }
        about_cells.append(cell | {"paired": paired, "first": paired})
        of_cell: dict[str, Any] = {
            "cell": cell["cell"],
            "setting": f"{trace} (test) on {cluster}",
            "trace": trace,
            "part": "test",
            "trace_checksum": f"{i // len(LOADS) % len(TRACES):064x}",
            "cluster": cluster,
            "spec_checksum": "0" * 16,
            "load": cell["load"],
            "capacity": 0.9,
            "times_capacity": load,
            "ttft_slo_s": 30,
            "tbt_slo_s": 0.1,
            "warmup": 1000,
            "offered": 2000,
            "bound": 1.0,
        }
        rows += sorted((of_cell | _row(name, rng) for name in names), key=lambda row: -float(row["goodput"]))
    return {
        "rows": rows,
        "cells": about_cells,
        "paired": paired,
        "paired_saturated": paired,
        "winner": names[0],
        "capacities": [],
        "disqualified": [],
        "notes": {"goodput": "made up", "bound": "made up"},
        "code_version": "made up",
        "command": "python -m benchmarks.leaderboard_site",
        "policies": [
            {"policy": name, "competes": True, "command": f"python leaderboard.py --policies {name}",
             "configuration": [{"name": "router", "value": "conductor", "meaning": "made up"}] * 5}
            for name in names
        ],
    }  # fmt: skip


def _row(policy: str, rng: np.random.Generator) -> dict[str, Any]:
    """What a policy has in a cell."""
    good, *lost = (2000 * rng.dirichlet([8.0, 1.0, 1.0, 1.0, 1.0])).tolist()
    device, host, fetched = (0.5 * rng.dirichlet([1.0, 1.0, 1.0])).tolist()
    ttft = np.sort(rng.lognormal(1.0, 1.0, QUANTILES))
    tbt = np.sort(rng.lognormal(-3.0, 0.4, QUANTILES))
    return {
        "policy": policy,
        "good": good,
        "goodput": good / 2000,
        "goodput_low": max(0.0, good / 2000 - 0.02),
        "goodput_high": min(1.0, good / 2000 + 0.02),
        "wasted_prefill_s": 10 * rng.random(),
        **dict(zip(("rejected_at_arrival", "rejected_at_decode", "violated_ttft", "violated_tbt"), lost, strict=True)),
        "hit_rate": 0.5,
        "hit_rate_device": device,
        "hit_rate_host": host,
        "hit_rate_fetched": fetched,
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p90_s": float(ttft[-5]),
        "tbt_p90_s": float(tbt[-5]),
        "ttft_quantiles_s": ttft.tolist(),
        "tbt_quantiles_s": tbt.tolist(),
        "decision_us": 10 * rng.random(),
        "decision_alone_us": 20 * rng.random(),
        "runs": [{"seed": seed} for seed in range(8)],
    }


LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def opened_ms(index: Path, runs: int, taken_ms: str = LOADED) -> list[float]:
    """Milliseconds until a page was loaded, once for each run, each in a browser context of its own.

    Args:
        taken_ms: what the page is asked for them, in JavaScript.

    Raises:
        ValueError: there is no Chromium.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise ValueError("needs a Chromium on the PATH")
    taken = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(runs):
            page = browser.new_page()
            page.goto(index.as_uri())
            taken.append(float(page.evaluate(taken_ms)))
            page.close()
        browser.close()
    return taken


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--policies", type=int, default=30)
    arguments.add_argument("--cells", type=int, default=24)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        write_site(made_up(given.policies, given.cells), site)
        loads = opened_ms(site / "index.html", given.runs)
        size = sum(file.stat().st_size for file in site.iterdir())
    report(
        {
            "policies": given.policies,
            "cells": given.cells,
            "bytes": size,
            "load_ms": round(median(loads), 1),
            "slowest_load_ms": round(max(loads), 1),
        },
        given.json,
    )


if __name__ == "__main__":
    entry(main)
