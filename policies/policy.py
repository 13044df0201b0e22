"""What a policy is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from envs.state import Observation


class PolicyError(ValueError):
    """A policy that cannot be had; the message says what was expected."""


@runtime_checkable
class Policy(Protocol):
    """Decides for a batch of clusters at once.

    `recheck`: whether decode nodes should check the TBT SLO again when a request's KV arrives (paper A6.4).
    """

    name: str
    recheck: bool

    def reset(self, clusters: int, seed: int) -> None:
        """Forget everything, for `clusters` new episodes."""

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        """Actions int64[C] for observations of C clusters: 0 rejects, else 1 + (prefill * D + decode) * 3 + source."""
