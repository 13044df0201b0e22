"""ServeGen (Alibaba, arXiv 2505.09999): statistics of clients, which requests are sampled from.

`chunk-N-trace.csv` of client N has no header; a row is a window: `start (s), rate (requests/s), cv, pattern, arg1,
arg2`, the pattern of the gaps `Gamma` (shape, scale), `Weibull` (shape, scale) or empty where the client is idle.
`chunk-N-dataset.json` is `{"start (s)": {"input_tokens": "{length: probability, ...}", "output_tokens": ...}}`, in
longer windows; an empty distribution means that nothing was measured then.

Names may have something in front (`servegen_language_m-small_chunk-0-trace.csv.gz`); plain, gzip or zstd.
"""

from __future__ import annotations

import csv
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from traces.arrivals import Kind, Renewal
from traces.formats.rows import KEPT_REASONS, MAX_TOKENS, OnError, read_bytes, show
from traces.trace import DEFAULT_BLOCK_TOKENS, Trace, TraceError

if TYPE_CHECKING:
    from traces.synthesis import WorkloadProfile

PATTERNS: dict[str, Kind] = {"Gamma": "gamma", "Weibull": "weibull"}
LENGTHS = ("input_tokens", "output_tokens")
_FILE = re.compile(r"(?P<prefix>.*)chunk-(?P<client>\d+)-(?P<kind>trace\.csv|dataset\.json)(\.gz|\.zst)?")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """A client over [start_s, stop_s): requests per second, and how their gaps spread. None: idle."""

    start_s: float
    stop_s: float
    rate: float
    gaps: Renewal | None


@dataclass(frozen=True)
class Client:
    """One client's files, read."""

    number: int
    windows: list[Window]
    dataset: Path
    lengths: dict[float, dict[str, str]]
    """Window start -> distribution by name, as text: most are never needed."""

    def distributions(self, at_s: float) -> dict[str, tuple[NDArray[np.int64], Floats]]:
        """Lengths and probabilities at a time: of the latest window begun by then that has any, else of the first.

        Raises:
            TraceError: a damaged distribution, or no window has any.
        """
        known = [start for start, parts in self.lengths.items() if all(parts[name].strip("{} ") for name in LENGTHS)]
        if not known:
            raise TraceError("every distribution is empty", file=self.dataset, expected="lengths in some window")
        start = max((s for s in known if s <= at_s), default=known[0])
        return {name: _distribution(self.lengths[start][name], self.dataset, f"{start:g}.{name}") for name in LENGTHS}


def is_client(path: Path) -> bool:
    """Whether a file is called as ServeGen calls those of a client."""
    return _FILE.fullmatch(path.name) is not None


def is_folder(folder: Path) -> bool:
    """Whether a folder holds ServeGen's clients."""
    return folder.is_dir() and any(match["kind"] == "trace.csv" for match in map(_match, folder.iterdir()) if match)


def _match(path: Path) -> re.Match[str] | None:
    return _FILE.fullmatch(path.name)


