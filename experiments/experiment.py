"""What an experiment is: a module `arxiv_...` or `fast_...` with a docstring and `run(setting) -> Result`.

The first line of the docstring is the experiment's title; the rest says what the paper did, what we do, and what
differs. The module is found by its name: there is no list to keep.
"""

from __future__ import annotations

import math
import pkgutil
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import traces
from traces import Trace, TraceError

from .parameters import Parameters

PAPER_NAMES = re.compile(r"(arxiv|fast)_(fig|table)\d+\w*")


@cache
def _paper() -> dict[str, Any]:
    return dict(yaml.safe_load((resources.files(__package__) / "paper.yaml").read_text()))


def paper(figure: str) -> Any:
    """The papers' numbers of a figure or table, as `paper.yaml` has them.

    Raises:
        KeyError: it has none.
    """
    return _paper()[figure]


# --- results -------------------------------------------------------------------------------------


class Within(NamedTuple):
    """Ours may differ from the paper's by this much, or by this share of it."""

    absolute: float = 0.0
    share: float = 0.0

    def bounds(self, paper: float) -> tuple[float, float]:
        distance = self.absolute + self.share * abs(paper)
        return paper - distance, paper + distance

    def __str__(self) -> str:
        parts = [f"{self.absolute:.4g}"] if self.absolute or not self.share else []
        parts += [f"{100 * self.share:.3g} %"] if self.share else []
        return f"± {' + '.join(parts)}"


class Between(NamedTuple):
    """Ours must lie in a range, wherever in it the paper's is."""

    low: float = -math.inf
    high: float = math.inf

    def bounds(self, paper: float) -> tuple[float, float]:
        return self.low, self.high

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"<= {self.high:.4g}"
        if math.isinf(self.high):
            return f">= {self.low:.4g}"
        return f"{self.low:.4g} .. {self.high:.4g}"


@dataclass(frozen=True)
class Row:
    """One quantity, ours and the paper's. Without a tolerance there is no verdict: the row is context."""

    quantity: str
    ours: float
    paper: float | None = None
    tolerance: Within | Between | None = None

    @property
    def difference(self) -> float | None:
        return None if self.paper is None else self.ours - self.paper

    @property
    def holds(self) -> bool | None:
        if self.tolerance is None:
            return None
        low, high = self.tolerance.bounds(math.nan if self.paper is None else self.paper)
        slack = 1e-9 * max(1.0, abs(self.ours))  # decimals of the paper are no exact binary numbers
        return bool(low - slack <= self.ours <= high + slack)


class Series(NamedTuple):
    """A line (numbers on x) or a set of bars (words on x); the paper's are drawn as points over ours of that name."""

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float | None]
    of_paper: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot of an experiment's picture."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Result:
    """What an experiment found. `remarks` say what a reader of the rows should know: why something does not hold."""

    rows: Sequence[Row]
    panels: Sequence[Panel] = ()
    remarks: Sequence[str] = ()


# --- what experiments run under ------------------------------------------------------------------

FILES = ("{}_trace.jsonl", "mooncake_{}_trace.jsonl")
SUFFIXES = ("", ".gz", ".zst")
DOWNLOADED = Path("data")
"""Where `python -m traces download` puts files unless told otherwise: in the current folder."""

RELEASED = {"conversation": 12_031, "synthetic": 3_993, "toolagent": 23_608}
"""The traces Mooncake released, and how many requests each has."""
FEWEST_REQUESTS = 1000
"""A file of fewer says nothing of percentiles, and is surely not a released one."""

SPREAD_SEED = 0
"""Of where in its tick a request comes."""


class _Loaded(NamedTuple):
    trace: Trace
    origin: str


