"""A set scorer that decides in torch: the plain reading of what `policies.compiled_scorer` does."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from envs.state import Observation
from policies.networks import SetScorer
from policies.run_folder import action_masks, float32_tables


class NetworkPolicy:
    """A set scorer as a `Policy`: the valid action with the largest logit."""

    def __init__(self, scorer: SetScorer, name: str, recheck: bool) -> None:
        self.scorer = scorer
        self.name = name
        self.recheck = recheck

    def reset(self, clusters: int, seed: int) -> None:
        """Nothing to forget: a decision depends on the observation only."""

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        """Actions int64[C]; any pool size."""
        with torch.inference_mode():
            tables = {name: torch.from_numpy(table) for name, table in float32_tables(observation).items()}
            masks = torch.from_numpy(action_masks(observation))
            actions: NDArray[np.int64] = self.scorer(tables, masks).argmax(1).numpy()
        return actions
