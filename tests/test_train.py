"""`train.py`: from nothing to a run folder, going on, stopping, and refusing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from policies import make_policy
from policies.run_folder import load_weights
from tests.training import error_of
from train import Options, UsageError, main, options_from_yaml, parse, parse_range

ROOT = Path(__file__).parents[1]
_FLAGS = (
    "--algo=ppo --trace=builtin:conversation --cluster=2p2d --envs=4 --episode-requests=100 --group=2",
    "--n-steps=32 --minibatch=64 --hidden=8 --eval-requests=200 --device=cpu",
)
SMALL = " ".join(_FLAGS).split(" ")


def weights(file: Path) -> dict[str, torch.Tensor]:
    return dict(load_weights(file, {"hidden": 8, "anchored": False}).state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_train_resume_and_same_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main([*SMALL, "--steps", "256", "--out", a]) == 0
    assert "python leaderboard.py --policies" in capsys.readouterr().out
    assert main([*SMALL, "--steps", "256", "--out", b]) == 0
    assert main([*SMALL, "--steps", "256", "--out", c, "--seed", "1"]) == 0
    final = weights(Path(a, "final.zip"))
    assert same(final, weights(Path(b, "final.zip")))
    assert not same(final, weights(Path(c, "final.zip")))
    assert not same(final, weights(Path(a, "checkpoints", "steps_000000000000.zip")))
    assert yaml.safe_load(Path(a, "config.yaml").read_text())["options"]["n_steps"] == 32

    assert "has 256 steps already" in error_of(["--resume", a], capsys)
    assert main(["--resume", a, "--steps", "512"]) == 0
    metrics = json.loads(Path(a, "metrics.json").read_text())
    assert metrics["steps"] == 512
    assert [session["steps"] for session in metrics["sessions"]] == [256, 256]
    assert [entry["steps"] for entry in metrics["validation"]] == [0, 256, 256, 512]
    assert same(final, weights(Path(a, "checkpoints", "steps_000000000256.zip")))
    assert not same(final, weights(Path(a, "final.zip")))
    assert len(list(Path(a, "tensorboard").iterdir())) == 2

    from sb3_contrib import MaskablePPO

    model = MaskablePPO.load(Path(a, "final.zip"), device="cpu")
    assert model.num_timesteps == 512
    moments = model.policy.optimizer.state_dict()["state"]
    # 2 minibatches of the first of two rollouts, before and after: the last one waits for the next
    assert moments[0]["step"] == 4
    make_policy(a).reset(1, 0)


def test_tensorboard_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert main([*SMALL, "--steps", "384", "--out", str(out)]) == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    wanted = {"goodput", "violated", "rejected_at_arrival", "rejected_at_decode", "reward_per_step"}
    assert {f"rollout/{name}" for name in wanted} <= tags
    assert {"time/steps_per_s", "time/fps", "train/value_loss", "validation/goodput"} <= tags
    assert [event.step for event in events.Scalars("rollout/goodput")] == [128, 256, 384]


def test_ctrl_c_leaves_a_run_that_loads_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "train.py", *SMALL, "--steps", "100000000", "--out", str(out)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 300
    while not (out / "best.zip").is_file() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip().splitlines()[-1].endswith(f"python train.py --resume {out}")
    assert "Traceback" not in errors
    make_policy(str(out))
    steps = json.loads((out / "metrics.json").read_text())["steps"]
    assert steps > 0
    assert (out / "checkpoints" / f"steps_{steps:012d}.zip").is_file()
    assert main(["--resume", str(out), "--steps", str(steps + 1)]) == 0


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert "--algo 'nope'" in error_of(["--algo", "nope"], capsys)
    assert "no such file" in error_of(["--trace", "nope.jsonl", "--out", out], capsys)
    assert "no cluster is called 'nope'" in error_of(["--cluster", "nope", "--out", out], capsys)
    assert "--steps 0" in error_of(["--steps", "0"], capsys)
    assert "--steps -5" in error_of(["--steps", "-5"], capsys)
    assert "--load" in error_of(["--load", "2,1"], capsys)
    assert "--group 3" in error_of(["--group", "3"], capsys)
    assert "--learn 'all'" in error_of(["--learn", "all"], capsys)
    assert "--gamma 1.5" in error_of(["--gamma", "1.5"], capsys)
    assert "--lr nan" in error_of(["--lr", "nan"], capsys)
    assert "--part 'future'" in error_of(["--part", "future"], capsys)
    assert "no run folder" in error_of(["--resume", out], capsys)
    assert not Path(out).exists()

    file = tmp_path / "file"
    file.write_text("mine")
    assert "cannot be written" in error_of(["--out", str(file)], capsys)
    assert "cannot be written" in error_of(["--out", str(file / "run")], capsys)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    assert "--overwrite" in error_of(["--out", str(full)], capsys)
    assert "no run folder" in error_of(["--out", str(full), "--overwrite"], capsys)
    assert (full / "mine").read_text() == "mine"
    if not torch.cuda.is_available():
        assert "no CUDA device" in error_of(["--device", "cuda", "--out", out], capsys)


def test_flags_that_cannot_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--steps", "many"], ["--nope"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


def test_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("steps: 5000\nload: [1.0, 1.5]\nn-steps: 64\nlr: 1\n")
    options = parse(["--config", str(file), "--steps", "7000"])
    assert (options.steps, options.n_steps, options.lr) == (7000, 64, 1.0)
    assert parse_range("load", options.load) == (1.0, 1.5)
    for text, match in (
        ("stepz: 1", "unknown option 'stepz'"),
        ("steps: many", "'steps'"),
        ("[1]", "expected a mapping"),
        ("{", "cannot be read"),
    ):
        file.write_text(text)
        assert match in error_of(["--config", str(file)], capsys)
    with pytest.raises(UsageError, match="cannot be read"):
        options_from_yaml(tmp_path / "nope.yaml", Options())


NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "stable_baselines3", "sb3_contrib", "numba"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def run_without_torch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_is_quick_needs_no_torch_and_shows_every_option(tmp_path: Path) -> None:
    before_s = os.times().children_user
    shown = run_without_torch(tmp_path, "--help")
    assert shown.returncode == 0, shown.stderr
    assert os.times().children_user - before_s < 2.0
    for field in fields(Options):
        assert f"--{field.name.replace('_', '-')}" in shown.stdout
    assert "examples:" in shown.stdout


def test_missing_torch_is_one_line(tmp_path: Path) -> None:
    shown = run_without_torch(tmp_path)
    assert shown.returncode == 2
    assert shown.stderr == (
        "train.py: error: --algo ppo needs torch, which is not installed: pip install 'conductor-gym[train]'\n"
    )
