"""MaskablePPO of sb3-contrib with the set scorer, on windows of traces: the run.

What is of the problem is in `trainers.stream` (which requests), `trainers.credit` (what a decision brought) and
`trainers.learner` (gathering and learning).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import LinearSchedule

from envs.cluster_env import Episodes
from envs.spec import ClusterSpec
from policies.networks import SetPolicy
from policies.policy import PolicyError
from policies.registry import gate_of
from policies.run_folder import checkpoint_file, last_checkpoint, load_run_weights
from policies.trainers.learner import BASELINE, REWARD_SCALE, Credit, CreditedPPO, Rollouts
from policies.trainers.progress import Progress
from policies.trainers.record import Record
from policies.trainers.stream import RequestStream
from policies.trainers.workload import Workload, at_one_load


class Options(Protocol):
    """The options of `train.py` that this trainer reads."""

    @property
    def base(self) -> str: ...
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
    def horizon_s(self) -> float: ...
    @property
    def own_credit(self) -> bool: ...
    @property
    def group(self) -> int: ...
    @property
    def anchor_kl(self) -> float: ...
    @property
    def temperature(self) -> float: ...
    @property
    def learn(self) -> str: ...
    @property
    def init(self) -> str: ...
    @property
    def widen(self) -> float: ...
    @property
    def prefill_up(self) -> str: ...
    @property
    def decode_up(self) -> str: ...
    @property
    def hardware(self) -> str: ...
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


class RunCallback(BaseCallback):
    """Keeps the run folder while MaskablePPO learns: scalars, checkpoints, the best, the bar."""

    def __init__(self, options: Options, record: Record) -> None:
        super().__init__()
        self.options = options
        self.record = record
        self.stopped = False
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
        score = self.record.evaluate(steps, trained.scorer, self.save)
        self.logger.record("validation/goodput", score)

    def _on_training_start(self) -> None:
        self.started = time.perf_counter()
        self.first_step = self.model.num_timesteps
        self.checkpoint_at = self.model.num_timesteps

    def _on_rollout_start(self) -> None:
        self.training_env.progress = 1.0 - self.model._current_progress_remaining  # type: ignore[attr-defined]
        steps = self.model.num_timesteps
        evaluated_at = self.record.evaluated_at
        if evaluated_at < 0 or steps - evaluated_at >= self.options.eval_every:
            self.evaluate()
        if steps - self.checkpoint_at >= self.options.checkpoint_every:
            self.checkpoint()

    def _on_step(self) -> bool:
        return not self.stopped

    def _on_rollout_end(self) -> None:
        counts = self.training_env.take_counts()  # type: ignore[attr-defined]
        settled = max(1.0, sum(counts.values()))
        shares = {name: count / settled for name, count in counts.items()}
        seconds = time.perf_counter() - self.started - self.record.eval_s
        fps = (self.num_timesteps - self.first_step) / max(1e-9, seconds)
        buffer: Any = self.model.rollout_buffer  # type: ignore[attr-defined]
        rewards = buffer.rewards[buffer.rows :]
        reward = float(rewards.mean()) / REWARD_SCALE + BASELINE
        for name, share in shares.items():
            self.logger.record(f"rollout/{'goodput' if name == 'good' else name}", share)
        self.logger.record("rollout/reward_per_step", reward)
        self.logger.record("time/steps_per_s", fps)
        rejected = shares["rejected_at_arrival"] + shares["rejected_at_decode"]
        self.show(
            self.num_timesteps,
            f"goodput {shares['good']:.3f}  rejected {rejected:.3f}  reward {reward:.3f}  {fps:,.0f} steps/s",
        )


def torch_device(name: str) -> str:
    """cpu or cuda for --device; `PolicyError` where there is no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise PolicyError("--device cuda: torch finds no CUDA device here; use cpu or auto")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def _model(options: Options, stream: RequestStream, from_file: Path | None) -> CreditedPPO:
    """A new model, or one that goes on from a checkpoint with the present options."""
    device = torch_device(options.device)
    settings: dict[str, Any] = {
        "learning_rate": LinearSchedule(options.lr, options.lr * 0.05, 1.0),
        "n_steps": _rollout(options),
        "batch_size": options.minibatch,
        "n_epochs": options.epochs,
        "gamma": options.gamma,
        "gae_lambda": options.gae_lambda,
        "clip_range": options.clip,
        "ent_coef": options.ent,
        "target_kl": options.target_kl or None,
        "rollout_buffer_class": Rollouts,
        "policy_kwargs": {"hidden": options.hidden, "temperature": options.temperature, "learn": options.learn},
    }
    if from_file is None:
        model = CreditedPPO(SetPolicy, stream, seed=options.seed, device=device, **settings)
        trained: Any = model.policy
        if options.base:
            trained.scorer.gate.copy_(torch.from_numpy(gate_of(options.base)))
        if options.init:
            trained.scorer.load_state_dict(load_run_weights(Path(options.init), options.hidden).state_dict())
    else:
        try:
            model = CreditedPPO.load(
                from_file,
                env=stream,
                device=device,
                custom_objects={**settings, "n_envs": stream.num_envs},
            )
        except (ValueError, RuntimeError, KeyError, OSError, AssertionError) as error:
            raise PolicyError(f"{from_file}: cannot go on from it: {' '.join(str(error).split())}") from None
        model.set_random_seed(options.seed + model.num_timesteps)
    model.credit = Credit(options.gamma, options.gae_lambda, options.horizon_s, options.own_credit, options.group)
    model.anchor_kl = options.anchor_kl
    return model