def servegen(
    folder: str | os.PathLike[str],
    start_s: float,
    duration_s: float,
    seed: int = 0,
    rate: float | None = None,
    *,
    on_error: OnError = "raise",
    sessions: WorkloadProfile | None = None,
    name: str | None = None,
) -> Trace:
    """Sample the requests of `duration_s` seconds from `start_s` on; arrivals count from there.

    In each window each client is a stationary renewal process of the window's rate, its gaps shaped as the file says;
    lengths are drawn from the client's distributions, inputs and outputs apart. A client is a tenant. The requests of
    a client do not depend on which others there are.

    Args:
        folder: the clients' files.
        rate: requests per second, mean of the whole, to which all clients are scaled alike; None as they are.
        on_error: `"skip"` leaves out clients whose dataset file is missing and counts them in `Trace.skipped_rows`.
        sessions: a profile to invent sessions and block ids from (`synthesise_blocks`); without, no blocks.

    Raises:
        TraceError: a damaged or missing file, a time outside the windows, nobody active then.
    """
    where = Path(folder)
    if not (math.isfinite(start_s) and start_s >= 0 and math.isfinite(duration_s) and duration_s > 0):
        raise TraceError(f"{duration_s} s from {start_s} s on", expected="a start >= 0 and a duration > 0")
    clients, reasons = _clients(where, on_error)
    spans = [_span(client, start_s, start_s + duration_s) for client in clients]
    whole = sum(w.rate * (w.stop_s - w.start_s) for windows in spans for w in windows) / duration_s
    if whole <= 0:
        raise TraceError(f"no client is active from {start_s:g} s to {start_s + duration_s:g} s", file=where)
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise TraceError(f"rate {rate}", expected="requests per second > 0")
    scale = 1.0 if rate is None else rate / whole
    parts: list[tuple[Floats, NDArray[np.int64], NDArray[np.int64], int]] = []
    for client, windows in zip(clients, spans):
        rng = np.random.default_rng([seed, client.number])
        for window in windows:
            if window.gaps is None:
                continue
            times = window.gaps.window(window.rate * scale, window.stop_s - window.start_s, rng)
            if not len(times):
                continue
            drawn = {
                label: rng.choice(values, len(times), p=chances)
                for label, (values, chances) in client.distributions(window.start_s).items()
            }
            at = times + (window.start_s - start_s)
            parts.append((at, drawn["input_tokens"], drawn["output_tokens"], client.number))
    if not parts:
        raise TraceError(
            "no request came in that time", file=where, expected="a longer one or a higher rate", hint=f"{whole:g}/s"
        )
    arrival_s = np.concatenate([part[0] for part in parts])
    order = np.argsort(arrival_s, kind="stable")
    tenant = np.repeat([part[3] for part in parts], [len(part[0]) for part in parts])
    n = len(order)
    trace = Trace(
        arrival_s=arrival_s[order],
        input_tokens=np.concatenate([part[1] for part in parts])[order].astype(np.int32),
        output_tokens=np.concatenate([part[2] for part in parts])[order].astype(np.int32),
        block_offsets=np.zeros(n + 1, np.int64),
        block_ids=np.zeros(0, np.int32),
        block_tokens=DEFAULT_BLOCK_TOKENS,
        tenant_id=tenant[order].astype(np.int32),
        name=name or where.resolve().name,
        skipped_rows=len(reasons),
        skip_reasons=tuple(reasons[:KEPT_REASONS]),
    )
    if sessions is None:
        return trace
    from dataclasses import replace

    from traces.synthesis import synthesise_blocks

    grown = synthesise_blocks(trace, sessions, seed)
    return replace(grown, tenant_id=trace.tenant_id, skipped_rows=trace.skipped_rows, skip_reasons=trace.skip_reasons)


def _clients(folder: Path, on_error: OnError) -> tuple[list[Client], list[str]]:
    """The clients in order of their numbers, and why some are left out."""
    if on_error not in ("raise", "skip"):
        raise TraceError(f"on_error {on_error!r}", expected='"raise" or "skip"')
    if not is_folder(folder):
        raise TraceError("no ServeGen client", file=folder, expected="a folder with chunk-N-trace.csv[.gz] files")
    found: dict[int, dict[str, Path]] = {}
    prefixes: set[str] = set()
    for path in sorted(folder.iterdir()):
        match = _match(path)
        if match is None:
            continue
        prefixes.add(match["prefix"])
        if len(prefixes) > 1:
            raise TraceError(
                f"clients of several kinds, {' and '.join(repr(p) for p in sorted(prefixes))}",
                file=folder,
                expected="those of one model",
            )
        files = found.setdefault(int(match["client"]), {})
        if match["kind"] in files:
            raise TraceError(f"{files[match['kind']].name} and {path.name}", file=folder, expected="one of them")
        files[match["kind"]] = path
    clients, reasons = [], []
    for number, files in sorted(found.items()):
        missing = next((kind for kind in ("trace.csv", "dataset.json") if kind not in files), None)
        if missing is None:
            windows = read_windows(files["trace.csv"])
            lengths = read_lengths(files["dataset.json"])
            clients.append(Client(number, windows, files["dataset.json"], lengths))
            continue
        hint = 'on_error="skip", or --on-error skip, leaves such clients out and counts them'
        error = TraceError(
            f"client {number} has no chunk-{number}-{missing}",
            file=folder,
            expected="both files of every client",
            hint=hint if on_error == "raise" else None,
        )
        if on_error == "raise":
            raise error
        reasons.append(str(error))
    if not clients:
        raise TraceError("no client has both its files", file=folder, expected="chunk-N-trace.csv and -dataset.json")
    return clients, reasons


