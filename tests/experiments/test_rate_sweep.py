"""arXiv Figs 11 and 12: the last passing rates, the paper's and ours."""

from __future__ import annotations

import pytest

from experiments.experiment import Setting, experiments
from experiments.rate_sweep import Curve, compare, curve, published, rates_of


def test_rates_pass_from_the_lowest_on_while_both_are_within() -> None:
    assert Curve([0.1, 0.5, 1.0], [0.2, 0.2, 0.2]).passing == 3
    assert Curve([0.1, 1.1, 0.9], [0.2, 0.2, 0.2]).passing == 1
    assert Curve([0.1, 0.5, 0.9], [0.2, 0.2, 1.1]).passing == 2
    assert Curve([1.1], [0.2]).passing == 0


@pytest.mark.parametrize(
    ("key", "vllm", "three", "two"),
    [
        ("ArXiv", 2.5, 3.0, 1.5),
        ("LEval", 0.5, 0.8, 1.0),
        ("sim16k", 0.2, 1.25, 1.0),
        ("sim32k", 0.2, 0.6, 0.6),
        ("sim64k", 0.2, 0.3, 0.3),
        ("sim128k", 0.12, 0.14, 0.12),
    ],
)
def test_the_papers_last_rates(key: str, vllm: float, three: float, two: float) -> None:
    rates = rates_of(key)
    assert rates == sorted(rates)
    for system, last in (("vLLM-4M", vllm), ("3P+1D", three), ("2P+2D", two)):
        assert rates[published(key, system, rates).passing - 1] == last


def test_a_curve_starts_at_the_slos_own_measure() -> None:
    setting = Setting()
    cluster = setting.parameters.vllm("4m", max_batch=1)
    found = curve(setting, "simulated-16k", cluster, [0.1, 0.5])
    assert (found.ttft[0], found.tbt[0]) == (pytest.approx(0.1), pytest.approx(0.2))
    assert found.ttft[1] > 1  # 4 nodes, one at a time, serve about 0.25 a second
    assert found.tbt[1] == pytest.approx(0.2, rel=0.02)


def test_a_system_that_never_passes_has_no_gain() -> None:
    good, bad = Curve([0.1, 0.2], [0.2, 0.2]), Curve([1.5, 2.0], [0.2, 0.2])
    rows, _ = compare("x", [1.0, 2.0], {"a": bad, "b": good}, {"a": good, "b": good})
    assert rows[0].ours == 0.0 and rows[0].holds is False
    assert rows[1].ours == 2.0 and rows[1].holds
    assert rows[2].ours != rows[2].ours


def test_last_rates_within_one_step_of_the_papers() -> None:
    for name, fails in (
        ("arxiv_fig11_public_datasets", ["l-eval, last RPS within the SLOs, 3P+1D"]),
        ("arxiv_fig12_long_contexts", []),
    ):
        rows = [row for row in experiments()[name].run(Setting()).rows if row.holds is not None]
        assert len(rows) in (4, 8)
        assert [row.quantity for row in rows if not row.holds] == fails
