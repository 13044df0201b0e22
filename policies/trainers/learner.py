"""MaskablePPO that learns from a rollout when the next one has been gathered, with the credit of `trainers.credit`.

What becomes of a request is known a few hundred decisions later. So a rollout waits until the next one is there: its
returns then look a whole rollout ahead before they lean on the critic. The policy has moved by one update meanwhile;
the clip is around the policy as it is when the learning begins.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from stable_baselines3.common.utils import explained_variance
from torch import Tensor

from policies.networks import Scaled, SetPolicy, scale
from policies.trainers.credit import advantages, beyond_group, own_credit, step_discounts
from policies.trainers.stream import RequestStream

BASELINE = 0.8  # good requests per step that count as reward 0: a constant per step changes nothing about what is best
REWARD_SCALE = 0.02  # so that values are a few units


class Credit(NamedTuple):
    """How decisions are credited."""

    gamma: float
    gae_lambda: float
    horizon_s: float = 0.0
    """Time constant of the discount in simulated seconds; 0: `gamma` per decision."""
    own: bool = True
    """Whether a request's outcome counts in full in its own decision."""
    group: int = 1
    """Clusters whose average is the baseline."""


class Rollouts:
    """The rollout before the present one, which can be learned from, and the present one: rows T .. 2T - 1.

    The arguments are those SB3 gives.
    """

    def __init__(
        self, rows: int, observations: Any, actions: Any, device: Any, gamma: float, gae_lambda: float, n_envs: int
    ) -> None:
        shape = (2 * rows, n_envs)
        prefills, decodes = observations["prefill"].shape[0], observations["decode"].shape[0]
        self.rows = rows
        self.gathered = 0
        empty = scale({name: torch.zeros(1, *space.shape) for name, space in observations.spaces.items()})
        self.features = Scaled(*(torch.zeros(*shape, *feature.shape[1:]) for feature in empty))
        self.sources = torch.zeros(*shape, prefills, 3)
        self.decode_up = torch.zeros(*shape, decodes, 1)
        self.actions = torch.zeros(*shape, dtype=torch.int64)
        self.rewards, self.values, self.after, self.elapsed_s = (np.zeros(shape, np.float32) for _ in range(4))
        self.cut = np.zeros(shape, np.bool_)

    def reset(self) -> None:
        """Begin a rollout; the present one becomes the one before."""
        arrays: list[Any] = [*self.features, self.sources, self.decode_up, self.actions]
        arrays += [self.rewards, self.values, self.after, self.elapsed_s, self.cut]
        for array in arrays:
            array[: self.rows] = array[self.rows :]


