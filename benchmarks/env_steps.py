"""Steps per second of the natively batched environment on one core: full observation, random valid actions.

python -m benchmarks.env_steps --clusters 64 --cluster 8p8d
"""

from __future__ import annotations

import time

import numpy as np
from gymnasium.vector import AutoresetMode

from envs.cluster_env import ClusterVectorEnv, Episodes
from envs.kernel.replay import random_actions

from .report import entry, median, parser, report


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--trace", default="builtin:conversation", help="trace file (default: %(default)s)")
    arguments.add_argument("--cluster", default="8p8d")
    arguments.add_argument("--clusters", type=int, default=64, help="environments in the batch (default: %(default)s)")
    arguments.add_argument("--steps", type=int, default=2000, help="batch steps per run (default: %(default)s)")
    arguments.add_argument("--episode-requests", type=int, default=1000)
    options = arguments.parse_args()
    count = options.clusters
    env = ClusterVectorEnv(
        count,
        options.cluster,
        options.trace,
        "all",
        Episodes(options.episode_requests),
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    _, info = env.reset(seed=0)
    generator = np.array([7], np.uint64)
    actions = np.zeros(count, np.int64)
    rates = []
    drawing = 0.0
    for run in range(options.runs + 1):
        start = time.perf_counter()
        for _ in range(options.steps):
            before = time.perf_counter()
            random_actions(info["action_mask"].view(np.bool_), generator, actions)
            drawing += time.perf_counter() - before
            _, _, _, _, info = env.step(actions)
        if run:
            rates.append(count * options.steps / (time.perf_counter() - start))
    report(
        {
            "clusters": count,
            "steps_per_second": median(rates),
            "steps_per_second_all_runs": rates,
            "share_drawing_actions": drawing / ((options.runs + 1) * count * options.steps / median(rates)),
            "bytes_per_cluster": env.simulator.bytes_per_cluster,
        },
        options.json,
    )


if __name__ == "__main__":
    entry(main)
