"""`leaderboard.py --log`: the command on logs of simulated clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leaderboard
import traces
from envs.state import Observation
from leaderboard import EXIT_BAD_INPUT
from runtime.decision_log import DecisionLog, Ended, LogRow
from tests.runtime.test_decision_log import always, canary, ended_order, explore, rows_of, write

Given = tuple[str, ...]


class Counts:
    """A class of a user's own that remembers how often it was asked."""

    recheck = True

    def reset(self, clusters: int, seed: int) -> None:
        self.asked = np.zeros(clusters, np.int64)

    def decide(self, observation: Observation) -> np.ndarray:
        self.asked += 1
        return 1 + 3 * (self.asked % 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of the conductor, in several segments."""
    path = tmp_path_factory.mktemp("log")
    trace = traces.builtin("conversation", n_requests=500)
    write(path, ended_order(*rows_of(trace, "2p2d", always("conductor"))), "2p2d", max_rows=200)
    return path


def run(capsys: pytest.CaptureFixture[str], *given: Any) -> dict[str, Any]:
    assert leaderboard.main([str(part) for part in (*given, "--seeds", "1", "--json", "-")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *given: Any) -> str:
    assert leaderboard.main([str(part) for part in given]) == EXIT_BAD_INPUT
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("error: ") and out.err.count("\n") == 1
    return out.err


def test_the_logging_policy_on_its_own_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--log", folder, "--policies", "conductor,random")
    own, other = found["rows"]
    true = found["log"]["goodput"]["mean"]
    assert all(part["mean"] == 1 for part in own["agreement"].values())
    for key in ("ips", "dr"):
        assert own[key]["interval"]["mean"] == pytest.approx(true)
    assert own["direct"]["interval"]["mean"] == pytest.approx(true)
    assert own["replay"]["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert found["model"]["bias"] == {"mean": 0, "low": 0, "high": 0}
    assert found["model"]["policy"] == "conductor" and found["model"]["share_decided"] == 1
    assert other["agreement"]["all"]["mean"] < 0.6
    assert other["ips"]["interval"] is None and other["ips"]["why_not"].startswith("no support")
    assert other["dr"]["interval"] is None
    assert other["replay"]["goodput"]["mean"] < 1
    assert "one-step" in found["notes"]["one_step"]


def test_a_canary_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = traces.builtin("conversation", n_requests=600)
    write(tmp_path, rows_of(trace, "2p2d", canary("conductor", "cache_aware+early", 0.5, 0))[0])
    found = run(capsys, "--log", tmp_path, "--policies", "conductor,cache_aware+early,random")
    assert set(found["log"]["policies"]) == {"conductor", "cache_aware+early"}
    assert found["log"]["drawn"] > 0
    for row in found["rows"][:2]:
        assert row["ips"]["interval"] is not None and row["ips"]["effective"] > 100
    assert found["rows"][2]["ips"]["interval"] is None


def test_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leaderboard.main(["--log", str(folder), "--policies", "conductor,load_balancing", "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    for words in (
        "500 requests in",
        "decided by conductor 500",
        "agreement with the logged decisions",
        "1.000 [0.9",
        "load_balancing: IPS, DR: no support: the log never takes",
        "the model's bias: conductor, who decided 100%, has on 2p2d goodput",
        "one-step: each decision is judged on the cluster as it was logged",
        "moving-block bootstrap",
    ):
        assert words in out, words


def test_other_load_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = traces.builtin("conversation", n_requests=400).speed_up(3)
    write(tmp_path, rows_of(trace, "2p2d", always("conductor"))[0])
    leaderboard.main(["--log", str(tmp_path), "--policies", "random", "--seeds", "1"])
    out = capsys.readouterr().out
    assert "random: takes 100% of requests where the log took" in out
    assert "is in the replay only" in out


def test_a_users_class_decides_one_after_the_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--log", folder, "--policies", f"{__name__}:Counts")
    assert 0.1 < found["rows"][0]["agreement"]["all"]["mean"] < 0.5


def test_warmup_is_replayed_and_not_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--log", folder, "--policies", "conductor", "--warmup", 200)
    assert found["log"]["requests"] == 300
    assert found["model"]["bias"]["mean"] == 0


def test_json_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    given = ["--log", str(folder), "--policies", "conductor", "--seeds", "1", "--json", str(file)]
    assert leaderboard.main(given) == 0
    assert json.loads(file.read_text())["rows"][0]["policy"] == "conductor"


def test_logged_by_a_policy_that_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = traces.builtin("conversation", n_requests=100)
    rows = rows_of(trace, "2p2d", explore("conductor", 0.5, 0))[0]
    for row in rows:
        row.policy = "runs/gone"
    write(tmp_path, rows)
    found = run(capsys, "--log", tmp_path, "--policies", "conductor")
    assert found["model"] is None and "cannot be replayed" in found["no_model"]
    assert "replay" not in found["rows"][0]


def test_without_a_cluster_there_is_no_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(traces.builtin("conversation", n_requests=100), "2p2d", always("conductor"))[0]
    with DecisionLog(tmp_path, 512, "live") as log:
        for row in rows:
            log.record(row)
    found = run(capsys, "--log", tmp_path, "--policies", "conductor")
    assert found["model"] is None and "--cluster" in found["no_model"]
    assert found["rows"][0]["agreement"]["all"]["mean"] == 1
    found = run(capsys, "--log", tmp_path, "--policies", "conductor", "--cluster", "2p2d")
    assert found["model"]["bias"]["mean"] == 0


def test_pools_that_grew_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(traces.builtin("conversation", n_requests=100), "3p1d", always("conductor"))[0]
    write(tmp_path, rows, "2p2d")
    found = run(capsys, "--log", tmp_path, "--policies", "conductor")
    assert found["model"] is None and "was logged on 3 prefill and 1 decode instances" in found["no_model"]
    assert run(capsys, "--log", tmp_path, "--policies", "conductor", "--cluster", "3p1d")["model"] is not None


def test_rows_that_nobody_decided_or_that_never_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(traces.builtin("conversation", n_requests=300), "2p2d", always("conductor"))[0]
    for row in rows[::10]:
        row.status, row.output_tokens = Ended.EXPIRED, 0
    last_s = rows[-1].arrival_s
    rows += [LogRow(f"full-{i}", last_s + i, 600, status=Ended.REJECTED_AT_ARRIVAL) for i in range(20)]
    write(tmp_path, rows)
    log = run(capsys, "--log", tmp_path, "--policies", "conductor")["log"]
    assert (log["requests"], log["outcome_unknown"], log["not_observed"]) == (320, 30, 20)
    assert log["output_unknown"] >= 50


def test_only_requests_nobody_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [LogRow(str(i), float(i), 600, status=Ended.REJECTED_AT_ARRIVAL) for i in range(20)])
    found = run(capsys, "--log", tmp_path, "--policies", "conductor")
    (row,) = found["rows"]
    assert row["agreement"]["all"]["mean"] is None
    assert row["ips"]["why_not"].startswith("no support") and row["direct"]["interval"] is None
    leaderboard.main(["--log", str(tmp_path), "--policies", "conductor"])
    assert "the log does not say who decided" in capsys.readouterr().out


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--cluster", "8p8d"), "was logged on 2 prefill and 2 decode instances, cluster '8p8d' has 8 and 8"),
        (("--cluster", "2p2d,3p1d"), "expected one cluster with --log"),
        (("--trace", "builtin:conversation"), "--trace does not go with --log"),
        (("--load", "2"), "--load does not go with --log"),
        (("--sustained",), "--sustained does not go with --log"),
        (("--plot", "x.png"), "--plot does not go with --log"),
        (("--warmup", "500"), "the log has 500 requests"),
        (("--json", "/nowhere/x.json"), "a folder that exists"),
    ],
)
def test_options_that_do_not_go_together(
    given: Given, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "--log", folder, "--policies", "conductor", *given)


def test_bad_logs(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "decision log segments" in refused(capsys, "--log", tmp_path, "--policies", "conductor")
    assert "no such file" in refused(capsys, "--log", tmp_path / "none", "--policies", "conductor")
    traces.save(traces.builtin("conversation", n_requests=10), tmp_path / "trace.parquet")
    assert "no decision log" in refused(capsys, "--log", tmp_path, "--policies", "conductor")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folder.glob("*.parquet"):
        (damaged / file.name).write_bytes(file.read_bytes()[:2000])
    assert "damaged Parquet" in refused(capsys, "--log", damaged, "--policies", "conductor")


def test_other_block_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DecisionLog(tmp_path, 16, "live") as log:
        log.record(LogRow("a", 0.0, 100, output_tokens=1, block_ids=np.arange(6)))
    says = refused(capsys, "--log", tmp_path, "--policies", "conductor", "--cluster", "2p2d")
    assert "blocks of 16 tokens, cluster '2p2d' of 512" in says


def test_a_policy_that_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--log", folder, "--policies", "tests.test_leaderboard:OutOfRange")
    assert "action 9999" in refused(capsys, *given)
