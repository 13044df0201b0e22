"""`conductor/Cluster-v0`: a Mooncake cluster as a Gymnasium environment, single and natively batched.

STATE
    A simulated cluster (docs/physics.md) and a window of a request trace.
OBSERVATION
    `Dict` of float32 tables in physical units, for the request that has just arrived: `request` [5], `prefill` [P, 13],
    `decode` [D, 10], `cluster` [7]; columns in `REQUEST_FEATURES`, `PREFILL_FEATURES`, ... of `envs.state`.
ACTION
    `Discrete(1 + P * D * 3)`: 0 rejects, else 1 + (prefill * D + decode) * 3 + source with source 0 local, 1 fetch,
    2 recompute. `info["action_mask"]` marks those that differ: fetching where there is nothing to fetch and
    recomputing where there is nothing to reuse do the same as local, and choosing an instance that is down rejects.
REWARD
    What settled between this arrival and the next: good requests (both SLOs met) count 1, everything else 0 by default
    (`Rewards`). The sum over an episode is the number of good requests.
EPISODE
    A window of consecutive requests. After its last decision the cluster drains, all is settled, and the episode
    terminates. Steps are not equally long: `info["elapsed_s"]` is the simulated time the step took, for discounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from traces import Trace
from traces import load as load_trace

from .kernel import replay as _replay
from .kernel.compile import entry_point
from .simulator import Simulator
from .spec import ClusterSpec, load_cluster
from .state import (
    CLUSTER_FEATURES,
    DECODE_FEATURES,
    PREFILL_FEATURES,
    REQUEST_FEATURES,
    Observation,
    Records,
)

Range = float | tuple[float, float]
TraceLike = str | Path | Trace | Sequence[str | Path | Trace]
PARTS = ("train", "validation", "test", "all")


@dataclass(frozen=True)
class Rewards:
    """What each settled request is worth. The default is goodput, exactly what the leaderboard counts."""

    good: float = 1.0
    violated: float = 0.0
    rejected_at_arrival: float = 0.0
    rejected_at_decode: float = 0.0
    wasted_prefill_s: float = 0.0

    @property
    def weights(self) -> NDArray[np.float64]:
        """float64[5], in the order of the fields."""
        return np.array(
            [self.good, self.violated, self.rejected_at_arrival, self.rejected_at_decode, self.wasted_prefill_s]
        )


@dataclass(frozen=True)
class Episodes:
    """What an episode is drawn from: ranges are uniform, numbers are fixed.

    Args:
        requests: length of an episode's window.
        load: arrival speed, as a multiple of the trace's own.
        prefill_up: how many prefill instances take part, of those the cluster has; None: all.
        decode_up: the same of decode instances.
        hardware: factor on the speed of every instance, drawn apart for each.
    """

    requests: int = 1000
    load: Range = 1.0
    prefill_up: tuple[int, int] | None = None
    decode_up: tuple[int, int] | None = None
    hardware: Range = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.requests, bool) or not isinstance(self.requests, int) or self.requests < 1:
            raise ValueError(f"Episodes.requests must be a whole number above 0, found {self.requests!r}")
        for name in ("load", "hardware"):
            value = getattr(self, name)
            low, high = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
            if not (isinstance(low, int | float) and isinstance(high, int | float) and 0 < low <= high < float("inf")):
                raise ValueError(f"Episodes.{name} must be a number above 0 or (low, high) of such, found {value!r}")
        for name in ("prefill_up", "decode_up"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, tuple | list) or len(value) != 2 or not 1 <= value[0] <= value[1]:
                raise ValueError(f"Episodes.{name} must be (low, high) with 1 <= low <= high, found {value!r}")


def _draw(rng: np.random.Generator, value: Range) -> float:
    return float(rng.uniform(*value)) if isinstance(value, (tuple, list)) else float(value)


class _Clusters:
    """What the single and the vector environment share: a simulator, episodes drawn into it, compiled steps."""

    def __init__(
        self,
        cluster: str | Path | ClusterSpec,
        trace: TraceLike,
        part: str,
        episodes: Episodes,
        rewards: Rewards,
        count: int,
    ) -> None:
        self.spec = load_cluster(cluster)
        if part not in PARTS:
            raise ValueError(f"part {part!r}: expected one of {', '.join(PARTS)}")
        for name, size in (("prefill_up", self.spec.n_prefill), ("decode_up", self.spec.n_decode)):
            between = getattr(episodes, name)
            if between is not None and between[1] > size:
                raise ValueError(f"Episodes.{name} is {between!r}, the cluster has {size}")
        if count < 1:
            raise ValueError(f"num_envs must be at least 1, found {count}")
        self.traces = []
        for one in [trace] if isinstance(trace, str | Path | Trace) else trace:
            whole = one if isinstance(one, Trace) else load_trace(one)
            self.traces.append(whole if part == "all" else getattr(whole.split(), part))
            if self.traces[-1].n_requests == 0:
                raise ValueError(f"part {part!r} of trace {whole.name!r} has no requests")
        self.episodes = episodes
        self.rewards = rewards
        self.window = min(episodes.requests, *(trace.n_requests for trace in self.traces))
        self.simulator = Simulator.with_room(self.spec, *self.traces, clusters=count, requests=self.window)
        self.base = self.spec.parameters()
        p, d = self.simulator.prefills, self.simulator.decodes
        self.n_actions = 1 + p * d * 3
        self.table_shapes = {
            "request": (len(REQUEST_FEATURES.names or ()),),
            "prefill": (p, len(PREFILL_FEATURES.names or ())),
            "decode": (d, len(DECODE_FEATURES.names or ())),
            "cluster": (len(CLUSTER_FEATURES.names or ()),),
        }
        self.settled = np.zeros((count, 5))
        self.done = np.zeros(count, np.bool_)
        self.ended = 0  # how many are done
        self.elapsed_s = np.zeros(count)
        self.started = False
        self._shapes = [(count, *shape) for shape in self.table_shapes.values()]
        self.masks, self._tables = self._new_tables()
        self._handed_out = False  # whether somebody else has the present tables
        simulator = self.simulator
        self._weights = rewards.weights
        self._head = (simulator.worlds, simulator.parameters, simulator.observations)
        actions, row = np.zeros(count, np.int64), np.zeros(count)
        shown = (self.masks, *self._tables)
        self._step = entry_point(
            _replay.step_and_show, *self._head, actions, self._weights, self.done, self.settled, row, row, *shown
        )
        self._show = entry_point(_replay.show, simulator.worlds, simulator.observations, self.settled, *shown, 0)

    def observation_space(self) -> gym.spaces.Dict:
        return gym.spaces.Dict(
            {
                name: gym.spaces.Box(-_replay.LARGEST, _replay.LARGEST, shape, np.float32)
                for name, shape in self.table_shapes.items()
            }
        )

    def start(self, c: int, rng: np.random.Generator, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Draw an episode into cluster c. `options`: "start" (first request of the window), "load"."""
        options = options or {}
        unknown = set(options) - {"start", "load"}
        if unknown:
            raise ValueError(f"unknown reset options {sorted(unknown)}; known are 'start' and 'load'")
        trace = self.traces[0] if len(self.traces) == 1 else self.traces[int(rng.integers(len(self.traces)))]
        last_start = trace.n_requests - self.window
        start = options.get("start", rng.integers(last_start + 1))
        first = int(start)
        if first != start or not 0 <= first <= last_start:
            raise ValueError(f"option 'start' is {start}, must be in 0 .. {last_start} for windows of {self.window}")
        load = float(options.get("load", _draw(rng, self.episodes.load)))
        if not 0 < load < float("inf"):
            raise ValueError(f"option 'load' is {load}, must be a finite number above 0")
        self.started = True
        self._draw_cluster(c, rng)
        self.simulator.load(c, trace, first, first + self.window, speed=load)
        state = self.simulator.batch.state
        for name, table in (("prefill_up", state.prefill[c]), ("decode_up", state.decode[c])):
            between = getattr(self.episodes, name)
            if between is not None:
                up = int(rng.integers(between[0], between[1] + 1))
                table["up"] = 0
                table["up"][rng.permutation(len(table))[:up]] = 1
        self.simulator.observe(c)
        if self._handed_out:
            self.masks = self.masks.copy()
            self._tables = [table.copy() for table in self._tables]
            self._handed_out = False
        self._show(self.simulator.worlds, self.simulator.observations, self.settled, self.masks, *self._tables, c)
        self.done[c] = False
        return {"start": first, "load": load}

    def _draw_cluster(self, c: int, rng: np.random.Generator) -> None:
        if self.episodes.hardware == 1.0:
            return
        tables = self.simulator.parameter_tables
        for p in range(self.simulator.prefills):
            factor = _draw(rng, self.episodes.hardware)
            for name in ("base_s", "linear_s", "quadratic_s"):
                tables.prefill[c, p][name] = self.base.prefill[p][name] / factor
        for d in range(self.simulator.decodes):
            factor = _draw(rng, self.episodes.hardware)
            for name in ("step_base_s", "step_request_s", "step_token_s"):
                tables.decode[c, d][name] = self.base.decode[d][name] / factor

    def step(self, actions: NDArray[np.int64]) -> NDArray[np.float64]:
        """One decision in every cluster; returns rewards [C].

        `done`, `ended`, `settled`, `elapsed_s` (a new array each time) and the masks are then up to date.
        """
        count = len(self.done)
        if actions.dtype.kind not in "iu":
            raise ValueError(f"expected whole numbers as actions, got {actions.dtype}: {actions!r}")
        if not self.started:
            raise gym.error.ResetNeeded("call reset() before step()")
        if actions.shape != (count,):
            raise ValueError(f"expected {count} actions, got shape {actions.shape}")
        masks, tables = self._new_tables()
        rewards, elapsed_s = np.empty(count), np.empty(count)
        ended = self._step(
            *self._head,
            np.ascontiguousarray(actions, np.int64),
            self._weights,
            self.done,
            self.settled,
            rewards,
            elapsed_s,
            masks,
            *tables,
        )
        if ended == _replay.OUT_OF_RANGE:
            raise ValueError(f"expected {count} actions in 0 .. {self.n_actions - 1}, got {actions!r}")
        if ended == _replay.FAILED:
            self.simulator.raise_errors()
        self.ended, self.elapsed_s = ended, elapsed_s
        self.masks, self._tables, self._handed_out = masks, tables, False
        return rewards

    def tables(self) -> dict[str, NDArray[np.float32]]:
        """The present observations as float32 tables, with a leading axis for the clusters; they will not change."""
        self._handed_out = True
        return dict(zip(self.table_shapes, self._tables, strict=True))

    def _new_tables(self) -> tuple[NDArray[np.bool_], list[NDArray[np.float32]]]:
        masks = np.empty((len(self.done), self.n_actions), np.bool_)
        return masks, [np.empty(shape, np.float32) for shape in self._shapes]

    @property
    def now_s(self) -> NDArray[np.float64]:
        return self.simulator.batch.state.clock["now_s"][:, 0]  # type: ignore[no-any-return]


