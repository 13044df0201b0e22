"""Which verdicts rest on what the papers leave out: each number is halved and doubled, and everything run again.

Quick, as everything runs some forty times and pictures are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from .experiment import Experiment, Outcome, Setting

Runs = Callable[[Sequence[Experiment], Setting, str], list[Outcome]]
"""Runs experiments; the text says what for."""


class Flip(NamedTuple):
    """A verdict that changed."""

    parameter: str
    value: str
    experiment: str
    quantity: str
    change: str


def sensitivity(chosen: Sequence[Experiment], setting: Setting, run: Runs) -> list[Flip]:
    """Run experiments with each of `Parameters.variations`; what changed its verdict."""
    setting = replace(setting, quick=True)
    before = {
        (outcome.experiment.name, row.quantity): row.holds
        for outcome in run(chosen, setting, "as it is")
        for row in outcome.result.rows
    }
    flips = []
    for name, value, parameters in setting.parameters.variations():
        for outcome in run(chosen, replace(setting, parameters=parameters), f"{name} {value}"):
            for row in outcome.result.rows:
                held = before.get((outcome.experiment.name, row.quantity))
                if held is not None and row.holds is not None and row.holds != held:
                    change = "holds no more" if held else "holds then"
                    flips.append(Flip(name, value, outcome.experiment.name, row.quantity, change))
    return flips
