"""What a decision would bring, tried out: the candidates worth trying, and a scheduler that knows the future.

`Clairvoyant` is no scheduler anybody could run. It tells how much better than a policy the same cluster could do: it
takes, for every request, the decision after which most requests become good, the arrivals and output lengths to come
being known and the policy deciding from there on. What it reaches can be reached; `envs.bound` says what cannot.
"""

from __future__ import annotations

import math
from copy import copy

import numpy as np
from numpy.typing import NDArray

from envs.simulator import Simulator
from envs.state import Observation, Source

from .registry import CompiledPolicy

OTHERS = 4  # candidates of each pool beside the policy's choice: half the most promising, half drawn
SOURCES = len(Source)
CANDIDATES = 2 + 2 * OTHERS + SOURCES - 1  # at most
HORIZON = 300  # requests that it looks ahead


def candidates(observation: Observation, c: int, own: int, routed: int, rng: np.random.Generator) -> list[int]:
    """Decisions worth trying for cluster c: the policy's own, rejecting, and one change of where it would go.

    Args:
        own: the policy's action. routed: the same if it must not reject, 0 where nothing can be chosen.
    """
    if routed == 0:
        return [own]
    decodes = int(observation.decode.shape[1])
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

    found = [own, 0, routed]
    found += [action(prefill, decode, s) for s in range(SOURCES) if s != source and masks[prefill, s]]
    found += [action(p, decode, int(ttft_s[p].argmin())) for p in others(ttft_s.min(1), prefill)]
    found += [action(prefill, d, source) for d in others(tbt_s, decode)]
    return list(dict.fromkeys(found))


class Clairvoyant(CompiledPolicy):
    """The best of the candidates at every request, by what really becomes of each when `policy` goes on from there.

    It decides in `replay` only, where the future is; `decide` is the policy's own. Takes some ten milliseconds for each
    request.
    """

    def __init__(self, name: str, policy: CompiledPolicy, router: CompiledPolicy) -> None:
        super().__init__(
            name,
            (policy.router, policy.router_values),
            (policy.admission, policy.admission_values),
            policy.recheck,
        )
        self._router = router

    def replay(
        self, simulator: Simulator, cluster: int = 0, *, limit: int = 1 << 62, until_s: float = math.inf
    ) -> None:
        """As `CompiledPolicy.replay`. The batch's last cluster is used to try decisions out.

        Raises:
            ValueError: with `until_s`, or a simulator of one cluster.
        """
        scratch = simulator.clusters - 1
        if until_s < math.inf or scratch == cluster:
            raise ValueError("a clairvoyant replay needs a second cluster, to try out decisions, and has no until_s")
        rng = np.random.default_rng(0)
        router = copy(self._router)  # a copy of this policy has the same one
        router.reset(len(self.memory), 0)
        tables = simulator.observation_tables
        actions, done = np.zeros(simulator.clusters, np.int64), np.zeros(simulator.clusters, np.bool_)
        observation = Observation(*(table[cluster : cluster + 1] for table in tables))
        more = simulator.observe(cluster)
        while more and limit > 0:
            own, routed = int(self.decide(observation)[0]), int(router.decide(observation)[0])
            tried = np.array(candidates(observation, 0, own, routed, rng), np.int64)
            good = self.branch(simulator, cluster, scratch, tried, horizon=HORIZON)
            actions[cluster] = tried[good.argmax()]  # of equal ones the first, the policy's own
            simulator.step(actions, done, cluster, cluster + 1)
            more = not done[cluster]
            limit -= 1
