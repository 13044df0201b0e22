"""`Observer`: `observe` on a `ClusterState` that somebody else keeps, such as live traffic."""

from __future__ import annotations

from struct import Struct

import numpy as np
from numpy.typing import NDArray

from .kernel import memory
from .kernel.compile import entry_point
from .kernel.latency import prefill_seconds
from .observe import holder, observe
from .simulator import empty_observation
from .spec import ClusterSpec
from .state import CLOCK, DECODE, FLIGHT, PREFILL, ROW_BITS, ClusterState, Observation, Parameters

_LOADS = Struct("3d")  # the last of CLUSTER_FEATURES


class Observer:
    """A cluster state outside the simulator, and the observations made of it.

    `state` holds plain arrays to be written to: who has which block, what is queued, what runs (`ClusterState`).
    `parameters` may be written to as well: SLOs of the next request, fitted latencies.

    Args:
        cluster: the spec.
        blocks: how many distinct block numbers may be in use. in_flight: how many requests may be.

    Attributes:
        match: int64[4, P], of the request observed last: its leading blocks that are there or pending, resident, on
            device; of the first of these, how many would be read from disk.
        addresses: where the headers of `state`, `parameters`, `observation` are (envs.kernel.memory), `match`
            ("matched") and the room for the forecast; for kernels that are given numbers only.
    """

    def __init__(self, cluster: ClusterSpec, *, blocks: int, in_flight: int) -> None:
        p, d = cluster.n_prefill, cluster.n_decode
        words = -(-p // ROW_BITS)
        tables = Parameters(*(table[None] for table in cluster.parameters()))
        stacked = ClusterState(
            np.zeros((1, 1), CLOCK),
            np.zeros((1, p), PREFILL),
            np.zeros((1, d), DECODE),
            np.zeros((1, blocks, words), np.int64),
            np.zeros((1, in_flight), FLIGHT),
        )
        stacked.prefill["up"] = 1
        stacked.decode["up"] = 1
        stacked.clock["expected_output_tokens"] = cluster.prior_output_tokens
        stacked.clock["expected_decode_s"] = cluster.prior_decode_s
        self.state = ClusterState(*(table[0] for table in stacked))
        self._bytes, self.observation = _in_one_piece(p, d)
        self._buffer = self._bytes.data
        loads = self.observation.cluster["prefill_load"]
        self._loads_at = loads.ctypes.data - self._bytes.ctypes.data
        self.parameters = Parameters(*(table[0] for table in tables))
        parameters = memory.headers(memory.PARAMETERS, tables, 1, prefills=p, decodes=d)
        state = memory.headers(
            memory.STATE,
            stacked,
            1,
            prefills=p,
            decodes=d,
            words=words,
            block_capacity=blocks,
            flight_capacity=in_flight,
        )
        observation = memory.headers(memory.OBSERVATION, self.observation, 1, prefills=p, decodes=d)
        self.match = np.zeros((4, p), np.int64)
        self.match_address = self.match.ctypes.data
        self._forecast = np.zeros((d, 2))
        self._kept = (tables, stacked, parameters, state, observation)  # the addresses below are of these
        self.addresses = {
            "state": state.ctypes.data,
            "parameters": parameters.ctypes.data,
            "observation": observation.ctypes.data,
            "matched": self.match_address,
            "forecast": self._forecast.ctypes.data,
        }
        self._tail = (observation[0], self.match_address, self._forecast.ctypes.data)
        self._head = (state[0], parameters[0])
        self._observe = entry_point(observe, *self._head, 1, 0, 0, *self._tail)

    def observe(self, input_tokens: int, block_ids: NDArray[np.int32]) -> Observation:
        """The observation (leading axis of 1) for a request, at the time of `state.clock`; the next overwrites it.

        Args:
            input_tokens: length of the prompt, at least 1. block_ids: int32, numbers of its blocks in order.

        Raises:
            ValueError: a block number outside 0 .. blocks - 1, or an empty prompt.
        """
        ids = np.ascontiguousarray(block_ids, np.int32)
        capacity = len(self.state.blocks)
        if len(ids) and not (ids.min() >= 0 and ids.max() < capacity):
            raise ValueError(
                f"block numbers must be in 0 .. {capacity - 1}, found {int(ids.min())} .. {int(ids.max())}"
            )
        if input_tokens < 1:
            raise ValueError(f"input_tokens must be at least 1, found {input_tokens}")
        self._observe(*self._head, input_tokens, ids.ctypes.data, len(ids), *self._tail)
        return self.observation

    def loads(self) -> tuple[float, float, float]:
        """`prefill_load`, `decode_load_now`, `decode_load_forecast` of the observation made last."""
        return _LOADS.unpack_from(self._buffer, self._loads_at)

    def observation_bytes(self) -> bytes:
        """A copy of the observation, its tables one after the other; `observation_of` reads it."""
        return self._bytes.tobytes()

    def prefill_s(self, prefill: int, input_tokens: int, reused_blocks: int, loaded_blocks: int) -> float:
        """Predicted seconds of a prefill that reuses leading blocks, some of them loaded from host memory."""
        return float(prefill_seconds(self._head[1], prefill, input_tokens, reused_blocks, loaded_blocks))

    def holder(self, prefill: int) -> int:
        """Whom an instance would fetch the prefix of the request observed last from; -1 if nobody has any."""
        return int(holder(self._head[0], self.match_address, prefill))


def _in_one_piece(prefills: int, decodes: int, data: bytes | None = None) -> tuple[NDArray[np.uint8], Observation]:
    """An observation whose tables lie one after the other in one array of bytes."""
    tables = empty_observation(1, prefills, decodes)
    room = np.zeros(sum(table.nbytes for table in tables), np.uint8)
    if data is not None:
        room = np.frombuffer(data, np.uint8)
    made, start = [], 0
    for table in tables:
        made.append(np.ndarray(table.shape, table.dtype, buffer=room, offset=start))
        start += table.nbytes
    return room, Observation(*made)


def observation_of(data: bytes, prefills: int, decodes: int) -> Observation:
    """The observation in what `Observer.observation_bytes` gave, read-only."""
    return _in_one_piece(prefills, decodes, data)[1]
