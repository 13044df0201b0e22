"""Credit by hand, the stream's memory, and what the learner's distribution is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import traces
from envs.cluster_env import Episodes
from envs.spec import load_cluster
from policies.networks import Factors, Scores, all_logits, factors
from policies.policy import PolicyError
from policies.run_folder import load_weights
from policies.trainers.credit import advantages, beyond_group, own_credit, step_discounts
from policies.trainers.stream import RequestStream
from train import main

f4 = np.float32


def test_discounts_by_time_are_gamma_where_gaps_are_constant() -> None:
    elapsed_s = np.full((5, 2), 0.3, f4)
    by_time = step_discounts(elapsed_s, 0.5, 60.0)
    np.testing.assert_allclose(by_time, step_discounts(elapsed_s, float(np.exp(-0.3 / 60.0)), 0.0), rtol=1e-6)
    longer = step_discounts(np.array([[0.6]], f4), 0.5, 60.0)
    np.testing.assert_allclose(longer, by_time[:1, :1] ** 2, rtol=1e-6)


def test_advantages_by_hand() -> None:
    rewards = np.array([[1.0], [2.0], [4.0]], f4)
    values, after = np.array([[10.0], [20.0], [30.0]], f4), np.array([[20.0], [7.0], [50.0]], f4)
    cut = np.array([[False], [True], [False]])
    discounts = np.array([[0.5], [0.8], [0.1]], f4)
    found = advantages(rewards, values, after, cut, discounts, 0.9)
    last, cut_one = 4.0 + 0.1 * 50.0 - 30.0, 2.0 + 0.8 * 7.0 - 20.0  # nothing flows over the cut
    first = 1.0 + 0.5 * 20.0 - 10.0 + 0.5 * 0.9 * cut_one
    np.testing.assert_allclose(found[:, 0], [first, cut_one, last], rtol=1e-5)


def test_group_baseline_is_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(0)
    found = rng.normal(size=(7, 6)).astype(f4)
    beyond = beyond_group(found, 3)
    assert beyond[2, 4] == pytest.approx(found[2, 4] - (found[2, 3] + found[2, 5]) / 2, rel=1e-4)
    np.testing.assert_allclose(beyond.reshape(7, 2, 3).sum(2), 0.0, atol=1e-5)
    assert beyond_group(found, 1) is found


def test_own_credit_makes_a_request_count_in_full_at_its_decision() -> None:
    rng = np.random.default_rng(1)
    steps = 40
    good = (rng.random((steps, 3)) < 0.7).astype(f4)
    settled_at = np.arange(steps)[:, None] + rng.integers(0, 9, (steps, 3))
    settled_at = np.minimum(settled_at, steps - 1)
    discounts = rng.uniform(0.9, 1.0, (steps, 3)).astype(f4)
    accepted = np.ones((steps, 3), bool)
    credit = own_credit(good, accepted, settled_at, discounts)
    for t, c in np.ndindex(steps, 3):
        left = discounts[t : settled_at[t, c], c].prod()
        assert credit[t, c] + left * good[t, c] == pytest.approx(good[t, c], abs=1e-5)
    # without a discount nothing is left to make up for: the rewards are the plain ones, and so is their total
    assert not own_credit(good, accepted, settled_at, np.ones_like(discounts)).any()


def test_open_requests_count_as_the_usual_accepted_one() -> None:
    good = np.array([[np.nan], [1.0], [0.0], [0.0]], f4)
    accepted = np.array([[True], [True], [True], [False]])
    credit = own_credit(good, accepted, np.arange(4)[:, None], np.ones((4, 1), f4))
    assert credit[0, 0] == 0.5
    assert not credit[1:].any()


def stream_of(requests: int = 60, **others: object) -> RequestStream:
    trace = traces.load("builtin:conversation")
    made = RequestStream(4, load_cluster("2p2d"), trace, "train", Episodes(requests, (1.0, 3.0)), **others)  # type: ignore[arg-type]
    made.seed(3)
    return made


def test_stream_groups_see_the_same_requests_and_outcomes_are_those_counted() -> None:
    stream = stream_of(group=2, remember=200)
    tables = stream.reset()
    good = 0.0
    for _ in range(200):
        np.testing.assert_array_equal(tables["request"][0, 0], tables["request"][1, 0])
        np.testing.assert_array_equal(tables["request"][2, 0], tables["request"][3, 0])
        sources, decode_up = stream.valid()
        np.testing.assert_array_equal(
            stream.action_masks()[:, 1:].reshape(4, 2, 2, 3), (sources[:, :, None] * decode_up[:, None]) != 0
        )
        stream.step_async(np.array([0, 1, 1, 4]))
        tables, rewards, cut, _ = stream.step_wait()
        good += float(rewards.sum())
        np.testing.assert_array_equal(cut[[0, 2]], cut[[1, 3]])
    found, settled_at = stream.outcomes(200)
    counted = stream.take_counts()
    assert good == counted["good"] == np.nansum(found) > 10
    assert not found[:, 0].any()  # all rejected
    assert counted["rejected_at_arrival"] == 200
    known = ~np.isnan(found)
    assert (settled_at >= np.arange(200)[:, None])[known].all() and (settled_at < 200)[known].all()
    assert np.median((settled_at - np.arange(200)[:, None])[found == 1.0]) > 1


def test_rewards_come_in_the_step_in_which_a_request_settles() -> None:
    stream = stream_of(requests=300, remember=250)
    stream.reset()
    rewards = np.zeros((250, 4))
    for t in range(250):
        stream.step_async(np.full(4, 1 + 3 * (t % 4)))
        rewards[t] = stream.step_wait()[1]
    found, settled_at = stream.outcomes(250)
    longest = 3  # the only cluster whose first window is not cut before
    expected = np.zeros(250)
    for at in settled_at[found[:, longest] == 1.0, longest]:
        expected[at] += 1
    np.testing.assert_array_equal(rewards[:, longest], expected)
    assert expected.sum() > 5


def test_group_must_divide() -> None:
    with pytest.raises(PolicyError, match="--group 3"):
        stream_of(group=3)


def test_several_traces_in_one_batch() -> None:
    both = [traces.load("builtin:conversation"), traces.load("builtin:toolagent")]
    stream = RequestStream(16, load_cluster("2p2d"), both, "train", Episodes(20, 1.0))
    stream.seed(0)
    lengths = set()
    tables = stream.reset()
    for _ in range(40):
        lengths |= set(tables["request"][:, 0].astype(int).tolist())
        stream.step_async(np.zeros(16, np.int64))
        tables = stream.step_wait()[0]
    of = [set(trace.split().train.input_tokens.tolist()) for trace in both]
    assert lengths <= of[0] | of[1]
    assert lengths & (of[0] - of[1]) and lengths & (of[1] - of[0])


def test_factors_are_a_distribution_whose_mode_is_the_largest_logit() -> None:
    torch.manual_seed(0)
    scores = Scores(torch.randn(50, 1, 1) * 3, torch.randn(50, 3, 3), torch.randn(50, 2, 1))
    sources, decode_up = (torch.rand(50, 3, 3) < 0.7).float(), torch.ones(50, 2, 1)
    sources[:, 0, 0] = 1.0
    decode_up[:25, 1] = 0.0
    allowed = (sources[:, :, None] * decode_up[:, None]) != 0
    found = factors(scores, sources, decode_up, of_gate=2.0)
    every = torch.stack([found.of(torch.full((50,), a)) for a in range(19)], 1)
    torch.testing.assert_close(every.exp().sum(1), torch.ones(50))
    logits = all_logits(scores, allowed)
    rejects = logits.argmax(1) == 0
    assert (rejects == (found.gate[:, 0] > found.gate[:, 1])).all() and rejects.any() and not rejects.all()
    assert (every[:, 1:].argmax(1) == logits[:, 1:].argmax(1)).all()
    torch.testing.assert_close(found.entropy(), -(every.exp() * every.clamp(min=-1e4)).sum(1))
    other = Factors(*(torch.log_softmax(part + torch.rand_like(part), 1) for part in found))
    others = torch.stack([other.of(torch.full((50,), a)) for a in range(19)], 1)
    torch.testing.assert_close(
        found.divergence(other),
        (every.exp() * (every.clamp(min=-1e4) - others.clamp(min=-1e4))).sum(1),
        rtol=1e-3,
        atol=1e-3,
    )
    drawn = found.sample()
    assert (found.of(drawn) > -20).all()


_FLAGS = (
    "--algo=ppo --trace=builtin:conversation --cluster=2p2d --envs=4 --episode-requests=100 --group=2",
    "--n-steps=32 --minibatch=64 --hidden=8 --eval-requests=200 --device=cpu --steps=384",
)
SMALL = " ".join(_FLAGS).split(" ")


def heads(folder: Path) -> dict[str, bool]:
    """Which heads have moved from zero."""
    weights = load_weights(folder / "final.zip", {"hidden": 8, "anchored": False}).state_dict()
    return {name: bool(weights[f"{name}_head.weight"].any()) for name in ("prefill", "decode", "reject")}


def test_learn_freezes_the_heads_of_the_rest(tmp_path: Path) -> None:
    for learn, moved in (("routing", (True, True, False)), ("admission", (False, False, True))):
        assert main([*SMALL, "--learn", learn, "--out", str(tmp_path / learn)]) == 0
        assert tuple(heads(tmp_path / learn).values()) == moved


def test_init_and_every_option_of_the_credit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*SMALL, "--horizon-s", "0", "--no-own-credit", "--group", "1", "--out", str(first)]) == 0
    start = [*SMALL, "--init", str(first), "--anchor-kl", "0.1", "--widen", "0.5", "--prefill-up", "1,2"]
    assert main([*start, "--hardware", "0.8,1.2", "--lr", "1e-12", "--out", str(second)]) == 0
    a = load_weights(first / "best.zip", {"hidden": 8, "anchored": False}).state_dict()
    b = load_weights(second / "final.zip", {"hidden": 8, "anchored": False}).state_dict()
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)
    assert len(json.loads((second / "metrics.json").read_text())["validation"]) >= 2
    with pytest.raises(SystemExit):
        main([*SMALL, "--prefill-up", "2,x", "--out", str(tmp_path / "third")])
    assert "--prefill-up" in capsys.readouterr().err
