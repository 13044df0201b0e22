"""A scorer of (prefill, decode, source) choices, indifferent to the order and number of instances.

Three layers, all over sets:

1. `scale` brings the float32 tables of an observation to a few units: times as multiples of the
   SLO they count against, tokens as shares of the request or of the decode instance's KV
   capacity, cluster-wide counts and rates per instance, everything through sign(x) log(1 + |x|)
   and cut to +-10. No feature grows with a pool, and the SLOs only occur as denominators, so
   weights carry over to other pools and other SLOs.
2. `prior` turns the predictions in the observation into logits: least predicted TTFT, least
   predicted TBT, reject where one of these two is beyond its threshold. Its `Gate`
   says how; it has no weights.
3. `SetScorer` adds what is learned: instances are encoded one by one with the request and the
   cluster, pooled (mean and max), scored again with the pool; the score of (p, d, source) is the
   sum of one of (p, source) and one of d. The heads start at zero, so that an untrained
   policy is the prior: Algorithm 1 of [A] with early rejection, softly.

What is learned may be meant in two ways. Added to the prior's logits, it is a policy as PPO and
cloning train it. *Anchored*, it is how many more requests would become good (`trainers.rollout`),
and the prior's choice stands unless another is better by more than a margin.

Shapes: B observations, P prefill and D decode instances, H hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from sb3_contrib.common.maskable.distributions import MaskableDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from torch import Tensor, nn

from envs.state import CLUSTER_FEATURES, DECODE_FEATURES, REQUEST_FEATURES
from policies.compiled_scorer import BUSY, TYPICAL

Tables = Mapping[str, Tensor]

TTFT_WEIGHT = 100.0  # logits per TTFT SLO
TBT_WEIGHT = 200.0  # logits per TBT SLO
REJECT_WEIGHT = 100.0  # logits per SLO by which the predictions exceed it
MOST_REJECT = 10.0  # the prior's certainty about rejecting, either way
NO_ROOM = 12.0  # logits off for a decode instance without KV room for the request
UNEXPLORED = 0.02  # temperature of what is not learned: the best, all but always
MASKED = -1e8
LARGEST = 1e9  # of any feature: that of envs.kernel.replay
LARGEST_SCALED = 10.0

# Each scaled feature is a column over a number or over another column, squashed. A decode instance's `capacity` is
# free + kv + pending tokens + (batch + pending requests) * expected output.
Ratio = tuple[str, float | str]
OF_CONTEXT: tuple[Ratio, ...] = (
    ("input_tokens", 1000.0),
    ("best_tokens", "input_tokens"),
    ("since_last_arrival_s", "ttft_slo_s"),
    ("arrival_rate", 1.0),
    ("in_flight", 1.0),
    ("expected_output_tokens", 100.0),
    ("expected_decode_s", "ttft_slo_s"),
    ("prefill_load", 1.0),
    ("decode_load_forecast", 1.0),
)
PER_INSTANCE = {"since_last_arrival_s": "times prefill", "arrival_rate": "per prefill", "in_flight": "per decode"}
OF_PREFILL: tuple[Ratio, ...] = (
    ("queue_s", "ttft_slo_s"),
    ("queue_requests", 1.0),
    ("local_tokens", "input_tokens"),
    ("device_tokens", "input_tokens"),
    ("fetch_tokens", "input_tokens"),
    ("fetch_s", "ttft_slo_s"),
    ("ttft_local_s", "ttft_slo_s"),
    ("ttft_fetch_s", "ttft_slo_s"),
    ("ttft_recompute_s", "ttft_slo_s"),
    ("tx_used_share", 1.0),
    ("rx_used_share", 1.0),
    ("host_used_share", 1.0),
    ("device_used_share", 1.0),
)
OF_DECODE: tuple[Ratio, ...] = (
    ("batch", 10.0),
    ("kv_tokens", "capacity"),
    ("free_tokens", "capacity"),
    ("pending_requests", 10.0),
    ("pending_tokens", "capacity"),
    ("waiting_requests", 1.0),
    ("input_tokens", "capacity"),
    ("tbt_now_s", "tbt_slo_s"),
    ("tbt_assigned_s", "tbt_slo_s"),
    ("tbt_at_join_s", "tbt_slo_s"),
    ("rx_used_share", 1.0),
)
CONTEXT, PREFILL, DECODE = len(OF_CONTEXT), len(OF_PREFILL), len(OF_DECODE)
LEAST = {"input_tokens": 1.0, "ttft_slo_s": 1e-6, "tbt_slo_s": 1e-6, "expected_output_tokens": 0.0, "capacity": 1.0}

# The same as tensors. Choosing columns is multiplying by zeros and ones: a small decision takes as long as it has
# operations, and products are the cheapest of them.
_KNOWN = (*(REQUEST_FEATURES.names or ()), *(CLUSTER_FEATURES.names or ()))  # request and cluster side by side
_DECODE = DECODE_FEATURES.names or ()
_LEAST = torch.tensor([LEAST.get(name, -LARGEST) for name in _KNOWN])
# Numerators and divisors of the context; divisors of prefill and decode; numerators of decode; what of a decode row
# counts into its capacity; the room a request needs there.
_PIECES = (CONTEXT, CONTEXT, PREFILL, DECODE, DECODE, len(_DECODE), 1)


def _row(*terms: float | str) -> list[float]:
    """Weights of the known columns, and a constant, whose sum is wanted."""
    constant = sum(term for term in terms if isinstance(term, float))
    return [*(float(name in terms) for name in _KNOWN), constant]


def _held(name: str) -> list[float]:
    """By what a column of a decode instance counts into its capacity."""
    if name in ("batch", "pending_requests"):
        return _row("expected_output_tokens")
    return _row(float(name in ("free_tokens", "kv_tokens", "pending_tokens")))


def _chosen(columns: Sequence[str], among: Sequence[str]) -> Tensor:
    """[among, columns]: a table times this has the columns; one that is not there is 0."""
    return torch.tensor([[float(name == column) for column in columns] for name in among])


_ROWS = [
    *(_row(numerator) for numerator, _ in OF_CONTEXT),
    *(_row(divisor) for _, divisor in (*OF_CONTEXT, *OF_PREFILL, *OF_DECODE)),
    *(_row(numerator) for numerator, _ in OF_DECODE),
    *(_held(name) for name in _DECODE),
    _row("input_tokens", "expected_output_tokens"),
]
_WEIGHTS, _CONSTANTS = torch.tensor(_ROWS)[:, :-1].contiguous(), torch.tensor(_ROWS)[:, -1].contiguous()
_DECODE_COLUMNS = _chosen([name for name, _ in OF_DECODE], _DECODE)
_FREE = _chosen(["free_tokens"], _DECODE)
_CONTEXTS = _chosen(["kv_tokens", "batch"], _DECODE) + _chosen(["pending_tokens", "pending_requests"], _DECODE)
_TYPICAL = torch.tensor([TYPICAL, 1.0])
_TTFT = _chosen(["ttft_local_s", "ttft_fetch_s", "ttft_recompute_s"], [name for name, _ in OF_PREFILL])
_TBT = _chosen(["tbt_assigned_s"], [name for name, _ in OF_DECODE])
_OVER_CAPACITY = torch.tensor([float(divisor == "capacity") for _, divisor in OF_DECODE])
_TIMES_PREFILLS, _PER_PREFILL, _PER_DECODE = (
    torch.tensor([float(PER_INSTANCE.get(name) == counted) for name, _ in OF_CONTEXT])
    for counted in ("times prefill", "per prefill", "per decode")
)
_TOTAL = 1.0 - _TIMES_PREFILLS - _PER_PREFILL - _PER_DECODE


class Gate(NamedTuple):
    """What the prior goes by. As it is here: Algorithm 1 with the SLOs themselves as thresholds."""

    ttft: float = 1.0  # threshold of the predicted TTFT, in SLOs, where all prefill instances are busy; all idle: 1
    tbt: float = 1.0  # threshold of the predicted TBT, in SLOs, at most 1, for a prompt as long as contexts are
    price: float = 0.0  # by how much that is lower for each e-fold by which a prompt is longer
    affinity: float = 0.0  # cost, in SLOs of TBT, of an e-fold between a prompt and a decode's mean context, squared


class Scaled(NamedTuple):
    """Scaled features of B observations, and what the prior needs."""

    context: Tensor  # [B, CONTEXT], the request and the cluster
    prefill: Tensor  # [B, P, PREFILL]
    decode: Tensor  # [B, D, DECODE]
    ttft: Tensor  # [B, P, 3], predicted, in SLOs, per source
    tbt: Tensor  # [B, D, 1], predicted, in SLOs
    no_room: Tensor  # [B, D, 1], 1 where the KV of the request has no room, else 0
    length: Tensor  # [B, D, 1], e-folds by which the prompt is longer than the mean context on a decode instance
    idle: Tensor  # [B, P, 1], 1 where nothing waits, 0 where BUSY SLOs of TTFT do


class Scores(NamedTuple):
    """Logits, as the sums they are."""

    reject: Tensor  # [B, 1, 1]
    prefill: Tensor  # [B, P, 3], per source
    decode: Tensor  # [B, D, 1]


def clean(tables: Tables) -> dict[str, Tensor]:
    """Cut to +-LARGEST as in the environment; NaN counts as 0."""
    return {name: table.masked_fill(table.isnan(), 0.0).clamp(-LARGEST, LARGEST) for name, table in tables.items()}


def _squash(x: Tensor) -> Tensor:
    return (x.sign() * x.abs().log1p()).clamp(-LARGEST_SCALED, LARGEST_SCALED)


def _squash_positive(x: Tensor) -> Tensor:
    """The same, for what is never negative, in half the operations."""
    return x.clamp(0.0, math.expm1(LARGEST_SCALED)).log1p()


def _multiple(slos: Tensor) -> Tensor:
    """Times in SLOs: linear up to 2, logarithmic beyond, which keeps their order."""
    return slos.clamp(0.0, 2.0) + torch.log(slos.clamp(min=2.0) / 2.0)


def scale(tables: Tables) -> Scaled:
    """Tables in physical units -> features of a few units (see the module's docstring).

    Args:
        tables: as `clean` leaves them.
    """
    prefill, decode = tables["prefill"], tables["decode"]
    prefills, decodes = prefill.shape[1], decode.shape[1]

    def on_device(constant: Tensor) -> Tensor:
        return constant.to(prefill.device)

    known = torch.maximum(torch.cat([tables["request"], tables["cluster"]], 1), on_device(_LEAST))
    selected = functional.linear(known, on_device(_WEIGHTS), on_device(_CONSTANTS))[:, None]
    numerators, divisors, of_prefill, of_decode, inputs, held, need = selected.split(_PIECES, 2)

    times = on_device(_TOTAL) + on_device(_TIMES_PREFILLS) * prefills
    times = times + on_device(_PER_PREFILL) / prefills + on_device(_PER_DECODE) / decodes
    context = numerators / divisors * times
    # free = capacity - kv - pending - (batch + pending requests) * expected output
    capacity = (decode @ held.transpose(1, 2)).clamp(min=LEAST["capacity"])
    no_room = decode @ on_device(_FREE) < need
    # one more context, of a typical length, so that an empty instance suits every prompt but the extreme
    contexts = decode @ on_device(_CONTEXTS) + on_device(_TYPICAL)
    mean = contexts[..., :1].clamp(min=1.0) / contexts[..., 1:].clamp(min=1.0)
    length = torch.log(known[:, :1, None] / mean)
    prefill = prefill / of_prefill
    decode = decode @ on_device(_DECODE_COLUMNS) + inputs
    decode = decode / (of_decode + capacity * on_device(_OVER_CAPACITY))
    return Scaled(
        _squash_positive(context)[:, 0],
        _squash_positive(prefill),
        _squash(decode),
        _multiple(prefill @ on_device(_TTFT)),
        _multiple(decode @ on_device(_TBT)),
        no_room.to(decode.dtype),
        length,
        1.0 - (prefill[:, :, :1] / BUSY).clamp(0.0, 1.0),
    )


def prior(x: Scaled, sources: Tensor, decode_up: Tensor, gate: Tensor) -> Scores:
    """Logits of a soft Algorithm 1 with early rejection.

    The best allowed pair has logit 0; rejecting has REJECT_WEIGHT times what the predicted TTFT or
    TBT of that pair, in SLOs, is above its threshold.

    Args:
        sources: [B, P, 3], 1 where a source is valid, else 0. decode_up: [B, D, 1].
        gate: [4], a `Gate`.
    """
    ttft, tbt, price, affinity = gate.unbind()
    of_prefill = TTFT_WEIGHT * x.ttft
    of_decode = TBT_WEIGHT * (x.tbt + affinity * x.length**2) + NO_ROOM * x.no_room
    least_prefill = (of_prefill + _off(sources)).amin((1, 2), keepdim=True)
    least_decode, instance = (of_decode + _off(decode_up)).min(1, keepdim=True)
    up = sources.amax(2, keepdim=True)
    idle = (x.idle * up).sum(1, keepdim=True) / up.sum(1, keepdim=True).clamp(min=1.0)
    of_ttft = ttft ** (1.0 - idle)
    longer = (x.length * decode_up).sum(1, keepdim=True) / decode_up.sum(1, keepdim=True).clamp(min=1.0)
    of_tbt = (tbt - price * longer).clamp(max=1.0)
    worse = torch.maximum(least_prefill / TTFT_WEIGHT - of_ttft, x.tbt.gather(1, instance) - of_tbt)
    reject = (worse * REJECT_WEIGHT).clamp(-MOST_REJECT, MOST_REJECT)
    return Scores(reject, least_prefill - of_prefill, least_decode - of_decode)


def _off(valid: Tensor) -> Tensor:
    """1 and 0 -> 0 and -MASKED, to be added to what is minimised."""
    return valid * MASKED - MASKED


def split_masks(masks: Tensor | None, prefills: int, decodes: int, batch: int) -> Tensor:
    """Action masks bool[B, 1 + P D 3] (None: all valid) -> bool[B, P, D, 3]."""
    if masks is None:
        return torch.ones(batch, prefills, decodes, 3, dtype=torch.bool)
    return masks[:, 1:].reshape(batch, prefills, decodes, 3)


def _mean_and_max(instances: Tensor, up: Tensor) -> list[Tensor]:
    """Over the instances that are up; 0 where none is.

    `instances` [B, N, F] >= 0, `up` [B, N, 1], 1 or 0 -> two [B, F].
    """
    weighted = instances * up
    return [weighted.sum(1) / up.sum(1).clamp(min=1.0), weighted.amax(1)]


def added(a: Scores, b: Scores) -> Scores:
    """Their sum."""
    return Scores(*(x + y for x, y in zip(a, b)))


def all_logits(scores: Scores, allowed: Tensor) -> Tensor:
    """Logits [B, 1 + P D 3] in the environment's order of actions; MASKED where not `allowed`, bool[B, P, D, 3]."""
    pairs = scores.prefill[:, :, None] + scores.decode[:, None]
    return torch.cat([scores.reject[:, 0], torch.where(allowed, pairs, MASKED).flatten(1)], 1)


class Factors(NamedTuple):
    """Log-probabilities of a decision in three independent parts."""

    gate: Tensor  # [B, 2], of rejecting and of accepting
    prefill: Tensor  # [B, P 3], of an accepted request's prefill instance and source
    decode: Tensor  # [B, D]

    def of(self, actions: Tensor) -> Tensor:
        """Log-probabilities [B] of actions int64[B]."""
        accepted = actions > 0
        pair = (actions - 1).clamp(min=0)
        decodes = self.decode.shape[1]
        prefill = pair // (3 * decodes) * 3 + pair % 3
        decode = pair // 3 % decodes
        chosen = self.prefill.gather(1, prefill[:, None])[:, 0] + self.decode.gather(1, decode[:, None])[:, 0]
        return self.gate.gather(1, accepted.long()[:, None])[:, 0] + torch.where(accepted, chosen, 0.0)

    def sample(self) -> Tensor:
        """Actions int64[B]."""
        gate, prefill, decode = (torch.multinomial(part.exp(), 1)[:, 0] for part in self)
        pair = (prefill // 3 * self.decode.shape[1] + decode) * 3 + prefill % 3
        return torch.where(gate > 0, 1 + pair, 0)

    def divergence(self, other: Factors) -> Tensor:
        """KL divergence [B] of this from `other`."""
        gate, prefill, decode = ((p.exp() * (p - q)).sum(1) for p, q in zip(self, other))
        return gate + self.gate[:, 1].exp() * (prefill + decode)

    def entropy(self) -> Tensor:
        """Entropy [B]."""
        gate, prefill, decode = (-(p.exp() * p).sum(1) for p in self)
        return gate + self.gate[:, 1].exp() * (prefill + decode)


def factors(scores: Scores, sources: Tensor, decode_up: Tensor, of_gate: float = 1.0, of_pairs: float = 1.0) -> Factors:
    """A policy whose most likely decision is the one with the largest of `all_logits`.

    Rejecting has its lead over the best pair as logit, and the pair is drawn apart from that. In a softmax over all
    actions rejecting would stand against the sum of some hundred pairs: a policy that accepts more than its best does.

    Args:
        sources, decode_up: see `SetScorer.scores`; a pair is valid where both are.
        of_gate, of_pairs: temperatures.
    """
    prefill = (scores.prefill + (sources - 1.0) * -MASKED).flatten(1)
    decode = (scores.decode + (decode_up - 1.0) * -MASKED).flatten(1)
    lead = (scores.reject[:, :, 0] - prefill.amax(1, keepdim=True) - decode.amax(1, keepdim=True)) / of_gate
    gate = torch.cat([functional.logsigmoid(lead), functional.logsigmoid(-lead)], 1)
    return Factors(gate, torch.log_softmax(prefill / of_pairs, 1), torch.log_softmax(decode / of_pairs, 1))


class SetScorer(nn.Module):
    """Logits for rejecting and for every (prefill, decode, source).

    Args:
        hidden: hidden units. anchored: see the module's docstring.
    """

    gate: Tensor
    margin: Tensor

    def __init__(self, hidden: int = 48, anchored: bool = False) -> None:
        super().__init__()
        self.anchored = anchored
        self.register_buffer("gate", torch.tensor(Gate()))  # of the prior
        self.register_buffer("margin", torch.zeros(()))  # in good requests, of an anchored scorer
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

    def scores(self, x: Scaled, sources: Tensor, decode_up: Tensor) -> tuple[Scores, Scores]:
        """What is learned, and the prior.

        Args:
            sources: [B, P, 3], 1 where a source is valid, else 0. decode_up: [B, D, 1].
        """
        base = prior(x, sources, decode_up, self.gate)
        of_prefill = functional.linear(x.context, self.prefill_context.weight, self.prefill.bias)
        of_decode = functional.linear(x.context, self.decode_context.weight, self.decode.bias)
        p = torch.relu_(functional.linear(x.prefill, self.prefill.weight) + of_prefill[:, None])
        d = torch.relu_(functional.linear(x.decode, self.decode.weight) + of_decode[:, None])
        pools = [*_mean_and_max(p, sources.amax(2, keepdim=True)), *_mean_and_max(d, decode_up)]
        pool = torch.relu_(self.pool(torch.cat([*pools, x.context], 1)))
        p = torch.relu_(self.prefill_score(p) + self.prefill_pool(pool)[:, None])
        d = torch.relu_(self.decode_score(d) + self.decode_pool(pool)[:, None])
        bias = self.prefill_head.bias + self.decode_head.bias
        of_prefill = functional.linear(p, self.prefill_head.weight, bias)
        of_decode = functional.linear(d, self.decode_head.weight)
        return Scores(self.reject_head(pool)[:, None], of_prefill, of_decode), base

    def forward(self, tables: Tables, masks: Tensor | None = None, scaled: Scaled | None = None) -> Tensor:
        """Logits [B, 1 + P D 3] in the environment's order of actions; masked ones are MASKED.

        Args:
            tables: `request` [B, 5], `prefill` [B, P, 13], `decode` [B, D, 10], `cluster` [B, 7].
            masks: bool[B, 1 + P D 3]; None: everything is valid.
            scaled: `scale(clean(tables))`, where that is known already.
        """
        batch, prefills, _ = tables["prefill"].shape
        x = scale(clean(tables)) if scaled is None else scaled
        allowed = split_masks(masks, prefills, tables["decode"].shape[1], batch).to(x.prefill.device)
        valid = allowed.to(x.prefill.dtype)
        learned, base = self.scores(x, valid.amax(2), valid.amax((1, 3))[:, :, None])
        if not self.anchored:
            return all_logits(added(learned, base), allowed)
        choice = all_logits(base, allowed)
        choice = (choice >= choice.amax(1, keepdim=True)).to(choice.dtype)
        return all_logits(learned, allowed) + self.margin * choice


class Decider(nn.Module):
    """The scorer as it is exported (`policies.artifact`): clean tables and action masks -> logits and actions."""

    def __init__(self, scorer: SetScorer) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(
        self, request: Tensor, prefill: Tensor, decode: Tensor, cluster: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, 1 + P D 3] and the valid actions [B] with the largest."""
        tables = {"request": request, "prefill": prefill, "decode": decode, "cluster": cluster}
        logits = self.scorer(tables, mask, scale(tables))
        return logits, logits.argmax(1)


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
        hidden: hidden units.
        temperature: of rejecting where decisions are sampled (`factors`): above 1 explores more around the prior.
        learn: `routing`, `admission` or `both`; the heads of the other stay as they are, and nothing is explored there.
        The rest as for `MaskableActorCriticPolicy`.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        lr_schedule: Any,
        hidden: int = 48,
        temperature: float = 1.0,
        learn: str = "both",
        **others: Any,
    ) -> None:
        self.hidden = hidden
        self.temperature = temperature
        self.learn = learn
        others.setdefault("features_extractor_class", CombinedExtractor)  # has no weights and is not used
        super().__init__(observation_space, action_space, lr_schedule, **others)

    def _build(self, lr_schedule: Any) -> None:
        self.scorer = SetScorer(self.hidden)
        self.critic = SetCritic(self.hidden)
        self.scorer.prefill_head.requires_grad_(self.learn != "admission")
        self.scorer.decode_head.requires_grad_(self.learn != "admission")
        self.scorer.reject_head.requires_grad_(self.learn != "routing")
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        ours = {"hidden": self.hidden, "temperature": self.temperature, "learn": self.learn}
        return super()._get_constructor_parameters() | ours

    def _logits(self, obs: Any, action_masks: Any, scaled: Scaled | None = None) -> Tensor:
        masks = None
        if action_masks is not None:
            batch = len(obs["request"])
            masks = torch.as_tensor(action_masks, device=self.device).bool().reshape(batch, -1)
        logits: Tensor = self.scorer(obs, masks, scaled)
        return logits

    def factors(self, x: Scaled, sources: Tensor, decode_up: Tensor) -> tuple[Factors, Factors]:
        """What actions are sampled from, and the same of the prior; arguments as for `SetScorer.scores`."""
        learned, base = self.scorer.scores(x, sources, decode_up)
        of_gate = UNEXPLORED if self.learn == "routing" else self.temperature
        of_pairs = UNEXPLORED if self.learn == "admission" else 1.0
        return (
            factors(added(learned, base), sources, decode_up, of_gate, of_pairs),
            factors(base, sources, decode_up, of_gate, of_pairs),
        )

    def forward(
        self, obs: Any, deterministic: bool = False, action_masks: NDArray[np.bool_] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Actions [B], values [B, 1] and log-probabilities [B]."""
        scaled = scale(clean(obs))
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
        scaled = scale(clean(obs))
        log_probs = torch.log_softmax(self._logits(obs, action_masks, scaled), 1)
        entropy = -(log_probs.exp() * log_probs).sum(1)  # masked ones: 0 * -1e8
        chosen = log_probs.gather(1, actions.long().reshape(-1, 1))[:, 0]
        return self.critic(scaled), chosen, entropy

    def get_distribution(self, obs: Any, action_masks: NDArray[np.bool_] | None = None) -> MaskableDistribution:
        distribution = self.action_dist.proba_distribution(action_logits=self._logits(obs, action_masks))
        if action_masks is not None:
            distribution.apply_masking(action_masks)
        return distribution

    def predict_values(self, obs: Any) -> Tensor:
        values: Tensor = self.critic(scale(clean(obs)))
        return values
