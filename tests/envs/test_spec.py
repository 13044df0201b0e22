"""Cluster descriptions: what is accepted, what is refused and how, and hardware fits."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml

from envs.hardware import fit_decode, fit_prefill, profiles
from envs.spec import SpecError, cluster_names, load_cluster
from envs.state import EvictionRule

PROFILES = Path(__file__).resolve().parents[2] / ".." / "shared" / "reference" / "profiles"
NODE = "a800x8-llama2-70b"
VALID = f"""
prefill:
  - {{count: 2, hardware: {NODE}, host_kv_tokens: 5120000, times: {{base_s: 0.1, linear_s: 1.0e-4}}}}
  - {{count: 1, hardware: h100x8-llama3-70b}}
decode: [{{count: 3, hardware: {NODE}, max_batch: 7}}]
slo: {{ttft_s: 10, tbt_s: 0.05}}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_built_in_clusters() -> None:
    assert set(cluster_names()) == {"8p8d", "10p10d", "3p1d", "2p2d"}
    for name, sizes in (("8p8d", (8, 8)), ("3p1d", (3, 1)), ("5p11d", (5, 11)), ("256p256d", (256, 256))):
        spec = load_cluster(name)
        assert (spec.n_prefill, spec.n_decode) == sizes
        assert spec.name == name
    node = load_cluster("8p8d").parameters().prefill[0]
    assert node["host_blocks"] == 5859  # 3 M tokens, as the paper has it
    n, p = 65_536, 0
    assert node["quadratic_s"] * (n * n - p * p) + node["linear_s"] * n + node["base_s"] == pytest.approx(
        10.5, rel=0.01
    )


def test_a_file_of_mixed_hardware(tmp_path: Path) -> None:
    spec = load_cluster(write(tmp_path / "mine.yaml", VALID))
    assert spec.name == "mine"
    parameters = spec.parameters()
    assert parameters.prefill["host_blocks"].tolist() == [10_000, 10_000, 5859]
    assert parameters.prefill["base_s"].tolist() == [0.1, 0.1, 0.0069]
    assert parameters.decode["max_batch"].tolist() == [7, 7, 7]
    assert parameters.cluster["ttft_slo_s"][0] == 10
    assert spec.checksum != load_cluster("8p8d").checksum