class CreditedPPO(MaskablePPO):
    """See the module's docstring. The environment is a `RequestStream`, the policy a `SetPolicy`."""

    credit = Credit(0.998, 0.98)
    anchor_kl = 0.0  # weight of the KL divergence from the prior
    environment_s = 0.0  # seconds the environment took

    def collect_rollouts(
        self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int, use_masking: bool = True
    ) -> bool:
        """Gather a rollout; False when the callback stopped it."""
        stream, policy, buffer = env, self.policy, rollout_buffer
        assert isinstance(stream, RequestStream)
        assert isinstance(policy, SetPolicy)
        assert isinstance(buffer, Rollouts)
        policy.set_training_mode(False)
        buffer.reset()
        callback.on_rollout_start()
        tables: Any = self._last_obs
        with torch.inference_mode():
            for row in range(buffer.rows, 2 * buffer.rows):
                sources, decode_up = map(torch.from_numpy, stream.valid())
                x = scale({name: torch.as_tensor(table, device=self.device) for name, table in tables.items()})
                chosen, _ = policy.factors(x, sources.to(self.device), decode_up.to(self.device))
                actions = chosen.sample().cpu()
                started = time.perf_counter()
                stream.step_async(actions.numpy())
                tables, rewards, cut, infos = stream.step_wait()
                self.environment_s += time.perf_counter() - started
                self.num_timesteps += stream.num_envs
                callback.update_locals(locals())
                if not callback.on_step():
                    self._last_obs = tables
                    return False
                for feature, value in zip(buffer.features, x):
                    feature[row] = value
                buffer.sources[row], buffer.decode_up[row], buffer.actions[row] = sources, decode_up, actions
                buffer.values[row] = policy.critic(x)[:, 0].cpu().numpy()
                if row > buffer.rows:
                    self._after(row - 1, buffer.values[row])
                buffer.rewards[row] = (rewards - BASELINE) * REWARD_SCALE
                buffer.cut[row], buffer.elapsed_s[row] = cut, stream.elapsed_s
                for c in np.flatnonzero(cut):
                    buffer.after[row, c] = self._value(
                        {k: v[None] for k, v in infos[c]["terminal_observation"].items()}
                    )[0]
            self._after(2 * buffer.rows - 1, self._value(tables))
        self._last_obs = tables
        buffer.gathered += 1
        callback.on_rollout_end()
        return True

    def _value(self, tables: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        present = {name: torch.as_tensor(table, device=self.device) for name, table in tables.items()}
        values: NDArray[np.float32] = self.policy.predict_values(present)[:, 0].cpu().numpy()
        return values

    def _after(self, row: int, values: NDArray[np.float32]) -> None:
        """The values after a step are those of the next, where the stream was not cut."""
        buffer: Any = self.rollout_buffer
        buffer.after[row] = np.where(buffer.cut[row], buffer.after[row], values)

    def _credited(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Advantages and returns of the rollout before the present one, [T, C]."""
        buffer: Any = self.rollout_buffer
        credit = self.credit
        discounts = step_discounts(buffer.elapsed_s, credit.gamma, credit.horizon_s)
        rewards = buffer.rewards
        if credit.own:
            good, settled_at = self.env.outcomes(2 * buffer.rows)  # type: ignore[union-attr]
            accepted = buffer.actions.numpy() > 0
            rewards = rewards + REWARD_SCALE * own_credit(good, accepted, settled_at, discounts)
        found = advantages(rewards, buffer.values, buffer.after, buffer.cut, discounts, credit.gae_lambda)
        returns = (found + buffer.values)[: buffer.rows]
        return beyond_group(found[: buffer.rows], credit.group), returns

    def train(self) -> None:
        """Learn from the rollout before the present one."""
        buffer, policy = self.rollout_buffer, self.policy
        assert isinstance(buffer, Rollouts)
        assert isinstance(policy, SetPolicy)
        if buffer.gathered < 2:
            return
        policy.set_training_mode(True)
        self._update_learning_rate(policy.optimizer)
        clip = self.clip_range(self._current_progress_remaining)  # type: ignore[operator]
        found, of_return = self._credited()
        count = found.size

        def flat(array: Any) -> Tensor:
            return torch.as_tensor(array[: buffer.rows], device=self.device).reshape(count, *array.shape[2:])

        gains, returns = flat((found - found.mean()) / (found.std() + 1e-8)), flat(of_return)
        features = [flat(feature) for feature in buffer.features]
        sources, decode_up, actions = flat(buffer.sources), flat(buffer.decode_up), flat(buffer.actions)

        def evaluated(rows: Tensor) -> tuple[Tensor, Any, Any, Any]:
            x = Scaled(*(feature[rows] for feature in features))
            chosen, prior = policy.factors(x, sources[rows], decode_up[rows])
            return chosen.of(actions[rows]), x, chosen, prior

        with torch.no_grad():
            pieces = torch.arange(count, device=self.device).split(self.batch_size)
            before = torch.cat([evaluated(rows)[0] for rows in pieces])
        sums: dict[str, list[float]] = {}
        stopped = False
        for _ in range(self.n_epochs):
            for rows in torch.randperm(count, device=self.device).split(self.batch_size):
                log_probs, x, chosen, prior = evaluated(rows)
                moved = log_probs - before[rows]
                ratio = moved.exp()
                with torch.no_grad():
                    kl = float((ratio - 1.0 - moved).mean())
                if self.target_kl is not None and kl > 1.5 * self.target_kl:
                    stopped = True
                    break
                gain = gains[rows]
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - clip, 1 + clip)).mean()
                value_loss = torch.nn.functional.mse_loss(policy.critic(x)[:, 0], returns[rows])
                losses = {"policy_gradient_loss": policy_loss, "value_loss": value_loss}
                loss = policy_loss + self.vf_coef * value_loss
                if self.anchor_kl:
                    losses["anchor_kl"] = chosen.divergence(prior).mean()
                    loss = loss + self.anchor_kl * losses["anchor_kl"]
                losses["entropy_loss"] = -chosen.entropy().mean()
                if self.ent_coef:
                    loss = loss + self.ent_coef * losses["entropy_loss"]
                policy.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                for part in (policy.scorer, policy.critic):  # apart: a large error of one does not slow the other
                    torch.nn.utils.clip_grad_norm_(part.parameters(), self.max_grad_norm)
                policy.optimizer.step()
                clipped = float(((ratio - 1.0).abs() > clip).float().mean())
                for name, value in (losses | {"approx_kl": kl, "clip_fraction": clipped}).items():
                    sums.setdefault(name, []).append(float(torch.as_tensor(value).detach()))
            self._n_updates += 1
            if stopped:
                break
        for name, values in sums.items():
            self.logger.record(f"train/{name}", float(np.mean(values)))
        variance = explained_variance(flat(buffer.values).cpu().numpy(), returns.cpu().numpy())
        self.logger.record("train/explained_variance", variance)
        self.logger.record("train/advantage_std", float(found.std()) / REWARD_SCALE)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