def read_windows(path: Path) -> list[Window]:
    """A client's windows, in order of time.

    Raises:
        TraceError: a row that is none.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise TraceError("bytes that are not UTF-8", file=path, expected="CSV text") from None
    rows: list[tuple[float, float, Renewal | None]] = []
    for line, cells in enumerate(csv.reader(text.splitlines()), start=1):
        if not cells:
            continue

        def bad(field: str | None, found: str, expected: str, line: int = line) -> TraceError:
            return TraceError(found, file=path, line=line, field=field, expected=expected)

        if len(cells) != 6:
            raise bad(None, f"{len(cells)} values", "start, rate, cv, pattern, arg1, arg2")
        try:
            start, rate, _, shape, scale = (float(cell) for cell in (*cells[:3], *cells[4:]))
        except ValueError:
            raise bad(None, f"{','.join(cells)[:60]!r}", "numbers, and the pattern fourth") from None
        pattern = cells[3].strip()
        if not (math.isfinite(start) and start >= 0 and (not rows or start > rows[-1][0])):
            raise bad("start", f"{cells[0]}", "a time in seconds after the row above's")
        if not (math.isfinite(rate) and rate >= 0):
            raise bad("rate", f"{cells[1]}", "requests per second >= 0")
        if rate == 0:
            rows.append((start, 0.0, None))
            continue
        if pattern not in PATTERNS:
            raise bad("pattern", f"{pattern!r} at rate {rate:g}", " or ".join(PATTERNS))
        if not (math.isfinite(shape) and shape > 0 and math.isfinite(scale) and scale > 0):
            raise bad("arg1", f"shape {shape:g}, scale {scale:g}", "finite numbers > 0")
        rows.append((start, rate, Renewal(PATTERNS[pattern], shape)))
    if not rows:
        raise TraceError("no window", file=path, expected="at least one row")
    starts = [row[0] for row in rows]
    last = starts[-1] + (float(np.median(np.diff(starts))) if len(starts) > 1 else math.inf)
    return [Window(start, stop, rate, gaps) for (start, rate, gaps), stop in zip(rows, [*starts[1:], last])]


def read_lengths(path: Path) -> dict[float, dict[str, str]]:
    """Window start -> the text of each distribution, in order of time.

    Raises:
        TraceError: not the format's JSON.
    """
    try:
        document: Any = orjson.loads(read_bytes(path))
    except ValueError as error:
        raise TraceError(f"not JSON ({error})", file=path, expected="a client's distributions") from None
    if not isinstance(document, dict) or not document:
        raise TraceError(f"found {show(document)}", file=path, expected="an object of windows")
    found: dict[float, dict[str, str]] = {}
    for start, parts in document.items():
        try:
            at = float(start)
        except ValueError:
            raise TraceError(f"window {start!r}", file=path, expected="its start in seconds") from None
        if not isinstance(parts, dict) or any(not isinstance(parts.get(name), str) for name in LENGTHS):
            raise TraceError(
                f"found {show(parts)}", file=path, field=start, expected=f"{' and '.join(LENGTHS)}, each a string"
            )
        found[at] = {name: parts[name] for name in LENGTHS}
    return dict(sorted(found.items()))


def _distribution(text: str, file: Path, field: str) -> tuple[NDArray[np.int64], Floats]:
    """Lengths (at least 1 token) and their probabilities, from `{length: probability, ...}`."""
    try:
        pairs = [pair.split(":") for pair in text.strip().strip("{}").split(",")]
        lengths = np.array([int(length) for length, _ in pairs], np.int64)
        chances = np.array([float(chance) for _, chance in pairs])
    except ValueError:
        raise TraceError(
            f"found {text[:40]!r}", file=file, field=field, expected="{length: probability, ...}"
        ) from None
    total = chances.sum()
    if lengths.min() < 0 or lengths.max() > MAX_TOKENS or not (chances >= 0).all() or not abs(total - 1) < 1e-2:
        raise TraceError(
            f"lengths {lengths.min()} to {lengths.max()} with probabilities that sum to {total:g}",
            file=file,
            field=field,
            expected="lengths >= 0 with probabilities that sum to 1",
        )
    return np.maximum(lengths, 1), chances / total


def _span(client: Client, start_s: float, stop_s: float) -> list[Window]:
    """A client's windows, cut to [start_s, stop_s)."""
    windows = client.windows
    if start_s < windows[0].start_s or stop_s > windows[-1].stop_s:
        raise TraceError(
            f"{start_s:g} s to {stop_s:g} s reaches outside the windows of client {client.number}",
            file=client.dataset.parent,
            expected=f"a time within {windows[0].start_s:g} s to {windows[-1].stop_s:g} s",
        )
    return [
        Window(max(w.start_s, start_s), min(w.stop_s, stop_s), w.rate, w.gaps)
        for w in windows
        if w.stop_s > start_s and w.start_s < stop_s
    ]
