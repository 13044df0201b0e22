"""The leaderboard and the experiments on a Ray cluster of this machine: the figures that they have without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import leaderboard
from experiments import command
from leaderboard_rerun import differences
from traces import builtin, save

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("ray", reason="needs the rllib extra")


def test_the_leaderboard_has_the_same_figures(tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "small.parquet"
    save(builtin("conversation", n_requests=200), trace)
    policies = "conductor,random,tests.test_leaderboard:Wrapped"  # the last decides here
    given = ["--policies", policies, "--trace", str(trace), "--part", "all", "--cluster", "1p2d,2p2d"]
    given += ["--capacity", "1.5", "--seeds", "2", "--jobs", "2", "--sustained", "--headroom"]
    given += ["--json", str(tmp_path / "here.json")]
    assert leaderboard.main(given) == 0
    capsys.readouterr()
    assert leaderboard.main(["--rerun", str(tmp_path / "here.json"), "--ray", "--jobs", "2"]) == 0
    assert "the same: all figures of 6 rows" in capsys.readouterr().out


def test_experiments_have_the_same_rows(tmp_path: Path) -> None:
    found = []
    for where, options in (("here", []), ("there", ["--ray"])):
        file = tmp_path / f"{where}.json"
        given = ["fast_fig08_prefill_time", "arxiv_fig06_block_popularity", "--quick", "--json", str(file)]
        assert command.main([*given, "--jobs", "2", *options]) == 0
        found.append(json.loads(file.read_text()))
    assert differences(*found) == []
    assert found[0]["rows"]


def test_a_cluster_that_is_not_there_is_one_line(capsys: Any) -> None:
    for main, given in ((leaderboard.main, ["--policies", "random"]), (command.main, ["fast_fig08_prefill_time"])):
        assert main([*given, "--ray", "127.0.0.1:1"]) == 2
        assert capsys.readouterr().err.startswith("error: --ray 127.0.0.1:1: no Ray cluster answers there")
