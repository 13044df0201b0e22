"""The leaderboard as a static site: a folder that opens from a disk or any web server and loads nothing else.

`python leaderboard.py ... --site FOLDER` writes the page (index.html, page.css, page.js: the files beside this one, and
what all `pages` have) and `result.js`, the run's result as one constant: a page on a disk may run a script, but
fetch no file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import script, style

_HERE = Path(__file__).parent
PAGE = ("index.html", "page.css", "page.js")
DIGITS = 6
"""Significant digits kept of a figure; all of them are in the JSON of the run."""
OF_ROW = (
    *("policy", "cell", "goodput", "goodput_low", "goodput_high", "good"),
    *("rejected_at_arrival", "rejected_at_decode", "violated_ttft", "violated_tbt", "wasted_prefill_s"),
    *("ttft_mean_s", "ttft_p90_s", "tbt_p90_s", "ttft_quantiles_s", "tbt_quantiles_s"),
    *("hit_rate", "hit_rate_device", "hit_rate_host", "hit_rate_fetched", "decision_us", "decision_alone_us"),
)
"""What the page shows of a policy in a cell."""
OF_CELL = (
    *("setting", "trace", "part", "trace_checksum", "cluster", "spec_checksum", "load", "capacity", "times_capacity"),
    *("ttft_slo_s", "tbt_slo_s", "warmup", "offered"),
)
"""What all rows of a cell have in common."""


def write_site(result: dict[str, Any], folder: Path) -> None:
    """Write the site of a run into a folder, which is made where there is none.

    Args:
        result: as `leaderboard.as_json` has it, read back.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = ((_HERE / "index.html").read_text(encoding="utf-8"), style(_HERE), script(_HERE))
    for name, text in zip(PAGE, texts, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    text = json.dumps(shown(result), separators=(",", ":"), allow_nan=False)
    (folder / "result.js").write_text(f"const RESULT = {text};\n", encoding="utf-8")


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """What the page needs of a result: no figure twice, none longer than can be read."""
    first = {row["cell"]: row for row in reversed(result["rows"])}
    cells = []
    for cell in result["cells"]:
        row = first[cell["cell"]]
        seeds = [run["seed"] for run in row["runs"]]
        cells.append(cell | {key: row[key] for key in OF_CELL} | {"seeds": seeds})
    rows = [{key: row[key] for key in OF_ROW} for row in result["rows"]]
    kept = ("code_version", "command", "policies", "disqualified", "notes", "winner", "paired", "paired_saturated")
    about = {key: result[key] for key in (*kept, "capacities")}
    whole: dict[str, Any] = _rounded(about | {"cells": cells, "rows": rows})
    return whole


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
