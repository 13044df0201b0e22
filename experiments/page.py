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
WRITES_ALL = "python -m experiments --all --write --sensitivity"
DOCS = Path(__file__).resolve().parents[1] / "docs"

INTRODUCTION = f"""# The papers, reproduced

Every table and figure of Mooncake's papers that the simulator can be held to: ours beside the paper's. *arXiv* is
[2407.00079](https://arxiv.org/abs/2407.00079), *FAST* the FAST'25 paper. Written by
`{WRITES_ALL}` ([Reproduce the papers](reproduce.md)).

A row *holds* where ours lies within the tolerance; rows without one are context. A row is *fitted* where a
parameter was fitted on its figure, else *predicted*. In pictures, lines and bars are ours and points are the paper's.
What the sections and their remarks say is of the released traces and of the parameters below: with stand-ins or other
parameters, the tables may say otherwise.
"""


def write(outcomes: Sequence[Outcome], parameters: Parameters, flips: Sequence[Flip] | None, docs: Path) -> Path:
    """Write the page and its pictures into a folder; returns the page. Pictures of no experiment are removed.

    All is drawn before the first file is replaced. Without `flips`, which take long to find, the page keeps the
    sensitivity table it has.
    """
    page, pictures = docs / "reproduction.md", docs / "reproduction"
    drawn = {
        pictures / f"{outcome.experiment.name}.png": draw(outcome.result)
        for outcome in outcomes
        if outcome.result.panels
    }
    parts = [INTRODUCTION, _overview(outcomes), _failures(outcomes, parameters), _parameters(parameters)]
    parts.append(_kept_sensitivity(page) if flips is None else _sensitivity(flips))
    parts += [_section(outcome, parameters) for outcome in outcomes]
    pictures.mkdir(parents=True, exist_ok=True)
    for file, picture in drawn.items():
        _replace(file, picture)
    _replace(page, "\n".join(filter(None, parts)).encode())
    for file in set(pictures.glob("*.png")) - set(drawn):
        file.unlink()
    return page


def _replace(file: Path, content: bytes) -> None:
    """At no time is there half a file."""
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_bytes(content)
    temporary.replace(file)


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
    context = "Rows of context have no tolerance: they count as neither, and may differ widely from the paper's."
    return f"{table}\n{summary(outcomes)}. {context}\n"


def _failures(outcomes: Sequence[Outcome], parameters: Parameters) -> str:
    rows = [
        (f"[{outcome.experiment.name}](#{outcome.experiment.name})", *cells(row, _fitted(outcome, parameters)))
        for outcome in outcomes
        for row in outcome.result.rows
        if row.holds is False
    ]
    text = "The sections of the experiments say what is known of why."
    return f"## What does not hold\n\n{text}\n\n" + _table(("", *HEADINGS), rows)


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
        "(`experiments/parameters.yaml`).\n\n" + _table(("parameter", "value", "reason", "fitted on"), rows)
    )


def _sensitivity(flips: Sequence[Flip]) -> str:
    quantities: dict[tuple[str, str, str, str], list[str]] = {}
    for flip in flips:
        which = (f"`{flip.parameter}`", flip.value, flip.experiment, flip.change)
        quantities.setdefault(which, []).append(flip.quantity)
    rows = [(*which, "; ".join(changed)) for which, changed in quantities.items()]
    table = _table(("parameter", "is then", "experiment", "verdict", "quantities"), rows) if rows else "None.\n"
    return _sensitivity_of(table, f"Found with this page, by `{WRITES_ALL}`, for the parameters above.")


def _sensitivity_of(table: str, found: str) -> str:
    text = "Verdicts that change when one parameter is halved or doubled, or chosen otherwise."
    return f"{SENSITIVITY}\n\n{text}\n{found}\n\n{table}"


def _kept_sensitivity(page: Path) -> str:
    """The section with the table of the page as it was last written with one, and that it is older than the rest."""
    text = page.read_text() if page.is_file() else ""
    start = text.find(f"{SENSITIVITY}\n")
    if start < 0:
        return ""
    table = text[start:].partition("\n## ")[0].rstrip().rpartition("\n\n")[2]
    found = f"Kept from an earlier run of `{WRITES_ALL}`: it may be of other parameters than those above."
    return _sensitivity_of(f"{table}\n", found)


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
