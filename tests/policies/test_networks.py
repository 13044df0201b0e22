"""The set scorer: indifferent to order and size, never invalid, and Algorithm 1 untrained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from envs.kernel.replay import LARGEST
from envs.simulator import Simulator
from envs.spec import load_cluster
from policies import make_policy
from policies.networks import MASKED, Gate, SetPolicy, SetScorer
from tests.torch_policy import NetworkPolicy

TABLES = {"request": (5,), "prefill": (13,), "decode": (10,), "cluster": (7,)}


def random_tables(rng: np.random.Generator, batch: int, p: int, d: int) -> dict[str, torch.Tensor]:
    shapes = {
        "request": (batch, 5),
        "prefill": (batch, p, 13),
        "decode": (batch, d, 10),
        "cluster": (batch, 7),
    }
    return {name: torch.from_numpy(rng.exponential(5.0, shape).astype(np.float32)) for name, shape in shapes.items()}


def trained_like(hidden: int = 16, seed: int = 0) -> SetScorer:
    """A scorer whose heads are not zero."""
    torch.manual_seed(seed)
    scorer = SetScorer(hidden)
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return scorer


def random_masks(rng: np.random.Generator, batch: int, p: int, d: int) -> torch.Tensor:
    masks = rng.random((batch, 1 + p * d * 3)) < rng.random((batch, 1))
    masks[:, 0] = True
    return torch.from_numpy(masks)


@pytest.mark.parametrize(("p", "d"), [(1, 1), (3, 2), (8, 8), (20, 5)])
def test_permuting_instances_permutes_logits(p: int, d: int) -> None:
    rng = np.random.default_rng(0)
    tables, masks, scorer = random_tables(rng, 4, p, d), random_masks(rng, 4, p, d), trained_like()
    of_p, of_d = torch.from_numpy(rng.permutation(p)), torch.from_numpy(rng.permutation(d))
    permuted = {
        **tables,
        "prefill": tables["prefill"][:, of_p],
        "decode": tables["decode"][:, of_d],
    }

    def permute(values: torch.Tensor) -> torch.Tensor:
        pairs = values[:, 1:].reshape(4, p, d, 3)[:, of_p][:, :, of_d]
        return torch.cat([values[:, :1], pairs.flatten(1)], 1)

    expected = permute(scorer(tables, masks))
    found = scorer(permuted, permute(masks))
    assert found.shape == (4, 1 + p * d * 3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_doubling_both_pools_keeps_the_scores_of_all() -> None:
    rng = np.random.default_rng(1)
    scorer = trained_like()
    tables = random_tables(rng, 3, 4, 3)
    tables["cluster"][:, 1] = 7.0  # in flight
    twice = {name: table.clone() for name, table in tables.items()}
    twice["prefill"], twice["decode"] = (
        tables["prefill"].repeat(1, 2, 1),
        tables["decode"].repeat(1, 2, 1),
    )
    twice["cluster"][:, :2] *= 2.0  # twice the arrivals, twice in flight
    twice["request"][:, 2] /= 2.0
    small, large = scorer(tables), scorer(twice)
    torch.testing.assert_close(large[:, 0], small[:, 0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        large[:, 1:].reshape(3, 8, 6, 3)[:, :4, :3],
        small[:, 1:].reshape(3, 4, 3, 3),
        rtol=1e-4,
        atol=1e-3,
    )


def policy_of(p: int, d: int) -> SetPolicy:
    def box(*shape: int) -> spaces.Box:
        return spaces.Box(-LARGEST, LARGEST, shape, np.float32)

    space = spaces.Dict({"request": box(5), "prefill": box(p, 13), "decode": box(d, 10), "cluster": box(7)})
    return SetPolicy(space, spaces.Discrete(1 + p * d * 3), lambda _: 1e-3, hidden=8)


EXTREMES = st.sampled_from([0.0, 1.0, -1.0, 1e-9, -1e9, 1e9, 30.0, float("nan"), float("inf"), -float("inf")])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_extremes_give_finite_numbers_and_valid_actions(data: st.DataObject) -> None:
    p, d, batch = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), 3
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    palette = np.array(data.draw(st.lists(EXTREMES, min_size=1, max_size=6)), np.float32)
    shapes = {
        "request": (batch, 5),
        "prefill": (batch, p, 13),
        "decode": (batch, d, 10),
        "cluster": (batch, 7),
    }
    obs = {name: torch.from_numpy(rng.choice(palette, shape)) for name, shape in shapes.items()}
    masks = random_masks(rng, batch, p, d)
    if data.draw(st.booleans()):
        masks[0, 1:] = False
    policy = policy_of(p, d)
    policy.scorer = trained_like(8, seed=int(rng.integers(1000)))
    rows = torch.arange(batch)
    for deterministic in (False, True):
        actions, values, log_probs = policy(obs, deterministic, masks.numpy())
        assert masks[rows, actions].all()
        assert torch.isfinite(values).all() and torch.isfinite(log_probs).all()
        assert (log_probs > MASKED / 2).all()
    values, log_probs, entropy = policy.evaluate_actions(obs, actions, masks)
    assert torch.isfinite(entropy).all() and (entropy >= -1e-5).all()
    (values.sum() + log_probs.sum() + entropy.sum()).backward()
    gradients = [w.grad for w in policy.parameters() if w.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)
    chosen = policy.get_distribution(obs, masks.numpy()).get_actions(deterministic=True)
    assert masks[rows, chosen].all()


def test_sampling_and_evaluating_agree() -> None:
    rng = np.random.default_rng(3)
    obs, masks, policy = random_tables(rng, 64, 3, 3), random_masks(rng, 64, 3, 3), policy_of(3, 3)
    actions, values, log_probs = policy(obs, False, masks.numpy())
    again, evaluated, entropy = policy.evaluate_actions(obs, actions, masks.float())
    distribution = policy.get_distribution(obs, masks.numpy())
    torch.testing.assert_close(evaluated, log_probs)
    torch.testing.assert_close(again, values)
    torch.testing.assert_close(distribution.log_prob(actions), log_probs)
    torch.testing.assert_close(distribution.entropy(), entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("cluster", "anchored"), [("8p8d", True), ("3p5d", False)])
@pytest.mark.parametrize(
    ("heuristic", "gate"),
    [
        ("conductor:threshold=1,min_over_both=1", Gate()),
        ("prior:ttft=0.1,tbt=0.95,price=0.1,affinity=0.05", Gate(0.1, 0.95, 0.1, 0.05)),
    ],
)
def test_untrained_policy_is_the_heuristic_of_its_gate(
    cluster: str, anchored: bool, heuristic: str, gate: Gate
) -> None:
    trace = traces.load("builtin:conversation").rows(0, 700)
    simulator = Simulator.for_trace(load_cluster(cluster), trace)
    simulator.load(0, trace, speed=2.0)
    conductor = make_policy(heuristic)
    conductor.reset(1, 0)
    scorer = SetScorer(anchored=anchored).eval()
    scorer.gate.copy_(torch.tensor(gate))
    scorer.margin.fill_(0.1)
    untrained = NetworkPolicy(scorer, "untrained", True)
    same = rejections = agreed = decided = 0
    done = np.zeros(1, np.bool_)
    more = simulator.observe(0)
    while more and not done[0]:
        a, b = (
            conductor.decide(simulator.observation_tables),
            untrained.decide(simulator.observation_tables),
        )
        same += int(a[0] == b[0])
        agreed += int((a[0] == 0) == (b[0] == 0))
        rejections += int(a[0] == 0)
        decided += 1
        simulator.step(a, done)
    assert decided == 700
    assert rejections > 10
    assert agreed / decided > 0.97
    assert same / decided > 0.9, same / decided


def test_anchored_leaves_the_choice_of_the_prior_only_beyond_the_margin() -> None:
    rng = np.random.default_rng(5)
    tables, masks = random_tables(rng, 64, 4, 3), random_masks(rng, 64, 4, 3)
    torch.manual_seed(0)
    scorer = SetScorer(16, anchored=True).eval()
    scorer.margin.fill_(1.0)
    base = scorer(tables, masks).argmax(1)
    for head in (scorer.prefill_head, scorer.decode_head, scorer.reject_head):
        torch.nn.init.normal_(head.weight, std=0.3)
    scorer.margin.fill_(0.0)
    gains = scorer(tables, masks)
    best, of_base = gains.max(1), gains.gather(1, base[:, None])[:, 0]
    margin = float((best.values - of_base).detach().median())
    scorer.margin.fill_(margin)
    expected = torch.where(best.values - of_base > margin, best.indices, base)
    chosen = scorer(tables, masks).argmax(1)
    assert 0 < int((chosen != base).sum()) < 64
    assert (chosen == expected).float().mean() > 0.97  # where several tie for the prior's choice, all are anchored