def test_a_pipelined_group_has_what_its_nodes_have(tmp_path: Path) -> None:
    group = f"""
    prefill:
      - {{count: 2, hardware: {NODE}, pipeline_nodes: 3, times: {{base_s: 0.1, linear_s: 1.0e-4, chunk_tokens: 2048}}}}
    decode: [{{count: 3, hardware: {NODE}}}]
    """
    spec = load_cluster(write(tmp_path / "group.yaml", group))
    assert spec.n_prefill == 2
    one, (three, _) = load_cluster("3p1d").parameters().prefill[0], spec.parameters().prefill
    assert (one["pipeline_nodes"], three["pipeline_nodes"]) == (1, 3)
    assert three["chunk_tokens"] == 2048
    for field in ("nic_bytes_per_s", "h2d_bytes_per_s"):
        assert three[field] == 3 * one[field]
    assert (three["device_blocks"], three["host_blocks"]) == (3 * 1_300_000 // 512, 9_000_000 // 512)


def test_a_disk_and_an_eviction_rule(tmp_path: Path) -> None:
    plain = load_cluster("8p8d").parameters()
    assert (plain.prefill["disk_blocks"] == 0).all()
    assert plain.cluster["eviction"][0] == EvictionRule.LRU
    text = VALID.replace("slo:", "eviction: length_aware\nslo:")
    text = text.replace("host_kv_tokens", "disk_kv_tokens: 1024, host_kv_tokens")
    parameters = load_cluster(write(tmp_path / "mine.yaml", text)).parameters()
    assert parameters.prefill["disk_blocks"].tolist() == [2, 2, 0]
    assert parameters.prefill["disk_bytes_per_s"].tolist() == [6e9] * 3
    assert parameters.cluster["eviction"][0] == EvictionRule.LENGTH_AWARE
    with pytest.raises(SpecError, match="eviction: Input should be 'lru', 'lfu' or 'length_aware', found 'mru'"):
        load_cluster(write(tmp_path / "mine.yaml", VALID.replace("slo:", "eviction: mru\nslo:")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("slo:", "slos:"), "slos: no such field"),
        (("max_batch: 7", "max_batch: 0"), "decode.0.max_batch: Input should be greater than 0, found 0"),
        (("max_batch: 7", "max_bach: 7"), "decode.0.max_bach: no such field, found 7"),
        (("count: 2", "count: 2, pipeline_nodes: 0"), "prefill.0.pipeline_nodes: Input should be greater than 0"),
        (("count: 2", "count: 2, pipeline_nodes: 81"), "prefill.0: pipeline_nodes (81) is above the model's layers"),
        (("count: 2", "count: 2, disk_kv_tokens: 100"), "prefill.0: disk_kv_tokens (100) and host_kv_tokens"),
        (("count: 2", f"count: 2, disk_kv_tokens: {10**30}"), "prefill.0.disk_kv_tokens: Input should be less than"),
        (("max_batch: 7", f"max_batch: {10**30}"), "decode.0.max_batch: Input should be less than"),
        (("linear_s: 1.0e-4", "linear: 1"), "prefill.0.times.linear_s: Field required"),
        (("count: 2", "count: two"), "prefill.0.count: Input should be a valid integer"),
        (("count: 2", "count: 100000"), "prefill.0.count: Input should be less than or equal to 4096"),
        (("tbt_s: 0.05", "tbt_s: .inf"), "slo.tbt_s: Input should be a finite number"),
        (("ttft_s: 10", "ttft_s: -1"), "slo.ttft_s: Input should be greater than 0"),
        (("h100x8-llama3-70b", "h900"), "prefill.1: no hardware profile is called 'h900'; built in are"),
        (("host_kv_tokens: 5120000", "host_kv_tokens: 1"), "device_kv_tokens (1300000) is above host_kv_tokens (1)"),
        (("decode:", "prefill:"), "decode: Field required"),
        ((VALID, "- 1"), "expected a mapping with prefill and decode pools, found list"),
        ((VALID, "prefill: [1, "), "not YAML"),
    ],
)
def test_impossible_fields_are_refused_with_their_path(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = write(tmp_path / "mine.yaml", VALID.replace(*change))
    with pytest.raises(SpecError) as error:
        load_cluster(path)
    assert message in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_no_such_cluster() -> None:
    with pytest.raises(SpecError, match="no cluster is called '8p': |no cluster is called '8p' and no such file"):
        load_cluster("8p")


def test_fits_recover_what_made_the_measurements() -> None:
    rng = np.random.default_rng(0)
    n, p = rng.integers(512, 60_000, 200), rng.integers(0, 40_000, 200)
    seconds = 0.03 + 1e-4 * n + 8e-10 * ((n + p) ** 2.0 - p**2.0)
    fit = fit_prefill(n, p, seconds)
    assert (fit.base_s, fit.linear_s, fit.quadratic_s) == pytest.approx((0.03, 1e-4, 8e-10))
    batch, tokens = rng.integers(1, 200, 200), rng.integers(100, 1_000_000, 200)
    decode = fit_decode(batch, tokens, 0.02 + 1e-4 * batch + 3e-8 * tokens)
    assert (decode.base_s, decode.per_request_s, decode.per_token_s) == pytest.approx((0.02, 1e-4, 3e-8))


@pytest.mark.skipif(not PROFILES.is_dir(), reason="the measured profiles (../shared/reference/profiles) are not here")
@pytest.mark.parametrize(
    ("name", "model", "gpu", "tp"),
    [
        ("a100x8-llama3-70b", "llama3-70b", "a100_sxm", "8"),
        ("a100x4-llama3-70b", "llama3-70b", "a100_sxm", "4"),
        ("h100x8-llama3-70b", "llama3-70b", "h100_sxm", "8"),
        ("h100-llama3-8b", "llama3-8b", "h100_sxm", "1"),
    ],
)
def test_profiles_are_fits_of_the_measured_tables(name: str, model: str, gpu: str, tp: str) -> None:
    """Built-in prefill and decode times stay near the operator tables they were fitted to."""

    def rows(kind: str) -> list[dict[str, str]]:
        with (PROFILES / f"aic_{kind}_ms.csv").open() as file:
            wanted = {"model": model, "gpu": gpu, "tp": tp, "backend": "vllm"}
            return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]

    profile = profiles()[name]
    prefill = [
        r for r in rows("prefill") if int(r["prefix_tokens"]) == 0 and int(r["new_tokens"]) >= 512 and r["batch"] == "1"
    ]
    assert len(prefill) > 8
    n = np.array([float(r["new_tokens"]) for r in prefill])
    ours = profile.prefill.base_s + profile.prefill.linear_s * n + profile.prefill.quadratic_s * n * n
    theirs = np.array([float(r["prefill_ms"]) for r in prefill]) / 1e3
    assert np.abs(ours / theirs - 1).mean() < 0.05
    decode = [r for r in rows("decode_iter") if int(r["batch"]) <= 256 and float(r["total_kv_tokens"]) <= 1.5e6]
    batch = np.array([float(r["batch"]) for r in decode])
    tokens = np.array([float(r["total_kv_tokens"]) for r in decode])
    ours = profile.decode.base_s + profile.decode.per_request_s * batch + profile.decode.per_token_s * tokens
    theirs = np.array([float(r["decode_iter_ms"]) for r in decode]) / 1e3
    assert np.abs(ours / theirs - 1).mean() < 0.06


def test_a_hardware_profile_of_a_file(tmp_path: Path) -> None:
    """It is beside the cluster file, and part of the spec from then on."""
    fields = profiles()[NODE].model_dump() | {"nic_bytes_per_s": 123.0}
    (tmp_path / "hardware").mkdir()
    file = write(tmp_path / "hardware" / "mine.yaml", yaml.safe_dump(fields))
    text = "prefill: [{count: 1, hardware: hardware/mine.yaml}]\ndecode: [{count: 1, hardware: hardware/mine.yaml}]\n"
    spec = load_cluster(write(tmp_path / "cluster.yaml", text))
    assert spec.prefill[0].profile.nic_bytes_per_s == spec.decode[0].profile.nic_bytes_per_s == 123.0
    write(file, yaml.safe_dump(fields | {"max_batch": 7}))
    assert load_cluster(tmp_path / "cluster.yaml").checksum != spec.checksum
    for content, complaint in (
        (
            "nic_bytes_per_s: -1",
            r"cluster.yaml: prefill.0.hardware: hardware profile .*mine.yaml: prefill: Field required",
        ),
        ("[", r"hardware profile .*mine.yaml: while parsing"),
    ):
        write(file, content)
        with pytest.raises(SpecError, match=complaint):
            load_cluster(tmp_path / "cluster.yaml")
    file.unlink()
    with pytest.raises(SpecError, match=r"hardware profile .*mine.yaml: .*No such file"):
        load_cluster(tmp_path / "cluster.yaml")
