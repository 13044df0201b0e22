"""How kernels reach memory: a table is an address in a header record, a row of it a typed record there.

Numba passes an array as seven or more machine words, so passing thirty tables through every call would cost more than
the physics. A kernel gets one header (`WORLD`, `STATE`, `PARAMETERS`, `OBSERVATION`) instead, one machine word, and the
functions below turn it and an index into a record. They compile to an address computation. With
CONDUCTOR_CHECK_BOUNDS=1 every one of them checks its index first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .. import state as _state
from ..state import ROW_BITS, TIERS
from .compile import compiled

CHECKED = os.environ.get("CONDUCTOR_CHECK_BOUNDS", "0") not in ("", "0")


def header_dtype(tables: type[NamedTuple], sizes: Sequence[str]) -> np.dtype:
    """A header for the tables of a NamedTuple class: named sizes, then one address per table."""
    return np.dtype([(name, "i8") for name in (*sizes, *tables._fields)], align=True)  # type: ignore[attr-defined]


PARAMETERS = header_dtype(_state.Parameters, ("prefills", "decodes"))
STATE = header_dtype(_state.ClusterState, ("prefills", "decodes", "words", "block_capacity", "flight_capacity"))
WORLD = header_dtype(
    _state.World,
    (
        "prefills",
        "decodes",
        "request_capacity",
        "reference_capacity",
        "run_capacity",
        "disk_capacity",
        "block_capacity",
        "use_capacity",
        "ring",
        "batch_limit",
        "leaves",
    ),
)
OBSERVATION = header_dtype(_state.Observation, ("prefills", "decodes"))
COUPLED = header_dtype(  # `decodes` are its instances: accessors of a world serve it too
    _state.CoupledTables,
    ("decodes", "request_capacity", "reference_capacity", "block_capacity", "ring", "batch_limit"),
)


def headers(dtype: np.dtype, tables: Any, count: int, **sizes: int) -> np.ndarray:
    """Headers for `count` clusters whose tables are stacked along the first axis of each array of `tables`.

    The arrays must outlive the headers.
    """
    made = np.zeros(count, dtype)
    for name, size in sizes.items():
        made[name] = size
    for name, table in zip(tables._fields, tables, strict=True):
        if isinstance(table, np.ndarray):
            if not table.flags.c_contiguous or len(table) != count:
                raise ValueError(f"table {name} must be contiguous with {count} rows, has shape {table.shape}")
            made[name] = table.ctypes.data + np.arange(count) * (table.nbytes // max(1, count))
    return made


def record_at(dtype: np.dtype) -> Any:
    """An intrinsic (address, index) -> record of `dtype` there."""
    record = numba.from_dtype(dtype)
    size = dtype.itemsize

    @intrinsic
    def at(typing_context, address, index):
        def generate(context, builder, signature, arguments):
            start, i = arguments
            offset = builder.mul(i, ir.Constant(i.type, size))
            return builder.inttoptr(builder.add(start, offset), context.get_value_type(record))

        return record(types.int64, types.int64), generate

    return at


def _numbers_at(kind: Any) -> Any:
    """An intrinsic address -> pointer to numbers of `kind`, to be indexed."""
    pointer = types.CPointer(kind)

    @intrinsic
    def at(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), generate

    return at


REFERENCE_BYTES = _state.REFERENCE.itemsize
PREFILL_PARAMETERS_BYTES = _state.PREFILL_PARAMETERS.itemsize
DECODE_PARAMETERS_BYTES = _state.DECODE_PARAMETERS.itemsize
PREFILL_FEATURES_BYTES = _state.PREFILL_FEATURES.itemsize
DECODE_FEATURES_BYTES = _state.DECODE_FEATURES.itemsize
REQUEST_BYTES = _state.REQUEST.itemsize
CELL_BYTES = _state.CELL.itemsize
PREFILL_BYTES = _state.PREFILL.itemsize
DECODE_BYTES = _state.DECODE.itemsize
PREFILL_TIMER_BYTES = _state.PREFILL_TIMER.itemsize
DECODE_TIMER_BYTES = _state.DECODE_TIMER.itemsize
FLIGHT_BYTES = _state.FLIGHT.itemsize
JOB_BYTES = _state.JOB.itemsize
OUTCOME_BYTES = _state.OUTCOME.itemsize
FLOW_BYTES = _state.FLOW.itemsize
SEGMENT_BYTES = _state.SEGMENT.itemsize
i4_at = _numbers_at(types.int32)
i8_at = _numbers_at(types.int64)
f4_at = _numbers_at(types.float32)
f8_at = _numbers_at(types.float64)
u1_at = _numbers_at(types.uint8)


def _bit_count(operation: Any) -> Any:
    """An intrinsic int64 -> int64 of one instruction."""

    @intrinsic
    def count(typing_context, mask):
        def generate(context, builder, signature, arguments):
            return operation(builder, arguments[0])

        return types.int64(types.int64), generate

    return count


_NONE_IS_FINE = ir.Constant(ir.IntType(1), 0)  # of a mask without bits
bits_in: Any = _bit_count(lambda builder, mask: builder.ctpop(mask))
lowest_bit: Any = _bit_count(lambda builder, mask: builder.cttz(mask, _NONE_IS_FINE))
_leading_zeros: Any = _bit_count(lambda builder, mask: builder.ctlz(mask, _NONE_IS_FINE))


@intrinsic
def _prefetch(typing_context, address):
    """Start to bring the cache line at an address; what follows does not wait for it."""

    def generate(context, builder, signature, arguments):
        pointer_type = ir.IntType(8).as_pointer()
        whole = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer_type], ir.FunctionType(ir.VoidType(), [pointer_type, whole, whole, whole])
        )
        pointer = builder.inttoptr(arguments[0], pointer_type)
        builder.call(function, [pointer, whole(1), whole(3), whole(1)])  # to write, keep, data
        return context.get_dummy_value()

    return types.void(types.int64), generate


prefetch: Any = _prefetch

_cluster_parameters_at = record_at(_state.CLUSTER_PARAMETERS)
_prefill_parameters_at = record_at(_state.PREFILL_PARAMETERS)
_decode_parameters_at = record_at(_state.DECODE_PARAMETERS)
_state_at = record_at(STATE)
_clock_at = record_at(_state.CLOCK)
_prefill_at = record_at(_state.PREFILL)
_decode_at = record_at(_state.DECODE)
_flight_at = record_at(_state.FLIGHT)
_outcome_at = record_at(_state.OUTCOME)
_job_at = record_at(_state.JOB)
_engine_at = record_at(_state.ENGINE)
_prefill_timer_at = record_at(_state.PREFILL_TIMER)
_decode_timer_at = record_at(_state.DECODE_TIMER)
_eviction_at = record_at(_state.EVICTION)
_request_at = record_at(_state.REQUEST)
_reference_at = record_at(_state.REFERENCE)
_cell_at = record_at(_state.CELL)
_part_at = record_at(_state.PART)
_use_at = record_at(_state.USE)
_release_at = record_at(_state.RELEASE)
_flow_at = record_at(_state.FLOW)
_member_at = record_at(_state.MEMBER)
_segment_at = record_at(_state.SEGMENT)
_request_features_at = record_at(_state.REQUEST_FEATURES)
_prefill_features_at = record_at(_state.PREFILL_FEATURES)
_decode_features_at = record_at(_state.DECODE_FEATURES)
_cluster_features_at = record_at(_state.CLUSTER_FEATURES)


@compiled
def up_to_highest(mask):
    """All bits up to the highest of a mask; none if it has none."""
    return (np.int64(1) << (64 - _leading_zeros(mask))) - 1


@compiled
def check(index, size):
    """`index`, which must be in [0, size) when bounds are checked."""
    if CHECKED and (index < 0 or index >= size):
        raise IndexError("a kernel reached outside its table")
    return index


# --- parameters -----------------------------------------------------------------------------------------------------


@compiled
def cluster_of(parameters):
    return _cluster_parameters_at(parameters.cluster, 0)


@compiled
def prefill_node_of(parameters, p):
    return _prefill_parameters_at(parameters.prefill, check(p, parameters.prefills))


@compiled
def decode_node_of(parameters, d):
    return _decode_parameters_at(parameters.decode, check(d, parameters.decodes))


# --- state ----------------------------------------------------------------------------------------------------------


@compiled
def state_of(world):
    return _state_at(world.state, 0)


@compiled
def clock_of(state):
    return _clock_at(state.clock, 0)


@compiled
def prefill_of(state, p):
    return _prefill_at(state.prefill, check(p, state.prefills))


@compiled
def decode_of(state, d):
    return _decode_at(state.decode, check(d, state.decodes))


@compiled
def flight_of(state, i):
    return _flight_at(state.flight, check(i, state.flight_capacity))


@compiled
def word_index(state, block, p):
    """Where in `state.blocks` the rows of a block for instance p are."""
    return check(block, state.block_capacity) * state.words + check(p >> 4, state.words)


@compiled
def row_bit(row, p):
    """The bit of instance p in a row of a block's word."""
    return np.int64(1) << (ROW_BITS * row + (p & 15))


