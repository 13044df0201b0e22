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

from traces import Trace
from traces.released import Released, folders, released

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

SPREAD_SEED = 0
"""Of where in its tick a request comes."""


class TraceShelf:
    """The released traces, each read once: from a folder, or where it is not there a stand-in.

    `stand_ins` has the names of the traces that were asked for and were not there.

    Args:
        folder: where the files are; without one, in the usual places (`traces.released`).
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.places = folders() if folder is None else [folder]
        self.stand_ins: list[str] = []
        self._loaded: dict[tuple[str, bool], Released] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _shelf, (self.places,)  # another process reads its own

    def take(self, name: str, *, spread: bool = False) -> Released:
        """A trace; `spread`: with requests that share a timestamp spread until the next."""
        with self._lock:
            if (name, spread) not in self._loaded:
                if spread:
                    recorded = self.take(name)
                    self._loaded[name, spread] = recorded._replace(trace=recorded.trace.jitter(SPREAD_SEED))
                else:
                    self._loaded[name, spread] = released(name, self.places)
                    if self._loaded[name, spread].stand_in:
                        self.stand_ins.append(name)
            return self._loaded[name, spread]


def _shelf(places: Sequence[Path]) -> TraceShelf:
    """An empty shelf with these places."""
    made = TraceShelf()
    made.places = list(places)
    return made


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
