"""MaskablePPO of sb3-contrib with the set scorer, on windows of a trace.

A window of requests is treated as a piece of an endless stream: it is cut off, not ended, and the
value of what comes after is bootstrapped. Otherwise the critic, which sees no clock, would be wrong
by a whole horizon of requests near every end. Rewards are counted from a typical goodput and
scaled, so that values are a few units: a constant per step changes nothing about which policy is
best in an endless stream.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import LinearSchedule

from envs.cluster_env import Episodes
from envs.sb3 import ClusterVecEnv
from envs.spec import ClusterSpec
from policies.networks import SetPolicy
from policies.policy import PolicyError
from policies.run_folder import checkpoint_file, last_checkpoint
from policies.trainers.progress import Progress
from policies.trainers.record import OUTCOMES, Record
from traces import Trace

BASELINE = 0.8  # good requests per step that count as reward 0
REWARD_SCALE = 0.02


class Options(Protocol):
    """The options of `train.py` that this trainer reads."""

    @property
    def part(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def envs(self) -> int: ...
    @property
    def episode_requests(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def epochs(self) -> int: ...
    @property
    def minibatch(self) -> int: ...
    @property
    def clip(self) -> float: ...
    @property
    def gamma(self) -> float: ...
    @property
    def gae_lambda(self) -> float: ...
    @property
    def ent(self) -> float: ...
    @property
    def n_steps(self) -> int: ...
    @property
    def target_kl(self) -> float: ...
    @property
    def hidden(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def eval_requests(self) -> int: ...
    @property
    def device(self) -> str: ...


class RequestStream(ClusterVecEnv):
    """`ClusterVecEnv` whose windows are pieces of an endless stream (see the module's docstring).

    The first window of every cluster has another length: they do not all start over at once.
    Requests that settle are counted by outcome, until `take_counts`.
    """

    def reset(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        window = self._clusters.window
        self._cuts = np.arange(1, self.num_envs + 1) * window // self.num_envs
        self._clock = 0
        self._counts = np.zeros(5)
        self._tables = super().reset()
        return self._tables

    def step_wait(self) -> Any:
        last = self._tables
        before = self._clusters.settled.copy()
        tables, rewards, done, infos = super().step_wait()
        settled = self._clusters.settled.copy()
        for c in np.flatnonzero(done):
            settled[c, :4] = [infos[c]["episode"][name] for name in OUTCOMES]
        self._counts += (settled - before).sum(0)
        rewards = ((rewards - BASELINE) * REWARD_SCALE).astype(np.float32)
        # What was still open there is settled at once: left to the value of the state before.
        rewards[done] = 0.0

        self._clock += 1
        cut = np.flatnonzero((self._cuts == self._clock) & ~done)
        for c in cut:
            self._clusters.start(int(c), self._rngs[c])
            self._returns[c] = self._lengths[c] = 0
        if len(cut):
            rewards[cut] = 0.0
            done[cut] = True
            tables = self._clusters.tables()
        for c in np.flatnonzero(done):
            infos[c]["terminal_observation"] = {name: table[c] for name, table in last.items()}
            infos[c]["TimeLimit.truncated"] = True
        self._tables = tables
        return tables, rewards, done, infos

    def take_counts(self) -> dict[str, float]:
        """Requests settled since the last call, by outcome."""
        counts = dict(zip(OUTCOMES, self._counts.tolist(), strict=False))
        self._counts = np.zeros(5)
        return counts


class RunCallback(BaseCallback):
    """Keeps the run folder while MaskablePPO learns: scalars, checkpoints, the best, the bar."""

    def __init__(self, options: Options, record: Record) -> None:
        super().__init__()
        self.options = options
        self.record = record
        self.stopped = False
        self.env_s = 0.0
        self.checkpoint_at = 0
        self.show: Callable[[int, str], None] = lambda steps, text: None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: stop at the next step; a second signal interrupts at once."""
        self.stopped = True
        signal.signal(number, signal.default_int_handler)

    def save(self, file: Path) -> None:
        unfinished = file.with_name(file.stem + ".unfinished.zip")
        self.model.save(unfinished)
        unfinished.replace(file)

    def checkpoint(self) -> None:
        self.checkpoint_at = self.model.num_timesteps
        self.save(checkpoint_file(self.record.folder, self.checkpoint_at))

    def evaluate(self) -> None:
        """Goodput on the validation part; keeps the weights if they are the best so far."""
        steps = self.model.num_timesteps
        if self.record.evaluated_at == steps:
            return
        trained = self.model.policy
        assert isinstance(trained, SetPolicy)
        score = self.record.evaluate(steps, trained.scorer, str(self.model.device), self.save)
        self.logger.record("validation/goodput", score)

    def _on_training_start(self) -> None:
        self.started = time.perf_counter()
        self.first_step = self.model.num_timesteps
        self.checkpoint_at = self.model.num_timesteps

    def _on_rollout_start(self) -> None:
        steps = self.model.num_timesteps
        evaluated_at = self.record.evaluated_at
        if evaluated_at < 0 or steps - evaluated_at >= self.options.eval_every:
            self.evaluate()
        if steps - self.checkpoint_at >= self.options.checkpoint_every:
            self.checkpoint()

    def _on_step(self) -> bool:
        return not self.stopped

    def _on_rollout_end(self) -> None:
        stream = self.training_env
        counts = stream.take_counts()  # type: ignore[attr-defined]
        settled = max(1.0, sum(counts.values()))
        shares = {name: count / settled for name, count in counts.items()}
        seconds = time.perf_counter() - self.started - self.record.eval_s
        fps = (self.num_timesteps - self.first_step) / max(1e-9, seconds)
        rewards = self.model.rollout_buffer.rewards  # type: ignore[attr-defined]
        reward = float(rewards.mean()) / REWARD_SCALE + BASELINE
        for name, share in shares.items():
            self.logger.record(f"rollout/{'goodput' if name == 'good' else name}", share)
        self.logger.record("rollout/reward_per_step", reward)
        self.logger.record("time/steps_per_s", fps)
        rejected = shares["rejected_at_arrival"] + shares["rejected_at_decode"]
        self.show(
            self.num_timesteps,
            f"goodput {shares['good']:.3f}  rejected {rejected:.3f}  reward {reward:.3f}  "
            f"{fps:,.0f} steps/s",
        )


def torch_device(name: str) -> str:
    """cpu or cuda for --device; `PolicyError` where there is no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise PolicyError("--device cuda: torch finds no CUDA device here; use cpu or auto")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _model(options: Options, stream: RequestStream, from_file: Path | None) -> MaskablePPO:
    """A new model, or one that goes on from a checkpoint with the present options."""
    device = torch_device(options.device)
    rollout = min(options.n_steps, -(-options.steps // options.envs))
    settings: dict[str, Any] = {
        "learning_rate": LinearSchedule(options.lr, options.lr * 0.05, 1.0),
        "n_steps": max(2, rollout),
        "batch_size": options.minibatch,
        "n_epochs": options.epochs,
        "gamma": options.gamma,
        "gae_lambda": options.gae_lambda,
        "clip_range": options.clip,
        "ent_coef": options.ent,
        "target_kl": options.target_kl or None,
    }
    if from_file is None:
        return MaskablePPO(
            SetPolicy,
            stream,
            seed=options.seed,
            device=device,
            policy_kwargs={"hidden": options.hidden},
            **settings,
        )
    try:
        model = MaskablePPO.load(
            from_file,
            env=stream,
            device=device,
            custom_objects={**settings, "n_envs": stream.num_envs},
        )
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise PolicyError(
            f"{from_file}: cannot go on from it: {' '.join(str(error).split())}"
        ) from None
    model.set_random_seed(options.seed + model.num_timesteps)
    return model


def train(
    options: Options,
    folder: Path,
    spec: ClusterSpec,
    traces: Sequence[Trace],
    load: tuple[float, float],
    resume: bool,
) -> bool:
    """Train into a run folder that has its config.yaml; False when a signal stopped it, all saved.

    Raises:
        PolicyError: the folder cannot be resumed, or the device is not there.
    """
    if len(traces) != 1:
        raise PolicyError("--algo ppo takes one trace")
    trace = traces[0]
    if options.device != "cuda":
        torch.set_num_threads(
            1
        )  # two threads gain little and lose much as soon as the cores are shared
    stream = RequestStream(
        options.envs,
        spec,
        trace,
        options.part,
        Episodes(requests=options.episode_requests, load=load),
    )
    from_file = last_checkpoint(folder) if resume else None
    model = _model(options, stream, from_file)
    if model.num_timesteps >= options.steps:
        raise PolicyError(
            f"{folder} has {model.num_timesteps:,} steps already: give --steps above that"
        )
    if from_file is not None and from_file.name == "final.zip":
        from_file.replace(checkpoint_file(folder, model.num_timesteps))
    model.set_logger(configure(str(folder / "tensorboard"), ["tensorboard"]))
    record = Record(folder, spec, trace, options.part, load, options.eval_requests)
    callback = RunCallback(options, record)
    callback.init_callback(model)
    if from_file is None:
        callback.checkpoint()
    stream.reset()  # compiles, while Ctrl-C still interrupts at once
    stream = _timed(stream, callback)
    before = {
        number: signal.signal(number, callback.stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    started = time.perf_counter()
    try:
        with Progress(options.steps, model.num_timesteps) as progress:
            callback.show = progress.show
            model.learn(
                options.steps - model.num_timesteps, callback=callback, reset_num_timesteps=False
            )
    except (
        KeyboardInterrupt
    ):  # the second signal: what the last update left behind may be half of one
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    seconds = time.perf_counter() - started
    record.end_session(model.num_timesteps - callback.first_step, seconds, callback.env_s)
    if callback.stopped:
        callback.checkpoint()
        record.write(model.num_timesteps)
        return False
    callback.evaluate()
    model.logger.dump(model.num_timesteps)
    callback.save(folder / "final.zip")
    record.write(model.num_timesteps)
    return True


def _timed(stream: RequestStream, callback: RunCallback) -> RequestStream:
    """Have the callback know how long the environment took."""
    step_wait = stream.step_wait

    def timed() -> Any:
        started = time.perf_counter()
        result = step_wait()
        callback.env_s += time.perf_counter() - started
        return result

    stream.step_wait = timed  # type: ignore[method-assign]
    return stream