# --- world ----------------------------------------------------------------------------------------------------------


@compiled
def engine_of(world):
    return _engine_at(world.engine, 0)


@compiled
def outcome_of(world, request):
    return _outcome_at(world.outcomes, check(request, world.request_capacity))


@compiled
def job_of(world, request):
    return _job_at(world.jobs, check(request, world.request_capacity))


@compiled
def request_of(world, request):
    return _request_at(world.requests, check(request, world.request_capacity))


@compiled
def arrival_of(world, request):
    return request_of(world, request).arrival_s


@compiled
def input_of(world, request):
    return np.int64(request_of(world, request).input_tokens)


@compiled
def output_of(world, request):
    return np.int64(request_of(world, request).output_tokens)


@compiled
def reference_of(world, index):
    return _reference_at(world.references, check(index, world.reference_capacity))


@compiled
def prefill_timer_of(world, p):
    return _prefill_timer_at(world.prefill_timers, check(p, world.prefills))


@compiled
def decode_timer_of(world, d):
    return _decode_timer_at(world.decode_timers, check(d, world.decodes))


@compiled
def eviction_of(world, p, tier):
    return _eviction_at(world.evictions, check(p, world.prefills) * TIERS + check(tier, TIERS))


@compiled
def cell_of(world, run, p):
    return _cell_at(world.cells, check(run, world.run_capacity) * world.prefills + check(p, world.prefills))


