"""Groups of nodes that prefill as a pipeline (docs/physics.md, "Pipelined groups"): what they must and cannot bring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.kernel.latency import compute_time, drain_time, longest_chunk
from envs.simulator import Simulator
from envs.spec import ClusterSpec, validate_cluster
from envs.state import Records, Source
from traces import Trace

HARDWARE = "a800x8-llama2-70b"


def cluster(count: int, nodes: int, chunk_tokens: int = 8192) -> ClusterSpec:
    times = {"base_s": 0.0498, "linear_s": 1.102e-4, "quadratic_s": 7.61e-10, "chunk_tokens": chunk_tokens}
    prefill = {"count": count, "hardware": HARDWARE, "pipeline_nodes": nodes, "times": times}
    fields = {"prefill": [prefill], "decode": [{"count": 1, "hardware": HARDWARE}]}
    return validate_cluster(fields, "a test")


def prefill_s(spec: ClusterSpec, input_tokens: int) -> float:
    """Of a request that is alone."""
    instance = spec.parameters().prefill[0]
    return float(compute_time(instance, input_tokens, 0) + drain_time(instance, input_tokens, 0))


def replay(spec: ClusterSpec, input_tokens: list[int]) -> Records:
    """Outcomes of requests that all come at once, go to the instances in turn and have one token of output."""
    count = len(input_tokens)
    trace = Trace(
        arrival_s=np.zeros(count),
        input_tokens=np.array(input_tokens, np.int32),
        output_tokens=np.ones(count, np.int32),
        block_offsets=np.zeros(count + 1, np.int64),
        block_ids=np.zeros(0, np.int32),
        block_tokens=512,
        name="at once",
    )
    simulator = Simulator.for_trace(spec, trace)
    simulator.begin(0)
    for i in range(count):
        assert simulator.observe(0)
        simulator.decide(0, i % spec.n_prefill, 0, Source.RECOMPUTE)
    assert not simulator.observe(0)
    return simulator.outcomes(0)


def test_three_chunks_on_two_nodes() -> None:
    # 8192, 8192 and 3616 tokens: 1.0036, 1.0049 and 0.4983 s on a node that has all layers.
    chunks = [0.0498 + 0.902758 + 0.051069, 0.902758 + 0.153208, 0.398483 + 0.100135]
    assert prefill_s(cluster(1, 1), 20_000) == pytest.approx(sum(chunks), rel=1e-5)
    # First stage: all halves, one after the other. Second: the longest once more.
    assert prefill_s(cluster(1, 2), 20_000) == pytest.approx(sum(chunks) / 2 + chunks[1] / 2, rel=1e-5)
    (outcome,) = replay(cluster(1, 2), [20_000])
    assert outcome["prefill_s"] == pytest.approx(sum(chunks) / 2, rel=1e-5)
    assert outcome["ttft_s"] == pytest.approx(sum(chunks) / 2 + chunks[1] / 2, rel=1e-5)
    assert outcome["predicted_ttft_s"] == outcome["ttft_s"]


@given(
    st.integers(1, 200_000),
    st.floats(0, 1),
    st.integers(100, 50_000),
    st.floats(0, 3),
    st.floats(0, 3),
    st.floats(0, 9),
)
def test_the_longest_chunk(n: int, share: float, size: int, base_s: float, overhead_s: float, quadratic: float) -> None:
    """Found among three of them, it is the longest of all."""
    instance = cluster(1, 2, size).parameters().prefill[0]
    instance["base_s"], instance["chunk_overhead_s"], instance["quadratic_s"] = base_s, overhead_s, quadratic * 1e-9
    reused = int(share * (n - 1))
    times = {}
    for start in range(reused, n, size):
        stop = min(start + size, n)
        fixed_s = base_s if start == reused else overhead_s
        times[start, stop] = quadratic * 1e-9 * (stop**2 - start**2) + 1.102e-4 * (stop - start) + fixed_s
    start, stop, longest_s = longest_chunk(instance, n, reused)
    assert longest_s == pytest.approx(max(times.values()))
    assert times[start, stop] == pytest.approx(longest_s)
    assert compute_time(instance, n, reused) == pytest.approx(sum(times.values()) / 2)


def test_long_inputs_gain_from_nodes_and_short_ones_do_not() -> None:
    long = [prefill_s(cluster(1, nodes), 131_072) for nodes in (1, 2, 4, 8)]
    for nodes, seconds in zip((2, 4, 8), long[1:], strict=True):
        assert long[0] / nodes < seconds < long[0]
    assert long == sorted(long, reverse=True)
    assert long[0] / long[2] > 2.8  # four nodes, 16 chunks
    short = [prefill_s(cluster(1, nodes), 8192) for nodes in (1, 2, 4, 8)]
    assert short == pytest.approx([short[0]] * 4)
    # nor without chunks
    assert prefill_s(cluster(1, 4, 1 << 20), 131_072) == pytest.approx(long[0])
    # smaller chunks, of which a pipeline is full sooner
    assert prefill_s(cluster(1, 4, 2048), 131_072) < long[2]


def test_a_group_does_as_much_as_its_nodes_do() -> None:
    """One request enters while the one before it drains: the better TTFT of a group is not paid with throughput."""
    lengths = [2_000, 60_000, 9_000, 20_000] * 12
    nodes = replay(cluster(4, 1), lengths)
    group = replay(cluster(1, 4), lengths)
    busy_s = nodes["prefill_s"].sum() / 4
    assert group["prefill_s"].sum() == pytest.approx(busy_s)
    last_drain_s = drain_time(cluster(1, 4).parameters().prefill[0], 60_000, 0)  # of the longest chunk of all
    assert group["prefill_end_s"].max() == pytest.approx(busy_s + last_drain_s)
    assert (np.diff(group["prefill_end_s"]) > 0).all()
    assert group["predicted_ttft_s"] == pytest.approx(group["ttft_s"])
