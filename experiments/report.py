"""Results as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .experiment import Outcome, Row, Setting, Within
from .parameters import Parameters
from .sensitivity import Flip

HEADINGS = ("quantity", "ours", "paper", "difference", "tolerance", "verdict", "")
VERDICTS = {True: "holds", False: "does not hold", None: "context"}


def cells(row: Row, fitted: bool) -> tuple[str, ...]:
    """A row as text, in the order of `HEADINGS`."""
    return (
        row.quantity,
        number(row.ours),
        "" if row.paper is None else number(row.paper),
        "" if row.difference is None else signed(row.difference),
        "" if row.tolerance is None else str(row.tolerance),
        VERDICTS[row.holds],
        "fitted" if fitted else "predicted",
    )


def number(value: float) -> str:
    """Four digits that count, or all of a larger number's."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def signed(value: float) -> str:
    return ("+" if value >= 0 else "-") + f"{abs(value):.3g}"


def verdicts(outcomes: Iterable[Outcome]) -> dict[bool | None, int]:
    """How many rows hold, do not hold, and have no verdict."""
    counts: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    for outcome in outcomes:
        for row in outcome.result.rows:
            counts[row.holds] += 1
    return counts


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
    counts = verdicts(outcomes)
    held = f"{counts[True]} rows hold, {counts[False]} do not hold, {counts[None]} are context"
    return f"{len(outcomes)} experiments: {held}"


def origins(outcome: Outcome) -> str:
    """Where an experiment's traces came from."""
    return "; ".join(f"{name}: {origin}" for name, origin in sorted(outcome.origins.items()))


def print_tables(outcomes: Sequence[Outcome], parameters: Parameters) -> None:
    """One table for each experiment on stdout, and a summary line."""
    from rich.console import Console
    from rich.table import Table

    tables = []
    for outcome in outcomes:
        fitted = outcome.experiment.name in parameters.fitted_on
        table = Table(title=f"{outcome.experiment.name}: {outcome.experiment.title}", title_justify="left")
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if 1 <= i <= 3 else "left", no_wrap=True)
        for row in outcome.result.rows:
            table.add_row(*cells(row, fitted), style="bold" if row.holds is False else None)
        tables.append(table)
    console = Console()
    wide = Console(width=10_000)
    needed = max((wide.measure(table).maximum for table in tables), default=0)
    console = Console(width=max(needed, console.width), highlight=False)
    for outcome, table in zip(outcomes, tables):
        console.print(table)
        if outcome.origins:
            console.print(f"traces: {origins(outcome)}", markup=False)
        for remark in outcome.result.remarks:
            console.print(remark, markup=False)
        console.print()
    console.print(summary(outcomes), markup=False)


def print_flips(flips: Sequence[Flip]) -> None:
    """The sensitivity table on stdout."""
    print("\nverdicts that change when a parameter that the papers leave out is another:")
    for flip in flips:
        print(f"  {flip.parameter} {flip.value}: {flip.experiment}: {flip.quantity}: {flip.change}")
    if not flips:
        print("  none")


def as_json(outcomes: Sequence[Outcome], setting: Setting, flips: Sequence[Flip] | None = None) -> str:
    """`{"rows": [...], "traces": {experiment: {trace: origin}}, "quick": bool, "flips": [...] or null}`.

    A row: `{experiment, quantity, ours, paper, tolerance, holds, fitted}`; `tolerance` is a number where ours may
    differ from the paper's by so much, else text (`>= 0.95`); null with `holds`. A flip: the fields of `Flip`.
    """
    rows = [
        {
            "experiment": outcome.experiment.name,
            "quantity": row.quantity,
            "ours": _finite(row.ours),
            "paper": None if row.paper is None else _finite(row.paper),
            "tolerance": _tolerance(row),
            "holds": row.holds,
            "fitted": outcome.experiment.name in setting.parameters.fitted_on,
        }
        for outcome in outcomes
        for row in outcome.result.rows
    ]
    document = {
        "rows": rows,
        "traces": {outcome.experiment.name: outcome.origins for outcome in outcomes},
        "quick": setting.quick,
        "flips": None if flips is None else [flip._asdict() for flip in flips],
    }
    return json.dumps(document, indent=1)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _tolerance(row: Row) -> Any:
    if isinstance(row.tolerance, Within) and row.paper is not None:
        return row.tolerance.absolute + row.tolerance.share * abs(row.paper)
    return None if row.tolerance is None else str(row.tolerance)
