"""Coupled instances: vLLM-style nodes that prefill and decode (docs/physics.md, "Coupled instances").

As on a decode instance, iterations that grow by a constant are one *segment*, one event: plain decode until something
starts or leaves, and a prefill's equal chunks too, whose times are an arithmetic progression on top of the batch's. A
blocking prefill is an event of its own and a stall before the next segment.
"""

from __future__ import annotations

import math

import numpy as np

from ..state import Source, Status
from .compile import compiled
from .decode import add_member
from .latency import reuse_tokens, step_time
from .memory import (
    arrival_of,
    coupled_block_of,
    coupled_cell_of,
    coupled_cluster_of,
    coupled_instance_of,
    coupled_job_of,
    coupled_node_of,
    input_of,
    member_of,
    outcome_of,
    output_of,
    request_of,
    segment_of,
)
from .tail import tail_mean

LOCAL = int(Source.LOCAL)
OPEN, REJECTED_AT_ARRIVAL, COMPLETED = int(Status.OPEN), int(Status.REJECTED_AT_ARRIVAL), int(Status.COMPLETED)
IDLE, PREFILL, SEGMENT = 0, 1, 2  # phase; a segment may have pieces of prefill in it
NAN = math.nan


@compiled
def replay(tables, requests):
    """Empty the instances, let all requests arrive, drain."""
    for i in range(tables.decodes):
        _clear(tables, i)
    for request in range(requests):
        now_s = arrival_of(tables, request)
        _clear_outcome(outcome_of(tables, request), now_s)
        for i in range(tables.decodes):
            _advance(tables, i, now_s)
        chosen = _route(tables, request)
        if chosen < 0:
            outcome_of(tables, request).status = REJECTED_AT_ARRIVAL
        else:
            _arrive(tables, chosen, request, now_s)
    for i in range(tables.decodes):
        _advance(tables, i, np.inf)


@compiled
def _clear(tables, i):
    instance = coupled_instance_of(tables, i)
    instance.phase = IDLE
    instance.outstanding = 0
    instance.running = 0
    instance.batch = 0
    instance.kv_tokens = 0.0
    instance.own_tokens = 0
    instance.used_blocks = 0
    instance.cached_blocks = 0
    instance.cached_first = -1
    instance.cached_last = -1
    instance.waiting_first = -1
    instance.waiting_last = -1
    instance.prefill_first = -1
    instance.prefill_last = -1
    instance.iteration = 0
    instance.segments = 0
    instance.planned = 0
    instance.step_s = 0.0
    instance.growth_s = 0.0
    instance.stall_s = 0.0
    instance.updated_s = 0.0
    instance.due_s = np.inf
    if coupled_node_of(tables, i).prefix_cache != 0:
        for block in range(tables.block_capacity):
            cell = coupled_cell_of(tables, i, block)
            cell.before = -1
            cell.after = -1
            cell.users = 0
            cell.resident = 0


@compiled
def _clear_outcome(outcome, arrival_s):
    outcome.arrival_s = arrival_s
    outcome.status = OPEN
    outcome.good = 0
    outcome.prefill = -1
    outcome.decode = -1
    outcome.source = -1
    outcome.fetched_blocks = 0
    outcome.reused_tokens = 0
    outcome.device_tokens = 0
    outcome.predicted_ttft_s = NAN
    outcome.predicted_tbt_s = NAN
    outcome.prefill_start_s = NAN
    outcome.prefill_end_s = NAN
    outcome.prefill_s = NAN
    outcome.kv_ready_s = NAN
    outcome.join_s = NAN
    outcome.finish_s = NAN
    outcome.ttft_s = NAN
    outcome.tbt_s = NAN
    outcome.tbt_mean_s = NAN


@compiled
def _blocks(tables, i, request):
    """How many blocks of a request instance i looks at."""
    return np.int64(request_of(tables, request).blocks) if coupled_node_of(tables, i).prefix_cache != 0 else 0


@compiled
def _own(tables, i, request):
    """VRAM a request needs outside its blocks."""
    held = _blocks(tables, i, request) * coupled_cluster_of(tables).block_tokens
    return max(0, input_of(tables, request) - held) + output_of(tables, request)


