"""The policy that is shipped, and the one that knows the future."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from envs.simulator import Simulator, empty_observation
from envs.spec import load_cluster
from envs.state import Observation
from policies import Policy, make_policy
from policies.artifact import read_metadata
from policies.clairvoyant import Clairvoyant
from policies.registry import CLAIRVOYANT, LEARNED, CompiledPolicy
from policies.run_folder import TABLES, action_masks
from train import parse


@pytest.fixture(scope="module")
def learned() -> Policy:
    return make_policy("learned")


def test_it_says_how_it_was_made() -> None:
    about = read_metadata(LEARNED)
    training = about["training"]
    assert training["command"].startswith("python train.py --algo rollout --trace mooncake:conversation,mooncake:syn")
    options = parse(shlex.split(training["command"])[2:])
    assert (options.algo, options.capacity, options.seed) == ("rollout", "0.8,2.5", 0)
    assert training["seed"] == 0
    assert list(training["trained_on"]["traces"]) == [
        "mooncake:conversation",
        "mooncake:synthetic",
        "l-eval",
        "arxiv-summarization",
        "simulated-32k",
    ]
    assert (training["trained_on"]["prefill"], training["trained_on"]["decode"]) == (8, 8)
    assert training["validation"]["goodput"] > 0.7
    assert LEARNED.stat().st_size < 300_000


VALUES = [0.0, 1.0, -1.0, 1e-9, -1e9, 1e9, 1e12, 30.0, float("nan"), float("inf"), -float("inf")]
PALETTES = st.lists(st.sampled_from(VALUES), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**31), PALETTES)
def test_never_a_masked_action_and_never_nan(p: int, d: int, seed: int, palette: list[float]) -> None:
    """Instances down, a pool all down, empty clusters, extreme values."""
    rng = np.random.default_rng(seed)
    observation = empty_observation(4, p, d)
    for name, features in TABLES.items():
        table = getattr(observation, name)
        values = table.view(np.float64).reshape(*table.shape, len(features.names or ()))
        values[:] = rng.choice(np.array(palette), values.shape)
        values[0] = 0.0
    observation.prefill_mask[:] = rng.random(observation.prefill_mask.shape) < 0.7
    observation.decode_mask[:] = rng.random(observation.decode_mask.shape) < 0.7
    observation.prefill_mask[1] = 0
    observation.decode_mask[2] = 0
    policy = make_policy("learned")
    policy.reset(4, 0)
    actions = policy.decide(observation)  # it raises where the logit of its choice is not finite
    assert action_masks(observation)[np.arange(4), actions].all()
    assert actions[1] == actions[2] == 0


@pytest.mark.parametrize("cluster", ["4p4d", "5p11d", "16p16d"])
def test_instances_that_are_down_get_nothing(learned: Policy, cluster: str) -> None:
    spec = load_cluster(cluster)
    trace = traces.load("builtin:conversation").rows(0, 400)
    simulator = Simulator.with_room(spec, trace)
    simulator.load(0, trace, speed=2.0)
    simulator.batch.state.prefill["up"][0, 1:3] = 0
    simulator.batch.state.decode["up"][0, 0] = 0
    learned.reset(1, 0)
    done = np.zeros(1, np.bool_)
    simulator.observe(0)
    while not done[0]:
        simulator.step(learned.decide(simulator.observation_tables), done)
    outcomes = simulator.outcomes(0)
    assert outcomes["good"].sum() > 100
    assert not np.isin(outcomes["prefill"], (1, 2)).any()
    assert not (outcomes["decode"] == 0).any()


def goodput(policy: CompiledPolicy, speed: float) -> float:
    trace = traces.load("builtin:conversation").rows(2000, 2250)
    simulator = Simulator.with_room(load_cluster("2p2d"), trace, clusters=2)
    policy.reset(1, 0)
    simulator.load(0, trace, speed=speed, recheck=policy.recheck)
    policy.replay(simulator, 0)
    return float(simulator.outcomes(0)["good"].mean())


def test_who_knows_the_future_does_better() -> None:
    base, clairvoyant = make_policy(CLAIRVOYANT[0]), make_policy("clairvoyant")
    assert isinstance(base, CompiledPolicy)
    assert isinstance(clairvoyant, Clairvoyant)
    assert goodput(clairvoyant, 0.9) > goodput(base, 0.9) + 0.03
    assert goodput(clairvoyant, 0.9) == goodput(clairvoyant, 0.9)


def test_clairvoyant_needs_a_second_cluster() -> None:
    trace = traces.load("builtin:conversation").rows(0, 20)
    clairvoyant = make_policy("clairvoyant")
    assert isinstance(clairvoyant, Clairvoyant)
    clairvoyant.reset(1, 0)
    with pytest.raises(ValueError, match="second cluster"):
        clairvoyant.replay(Simulator.for_trace(load_cluster("2p2d"), trace), 0)


def test_observation_is_that_of_this_version(learned: Policy) -> None:
    assert isinstance(empty_observation(1, 2, 2), Observation)
    assert read_metadata(LEARNED)["network"]["anchored"] is True
