"""The one contract: a trace through the sidecar, on simulated workers, is decided as the gym decides it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

import traces
from envs.spec import ClusterSpec, load_cluster, validate_cluster
from policies import make_policy
from traces import Trace

from .simulated_workers import SimulatedWorkers

REAL = Path(__file__).resolve().parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"


def compare(serve, tmp_path: Path, trace: Trace, cluster: str | ClusterSpec, policy: str, requests: int) -> int:
    """Play a trace; the number of requests that were compared."""
    spec = load_cluster(cluster)
    simulated = SimulatedWorkers(spec, trace)
    path = tmp_path / "cluster.yaml"
    described = spec.model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(described | {"workers": simulated.workers()}))
    exactly = "--external-clock", "--no-calibrate", "--deadline-ms", "60000"
    sidecar = serve("--cluster", str(path), "--policy", policy, *exactly)
    rejected = fetched = seen = 0
    try:
        for request, both in enumerate(simulated.play(sidecar.stub(), make_policy(policy), requests)):
            assert both.sidecar == both.gym, f"request {request}: {both}"
            if both.gym[0] < 0:
                rejected += 1
            else:
                fetched += both.gym[2] == 1
                for ours, theirs in zip(both.sidecar_predicted, both.gym_predicted, strict=True):
                    assert math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12), f"request {request}: {both}"
            seen += 1
    finally:
        simulated.close()
    print(f"{seen} requests decided alike, {rejected} of them rejected, {fetched} with a fetch")
    return seen


@pytest.mark.skipif(not REAL.exists(), reason="real traces are not here (../shared)")
def test_a_real_trace_is_decided_alike(serve, tmp_path):
    trace = traces.load(REAL).rows(0, 1200).speed_up(2.0)
    assert compare(serve, tmp_path, trace, "5p5d", "conductor+predictive", 1200) == 1200


def test_a_synthetic_trace_is_decided_alike(serve, tmp_path):
    trace = traces.builtin("toolagent", seed=1).rows(0, 600).speed_up(4.0)
    assert compare(serve, tmp_path, trace, "3p1d", "cache_aware+early", 600) == 600


def test_on_pipelined_groups_a_trace_is_decided_alike(serve, tmp_path):
    trace = traces.builtin("conversation", seed=1).rows(0, 600).speed_up(2.0)
    group = {"count": 3, "hardware": "a800x8-llama2-70b", "pipeline_nodes": 2}
    spec = validate_cluster({"prefill": [group], "decode": [{"count": 4, "hardware": "a800x8-llama2-70b"}]}, "groups")
    assert compare(serve, tmp_path, trace, spec, "conductor+predictive", 600) == 600


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="real traces are not here (../shared)")
@pytest.mark.parametrize("policy", ["conductor+predictive", "dynamo", "random+slo"])
def test_a_whole_trace_is_decided_alike(serve, tmp_path, policy):
    trace = traces.load(REAL).speed_up(1.5)
    assert compare(serve, tmp_path, trace, "8p8d", policy, trace.n_requests) == trace.n_requests