def _rollout(options: Options) -> int:
    """Decisions per cluster and rollout."""
    return max(2, min(options.n_steps, -(-options.steps // options.envs)))


def episodes(options: Options, load: tuple[float, float]) -> Episodes:
    """What windows and clusters are drawn from.

    Raises:
        PolicyError: ranges that cannot be.
    """
    try:
        drawn: dict[str, Any] = {
            name: tuple(map(int, text.split(",")))
            for name, text in (("prefill_up", options.prefill_up), ("decode_up", options.decode_up))
            if text
        }
        if options.hardware:
            drawn["hardware"] = tuple(map(float, options.hardware.split(",")))
        return Episodes(options.episode_requests, load, **drawn)
    except ValueError as error:
        raise PolicyError(f"--prefill-up, --decode-up or --hardware: {error}") from None


def train(
    options: Options,
    folder: Path,
    spec: ClusterSpec,
    workloads: Sequence[Workload],
    resume: bool,
) -> bool:
    """Train into a run folder that has its config.yaml; False when a signal stopped it, all saved.

    Raises:
        PolicyError: the folder cannot be resumed, or the device is not there.
    """
    if options.device != "cuda":
        torch.set_num_threads(1)  # two threads gain little and lose much as soon as the cores are shared
    traces, load = at_one_load(workloads)
    stream = RequestStream(
        options.envs,
        spec,
        traces,
        workloads[0].part,
        episodes(options, load),
        group=options.group,
        remember=2 * _rollout(options),
        widen=options.widen,
    )
    from_file = last_checkpoint(folder) if resume else None
    model = _model(options, stream, from_file)
    if model.num_timesteps >= options.steps:
        raise PolicyError(f"{folder} has {model.num_timesteps:,} steps already: give --steps above that")
    if from_file is not None and from_file.name == "final.zip":
        from_file.replace(checkpoint_file(folder, model.num_timesteps))
    model.set_logger(configure(str(folder / "tensorboard"), ["tensorboard"]))
    record = Record(folder, spec, workloads, options.eval_requests)
    callback = RunCallback(options, record)
    callback.init_callback(model)
    if from_file is None:
        callback.checkpoint()
    stream.reset()  # compiles, while Ctrl-C still interrupts at once
    before = {number: signal.signal(number, callback.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    started = time.perf_counter()
    try:
        with Progress(options.steps, model.num_timesteps) as progress:
            callback.show = progress.show
            model.learn(options.steps - model.num_timesteps, callback=callback, reset_num_timesteps=False)
    except KeyboardInterrupt:  # the second signal: what the last update left behind may be half of one
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    seconds = time.perf_counter() - started
    record.end_session(model.num_timesteps - callback.first_step, seconds, model.environment_s)
    if callback.stopped:
        callback.checkpoint()
        record.write(model.num_timesteps)
        return False
    callback.evaluate()
    model.logger.dump(model.num_timesteps)
    callback.save(folder / "final.zip")
    record.write(model.num_timesteps)
    return True
