"""`docs/reproduction.md` and its pictures, written from results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .experiment import Outcome
from .parameters import Parameters
from .pictures import draw
from .report import HEADINGS, cells, number, origins, summary, verdicts
from .sensitivity import Flip

SENSITIVITY = "## Sensitivity"
DOCS = Path(__file__).resolve().parents[1] / "docs"

INTRODUCTION = """# The papers, reproduced

Every table and figure of Mooncake's papers that the simulator can be held to: ours beside the paper's. *arXiv* is
[2407.00079](https://arxiv.org/abs/2407.00079), *FAST* the FAST'25 paper. Written by

```console
$ python -m experiments --all --write --sensitivity --traces data
```

A row *holds* where ours lies within the tolerance; rows without one are context. A row is *fitted* where a
parameter was fitted on its figure, else *predicted*. In pictures, lines and bars are ours and points are the paper's.
"""


def write(outcomes: Sequence[Outcome], parameters: Parameters, flips: Sequence[Flip] | None, docs: Path) -> Path:
    """Write the page and its pictures into a folder; returns the page. Pictures of no experiment are removed.

    Without `flips`, which take long to find, the page keeps the sensitivity table it has.
    """
    pictures = docs / "reproduction"
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob("*.png"):
        old.unlink()
    parts = [INTRODUCTION, _overview(outcomes), _failures(outcomes, parameters), _parameters(parameters)]
    page = docs / "reproduction.md"
    parts.append(_kept_sensitivity(page) if flips is None else _sensitivity(flips))
    for outcome in outcomes:
        parts.append(_section(outcome, parameters))
        if outcome.result.panels:
            (pictures / f"{outcome.experiment.name}.png").write_bytes(draw(outcome.result))
    page.write_text("\n".join(filter(None, parts)))
    return page


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(texts: Sequence[str]) -> str:
        return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"

    return "\n".join([line(headings), line(["---"] * len(headings)), *(line(row) for row in rows)]) + "\n"


def _overview(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        counts = verdicts([outcome])
        name = outcome.experiment.name
        rows.append(
            (f"[{name}](#{name})", outcome.experiment.title, *(str(counts[key]) for key in (True, False, None)))
        )
    table = _table(("experiment", "", "hold", "do not hold", "context"), rows)
    return f"{table}\n{summary(outcomes)}.\n"


def _failures(outcomes: Sequence[Outcome], parameters: Parameters) -> str:
    rows = [
        (f"[{outcome.experiment.name}](#{outcome.experiment.name})", *cells(row, _fitted(outcome, parameters)))
        for outcome in outcomes
        for row in outcome.result.rows
        if row.holds is False
    ]
    return "## What does not hold\n\nThe sections of the experiments say why.\n\n" + _table(("", *HEADINGS), rows)


def _fitted(outcome: Outcome, parameters: Parameters) -> bool:
    return outcome.experiment.name in parameters.fitted_on


def _parameters(parameters: Parameters) -> str:
    rows = [
        (
            f"`{name}`",
            number(chosen.value) if isinstance(chosen.value, float) else chosen.value,
            chosen.reason.strip(),
            ", ".join(chosen.fitted_on),
        )
        for name, chosen in parameters
    ]
    return (
        "## Parameters\n\nWhat the papers leave out is chosen once for all experiments "
        "([experiments/parameters.yaml](../experiments/parameters.yaml)).\n\n"
        + _table(("parameter", "value", "reason", "fitted on"), rows)
    )


def _sensitivity(flips: Sequence[Flip]) -> str:
    quantities: dict[tuple[str, str, str, str], list[str]] = {}
    for flip in flips:
        which = (f"`{flip.parameter}`", flip.value, flip.experiment, flip.change)
        quantities.setdefault(which, []).append(flip.quantity)
    rows = [(*which, "; ".join(changed)) for which, changed in quantities.items()]
    return (
        f"{SENSITIVITY}\n\nVerdicts that change when one parameter is halved or doubled, or chosen otherwise; on quick "
        "inputs.\n\n"
        + (_table(("parameter", "is then", "experiment", "verdict", "quantities"), rows) if rows else "None.\n")
    )


def _kept_sensitivity(page: Path) -> str:
    """The section of a page as it was last written with one."""
    text = page.read_text() if page.is_file() else ""
    start = text.find(f"{SENSITIVITY}\n")
    return "" if start < 0 else text[start:].partition("\n## ")[0]


def _section(outcome: Outcome, parameters: Parameters) -> str:
    experiment = outcome.experiment
    parts = [f"## {experiment.name}\n\n**{experiment.title}**\n\n{experiment.text}\n"]
    if outcome.result.panels:
        parts.append(f"![{experiment.title}](reproduction/{experiment.name}.png)\n")
    fitted = _fitted(outcome, parameters)
    judged = [cells(row, fitted) for row in outcome.result.rows if row.holds is not None]
    context = [cells(row, fitted) for row in outcome.result.rows if row.holds is None]
    if judged:
        parts.append(_table(HEADINGS, judged))
    if context:
        parts.append(
            f"<details><summary>{len(context)} rows of context</summary>\n\n{_table(HEADINGS, context)}\n</details>\n"
        )
    if outcome.origins:
        parts.append(f"Traces: {origins(outcome)}.\n")
    parts += [f"{remark}\n" for remark in outcome.result.remarks]
    return "\n".join(parts)
