"""Pictures of experiments: our curves, the papers' points over them."""

from __future__ import annotations

import io
import math
from typing import Any

from .experiment import Panel, Result, Series

# Okabe and Ito's colours, which colour-blind readers tell apart; the paper has a white ground for dark pages too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PANEL_INCHES = (4.6, 3.2)
DPI = 100


def draw(result: Result) -> bytes:
    """The panels of a result as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(len(result.panels), 2 if len(result.panels) % 3 else 3)
    down = -(-len(result.panels) // across)
    width, height = PANEL_INCHES
    figure, grid = pyplot.subplots(down, across, figsize=(width * across, height * down), squeeze=False)
    for axes in grid.flat[len(result.panels) :]:
        axes.axis("off")
    for axes, panel in zip(grid.flat, result.panels):
        _draw_panel(axes, panel)
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)
    return out.getvalue()


def _draw_panel(axes: Any, panel: Panel) -> None:
    names = list(dict.fromkeys(series.name for series in panel.series))
    bars = [series for series in panel.series if _has_words(series) and not series.of_paper]
    for series in panel.series:
        colour = COLOURS[names.index(series.name) % len(COLOURS)]
        if _has_words(series):
            _draw_bars(axes, series, colour, bars)
        else:
            _draw_line(axes, series, colour)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if panel.log_x:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis, axes.get_xlim())
    if panel.log_y:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis, axes.get_ylim())
    elif not any(value is not None and value < 0 for series in panel.series for value in series.y):
        axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3, axis="y" if bars else "both")
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, panel, names)


def _plain_ticks(axis: Any, limits: tuple[float, float]) -> None:
    """Numbers, not powers, on a logarithmic axis over few decades; more of them the fewer there are."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(limits[1] / limits[0])
    axis.set_minor_formatter(NullFormatter())
    if decades < 4:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.6 else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _has_words(series: Series) -> bool:
    return isinstance(series.x[0], str)


def _draw_line(axes: Any, series: Series, colour: str) -> None:
    y = [float("nan") if value is None else value for value in series.y]
    if series.of_paper:
        axes.plot(series.x, y, "o", ms=5, mfc="white", mec=colour, mew=1.4, zorder=3, clip_on=False)
    else:
        axes.plot(series.x, y, "-", color=colour, lw=1.8)


def _draw_bars(axes: Any, series: Series, colour: str, bars: list[Series]) -> None:
    words = [str(word) for word in bars[0].x]
    place = [other.name for other in bars].index(series.name)
    width = 0.8 / len(bars)
    x = [words.index(str(word)) + (place - (len(bars) - 1) / 2) * width for word in series.x]
    y = [float("nan") if value is None else value for value in series.y]
    if series.of_paper:
        axes.plot(x, y, "o", ms=5, mfc="white", mec="black", mew=1.4, zorder=3)
    else:
        axes.bar(x, y, 0.92 * width, color=colour)
        axes.set_xticks(range(len(words)), [word.replace("_", "\n") for word in words], fontsize=8)


def _legend(axes: Any, panel: Panel, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLOURS[i % len(COLOURS)], lw=3, label=name) for i, name in enumerate(names)]
    if any(series.of_paper for series in panel.series):
        handles.append(Line2D([], [], ls="", marker="o", ms=5, mfc="white", mec="black", label="paper"))
    if len(handles) > 1:
        axes.legend(handles=handles, fontsize=7, framealpha=0.8)
