"""Finding the runs of a trace (envs/runs.py)."""

from __future__ import annotations

import numpy as np

from .compile import compiled


@compiled
def find_runs(block_offsets, block_ids, distinct, longest, offsets, runs, lengths):
    """Write the runs of a trace; returns (how many distinct ones, whether each always follows the same one)."""
    unseen = -2
    none = -1  # before the first and after the last block of a request
    many = -3
    before = np.full(distinct, unseen, np.int32)
    after = np.full(distinct, unseen, np.int32)
    for r in range(len(block_offsets) - 1):
        for i in range(block_offsets[r], block_offsets[r + 1]):
            b = block_ids[i]
            previous = block_ids[i - 1] if i > block_offsets[r] else none
            following = block_ids[i + 1] if i + 1 < block_offsets[r + 1] else none
            before[b] = previous if before[b] == unseen or before[b] == previous else many
            after[b] = following if after[b] == unseen or after[b] == following else many
    run_of = np.full(distinct, -1, np.int32)
    count = 0
    references = 0
    chained = True
    for r in range(len(block_offsets) - 1):
        current = -1
        for i in range(block_offsets[r], block_offsets[r + 1]):
            b = block_ids[i]
            previous = before[b]
            chained = chained and previous != many
            goes_on = previous >= 0 and after[previous] == b
            if run_of[b] < 0:
                if goes_on and lengths[current] < longest:
                    run_of[b] = current
                    lengths[current] += 1
                else:
                    run_of[b] = count
                    lengths[count] = 1
                    count += 1
            if run_of[b] != current or not goes_on:
                current = run_of[b]
                runs[references] = current
                references += 1
        offsets[r + 1] = references
    return count, chained


@compiled
def count_window(offsets, runs, lengths, first, last):
    """(references, distinct runs, distinct blocks) of requests first .. last - 1."""
    seen = np.zeros(len(lengths), np.bool_)
    distinct = 0
    blocks = 0
    for i in range(offsets[first], offsets[last]):
        if not seen[runs[i]]:
            seen[runs[i]] = True
            distinct += 1
            blocks += lengths[runs[i]]
    return offsets[last] - offsets[first], distinct, blocks


@compiled
def largest_window(offsets, runs, lengths, requests):
    """The most references, distinct runs and distinct blocks in any window of `requests` requests, at least 1."""
    uses = np.zeros(len(lengths), np.int64)
    distinct = 0
    blocks = 0
    most_references = 1
    most_distinct = 1
    most_blocks = 1
    for r in range(len(offsets) - 1):
        for i in range(offsets[r], offsets[r + 1]):
            if uses[runs[i]] == 0:
                distinct += 1
                blocks += lengths[runs[i]]
            uses[runs[i]] += 1
        leaving = r - requests
        if leaving >= 0:
            for i in range(offsets[leaving], offsets[leaving + 1]):
                uses[runs[i]] -= 1
                if uses[runs[i]] == 0:
                    distinct -= 1
                    blocks -= lengths[runs[i]]
        most_references = max(most_references, offsets[r + 1] - offsets[max(0, leaving + 1)])
        most_distinct = max(most_distinct, distinct)
        most_blocks = max(most_blocks, blocks)
    return most_references, most_distinct, most_blocks
