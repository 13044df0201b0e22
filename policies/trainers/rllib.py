"""PPO of RLlib with the set scorer, on windows of a trace: on one machine, or with clusters stepped all over Ray's.

RLlib's new API stack: `SetModule` is the network, `Learner` PPO's update, `RequestStreams` the environment, natively
batched. Windows, rewards, hyper-parameters and the run folder are those of `ppo`; the loss is RLlib's. The learner is
local: a network this small gains nothing from a second one, environments do. They get the trace and the weights
through Ray; what every node must have is this code, at the same version.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported: it does not report its use

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune.registry import register_env
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from envs.cluster_env import ClusterVectorEnv, Episodes
from envs.spec import ClusterSpec
from policies.networks import Scaled, SetCritic, SetScorer, clean, scale
from policies.policy import PolicyError
from policies.ray_cluster import connected
from policies.run_folder import checkpoint_file, last_checkpoint, load_training, save_weights
from policies.trainers import ppo
from policies.trainers.learner import BASELINE, REWARD_SCALE
from policies.trainers.ppo import torch_device
from policies.trainers.progress import Progress
from policies.trainers.record import OUTCOMES, Record
from policies.trainers.workload import Workload
from traces import Trace

ENVIRONMENT = "conductor-request-streams"
# What RLlib's learner reports -> the names that Stable-Baselines3 has.
LEARNED = {
    "policy_gradient_loss": "policy_loss",
    "value_loss": "vf_loss_unclipped",
    "entropy": "entropy",
    "approx_kl": "approx_kl",
    "explained_variance": "vf_explained_var",
    "learning_rate": "default_optimizer_learning_rate",
}


class Options(ppo.Options, Protocol):
    """The options of `train.py` that this trainer reads."""

    @property
    def ray(self) -> str: ...
    @property
    def env_runners(self) -> int: ...


class RequestStreams(ClusterVectorEnv):
    """Clusters whose windows are pieces of an endless stream, as in `ppo.RequestStream`.

    RLlib masks no actions: `action_mask` int8[A] is one more table of the observation. A window is cut off, not ended:
    it is truncated, at its last decision's observation.
    """

    def __init__(self, num_envs: int, spec: ClusterSpec, trace: Trace, part: str, episodes: Episodes) -> None:
        super().__init__(num_envs, spec, trace, part, episodes)
        mask = gym.spaces.Box(0, 1, (self._clusters.n_actions,), np.int8)
        tables = self._clusters.observation_space()
        self.single_observation_space = gym.spaces.Dict({**tables, "action_mask": mask})
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self._counts = np.zeros(5)
        self._environment_s = 0.0

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        # RLlib gives runner i the seed s + i; with s + i + c for its cluster c two runners would draw the same windows.
        seeds = np.random.SeedSequence(seed).generate_state(self.num_envs).tolist()
        super().reset(seed=seeds, options=options)
        self._cuts = np.arange(1, self.num_envs + 1) * self._clusters.window // self.num_envs
        self._clock = 0
        self._last = self._observe()
        return self._last, {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[
        dict[str, NDArray[Any]],
        NDArray[np.float64],
        NDArray[np.bool_],
        NDArray[np.bool_],
        dict[str, Any],
    ]:
        started_s = time.perf_counter()
        before, restarted, last = self._clusters.settled.copy(), self._ended, self._last
        _, rewards, cut, _, _ = super().step(actions)
        settled = self._clusters.settled - before
        settled[restarted] = 0.0
        self._counts += settled.sum(0)
        rewards = (rewards - BASELINE) * REWARD_SCALE

        # The first window of every cluster has another length: they do not all start over at once.
        self._clock += 1
        shorter = np.flatnonzero((self._cuts == self._clock) & ~cut).tolist()
        self._ended = self._ended + shorter
        cut[shorter] = True
        tables = self._last = self._observe()
        if cut.any():
            # What was still open there is settled at once: left to the value of the state before.
            rewards[cut] = 0.0
            tables = {name: table.copy() for name, table in tables.items()}
            for name, table in tables.items():
                table[cut] = last[name][cut]
        self._environment_s += time.perf_counter() - started_s
        return tables, rewards, np.zeros_like(cut), cut, {}

    def _observe(self) -> dict[str, NDArray[Any]]:
        return {**self._clusters.tables(), "action_mask": self._clusters.masks.view(np.int8)}

    def take_counts(self) -> dict[str, float]:
        """Requests settled since the last call, by outcome, and the seconds the environment took."""
        counts = dict(zip(OUTCOMES, self._counts.tolist(), strict=False))
        counts["environment_s"] = self._environment_s
        self._counts, self._environment_s = np.zeros(5), 0.0
        return counts


class Counting(RLlibCallback):
    """Reports what `RequestStreams` counted while a runner sampled."""

    def on_sample_end(self, *, env_runner: Any, metrics_logger: Any, **others: Any) -> None:
        for name, count in env_runner.env.unwrapped.take_counts().items():
            metrics_logger.log_value(("counts", name), count, reduce="sum")


class SetModule(TorchRLModule, ValueFunctionAPI):
    """The set scorer and its critic. `model_config`: `hidden`, the hidden units."""

    def setup(self) -> None:
        self.scorer = SetScorer(self.model_config["hidden"])
        self.critic = SetCritic(self.model_config["hidden"])
        self.action_dist_cls = TorchCategorical

    def _logits(self, batch: Mapping[str, Any], scaled: Scaled) -> Tensor:
        tables = batch[Columns.OBS]
        logits: Tensor = self.scorer(tables, tables["action_mask"].bool(), scaled)
        return logits

    def _forward(self, batch: dict[str, Any], **others: Any) -> dict[str, Any]:
        """Masked logits [B, A] as `action_dist_inputs`."""
        return {Columns.ACTION_DIST_INPUTS: self._logits(batch, _scaled(batch))}

    def _forward_train(self, batch: dict[str, Any], **others: Any) -> dict[str, Any]:
        scaled = _scaled(batch)
        return {
            Columns.ACTION_DIST_INPUTS: self._logits(batch, scaled),
            Columns.EMBEDDINGS: scaled,
        }

    def compute_values(self, batch: dict[str, Any], embeddings: Scaled | None = None) -> Tensor:
        """Values [B]."""
        values: Tensor = self.critic(_scaled(batch) if embeddings is None else embeddings)
        return values[:, 0]


def _scaled(batch: Mapping[str, Any]) -> Scaled:
    tables = batch[Columns.OBS]
    return scale(clean({name: tables[name] for name in tables if name != "action_mask"}))


class Learner(PPOTorchLearner):
    """PPO's update, which stops its passes when the policy has moved far, as `--target-kl` says."""

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self.moved = False

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        loss: Tensor = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        with torch.no_grad():
            log_probs = TorchCategorical(fwd_out[Columns.ACTION_DIST_INPUTS]).logp(batch[Columns.ACTIONS])
            change = (log_probs - batch[Columns.ACTION_LOGP])[batch[Columns.LOSS_MASK]]
            kl = (change.exp() - 1.0 - change).mean()
        self.metrics.log_value((module_id, "approx_kl"), kl, window=1)
        target = config.learner_config_dict["target_kl"]
        self.moved = bool(target and kl > 1.5 * target)
        return loss

    def apply_gradients(self, gradients_dict: dict[Any, Any]) -> None:
        if not self.moved:
            super().apply_gradients(gradients_dict)

    def _update(self, batch: dict[str, Any], **others: Any) -> tuple[Any, Any, Any]:
        if self.moved:
            return {}, {}, {}
        update: tuple[Any, Any, Any] = super()._update(batch, **others)
        return update


