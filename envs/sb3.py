"""A Stable-Baselines3 `VecEnv` over the natively batched clusters, with masks for MaskablePPO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from .cluster_env import Episodes, Rewards, TraceLike, _Clusters
from .spec import ClusterSpec


class ClusterVecEnv(VecEnv):
    """`num_envs` clusters stepped in one compiled call. Arguments as for `ClusterEnv`.

    An ended episode restarts in the same step; its info has `terminal_observation` and `episode` (r: reward, l: steps,
    t: simulated seconds, and the counts of what became of its requests).
    """

    def __init__(
        self,
        num_envs: int,
        cluster: str | Path | ClusterSpec = "8p8d",
        trace: TraceLike = "builtin:conversation",
        part: str = "train",
        episodes: Episodes | None = None,
        rewards: Rewards | None = None,
    ) -> None:
        self._clusters = _Clusters(cluster, trace, part, episodes or Episodes(), rewards or Rewards(), num_envs)
        self.render_mode = None
        super().__init__(num_envs, self._clusters.observation_space(), gym.spaces.Discrete(self._clusters.n_actions))
        self._rngs = [np.random.default_rng() for _ in range(num_envs)]
        self._actions = np.zeros(num_envs, np.int64)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        self._rngs = [np.random.default_rng(s) for s in seeds]
        return seeds

    def reset(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        for c in range(self.num_envs):
            self._clusters.start(c, self._rngs[c])
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return self._clusters.tables()  # type: ignore[return-value]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = np.asarray(actions)

    def step_wait(self) -> Any:
        before_s = self._clusters.now_s.copy()
        rewards = self._clusters.step(self._actions)
        elapsed_s = self._clusters.now_s - before_s
        self._returns += rewards
        self._lengths += 1
        done = self._clusters.done.copy()
        infos: list[dict[str, Any]] = [{"elapsed_s": float(s)} for s in elapsed_s]
        if done.any():
            tables = self._clusters.tables()
            for c in np.flatnonzero(done):
                counts = self._clusters.settled[c]
                infos[c]["terminal_observation"] = {name: table[c] for name, table in tables.items()}
                infos[c]["TimeLimit.truncated"] = False
                infos[c]["episode"] = {
                    "r": float(self._returns[c]),
                    "l": int(self._lengths[c]),
                    "t": float(self._clusters.now_s[c]),
                    "good": int(counts[0]),
                    "violated": int(counts[1]),
                    "rejected_at_arrival": int(counts[2]),
                    "rejected_at_decode": int(counts[3]),
                    "wasted_prefill_s": float(counts[4]),
                }
                self._clusters.start(int(c), self._rngs[c])
                self._returns[c] = 0.0
                self._lengths[c] = 0
        return self._clusters.tables(), rewards.astype(np.float32), done, infos

    def action_masks(self) -> np.ndarray:
        """Which actions are valid, bool[num_envs, actions]."""
        return self._clusters.masks.copy()

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError("the environments of a ClusterVecEnv are one batch and have no attributes of their own")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        if method_name != "action_masks":
            raise AttributeError(
                f"the environments of a ClusterVecEnv have no method {method_name!r}, only action_masks"
            )
        return list(self._clusters.masks[list(self._get_indices(indices))].copy())

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))
