"""`train.py --algo rllib`: RLlib's PPO, on this machine and on a Ray cluster of another process."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml

import traces
from envs.cluster_env import Episodes
from envs.sb3 import ClusterVecEnv
from envs.spec import load_cluster
from policies import make_policy
from policies.networks import MASKED, SetScorer
from policies.run_folder import load_training, load_weights
from tests.runtime.backends import free_port
from tests.training import error_of
from train import main

pytest.importorskip("ray", reason="pip install 'conductor-gym[rllib]'")

from policies.trainers import rllib
from policies.trainers.learner import BASELINE, REWARD_SCALE

ROOT = Path(__file__).parents[2]
_FLAGS = (
    "--algo=rllib --trace=builtin:conversation --cluster=2p2d --envs=4 --episode-requests=100",
    "--n-steps=32 --minibatch=64 --hidden=8 --eval-requests=200 --device=cpu",
)
SMALL = " ".join(_FLAGS).split(" ")


# --- environment and network -------------------------------------------------------------------


def streams_of(clusters: int, requests: int) -> rllib.RequestStreams:
    trace = traces.load("builtin:conversation").rows(0, 3000)
    episodes = Episodes(requests=requests, load=2.0)
    return rllib.RequestStreams(clusters, load_cluster("2p2d"), trace, "train", episodes)


def module_of(streams: rllib.RequestStreams, hidden: int = 8) -> rllib.SetModule:
    """A module whose heads are not zero."""
    torch.manual_seed(0)
    module = rllib.SetModule(
        observation_space=streams.single_observation_space,
        action_space=streams.single_action_space,
        model_config={"hidden": hidden},
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def batch_of(observation: dict[str, np.ndarray]) -> dict[str, dict[str, torch.Tensor]]:
    return {"obs": {name: torch.from_numpy(table) for name, table in observation.items()}}


def test_module_is_the_set_scorer_and_never_chooses_what_is_masked() -> None:
    streams = streams_of(3, 50)
    module = module_of(streams)
    scorer = SetScorer(8)
    scorer.load_state_dict(module.scorer.state_dict())
    observation, _ = streams.reset(seed=0)
    masked = 0
    for _ in range(120):
        assert streams.observation_space.contains(observation)
        batch = batch_of(observation)
        tables = {name: table for name, table in batch["obs"].items() if name != "action_mask"}
        invalid = batch["obs"]["action_mask"] == 0
        with torch.no_grad():
            logits = scorer(tables, ~invalid)
            trained = module.forward_train(batch)
        explored = module.forward_exploration(batch)["action_dist_inputs"]
        for found in (
            explored,
            module.forward_inference(batch)["action_dist_inputs"],
            trained["action_dist_inputs"],
        ):
            torch.testing.assert_close(found, logits, rtol=0, atol=0)
        assert (logits[invalid] == MASKED).all()
        values = module.compute_values(batch)
        assert values.shape == (3,)
        assert torch.equal(values, module.compute_values(batch, trained["embeddings"]))
        # Sampled as RLlib samples, and often.
        distribution = module.get_exploration_action_dist_cls().from_logits(explored)
        drawn = distribution.sample(sample_shape=(50,))
        assert not invalid[torch.arange(3), drawn].any()
        masked += int(invalid.sum())
        observation, *_ = streams.step(drawn[0].numpy())
    assert masked > 1000


def test_streams_are_windows_cut_off_at_their_last_decision() -> None:
    """The clusters of Stable-Baselines3's environment, with masks; first windows are shorter, reward 0 at the cut."""
    clusters, requests = 3, 40
    ours = streams_of(clusters, requests)
    trace = traces.load("builtin:conversation").rows(0, 3000)
    theirs = ClusterVecEnv(clusters, load_cluster("2p2d"), trace, "train", Episodes(requests=requests, load=2.0))
    observation, _ = ours.reset(seed=5)
    states = np.random.SeedSequence(5).generate_state(clusters).tolist()
    theirs._rngs = [np.random.default_rng(state) for state in states]
    expected: Any = theirs.reset()
    cuts = [requests * (c + 1) // clusters for c in range(clusters)]
    rng = np.random.default_rng(0)
    for step in range(1, cuts[0] + 1):
        for name, table in expected.items():
            np.testing.assert_array_equal(observation[name], table)
        np.testing.assert_array_equal(observation["action_mask"], theirs.action_masks())
        actions = np.array([rng.choice(np.flatnonzero(row)) for row in theirs.action_masks()])
        last = observation
        observation, rewards, terminated, truncated, _ = ours.step(actions)
        theirs.step_async(actions)
        expected, goods, done, _ = theirs.step_wait()
        wanted = (goods - BASELINE) * REWARD_SCALE
        np.testing.assert_allclose(rewards[~truncated], wanted[~truncated], rtol=1e-6)
        assert not terminated.any()
        assert not done.any()
        assert truncated.tolist() == [step == cuts[0], False, False]
    assert rewards[0] == 0.0
    for name, table in last.items():
        np.testing.assert_array_equal(observation[name][0], table[0])
    assert ours.take_counts()["good"] > 0

    # From here on every cluster ends after a whole window, and its next step is a new window's first observation.
    ends: list[list[int]] = [[cuts[0]], [], []]
    for step in range(cuts[0] + 1, 4 * requests):
        before = truncated
        masks = observation["action_mask"]
        actions = np.array([rng.choice(np.flatnonzero(row)) for row in masks])
        observation, rewards, terminated, truncated, _ = ours.step(actions)
        assert (rewards[truncated] == 0.0).all() and not terminated.any()
        assert not (before & truncated).any()
        for c in np.flatnonzero(truncated):
            ends[c].append(step)
    for c, (first, *later) in enumerate(ends):
        assert first == cuts[c] and len(later) >= 2
        assert (np.diff([first, *later]) == requests + 1).all()


def test_runners_draw_other_windows() -> None:
    first, second = streams_of(2, 40), streams_of(2, 40)
    a, b = first.reset(seed=0)[0], second.reset(seed=1)[0]
    assert not np.array_equal(a["request"][1], b["request"][0])
    assert np.array_equal(a["request"], first.reset(seed=0)[0]["request"])


# --- training ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations; while it lasts, who listens is looked at."""
    folder = tmp_path_factory.mktemp("rllib") / "run"
    reachable: set[str] = set()
    done = threading.Event()

    def look() -> None:
        mine = psutil.Process()
        while not done.wait(0.5):
            for process in [mine, *mine.children(recursive=True)]:
                try:
                    sockets = process.net_connections("inet")
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                reachable.update(s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert main([*SMALL, "--steps", "256", "--out", str(folder)]) == 0
    finally:
        done.set()
        thread.join()
    assert reachable, "Ray listens to its own processes at least"
    assert {ip.removeprefix("::ffff:") for ip in reachable} <= {"127.0.0.1", "::1"}
    return folder


def test_run_folder(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = json.loads((run / "metrics.json").read_text())["steps"]
    assert 256 <= steps < 256 + 16
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.json", "tensorboard", "checkpoints", "best.zip", "final.zip",
    }  # fmt: skip
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["steps_000000000000.zip"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["algo"] == "rllib" and config["versions"]["ray"]
    start, final = (
        load_weights(run / name, {"hidden": 8, "anchored": False}).state_dict()
        for name in ("checkpoints/steps_000000000000.zip", "final.zip")
    )
    assert not torch.equal(start["pool.weight"], final["pool.weight"])
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    wanted = {"goodput", "violated", "rejected_at_arrival", "rejected_at_decode", "reward_per_step"}
    assert {f"rollout/{name}" for name in wanted} <= tags
    assert {"time/steps_per_s", "train/value_loss", "train/approx_kl"} <= tags
    assert len(events.Scalars("rollout/goodput")) == 2


def test_others_take_it_without_ray(run: Path, tmp_path: Path) -> None:
    """In a process where ray cannot be imported: the leaderboard, the exported file, the sidecar's policy."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    onnx = tmp_path / "run.onnx"
    named = f"{run},{onnx},conductor"
    for command in (
        ["-m", "policies", "export", str(run), "--out", str(onnx)],
        [
            "leaderboard.py",
            "--policies",
            named,
            "--cluster",
            "2p2d",
            "--load",
            "1.5",
            "--part",
            "test",
        ],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert str(run) in done.stdout and onnx.name in done.stdout


def test_resume_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = json.loads((run / "metrics.json").read_text())["steps"]
    assert f"has {steps} steps already" in error_of(["--resume", str(run)], capsys)
    weights, before = load_training(run / "final.zip")
    updates = before["optimizer"]["state"][0]["step"]
    assert main(["--resume", str(run), "--steps", str(steps + 128)]) == 0
    assert (run / "checkpoints" / f"steps_{steps:012d}.zip").is_file()
    later, after = load_training(run / "final.zip")
    assert after["steps"] >= steps + 128
    # 2 or 3 minibatches in each of 3 epochs, unless the KL stops them
    assert 0 < after["optimizer"]["state"][0]["step"] - updates <= 12
    assert set(later) == set(weights) and "critic.head.weight" in later
    # Training went on from these weights: a few steps of a small rate apart.
    change = (later["scorer.pool.weight"] - weights["scorer.pool.weight"]).abs().max()
    assert 0 < change < 0.02
    metrics = json.loads((run / "metrics.json").read_text())
    assert [session["steps"] for session in metrics["sessions"]] == [steps, after["steps"] - steps]
    make_policy(str(run)).reset(1, 0)


def test_another_trainers_checkpoint_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot go on from it" in error_of(
        ["--resume", str(run), "--algo", "ppo", "--group", "1", "--steps", "100000"], capsys
    )


def test_ctrl_c_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "train.py", *SMALL, "--steps", "100000000", "--out", str(out)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 300
    while not (out / "best.zip").is_file() and process.poll() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches Ray's processes, too
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.strip().splitlines()[-1].endswith(f"python train.py --resume {out}")
    assert "Traceback" not in errors
    steps = json.loads((out / "metrics.json").read_text())["steps"]
    assert steps > 0
    assert load_training(out / "checkpoints" / f"steps_{steps:012d}.zip")[1]["steps"] == steps


def test_missing_ray_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    shown = subprocess.run(
        [sys.executable, "train.py", *SMALL, "--out", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2
    assert shown.stderr == (
        "train.py: error: --algo rllib needs ray, which is not installed: pip install 'conductor-gym[train,rllib]'\n"
    )
    assert not (tmp_path / "run").exists()


# --- a Ray cluster -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("nowhere", "expected auto, HOST:PORT or ray://HOST:PORT"),
        ("host:99999", "expected auto, HOST:PORT or ray://HOST:PORT"),
        ("127.0.0.1:{closed}", "no Ray cluster answers there"),
        ("ray://127.0.0.1:{closed}", "no Ray cluster answers there"),
        ("no.such.host.invalid:6379", "no Ray cluster answers there"),
    ],
)
def test_a_bad_address_is_one_line_at_once(
    address: str, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = address.format(closed=free_port())
    started_s = time.monotonic()
    error = error_of([*SMALL, "--out", str(tmp_path / "run"), "--ray", address], capsys)
    assert match in error and f"--ray {address}" in error
    assert time.monotonic() - started_s < 20.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """A Ray cluster of two CPUs on loopback: the environment that finds it, and the address for Ray's client."""
    port, client_port = free_port(), free_port()
    env = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens on loopback only
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": "",
    }
    temporary = Path(tempfile.gettempdir()) / f"ray-{os.getpid()}-{port}"  # sockets need a short path
    head = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"),
            *("--include-dashboard=false", f"--ray-client-server-port={client_port}"),
            *(f"--temp-dir={temporary}", "--disable-usage-stats"),
        ],
        cwd=ROOT,
        env=env,
        stdout=(tmp_path / "head.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline_s = time.monotonic() + 120
        while "Ray runtime started" not in (tmp_path / "head.log").read_text():
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        yield env | {"RAY_ADDRESS": f"127.0.0.1:{port}"}, f"ray://127.0.0.1:{client_port}"
    finally:
        head.send_signal(signal.SIGTERM)  # ends what it started, and no other Ray
        head.wait(60)
        shutil.rmtree(temporary)


def train_on(address: str, env: dict[str, str], out: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "train.py", *SMALL, "--steps", "256", "--out", str(out)),
            *("--ray", address, "--env-runners", "1"),
        ],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["steps"] >= 256 and metrics["sessions"][0]["environment_s"] > 0
    make_policy(str(out)).reset(1, 0)


def test_trains_on_a_ray_cluster(cluster: tuple[dict[str, str], str], tmp_path: Path) -> None:
    env, _ = cluster
    train_on("auto", env, tmp_path / "run")


@pytest.mark.slow
def test_trains_through_rays_client(cluster: tuple[dict[str, str], str], tmp_path: Path) -> None:
    env, address = cluster
    train_on(address, env, tmp_path / "run")
