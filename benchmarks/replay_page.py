"""How long an episode takes to record, how large its page is, and how long a browser takes to draw it from a disk.

Milliseconds are the browser's own, from the start of the navigation until all is drawn. It takes Playwright and a
Chromium.

    python -m benchmarks.replay_page
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import replay
from leaderboard import Cell, Contestant, make_part, make_setting
from replay_page import write_page
from traces import builtin

from .leaderboard_site import opened_ms
from .report import entry, median, parser, report

POLICIES = ("learned", "conductor+predictive")
DRAWN = """new Promise((done) => {
  const look = () => {
    const ready = document.body.dataset.ready;
    if (ready) done(Number(ready)); else requestAnimationFrame(look);
  };
  look();
})"""


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--requests", type=int, default=replay.REQUESTS)
    given = arguments.parse_args()
    trace = builtin("conversation", n_requests=given.requests)
    cell = Cell(make_setting(trace, make_part(trace, "all", 0, 1, trace.name), "8p8d"), 1.5)
    recorded, took_s = {}, []
    for name in POLICIES:
        contestant = Contestant(name)
        replay.record(contestant, cell, 0, 1)  # what is compiled is compiled by now
        start = time.perf_counter()
        recorded[name] = replay.record(contestant, cell, 0, given.requests)
        took_s.append(time.perf_counter() - start)
    shown = replay.episode(recorded, cell, 0, 0) | {"command": "python -m benchmarks.replay_page", "code_version": ""}
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_page(shown, page)
        drawn = opened_ms(page, given.runs, DRAWN)
        size = page.stat().st_size
    report(
        {
            "requests": given.requests,
            "policies": len(POLICIES),
            "record_s": round(max(took_s), 2),
            "bytes": size,
            "drawn_ms": round(median(drawn), 1),
            "slowest_drawn_ms": round(max(drawn), 1),
        },
        given.json,
    )


if __name__ == "__main__":
    entry(main)
