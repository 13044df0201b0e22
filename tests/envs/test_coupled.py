"""Coupled instances: the compiled ones against tests/reference_coupled.py, invariants, and the real traces."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import metrics
from envs.coupled import CoupledSimulator
from envs.spec import SpecError, coupled_names, load_cluster, load_coupled
from envs.state import COUPLED_CLUSTER, COUPLED_PARAMETERS, Status
from tests.envs.test_against_reference import as_trace, close, records
from tests.random_clusters import random_case
from tests.reference_coupled import ReferenceCoupled
from tests.reference_simulator import Request
from traces import Trace, builtin
from traces import load as load_trace

TRACES = Path(__file__).resolve().parents[2] / ".." / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces (../shared/traces) are not here")
TIMES = (
    "ttft_s",
    "tbt_s",
    "tbt_mean_s",
    "prefill_start_s",
    "prefill_s",
    "prefill_end_s",
    "kv_ready_s",
    "join_s",
    "finish_s",
)


def coupled_case(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[Request]]:
    """A small cluster of each kind of instance, and requests that share prefixes."""
    cluster, _, _, requests, rng = random_case(seed)
    start_s = requests[0].arrival_s
    requests = [Request(r.arrival_s - start_s, r.input_tokens, r.output_tokens, r.blocks) for r in requests]
    kinds = rng.choice(([(0, 0)], [(1, 0)], [(0, 1)], [(1, 1)], [(0, 0), (1, 0), (0, 1), (1, 1)]))
    instances = [_instance(rng, *rng.choice(kinds)) for _ in range(rng.choice((1, 1, 2, 3)))]
    head = {name: cluster[name] for name in ("block_tokens", "ttft_slo_s", "tbt_slo_s", "tbt_tail_share")}
    return head, instances, requests


def _instance(rng: random.Random, prefix_cache: int, chunked: int) -> dict[str, Any]:
    return {
        "base_s": rng.uniform(0.005, 0.05),
        "linear_s": 10.0 ** rng.uniform(-4.0, -2.5),
        "quadratic_s": rng.uniform(1e-6, 1e-5),
        "step_base_s": rng.uniform(0.005, 0.03),
        "step_request_s": rng.uniform(0.0005, 0.004),
        "step_token_s": rng.uniform(1e-6, 5e-5),
        "kv_capacity_tokens": rng.choice((rng.randint(60, 200), rng.randint(150, 900), rng.randint(900, 4000))),
        "max_batch": rng.choice((1, 2, 3, 8)),
        "prefix_cache": prefix_cache,
        "chunk_tokens": chunked * rng.choice((rng.randint(1, 6), rng.randint(4, 40), rng.randint(20, 200))),
    }


def run_both(seed: int) -> ReferenceCoupled:
    return compare(*coupled_case(seed), f"seed {seed}")


def compare(
    cluster: dict[str, Any], instances: list[dict[str, Any]], requests: list[Request], case: str
) -> ReferenceCoupled:
    reference = ReferenceCoupled(cluster, instances, requests)
    reference.replay()
    tables = records(COUPLED_CLUSTER, [cluster]), records(COUPLED_PARAMETERS, instances)
    outcomes = CoupledSimulator(tables, as_trace(requests, cluster["block_tokens"])).replay().outcomes
    for i, (ours, theirs) in enumerate(zip(outcomes, reference.outcomes, strict=True)):
        where = f"{case}, request {i}"
        assert Status(ours["status"]).name.lower() == theirs["status"], where
        assert ours["prefill"] == ours["decode"] == theirs["instance"], where
        assert ours["reused_tokens"] == ours["device_tokens"] == theirs["reused_tokens"], where
        assert ours["good"] == theirs["good"], where
        for name in TIMES:
            expected = theirs.get(name, math.nan)
            assert close(float(ours[name]), expected), (where, name, ours[name], expected)
    return reference


@pytest.mark.parametrize("block", range(10))
def test_agrees_on_fixed_seeds(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        run_both(seed)


@settings(deadline=None, max_examples=100)
@given(st.integers(min_value=1000, max_value=2**31))
def test_agrees_on_any_seed(seed: int) -> None:
    run_both(seed)


def test_random_cases_reach_every_rule() -> None:
    seen: set[str] = set()
    for seed in range(100):
        seen |= {what for what, times in run_both(seed).seen.items() if times}
    assert seen == {
        "a prefill stalls members",
        "eviction",
        "eviction skips a block in use",
        "prefill goes on",
        "rejected",
        "reuse",
        "several pieces",
        "the first that waits does not fit",
    }


# --- by hand ------------------------------------------------------------------------------------------------------


def by_hand(requests: list[tuple[float, int, int, list[int]]], **changes: Any) -> np.ndarray:
    """Outcomes on one instance: prefill takes 1 s and 0.01 s a token, a decode iteration 0.1 s; blocks of 10 tokens."""
    instance = {
        "base_s": 1.0,
        "linear_s": 0.01,
        "quadratic_s": 0.0,
        "step_base_s": 0.1,
        "step_request_s": 0.0,
        "step_token_s": 0.0,
        "kv_capacity_tokens": 1000,
        "max_batch": 9,
        "prefix_cache": 0,
        "chunk_tokens": 0,
    } | changes
    cluster = {"block_tokens": 10, "ttft_slo_s": 30.0, "tbt_slo_s": 0.1, "tbt_tail_share": 0.1}
    tables = records(COUPLED_CLUSTER, [cluster]), records(COUPLED_PARAMETERS, [instance])
    trace = as_trace([Request(*request) for request in requests], 10)
    return CoupledSimulator(tables, trace).replay().outcomes


def test_a_prefill_stalls_the_batch() -> None:
    first, second = by_hand([(0.0, 100, 11, []), (2.25, 200, 1, [])])
    # tokens of the first at 2.0, 2.1, 2.2, 2.3, then the second's prefill of 3 s, then one each 0.1 s
    assert first["ttft_s"] == pytest.approx(2.0)
    assert second["prefill_start_s"] == pytest.approx(2.3)
    assert second["finish_s"] == second["prefill_end_s"] == pytest.approx(5.3)
    assert first["finish_s"] == pytest.approx(6.0)
    assert first["tbt_s"] == pytest.approx(3.1)  # the longest tenth of 10 intervals
    assert first["tbt_mean_s"] == pytest.approx(0.4)


def test_prefills_in_a_row_stall_those_before_them() -> None:
    first, second = by_hand([(0.0, 100, 2, []), (0.5, 200, 2, [])])
    assert first["tbt_s"] == pytest.approx(3.1)
    assert second["tbt_s"] == pytest.approx(0.1)


def test_chunks_make_intervals_longer() -> None:
    first, second = by_hand([(0.0, 100, 11, []), (2.25, 250, 2, [])], chunk_tokens=100)
    assert second["prefill_start_s"] == pytest.approx(2.3)
    assert second["ttft_s"] == pytest.approx(2.3 + 2.1 + 2.1 + 1.6 - 2.25)
    assert second["prefill_s"] == pytest.approx(5.5)
    assert first["tbt_s"] == pytest.approx(2.1)
    assert first["tbt_mean_s"] == pytest.approx((3 * 0.1 + 5.8 + 4 * 0.1) / 10)


def test_running_kv_pushes_out_cached_blocks() -> None:
    a, b = [0, 1, 2, 3], [4, 5, 6, 7]
    room = {"prefix_cache": 1, "kv_capacity_tokens": 71}
    first, again = by_hand([(0.0, 40, 1, a), (9.0, 40, 1, a)], **room)
    assert again["reused_tokens"] == 39
    first, other, again = by_hand([(0.0, 40, 1, a), (9.0, 40, 1, b), (18.0, 40, 1, a)], **room)
    # 8 blocks and a token do not go into 71: the two deepest of a give way, then b's two deepest for them
    assert again["reused_tokens"] == 30
    assert again["prefill_s"] == pytest.approx(1.1)
    assert (first["status"], other["status"]) == (Status.COMPLETED, Status.COMPLETED)


def test_what_can_never_run_is_rejected() -> None:
    fits, too_long = by_hand([(0.0, 990, 10, []), (1.0, 990, 11, [])])
    assert fits["status"] == Status.COMPLETED
    assert too_long["status"] == Status.REJECTED_AT_ARRIVAL
    assert too_long["prefill"] == -1 and math.isnan(too_long["ttft_s"])


# --- clusters and traces --------------------------------------------------------------------------------------------


def test_built_in_clusters() -> None:
    kinds = ("", "-prefix", "-chunked")
    assert set(coupled_names()) == {f"vllm-{count}m{kind}" for count in (20, 16, 4) for kind in kinds}
    assert load_coupled("vllm-16m").n_instances == 16
    _, nodes = load_coupled("vllm-4m-prefix").parameters()
    assert nodes["prefix_cache"].tolist() == [1] * 4
    assert nodes["kv_capacity_tokens"].tolist() == [1_300_000] * 4
    _, nodes = load_coupled("vllm-4m-chunked").parameters()
    assert nodes["chunk_tokens"].tolist() == [2048] * 4


def test_wrong_clusters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="both prefill and decode"):
        load_cluster("vllm-16m")
    with pytest.raises(SpecError, match="no cluster of coupled instances is called '8p8d'"):
        load_coupled("8p8d")
    path = tmp_path / "mine.yaml"
    path.write_text("coupled: [{count: 2, hardware: a800x8-llama2-70b, max_batch: 4, chunk: 3}]")
    with pytest.raises(SpecError, match="mine.yaml: coupled.0.chunk: no such field, found 3"):
        load_coupled(path)
    path.write_text("coupled: [{count: 2, hardware: a800x8-llama2-70b, max_batch: 4}]\nslo: {tbt_s: 0.2}")
    _, nodes = load_coupled(path).parameters()
    assert nodes["max_batch"].tolist() == [4, 4]
    with pytest.raises(ValueError, match=r"reblock\(512\)"):
        CoupledSimulator(load_coupled(path), builtin("conversation", seed=0).rows(0, 9).reblock(1024))


def check(trace: Trace, name: str) -> dict[str, Any]:
    """Replay, hold the invariants, and score."""
    simulator = CoupledSimulator(load_coupled(name), trace)
    replay = simulator.replay()
    outcomes = replay.outcomes
    assert _same(simulator.replay().outcomes, outcomes)
    assert (outcomes["status"] == Status.COMPLETED).all()
    assert (outcomes["prefill_start_s"] >= outcomes["arrival_s"]).all()
    assert (outcomes["finish_s"] >= outcomes["prefill_end_s"]).all()
    several = trace.output_tokens > 1
    intervals = trace.output_tokens[several] - 1
    decode_s = (outcomes["finish_s"] - outcomes["prefill_end_s"])[several]
    np.testing.assert_allclose(outcomes["tbt_mean_s"][several] * intervals, decode_s, rtol=1e-6)
    assert (outcomes["tbt_s"] >= outcomes["tbt_mean_s"] * (1 - 1e-9)).all()
    np.testing.assert_allclose(outcomes["ttft_s"], outcomes["prefill_end_s"] - outcomes["arrival_s"])
    instances = simulator.tables.instances
    for emptied in ("outstanding", "running", "batch", "own_tokens", "used_blocks"):
        assert (instances[emptied] == 0).all()
    assert (instances["cached_blocks"] == simulator.tables.cells["resident"].sum(axis=1)).all()
    assert (instances["cached_blocks"] * trace.block_tokens <= simulator.tables.nodes["kv_capacity_tokens"]).all()
    return metrics.score([replay])


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return all(np.array_equal(a[name], b[name], equal_nan=True) for name in a.dtype.names)


@pytest.mark.parametrize("name", ["vllm-20m", "vllm-20m-prefix", "vllm-20m-chunked"])
def test_a_trace(name: str) -> None:
    trace = builtin("conversation", seed=0).rows(0, 1500)
    row = check(trace, name)
    assert row["completed"] == 1500
    assert (row["hit_rate"] > 0) == name.endswith("-prefix")


@pytest.mark.parametrize("prefix_cache", [0, 1])
@pytest.mark.parametrize("chunk_tokens", [0, 2048])
def test_agrees_on_real_sizes(prefix_cache: int, chunk_tokens: int) -> None:
    trace = builtin("conversation", seed=0).rows(0, 150).speed_up(3.0)
    requests = [
        Request(float(trace.arrival_s[i]), int(n), int(o), trace.blocks(i).tolist())
        for i, (n, o) in enumerate(zip(trace.input_tokens, trace.output_tokens))
    ]
    head, nodes = load_coupled("vllm-4m").parameters()
    changes = {"prefix_cache": prefix_cache, "chunk_tokens": chunk_tokens, "kv_capacity_tokens": 200_000}
    instances = [{name: node[name].item() for name in nodes.dtype.names} | changes for node in nodes]
    seen = compare({name: head[0][name].item() for name in head.dtype.names}, instances, requests, "real sizes").seen
    assert (seen["eviction"] > 0) == prefix_cache


def test_a_window_is_what_its_rows_are() -> None:
    trace = builtin("conversation", seed=0).rows(0, 900)
    spec = load_coupled("vllm-4m-prefix")
    window = CoupledSimulator(spec, trace, 300, 600, speed=2.0).replay().outcomes
    rows = trace.rows(300, 600)
    rows = CoupledSimulator(spec, rows, speed=2.0).replay().outcomes
    assert window["arrival_s"][0] == 0.0
    assert _same(window, rows)


@needs_traces
@pytest.mark.parametrize("kind", ["", "-prefix", "-chunked"])
@pytest.mark.parametrize("workload", ["conversation", "synthetic"])
def test_the_real_traces(workload: str, kind: str) -> None:
    row = check(load_trace(TRACES / f"mooncake_{workload}_trace.jsonl.gz"), f"vllm-16m{kind}")
    assert (row["hit_rate"] > 0) == (kind == "-prefix")
