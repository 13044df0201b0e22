"""Calibration on real vLLM workers, and the gym beside them; too few requests for the figures to be held to bounds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from envs.calibrate import app
from envs.spec import load_cluster
from experiments.live_command import main
from runtime.tiny_model import KV_BYTES_PER_TOKEN
from runtime.vllm_workers import VllmWorkers

pytestmark = pytest.mark.live
KV_TOKENS = 16384


@pytest.fixture(scope="module")
def pair(environment: Path) -> Iterator[VllmWorkers]:
    with VllmWorkers(1, 1, kv_tokens=KV_TOKENS, environment=environment) as workers:
        yield workers


def test_workers_keep_the_cores_they_were_given(pair: VllmWorkers) -> None:
    """vLLM's NixlConnector would have all of them on the machine's last."""
    for name, process in pair.processes.items():
        group = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _group(int(p.name)) == process.pid]
        assert len(group) > 1, f"{name}: a server and its engine"
        for member in group:
            assert os.sched_getaffinity(member) == os.sched_getaffinity(0), name


def _group(process: int) -> int:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return -1


def test_real_workers_are_measured(pair: VllmWorkers, tmp_path: Path) -> None:
    profile, cluster = tmp_path / "profile.yaml", tmp_path / "cluster.yaml"
    urls = f"--prefill-url http://{pair.address('p0')} --decode-url http://{pair.address('d0')}"
    options = f"--repeats 1 --longest-tokens 1024 --most-requests 4 --out {profile} --cluster {cluster} --json -"
    called = CliRunner().invoke(app, f"{urls} {options}".split())
    assert called.exit_code == 0, called.output
    said = json.loads(called.stdout)
    assert set(said["fit"]) == {"prefill", "decode", "join", "hand-over"}
    assert said["cluster"]["model"]["kv_bytes_per_token"] == KV_BYTES_PER_TOKEN, "as NIXL's own metrics count it"
    spec = load_cluster(cluster)
    node = spec.prefill[0].profile
    assert node.device_kv_tokens == KV_TOKENS and node.model == "tiny"
    assert 1e-6 < node.prefill.linear_s < 1e-2 and 1e-4 < node.decode.base_s < 1.0


def test_the_gym_beside_real_workers(pair: VllmWorkers, tmp_path: Path) -> None:
    """Every request is served by both, and those that take long live take long in the gym."""
    file, out = tmp_path / "cluster.yaml", tmp_path / "found.json"
    file.write_text(yaml.safe_dump(pair.cluster()))
    small = "--tuning --requests 24 --load 0.2 --longest-tokens 1024 --most-requests 3"
    assert main(["sim_to_live", "--cluster", str(file), *small.split(), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["served"] == {"live": 24, "gym": 24}
    assert found["ttft_rank_correlation"]["value"] > 0.3
    for row in found["accuracy"].values():
        assert row["live"] > 0 and row["gym"] > 0
