"""A picture of an episode so far: the load of both pools over time, and what became of the requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .spec import ClusterSpec
from .state import Records, Status


def draw_load(history: NDArray[np.float64], outcomes: Records, spec: ClusterSpec) -> NDArray[np.uint8]:
    """Draw `history` [n, 5]: time, mean prefill queue (s), mean predicted TBT (s), in flight, rejected so far.

    Returns uint8[600, 900, 3].
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    load, flight, latency = figure.subplots(3, 1, sharex=True)
    time_s = history[:, 0]
    load.plot(time_s, history[:, 1] / spec.slo.ttft_s, label="prefill: mean queue / TTFT SLO")
    load.plot(time_s, history[:, 2] / spec.slo.tbt_s, label="decode: mean TBT / TBT SLO")
    load.axhline(1.0, color="0.6", linewidth=0.8)
    load.set_ylabel("load")
    load.legend(loc="upper left", fontsize=8)
    flight.plot(time_s, history[:, 3], label="in flight")
    flight.plot(time_s, history[:, 4], label="rejected so far")
    flight.set_ylabel("requests")
    flight.legend(loc="upper left", fontsize=8)
    done = outcomes[outcomes["status"] == Status.COMPLETED]
    for good, color, label in ((1, "tab:green", "good"), (0, "tab:red", "violated")):
        rows = done[done["good"] == good]
        latency.scatter(rows["prefill_end_s"], rows["ttft_s"], s=4, color=color, label=f"{label} ({len(rows)})")
    latency.axhline(spec.slo.ttft_s, color="0.6", linewidth=0.8)
    latency.set_yscale("log")
    latency.set_ylabel("TTFT (s)")
    latency.set_xlabel("time (s)")
    latency.legend(loc="upper left", fontsize=8)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()  # type: ignore[no-untyped-call]