@compiled
def _route(tables, request):
    """The instance with the fewest outstanding requests of those that could ever run this one, or -1."""
    chosen = -1
    fewest = 0
    block_tokens = coupled_cluster_of(tables).block_tokens
    for i in range(tables.decodes):
        outstanding = coupled_instance_of(tables, i).outstanding
        if chosen >= 0 and outstanding >= fewest:
            continue
        need = _blocks(tables, i, request) * block_tokens + _own(tables, i, request)
        if need <= coupled_node_of(tables, i).kv_capacity_tokens:
            chosen = i
            fewest = outstanding
    return chosen


@compiled
def _arrive(tables, i, request, now_s):
    instance = coupled_instance_of(tables, i)
    outcome = outcome_of(tables, request)
    outcome.prefill = i
    outcome.decode = i
    outcome.source = LOCAL
    instance.outstanding += 1
    coupled_job_of(tables, request).next = -1
    if instance.waiting_first < 0:
        instance.waiting_first = request
    else:
        coupled_job_of(tables, instance.waiting_last).next = request
    instance.waiting_last = request
    if instance.phase == IDLE:
        _begin(tables, i, now_s)
    elif (
        instance.phase == SEGMENT
        and instance.prefill_first < 0
        and instance.waiting_first == request
        and _fits(tables, i, request)
    ):
        _cut(instance, now_s)


@compiled
def _run_time(instance, iterations):
    """Seconds of the first `iterations` iterations of a segment."""
    return iterations * instance.step_s + instance.growth_s * (iterations * (iterations - 1.0) / 2.0)


@compiled
def _cut(instance, now_s):
    """End the present segment at the first iteration boundary after now."""
    elapsed = now_s - instance.updated_s
    k = 1.0
    if elapsed >= instance.step_s:
        # smallest k with run_time(k) > elapsed: the root of g k^2/2 + (s - g/2) k - elapsed, then set right
        half = instance.step_s - instance.growth_s / 2.0
        k = math.ceil(2.0 * elapsed / (half + math.sqrt(half * half + 2.0 * instance.growth_s * elapsed)))
        while k > 1.0 and _run_time(instance, k - 1.0) > elapsed:
            k -= 1.0
        while _run_time(instance, k) <= elapsed:
            k += 1.0
    if k < instance.planned:
        instance.planned = np.int64(k)
        instance.due_s = instance.updated_s + _run_time(instance, k)


# --- room -----------------------------------------------------------------------------------------------------------


@compiled
def _fits(tables, i, request):
    """Whether a request could start now, once resident blocks that nobody uses have given way."""
    instance = coupled_instance_of(tables, i)
    node = coupled_node_of(tables, i)
    if instance.running >= node.max_batch:
        return False
    blocks = instance.used_blocks
    for position in range(_blocks(tables, i, request)):
        blocks += coupled_cell_of(tables, i, coupled_block_of(tables, request, position)).users == 0
    tokens = blocks * coupled_cluster_of(tables).block_tokens + instance.own_tokens + _own(tables, i, request)
    return tokens <= node.kv_capacity_tokens


@compiled
def _unchain(tables, i, block):
    """A resident block is to be used, or evicted: it leaves the chain."""
    instance = coupled_instance_of(tables, i)
    cell = coupled_cell_of(tables, i, block)
    if cell.before >= 0:
        coupled_cell_of(tables, i, cell.before).after = cell.after
    else:
        instance.cached_first = cell.after
    if cell.after >= 0:
        coupled_cell_of(tables, i, cell.after).before = cell.before
    else:
        instance.cached_last = cell.before
    instance.cached_blocks -= 1


