"""What `leaderboard.py` shows: tables of policies in cells, tables of a decision log, curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.metrics import Interval

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from leaderboard import LogResult, Result

COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("rejected\narrival", "rejected_at_arrival", 0),
    ("rejected\ndecode", "rejected_at_decode", 0),
    ("vio-\nlated", "violated", 0),
    ("wasted\nprefill s", "wasted_prefill_s", 0),
    ("TTFT\nmean s", "ttft_mean_s", 2),
    ("TTFT\np90 s", "ttft_p90_s", 2),
    ("TBT\np90 s", "tbt_p90_s", 3),
    ("hit\nrate", "hit_rate", 3),
    ("decision\nµs", "decision_us", 1),
)
"""Heading, key of the row, digits."""
FIGURES_WIDTH = 112
"""Characters a table needs beside the policies' names; a narrower terminal wraps its lines."""


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    return table


def print_tables(result: Result, console: Console) -> None:
    """One table per cell, the sustained loads, then what the figures mean and who won."""
    for comparison in result.cells:
        rows = [row for row in result.rows if row["cell"] == comparison["cell"]]
        named = "" if comparison["cell"] == comparison["description"] else f"{comparison['cell']}: "
        table = _table(f"{named}{comparison['description']}: {rows[0]['offered']:.0f} requests")
        table.add_column("goodput", justify="right")
        table.add_column("95 %\ninterval", justify="right", no_wrap=True)
        for heading, _, _ in COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                row["policy"],
                f"{row['goodput']:.4f}",
                f"{row['goodput_low']:.3f}-{row['goodput_high']:.3f}",
                *(_figure(row[key], digits) for _, key, digits in COLUMNS),
            )
        console.print(table)
        if "bound" in comparison:
            console.print(f"no policy: more than {comparison['bound']:.4f} (upper bound)", highlight=False)
        _print_verdict(comparison, console)
        console.print()
    if "load_at_90" in result.rows[0]:
        _print_sustained(result, console)
    _print_footer(result, console)


