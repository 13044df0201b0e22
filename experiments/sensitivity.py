"""Which verdicts rest on a number the papers leave out: each is halved and doubled, and everything run again.

On quick inputs, as everything runs some thirty times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from .experiment import Experiment, Outcome, Setting

FACTORS = (0.5, 2.0)

Runs = Callable[[Sequence[Experiment], Setting, str], list[Outcome]]
"""Runs experiments; the text says what for."""


class Flip(NamedTuple):
    """A verdict that changed."""

    parameter: str
    factor: float
    experiment: str
    quantity: str
    change: str


def sensitivity(chosen: Sequence[Experiment], setting: Setting, run: Runs) -> list[Flip]:
    """Run experiments with each parameter halved and doubled; what changed its verdict."""
    setting = replace(setting, quick=True)
    before = {
        (outcome.experiment.name, row.quantity): row.holds
        for outcome in run(chosen, setting, "as it is")
        for row in outcome.result.rows
    }
    flips = []
    for name in setting.parameters.numbers:
        for factor in FACTORS:
            changed = replace(setting, parameters=setting.parameters.scaled(name, factor))
            for outcome in run(chosen, changed, f"{name} x {factor:g}"):
                for row in outcome.result.rows:
                    held = before.get((outcome.experiment.name, row.quantity))
                    if held is not None and row.holds is not None and row.holds != held:
                        change = "holds no more" if held else "holds then"
                        flips.append(Flip(name, factor, outcome.experiment.name, row.quantity, change))
    return flips