@compiled
def _start(tables, i, now_s):
    """The first that waits starts its prefill: it is the last of those in prefill now."""
    instance = coupled_instance_of(tables, i)
    request = np.int64(instance.waiting_first)
    job = coupled_job_of(tables, request)
    instance.waiting_first = job.next
    if job.next < 0:
        instance.waiting_last = -1
    job.next = -1
    if instance.prefill_first < 0:
        instance.prefill_first = request
    else:
        coupled_job_of(tables, instance.prefill_last).next = request
    instance.prefill_last = request
    instance.running += 1
    instance.own_tokens += _own(tables, i, request)
    m = _blocks(tables, i, request)
    matched = 0
    while matched < m and coupled_cell_of(tables, i, coupled_block_of(tables, request, matched)).resident != 0:
        matched += 1
    block_tokens = coupled_cluster_of(tables).block_tokens
    job.done = reuse_tokens(matched, block_tokens, input_of(tables, request))
    for position in range(m):
        block = coupled_block_of(tables, request, position)
        cell = coupled_cell_of(tables, i, block)
        if cell.users == 0:
            if cell.resident != 0:
                _unchain(tables, i, block)
            instance.used_blocks += 1
        cell.users += 1
    room = coupled_node_of(tables, i).kv_capacity_tokens - instance.own_tokens
    while instance.cached_blocks > 0 and (instance.used_blocks + instance.cached_blocks) * block_tokens > room:
        block = np.int64(instance.cached_first)
        _unchain(tables, i, block)
        coupled_cell_of(tables, i, block).resident = 0
    outcome = outcome_of(tables, request)
    outcome.prefill_start_s = now_s
    outcome.prefill_s = 0.0
    outcome.reused_tokens = job.done
    outcome.device_tokens = job.done


@compiled
def _complete(tables, i, request, now_s, tbt_s, tbt_mean_s):
    """A request has its last token: it releases its blocks, the deepest to be evicted first."""
    instance = coupled_instance_of(tables, i)
    cluster = coupled_cluster_of(tables)
    instance.running -= 1
    instance.outstanding -= 1
    instance.own_tokens -= _own(tables, i, request)
    for position in range(_blocks(tables, i, request) - 1, -1, -1):
        block = coupled_block_of(tables, request, position)
        cell = coupled_cell_of(tables, i, block)
        cell.users -= 1
        if cell.users == 0:
            instance.used_blocks -= 1
            instance.cached_blocks += 1
            cell.before = instance.cached_last
            cell.after = -1
            if instance.cached_last >= 0:
                coupled_cell_of(tables, i, instance.cached_last).after = block
            else:
                instance.cached_first = block
            instance.cached_last = block
    outcome = outcome_of(tables, request)
    outcome.status = COMPLETED
    outcome.finish_s = now_s
    outcome.tbt_s = tbt_s
    outcome.tbt_mean_s = tbt_mean_s
    outcome.good = 1 if outcome.ttft_s <= cluster.ttft_slo_s and tbt_s <= cluster.tbt_slo_s else 0


# --- iterations -----------------------------------------------------------------------------------------------------


@compiled
def _work(node, start, stop):
    """Seconds of prefill compute for tokens start .. stop of a prompt."""
    x = float(start)
    y = float(stop)
    return node.linear_s * (y - x) + node.quadratic_s * (y * y - x * x)


@compiled
def _advance(tables, i, until_s):
    """Everything on instance i that ends by `until_s`."""
    instance = coupled_instance_of(tables, i)
    while instance.phase != IDLE and instance.due_s <= until_s:
        now_s = instance.due_s
        if instance.phase == SEGMENT:
            _end_segment(tables, i, now_s)
        _end_pieces(tables, i, now_s)
        _begin(tables, i, now_s)


@compiled
def _end_segment(tables, i, now_s):
    """The planned iterations are done: members have a token of each; who has all leaves."""
    instance = coupled_instance_of(tables, i)
    if instance.batch > 0:
        segment = segment_of(tables, i, instance.segments)
        segment.step_s = instance.step_s
        segment.growth_s = instance.growth_s
        segment.stall_s = instance.stall_s
        segment.count = instance.planned
        instance.segments += 1
    instance.stall_s = 0.0
    instance.iteration += instance.planned
    instance.kv_tokens += float(instance.batch * instance.planned)
    share = coupled_cluster_of(tables).tbt_tail_share
    while instance.batch > 0 and member_of(tables, i, instance.batch - 1).leave <= instance.iteration:
        instance.batch -= 1
        request = member_of(tables, i, instance.batch).request
        o = output_of(tables, request)
        instance.kv_tokens -= input_of(tables, request) + o - 1
        job = coupled_job_of(tables, request)
        first = job.first_segment
        stall_s = segment_of(tables, i, first).stall_s - job.stall_before_s
        tail_s, mean_s = tail_mean(tables, i, first, instance.segments, o - 1, share, stall_s)
        _complete(tables, i, request, now_s, tail_s, mean_s)
    if instance.batch == 0:
        instance.kv_tokens = 0.0


