"""The types everything turns on: `ClusterState`, `Decision`, `Outcome`, and the simulator's `World` around the state.

A `ClusterState` holds what a scheduler may know, as plain structured arrays. The simulator keeps one; the live
sidecar keeps one. `World` adds what only the simulator knows (output lengths, timers, pins, recency). All of it
is arrays, so a state forks by copying memory. docs/physics.md defines every quantity.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def _lines(dtype: np.dtype) -> np.dtype:
    """`dtype` padded to whole cache lines, so that a record lies in no more of them than it must."""
    fields: Any = dtype.fields
    names = list(fields)
    return np.dtype(
        {
            "names": names,
            "formats": [fields[name][0] for name in names],
            "offsets": [fields[name][1] for name in names],
            "itemsize": -(-dtype.itemsize // 64) * 64,
        },
        align=True,
    )


Records = np.ndarray  # a structured array; its dtype is named beside each field


class Source(IntEnum):
    """Where the reused prefix of a prefill comes from ([A] Algorithm 1)."""

    LOCAL = 0
    FETCH = 1
    RECOMPUTE = 2


class EvictionRule(IntEnum):
    """Which cached blocks give way first (docs/physics.md, "Tiers")."""

    LRU = 0
    LFU = 1
    LENGTH_AWARE = 2


class Status(IntEnum):
    """What became of a request. Every request ends in exactly one of the last three."""

    OPEN = 0
    REJECTED_AT_ARRIVAL = 1
    REJECTED_AT_DECODE = 2
    COMPLETED = 3


# --- parameters (docs/physics.md, "Parameters") ----------------------------------------------------------------

CLUSTER_PARAMETERS = np.dtype(
    [
        ("block_tokens", "i8"),
        ("kv_bytes_per_token", "f8"),
        ("layers", "f8"),
        ("transfer_latency_s", "f8"),
        ("ttft_slo_s", "f8"),
        ("tbt_slo_s", "f8"),
        ("tbt_tail_share", "f8"),
        ("decode_recheck", "i8"),
        ("prior_output_tokens", "f8"),
        ("prior_decode_s", "f8"),
        ("decode_time_s", "f8"),  # 0: the moving value
        ("rate_horizon_s", "f8"),
        ("eviction", "i8"),  # EvictionRule
    ],
    align=True,
)
PREFILL_PARAMETERS = np.dtype(
    [
        ("base_s", "f8"),
        ("linear_s", "f8"),
        ("quadratic_s", "f8"),
        ("chunk_tokens", "i8"),
        ("chunk_overhead_s", "f8"),
        ("h2d_bytes_per_s", "f8"),
        ("nic_bytes_per_s", "f8"),
        ("device_blocks", "i8"),
        ("host_blocks", "i8"),
        ("pipeline_nodes", "i8"),
        ("disk_blocks", "i8"),
        ("disk_bytes_per_s", "f8"),
    ],
    align=True,
)
DECODE_PARAMETERS = np.dtype(
    [
        ("step_base_s", "f8"),
        ("step_request_s", "f8"),
        ("step_token_s", "f8"),
        ("join_bytes_per_s", "f8"),
        ("nic_bytes_per_s", "f8"),
        ("kv_capacity_tokens", "i8"),
        ("max_batch", "i8"),
    ],
    align=True,
)


class Parameters(NamedTuple):
    """A `ClusterSpec` as arrays: `cluster` [1], `prefill` [P], `decode` [D]."""

    cluster: Records  # CLUSTER_PARAMETERS
    prefill: Records  # PREFILL_PARAMETERS
    decode: Records  # DECODE_PARAMETERS


# --- what a scheduler may know ---------------------------------------------------------------------------------

CLOCK = np.dtype(
    [
        ("now_s", "f8"),
        ("last_arrival_s", "f8"),
        ("since_last_arrival_s", "f8"),
        ("arrival_rate", "f8"),
        ("expected_output_tokens", "f8"),
        ("expected_decode_s", "f8"),
        ("in_flight", "i8"),
        # counters since the start
        ("arrived", "i8"),
        ("good", "i8"),
        ("violated", "i8"),
        ("rejected_at_arrival", "i8"),
        ("rejected_at_decode", "i8"),
        ("wasted_prefill_s", "f8"),
        ("prefill_s", "f8"),
    ],
    align=True,
)
PREFILL = np.dtype(
    [
        ("up", "i8"),
        ("running", "i8"),  # of a pipelined group, the first stage; so is when it ends
        ("queue_requests", "i8"),
        ("running_end_s", "f8"),  # the scheduler's estimate
        ("queued_s", "f8"),  # predicted seconds of prefill in the queue, the running one excluded
        ("host_used", "i8"),
        ("device_used", "i8"),
        ("tx_flows", "i8"),
        ("rx_flows", "i8"),
        ("tx_used", "f8"),  # bytes per second
        ("rx_used", "f8"),
        ("tx_backlog_bytes", "f8"),
        ("drain_s", "f8"),  # by how much the last stage is expected to be later than the first
    ],
    align=True,
)
DECODE = np.dtype(
    [
        ("up", "i8"),
        ("batch", "i8"),
        ("kv_tokens", "f8"),  # context tokens of the batch at updated_s
        ("updated_s", "f8"),
        ("pending_requests", "i8"),  # assigned, not yet joined
        ("pending_tokens", "f8"),
        ("waiting_requests", "i8"),  # of those, with their KV here, waiting to join
        ("waiting_tokens", "f8"),
        ("stall_rate", "f8"),  # seconds of join stall per second
        ("join_rate", "f8"),
        ("last_join_s", "f8"),
        ("rx_flows", "i8"),
        ("rx_used", "f8"),
    ],
    align=True,
)
FLIGHT = np.dtype([("decode", "i4"), ("request", "i4"), ("start_s", "f8"), ("tokens", "f8")], align=True)

# Rows of `ClusterState.blocks`: presence per tier; blocks an admitted request will bring.
HOST, DEVICE, DISK, PENDING = 0, 1, 2, 3
TIERS = 3
ROW_BITS = 16  # instances per word


class ClusterState(NamedTuple):
    """What a scheduler may know about the cluster, now.

    `blocks[b, w]` holds four rows of 16 bits for prefill instances 16 w .. 16 w + 15: bit 16 row + (p mod 16) of word
    p // 16 is set when block b is in that row (`HOST`, `DEVICE`, ...) for instance p.
    `flight[:clock.in_flight]` lists the admitted requests with the time each is expected in its decode batch.
    """

    clock: Records  # CLOCK [1]
    prefill: Records  # PREFILL [P]
    decode: Records  # DECODE [D]
    blocks: NDArray[np.int64]  # [blocks, words]
    flight: Records  # FLIGHT [capacity]


# --- what a policy sees -------------------------------------------------------------------------------------------

REQUEST_FEATURES = np.dtype(
    [
        ("input_tokens", "f8"),
        ("best_tokens", "f8"),  # longest reusable prefix on any instance
        ("since_last_arrival_s", "f8"),
        ("ttft_slo_s", "f8"),
        ("tbt_slo_s", "f8"),
    ],
    align=True,
)
PREFILL_FEATURES = np.dtype(
    [
        ("queue_s", "f8"),  # until this request would start here
        ("queue_requests", "f8"),
        ("local_tokens", "f8"),  # reusable prefix here, in any tier or on its way
        ("device_tokens", "f8"),  # of it, on the device
        ("fetch_tokens", "f8"),  # what a fetch from the best holder would add
        ("fetch_s", "f8"),  # how long the fetch would take
        ("ttft_local_s", "f8"),
        ("ttft_fetch_s", "f8"),  # equals ttft_local_s where there is nothing to fetch
        ("ttft_recompute_s", "f8"),
        ("tx_used_share", "f8"),
        ("rx_used_share", "f8"),
        ("host_used_share", "f8"),
        ("device_used_share", "f8"),
    ],
    align=True,
)
DECODE_FEATURES = np.dtype(
    [
        ("batch", "f8"),
        ("kv_tokens", "f8"),
        ("free_tokens", "f8"),  # after all that is pending, with the expected output of each
        ("pending_requests", "f8"),
        ("pending_tokens", "f8"),
        ("waiting_requests", "f8"),
        ("tbt_now_s", "f8"),  # this request in the present batch
        ("tbt_assigned_s", "f8"),  # with all that is pending too
        ("tbt_at_join_s", "f8"),  # forecast for when this request would join
        ("rx_used_share", "f8"),
    ],
    align=True,
)
CLUSTER_FEATURES = np.dtype(
    [
        ("arrival_rate", "f8"),
        ("in_flight", "f8"),
        ("expected_output_tokens", "f8"),
        ("expected_decode_s", "f8"),
        ("prefill_load", "f8"),  # least predicted TTFT over the TTFT SLO ([A] 7.1)
        ("decode_load_now", "f8"),  # least tbt_now over the TBT SLO
        ("decode_load_forecast", "f8"),  # mean tbt_at_join over the TBT SLO ([A] 7.4)
    ],
    align=True,
)


class Observation(NamedTuple):
    """What a policy sees. All features are float64 in physical units; a batch has a leading axis.

    `prefill_mask[p, s]`: instance p is up and source s (`Source`) is a choice of its own there.
    `decode_mask[d]`: instance d is up.
    """

    request: Records  # REQUEST_FEATURES [1]
    prefill: Records  # PREFILL_FEATURES [P]
    decode: Records  # DECODE_FEATURES [D]
    cluster: Records  # CLUSTER_FEATURES [1]
    prefill_mask: NDArray[np.uint8]  # [P, 3]
    decode_mask: NDArray[np.uint8]  # [D]


# --- what is decided, and what becomes of it -------------------------------------------------------------------


class Decision(NamedTuple):
    """Reject (prefill < 0), or where a request goes, with the predictions it was based on."""

    prefill: int
    decode: int
    source: Source
    predicted_ttft_s: float
    predicted_tbt_s: float

    @property
    def rejected(self) -> bool:
        return self.prefill < 0


OUTCOME = np.dtype(
    [
        ("arrival_s", "f8"),
        ("status", "i4"),
        ("good", "i4"),
        ("prefill", "i4"),
        ("decode", "i4"),
        ("source", "i4"),
        ("fetched_blocks", "i4"),
        ("reused_tokens", "i4"),
        ("device_tokens", "i4"),  # of the reused, those that were on the device already
        ("predicted_ttft_s", "f8"),
        ("predicted_tbt_s", "f8"),
        ("prefill_start_s", "f8"),
        ("prefill_end_s", "f8"),
        ("prefill_s", "f8"),  # of the instance: of a pipelined group, in the first stage
        ("kv_ready_s", "f8"),
        ("join_s", "f8"),
        ("finish_s", "f8"),
        ("ttft_s", "f8"),
        ("tbt_s", "f8"),
        ("tbt_mean_s", "f8"),
    ],
    align=True,
)
OUTCOME = _lines(OUTCOME)
"""One row per request: the `Outcome`. Times are NaN and indices -1 where the request never got that far."""


# --- what only the simulator knows ------------------------------------------------------------------------------

# The simulator handles blocks by *runs*: blocks that every request has all together, in the same order, or not at all.
RUN_BLOCKS = 31  # of a run at most: its blocks are the bits of an int32 mask that is never negative

REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("input_tokens", "i4"),
        ("output_tokens", "i4"),
        ("first", "i4"),  # of its references
        ("references", "i4"),
        ("blocks", "i4"),
    ],
    align=True,
)
REFERENCE = np.dtype([("run", "i4"), ("length", "i4")], align=True)  # a run of a request, and its blocks
JOB = np.dtype(
    [
        ("hit", "i4"),  # blocks pinned at the decision
        ("local", "i4"),  # a fetch brings blocks [local, hit)
        ("holder", "i4"),
        ("landed", "i4"),  # no fetch under way
        ("next", "i4"),  # next in the prefill queue, then among those that drain, later in the decode FIFO
        ("flight", "i4"),
        ("first_segment", "i8"),
        ("predicted_s", "f8"),
        ("due_s", "f8"),  # when its fetch is expected, later when its prefill ends
        ("duration_s", "f8"),
        ("compute_s", "f8"),
    ],
    align=True,
)
PREFILL_TIMER = np.dtype(
    [
        ("queue_head", "i4"),
        ("queue_tail", "i4"),
        ("job", "i4"),
        ("last_release", "i4"),
        ("drain_head", "i4"),  # those that have left the first stage of a pipelined group
        ("drain_tail", "i4"),
        ("disk_free", "i4"),  # places on its disk, below 0 while it has to evict
        ("releases", "i4"),  # so far, counted for eviction by frequency
    ],
    align=True,
)
CELL = np.dtype(  # a run on an instance; the masks have bit i for its block i
    [
        ("host", "i4"),
        ("device", "i4"),
        ("pending", "i4"),
        ("transit", "i4"),
        # uses of the whole run; those of a part of it, which is always its first blocks, are by the part's last block
        ("stamp", "i4"),  # last release
        ("pins", "i4"),
        ("cuts", "i4"),  # last blocks of parts that were released since
        ("ends", "i4"),  # last blocks of parts that are pinned
    ],
    align=True,
)
PART = np.dtype([("stamp", "i4"), ("pins", "i4")], align=True)  # by the last block; valid where `cuts`, `ends` say so
EVICTION = np.dtype(  # where LRU eviction has got to in the chain of releases; by frequency: blocks in the heap
    [("release", "i4"), ("position", "i4"), ("size", "i4")], align=True
)
USE = np.dtype(  # of a block on an instance, for eviction by frequency
    [("count", "i4"), ("release", "i4"), ("depth", "i4"), ("run", "i4")], align=True
)
DECODE_TIMER = np.dtype(
    [
        ("iteration", "i8"),
        ("segments", "i8"),
        ("planned", "i8"),  # iterations until the next boundary that matters
        ("wait_head", "i4"),
        ("wait_tail", "i4"),
        ("reserved_tokens", "i8"),
        ("step_s", "f8"),  # first iteration of the present segment
        ("growth_s", "f8"),  # by how much each next iteration is longer
        ("stall_s", "f8"),  # stall before the present segment
    ],
    align=True,
)
RELEASE = np.dtype(  # of the first blocks of a request: its references, and how much of the last one (0: all)
    [("next", "i4"), ("first", "i4"), ("references", "i4"), ("part", "i4")], align=True
)
FLOW = np.dtype(
    [
        ("source", "i4"),  # NIC sides: see kernel/network.py
        ("target", "i4"),
        ("slot", "i4"),  # in `active`
        ("next", "i4"),  # in the queue of landings
        ("bytes", "f8"),
        ("remaining", "f8"),
        ("rate", "f8"),
        ("cap", "f8"),
        ("updated_s", "f8"),
        ("due_s", "f8"),
    ],
    align=True,
)
MEMBER = np.dtype([("leave", "i8"), ("request", "i8")], align=True)
SEGMENT = np.dtype([("step_s", "f8"), ("growth_s", "f8"), ("stall_s", "f8"), ("count", "f8")], align=True)
ENGINE = np.dtype(
    [
        ("next_request", "i8"),
        ("requests", "i8"),
        ("runs", "i8"),
        ("blocks", "i8"),
        # how many have been emptied since `begin`: the others follow when their requests arrive
        ("runs_met", "i8"),
        ("outcomes_met", "i8"),
        ("active_flows", "i8"),
        ("uncapped_flows", "i8"),
        ("held_flows", "i8"),  # capped ones whose rate is below their cap
        ("landing_head", "i8"),
        ("landing_tail", "i8"),
        ("recheck", "i8"),
        ("eviction", "i8"),
        ("disks", "i8"),  # some instance has a disk tier
        ("chained", "i8"),  # every run always follows the same one, as with block ids that are chained hashes
        ("error", "i8"),
    ],
    align=True,
)


class World(NamedTuple):
    """One simulated cluster: its state, the requests it gets, and the machinery of the simulator.

    Who has which block is in `cells`; `state.blocks` is empty, `Simulator.state` fills one in.
    """

    state: ClusterState
    requests: Records  # REQUEST [R], in order of arrival
    references: Records  # REFERENCE, of one request after the other
    run_blocks: NDArray[np.int32]  # number of the first block of each run; the others follow
    # per request
    outcomes: Records  # OUTCOME
    jobs: Records  # JOB
    # the machinery
    engine: Records  # ENGINE [1]
    prefill_timers: Records  # PREFILL_TIMER [P]
    decode_timers: Records  # DECODE_TIMER [D]
    evictions: Records  # EVICTION [P, TIERS]
    cells: Records  # CELL [runs, P]
    disks: NDArray[np.int32]  # [runs, P] mask of a run's blocks on disk; no rows where no instance has one
    parts: Records  # PART [P, blocks]
    # for eviction by frequency; no blocks with LRU
    uses: Records  # USE [P, blocks]
    heaps: NDArray[np.int32]  # [P, TIERS, blocks] blocks, the first to go on top
    places: NDArray[np.int32]  # [P, TIERS, blocks] where in the heap a block is, plus 1; 0: not in it
    releases: Records  # RELEASE [2 R]: of request r on its own instance at r, on its holder at R + r
    flows: Records  # FLOW [2 R]: fetch of request r at r, its KV stream at R + r
    active: NDArray[np.int32]  # [2 R] flows that hold NICs
    uncapped: NDArray[np.int32]  # [2 R] those of them that can complete
    members: Records  # MEMBER [D, max_batch], by leaving iteration, last first
    segments: Records  # SEGMENT [D, ring]
    due_s: NDArray[np.float64]  # [P + D + 1] next event of each prefill, each decode, the network
    winners: NDArray[np.int32]  # tournament tree over due_s
    # room to work in, nothing kept but the match
    scratch_tail: NDArray[np.float64]  # [4, 2 ring]
    scratch_match: NDArray[np.int64]  # [4, P]; kept from `observe` to the decision
    scratch_forecast: NDArray[np.float64]  # [D, 2]
    scratch_nics: NDArray[np.int64]  # [2, 2 P + D]
    scratch_capacity: NDArray[np.float64]  # [2, 2 P + D]
    scratch_members: NDArray[np.int32]  # [2 R]


# --- coupled instances (docs/physics.md, "Coupled instances") ---------------------------------------------------

COUPLED_CLUSTER = np.dtype(
    [("block_tokens", "i8"), ("ttft_slo_s", "f8"), ("tbt_slo_s", "f8"), ("tbt_tail_share", "f8")], align=True
)
COUPLED_PARAMETERS = np.dtype(
    [
        ("base_s", "f8"),
        ("linear_s", "f8"),
        ("quadratic_s", "f8"),
        ("step_base_s", "f8"),
        ("step_request_s", "f8"),
        ("step_token_s", "f8"),
        ("kv_capacity_tokens", "i8"),
        ("max_batch", "i8"),
        ("prefix_cache", "i8"),
        ("chunk_tokens", "i8"),  # 0: prefill blocks decode
    ],
    align=True,
)
COUPLED_INSTANCE = np.dtype(
    [
        ("phase", "i8"),
        ("outstanding", "i8"),
        ("running", "i8"),
        ("batch", "i8"),  # members
        ("kv_tokens", "f8"),  # their context tokens at updated_s
        ("own_tokens", "i8"),  # VRAM of running requests outside blocks
        ("used_blocks", "i8"),
        ("cached_blocks", "i8"),  # resident, used by nobody; from the one to evict next to the latest released:
        ("cached_first", "i4"),
        ("cached_last", "i4"),
        ("waiting_first", "i4"),
        ("waiting_last", "i4"),
        ("prefill_first", "i4"),  # requests with a piece in the present iteration
        ("prefill_last", "i4"),
        ("iteration", "i8"),
        ("segments", "i8"),
        ("planned", "i8"),  # iterations until the next boundary that matters
        ("step_s", "f8"),  # first iteration of the present segment
        ("growth_s", "f8"),  # by how much each next iteration is longer
        ("stall_s", "f8"),  # prefill before the present segment, or since the last one
        ("updated_s", "f8"),
        ("due_s", "f8"),
    ],
    align=True,
)
COUPLED_JOB = np.dtype(
    [
        ("next", "i4"),  # in the FIFO it is in
        ("done", "i4"),  # tokens of its prompt that are reused or computed
        ("piece", "i4"),  # tokens of each present iteration
        ("first_segment", "i8"),
        ("stall_before_s", "f8"),  # of the stall before its first segment, what was over when it joined
    ],
    align=True,
)
COUPLED_CELL = np.dtype(  # a block on an instance; the chain is that of resident blocks that nobody uses
    [("before", "i4"), ("after", "i4"), ("users", "i4"), ("resident", "i4")], align=True
)


class CoupledTables(NamedTuple):
    """A cluster of I coupled instances and the requests it gets; B distinct blocks."""

    cluster: Records  # COUPLED_CLUSTER [1]
    nodes: Records  # COUPLED_PARAMETERS [I]
    instances: Records  # COUPLED_INSTANCE [I]
    requests: Records  # REQUEST [R], in order of arrival; `first` is a place in `block_ids`
    block_ids: NDArray[np.int32]
    outcomes: Records  # OUTCOME [R]
    jobs: Records  # COUPLED_JOB [R]
    cells: Records  # COUPLED_CELL [I, B]
    members: Records  # MEMBER [I, batch_limit], by leaving iteration, last first
    segments: Records  # SEGMENT [I, ring]
    scratch_tail: NDArray[np.float64]  # [4, 2 ring]
