"""Policy improvement by counterfactual rollouts: what would have become of the other decisions?

1. Clusters replay windows of the traces. At some requests every candidate decision (reject, other prefill instances and
   sources, other decode instances) is tried in a copy of the cluster: the same requests arrive, the base policy decides
   about the next `horizon`, and what is counted is how many become good (`Simulator.branch`). All else being equal,
   the differences are what the decision is worth: in good requests, the leaderboard's own unit.
2. A set scorer is fitted to these differences.
3. It decides as the base does, unless another decision is worth more by a margin. The margin is chosen on the
   validation part, and so is the best of the rounds: each visits the states its predecessor leads to.

The base is `conductor` with the `priced` admission: the prior of `policies.networks` is the same heuristic, so that
the policy is one network and is exported as any other.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from envs.simulator import Simulator
from envs.spec import ClusterSpec
from envs.state import Observation, Source
from policies.networks import SetScorer
from policies.policy import Policy, PolicyError
from policies.registry import CompiledPolicy, make_policy
from policies.run_folder import NetworkPolicy, action_masks, checkpoint_file, float32_tables, save_weights, write_atomically
from policies.trainers.validation import goodput
from traces import Trace

CLUSTERS = 16  # replayed side by side
CHECKED = 20  # of as many samples one is held out of the fit
OTHERS = 4  # candidates of each pool beside the base's choice: half the most promising, half drawn
CANDIDATES = 2 + 2 * OTHERS + 2
MOST_GAIN = 4.0  # good requests: what is beyond in a difference is luck of what follows
MARGINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)
BATCH = 512
SOURCES = len(Source)


class Options(Protocol):
    """The options of `train.py` that this trainer reads."""

    @property
    def part(self) -> str: ...
    @property
    def episode_requests(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def base(self) -> str: ...
    @property
    def states(self) -> int: ...
    @property
    def horizon(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def epochs(self) -> int: ...
    @property
    def eval_requests(self) -> int: ...


class Branches(NamedTuple):
    """N visited states of P x D clusters, and what became of K candidates in each."""

    request: NDArray[np.float32]  # [N, 5]
    prefill: NDArray[np.float32]  # [N, P, 13]
    decode: NDArray[np.float32]  # [N, D, 10]
    cluster: NDArray[np.float32]  # [N, 7]
    masks: NDArray[np.bool_]  # [N, 1 + P D 3]
    actions: NDArray[np.int64]  # [N, K], the base's own first; -1 where there are fewer
    good: NDArray[np.float32]  # [N, K], requests that became good


def candidates(observation: Observation, c: int, base: int, routed: int, rng: np.random.Generator) -> list[int]:
    """Decisions worth trying for cluster c: the base's own, rejecting, and one change of what its router chose.

    Args:
        base: the base's action. routed: that of its router alone, 0 where nothing can be chosen.
    """
    if routed == 0:
        return [base]
    decodes = observation.decode.shape[1]
    pair, source = divmod(routed - 1, SOURCES)
    prefill, decode = divmod(pair, decodes)
    table, masks = observation.prefill[c], observation.prefill_mask[c]
    ttft_s = np.stack([table["ttft_local_s"], table["ttft_fetch_s"], table["ttft_recompute_s"]], 1)
    ttft_s = np.where(masks != 0, ttft_s, np.inf)
    tbt_s = np.where(observation.decode_mask[c] != 0, observation.decode[c]["tbt_assigned_s"], np.inf)

    def others(costs: NDArray[np.float64], but: int) -> list[int]:
        ranked = [int(i) for i in np.argsort(costs, kind="stable") if i != but and np.isfinite(costs[i])]
        rest = ranked[OTHERS // 2 :]
        return ranked[: OTHERS // 2] + [int(i) for i in rng.permutation(rest)[: OTHERS - OTHERS // 2]]

    def action(prefill: int, decode: int, source: int) -> int:
        return 1 + (prefill * decodes + decode) * SOURCES + source

    found = [base, 0, routed]
    found += [action(prefill, decode, s) for s in range(SOURCES) if s != source and masks[prefill, s]]
    found += [action(p, decode, int(ttft_s[p].argmin())) for p in others(ttft_s.min(1), prefill)]
    found += [action(prefill, d, source) for d in others(tbt_s, decode)]
    return list(dict.fromkeys(found))


class Branching:
    """Replays windows of a trace under a policy, and branches at some of the requests.

    Args:
        load: range of speeds, times the trace's own. base: the policy that decides in the branches.
        workers: threads, each with a scratch cluster of its own.
    """

    def __init__(
        self, spec: ClusterSpec, trace: Trace, load: tuple[float, float], base: str, window: int, horizon: int, workers: int
    ) -> None:
        self.trace, self.load, self.window, self.horizon = trace, load, min(window, trace.n_requests), horizon
        self.simulator = Simulator.with_room(spec, trace, clusters=CLUSTERS + workers, requests=self.window)
        self.bases = [_compiled(base) for _ in range(workers)]
        self.router = _compiled(f"{base.partition('+')[0]}+none")

    def gather(
        self, policy: Policy, share: float, rng: np.random.Generator, threads: ThreadPoolExecutor
    ) -> Iterator[Branches]:
        """The branches of one batch of windows, a piece at a time. `share`: of the requests that are branched at."""
        simulator = self.simulator
        observation = Observation(*(table[:CLUSTERS] for table in simulator.observation_tables))
        self.router.reset(CLUSTERS, 0)
        for base in self.bases:
            base.reset(1, 0)
        own = _compiled(self.bases[0].name)
        own.reset(CLUSTERS, 0)
        policy.reset(CLUSTERS, int(rng.integers(2**31)))
        for c in range(CLUSTERS):
            first = int(rng.integers(self.trace.n_requests - self.window + 1))
            speed = float(rng.uniform(*self.load))
            simulator.load(c, self.trace, first, first + self.window, speed=speed, recheck=own.recheck)
            simulator.observe(c)
        done = np.zeros(CLUSTERS, np.bool_)
        actions = np.zeros(simulator.clusters, np.int64)
        finished = np.zeros(simulator.clusters, np.bool_)
        for _ in range(self.window):
            chosen = np.flatnonzero((rng.random(CLUSTERS) < share) & ~done)
            if len(chosen):
                of_base, routed = own.decide(observation), self.router.decide(observation)
                tried = [candidates(observation, c, int(of_base[c]), int(routed[c]), rng) for c in chosen]
                worth = [c for c, found in zip(chosen, tried, strict=True) if len(found) > 1]
                tried = [found for found in tried if len(found) > 1]
                if worth:
                    yield self._branch(observation, worth, tried, threads)
            actions[:CLUSTERS] = policy.decide(observation)
            simulator.step(actions, finished, 0, CLUSTERS)
            done = finished[:CLUSTERS]

    def _branch(
        self, observation: Observation, clusters: list[Any], tried: list[list[int]], threads: ThreadPoolExecutor
    ) -> Branches:
        workers = len(self.bases)

        def work(worker: int) -> list[NDArray[np.int64]]:
            return [
                self.bases[worker].branch(
                    self.simulator, int(c), CLUSTERS + worker, np.array(found, np.int64), horizon=self.horizon
                )
                for c, found in list(zip(clusters, tried, strict=True))[worker::workers]
            ]

        results = list(threads.map(work, range(workers)))
        good = np.zeros((len(clusters), CANDIDATES), np.float32)
        actions = np.full((len(clusters), CANDIDATES), -1, np.int64)
        for i, found in enumerate(tried):
            actions[i, : len(found)] = found
            good[i, : len(found)] = results[i % workers][i // workers]
        seen = Observation(*(table[clusters] for table in observation))
        tables = float32_tables(seen)
        return Branches(**tables, masks=action_masks(seen), actions=actions, good=good)


def _compiled(name: str) -> CompiledPolicy:
    policy = make_policy(name)
    assert isinstance(policy, CompiledPolicy)
    return policy


def gate_of(base: str) -> tuple[float, float, float]:
    """The thresholds of a base policy, for the prior of a scorer.

    Raises:
        PolicyError: it is no heuristic that the prior can be.
    """
    policy = make_policy(base)
    router, _, admission = base.partition("+")
    if not isinstance(policy, CompiledPolicy) or router.partition(":")[0] != "conductor" or not admission.startswith("priced"):
        raise PolicyError(f"--base {base}: rollouts improve upon conductor[:...]+priced[:...], which the network's prior is")
    if policy.router_values.tolist() != [1.0, 1.0]:
        raise PolicyError(f"--base {base}: expected conductor:threshold=1,min_over_both=1, as the network's prior has it")
    ttft, tbt, price = policy.admission_values.tolist()
    return ttft, tbt, price


def loss_of(scorer: SetScorer, batch: Branches) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared error of the differences between candidates, and the same of a scorer that sees none."""
    tables = {name: torch.from_numpy(getattr(batch, name)) for name in ("request", "prefill", "decode", "cluster")}
    actions = torch.from_numpy(batch.actions)
    there = (actions >= 0).float()
    scores = scorer(tables, torch.from_numpy(batch.masks)).gather(1, actions.clamp(min=0))
    good = torch.from_numpy(batch.good)

    def centred(values: torch.Tensor) -> torch.Tensor:
        mean = (values * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
        return (values - mean) * there

    differences = centred(good).clamp(-MOST_GAIN, MOST_GAIN)
    count = there.sum()
    return ((centred(scores) - differences) ** 2).sum() / count, (differences**2).sum() / count


def fit(
    scorer: SetScorer, branches: Branches, epochs: int, lr: float, rng: np.random.Generator, stopped: Callable[[], bool]
) -> float:
    """Fit a scorer to branches; returns how much of the variance it explains in those held out."""
    margin = float(scorer.margin)
    scorer.margin.fill_(0.0)
    scorer.train()
    numbers = rng.permutation(len(branches.good))
    held_out, fitted = np.split(numbers, [len(numbers) // CHECKED])
    steps = max(1, epochs * -(-len(fitted) // BATCH))
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(fitted), -(-len(fitted) // BATCH)):
            if stopped():
                return 0.0
            loss, _ = loss_of(scorer, Branches(*(column[rows] for column in branches)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    scorer.eval()
    scorer.margin.fill_(margin)
    if not len(held_out):
        return 0.0
    with torch.inference_mode():
        loss, blind = loss_of(scorer, Branches(*(column[held_out] for column in branches)))
    return float(1.0 - loss / blind)
