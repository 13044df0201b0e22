"""Tuning the options of a heuristic with CMA-ES: what is searched, how, and on which requests.

Options are searched in the unit cube, each between its `low` and `high` (`policies.registry.Option`). What is maximised
is goodput on windows of traces; all candidates of a generation see the same windows at the same loads, so that what
differs between them is the candidates. Which of them is kept is decided on other requests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.simulator import Simulator
from envs.spec import ClusterSpec
from traces import Trace

from .policy import Policy, PolicyError
from .registry import ADMISSIONS, ROUTERS, CompiledPolicy, Option, make_policy, parse_heuristic

VALIDATION_LOADS = 5
VALIDATION_JITTERS = 3
WARMUP = 500  # requests before a window, so that caches and batches are not empty when counting begins
FIRST_SIGMA = 0.25  # of the unit cube: the ends of a range are two standard deviations from its middle
FINALISTS = 3
LARGEST_SIGMA = 0.3  # beyond, it draws nearly evenly from the cube; noise alone would take it there


class Space:
    """The options of a heuristic that are searched, N of them; those given in its name are where it starts.

    Raises:
        PolicyError: no heuristic, or one without such options.
    """

    def __init__(self, base: str) -> None:
        parts = parse_heuristic(base)
        if parts is None:
            raise PolicyError(
                f"{base!r} cannot be tuned: expected ROUTER[+ADMISSION] with a router of {', '.join(ROUTERS)}"
            )
        make_policy(base)
        router, admission, *given = parts
        self._parts = list(zip((router, admission), given, strict=True))
        self.searched: list[tuple[int, Option]] = [
            (i, option)
            for i, part in enumerate((ROUTERS[router], ADMISSIONS[admission]))
            for option in part.options
            if option.low is not None
        ]
        if not self.searched:
            raise PolicyError(f"{base!r} has nothing to tune: neither its router nor its admission has an option")
        self.base = base
        starts = [given[i].get(option.name, option.default) for i, option in self.searched]
        self.start = np.array([_place(option, value) for (_, option), value in zip(self.searched, starts, strict=True)])

    def policy(self, point: NDArray[np.float64]) -> str:
        """The name of the heuristic with the options at a point of the cube, float64[N]; four digits of each."""
        options = [dict(given) for _, given in self._parts]
        for (i, option), place in zip(self.searched, point, strict=True):
            options[i][option.name] = _value(option, float(place))
        return "+".join(
            name + (":" if values else "") + ",".join(f"{key}={_plain(value)}" for key, value in values.items())
            for (name, _), values in zip(self._parts, options, strict=True)
        )


def _place(option: Option, value: float) -> float:
    """Where a value lies between the ends of its range, 0 .. 1."""
    assert option.low is not None
    assert option.high is not None
    if option.scale == "switch":
        return 0.75 if value == option.high else 0.25
    value = min(max(value, option.low), option.high)
    if option.scale == "log":
        return float(np.log(value / option.low) / np.log(option.high / option.low))
    return (value - option.low) / (option.high - option.low)


def _value(option: Option, place: float) -> float:
    assert option.low is not None
    assert option.high is not None
    if option.scale == "switch":
        return option.high if place >= 0.5 else option.low
    if option.scale == "log":
        return float(option.low * (option.high / option.low) ** place)
    return option.low + place * (option.high - option.low)


def _plain(value: float) -> str:
    return np.format_float_positional(float(f"{value:.4g}"), trim="-")


class Search:
    """CMA-ES in a space. Its candidates follow from the seed and from what it was told, and from nothing else.

    Args:
        population: candidates per generation; 0: CMA's own choice, 4 + 3 log N.
    """

    def __init__(self, space: Space, seed: int, population: int = 0) -> None:
        import cma

        self.space = space
        draws = np.random.default_rng(seed)
        options = {
            "bounds": [0.0, 1.0],
            "randn": lambda *shape: draws.standard_normal(shape),
            "maxstd": LARGEST_SIGMA,
            "seed": np.nan,  # or it would seed NumPy's global generator
            "verbose": -9,
            "verb_log": 0,
        }
        if population:
            options["popsize"] = population
        start = np.resize(space.start, max(2, len(space.start)))  # one alone gets a dummy: the library has two at least
        self._strategy = cma.CMAEvolutionStrategy(start, FIRST_SIGMA, options)
        self._points: list[NDArray[np.float64]] = []

    @property
    def population(self) -> int:
        """Candidates per generation."""
        return int(self._strategy.popsize)

    @property
    def sigma(self) -> float:
        """Step size, in units of the cube."""
        return float(self._strategy.sigma)

    def ask(self) -> list[str]:
        """The policies of the next generation."""
        self._points = self._strategy.ask()
        return [self._policy(point) for point in self._points]

    def tell(self, goodput: Sequence[float]) -> None:
        """How good those last asked for were, in order."""
        self._strategy.tell(self._points, [-value for value in goodput])

    def mean(self) -> str:
        """The policy at the mean of the distribution."""
        return self._policy(self._strategy.result.xfavorite)

    def _policy(self, point: NDArray[np.float64]) -> str:
        return self.space.policy(np.clip(point[: len(self.space.start)], 0.0, 1.0))


class Window(NamedTuple):
    """Requests first .. last - 1 of a trace, `load` times as fast, after up to WARMUP uncounted ones before them."""

    trace: int
    first: int
    last: int
    load: float
    seed: int
    jitter: int = 0  # 0: arrivals as they are; else a seed of `Trace.jitter`


class Trials:
    """Replays of compiled policies on windows of traces, on all cores.

    Args:
        loads: for each trace, the range that loads are drawn from, times its own speed.
        part: what training windows are cut from; see `Trace.split`.
        requests: per training window.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        traces: Sequence[Trace],
        loads: Sequence[tuple[float, float]],
        part: str = "train",
        requests: int = 1000,
    ) -> None:
        self.spec = spec
        self.traces = list(traces)
        self.loads = list(loads)
        self.requests = requests
        self._training = [part_of(trace, part) for trace in traces]
        validation = [part_of(trace, "validation") for trace in traces]
        # a trace too short to have a validation part is judged on what it was trained on
        self._validation = [v if v[1] > v[0] else t for v, t in zip(validation, self._training, strict=True)]
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(os.cpu_count())

    def training(self, count: int, seed: Sequence[int]) -> list[Window]:
        """`count` windows, the traces in turn; the same for the same seed.

        Each is anywhere in its trace. The n of a trace have one load each of n equal parts of its range.
        """
        rng = np.random.default_rng(seed)
        traces = len(self.traces)
        turn = int(rng.integers(traces))
        windows = []
        for i in range(count):
            trace = (turn + i) % traces
            first, last = self._training[trace]
            length = min(self.requests, last - first)
            start = int(rng.integers(first, last - length + 1))
            low, high = self.loads[trace]
            of_trace = -(-(count - i % traces) // traces)
            load = low + (high - low) * (i // traces + rng.random()) / of_trace
            windows.append(Window(trace, start, start + length, load, int(rng.integers(2**32))))
        return windows

    def validation(self) -> list[Window]:
        """The whole validation part of every trace at loads from the lowest to the highest, with several jitters."""
        return [
            Window(trace, *self._validation[trace], float(load), 0, jitter)
            for trace in range(len(self.traces))
            for load in np.unique(np.linspace(*self.loads[trace], VALIDATION_LOADS))
            for jitter in range(VALIDATION_JITTERS)
        ]

    def goodput(self, policies: Sequence[str], windows: Sequence[Window]) -> NDArray[np.float64]:
        """Mean over the windows of the share of good requests, for each policy: float64[policies]."""
        return self.scores([make_policy(policy) for policy in policies], windows).mean(1)  # type: ignore[no-any-return]

    def scores(self, policies: Sequence[Policy], windows: Sequence[Window]) -> NDArray[np.float64]:
        """The share of good requests of each compiled policy in each window: float64[policies, windows]."""
        tasks = [self._threads.submit(self._scores, copy(policy), windows) for policy in policies]
        try:
            return np.array([task.result() for task in tasks])
        finally:
            for task in tasks:
                task.cancel()

    def _scores(self, policy: Policy, windows: Sequence[Window]) -> list[float]:
        assert isinstance(policy, CompiledPolicy)
        good = []
        for window in windows:
            simulator, trace = self._simulator(window.trace, window.jitter)
            policy.reset(1, window.seed)
            first = max(0, window.first - WARMUP)
            simulator.load(0, trace, first, window.last, speed=window.load, recheck=policy.recheck)
            policy.replay(simulator)
            good.append(float(simulator.outcomes(0)["good"][window.first - first :].mean()))
        return good

    def _simulator(self, trace: int, jitter: int) -> tuple[Simulator, Trace]:
        """This thread's own, and the trace with its jitter."""
        simulators: dict[tuple[int, int], tuple[Simulator, Trace]] = self._own.__dict__.setdefault("simulators", {})
        if (trace, jitter) not in simulators:
            whole = self.traces[trace]
            first, last = self._validation[trace]
            room = min(max(self.requests, last - first) + WARMUP, whole.n_requests)
            used = whole if jitter == 0 else whole.jitter(jitter)
            simulators[trace, jitter] = Simulator.with_room(self.spec, used, requests=room), used
        return simulators[trace, jitter]


def evolve(
    search: Search, trials: Trials, windows: int, seed: int, generation: int
) -> tuple[list[str], NDArray[np.float64]]:
    """One generation: its candidates, and the goodput of each on its `windows` windows, which the search is told."""
    candidates = search.ask()
    goodput = trials.goodput(candidates, trials.training(windows, (seed, generation)))
    search.tell(goodput.tolist())
    return candidates, goodput


def finalists(search: Search, candidates: Sequence[str], goodput: NDArray[np.float64]) -> list[str]:
    """What deserves to be judged on the validation part: the mean of the distribution, the best of a generation."""
    best = np.argsort(-goodput, kind="stable")[:FINALISTS]
    return [search.mean(), *(candidates[i] for i in best)]


class Contender:
    """A heuristic being tuned, and the best of it on validation so far; at first as it was given.

    Args:
        windows: per generation. population: see `Search`.
    """

    def __init__(self, base: str, trials: Trials, seed: int, *, windows: int, population: int = 0) -> None:
        self.base, self.trials, self.seed, self.windows = base, trials, seed, windows
        self.search = Search(Space(base), seed, population)
        self.generations = 0
        self.policy = base
        self.default = self.goodput = float(trials.goodput([base], trials.validation())[0])
        self._last: tuple[list[str], NDArray[np.float64]] = ([], np.zeros(0))

    def step(self) -> float:
        """One more generation; the mean goodput of its candidates."""
        self.generations += 1
        self._last = evolve(self.search, self.trials, self.windows, self.seed, self.generations)
        return float(self._last[1].mean())

    def judge(self) -> None:
        """Judge on validation where the search has got to."""
        found = finalists(self.search, *self._last)
        judged = self.trials.goodput(found, self.trials.validation())
        if judged.max() > self.goodput:
            self.policy, self.goodput = found[int(judged.argmax())], float(judged.max())


def part_of(trace: Trace, part: str) -> tuple[int, int]:
    """First request of a part of a trace, and the one after its last."""
    if part == "all":
        return 0, trace.n_requests
    split = trace.split()
    ends = np.cumsum([0, *(piece.n_requests for piece in split)]).tolist()
    i = split._fields.index(part)
    return ends[i], ends[i + 1]
