"""Steps per second of `train.py --algo ppo`: gathering decisions and learning from them, and the environment's share.

python -m benchmarks.learning --cluster 8p8d
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import train

from .report import entry, parser, report


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.set_defaults(runs=1)
    arguments.add_argument("--trace", default="builtin:conversation", help="trace file (default: %(default)s)")
    arguments.add_argument("--cluster", default="8p8d")
    arguments.add_argument("--steps", type=int, default=100_000, help="decisions per run (default: %(default)s)")
    arguments.add_argument("--envs", type=int, default=64)
    arguments.add_argument("--device", default="cpu")
    given = arguments.parse_args()
    options = train.Options(trace=given.trace, cluster=given.cluster, steps=given.steps, envs=given.envs)
    sessions = []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            # evaluated before and after only; that is not counted
            with redirect_stdout(sys.stderr):
                train.run(replace(options, device=given.device, out=folder, eval_every=given.steps), leaderboard=False)
            sessions += json.loads((Path(folder) / "metrics.json").read_text())["sessions"]
    seconds = sorted(session["seconds"] - session["validation_s"] for session in sessions)
    environment_s = sorted(session["environment_s"] for session in sessions)
    middle = len(sessions) // 2
    steps = sessions[0]["steps"]
    report(
        {
            "steps": steps,
            "steps_per_second": steps / seconds[middle],
            "steps_per_second_all_runs": [steps / s for s in seconds],
            "environment_share": environment_s[middle] / seconds[middle],
        },
        given.json,
    )


if __name__ == "__main__":
    entry(main)
