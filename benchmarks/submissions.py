"""What the sandbox costs a submission: seconds to start, and microseconds per decision inside and outside of it.

python -m benchmarks.submissions --cluster 8p8d
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from envs.simulator import empty_observation
from envs.spec import load_cluster
from envs.state import Observation
from policies import Policy
from submissions.folder import METADATA, read_submission
from submissions.isolated import Account, IsolatedPolicy, Limits

from .report import entry, median, parser, report

CLUSTERS = (1, 8, 64)
"""Sizes of batches: a suite asks for all loads and seeds of a setting at once, up to 64."""
CODE = """
import numpy as np
class Rejects:
    def decide(self, observation):
        return np.zeros(len(observation.request), np.int64)
"""


class Rejects:
    """The least that a policy can do."""

    name, recheck = "rejects", True

    def reset(self, clusters: int, seed: int) -> None: ...

    def decide(self, observation: Observation) -> np.ndarray:
        return np.zeros(len(observation.request), np.int64)


def call_us(policy: Policy, observation: Observation, calls: int) -> float:
    """Median microseconds of a call of `decide`."""
    policy.reset(len(observation.request), 0)
    spent = []
    for _ in range(calls):
        start = time.perf_counter()
        policy.decide(observation)
        spent.append(time.perf_counter() - start)
    return 1e6 * float(np.median(spent))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--cluster", default="8p8d")
    arguments.add_argument("--calls", type=int, default=2000, help="of each batch size (default: %(default)s)")
    options = arguments.parse_args()
    spec = load_cluster(options.cluster)
    figures: dict[str, float] = {}
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / METADATA).write_text("{name: rejects, author: us, description: none, policy: 'p.py:Rejects'}")
        (Path(folder) / "p.py").write_text(CODE)
        submission = read_submission(Path(folder))
        for _ in range(options.runs):
            start = time.perf_counter()
            with IsolatedPolicy(submission, Account(Limits())) as policy:
                starts.append(time.perf_counter() - start)
        figures["start_s"] = median(starts)
        with IsolatedPolicy(submission, Account(Limits())) as policy:
            for clusters in CLUSTERS:
                observation = empty_observation(clusters, spec.n_prefill, spec.n_decode)
                outside = call_us(Rejects(), observation, options.calls)
                inside = call_us(policy, observation, options.calls)
                figures[f"call_us_{clusters}"] = inside
                figures[f"call_outside_us_{clusters}"] = outside
                figures[f"decisions_per_second_{clusters}"] = 1e6 * clusters / inside
    report(figures, options.json)


if __name__ == "__main__":
    entry(main)
