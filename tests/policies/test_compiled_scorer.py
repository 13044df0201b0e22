"""The compiled set scorer decides as the torch module does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from envs.simulator import Simulator, empty_observation
from envs.spec import load_cluster
from envs.state import Observation
from policies import compiled_scorer, networks
from policies.networks import SetScorer
from policies.registry import compiled_policy
from policies.run_folder import TABLES, action_masks, float32_tables
from tests.torch_policy import NetworkPolicy


def scorer_like_trained(hidden: int, anchored: bool, seed: int, scale: float = 0.3) -> SetScorer:
    torch.manual_seed(seed)
    scorer = SetScorer(hidden, anchored)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    scorer.gate.copy_(torch.tensor([0.5, 0.85, 0.1, 0.03]))
    scorer.margin.fill_(0.4)
    return scorer.eval()


def random_observations(
    rng: np.random.Generator, count: int, p: int, d: int, palette: np.ndarray | None = None
) -> Observation:
    observation = empty_observation(count, p, d)
    for name, features in TABLES.items():
        table = getattr(observation, name)
        values = table.view(np.float64).reshape(*table.shape, len(features.names or ()))
        values[:] = rng.exponential(5.0, values.shape) if palette is None else rng.choice(palette, values.shape)
    if palette is None:
        observation.request["input_tokens"] *= 1000
        observation.request["ttft_slo_s"], observation.request["tbt_slo_s"] = 30.0, 5.0
        observation.decode["free_tokens"] *= 2000
    observation.prefill_mask[:] = rng.random(observation.prefill_mask.shape) < 0.7
    observation.decode_mask[:] = rng.random(observation.decode_mask.shape) < 0.8
    return observation


def scores_of(scorer: SetScorer, observation: Observation) -> np.ndarray:
    tables = {name: torch.from_numpy(table) for name, table in float32_tables(observation).items()}
    with torch.inference_mode():
        scores: np.ndarray = scorer(tables, torch.from_numpy(action_masks(observation))).numpy()
    return scores


def valid_choices(scorer: SetScorer, observation: Observation) -> np.ndarray:
    policy = compiled_policy(scorer, "compiled", True)
    policy.reset(len(observation.request), 0)
    chosen = policy.decide(observation)
    assert action_masks(observation)[np.arange(len(chosen)), chosen].all()
    return chosen


def assert_same(scorer: SetScorer, observation: Observation) -> None:
    """Its choice is valid, and no worse to the torch module than that one's own, but for rounding."""
    chosen = valid_choices(scorer, observation)
    scores = scores_of(scorer, observation)
    rows = np.arange(len(chosen))
    lost = scores.max(1) - scores[rows, chosen]
    assert (lost <= 1e-3 + 1e-5 * abs(scores.max(1))).all(), lost.max()


def test_sizes_are_those_of_the_network() -> None:
    assert (networks.CONTEXT, networks.PREFILL, networks.DECODE) == (
        compiled_scorer.CONTEXT,
        compiled_scorer.PREFILL,
        compiled_scorer.DECODE,
    )
    columns = [len(features.names or ()) for features in TABLES.values()]
    assert columns == [
        compiled_scorer.REQUEST,
        compiled_scorer.PREFILL,
        compiled_scorer.DECODE_COLUMNS,
        compiled_scorer.CLUSTER,
    ]
    for name in ("TTFT_WEIGHT", "TBT_WEIGHT", "REJECT_WEIGHT", "MOST_REJECT", "NO_ROOM", "LARGEST", "LARGEST_SCALED"):
        assert getattr(networks, name) == getattr(compiled_scorer, name)


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize(("p", "d", "hidden"), [(1, 1, 8), (3, 2, 5), (8, 8, 32), (20, 7, 16)])
def test_random_observations(p: int, d: int, hidden: int, anchored: bool) -> None:
    rng = np.random.default_rng(p)
    for seed in range(4):
        scorer = scorer_like_trained(hidden, anchored, seed)
        assert_same(scorer, random_observations(rng, 64, p, d))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.booleans(), st.integers(1, 5), st.integers(1, 5))
def test_extremes_give_valid_choices(seed: int, anchored: bool, p: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    some = [0.0, 1.0, -1.0, 1e-9, -1e9, 1e9, 1e12, 30.0, np.nan, np.inf, -np.inf]
    palette = rng.choice(some, rng.integers(1, 6))
    valid_choices(scorer_like_trained(8, anchored, seed % 7), random_observations(rng, 8, p, d, palette))


@pytest.mark.parametrize("anchored", [False, True])
def test_whole_replays_go_the_same_way(anchored: bool) -> None:
    trace = traces.load("builtin:conversation").rows(0, 800)
    simulator = Simulator.with_room(load_cluster("3p5d"), trace, clusters=2)
    scorer = scorer_like_trained(16, anchored, 1, scale=0.1)
    stepped, compiled = NetworkPolicy(scorer, "torch", True), compiled_policy(scorer, "compiled", True)
    compiled.reset(1, 0)
    for c in range(2):
        simulator.load(c, trace, speed=1.6)
    compiled.replay(simulator, 1)
    done = np.zeros(2, np.bool_)
    simulator.observe(0)
    observation = Observation(*(table[:1] for table in simulator.observation_tables))
    actions = np.zeros(2, np.int64)
    while not done[0]:
        actions[:1] = stepped.decide(observation)
        simulator.step(actions, done, 0, 1)
    ours, theirs = simulator.outcomes(1), simulator.outcomes(0)
    assert 0 < ours["good"].sum() < 800
    same = (ours["prefill"] == theirs["prefill"]) & (ours["decode"] == theirs["decode"])
    assert same.mean() > 0.99, same.mean()  # a tie that rounding decides otherwise sends all that follow elsewhere
