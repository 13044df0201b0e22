"""A small random generator (splitmix64) whose whole state is one uint64, so that it forks with what holds it."""

from __future__ import annotations

import numpy as np

from .compile import compiled


@compiled
def random_below(memory, limit):
    """A number in [0, limit) from the generator in memory[0]."""
    memory[0] = memory[0] + np.uint64(0x9E3779B97F4A7C15)
    z = memory[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.int64((z >> np.uint64(11)) % np.uint64(limit))
