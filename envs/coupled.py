"""`CoupledSimulator`: the papers' baseline, vLLM-style instances that prefill and decode (docs/physics.md)."""

from __future__ import annotations

import numpy as np

from traces import Trace

from . import state as _state
from .kernel import coupled as _kernel
from .kernel import memory
from .kernel.compile import announce
from .metrics import Replay
from .simulator import _power_of_two
from .spec import CoupledSpec
from .state import CoupledTables, Records


class CoupledSimulator:
    """A cluster of coupled instances, and a trace to replay on it as often as wanted.

    There is nothing to decide: a request goes to the instance with the fewest outstanding ones.

    Args:
        cluster: its description, or its arrays, COUPLED_CLUSTER [1] and COUPLED_PARAMETERS [I].
        trace: its requests first .. last - 1, arriving `speed` times as fast, from time 0.

    Raises:
        ValueError: the trace's blocks do not fit the spec, or it has no such requests.
    """

    def __init__(
        self,
        cluster: CoupledSpec | tuple[Records, Records],
        trace: Trace,
        first: int = 0,
        last: int | None = None,
        *,
        speed: float = 1.0,
    ) -> None:
        announce()
        head, nodes = cluster.parameters() if isinstance(cluster, CoupledSpec) else cluster
        self.block_tokens = int(head["block_tokens"][0])
        if trace.has_blocks and trace.block_tokens != self.block_tokens:
            raise ValueError(
                f"trace {trace.name!r} has blocks of {trace.block_tokens} tokens, the cluster of {self.block_tokens}: "
                f"convert one, e.g. trace.reblock({self.block_tokens})"
            )
        last = trace.n_requests if last is None else last
        if not 0 <= first <= last <= trace.n_requests:
            raise ValueError(f"trace {trace.name!r} has {trace.n_requests} requests, not those from {first} to {last}")
        self.n_requests = requests = last - first
        self.input_tokens = trace.input_tokens[first:last]
        self.output_tokens = trace.output_tokens[first:last]
        offsets = trace.block_offsets[first : last + 1]
        ids, block_ids = np.unique(trace.block_ids[offsets[0] : offsets[-1]], return_inverse=True)
        instances = len(nodes)
        ring = _power_of_two(int(self.output_tokens.max(initial=1)) + 2)
        batch_limit = max(1, min(int(nodes["max_batch"].max()), requests))
        blocks = len(ids) if nodes["prefix_cache"].any() else 0
        self.tables = CoupledTables(
            cluster=head,
            nodes=nodes,
            instances=np.zeros(instances, _state.COUPLED_INSTANCE),
            requests=np.zeros(requests, _state.REQUEST),
            block_ids=block_ids.astype(np.int32),
            outcomes=np.zeros(requests, _state.OUTCOME),
            jobs=np.zeros(requests, _state.COUPLED_JOB),
            cells=np.zeros((instances, blocks), _state.COUPLED_CELL),
            members=np.zeros((instances, batch_limit), _state.MEMBER),
            segments=np.zeros((instances, ring), _state.SEGMENT),
            scratch_tail=np.zeros((4, 2 * ring), np.float64),
        )
        table = self.tables.requests
        table["arrival_s"] = (trace.arrival_s[first:last] - trace.arrival_s[first : first + 1]) / speed
        table["input_tokens"] = self.input_tokens
        table["output_tokens"] = self.output_tokens
        table["first"] = offsets[:-1] - offsets[0]
        table["blocks"] = np.diff(offsets)
        self._header = memory.headers(
            memory.COUPLED,
            CoupledTables(**{name: part[None] for name, part in self.tables._asdict().items()}),
            1,
            decodes=instances,
            request_capacity=requests,
            reference_capacity=len(block_ids),
            block_capacity=blocks,
            ring=ring,
            batch_limit=batch_limit,
        )

    def replay(self) -> Replay:
        """Replay the trace on empty instances until the last request has ended; what became of the requests, a copy.

        `prefill` and `decode` of an outcome are both the instance; nothing was predicted.
        """
        _kernel.replay(self._header[0], self.n_requests)
        return Replay(
            self.tables.requests["arrival_s"].copy(),
            self.input_tokens,
            self.output_tokens,
            self.tables.outcomes.copy(),
            self.block_tokens,
        )
