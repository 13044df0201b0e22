"""A scorer of (prefill, decode, source) choices, indifferent to the order and number of instances.

Three layers, all over sets:

1. `scale` brings the float32 tables of an observation to a few units: times as multiples of the
   SLO they count against, tokens as shares of the request or of the decode instance's KV
   capacity, cluster-wide counts and rates per instance, everything through sign(x) log(1 + |x|)
   and cut to +-10. No feature grows with a pool, and the SLOs only occur as denominators, so
   weights carry over to other pools and other SLOs.
2. `prior` turns the predictions in the observation into logits: least predicted TTFT, least
   predicted TBT, reject where the worse of these two is beyond its SLO. It has no weights.
3. `SetScorer` adds what is learned: instances are encoded one by one with the request and the
   cluster, pooled (mean and max), scored again with the pool; the logit of (p, d, source) is the
   sum of a score of (p, source) and one of d. The heads start at zero, so that an untrained
   policy is the prior: Algorithm 1 of [A] with early rejection, softly.

Shapes: B observations, P prefill and D decode instances, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.distributions import MaskableDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from torch import Tensor, nn

from envs.state import (
    CLUSTER_FEATURES,
    DECODE_FEATURES,
    PREFILL_FEATURES,
    REQUEST_FEATURES,
)

Tables = Mapping[str, Tensor]

TTFT_WEIGHT = 100.0  # logits per TTFT SLO
TBT_WEIGHT = 200.0  # logits per TBT SLO
REJECT_WEIGHT = 100.0  # logits per SLO by which the predictions exceed it
MOST_REJECT = 10.0  # the prior's certainty about rejecting, either way
NO_ROOM = 12.0  # logits off for a decode instance without KV room for the request
MASKED = -1e8
LARGEST = 1e9  # of any feature: that of envs.kernel.replay
LARGEST_SCALED = 10.0
CONTEXT, PREFILL, DECODE = 9, 13, 11  # numbers of scaled features


class Scaled(NamedTuple):
    """Scaled features of B observations."""

    context: Tensor  # [B, CONTEXT], the request and the cluster
    prefill: Tensor  # [B, P, PREFILL]
    decode: Tensor  # [B, D, DECODE]


class Prior(NamedTuple):
    """Logits that follow from the predictions alone."""

    reject: Tensor  # [B]
    prefill: Tensor  # [B, P, 3], per source
    decode: Tensor  # [B, D]


def _columns(table: Tensor, features: np.dtype) -> dict[str, Tensor]:
    """The columns of a table by name, cut to +-LARGEST as in the environment; NaN counts as 0."""
    clean = torch.nan_to_num(table, nan=0.0).clamp(-LARGEST, LARGEST)
    return dict(zip(features.names or (), clean.unbind(-1), strict=True))


def _squash(columns: list[Tensor]) -> Tensor:
    x = torch.stack(columns, -1)
    return (x.sign() * x.abs().log1p()).clamp(-LARGEST_SCALED, LARGEST_SCALED)


def scale(tables: Tables) -> Scaled:
    """Tables in physical units -> features of a few units (see the module's docstring)."""
    request = _columns(tables["request"], REQUEST_FEATURES)
    prefill = _columns(tables["prefill"], PREFILL_FEATURES)
    decode = _columns(tables["decode"], DECODE_FEATURES)
    cluster = _columns(tables["cluster"], CLUSTER_FEATURES)
    prefills, decodes = tables["prefill"].shape[1], tables["decode"].shape[1]
    tokens = request["input_tokens"].clamp(min=1.0)
    ttft_slo_s = request["ttft_slo_s"].clamp(min=1e-6)
    tbt_slo_s = request["tbt_slo_s"].clamp(min=1e-6)
    output_tokens = cluster["expected_output_tokens"].clamp(min=0.0)

    context = _squash(
        [
            tokens / 1000.0,
            request["best_tokens"] / tokens,
            request["since_last_arrival_s"] * prefills / ttft_slo_s,
            cluster["arrival_rate"] / prefills,
            cluster["in_flight"] / decodes,
            output_tokens / 100.0,
            cluster["expected_decode_s"] / ttft_slo_s,
            cluster["prefill_load"],
            cluster["decode_load_forecast"],
        ]
    )
    n, ttft = tokens[:, None], ttft_slo_s[:, None]
    of_prefill = _squash(
        [
            prefill["queue_s"] / ttft,
            prefill["queue_requests"],
            prefill["local_tokens"] / n,
            prefill["device_tokens"] / n,
            prefill["fetch_tokens"] / n,
            prefill["fetch_s"] / ttft,
            prefill["ttft_local_s"] / ttft,
            prefill["ttft_fetch_s"] / ttft,
            prefill["ttft_recompute_s"] / ttft,
            prefill["tx_used_share"],
            prefill["rx_used_share"],
            prefill["host_used_share"],
            prefill["device_used_share"],
        ]
    )
    # free = capacity - kv - pending - (batch + pending requests) * expected output
    owed = (decode["batch"] + decode["pending_requests"]) * output_tokens[:, None]
    capacity = decode["free_tokens"] + decode["kv_tokens"] + decode["pending_tokens"] + owed
    capacity = capacity.clamp(min=1.0)
    tbt = tbt_slo_s[:, None]
    of_decode = _squash(
        [
            decode["batch"] / 10.0,
            decode["kv_tokens"] / capacity,
            decode["free_tokens"] / capacity,
            decode["pending_requests"] / 10.0,
            decode["pending_tokens"] / capacity,
            decode["waiting_requests"],
            n / capacity,
            decode["tbt_now_s"] / tbt,
            decode["tbt_assigned_s"] / tbt,
            decode["tbt_at_join_s"] / tbt,
            decode["rx_used_share"],
        ]
    )
    return Scaled(context, of_prefill, of_decode)


def _multiple(times_s: Tensor, slo_s: Tensor) -> Tensor:
    """Times as multiples of an SLO: linear up to 2, logarithmic beyond, which keeps their order."""
    ratio = (times_s / slo_s.clamp(min=1e-6)).clamp(min=0.0)
    return torch.where(ratio > 2.0, 2.0 + torch.log(ratio.clamp(min=2.0) / 2.0), ratio)


def prior(tables: Tables, sources: Tensor, decode_up: Tensor) -> Prior:
    """Logits of a soft Algorithm 1 with early rejection.

    The best allowed pair has logit 0; rejecting has REJECT_WEIGHT times what the predicted TTFT or
    TBT of that pair, in SLOs, is above 1.

    Args:
        sources: bool[B, P, 3], which sources are valid where. decode_up: bool[B, D].
    """
    request = _columns(tables["request"], REQUEST_FEATURES)
    prefill = _columns(tables["prefill"], PREFILL_FEATURES)
    decode = _columns(tables["decode"], DECODE_FEATURES)
    cluster = _columns(tables["cluster"], CLUSTER_FEATURES)
    ttft_s = torch.stack(
        [prefill["ttft_local_s"], prefill["ttft_fetch_s"], prefill["ttft_recompute_s"]], -1
    )
    ttft = _multiple(ttft_s, request["ttft_slo_s"][:, None, None])
    tbt = _multiple(decode["tbt_assigned_s"], request["tbt_slo_s"][:, None])
    need = request["input_tokens"] + cluster["expected_output_tokens"]
    no_room = (decode["free_tokens"] < need[:, None]).to(tbt.dtype)
    of_prefill = -TTFT_WEIGHT * ttft
    of_decode = -TBT_WEIGHT * tbt - NO_ROOM * no_room

    best_prefill, source = of_prefill.masked_fill(~sources, MASKED).flatten(1).max(1)
    best_decode, instance = of_decode.masked_fill(~decode_up, MASKED).max(1)
    load = torch.maximum(
        ttft.flatten(1).gather(1, source[:, None])[:, 0], tbt.gather(1, instance[:, None])[:, 0]
    )
    reject = (REJECT_WEIGHT * (load - 1.0)).clamp(-MOST_REJECT, MOST_REJECT)
    return Prior(reject, of_prefill - best_prefill[:, None, None], of_decode - best_decode[:, None])


def split_masks(masks: Tensor | None, prefills: int, decodes: int, batch: int) -> Tensor:
    """Action masks bool[B, 1 + P D 3] (None: all valid) -> bool[B, P, D, 3]."""
    if masks is None:
        return torch.ones(batch, prefills, decodes, 3, dtype=torch.bool)
    return masks[:, 1:].reshape(batch, prefills, decodes, 3)


def _mean_and_max(instances: Tensor, up: Tensor) -> list[Tensor]:
    """Over the instances that are up; 0 where none is.

    `instances` [B, N, F] >= 0, `up` bool[B, N] -> two [B, F].
    """
    weights = up.to(instances.dtype)[:, :, None]
    weighted = instances * weights
    return [weighted.sum(1) / weights.sum(1).clamp(min=1.0), weighted.amax(1)]


class SetScorer(nn.Module):
    """Logits for rejecting and for every (prefill, decode, source)."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.prefill = nn.Linear(PREFILL, hidden)
        self.prefill_context = nn.Linear(CONTEXT, hidden, bias=False)
        self.decode = nn.Linear(DECODE, hidden)
        self.decode_context = nn.Linear(CONTEXT, hidden, bias=False)
        self.pool = nn.Linear(4 * hidden + CONTEXT, hidden)
        self.prefill_score = nn.Linear(hidden, hidden, bias=False)
        self.prefill_pool = nn.Linear(hidden, hidden)
        self.prefill_head = nn.Linear(hidden, 3)
        self.decode_score = nn.Linear(hidden, hidden, bias=False)
        self.decode_pool = nn.Linear(hidden, hidden)
        self.decode_head = nn.Linear(hidden, 1)
        self.reject_head = nn.Linear(hidden, 1)
        for head in (self.prefill_head, self.decode_head, self.reject_head):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(
        self, tables: Tables, masks: Tensor | None = None, scaled: Scaled | None = None
    ) -> Tensor:
        """Logits [B, 1 + P D 3] in the environment's order of actions; masked ones are MASKED.

        Args:
            tables: `request` [B, 5], `prefill` [B, P, 13], `decode` [B, D, 10], `cluster` [B, 7].
            masks: bool[B, 1 + P D 3]; None: everything is valid.
            scaled: `scale(tables)`, where that is known already.
        """
        batch, prefills, _ = tables["prefill"].shape
        decodes = tables["decode"].shape[1]
        allowed = split_masks(masks, prefills, decodes, batch).to(tables["prefill"].device)
        sources, decode_up = allowed.any(2), allowed.any(3).any(1)
        base = prior(tables, sources, decode_up)
        x = scale(tables) if scaled is None else scaled
        p = torch.relu_(self.prefill(x.prefill) + self.prefill_context(x.context)[:, None])
        d = torch.relu_(self.decode(x.decode) + self.decode_context(x.context)[:, None])
        pools = [*_mean_and_max(p, sources.any(2)), *_mean_and_max(d, decode_up), x.context]
        pool = torch.relu_(self.pool(torch.cat(pools, 1)))
        p = torch.relu_(self.prefill_score(p) + self.prefill_pool(pool)[:, None])
        d = torch.relu_(self.decode_score(d) + self.decode_pool(pool)[:, None])
        of_prefill = base.prefill + self.prefill_head(p)  # [B, P, 3]
        of_decode = base.decode + self.decode_head(d)[..., 0]  # [B, D]
        reject = base.reject + self.reject_head(pool)[:, 0]
        pairs = of_prefill[:, :, None, :] + of_decode[:, None, :, None]
        pairs = pairs.masked_fill(~allowed, MASKED)
        return torch.cat([reject[:, None], pairs.flatten(1)], 1)


class SetCritic(nn.Module):
    """The value of an observation, from mean, least and most of every scaled feature.

    MaskablePPO gives it no masks, so it does not know who is down.
    """

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT + 3 * (PREFILL + DECODE), 2 * hidden),
            nn.ReLU(),
            nn.Linear(2 * hidden, 2 * hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * hidden, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Scaled) -> Tensor:
        """Values [B, 1]."""
        pools = [x.context]
        for table in (x.prefill, x.decode):
            pools += [table.mean(1), table.amin(1), table.amax(1)]
        values: Tensor = self.head(self.layers(torch.cat(pools, 1)))
        return values


class SetPolicy(MaskableActorCriticPolicy):
    """The set scorer and its critic as a policy of sb3-contrib's MaskablePPO.

    Args:
        hidden: hidden units. The rest as for `MaskableActorCriticPolicy`.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        lr_schedule: Any,
        hidden: int = 48,
        **others: Any,
    ) -> None:
        self.hidden = hidden
        others.setdefault(
            "features_extractor_class", CombinedExtractor
        )  # has no weights and is not used
        super().__init__(observation_space, action_space, lr_schedule, **others)

    def _build(self, lr_schedule: Any) -> None:
        self.scorer = SetScorer(self.hidden)
        self.critic = SetCritic(self.hidden)
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | {"hidden": self.hidden}

    def _logits(self, obs: Any, action_masks: Any, scaled: Scaled | None = None) -> Tensor:
        masks = None
        if action_masks is not None:
            batch = len(obs["request"])
            masks = torch.as_tensor(action_masks, device=self.device).bool().reshape(batch, -1)
        logits: Tensor = self.scorer(obs, masks, scaled)
        return logits

    def forward(
        self, obs: Any, deterministic: bool = False, action_masks: NDArray[np.bool_] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Actions [B], values [B, 1] and log-probabilities [B]."""
        scaled = scale(obs)
        log_probs = torch.log_softmax(self._logits(obs, action_masks, scaled), 1)
        if deterministic:
            actions = log_probs.argmax(1)
        else:
            actions = torch.multinomial(log_probs.exp(), 1)[:, 0]
        return actions, self.critic(scaled), log_probs.gather(1, actions[:, None])[:, 0]

    def evaluate_actions(
        self, obs: Any, actions: Tensor, action_masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values [B, 1], log-probabilities of `actions` [B], entropies [B]."""
        scaled = scale(obs)
        log_probs = torch.log_softmax(self._logits(obs, action_masks, scaled), 1)
        entropy = -(log_probs.exp() * log_probs).sum(1)  # masked ones: 0 * -1e8
        chosen = log_probs.gather(1, actions.long().reshape(-1, 1))[:, 0]
        return self.critic(scaled), chosen, entropy

    def get_distribution(
        self, obs: Any, action_masks: NDArray[np.bool_] | None = None
    ) -> MaskableDistribution:
        distribution = self.action_dist.proba_distribution(
            action_logits=self._logits(obs, action_masks)
        )
        if action_masks is not None:
            distribution.apply_masking(action_masks)
        return distribution

    def predict_values(self, obs: Any) -> Tensor:
        values: Tensor = self.critic(scale(obs))
        return values