@compiled
def disk_index(world, run, p):
    """Where in `world.disks` the mask of a run for instance p is."""
    return check(run, world.disk_capacity) * world.prefills + check(p, world.prefills)


@compiled
def part_of(world, run, p, blocks):
    """What is kept of the first `blocks` blocks of a run on an instance."""
    last = i4_at(world.run_blocks)[check(run, world.run_capacity)] + blocks - 1
    return _part_at(world.parts, check(p, world.prefills) * world.block_capacity + check(last, world.block_capacity))


@compiled
def use_of(world, p, block):
    return _use_at(world.uses, check(p, world.prefills) * world.use_capacity + check(block, world.use_capacity))


@compiled
def prefetch_cells(world, first, count, p):
    """Start to bring the runs of references first .. first + count - 1 (from 0) on an instance."""
    for i in range(max(0, first), first + count):
        prefetch(world.cells + CELL_BYTES * (reference_of(world, i).run * world.prefills + p))


@compiled
def prefetch_request(world, request):
    """Start to bring what a prefix match looks at for `request`, and the references of the one after it."""
    if request + 1 >= engine_of(world).requests:
        return
    row = CELL_BYTES * world.prefills
    asked = request_of(world, request)
    for i in range(asked.first, asked.first + asked.references):
        _prefetch_range(world.cells + row * reference_of(world, i).run, row)
    following = request_of(world, request + 1)
    _prefetch_range(world.references + REFERENCE_BYTES * following.first, REFERENCE_BYTES * following.references)


@compiled
def _prefetch_range(address, size):
    for at in range(address, address + size, 64):
        prefetch(at)


@compiled
def prefetch_tables(world, parameters, observation):
    """Start to bring the tables that a step of a cluster is sure to look at."""
    state = state_of(world)
    _prefetch_range(parameters.prefill, PREFILL_PARAMETERS_BYTES * world.prefills)
    _prefetch_range(parameters.decode, DECODE_PARAMETERS_BYTES * world.decodes)
    _prefetch_range(observation.prefill, PREFILL_FEATURES_BYTES * world.prefills)
    _prefetch_range(observation.decode, DECODE_FEATURES_BYTES * world.decodes)
    _prefetch_range(state.prefill, PREFILL_BYTES * world.prefills)
    _prefetch_range(state.decode, DECODE_BYTES * world.decodes)
    _prefetch_range(world.prefill_timers, PREFILL_TIMER_BYTES * world.prefills)
    _prefetch_range(world.decode_timers, DECODE_TIMER_BYTES * world.decodes)
    _prefetch_range(world.due_s, 8 * (world.prefills + world.decodes + 1))
    _prefetch_range(world.winners, 8 * world.leaves)


@compiled
def _prefetch_records(world, request):
    prefetch(world.requests + REQUEST_BYTES * request)
    prefetch(world.jobs + JOB_BYTES * request)
    _prefetch_range(world.outcomes + OUTCOME_BYTES * request, OUTCOME_BYTES)


