"""Run folders: the same tables as in training, any pool size, and refusals that say why."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import traces
from envs.kernel import replay
from envs.simulator import Simulator
from envs.spec import load_cluster
from policies import PolicyError, make_policy
from policies.run_folder import (
    action_masks,
    float32_tables,
    last_checkpoint,
    load_run,
    observation_schema,
)
from policies.trainers.workload import Workload
from train import Options, parse_range, write_config

SMALL = Options(
    cluster="2p2d", steps=256, envs=4, episode_requests=100, n_steps=32, minibatch=64, hidden=8, group=2,
    eval_requests=200, checkpoint_every=128, device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of few steps, trained for real."""
    from policies.trainers import ppo

    folder = tmp_path_factory.mktemp("run")
    for part in ("checkpoints", "tensorboard"):
        (folder / part).mkdir()
    spec, trace = load_cluster(SMALL.cluster), traces.load(SMALL.trace).rows(0, 3000)
    workloads = [Workload(trace, SMALL.part, parse_range("load", SMALL.load))]
    write_config(SMALL, folder, spec, workloads)
    assert ppo.train(SMALL, folder, spec, workloads, False)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def simulator_of(cluster: str, requests: int, clusters: int = 1) -> Simulator:
    simulator = Simulator.for_trace(
        load_cluster(cluster), traces.load(SMALL.trace).rows(0, requests), clusters=clusters
    )
    for c in range(clusters):
        simulator.begin(c)
        simulator.observe(c)
    return simulator


def test_layout(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.json",
        "tensorboard",
        "checkpoints",
        "best.zip",
        "final.zip",
    }
    assert any((run / "tensorboard").iterdir())
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "steps_000000000000.zip",
        "steps_000000000128.zip",
    ]


def test_tables_and_masks_are_those_of_training() -> None:
    simulator = simulator_of("3p2d", 300, clusters=2)
    count, actions = 2, 1 + 3 * 2 * 3
    shapes = {"request": (5,), "prefill": (3, 13), "decode": (2, 10), "cluster": (7,)}
    tables = {name: np.zeros((count, *shape), np.float32) for name, shape in shapes.items()}
    masks, done = np.zeros((count, actions), np.bool_), np.zeros(count, np.bool_)
    settled = np.zeros((count, 5))
    rng = np.random.default_rng(0)
    for step in range(200):
        if step == 100:  # an instance of each pool is down, and a feature beyond what float32 tables hold
            simulator.batch.state.prefill["up"][:, 1] = 0
            simulator.batch.state.decode["up"][:, 0] = 0
        if step == 150:
            simulator.batch.state.decode["up"][:] = 0
        for c in range(count):
            replay.show(simulator.worlds, simulator.observations, settled, masks, *tables.values(), c)
        found = float32_tables(simulator.observation_tables)
        for name, table in tables.items():
            assert found[name].dtype == np.float32
            np.testing.assert_array_equal(found[name].reshape(table.shape), table)
        np.testing.assert_array_equal(action_masks(simulator.observation_tables), masks)
        choices = np.array([rng.choice(np.flatnonzero(row)) for row in masks])
        simulator.step(choices, done)
    assert found["cluster"].max() == replay.LARGEST


@pytest.mark.parametrize("cluster", ["2p2d", "5p3d"])
def test_evaluates_through_the_simulator_at_any_pool_size(run: Path, cluster: str) -> None:
    policy = make_policy(str(run))
    assert policy.name == str(run)
    assert policy.recheck
    results = []
    for clusters in (1, 3):
        simulator = simulator_of(cluster, 200, clusters)
        policy.reset(clusters, 0)
        done = np.zeros(clusters, np.bool_)
        while not done.all():
            actions = policy.decide(simulator.observation_tables)
            assert actions.dtype == np.int64
            assert action_masks(simulator.observation_tables)[np.arange(clusters), actions].all()
            simulator.step(actions, done)
        outcomes = simulator.outcomes(0)
        assert set(outcomes["status"]) <= {1, 2, 3}
        results.append(outcomes["good"].mean())
    assert results[0] == results[1] > 0.5


def test_falls_back_to_the_last_checkpoint_and_says_so(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "best.zip").unlink()
    load_run(copy)
    assert "taking the last checkpoint final.zip" in capsys.readouterr().err
    (copy / "final.zip").unlink()
    last = last_checkpoint(copy)
    assert last is not None
    assert last.name == "steps_000000000128.zip"
    load_run(copy)
    assert "taking the last checkpoint steps_000000000128.zip" in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(PolicyError, match=r"neither best\.zip nor a checkpoint"):
        load_run(copy)


def change(folder: Path, **changes: object) -> None:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))


def test_other_schema_is_refused_with_the_difference(copy: Path) -> None:
    schema = observation_schema()
    change(copy, observation=schema | {"decode": ["gpu_temperature", *schema["decode"][1:]]})
    with pytest.raises(
        PolicyError,
        match=r"config\.yaml.*'decode': it reads gpu_temperature, which is gone; batch is new",
    ):
        load_run(copy)
    change(copy, observation=schema | {"prefill": schema["prefill"][::-1]})
    with pytest.raises(PolicyError, match="'prefill': the order of the columns differs"):
        load_run(copy)
    change(copy, observation=schema | {"sha256": "0"})
    with pytest.raises(PolicyError, match="sha256 is '0'"):
        load_run(copy)
    change(copy, observation={"request": []})
    with pytest.raises(PolicyError, match="must name request, prefill"):
        load_run(copy)


def test_damage_is_one_clear_error(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"has no config\.yaml"):
        make_policy(str(tmp_path))
    whole = (copy / "best.zip").read_bytes()
    inside = whole.index(b"policy.pth") + 2000
    flipped = whole[:inside] + bytes([whole[inside] ^ 255]) + whole[inside + 1 :]
    for damaged in (b"", b"not a zip", whole[: len(whole) // 2], flipped):
        (copy / "best.zip").write_bytes(damaged)
        with pytest.raises(PolicyError, match=r"best\.zip: expected weights"):
            load_run(copy)
    (copy / "best.zip").write_bytes(whole)
    change(copy, network={"kind": "set-scorer/2", "hidden": 16, "anchored": False})
    with pytest.raises(PolicyError, match="16 hidden units"):
        load_run(copy)
    for text, match in (
        ("{", "cannot be read"),
        ("[]", "expected a run folder of format 1"),
        ("format: 2", "found 2"),
        ("format: 1", r"network\.kind"),
    ):
        (copy / "config.yaml").write_text(text)
        with pytest.raises(PolicyError, match=match):
            load_run(copy)
