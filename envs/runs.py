"""Runs: blocks that every request of a trace has all together, in the same order, or not at all.

A prompt's blocks are mostly shared as a whole, with the next turn of its conversation, or not at all. The simulator
handles such blocks together, exactly as if it took them one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces import Trace

from .kernel.runs import count_window, find_runs, largest_window
from .state import RUN_BLOCKS


class Runs(NamedTuple):
    """The runs of a trace: request i's are `runs[offsets[i]:offsets[i + 1]]`."""

    offsets: NDArray[np.int64]
    runs: NDArray[np.int32]
    lengths: NDArray[np.int32]
    chained: bool
    """Every run always follows the same one, as with block ids that are chained hashes."""

    @classmethod
    def of(cls, trace: Trace) -> Runs:
        """Find a trace's runs, of `RUN_BLOCKS` blocks at most."""
        offsets = np.zeros(trace.n_requests + 1, np.int64)
        runs = np.zeros(len(trace.block_ids), np.int32)
        lengths = np.zeros(trace.n_distinct_blocks, np.int32)
        distinct, chained = find_runs(
            trace.block_offsets, trace.block_ids, trace.n_distinct_blocks, RUN_BLOCKS, offsets, runs, lengths
        )
        return cls(offsets, runs[: offsets[-1]].copy(), lengths[:distinct].copy(), bool(chained))

    def counts(self, first: int, last: int) -> tuple[int, int, int]:
        """(references, distinct runs, distinct blocks) of requests first .. last - 1."""
        return count_window(self.offsets, self.runs, self.lengths, first, last)  # type: ignore[no-any-return]

    def largest(self, requests: int) -> tuple[int, int, int]:
        """The most of each (see `counts`) in any window of `requests` requests, at least 1."""
        return largest_window(self.offsets, self.runs, self.lengths, requests)  # type: ignore[no-any-return]
