"""The live experiments' own reckoning, without workers; tests/live/ runs them on real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from envs.spec import ClusterSpec, validate_cluster
from experiments import live, live_rejection, sim_to_live
from experiments.live import Seen
from experiments.live_command import main
from traces import Trace

NODE = {
    "prefill": {"base_s": 0.1, "linear_s": 1e-3},
    "decode": {"base_s": 0.01, "per_request_s": 0.0, "per_token_s": 0.0},
    "nic_bytes_per_s": 1e6,
    "h2d_bytes_per_s": 1e12,
    "join_bytes_per_s": 1e12,
    "device_kv_tokens": 4096,
    "host_kv_tokens": 4096,
    "decode_kv_tokens": 4096,
}


def cluster() -> ClusterSpec:
    pool = [{"count": 1, "hardware": NODE}]
    model = {"layers": 1, "kv_bytes_per_token": 1000}
    fields = {"prefill": pool, "decode": pool, "model": model, "block_tokens": 32, "transfer_latency_s": 0.05}
    return validate_cluster(fields, "test")


def trace(*requests: tuple[float, int, int]) -> Trace:
    arrivals, inputs, outputs = zip(*requests)
    return Trace(
        np.array(arrivals), np.array(inputs, np.int32), np.array(outputs, np.int32),
        np.zeros(len(requests) + 1, np.int64), np.zeros(0, np.int32), block_tokens=32,
    )  # fmt: skip


def seen(ttft_s: list[float], tbt_s: list[float] | None = None) -> Seen:
    ttft = np.array(ttft_s)
    return Seen(ttft, np.array(tbt_s) if tbt_s else np.full(len(ttft), 0.01), ~np.isnan(ttft))


def test_what_clients_of_the_gym_would_see() -> None:
    """The first token is there when prefill, hand-over (100 tokens at 1 KB/ms) and one iteration are over."""
    found = live.simulated(cluster(), trace((0.0, 100, 5), (10.0, 200, 1)), "round_robin+none")
    assert found.ttft_s == pytest.approx([0.1 + 0.1 + 0.1 + 0.05 + 0.01, 0.1 + 0.2 + 0.2 + 0.05 + 0.01])
    assert found.tbt_s == pytest.approx([0.01, 0.0]) and found.good.all()


def test_a_trace_as_it_is_sent() -> None:
    """Blocks of 512 become blocks of 32, shared as before."""
    whole = Trace(
        np.array([5.0, 6.0, 7.0, 9.0]), np.array([1000, 4096, 1100, 30], np.int32),
        np.array([160, 16, 3, 320], np.int32), np.array([0, 2, 10, 13, 14]),
        np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 10, 11], np.int32), block_tokens=512,
    )  # fmt: skip
    sent = live.sent(whole, 2, 200).speed_up(2.0)
    assert sent.block_tokens == 32 and sent.n_requests == 2, "the second is too long, the last one too many"
    assert sent.arrival_s.tolist() == [0.0, 1.0]
    assert sent.input_tokens.tolist() == [63, 69] and sent.output_tokens.tolist() == [10, 1]
    assert sent.blocks(1).tolist() == [0, 1, 2]
    assert live.prefill_busy_s(cluster(), sent, "round_robin+none") == pytest.approx(0.1 + 0.063 + 0.1 + 0.005)


def test_accuracy_holds_within_its_tolerances() -> None:
    real = seen([1.0, 2.0, 3.0, 4.0, np.nan], [0.1, 0.2, 0.0, 0.3, np.nan])
    near = sim_to_live.accuracy(real, seen([1.05, 2.1, 3.15, 4.2, 9.0], [0.09, 0.19, 0.5, 0.29, 1.0]))
    assert near["served"] == {"live": 4, "gym": 5}
    assert near["accuracy"]["ttft_p50_s"]["difference"] == pytest.approx(0.05)
    assert near["accuracy"]["tbt_p50_s"]["live"] == pytest.approx(0.2), "a single token has no interval"
    assert all(row["holds"] for row in near["accuracy"].values()) and near["ttft_rank_correlation"]["holds"]
    far = sim_to_live.accuracy(real, seen([4.0, 3.0, 2.0, 1.0, 1.0], [0.2, 0.4, 0.6, 0.8, 1.0]))
    assert far["ttft_rank_correlation"]["value"] == pytest.approx(-1) and not far["ttft_rank_correlation"]["holds"]
    assert not far["accuracy"]["tbt_p50_s"]["holds"]


def test_ordering_counts_only_what_is_told_apart() -> None:
    rng = np.random.default_rng(0)
    arrivals = np.arange(300.0)
    base = rng.exponential(1.0, 300)
    noise = rng.normal(0, 0.05, 300)
    policies = {
        "slow": (np.stack([base + 1 + noise, base + 1 - noise]), np.stack([base + 2])),
        "fast": (np.stack([base, base]), np.stack([base, base])),
        "as_fast": (np.stack([base + noise, base - noise]), np.stack([base + 0.1])),
    }
    found = sim_to_live.ordering(arrivals, policies)
    assert found["told_apart"] == 2 and found["holds"] and found["gym_order"] == ["fast", "as_fast", "slow"]
    wrong = sim_to_live.ordering(arrivals, policies | {"slow": (policies["slow"][0], np.stack([base - 1]))})
    assert wrong["told_apart"] == 2 and not wrong["holds"]
    alike = sim_to_live.ordering(arrivals, {name: policies[name] for name in ("fast", "as_fast")})
    assert not alike["holds"], "where nothing is told apart nothing is shown"


def test_decode_time_is_what_most_answers_take() -> None:
    """In a cluster file, which takes no NumPy scalars."""
    known = trace(*((float(i), 1600, 160 + 16 * i) for i in range(101)))  # sent: 10 .. 110
    cluster = {"decode_time_s": live_rejection.decode_time_s(known, 2048, np.float64(0.5))}
    assert yaml.safe_load(yaml.safe_dump(cluster)) == {"decode_time_s": pytest.approx(0.5 * 105)}


def test_paired_intervals() -> None:
    found = live_rejection.paired([110, 112, 108], [100, 101, 99])
    assert found["mean"] == pytest.approx(10) and found["holds"]
    assert found["high"] - found["mean"] == pytest.approx(4.303 * 1.0 / 3**0.5, rel=1e-3)
    assert not live_rejection.paired([110, 90, 100], [100, 101, 99])["holds"]


def test_wrong_calls_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_workers = tmp_path / "cluster.yaml"
    no_workers.write_text("prefill: []\n")
    for arguments, complaint in (
        (["--cluster", str(no_workers)], "expected a cluster file with workers"),
        (["--cluster", str(tmp_path / "none.yaml")], "No such file"),
        (["--json", "/no/such/folder/x.json"], "expected a file in a folder that exists"),
    ):
        assert main(["sim_to_live", *arguments]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and complaint in said[0]
    with pytest.raises(SystemExit):
        main(["live_rejection", "--load", "0"])
    assert "expected" in capsys.readouterr().err


def test_the_command_is_found() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "experiments", "live_rejection", "--help"], capture_output=True, text=True, check=True
    )
    assert "--repeats" in told.stdout
    listed = subprocess.run([sys.executable, "-m", "experiments", "--help"], capture_output=True, text=True, check=True)
    assert "sim_to_live" in listed.stdout
