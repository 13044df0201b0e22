"""Replay a whole trace through a cluster under a compiled policy: requests per second, on one core.

Beside it, in the same run: the plain-Python reference simulator of tests/ on the first requests of the same trace with
the same decisions, and NVIDIA Dynamo's offline replay of the same file where it is installed (in this environment, or
in another one named by --dynamo-python).

    python -m benchmarks.replay --trace conversation_trace.jsonl.gz --cluster 8p8d --policy conductor+predictive
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from envs.simulator import Simulator
from envs.spec import load_cluster
from envs.state import Source, Status
from policies import CompiledPolicy, make_policy
from traces import Trace
from traces import load as load_trace

from .report import entry, median, parser, report, seconds

ROOT = Path(__file__).resolve().parents[1]
FIRST_STEP = """
import gymnasium as gym
env = gym.make("envs:conductor/Cluster-v0", cluster={cluster!r}, trace={trace!r}, part="all")
env.reset(seed=0)
env.step(0)
"""


def first_step_seconds(trace: str, cluster: str) -> float:
    """From the start of a new process to its first environment step, everything compiled already."""
    code = FIRST_STEP.format(cluster=cluster, trace=trace)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    return time.perf_counter() - start


def reference_seconds(simulator: Simulator, trace: Trace, count: int) -> float:
    """The plain-Python simulator on the first `count` requests, with the decisions the compiled one took."""
    sys.path.insert(0, str(ROOT))
    from tests.reference_simulator import ReferenceCluster, Request

    tables = simulator.parameter_tables
    requests = [
        Request(
            float(trace.arrival_s[i] - trace.arrival_s[0]),
            int(trace.input_tokens[i]),
            int(trace.output_tokens[i]),
            [int(b) for b in trace.block_ids[trace.block_offsets[i] : trace.block_offsets[i + 1]]],
        )
        for i in range(count)
    ]
    reference = ReferenceCluster(tables.cluster[0, 0], list(tables.prefill[0]), list(tables.decode[0]), requests)
    outcomes = simulator.outcomes(0)
    start = time.perf_counter()
    for outcome in outcomes[:count]:
        reference.advance_to_next_arrival()
        if outcome["status"] == Status.REJECTED_AT_ARRIVAL:
            reference.decide(None)
        else:
            source = Source(outcome["source"]).name.lower()
            reference.decide((int(outcome["prefill"]), int(outcome["decode"]), source))
    reference.drain()
    return time.perf_counter() - start


def dynamo_seconds(trace: str, workers: int, python: str | None) -> float | None:
    """Wall seconds of Dynamo's own offline replay (KV router, `workers` workers); None where it is not installed."""
    if python is None:
        if importlib.util.find_spec("dynamo") is None:
            return None
        python = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.jsonl"
        raw = Path(trace).read_bytes()
        plain.write_bytes(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        command = [python, "-m", "dynamo.replay", str(plain), "--num-workers", str(workers)]
        command += ["--replay-mode", "offline", "--router-mode", "kv_router"]
        command += ["--extra-engine-args", '{"block_size":512}', "--report-json", str(Path(folder) / "out.json")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
        start = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"dynamo.replay failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return None
        return time.perf_counter() - start


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--trace", default="builtin:conversation", help="trace file (default: %(default)s)")
    arguments.add_argument("--cluster", default="8p8d")
    arguments.add_argument("--policy", default="conductor+predictive")
    arguments.add_argument("--load", type=float, default=1.0, help="arrival speed (default: %(default)s)")
    arguments.add_argument("--reference-requests", type=int, default=400, help="0 leaves the reference out")
    arguments.add_argument("--dynamo-python", help="interpreter of an environment with ai-dynamo")
    options = arguments.parse_args()
    trace = load_trace(options.trace)
    policy = make_policy(options.policy)
    if not isinstance(policy, CompiledPolicy):
        arguments.error(f"--policy {options.policy}: only compiled policies run inside a replay")
    cluster = load_cluster(options.cluster)
    simulator = Simulator.for_trace(cluster, trace)

    def begin() -> None:
        policy.reset(1, 0)
        simulator.load(0, trace, speed=options.load, recheck=policy.recheck)

    taken = seconds(lambda: policy.replay(simulator), before=begin, runs=options.runs)
    count = min(options.reference_requests, trace.n_requests)
    result = {
        "requests": trace.n_requests,
        "seconds": median(taken),
        "requests_per_second": trace.n_requests / median(taken),
        "seconds_all_runs": taken,
        "good": int(simulator.batch.state.clock["good"][0, 0]),
        "reference_requests": count,
        "reference_seconds": reference_seconds(simulator, trace, count) if count else None,
        "dynamo_seconds": None,
        "first_step_seconds": first_step_seconds(options.trace, options.cluster),
    }
    if Path(options.trace).is_file():
        workers = cluster.n_prefill + cluster.n_decode
        result["dynamo_seconds"] = dynamo_seconds(options.trace, workers, options.dynamo_python)
    if result["reference_seconds"]:
        ours = np.array(taken).min() * count / trace.n_requests
        result["times_faster_than_reference"] = result["reference_seconds"] / ours
    report(result, options.json)


if __name__ == "__main__":
    entry(main)
