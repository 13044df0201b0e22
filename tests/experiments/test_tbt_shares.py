"""FAST Fig 6 and arXiv Fig 13: how shares are counted, and what holds on the released traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from envs.metrics import Replay
from envs.state import OUTCOME, Status
from experiments.experiment import Result, Setting, TraceShelf, experiments
from experiments.fast_fig06_tbt_shares import share_within


def test_a_request_counts_when_it_completed_with_both_in_time() -> None:
    outcomes = np.zeros(5, OUTCOME)
    outcomes["status"] = Status.COMPLETED
    outcomes["ttft_s"] = [1.0, 1.0, 31.0, 1.0, 1.0]
    outcomes["tbt_s"] = [0.1, 0.2, 0.1, 0.1, 0.1]
    outcomes["status"][3:] = (Status.REJECTED_AT_ARRIVAL, Status.REJECTED_AT_DECODE)
    result = Replay(np.zeros(5), np.ones(5, np.int32), np.ones(5, np.int32), outcomes, 512)
    assert share_within(result, 100) == pytest.approx(20)
    assert share_within(result, 200) == pytest.approx(40)
    assert share_within(result, np.inf, np.inf) == pytest.approx(60)


def result_of(name: str, traces: Path) -> Result:
    return experiments()[name].run(Setting(shelf=TraceShelf(traces)))


def test_tbt_shares_of_the_released_traces(real_traces: Path) -> None:
    result = result_of("fast_fig06_tbt_shares", real_traces)
    judged = [row for row in result.rows if row.holds is not None]
    assert len(judged) == 11
    assert [row.quantity for row in judged if not row.holds] == ["toolagent, % within 100 ms, vllm"]
    gains = {row.quantity: row for row in result.rows if row.quantity.startswith("conversation, gain")}
    ours = [gains[f"conversation, gain % over vllm within {ms} ms"].ours for ms in (100, 200, 300)]
    assert ours[0] > ours[1] > ours[2] > 0


def test_the_real_workload(real_traces: Path) -> None:
    rows = result_of("arxiv_fig13_real_workload", real_traces).rows
    assert [row.quantity for row in rows if row.holds is False] == []
    assert sum(row.holds is True for row in rows) == 4
    more = next(row for row in rows if row.quantity == "% more requests within both SLOs")
    assert more.ours == pytest.approx(75, abs=20)