def _figure(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _print_sustained(result: Result, console: Console) -> None:
    """The highest loads; equal in all cells of a setting."""
    keys = [key for key in result.rows[0] if key.startswith("load_at_") and not key.endswith("_note")]
    for setting in dict.fromkeys(row["setting"] for row in result.rows):
        of_setting = {r["policy"]: r for r in result.rows if r["setting"] == setting}
        table = _table(f"{setting}: highest load that meets both SLOs for")
        for key in keys:
            table.add_column(f"{key.removeprefix('load_at_')} % of requests", justify="right")
        for row in sorted(of_setting.values(), key=lambda row: -(row[keys[0]] or 0.0)):
            loads = [row[f"{key}_note"] if row[key] is None else f"{row[key]:.2f}" for key in keys]
            table.add_row(row["policy"], *loads)
        console.print(table)


def _print_verdict(comparison: dict[str, Any], console: Console) -> None:
    paired = comparison["paired"]
    if paired is None:
        return
    difference = (
        f"{paired['policy']} minus {paired['baseline']}: {paired['mean']:+.4f} "
        f"[{paired['low']:+.4f}, {paired['high']:+.4f}]"
    )
    if comparison["winner"]:
        console.print(
            f"winner: {comparison['winner']} ({difference})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    else:
        console.print(
            f"no winner: intervals overlap ({difference})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _print_footer(result: Result, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True, style="dim")

    for capacity in result.capacities:
        say(f"capacity of {capacity['setting']}: load {capacity['load']:.4g}, {capacity['meaning']}")
    if len(result.cells) > 1 and result.paired is not None:
        say(
            f"over all {len(result.cells)} cells: {_minus_best(result.paired)}; "
            + (f"winner: {result.winner}" if result.winner else "no winner: intervals overlap")
        )
    if result.paired_saturated is not None:
        say(f"over the cells at or past capacity: {_minus_best(result.paired_saturated)}")
    if len(result.cells) > 1 and result.worst is not None:
        say(f"worst cell, {result.worst['cell']}: {_minus_best(result.worst)}, {result.worst['relative']:+.2%} of it")
    if "bound" in result.cells[0]:
        mean = np.mean([cell["bound"] for cell in result.cells])
        say(f"at most {mean:.4f} (upper bound) in the mean over cells. {result.about['notes']['bound']}")
    for each in result.about["disqualified"]:
        console.print(
            f"disqualified: {each['policy']}: {each['reason']}", highlight=False, markup=False, soft_wrap=True
        )
    for key in ("goodput", "seeds", "method", "decision_us", "submissions"):
        if key in result.about["notes"]:
            say(str(result.about["notes"][key]))
    say(f"code {result.about['code_version']}")


def as_markdown(result: Result, command: str) -> str:
    """The result as two tables for a document: policies over all cells, and the first policy cell by cell.

    Args:
        command: the command line that it comes from.
    """
    names = list(dict.fromkeys(row["policy"] for row in result.rows))
    goodput = {(row["policy"], row["cell"]): float(row["goodput"]) for row in result.rows}
    cells = [cell["cell"] for cell in result.cells]
    past = [row["cell"] for row in result.rows if (row.get("times_capacity") or 0.0) >= 1.0]

    def mean(name: str, among: list[str]) -> float:
        return float(np.mean([goodput[name, cell] for cell in among])) if among else math.nan

    lines = [f"`{command}`, code {result.about['code_version']}", ""]
    lines += ["| policy | goodput, mean of all cells | at or past capacity | µs per decision |", "|---|---|---|---|"]
    spent = {row["policy"]: row["decision_us"] for row in result.rows}
    for name in sorted(names, key=lambda name: -mean(name, cells)):
        lines.append(f"| `{name}` | {mean(name, cells):.4f} | {mean(name, past):.4f} | {spent[name]:.1f} |")
    for each in result.about["disqualified"]:
        lines += ["", f"Disqualified: `{each['policy']}`: `{each['reason'].replace('`', ' ')}`"]
    if result.paired is not None and result.worst is not None:
        lines += ["", f"Over all {len(cells)} cells {_minus_best(result.paired)}."]
        if result.paired_saturated is not None:
            lines[-1] += f" At or past capacity: {_minus_best(result.paired_saturated)}."
        first, best = result.paired["policy"], result.paired["baseline"]
        lines += ["", f"| cell | `{first}` | `{best}` | difference | best of the others there | difference |"]
        lines.append("|---|---|---|---|---|---|")
        for cell in result.cells:
            there = cell["first"]
            ours, theirs = goodput[first, cell["cell"]], goodput[best, cell["cell"]]
            bound = f" (at most {cell['bound']:.3f})" if "bound" in cell else ""
            lines.append(
                f"| {cell['cell']}{bound} | {ours:.4f} | {theirs:.4f} | {_interval(cell['against_best'])} | "
                f"`{there['baseline'].partition(':')[0]}…` | {_interval(there)} |"
            )
    return "\n".join(lines) + "\n"


def _interval(paired: dict[str, Any]) -> str:
    return f"{paired['mean']:+.4f} [{paired['low']:+.4f}, {paired['high']:+.4f}]"


def _minus_best(paired: dict[str, Any]) -> str:
    return (
        f"{paired['policy']} minus the best of the others, {paired['baseline']}: "
        f"{paired['mean']:+.4f} [{paired['low']:+.4f}, {paired['high']:+.4f}]"
    )


# --- of a decision log ---------------------------------------------------------------------------

OTHER_LOAD = 0.05
"""Difference in the share of requests taken above which it is pointed out."""
LOG_WIDTH = 155
"""Characters the tables of a log need beside the policies' names."""


def print_log(result: LogResult, console: Console) -> None:
    """What was logged, one row per policy, the simulator's bias, and what the figures mean."""

    def say(text: str, style: str = "") -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True, style=style)

    log = result.log
    decided = ", ".join(f"{name or '(nobody)'} {count}" for name, count in log["policies"].items())
    say(f"{log['requests']} requests in {log['duration_s']:.0f} s, goodput {_span(log['goodput'])}")
    say(f"decided by {decided}; {log['drawn']} of them drawn with a probability below 1")
    missing = ("fell_back", "outcome_unknown", "output_unknown", "not_observed")
    say("; ".join(f"{label.replace('_', ' ')}: {log[label]}" for label in missing))
    table = _table("agreement with the logged decisions")
    for heading in ("all", "accept", "prefill", "decode", "source"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(row["policy"], *(_span(interval) for interval in row["agreement"].values()))
    console.print(table)
    table = _table("goodput")
    headings = ("IPS", "effective\nrequests", "DR", "direct", "replay", "replay minus\nlogged policy's", "corrected")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        replay = row.get("replay", {})
        simulated = [_span(replay.get(k), signed=k == "difference") for k in ("goodput", "difference", "corrected")]
        estimates = [_span(row[key].interval) if row[key].interval else "none" for key in ("ips", "dr", "direct")]
        estimates.insert(1, _figure(row["ips"].effective, 0))
        table.add_row(row["policy"], *estimates, *simulated)
    console.print(table)
    for row in result.rows:
        for key in ("ips", "direct"):
            if row[key].why_not:
                say(f"{row['policy']}: {'IPS, DR' if key == 'ips' else 'direct'}: {row[key].why_not}")
        ours, theirs = row["takes"].mean, log["takes"].mean
        if abs(ours - theirs) > OTHER_LOAD:
            say(
                f"{row['policy']}: takes {ours:.0%} of requests where the log took {theirs:.0%}; what that does to the "
                "load is in the replay only"
            )
        if row.get("beyond_logged", 0.0) > 0.01:
            say(f"{row['policy']}: {row['beyond_logged']:.0%} of its choices have a predicted TTFT beyond any logged")
    model = result.model
    if model is None:
        say(f"no replay: {result.no_model}")
    else:
        say(
            f"the model's bias: {model['policy']}, who decided {model['share_decided']:.0%}, has on {model['cluster']} "
            f"goodput {_span(model['goodput_simulated'])} simulated, {_span(model['goodput_logged'])} logged: "
            f"{_span(model['bias'], signed=True)}; mean TTFT {_figure(model['ttft_simulated_s'], 3)} s and "
            f"{_figure(model['ttft_logged_s'], 3)} s"
        )
    for note in result.about["notes"].values():
        say(note, "dim")
    say(f"code {result.about['code_version']}", "dim")


def _span(interval: Interval | None, *, signed: bool = False) -> str:
    """An interval as text."""
    if interval is None or not math.isfinite(interval.mean):
        return "-"
    sign = "+" if signed else ""
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


# --- curves --------------------------------------------------------------------------------------


def plot(result: Result, file: str) -> None:
    """Attainment over load, one panel per setting, a band for the interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result.rows:
        groups.setdefault(row["setting"], []).append(row)
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(8.5 * len(groups), 4.5), squeeze=False, layout="constrained"
    )
    for panel, (title, rows) in zip(panels[0], groups.items(), strict=True):
        names = sorted({row["policy"] for row in rows})
        colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
        for i, name in enumerate(names):
            line = sorted((r for r in rows if r["policy"] == name), key=lambda r: float(r["load"]))
            loads = [r["load"] for r in line]
            colour, mark = colours[2 * i % 20 + i // 10 % 2], "osv^D"[i // 4 % 5]
            goodputs = [r["goodput"] for r in line]
            panel.plot(loads, goodputs, marker=mark, ms=4, label=name, color=colour)
            low, high = [r["goodput_low"] for r in line], [r["goodput_high"] for r in line]
            panel.fill_between(loads, low, high, color=colour, alpha=0.1, lw=0)
        panel.axhline(0.9, color="grey", lw=0.7, ls="--")
        panel.set(title=title, xlabel="load (x the trace's speed)", ylabel="goodput", ylim=(0, 1.01))
        panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(file, dpi=140)
    pyplot.close(figure)
