"""arXiv Table 3 and Fig 9: overload, and the loads of the pools in it."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.arxiv_fig09_load_fluctuation import EVERY, WARM_UP_S, Loads, loads_over_time
from experiments.arxiv_table3_overload import CLUSTER, SPEED
from experiments.experiment import Setting, experiments


def test_correlation_at_a_lag() -> None:
    wave = np.sin(np.arange(100.0))
    loads = Loads(np.arange(100.0), wave, np.roll(wave, 3))
    assert loads.correlation(3) == pytest.approx(1.0)
    assert loads.correlation(0) == pytest.approx(np.cos(3.0), abs=0.05)


def test_loads_are_means_over_equal_intervals_after_the_warm_up() -> None:
    setting = Setting()
    loads = loads_over_time(setting, "toolagent", CLUSTER, SPEED, "early", 15.0)
    assert loads.time_s[0] == WARM_UP_S
    assert set(np.diff(loads.time_s)) == {15.0}
    trace = setting.trace("toolagent")
    assert loads.time_s[-1] + 15.0 >= (trace.arrival_s[-EVERY] - trace.arrival_s[0]) / 2
    assert (loads.prefill >= 0).all()
    assert 0.5 < loads.decode.mean() < 1.1


def test_early_rejection_saves_and_the_forecast_saves_more() -> None:
    rows = experiments()["arxiv_table3_overload"].run(Setting()).rows
    assert sum(row.holds is True for row in rows) == 7
    assert not any(row.holds is False for row in rows)


def test_loads_are_in_anti_phase_and_the_forecast_calms_them() -> None:
    rows = experiments()["arxiv_fig09_load_fluctuation"].run(Setting()).rows
    verdicts = {row.quantity: row.holds for row in rows if row.holds is not None and "5p15d" not in row.quantity}
    assert verdicts == {
        "correlation of the loads, early": True,
        "size of the correlation, predictive less early": True,
        "spread of prefill's load, predictive / early": True,
        "spread of decode's load, predictive / early": False,
    }