@compiled
def _end_pieces(tables, i, now_s):
    """Account for the pieces of prefill of the planned iterations; whose prompt is done joins."""
    instance = coupled_instance_of(tables, i)
    node = coupled_node_of(tables, i)
    base_s = node.base_s * instance.planned
    while instance.prefill_first >= 0:
        request = np.int64(instance.prefill_first)
        job = coupled_job_of(tables, request)
        outcome = outcome_of(tables, request)
        done = job.done + job.piece * instance.planned
        outcome.prefill_s += base_s + _work(node, job.done, done)
        base_s = 0.0
        job.done = done
        if done < input_of(tables, request):
            return  # only the last can be unfinished
        instance.prefill_first = job.next
        _end_prefill(tables, i, request, now_s)
    instance.prefill_last = -1


@compiled
def _end_prefill(tables, i, request, now_s):
    instance = coupled_instance_of(tables, i)
    for position in range(_blocks(tables, i, request)):
        coupled_cell_of(tables, i, coupled_block_of(tables, request, position)).resident = 1
    outcome = outcome_of(tables, request)
    outcome.prefill_end_s = now_s
    outcome.ttft_s = now_s - outcome.arrival_s
    o = output_of(tables, request)
    if o == 1:
        _complete(tables, i, request, now_s, 0.0, 0.0)
        return
    outcome.kv_ready_s = now_s
    outcome.join_s = now_s
    instance.kv_tokens += input_of(tables, request)
    job = coupled_job_of(tables, request)
    job.first_segment = instance.segments
    job.stall_before_s = instance.stall_s
    add_member(tables, i, instance.batch, instance.iteration + o - 1, request)
    instance.batch += 1


@compiled
def _begin(tables, i, now_s):
    """The next iteration starts, now, and with it as many like it as can be planned."""
    instance = coupled_instance_of(tables, i)
    node = coupled_node_of(tables, i)
    chunk = node.chunk_tokens
    instance.updated_s = now_s
    if instance.batch == 0:
        instance.stall_s = 0.0
    if chunk == 0 and instance.waiting_first >= 0 and _fits(tables, i, instance.waiting_first):
        _start(tables, i, now_s)
        request = np.int64(instance.prefill_first)
        job = coupled_job_of(tables, request)
        n = input_of(tables, request)
        job.piece = n - job.done
        duration = node.base_s + _work(node, job.done, n)
        instance.phase = PREFILL
        instance.planned = 1
        instance.stall_s += duration
        instance.due_s = now_s + duration
        return
    room = chunk
    prefill_s = 0.0
    growth_s = 0.0
    like_it = np.int64(1)  # iterations
    request = np.int64(instance.prefill_first)  # under way
    while True:
        if request < 0:
            if room == 0 or instance.waiting_first < 0 or not _fits(tables, i, instance.waiting_first):
                break
            _start(tables, i, now_s)
            request = np.int64(instance.prefill_last)
        job = coupled_job_of(tables, request)
        rest = input_of(tables, request) - job.done
        job.piece = min(room, rest)
        prefill_s += _work(node, job.done, job.done + job.piece)
        if job.piece == chunk:
            like_it = rest // chunk
            growth_s = 2.0 * node.quadratic_s * float(chunk) * float(chunk)
        room -= job.piece
        request = np.int64(-1)
    if room < chunk:
        instance.step_s = node.base_s + prefill_s
        instance.growth_s = growth_s
        instance.planned = like_it
    elif instance.batch > 0:
        instance.step_s = 0.0
        instance.growth_s = 0.0
        instance.planned = member_of(tables, i, instance.batch - 1).leave - instance.iteration
    else:
        instance.phase = IDLE
        instance.due_s = np.inf
        return
    if instance.batch > 0:
        instance.step_s += step_time(node, float(instance.batch), instance.kv_tokens)
        instance.growth_s += node.step_token_s * instance.batch
        instance.planned = min(instance.planned, member_of(tables, i, instance.batch - 1).leave - instance.iteration)
    instance.phase = SEGMENT
    instance.due_s = now_s + _run_time(instance, float(instance.planned))