class ClusterEnv(gym.Env[dict[str, NDArray[np.float32]], np.int64]):
    """One cluster, one decision per step. See the module's docstring.

    Args:
        cluster: built-in name (`8p8d`), YAML file or `ClusterSpec`.
        trace: a trace file, `builtin:conversation|toolagent|synthetic`, a `Trace`, or several: each window is of one.
        part: train, validation, test (by time) or all.
        episodes: what episodes are drawn from.
        rewards: what settled requests are worth.
        render_mode: "rgb_array" draws the cluster's load over the episode so far.

    Raises:
        ValueError: an argument that cannot be, or a part without requests.
        SpecError: no such cluster.
        TraceError: no such trace, or its file cannot be read.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self,
        cluster: str | Path | ClusterSpec = "8p8d",
        trace: TraceLike = "builtin:conversation",
        part: str = "train",
        episodes: Episodes | None = None,
        rewards: Rewards | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode {render_mode!r}: expected one of {self.metadata['render_modes']} or None")
        self.render_mode = render_mode
        self._clusters = _Clusters(cluster, trace, part, episodes or Episodes(), rewards or Rewards(), 1)
        self.observation_space = self._clusters.observation_space()
        self.action_space = gym.spaces.Discrete(self._clusters.n_actions)  # type: ignore[assignment]
        self._history: list[tuple[float, ...]] = []

    @property
    def simulator(self) -> Simulator:
        """The simulator, of one cluster."""
        return self._clusters.simulator

    @property
    def observation(self) -> Observation:
        """The present observation in full precision, with a leading axis of 1: what a `policies.Policy` decides on."""
        return self.simulator.observation_tables

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Start an episode. `options`: "start" and "load" fix what is drawn otherwise."""
        super().reset(seed=seed)
        drawn = self._clusters.start(0, self.np_random, options)
        self._history = []
        self._note()
        return self._observe(), self._info() | drawn

    def step(self, action: np.int64) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        """Decide for the request that has arrived, and go on to the next.

        Returns the observation of the next request (float32 tables), the reward of what settled meanwhile, whether the
        episode has ended, False (an episode is never cut off), and `info`: `action_mask` int8[actions], counts of what
        has settled so far, `elapsed_s`.

        Raises:
            ValueError: no such action.
            gymnasium.error.ResetNeeded: before the first `reset`.
        """
        reward = self._clusters.step(np.asarray([action]))
        self._note()
        info = self._info() | {"elapsed_s": float(self._clusters.elapsed_s[0])}
        return self._observe(), float(reward[0]), bool(self._clusters.done[0]), False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are valid (for sb3-contrib's MaskablePPO)."""
        return np.array(self._clusters.masks[0])

    def outcomes(self) -> Records:
        """The episode's requests so far, one `OUTCOME` record each [R]."""
        return self.simulator.outcomes(0).copy()

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """The cluster's load over time, as uint8[height, width, 3]; None without render_mode."""
        if self.render_mode is None:
            gym.logger.warn("render() needs render_mode='rgb_array', given to gym.make or ClusterEnv")
            return None
        from .render import draw_load

        return draw_load(np.array(self._history), self.simulator.outcomes(0), self._clusters.spec)

    def _observe(self) -> dict[str, NDArray[np.float32]]:
        return {name: table[0] for name, table in self._clusters.tables().items()}

    def _info(self) -> dict[str, Any]:
        counts = self._clusters.settled[0]
        return {
            "action_mask": self._clusters.masks[0].astype(np.int8),
            "good": int(counts[0]),
            "violated": int(counts[1]),
            "rejected_at_arrival": int(counts[2]),
            "rejected_at_decode": int(counts[3]),
            "wasted_prefill_s": float(counts[4]),
        }

    def _note(self) -> None:
        if self.render_mode is None:
            return
        now_s = float(self._clusters.now_s[0])
        rejected = float(self._clusters.settled[0, 2] + self._clusters.settled[0, 3])
        if self._clusters.done[0]:  # drained: nothing has been observed since
            self._history.append((now_s, 0.0, 0.0, 0.0, rejected))
            return
        tables = self.simulator.observation_tables
        queue_s = float(tables.prefill["queue_s"][0].mean())
        tbt_s = float(tables.decode["tbt_now_s"][0].mean())
        self._history.append((now_s, queue_s, tbt_s, float(tables.cluster["in_flight"][0, 0]), rejected))


class ClusterVectorEnv(gym.vector.VectorEnv[dict[str, NDArray[np.float32]], NDArray[np.int64], NDArray[Any]]):
    """Many clusters stepped in one compiled call. Arguments as for `ClusterEnv`.

    Args:
        num_envs: how many clusters.
        autoreset_mode: NEXT_STEP (Gymnasium's default), SAME_STEP, or DISABLED (reset by option "reset_mask").
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        cluster: str | Path | ClusterSpec = "8p8d",
        trace: TraceLike = "builtin:conversation",
        part: str = "train",
        episodes: Episodes | None = None,
        rewards: Rewards | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {**type(self).metadata, "autoreset_mode": autoreset_mode}
        self._clusters = _Clusters(cluster, trace, part, episodes or Episodes(), rewards or Rewards(), num_envs)
        self.single_observation_space = self._clusters.observation_space()
        self.single_action_space = gym.spaces.Discrete(self._clusters.n_actions)  # type: ignore[assignment]
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._mode = autoreset_mode
        self._ended: list[int] = []  # what the next step only resets
        self._everywhere = np.ones(num_envs, np.bool_)
        self._rngs: list[np.random.Generator] = []

    @property
    def simulator(self) -> Simulator:
        """The simulator, of `num_envs` clusters."""
        return self._clusters.simulator

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Start an episode in every cluster; cluster i is seeded with seed + i.

        `options`: as for `ClusterEnv`, and "reset_mask" bool[num_envs]: which clusters to reset, the others go on.
        """
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs)), np.bool_)
        if mask.shape != (self.num_envs,):
            raise ValueError(f"option 'reset_mask' must be bool[{self.num_envs}], has shape {mask.shape}")
        super().reset(seed=seed if not isinstance(seed, list) else None, options=options)
        if seed is not None or not self._rngs:
            seeds = (
                seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
            )
            if len(seeds) != self.num_envs:
                raise ValueError(f"{len(seeds)} seeds for {self.num_envs} environments")
            self._rngs = [np.random.default_rng(s) for s in seeds]
        for c in np.flatnonzero(mask):
            self._clusters.start(int(c), self._rngs[c], options)
        self._ended = [c for c in self._ended if not mask[c]]
        return self._clusters.tables(), self._info()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[dict[str, NDArray[np.float32]], NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """One decision in every cluster. Arrays have a leading axis of `num_envs`; otherwise as `ClusterEnv.step`.

        Raises:
            ValueError: actions that are not int[num_envs] in the action space.
            gymnasium.error.ResetNeeded: before the first `reset`.
        """
        actions = np.asarray(actions)
        clusters = self._clusters
        restart = self._ended
        if restart:  # nothing may be decided there
            actions = actions.copy()
            actions[restart] = 0
        rewards = clusters.step(actions)
        elapsed_s = clusters.elapsed_s
        terminated = clusters.done.copy()
        for c in restart:
            clusters.start(c, self._rngs[c])
            rewards[c] = elapsed_s[c] = 0.0
            terminated[c] = False
        info: dict[str, Any] = {}
        ended = np.flatnonzero(terminated).tolist() if clusters.ended else []
        if self._mode is AutoresetMode.NEXT_STEP:
            self._ended = ended
        elif ended and self._mode is AutoresetMode.SAME_STEP:
            info = self._final(terminated)
            for c in ended:
                clusters.start(c, self._rngs[c])
        info |= self._info()
        info["elapsed_s"] = elapsed_s
        info["_elapsed_s"] = self._everywhere.copy()
        return clusters.tables(), rewards, terminated, np.zeros(self.num_envs, np.bool_), info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are valid, bool[num_envs, actions]."""
        return self._clusters.masks.copy()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._clusters.masks.view(np.int8), "_action_mask": self._everywhere.copy()}

    def _final(self, ended: NDArray[np.bool_]) -> dict[str, Any]:
        tables = self._clusters.tables()
        final = np.full(self.num_envs, None, dtype=object)
        for c in np.flatnonzero(ended):
            final[c] = {name: table[c] for name, table in tables.items()}
        good = self._clusters.settled[:, 0].copy()
        return {
            "final_obs": final,
            "_final_obs": ended.copy(),
            "final_info": {"good": good, "_good": ended.copy()},
            "_final_info": ended.copy(),
        }
