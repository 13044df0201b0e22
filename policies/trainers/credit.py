"""Credit: what a decision brought, from what a batch of clusters saw happen.

All arrays are [T, C]: T consecutive decisions of C clusters. A decision's plain return is the discounted sum of the
rewards from its step to where the stream of requests is cut, and the critic's value there. Three things are of the
problem and not of the textbook:

- Steps are not equally long, so the discount of a step may follow the simulated time it took.
- A request is good or not a few hundred decisions after its own. `own_credit` makes up for what these discount.
- Which requests come matters more than any decision. Clusters of a group get the same requests at the same times, and
  what the others of the group got is a baseline that knows them (Mao et al., arXiv 1807.02264).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.float32]  # [T, C]


def step_discounts(elapsed_s: Steps, gamma: float, horizon_s: float) -> Steps:
    """The discount of every step: exp(-elapsed / horizon), or `gamma` of every step where `horizon_s` is 0."""
    if horizon_s == 0.0:
        return np.full_like(elapsed_s, gamma)
    discounts: Steps = np.exp(-elapsed_s / np.float32(horizon_s))
    return discounts


def advantages(
    rewards: Steps, values: Steps, after: Steps, cut: NDArray[np.bool_], discounts: Steps, lam: float
) -> Steps:
    """Generalised advantage estimation with a discount for every step.

    Args:
        after: value of the observation that follows each step, also where the stream was `cut` after it.
    """
    found = rewards + discounts * after - values
    onward = np.where(cut, np.float32(0.0), discounts * np.float32(lam))
    for t in range(len(found) - 2, -1, -1):
        found[t] += onward[t] * found[t + 1]
    return found


def own_credit(good: Steps, accepted: NDArray[np.bool_], settled_at: NDArray[np.int64], discounts: Steps) -> Steps:
    """What is to be added to the rewards so that, seen from its own decision, every request counts in full.

    Its outcome comes in with the step in which it settles; paid at its own step is what the discount takes until then.
    For a decision, then, later requests count from when they are decided, earlier ones from when they settle.

    Args:
        good: 1 or 0 as the request of a decision became good or not; NaN where it is open at the end of these steps, or
            was when the stream was cut. Such a one counts as the average of the `accepted` that settled.
        settled_at: the step in which it settled.
    """
    until = np.concatenate([np.zeros((1, good.shape[1])), np.cumsum(np.log(discounts.astype(np.float64)), 0)])
    at = np.clip(settled_at, np.arange(len(good))[:, None], len(good))
    left = np.exp(np.take_along_axis(until, at, 0) - until[:-1])
    is_open = np.isnan(good)
    settled = good[accepted & ~is_open]
    usual = settled.mean() if len(settled) else 0.0
    return np.where(is_open, usual, good * (1.0 - left)).astype(np.float32)


def beyond_group(found: Steps, group: int) -> Steps:
    """Less the average of the others of the group, whose clusters lie side by side; as it is where `group` is 1."""
    if group == 1:
        return found
    grouped = found.reshape(len(found), -1, group)
    others = (grouped.sum(2, keepdims=True) - grouped) / (group - 1)
    beyond: Steps = (grouped - others).reshape(found.shape)
    return beyond