@compiled
def prefetch_events(world, p):
    """Start to bring what the coming step of a cluster looks at: the request decided on, for instance p (if not
    negative), the next one, and those whose events are due before that arrives.
    """
    engine = engine_of(world)
    state = state_of(world)
    request = engine.next_request
    if request >= engine.requests:
        return
    _prefetch_records(world, request)
    if p >= 0:
        asked = request_of(world, request)
        prefetch_cells(world, asked.first, asked.references, p)
    _prefetch_range(state.flight, FLIGHT_BYTES * clock_of(state).in_flight)
    until_s = 1e300  # all that is due at all
    if request + 1 < engine.requests:
        until_s = arrival_of(world, request + 1)
        prefetch_request(world, request + 1)
    due = f8_at(world.due_s)
    for i in range(world.prefills):
        if due[i] <= until_s:
            timer = prefill_timer_of(world, i)
            running = np.int64(timer.job if timer.drain_head < 0 else timer.drain_head)
            following = np.int64(timer.queue_head)
            _prefetch_records(world, running)
            prefetch(world.flows + FLOW_BYTES * (engine.requests + running))
            if following >= 0:
                _prefetch_records(world, following)
                prefetch(world.flows + FLOW_BYTES * (engine.requests + following))
                asked = request_of(world, following)
                prefetch_cells(world, asked.first, asked.references, i)
            asked = request_of(world, running)
            prefetch_cells(world, asked.first, asked.references, i)
    for d in range(world.decodes):
        if due[world.prefills + d] <= until_s:
            _prefetch_records(world, member_of(world, d, decode_of(state, d).batch - 1).request)
            last = decode_timer_of(world, d).segments & (world.ring - 1)
            row = world.segments + SEGMENT_BYTES * world.ring * d
            _prefetch_range(row + SEGMENT_BYTES * max(0, last - 24), SEGMENT_BYTES * min(last, 24))
    uncapped = i4_at(world.uncapped)
    for i in range(engine.uncapped_flows):
        prefetch(world.flows + FLOW_BYTES * uncapped[i])
        if uncapped[i] >= engine.requests:
            _prefetch_records(world, uncapped[i] - engine.requests)


@compiled
def release_of(world, entry):
    return _release_at(world.releases, check(entry, 2 * world.request_capacity))


@compiled
def flow_of(world, flow):
    return _flow_at(world.flows, check(flow, 2 * world.request_capacity))


@compiled
def member_of(world, d, i):
    return _member_at(world.members, check(d, world.decodes) * world.batch_limit + check(i, world.batch_limit))


@compiled
def segment_of(world, d, s):
    """Segment s of decode d, in its ring."""
    return _segment_at(world.segments, check(d, world.decodes) * world.ring + (s & (world.ring - 1)))


# --- observation ----------------------------------------------------------------------------------------------------


@compiled
def request_features(observation):
    return _request_features_at(observation.request, 0)


@compiled
def prefill_features(observation, p):
    return _prefill_features_at(observation.prefill, check(p, observation.prefills))


@compiled
def decode_features(observation, d):
    return _decode_features_at(observation.decode, check(d, observation.decodes))


@compiled
def cluster_features(observation):
    return _cluster_features_at(observation.cluster, 0)


@compiled
def source_allowed(observation, p, source):
    return u1_at(observation.prefill_mask)[check(p, observation.prefills) * 3 + source] != 0


@compiled
def decode_allowed(observation, d):
    return u1_at(observation.decode_mask)[check(d, observation.decodes)] != 0


# --- coupled instances ------------------------------------------------------------------------------------------------

_coupled_cluster_at = record_at(_state.COUPLED_CLUSTER)
_coupled_parameters_at = record_at(_state.COUPLED_PARAMETERS)
_coupled_instance_at = record_at(_state.COUPLED_INSTANCE)
_coupled_job_at = record_at(_state.COUPLED_JOB)
_coupled_cell_at = record_at(_state.COUPLED_CELL)


@compiled
def coupled_cluster_of(tables):
    return _coupled_cluster_at(tables.cluster, 0)


@compiled
def coupled_node_of(tables, i):
    return _coupled_parameters_at(tables.nodes, check(i, tables.decodes))


@compiled
def coupled_instance_of(tables, i):
    return _coupled_instance_at(tables.instances, check(i, tables.decodes))


@compiled
def coupled_job_of(tables, request):
    return _coupled_job_at(tables.jobs, check(request, tables.request_capacity))


@compiled
def coupled_cell_of(tables, i, block):
    cell = check(i, tables.decodes) * tables.block_capacity + check(block, tables.block_capacity)
    return _coupled_cell_at(tables.cells, cell)


@compiled
def coupled_block_of(tables, request, position):
    """The block at a position of a request."""
    first = request_of(tables, request).first
    return np.int64(i4_at(tables.block_ids)[check(first + position, tables.reference_capacity)])
