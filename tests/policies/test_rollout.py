"""Counterfactual rollouts: branches are what a fork would become, and a fit of them is a policy that is better."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import traces
from envs.simulator import Simulator
from envs.spec import load_cluster
from envs.state import Source
from policies import make_policy
from policies.clairvoyant import CANDIDATES, OTHERS, candidates
from policies.networks import SetScorer
from policies.registry import CompiledPolicy
from policies.trainers import rollout
from policies.trainers.rollout import Branches, Branching, fit, loss_of, read_branches
from policies.trainers.workload import Workload
from train import main

ROOT = Path(__file__).parents[2]
BASE = "conductor:threshold=1,min_over_both=1+slo"
SMALL = [
    *("--algo=rollout", "--trace=builtin:conversation", "--cluster=2p2d", "--capacity=0.9,2", "--states=300"),
    *("--horizon=40", "--hidden=8", "--fit-epochs=3", "--episode-requests=150", "--eval-requests=700"),
    *("--generations=2", "--windows=2"),
]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(traces.load("builtin:conversation").rows(0, 4000), "train", (1.0, 2.0))


def test_a_branch_is_what_a_fork_becomes(workload: Workload) -> None:
    """The oracle: fork, decide, replay the next requests, then let everything settle."""
    horizon, window = 60, 200
    spec = load_cluster("2p3d")
    simulator = Simulator.with_room(spec, workload.train, clusters=3, requests=window)
    base = make_policy("power_of_two+slo")  # a router that draws: every branch must begin with the same memory
    assert isinstance(base, CompiledPolicy)
    base.reset(1, 3)
    simulator.load(0, workload.train, 500, 500 + window, speed=0.6)
    base.replay(simulator, 0, limit=100)
    assert simulator.observe(0)
    actions = np.array([0, 1, 5, 1 + 3 * 3 + 2, 1 + 5 * 3], np.int64)
    memory = base.memory.copy()
    before = simulator.batch.state.clock["good"][0, 0]
    found = base.branch(simulator, 0, 2, actions, horizon=horizon)
    np.testing.assert_array_equal(base.memory, memory)
    for action, good in zip(actions, found, strict=True):
        simulator.fork(0, 1)
        base.memory[:] = memory
        pair, source = divmod(int(action) - 1, 3)
        simulator.decide(1, -1 if action == 0 else pair // 3, pair % 3, Source(source if action else 0))
        base.replay(simulator, 1, limit=horizon)
        arrived = simulator.batch.state.clock["arrived"][1, 0]
        # with nothing more to come: the same requests alone
        simulator.batch.engine["requests"][1, 0] = simulator.batch.engine["next_request"][1, 0]
        settled = simulator.batch.state.clock[1, 0]
        assert arrived == 100 + 1 + horizon
        assert not simulator.observe(1)
        assert good == settled["good"] - before
    assert len(set(found.tolist())) > 1
    base.memory[:] = memory
    np.testing.assert_array_equal(found, base.branch(simulator, 0, 2, actions, horizon=horizon))


def test_refusals_of_branch(workload: Workload) -> None:
    simulator = Simulator.with_room(load_cluster("2p2d"), workload.train, clusters=2, requests=5)
    base = make_policy(BASE)
    assert isinstance(base, CompiledPolicy)
    base.reset(1, 0)
    simulator.load(0, workload.train, 0, 5)
    simulator.observe(0)
    with pytest.raises(ValueError, match="scratch is cluster 0 itself"):
        base.branch(simulator, 0, 0, np.zeros(1, np.int64), horizon=1)
    base.replay(simulator, 0)
    with pytest.raises(ValueError, match="no request left"):
        base.branch(simulator, 0, 1, np.zeros(1, np.int64), horizon=1)


def test_candidates_are_valid_distinct_and_hold_what_matters(workload: Workload) -> None:
    simulator = Simulator.with_room(load_cluster("8p8d"), workload.train, clusters=1, requests=600)
    base, router = make_policy(BASE), make_policy(BASE.partition("+")[0] + "+none")
    assert isinstance(base, CompiledPolicy)
    base.reset(1, 0)
    router.reset(1, 0)
    simulator.load(0, workload.train, 0, 600, speed=3.0)
    simulator.batch.state.prefill["up"][0, 3] = 0
    rng, most = np.random.default_rng(0), 0
    for _ in range(25):
        base.replay(simulator, 0, limit=20)
        assert simulator.observe(0)
        observation = simulator.observation_tables
        own, routed = int(base.decide(observation)[0]), int(router.decide(observation)[0])
        found = candidates(observation, 0, own, routed, rng)
        assert found[0] == own
        assert {0, routed} <= set(found)
        assert len(found) == len(set(found)) <= CANDIDATES
        for action in found:
            pair, source = divmod(action - 1, 3)
            assert action == 0 or (observation.prefill_mask[0, pair // 8, source] and pair // 8 != 3)
        most = max(most, len(found))
    assert most >= 2 + 2 * OTHERS


def test_without_rounds_it_is_the_prior_that_was_found(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main([*SMALL, "--rounds=0", "--out", str(out)]) == 0
    prior = (out / "checkpoints" / "prior.txt").read_text().strip()
    metrics = json.loads((out / "metrics.json").read_text())
    assert [entry["prior"] for entry in metrics["validation"]] == [prior]
    assert metrics["best"] == {"steps": 0, "goodput": metrics["validation"][0]["goodput"]}
    window = traces.load("builtin:conversation").rows(0, 300)
    decided = []
    for name in (str(out), prior):
        policy = make_policy(name)
        assert isinstance(policy, CompiledPolicy)
        policy.reset(1, 0)
        simulator = Simulator.with_room(load_cluster("2p2d"), window)
        simulator.load(0, window, speed=1.5, recheck=policy.recheck)
        policy.replay(simulator, 0)
        decided.append(simulator.outcomes(0)[["prefill", "decode", "source"]].copy())
    assert (decided[0] == decided[1]).mean() > 0.99  # the gate is kept in float32
    assert 0 < (decided[0]["prefill"] < 0).mean() < 1


def test_the_base_must_be_the_prior(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--base=conductor+slo", "--out", str(tmp_path / "run")])
    assert "expected prior[:option=value,...]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def planted(count: int, rng: np.random.Generator) -> Branches:
    """States in which rejecting is worth 2 when the prompt is long, and -2 when it is short."""
    request = rng.exponential(5.0, (count, 5)).astype(np.float32)
    request[:, 0] = rng.choice([1000.0, 50_000.0], count)
    actions = np.full((count, CANDIDATES), -1, np.int64)
    actions[:, 0], actions[:, 1] = 1, 0
    good = np.zeros((count, CANDIDATES), np.float32)
    good[:, 1] = np.where(request[:, 0] > 10_000, 2.0, -2.0) + rng.normal(0.0, 1.0, count)
    tables = [rng.exponential(5.0, shape).astype(np.float32) for shape in ((count, 2, 13), (count, 2, 10), (count, 7))]
    return Branches(request, *tables, np.ones((count, 13), np.bool_), actions, good)


def test_a_fit_finds_what_was_planted() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    scorer = SetScorer(16, anchored=True)
    explained = fit(scorer, planted(4000, rng), 6, 3e-3, rng, lambda: False)
    assert explained > 0.6  # of 4 / (4 + 1), less what is clipped
    tables = {name: torch.from_numpy(getattr(planted(200, rng), name)) for name in ("prefill", "decode", "cluster")}
    request = planted(200, rng).request
    rejects = scorer({**tables, "request": torch.from_numpy(request)}).argmax(1) == 0
    assert (rejects.numpy() == (request[:, 0] > 10_000)).mean() > 0.98


def test_loss_sees_differences_only() -> None:
    rng = np.random.default_rng(1)
    branches = planted(50, rng)
    scorer = SetScorer(8, anchored=True)
    loss, blind = loss_of(scorer, branches)
    assert loss.item() == pytest.approx(blind.item())
    shifted, _ = loss_of(scorer, branches._replace(good=branches.good + np.float32(7.0)))
    assert shifted.item() == pytest.approx(loss.item(), rel=1e-5)
    unused = branches.good.copy()
    unused[:, 5] = 99.0
    other, _ = loss_of(scorer, branches._replace(good=unused))
    assert other.item() == loss.item()


def test_gathering_is_reproducible(workload: Workload) -> None:
    from concurrent.futures import ThreadPoolExecutor

    spec, found = load_cluster("2p2d"), []
    for workers in (1, 2):
        branching = Branching(spec, workload, 60, 30, workers)
        with ThreadPoolExecutor(workers) as threads:
            rng = np.random.default_rng(4)
            found.append(branching.gather(SetScorer(8, anchored=True), rng, threads, lambda: False))
    assert found[0] is not None and found[1] is not None and len(found[0].good) > 10
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.take_along_axis(found[0].masks, np.maximum(found[0].actions, 0), 1)).all()


def test_train_stop_resume_and_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert main([*SMALL, "--rounds=2", "--out", str(whole)]) == 0
    metrics = json.loads((whole / "metrics.json").read_text())
    assert [entry["steps"] > 0 for entry in metrics["validation"]] == [False, True, True]
    assert metrics["best"]["goodput"] >= metrics["validation"][0]["goodput"]
    assert metrics["sessions"][0]["branches"] > 1000
    config = yaml.safe_load((whole / "config.yaml").read_text())
    assert config["network"] == {"kind": "set-scorer/2", "hidden": 8, "anchored": True}
    assert len(config["trained_on"]["traces"]) == 1
    assert not list((whole / "checkpoints").glob("branches_*"))
    policy = make_policy(str(whole))
    assert isinstance(policy, CompiledPolicy)

    command = [sys.executable, "train.py", *SMALL, "--rounds=2", "--out", str(halves)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    for _ in range(1200):
        if list(halves.glob("checkpoints/branches_*.npz")) or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert list(halves.glob("checkpoints/branches_*.npz"))
    assert main(["--resume", str(halves)]) == 0
    a, b = (rollout_weights(folder / "final.zip") for folder in (whole, halves))
    assert all(torch.equal(a[name], b[name]) for name in a)


def rollout_weights(file: Path) -> dict[str, torch.Tensor]:
    from policies.run_folder import load_weights

    return dict(load_weights(file, {"hidden": 8, "anchored": True}).state_dict())


def test_a_damaged_batch_is_named(tmp_path: Path) -> None:
    file = tmp_path / "branches_000000.npz"
    assert read_branches(file) is None
    file.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(rollout.PolicyError, match="branches_000000.npz: cannot be read"):
        read_branches(file)