# --- training ----------------------------------------------------------------------------------


class Run:
    """A training under way: RLlib's algorithm, and the run folder it is kept in.

    Args:
        steps, weights, optimizer: those of a checkpoint; 0 and nothing in a new run.
    """

    def __init__(self, options: Options, record: Record, algorithm: Algorithm, checkpoint: Mapping[str, Any]) -> None:
        self.options = options
        self.record = record
        self.algorithm = algorithm
        self.first_step = self.steps = self.checkpoint_at = int(checkpoint["steps"])
        self.scalars = SummaryWriter(str(record.folder / "tensorboard"))
        self.started_s = time.perf_counter()
        self.environment_s = 0.0
        self.stopped = False
        self.learner: Learner = next(iter(algorithm.learner_group.foreach_learner(_itself))).get()
        self.module: SetModule = self.learner.module[DEFAULT_MODULE_ID]
        ((_, self.optimizer),) = self.learner.get_optimizers_for_module(DEFAULT_MODULE_ID)
        if checkpoint["steps"]:
            self.module.load_state_dict(checkpoint["weights"])
            rate = self.optimizer.param_groups[0]["lr"]
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.optimizer.param_groups[0]["lr"] = rate
            algorithm.env_runner_group.sync_weights(
                from_worker_or_learner_group=algorithm.learner_group, inference_only=True
            )

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: stop after the present rollout and update; a second signal interrupts at once."""
        self.stopped = True
        signal.signal(number, signal.default_int_handler)

    def save(self, file: Path) -> None:
        weights = {name: weight.cpu() for name, weight in self.module.state_dict().items()}
        save_weights(file, weights, {"steps": self.steps, "optimizer": self.optimizer.state_dict()})

    def checkpoint(self) -> None:
        self.checkpoint_at = self.steps
        self.save(checkpoint_file(self.record.folder, self.steps))

    def evaluate(self) -> None:
        if self.record.evaluated_at != self.steps:
            score = self.record.evaluate(self.steps, self.module.scorer, self.save)
            self.scalars.add_scalar("validation/goodput", score, self.steps)

    def iterate(self, progress: Progress) -> None:
        """One rollout and the update from it.

        Raises:
            PolicyError: every runner of the Ray cluster is gone.
        """
        result = self.algorithm.train()
        sampled = result["env_runners"]
        steps = self.first_step + int(sampled["num_env_steps_sampled_lifetime"])
        if steps == self.steps:
            raise PolicyError("no environment runner answers any more on the Ray cluster")
        self.steps = steps
        counts = {name: float(count) for name, count in sampled["counts"].items()}
        self.environment_s += counts.pop("environment_s")
        settled = max(1.0, sum(counts.values()))
        shares = {name: count / settled for name, count in counts.items()}
        reward = counts["good"] / float(sampled["num_env_steps_sampled"])
        seconds = time.perf_counter() - self.started_s - self.record.eval_s
        fps = (steps - self.first_step) / max(1e-9, seconds)
        scalars = {f"rollout/{'goodput' if name == 'good' else name}": x for name, x in shares.items()}
        scalars |= {"rollout/reward_per_step": reward, "time/steps_per_s": fps}
        learned = result["learners"][DEFAULT_MODULE_ID]
        scalars |= {f"train/{name}": float(learned[reported]) for name, reported in LEARNED.items()}
        for name, value in scalars.items():
            self.scalars.add_scalar(name, value, steps)
        rejected = shares["rejected_at_arrival"] + shares["rejected_at_decode"]
        progress.show(
            steps,
            f"goodput {shares['good']:.3f}  rejected {rejected:.3f}  reward {reward:.3f}  {fps:,.0f} steps/s",
        )

    def learn(self) -> None:
        """Go on to `options.steps`, or until `stop`."""
        options = self.options
        with Progress(options.steps, self.steps) as progress:
            while self.steps < options.steps and not self.stopped:
                evaluated_at = self.record.evaluated_at
                if evaluated_at < 0 or self.steps - evaluated_at >= options.eval_every:
                    self.evaluate()
                if self.steps - self.checkpoint_at >= options.checkpoint_every:
                    self.checkpoint()
                self.iterate(progress)

    def close(self) -> bool:
        """Save all; whether the training was finished."""
        seconds = time.perf_counter() - self.started_s
        self.record.end_session(self.steps - self.first_step, seconds, self.environment_s)
        if self.stopped:
            self.checkpoint()
        else:
            self.evaluate()
            self.save(self.record.folder / "final.zip")
        self.scalars.close()
        self.record.write(self.steps)
        return not self.stopped


def _itself(learner: Learner) -> Learner:
    return learner


def _algorithm(options: Options, spec: ClusterSpec, workload: Workload, done: int) -> Algorithm:
    """RLlib's PPO with the present options, after `done` steps."""
    part, episodes = workload.train, Episodes(requests=options.episode_requests, load=workload.load)

    def make(settings: Mapping[str, Any]) -> RequestStreams:
        return RequestStreams(settings["num_envs"], spec, part, "all", episodes)

    register_env(ENVIRONMENT, make)  # pickled with all that `make` refers to: runners need no file
    clusters = options.envs * max(1, options.env_runners)
    rollout = max(2, min(options.n_steps, -(-(options.steps - done) // clusters)))
    rate = options.lr * (0.05 + 0.95 * (1.0 - done / options.steps))
    config = (
        PPOConfig()
        .environment(ENVIRONMENT, disable_env_checking=True)
        .env_runners(
            num_env_runners=options.env_runners,
            num_envs_per_env_runner=options.envs,
            gym_env_vectorize_mode="vector_entry_point",
            rollout_fragment_length=rollout,
            sample_timeout_s=None,
        )
        .learners(num_learners=0, num_gpus_per_learner=int(torch_device(options.device) == "cuda"))
        .rl_module(rl_module_spec=RLModuleSpec(module_class=SetModule, model_config={"hidden": options.hidden}))
        .callbacks(Counting)
        .training(
            learner_class=Learner,
            learner_config_dict={"target_kl": options.target_kl},
            train_batch_size_per_learner=rollout * clusters,
            minibatch_size=min(options.minibatch, rollout * clusters),
            num_epochs=options.epochs,
            lr=[[0, rate], [options.steps - done, options.lr * 0.05]],
            gamma=options.gamma,
            lambda_=options.gae_lambda,
            clip_param=options.clip,
            entropy_coeff=options.ent,
            use_kl_loss=False,
            vf_clip_param=float("inf"),
            # As in Stable-Baselines3.
            vf_loss_coeff=0.5,
            grad_clip=0.5,
            grad_clip_by="global_norm",
        )
        .debugging(seed=options.seed + done, log_level="ERROR")
    )
    return config.build_algo()


def train(
    options: Options,
    folder: Path,
    spec: ClusterSpec,
    workloads: Sequence[Workload],
    resume: bool,
) -> bool:
    """Train into a run folder that has its config.yaml; False when a signal stopped it, all saved.

    Raises:
        PolicyError: the folder cannot be resumed, or the device or the Ray cluster is not there.
    """
    if len(workloads) != 1:
        raise PolicyError("--algo rllib takes one trace")
    torch_device(options.device)
    if options.device != "cuda":
        torch.set_num_threads(1)  # as in `ppo.train`
    checkpoint: dict[str, Any] = {"steps": 0}
    from_file = last_checkpoint(folder) if resume else None
    if from_file is not None:
        weights, training = load_training(from_file)
        checkpoint = {"weights": weights, **training}
    done = int(checkpoint["steps"])
    if done >= options.steps:
        raise PolicyError(f"{folder} has {done:,} steps already: give --steps above that")
    if from_file is not None and from_file.name == "final.zip":
        from_file.replace(checkpoint_file(folder, done))
    record = Record(folder, spec, workloads, options.eval_requests)
    with connected(options.ray, options.env_runners):
        algorithm = _algorithm(options, spec, workloads[0], done)
        try:
            return _learn(Run(options, record, algorithm, checkpoint))
        finally:
            algorithm.stop()
            shutil.rmtree(algorithm.logdir, ignore_errors=True)  # nothing is in it


def _learn(run: Run) -> bool:
    """The run until its end or a signal; see `train`."""
    if run.steps == 0:
        run.checkpoint()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, run.stop) for number in signals}
    try:
        run.learn()
    except KeyboardInterrupt:  # the second signal, as in `ppo.train`
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return run.close()
