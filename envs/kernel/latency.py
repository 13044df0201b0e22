"""How long things take: the same functions serve the physics and the predictions ([A] E2, 5.2)."""

from __future__ import annotations

import math

from .compile import compiled
from .memory import cluster_of, prefill_node_of


@compiled
def reuse_tokens(blocks, block_tokens, input_tokens):
    """Tokens reused when the first `blocks` blocks are: one token is always computed."""
    return min(blocks * block_tokens, input_tokens - 1)


@compiled
def compute_time(instance, input_tokens, reused_tokens):
    """Seconds of prefill compute, in each stage of a pipelined group, for the tokens that are not reused.

    `instance`: PREFILL_PARAMETERS record.
    """
    new = float(input_tokens - reused_tokens)
    total = float(input_tokens)
    reused = float(reused_tokens)
    seconds = instance.quadratic_s * (total * total - reused * reused) + instance.linear_s * new + instance.base_s
    if instance.chunk_overhead_s > 0.0:
        seconds += instance.chunk_overhead_s * (math.ceil(new / instance.chunk_tokens) - 1)
    return seconds / instance.pipeline_nodes


@compiled
def _chunk_time(instance, start, stop, fixed_s):
    """Seconds a node with all layers takes for the chunk of tokens [start, stop)."""
    s = float(start)
    e = float(stop)
    return instance.quadratic_s * (e * e - s * s) + instance.linear_s * (e - s) + fixed_s


@compiled
def longest_chunk(instance, input_tokens, reused_tokens):
    """(first token, token after the last, seconds on a node with all layers) of the chunk that takes longest."""
    size = instance.chunk_tokens
    start = reused_tokens
    stop = min(start + size, input_tokens)
    longest_s = _chunk_time(instance, start, stop, instance.base_s)
    if stop == input_tokens:
        return start, stop, longest_s
    # later chunks see more context: it is the first, the last full one or the last
    last = input_tokens - 1 - (input_tokens - 1 - reused_tokens) % size
    for at in (last - size, last):
        end = min(at + size, input_tokens)
        chunk_s = _chunk_time(instance, at, end, instance.chunk_overhead_s)
        if at > reused_tokens and chunk_s > longest_s:
            start, stop, longest_s = at, end, chunk_s
    return start, stop, longest_s


@compiled
def drain_time(instance, input_tokens, reused_tokens):
    """Seconds from a prefill's leaving the first stage of a pipelined group to its end, with nothing in its way."""
    if instance.pipeline_nodes == 1:
        return 0.0
    _, _, longest_s = longest_chunk(instance, input_tokens, reused_tokens)
    return (instance.pipeline_nodes - 1) * longest_s / instance.pipeline_nodes


@compiled
def drain_ahead(prefill, instance, now_s, input_tokens, reused_tokens):
    """`drain_time` expected of a request that is admitted now, behind all others; `prefill`: PREFILL record."""
    if instance.pipeline_nodes == 1:
        return 0.0
    left_s = prefill.drain_s - max(0.0, now_s - prefill.running_end_s)
    return max(left_s, drain_time(instance, input_tokens, reused_tokens))


@compiled
def stage_layers(cluster, instance):
    """Layers of a node: one of them is what cannot overlap."""
    return cluster.layers / instance.pipeline_nodes


@compiled
def overlap(compute_s, load_s, layers):
    """Layer-wise overlap of compute and prefix load: the longer of both, plus one layer of the other ([A] 5.2)."""
    return max(compute_s, load_s) + min(compute_s, load_s) / layers


@compiled
def block_load_time(cluster, instance):
    """Seconds to bring one block from host memory to the device."""
    return cluster.block_tokens * cluster.kv_bytes_per_token / instance.h2d_bytes_per_s


@compiled
def load_time(cluster, instance, blocks, from_disk):
    """Seconds to bring blocks to the device, `from_disk` of them read from disk: the slower link sets the time."""
    load_s = blocks * block_load_time(cluster, instance)
    if from_disk > 0:
        disk_s = from_disk * cluster.block_tokens * cluster.kv_bytes_per_token / instance.disk_bytes_per_s
        load_s = max(load_s, disk_s)
    return load_s


@compiled
def prefill_time(cluster, instance, input_tokens, blocks, load_s):
    """Seconds a prefill takes a stage when it reuses `blocks` blocks, which take `load_s` to come to the device."""
    reused = reuse_tokens(blocks, cluster.block_tokens, input_tokens)
    compute_s = compute_time(instance, input_tokens, reused)
    if load_s <= 0.0:
        return compute_s
    return overlap(compute_s, load_s, stage_layers(cluster, instance))


@compiled
def prefill_seconds(parameters, p, input_tokens, blocks, loaded_blocks):
    """`prefill_time` on instance p when `loaded_blocks` of the reused blocks are in host memory."""
    cluster = cluster_of(parameters)
    instance = prefill_node_of(parameters, p)
    return prefill_time(cluster, instance, input_tokens, blocks, loaded_blocks * block_load_time(cluster, instance))


@compiled
def step_time(instance, batch, context_tokens):
    """Seconds of one decode iteration; `instance`: DECODE_PARAMETERS record."""
    return instance.step_base_s + instance.step_request_s * batch + instance.step_token_s * context_tokens


@compiled
def expected_stall(cluster, decode):
    """Join stall expected in an interval among the longest `tbt_tail_share`: (seconds per second of it, at most)."""
    if decode.stall_rate <= 0.0:
        return 0.0, 0.0
    return decode.stall_rate / cluster.tbt_tail_share, decode.stall_rate / decode.join_rate


@compiled
def tbt(instance, batch, context_tokens, stall_share, stall_s):
    """Predicted TBT: an iteration, plus the join stall that `expected_stall` gives."""
    step_s = step_time(instance, batch, context_tokens)
    return step_s + min(step_s * stall_share, stall_s)


@compiled
def context_tokens(instance, decode, now_s):
    """Context tokens of a decode batch at `now_s`, extrapolated from its last change."""
    if decode.batch == 0:
        return 0.0
    step_s = step_time(instance, float(decode.batch), decode.kv_tokens)
    return decode.kv_tokens + decode.batch * max(0.0, now_s - decode.updated_s) / step_s


@compiled
def nic_share(bandwidth, flows, used):
    """Bytes per second a new transfer can expect on a NIC side."""
    return max(bandwidth / (1.0 + flows), bandwidth - used)