class TraceShelf:
    """The released traces, each read once: from a folder, or where it is not there a stand-in.

    `stand_ins` has the names of the traces that were asked for and were not there.

    Args:
        folder: where the files are; without one, where downloads go.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = DOWNLOADED if folder is None else folder
        self.stand_ins: list[str] = []
        self._loaded: dict[tuple[str, bool], _Loaded] = {}
        self._lock = threading.RLock()

    def take(self, name: str, *, spread: bool = False) -> _Loaded:
        """A trace; `spread`: with requests that share a timestamp spread until the next."""
        with self._lock:
            if (name, spread) not in self._loaded:
                if spread:
                    recorded = self.take(name)
                    self._loaded[name, spread] = recorded._replace(trace=recorded.trace.jitter(SPREAD_SEED))
                else:
                    self._loaded[name, spread] = self._load(name)
            return self._loaded[name, spread]

    def _load(self, name: str) -> _Loaded:
        if name not in RELEASED:
            raise TraceError(f"no released trace is called {name!r}", expected=", ".join(RELEASED))
        for pattern in FILES:
            for suffix in SUFFIXES:
                file = self.folder / (pattern.format(name) + suffix)
                if file.is_file():
                    return _read(file, RELEASED[name])
                if file.exists() or file.is_symlink():
                    found = "a folder" if file.is_dir() else "a link to nothing, or a special file"
                    raise TraceError(found, expected="a file", file=file)
        self.stand_ins.append(name)
        stand_in = f"builtin:{name}"
        return _Loaded(traces.load(stand_in), f"stand-in {stand_in}, synthesised: the released file is not at hand")


def _read(file: Path, released: int) -> _Loaded:
    """A file that is named like a released one of so many requests, and whether it is that by their number."""
    try:
        trace = traces.load(file)
    except TraceError as error:  # without its hint, which is of options that only `python -m traces` has
        raise TraceError(
            error.found, expected=error.expected, file=error.file, line=error.line, field=error.field
        ) from error
    found = trace.n_requests
    if found < FEWEST_REQUESTS:
        raise TraceError(f"has {found} requests", expected=f"the released trace of {released:,}", file=file)
    if found != released:
        return _Loaded(trace, f"file {file.name}, {found:,} requests (the released one has {released:,})")
    return _Loaded(trace, f"released file {file.name}")


@dataclass(frozen=True)
class Setting:
    """What an experiment is run under.

    `quick` leaves out curves that pictures alone show; the rows are the same. `say` may be told how far the
    experiment is.
    """

    parameters: Parameters = field(default_factory=Parameters.load)
    quick: bool = False
    shelf: TraceShelf = field(default_factory=TraceShelf)
    say: Callable[[str], None] = lambda _: None
    origins: dict[str, str] = field(default_factory=dict)
    """Where the traces that were asked for came from."""

    def trace(self, name: str, *, recorded: bool = False) -> Trace:
        """A trace Mooncake released (`conversation`, `toolagent`, `synthetic`), or a stand-in.

        Args:
            recorded: with its timestamps as they are, whatever the parameters say of `arrivals`.

        Raises:
            TraceError: no such trace, or its file cannot be read.
        """
        loaded = self.shelf.take(name, spread=not recorded and self.parameters.arrivals.value == "spread")
        self.origins[name] = loaded.origin
        return loaded.trace


# --- the experiments -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """An experiment by its module's name."""

    name: str
    title: str
    text: str
    run: Callable[[Setting], Result]


@dataclass(frozen=True)
class Outcome:
    """An experiment that was run."""

    experiment: Experiment
    result: Result
    origins: dict[str, str]
    seconds: float


@cache
def experiments() -> dict[str, Experiment]:
    """All experiments by name, the papers' order."""
    package = import_module(__package__)
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if PAPER_NAMES.fullmatch(module.name):
            loaded = import_module(f"{__package__}.{module.name}")
            title, _, text = (loaded.__doc__ or "").strip().partition("\n")
            found[module.name] = Experiment(module.name, title.rstrip("."), text.strip(), loaded.run)
    return found


def run(experiment: Experiment, setting: Setting) -> Outcome:
    """Run one experiment."""
    own = replace(setting, origins={})
    start = time.perf_counter()
    result = experiment.run(own)
    return Outcome(experiment, result, own.origins, time.perf_counter() - start)
