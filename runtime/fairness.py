"""Who goes first when the cluster is full: priorities, and token shares between tenants.

Policies admit by comparing predictions with SLOs. Here the SLOs that admission sees are scaled by a *headroom*: below 1
for requests of negative priority and for tenants who have had more than their share of tokens, above 1 for positive
priority. While predictions are far below the SLOs nobody notices; near saturation those with less headroom are turned
away first. Shares are counted as in virtual token counters (OSDI'24): tokens served over the tenant's weight, fading.
"""

from __future__ import annotations

from collections.abc import Mapping

PRIORITY_STEP = 0.15  # headroom per step of priority
MOST_HEADROOM, LEAST_HEADROOM = 1.5, 0.5
OUTPUT_WEIGHT = 2.0  # an output token costs about two input tokens
FADE_EVERY_S = 1.0
FORGET_BELOW = 1.0  # tokens


class TenantShares:
    """Fading counts of tokens per tenant.

    Args:
        weights: of tenants by name; others have 1. half_life_s: of the counts.
        strength: headroom lost by a tenant that has had twice its share. most: tenants remembered.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        half_life_s: float = 60.0,
        strength: float = 0.3,
        most: int = 10_000,
    ) -> None:
        self.weights = dict(weights or {})
        self.half_life_s = half_life_s
        self.strength = strength
        self.most = most
        self.tokens: dict[str, float] = {}
        self._faded_s = 0.0
        self._total = 0.0
        self._weight = 0.0  # of all in `tokens`

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Other weights from now on."""
        self.weights = dict(weights)
        self._weight = sum(self.weights.get(name, 1.0) for name in self.tokens)

    def charge(self, tenant: str, input_tokens: float, output_tokens: float, now_s: float) -> None:
        """A request of `tenant` was served (or, at admission, will be)."""
        self._fade(now_s)
        cost = input_tokens + OUTPUT_WEIGHT * output_tokens
        if tenant not in self.tokens:
            if len(self.tokens) >= self.most:
                least = min(self.tokens, key=self.tokens.__getitem__)
                self._total -= self.tokens.pop(least)
                self._weight -= self.weights.get(least, 1.0)
            self._weight += self.weights.get(tenant, 1.0)
        self.tokens[tenant] = self.tokens.get(tenant, 0.0) + cost
        self._total += cost

    def excess(self, tenant: str, now_s: float) -> float:
        """How much more than its share a tenant has had: 0 up to its share, 1 for twice as much."""
        self._fade(now_s)
        had = self.tokens.get(tenant, 0.0)
        if had <= 0.0 or len(self.tokens) < 2:
            return 0.0
        share = self.weights.get(tenant, 1.0) / self._weight
        return max(0.0, had / (self._total * share) - 1.0)

    def headroom(self, tenant: str, priority: int, now_s: float) -> tuple[float, float]:
        """Factors on the SLOs that admission compares with: by priority, by the tenant's share."""
        if not (tenant or priority):
            return 1.0, 1.0
        by_priority = min(MOST_HEADROOM, max(LEAST_HEADROOM, 1.0 + PRIORITY_STEP * priority))
        by_share = 1.0
        if tenant:
            by_share = max(LEAST_HEADROOM, 1.0 - self.strength * min(1.0, self.excess(tenant, now_s)))
        return by_priority, by_share

    def _fade(self, now_s: float) -> None:
        passed_s = now_s - self._faded_s
        if passed_s < FADE_EVERY_S:
            return
        self._faded_s = now_s
        factor = 0.5 ** (passed_s / self.half_life_s)
        self.tokens = {name: count * factor for name, count in self.tokens.items() if count * factor > FORGET_BELOW}
        self._total = sum(self.tokens.values())
        self._weight = sum(self.weights.get(name, 1.0) for name in self.tokens)
