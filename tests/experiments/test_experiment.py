"""Rows, tolerances, traces, parameters, the papers' numbers, and what every experiment must have."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from envs.hardware import profiles
from envs.spec import Slo, load_cluster, load_coupled
from experiments import experiment as framework
from experiments.experiment import (
    Between,
    Experiment,
    Outcome,
    Result,
    Row,
    Setting,
    TraceShelf,
    Within,
    experiments,
    paper,
)
from experiments.parameters import Arrivals, Parameters
from experiments.replays import alone, hit_rate, replay
from experiments.sensitivity import sensitivity
from traces import TraceError, builtin, save

FIGURES = {  # of paper.yaml: their names in the file the numbers were read into
    "arxiv_table1": "arxiv_table1_hit_rate",
    "arxiv_fig02": "arxiv_fig2",
    "arxiv_fig06": "arxiv_fig6_block_hitcount_cdf",
    "arxiv_fig07": "arxiv_fig7_store_latency_s",
    "arxiv_fig08": "arxiv_fig8_ttft_s",
    "arxiv_fig09": "arxiv_fig9_load",
    "arxiv_fig11_12": "arxiv_fig11_12",
    "arxiv_fig13": "arxiv_fig13",
    "arxiv_table3": "arxiv_table3_rejected",
    "fast_fig01_06_07": "fast_cdf_tbt_pct",
    "fast_fig05": "fast_fig5_ttft_s",
    "fast_fig08": "fast_fig8_prefill_gpu_s",
    "fast_fig09": "fast_fig9_hit_by_capacity_tokens",
    "fast_fig10": "fast_fig10",
    "fast_fig12": "fast_fig12_latency_s",
    "fast_fig13": "fast_fig13",
    "fast_fig14": "fast_fig14",
    "fast_fig15": "fast_fig15",
}


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "published", "tolerance", "holds", "text"),
    [
        (0.365, 0.360, Within(0.005), True, "± 0.005"),
        (0.366, 0.360, Within(0.005), False, "± 0.005"),
        (0.355, 0.360, Within(0.005), True, "± 0.005"),
        (1.1, 1.0, Within(share=0.1), True, "± 10 %"),
        (-1.11, -1.0, Within(share=0.1), False, "± 10 %"),
        (1.65, 1.5, Within(0.05, 0.1), True, "± 0.05 + 10 %"),
        (3, 3, Within(), True, "± 0"),
        (2, 3, Within(), False, "± 0"),
        (0.95, 0.99, Between(low=0.95), True, ">= 0.95"),
        (0.94, 0.99, Between(low=0.95), False, ">= 0.95"),
        (0.5, None, Between(high=1), True, "<= 1"),
        (7, 7, Between(8, 9), False, "8 .. 9"),
        (math.nan, 1.0, Within(5), False, "± 5"),
        (1.0, None, Within(5), False, "± 5"),
    ],
)
def test_verdict_of_a_row(ours: float, published: float | None, tolerance: Any, holds: bool, text: str) -> None:
    assert Row("x", ours, published, tolerance).holds is holds
    assert str(tolerance) == text


def test_a_row_without_tolerance_is_context() -> None:
    row = Row("x", 1.5, 1.0)
    assert row.holds is None
    assert row.difference == 0.5
    assert Row("x", 1.5).difference is None


# --- traces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["conversation_trace.jsonl", "mooncake_conversation_trace.jsonl.gz"])
def test_traces_come_from_the_folder_or_a_stand_in_and_the_origin_is_told(tmp_path: Path, file: str) -> None:
    save(builtin("conversation", n_requests=12_031), tmp_path / file)
    setting = Setting(shelf=TraceShelf(tmp_path))
    trace = setting.trace("conversation")
    assert trace.n_requests == 12_031
    assert setting.trace("conversation") is trace
    assert setting.trace("synthetic").n_requests == builtin("synthetic").n_requests
    assert setting.origins == {
        "conversation": f"released file {file}",
        "synthetic": "stand-in builtin:synthetic, synthesised: the released file is not at hand",
    }
    with pytest.raises(TraceError, match="nosuch"):
        setting.trace("nosuch")
    assert setting.shelf.stand_ins == ["synthetic"]


def test_a_file_of_another_length_is_not_called_released(tmp_path: Path) -> None:
    save(builtin("conversation", n_requests=1000), tmp_path / "conversation_trace.jsonl")
    save(builtin("synthetic", n_requests=3), tmp_path / "synthetic_trace.jsonl")
    setting = Setting(shelf=TraceShelf(tmp_path))
    setting.trace("conversation")
    assert setting.origins["conversation"] == (
        "file conversation_trace.jsonl, 1,000 requests (the released one has 12,031)"
    )
    with pytest.raises(TraceError, match=r"synthetic_trace\.jsonl: has 3 requests; expected .* of 3,993"):
        setting.trace("synthetic")


def test_a_name_that_is_no_file_is_no_reason_for_a_stand_in(tmp_path: Path) -> None:
    (tmp_path / "conversation_trace.jsonl").mkdir()
    (tmp_path / "mooncake_synthetic_trace.jsonl.gz").symlink_to(tmp_path / "nothing")
    setting = Setting(shelf=TraceShelf(tmp_path))
    for name, found in {"conversation": "a folder", "synthetic": "a link to nothing"}.items():
        with pytest.raises(TraceError, match=f"{name}_trace.jsonl.*: {found}.*; expected a file"):
            setting.trace(name)


def test_errors_of_readers_name_no_option_of_other_commands(tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": 9, "output_length": 9, "hash_ids": [1]}\n'
    (tmp_path / "conversation_trace.jsonl").write_text(row % 5 + row % 3 + "nonsense\n")
    with pytest.raises(TraceError, match="line 2") as error:
        Setting(shelf=TraceShelf(tmp_path)).trace("conversation")
    assert "--" not in str(error.value)
    assert "on_error" not in str(error.value)


def test_requests_of_one_tick_come_as_the_parameters_say() -> None:
    parameters = Parameters.load()
    recorded = Setting(parameters.model_copy(update={"arrivals": Arrivals(value="recorded", reason="x")}))
    spread = Setting(parameters, shelf=recorded.shelf)
    assert parameters.arrivals.value == "spread"
    on_ticks, between = (setting.trace("conversation").arrival_s for setting in (recorded, spread))
    assert len(np.unique(on_ticks)) < len(on_ticks) / 2
    assert len(np.unique(between)) == len(between)
    assert 0 <= (between - on_ticks).min() <= (between - on_ticks).max() < 7
    assert recorded.origins == spread.origins


def test_origins_are_those_of_the_experiment_that_ran() -> None:
    def asks_for(name: str) -> Experiment:
        return Experiment(name, "", "", lambda setting: Result([Row(name, setting.trace(name).n_requests)]))

    setting = Setting()
    assert list(framework.run(asks_for("synthetic"), setting).origins) == ["synthetic"]
    assert list(framework.run(asks_for("conversation"), setting).origins) == ["conversation"]


# --- parameters ----------------------------------------------------------------------------------


def test_parameters_say_why_and_are_fitted_on_experiments_there_are() -> None:
    parameters = Parameters.load()
    assert all(len(chosen.reason) > 20 for _, chosen in parameters)
    assert parameters.fitted_on <= set(experiments())
    assert parameters.hardware.value in profiles()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unheard_of": {"value": 1, "reason": "x"}}, "unheard_of"),
        ({"max_batch": {"value": 0, "reason": "x"}}, "max_batch"),
        ({"max_batch": {"value": 4, "reason": ""}}, "reason"),
        ({"max_batch": {"value": 4, "reason": "x", "fitted": ["y"]}}, "fitted"),
    ],
)
def test_parameters_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Parameters.model_validate(Parameters.load().model_dump() | change)


def test_clusters_are_the_papers_nodes_with_the_parameters() -> None:
    parameters = Parameters.load()
    ours, builtin_one = parameters.mooncake("3p2d"), load_cluster("3p2d")
    assert (ours.n_prefill, ours.n_decode, ours.name) == (3, 2, "3p2d")
    as_they_are = ["base_s", "linear_s", "quadratic_s", "h2d_bytes_per_s", "nic_bytes_per_s"]
    assert (ours.parameters().prefill[as_they_are] == builtin_one.parameters().prefill[as_they_are]).all()
    decode = ours.parameters().decode[0]
    assert decode["step_request_s"] == parameters.step_request_s.value
    assert decode["step_token_s"] == parameters.step_token_s.value
    assert decode["kv_capacity_tokens"] == parameters.decode_kv_tokens.value
    throttled = parameters.mooncake("3p2d", nic_bytes_per_s=1e9, slo=Slo(ttft_s=10.0)).parameters()
    assert set(throttled.prefill["nic_bytes_per_s"]) == set(throttled.decode["nic_bytes_per_s"]) == {1e9}
    assert throttled.cluster["ttft_slo_s"][0] == 10
    for kind in ("16m", "16m-prefix", "4m-chunked"):
        ours_coupled, theirs = parameters.vllm(kind), load_coupled(f"vllm-{kind}")
        assert ours_coupled.n_instances == theirs.n_instances
        nodes = ours_coupled.parameters()[1]
        assert (nodes[["base_s", "prefix_cache"]] == theirs.parameters()[1][["base_s", "prefix_cache"]]).all()
        assert (nodes["chunk_tokens"] == (parameters.vllm_chunk_tokens.value if "chunked" in kind else 0)).all()
    for wrong in ("8", "p8d8", "8p8d8"):
        with pytest.raises(ValueError, match="8p8d"):
            parameters.mooncake(wrong)
        with pytest.raises(ValueError, match="16m"):
            parameters.vllm(wrong)


def test_every_number_reaches_a_cluster_a_policy_or_an_experiment() -> None:
    """A parameter that nothing reads would make the sensitivity table lie."""
    parameters = Parameters.load()

    def built(given: Parameters) -> str:
        clusters = [given.mooncake("1p1d"), given.vllm("1m"), given.vllm("1m-chunked")]
        policies = [given.policy("conductor"), given.policy("random", "early")]
        return " ".join([*(c.model_dump_json() for c in clusters), *policies])

    modules = [file.read_text() for file in Path(framework.__file__).parent.glob("*.py") if file.stem != "parameters"]
    for name in parameters.numbers:
        by_an_experiment = any(f"parameters.{name}.value" in text for text in modules)
        assert by_an_experiment or built(parameters.scaled(name, 0.5)) != built(parameters), name


# --- replays -------------------------------------------------------------------------------------


def test_a_request_alone_takes_what_the_formulas_say() -> None:
    cluster = Parameters.load().mooncake("1p1d", device_kv_tokens=0)
    times = cluster.prefill[0].profile.prefill
    cold = alone(cluster, 8192, 1)
    expected = times.base_s + times.linear_s * 8192 + times.quadratic_s * 8192**2
    assert cold["prefill_s"] == pytest.approx(expected, rel=1e-12)
    assert cold["reused_tokens"] == 0
    warm = alone(cluster, 10_000, 4, cached_share=0.5)
    assert warm["reused_tokens"] == 9 * 512  # whole blocks only
    assert warm["prefill_s"] < alone(cluster, 10_000, 4)["prefill_s"]
    assert warm["finish_s"] > warm["join_s"] > warm["kv_ready_s"] > warm["prefill_end_s"]


def test_hit_rate_is_reused_over_prompt_tokens() -> None:
    trace = builtin("synthetic", n_requests=300)
    result = replay(Parameters.load().mooncake("2p2d"), trace, "conductor+none")
    expected = np.minimum(result.outcomes["reused_tokens"], trace.input_tokens).sum() / trace.input_tokens.sum()
    assert 0 < hit_rate(result) == pytest.approx(expected)


# --- sensitivity ---------------------------------------------------------------------------------


def test_sensitivity_tells_the_verdicts_that_change() -> None:
    def go(setting: Setting) -> Result:
        theta = setting.parameters.balancing_threshold.value
        spread = setting.parameters.arrivals.value == "spread"
        judged = [
            Row("theta", theta, 1.5, Within(0.1)),
            Row("bursts", spread, 0, Within()),
            Row("other", 1, 1, Within()),
        ]
        return Result([*judged, Row("theta too", theta, 1.5)])

    it = Experiment("it", "", "", go)
    asked: list[str] = []

    def runs(these: Any, setting: Setting, what: str) -> list[Outcome]:
        asked.append(what)
        assert setting.quick
        return [framework.run(one, setting) for one in these]

    setting = Setting()
    flips = sensitivity([it], setting, runs)
    assert len(asked) == 1 + 2 * len(setting.parameters.numbers) + 1
    assert [(f.parameter, f.value, f.quantity, f.change) for f in flips] == [
        ("balancing_threshold", "x 0.5", "theta", "holds no more"),
        ("balancing_threshold", "x 2", "theta", "holds no more"),
        ("arrivals", "recorded", "bursts", "holds then"),
    ]
    wrong = replace(setting, parameters=setting.parameters.scaled("balancing_threshold", 2))
    back = sensitivity([it], wrong, runs)
    assert (back[0].parameter, back[0].value, back[0].change) == ("balancing_threshold", "x 0.5", "holds then")


# --- the papers' numbers, and every experiment ---------------------------------------------------


def test_the_papers_numbers_are_as_they_were_read(paper_series: Path) -> None:
    read = json.loads(paper_series.read_text())
    assert set(FIGURES.values()) == set(read)
    for figure, name in FIGURES.items():
        ours = paper(figure)
        for key, values in read[name].items():
            if key.startswith("released_trace_LRU"):
                assert ours["measured"]["toolagent"]["LRU"] == values
            elif key == "capacities":
                assert ours[key] == [float(value) for value in values]
            elif figure == "arxiv_fig11_12":
                assert ours[key] == {name: _rising(points) for name, points in values.items()}, key
            else:
                assert ours[key] == values, (figure, key)


def _rising(points: list[list[float]]) -> list[list[float]]:
    """A line without its last point where that goes back in x, which is not of the line."""
    return points if points[-1][0] > points[-2][0] else points[:-1]


def test_every_experiment_has_a_title_and_says_what_the_paper_did() -> None:
    found = experiments()
    assert len(found) >= 13
    for name, experiment in found.items():
        match = re.fullmatch(r"(arxiv|fast)_(fig|table)(\d+)\w*", name)
        assert match is not None
        assert experiment.title.lower().startswith(f"{match[1]} {match[2]}"), name
        assert str(int(match[3])) in experiment.title, name
        assert "paper" in experiment.text, name
        assert len(experiment.text) > 150, name
