"""Behaviour cloning: agrees with its teacher, keeps a run folder, goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from policies import make_policy
from policies.trainers.bc import _own_choices
from train import main

_FLAGS = (
    "--algo=bc --trace=builtin:conversation --cluster=2p2d --envs=8 --episode-requests=200 --load=2,3",
    "--n-steps=64 --minibatch=128 --hidden=16 --eval-requests=400 --lr=0.01 --epochs=8",
)
SMALL = " ".join(_FLAGS).split(" ")


def test_clone_agrees_with_its_teacher(tmp_path: Path) -> None:
    out = tmp_path / "run"
    teacher = "prior:tbt=0.8"
    assert main([*SMALL, "--base", teacher, "--steps", "8192", "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    shares = [entry["share"] for entry in metrics["agreement"]]
    assert shares[0] < 0.8  # with the SLOs themselves as thresholds
    assert np.mean(shares[-4:]) > 0.9  # each of 512 decisions
    assert (out / "final.zip").is_file() and (out / "best.zip").is_file()
    make_policy(str(out)).reset(1, 0)
    assert main(["--resume", str(out), "--steps", "8704"]) == 0
    again = json.loads((out / "metrics.json").read_text())
    assert again["steps"] == 8704 and again["agreement"][-1]["share"] > shares[0] + 0.1
    assert [session["steps"] for session in again["sessions"]] == [8192, 512]


def test_a_source_that_is_no_choice_is_local() -> None:
    masks = np.array([[True, True, False, True], [True, True, False, True], [True, True, True, True]])
    assert _own_choices(np.array([2, 0, 3]), masks).tolist() == [1, 0, 3]
