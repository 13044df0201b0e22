"""How the cost of a decision grows with the cluster, and that of a replay with the trace; memory; forks per second.

The load grows with the cluster: nP nD gets n / 8 times the arrival rate of 8P8D, so every instance is as busy.

    python -m benchmarks.scale
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from envs.cluster_env import ClusterVectorEnv, Episodes
from envs.simulator import Simulator
from envs.spec import load_cluster
from policies import CompiledPolicy, make_policy
from traces import Trace, builtin
from traces import load as load_trace

from .report import entry, median, parser, report, seconds


def replay_seconds(trace: Trace, cluster: str, policy_name: str, speed: float, runs: int) -> float:
    """Median seconds of a replay of the whole trace."""
    policy = make_policy(policy_name)
    assert isinstance(policy, CompiledPolicy)
    simulator = Simulator.for_trace(load_cluster(cluster), trace)

    def begin() -> None:
        policy.reset(1, 0)
        simulator.load(0, trace, speed=speed, recheck=policy.recheck)

    return median(seconds(lambda: policy.replay(simulator), before=begin, runs=runs))


def forks_per_second(trace: Trace, runs: int) -> dict[str, float]:
    """Forks of a loaded 8P8D cluster in a window of 1,000 requests; and forks followed by 250 requests each."""
    policy = make_policy("conductor+predictive")
    assert isinstance(policy, CompiledPolicy)
    env = ClusterVectorEnv(2, "8p8d", trace, "all", Episodes(1000))
    env.reset(seed=0)
    policy.reset(2, 0)
    simulator = env.simulator
    policy.replay(simulator, 0, limit=500)
    many = 200

    def fork() -> None:
        for _ in range(many):
            simulator.fork(0, 1)

    def branch() -> None:
        for _ in range(many):
            simulator.fork(0, 1)
            policy.replay(simulator, 1, limit=250)

    return {
        "forks": many / median(seconds(fork, runs=runs)),
        "branches_of_250_requests": many / median(seconds(branch, runs=runs)),
    }


def threads_speedup(trace: Trace, policy_name: str, runs: int) -> float:
    """How much faster two replays are in two threads than one after the other (kernels run without the GIL)."""
    simulators = [Simulator.for_trace(load_cluster("8p8d"), trace) for _ in range(2)]
    policies = [make_policy(policy_name) for _ in range(2)]

    def replay(i: int) -> None:
        policy = policies[i]
        assert isinstance(policy, CompiledPolicy)
        policy.replay(simulators[i])

    def begin() -> None:
        for simulator, policy in zip(simulators, policies, strict=True):
            policy.reset(1, 0)
            simulator.begin(0, recheck=policy.recheck)

    with ThreadPoolExecutor(2) as pool:
        alone = seconds(lambda: list(map(replay, range(2))), before=begin, runs=runs)
        together = seconds(lambda: list(pool.map(replay, range(2))), before=begin, runs=runs)
    return median(alone) / median(together)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--trace", default="builtin:conversation", help="trace file (default: %(default)s)")
    arguments.add_argument("--policy", default="conductor+predictive")
    arguments.add_argument("--requests", default="12000,100000,1000000", help="trace lengths (default: %(default)s)")
    options = arguments.parse_args()
    trace = load_trace(options.trace)
    decision_us = {}
    for size in (8, 64, 256):
        taken = replay_seconds(trace, f"{size}p{size}d", options.policy, size / 8, options.runs)
        decision_us[str(size)] = taken / trace.n_requests * 1e6
    growth = {}
    for count in map(int, filter(None, options.requests.split(","))):
        long = builtin("conversation", seed=0, n_requests=count)
        taken = replay_seconds(long, "8p8d", options.policy, 1.0, max(1, min(options.runs, 3)))
        growth[str(count)] = taken / count * 1e6
    whole = Simulator.for_trace(load_cluster("8p8d"), trace)
    report(
        {
            "decision_us": decision_us,
            "decision_us_256_over_8": decision_us["256"] / decision_us["8"],
            "replay_us_per_request": growth,
            "bytes_per_cluster_whole_trace": whole.bytes_per_cluster,
            "per_second": forks_per_second(trace, options.runs),
            "two_threads_speedup": threads_speedup(trace, options.policy, options.runs),
        },
        options.json,
    )


if __name__ == "__main__":
    entry(main)
