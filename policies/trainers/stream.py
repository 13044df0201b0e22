"""Requests as trainers meet them: windows of traces in a batch of clusters, one decision after the other.

A window is treated as a piece of an endless stream: it is cut off, not ended, and the value of what comes after is
bootstrapped. Otherwise a critic, which sees no clock, would be wrong by a whole horizon of requests near every end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.cluster_env import Episodes, TraceLike
from envs.sb3 import ClusterVecEnv
from envs.spec import ClusterSpec
from envs.state import Observation, Status
from policies.policy import PolicyError
from policies.trainers.record import OUTCOMES


class RequestStream(ClusterVecEnv):
    """`ClusterVecEnv` whose windows are pieces of an endless stream; it remembers what became of its requests.

    The first window of every group has another length: they do not all start over at once.

    Args:
        clusters: how many. episodes: what windows are drawn from, `load` a range.
        group: clusters side by side that get the same windows at the same load; divides `clusters`.
        remember: steps whose outcomes `outcomes` can tell.
        widen: share of the run over which the range of loads widens from its middle to all of it; 0: all at once.

    Raises:
        PolicyError: `group` does not divide `clusters`, or windows of less than two requests.
    """

    def __init__(
        self,
        clusters: int,
        spec: ClusterSpec,
        trace: TraceLike,
        part: str,
        episodes: Episodes,
        group: int = 1,
        remember: int = 1,
        widen: float = 0.0,
    ) -> None:
        super().__init__(clusters, spec, trace, part, episodes)
        if clusters % group:
            raise PolicyError(f"--group {group}: does not divide --envs {clusters}")
        if self._clusters.window < 2:
            raise PolicyError("windows of a trace must have two requests at least")
        self.group = group
        self.widen = widen
        self.progress = 0.0  # of the run, 0 to 1
        self.elapsed_s = np.zeros(clusters)
        self._good = np.full((remember, clusters), np.nan, np.float32)
        self._settled_at = np.zeros((remember, clusters), np.int64)

    def reset(self) -> dict[str, NDArray[np.float32]]:  # type: ignore[override]
        groups, longest = self.num_envs // self.group, self._clusters.window - 1
        self._left = np.repeat(1 + np.arange(1, groups + 1) * (longest - 1) // groups, self.group)
        self._step = 0
        self._began = np.zeros(self.num_envs, np.int64)
        self._counts = np.zeros(5)
        for c in range(0, self.num_envs, self.group):
            self._begin(c)
        return self._clusters.tables()

    def step_wait(self) -> Any:
        before = self._clusters.settled.copy()
        rewards = self._clusters.step(self._actions)
        self._counts += (self._clusters.settled - before).sum(0)
        self.elapsed_s = self._clusters.elapsed_s
        self._step += 1
        self._left -= 1
        cut = self._left == 0
        tables = self._clusters.tables()
        infos: list[dict[str, Any]] = [{} for _ in cut]
        if cut.any():
            for c in np.flatnonzero(cut).tolist():
                infos[c]["terminal_observation"] = {name: table[c] for name, table in tables.items()}
                infos[c]["TimeLimit.truncated"] = True
                self._note(c)
            self._left[cut] = self._clusters.window - 1
            self._began[cut] = self._step
            for c in range(0, self.num_envs, self.group):
                if cut[c]:
                    self._begin(c)
            tables = self._clusters.tables()
        return tables, rewards.astype(np.float32), cut, infos

    @property
    def observation(self) -> Observation:
        """The present observations in full precision, as a `policies.Policy` decides on them."""
        return self._clusters.simulator.observation_tables

    def valid(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """1 where a source of a prefill instance is valid, [C, P, 3], and where a decode instance is up, [C, D, 1].

        An action is valid where both are: the masks of `action_masks` in short.
        """
        seen = self.observation
        return seen.prefill_mask.astype(np.float32), seen.decode_mask[:, :, None].astype(np.float32)

    def take_counts(self) -> dict[str, float]:
        """Requests settled since the last call, by outcome."""
        counts = dict(zip(OUTCOMES, self._counts.tolist(), strict=False))
        self._counts = np.zeros(5)
        return counts

    def outcomes(self, steps: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What is known of the requests of the last `steps` steps, at most `remember`, [steps, C] each.

        1 where it became good, 0 where not, NaN where it is open or was when its window was cut; and the step, counted
        among these, in which it settled.
        """
        for c in range(self.num_envs):
            self._note(c)
        rows = np.arange(self._step - steps, self._step) % len(self._good)
        return self._good[rows], self._settled_at[rows] - (self._step - steps)

    def _begin(self, first: int) -> None:
        """New windows for the group whose first cluster this is."""
        rng = self._rngs[first]
        low, high = np.broadcast_to(np.asarray(self._clusters.episodes.load, float), 2)
        width = 1.0 if self.widen == 0.0 else min(1.0, self.progress / self.widen)
        load = (low + high) / 2 + width * (rng.uniform(low, high) - (low + high) / 2)
        seed = int(rng.integers(1 << 62))
        for c in range(first, first + self.group):
            self._clusters.start(c, np.random.default_rng(seed), {"load": load})

    def _note(self, c: int) -> None:
        """Remember what is known of the requests of the present window of cluster c."""
        first = max(int(self._began[c]), self._step - len(self._good))
        steps = np.arange(first, self._step)
        requests = steps - self._began[c]
        simulator = self._clusters.simulator
        outcomes = simulator.outcomes(c)
        arrival_s = simulator.batch.requests["arrival_s"][c, : len(outcomes)]
        of_these = outcomes[requests]
        good = np.where(of_these["status"] == Status.OPEN, np.nan, of_these["good"])
        # a step is from its request's arrival to the next one's
        arrived = np.searchsorted(arrival_s, of_these["finish_s"], side="left")
        rows = steps % len(self._good)
        self._good[rows, c] = good
        self._settled_at[rows, c] = np.where(good == 1.0, self._began[c] + arrived - 1, steps)
