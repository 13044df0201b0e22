"""`python leaderboard.py`: compare schedulers on traces, with confidence intervals.

Every policy replays the same requests on the same simulated cluster (docs/physics.md). A cell is
(part of a trace, cluster, load); each cell is replayed once per seed. A suite (`envs.suite`) is a list of
cells. See `envs.metrics` for what is counted and how intervals are made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from envs import metrics
from envs.bound import LANDING_S, most_good
from envs.metrics import Replay
from envs.simulator import Simulator
from envs.spec import ClusterSpec, SpecError, cluster_names, load_cluster, validate_cluster
from envs.state import Observation, Source
from envs.suite import Suite, load_suite, suite_names
from leaderboard_rerun import differences
from leaderboard_site import write_site
from leaderboard_tables import FIGURES_WIDTH, LOG_WIDTH, as_markdown, plot, print_log, print_tables
from policies import ADMISSIONS, ROUTERS, CompiledPolicy, Policy, PolicyError, make_policy, off_policy
from policies.artifact import OnnxPolicy
from policies.clairvoyant import Clairvoyant
from policies.describe import Fact, describe
from policies.executor import far_executor
from policies.tuned import tuned
from submissions import sandbox
from submissions.folder import Submission, SubmissionError, printable, read_submission, submission_folders
from submissions.isolated import Account, Disqualified, IsolatedPolicy, Limits, Twins
from traces import Trace, TraceError
from traces import load as load_trace
from traces.released import PREFIX as RELEASED_PREFIX

if TYPE_CHECKING:
    from runtime.decision_log import Log

ROOT = Path(__file__).resolve().parent
PARTS = ("train", "validation", "test", "all")
DEFAULT_TRACE, DEFAULT_PART, DEFAULT_CLUSTER = "builtin:conversation", "test", "8p8d"
DEFAULT_LOADS = (0.75, 1.0, 1.25, 1.5, 2.0)
DEFAULT_SEEDS = 4
"""A power of two, so that mean counts are exact and add up."""
TARGETS = (0.90, 0.99)
BATCH_CLUSTERS, BATCH_BYTES = 64, 2e9
"""Most clusters, and most memory, in one batch of a stepped policy."""
OBSERVATIONS = 64
"""Observations a decision is timed on."""
MOST_SHOWN = 20
"""Differences of a rerun that are printed."""
EXIT_DIFFERS, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

EXAMPLES = """examples:
  python leaderboard.py
      all heuristics on a built-in workload, at several loads
  python leaderboard.py --policies conductor,cache_aware,random --trace trace.jsonl.gz --load 1,2
      three policies on the last fifth of a trace, at its own speed and twice as fast
  python leaderboard.py --policies conductor+none,conductor+predictive:threshold=0.95 --capacity 1.2
      with and without admission, at 1.2 times what the cluster can take
  python leaderboard.py --policies runs/ppo-3,conductor --trace trace.jsonl.gz --sustained
      a trained policy against its teacher, and the highest load each sustains
  python leaderboard.py --policies mymodule:MyPolicy,conductor --json result.json --plot curve.png
      your own class with a decide(observation) method; see policies/policy.py
  python leaderboard.py --suite heldout --policies runs/ppo-3,conductor,conductor+predictive
      the first against the others on 25 cells that nothing was trained on
  python leaderboard.py --log decisions --policies runs/ppo-3,conductor+predictive --cluster live.yaml
      what other policies would have made of the live requests in a decision log, and how sure that is

  python leaderboard.py --submissions inbox --suite heldout --site board
      what others handed in, each in a sandbox, beside the tuned heuristics (docs/submissions.md)
  python leaderboard.py --rerun result.json
      the run of a --json file again, and whether its figures are the same

policies: ROUTER[:option=value,...][+ADMISSION[:option=value,...]], a run folder of train.py, or
  module:Class. Without an admission conductor uses slo, the other routers none.
"""


T = TypeVar("T")


class LeaderboardError(ValueError):
    """Something cannot be evaluated; the message says what was expected."""


# --- what is evaluated ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a trace, with `warmup` requests before it that are simulated and not counted.

    `traces[s]` is seed s: 0 is the trace as it is, others move arrivals within their gaps.
    """

    trace: str
    part: str
    checksum: str
    warmup: int
    traces: tuple[Trace, ...]

    @property
    def requests(self) -> int:
        return self.traces[0].n_requests - self.warmup


@dataclass(frozen=True, eq=False)
class Setting:
    """A part of a trace on a cluster: everything of a cell but its load."""

    part: Part
    cluster: str
    spec: ClusterSpec

    def __str__(self) -> str:
        return f"{self.part.trace} ({self.part.part}) on {self.cluster}"

    def simulator(self, clusters: int = 1) -> Simulator:
        """Clusters with room for the part."""
        return Simulator.with_room(self.spec, self.part.traces[0], clusters=clusters)

    def replay_of(self, simulator: Simulator, cluster: int) -> Replay:
        """What a drained cluster of `simulator` made of the part; a copy."""
        counted = slice(self.part.warmup, None)
        trace = self.part.traces[0]
        return Replay(
            simulator.outcomes(cluster)["arrival_s"][counted].copy(),
            trace.input_tokens[counted],
            trace.output_tokens[counted],
            simulator.outcomes(cluster)[counted].copy(),
            self.spec.block_tokens,
        )


@dataclass(frozen=True, eq=False)
class Cell:
    """A setting at a load: of a suite, under a name of its own, at `share` times its capacity."""

    setting: Setting
    load: float
    capacity: float | None = None
    share: float | None = None
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.description

    @property
    def description(self) -> str:
        share = "" if self.capacity is None else f" = {self.load / self.capacity:.3g} x capacity"
        return f"{self.setting}, load {self.load:.4g}{share}"


def make_part(trace: Trace, part: str, warmup: int, seeds: int, name: str) -> Part:
    """Cut a part out of a trace, and make its seeds.

    Args:
        warmup: requests before the part to simulate first; of the whole trace, its own first ones.

    Raises:
        LeaderboardError: the part is empty, or all of it is warmup.
    """
    split = trace.split()
    ends = np.cumsum([0, *(piece.n_requests for piece in split)])
    first, last = 0, trace.n_requests
    if part != "all":
        i = PARTS.index(part)
        first, last = int(ends[i]), int(ends[i + 1])
    if first == last:
        raise LeaderboardError(f"part {part!r} of trace {name!r} has no requests; expected some")
    if part == "all":
        first = warmup
        if first >= last:
            raise LeaderboardError(f"warmup of {warmup}: trace {name!r} has {last} requests; expected more")
    warmup = min(warmup, first)
    rows = trace.rows(first - warmup, last)
    made = (rows, *(rows.jitter(seed) for seed in range(1, seeds)))
    return Part(name, part, trace.checksum, warmup, made)


def make_setting(trace: Trace, part: Part, cluster: str) -> Setting:
    """Put a part on a cluster.

    Raises:
        LeaderboardError: the blocks of the trace do not fit the cluster's.
    """
    spec = load_cluster(cluster)
    if trace.has_blocks and trace.block_tokens != spec.block_tokens:
        raise LeaderboardError(
            f"trace {part.trace!r} has blocks of {trace.block_tokens} tokens, cluster {cluster!r} of "
            f"{spec.block_tokens}; expected equal sizes (python -m traces convert --reblock)"
        )
    return Setting(part, cluster, spec)


# --- replays -------------------------------------------------------------------------------------


class Place(Enum):
    """Where a task may run."""

    HERE = "in the thread that asks"
    THREADS = "in threads of this process"
    ANYWHERE = "in any process"


class Contestant:
    """A policy by name. Compiled ones are copied for each replay, so replays may run in threads.

    `disqualified`: why its figures do not count, if so; only a submission's.
    """

    disqualified = ""

    def __init__(self, name: str) -> None:
        try:
            self.policy: Policy = make_policy(name)
        except PolicyError:
            raise
        except Exception as error:  # a user's class or run folder may raise anything
            raise LeaderboardError(f"policy {name!r} cannot be made: {type(error).__name__}: {error}") from error
        self.name = name

    @property
    def compiled(self) -> bool:
        return isinstance(self.policy, CompiledPolicy)

    @property
    def place(self) -> Place:
        """Where its replays may run."""
        return Place.ANYWHERE if self.compiled else Place.HERE

    def __reduce__(self) -> tuple[Any, ...]:
        return Contestant, (self.name,)  # made anew where it is sent to: machine code cannot be sent

    @property
    def competes(self) -> bool:
        """Whether it decides as a scheduler could."""
        return not isinstance(self.policy, Clairvoyant)

    def replays(self, setting: Setting, runs: Sequence[tuple[float, int]]) -> list[Replay]:
        """One replay for each (load, seed)."""
        if self.compiled:
            return [replay_compiled(copy(self.policy), setting, load, seed) for load, seed in runs]
        size = int(BATCH_BYTES // setting.simulator().bytes_per_cluster)
        size = max(1, min(BATCH_CLUSTERS, size))
        replays: list[Replay] = []
        for i in range(0, len(runs), size):
            with self.playing() as policy:
                replays += replay_stepped(policy, self.name, setting, runs[i : i + size])
        return replays

    def playing(self) -> AbstractContextManager[Policy]:
        """The policy, for a batch of replays or to be timed."""
        return nullcontext(self.policy)

    def options(self) -> list[str]:
        """What asks for it alone on the command line."""
        return ["--policies", self.name]

    def configuration(self) -> list[Fact]:
        """What it is made of."""
        return describe(self.name)


class Submitted(Contestant):
    """A submission: it decides in a sandbox, in a new process for each batch of replays.

    So that nothing it saw in one batch is known in the next. The first process has a twin (see `submissions.isolated`).
    """

    compiled, competes, place = False, True, Place.THREADS

    def __init__(self, submission: Submission, limits: Limits) -> None:
        self.submission = submission
        self.name = submission.name
        self.account = Account(limits)
        self._unchecked = [True]

    def playing(self) -> AbstractContextManager[Policy]:
        try:
            self._unchecked.pop()  # by one thread only
        except IndexError:
            return IsolatedPolicy(self.submission, self.account)
        return Twins(self.submission, self.account)

    def options(self) -> list[str]:
        folder, limits = str(self.submission.folder), str(self.account.limits)
        return ["--policies", "", "--submissions", folder, "--limits", limits]

    def configuration(self) -> list[Fact]:
        metadata = self.submission.metadata
        about = [
            Fact("author", printable(metadata.author), ""),
            Fact("description", printable(metadata.description, most=4000), ""),
            Fact("policy", metadata.policy, "run in a sandbox; docs/submissions.md"),
        ]
        return about + [Fact(name, f"sha256 {digest}", "") for name, digest in self.submission.files.items()]


def unless_disqualified(contestant: Contestant, work: Callable[[], T]) -> T | None:
    """What `work` returns; None once the contestant is disqualified, which is noted."""
    if contestant.disqualified:
        return None
    try:
        return work()
    except Disqualified as error:
        contestant.disqualified = contestant.disqualified or str(error)
        return None


_own = threading.local()


def replay_compiled(policy: Policy, setting: Setting, load: float, seed: int) -> Replay:
    """A whole replay without returning to Python, and without the GIL. The policy is this call's own."""
    assert isinstance(policy, CompiledPolicy)
    policy.reset(1, seed)
    if getattr(_own, "setting", None) is not setting:
        _own.setting, _own.simulator = setting, setting.simulator(2)  # the clairvoyant tries out in the second
    simulator: Simulator = _own.simulator
    simulator.load(0, setting.part.traces[seed], speed=load, recheck=policy.recheck)
    policy.replay(simulator, 0)
    return setting.replay_of(simulator, 0)


def replay_stepped(policy: Policy, name: str, setting: Setting, runs: Sequence[tuple[float, int]]) -> list[Replay]:
    """Replays of several (load, seed) side by side, the policy deciding for all of them at once.

    Cluster c of the batch is runs[c]; the policy is reset with the first run's seed. All have
    equally many requests, so all end with the same step.
    """
    simulator = setting.simulator(len(runs))
    call(policy, name, "reset", len(runs), runs[0][1])
    for c, (load, seed) in enumerate(runs):
        simulator.load(c, setting.part.traces[seed], speed=load, recheck=policy.recheck)
        simulator.observe(c)
    done = np.zeros(len(runs), np.bool_)
    observation = read_only(simulator.observation_tables)
    for _ in range(setting.part.traces[0].n_requests):
        actions = decide(policy, name, observation)
        simulator.step(actions, done)
    assert done.all()
    return [setting.replay_of(simulator, c) for c in range(len(runs))]


def read_only(observation: Observation) -> Observation:
    """Views of an observation that a policy cannot write to: the simulator uses the tables again."""
    views = [table.view() for table in observation]
    for view in views:
        view.flags.writeable = False
    return Observation(*views)


def call(policy: Policy, name: str, method: str, *given: Any) -> Any:
    """Call a policy's method; whatever it raises becomes one clear error."""
    try:
        return getattr(policy, method)(*given)
    except Disqualified:
        raise
    except (Exception, SystemExit) as error:
        raise LeaderboardError(f"policy {name!r}: {method}() raised {type(error).__name__}: {error}") from error


def decide(policy: Policy, name: str, observation: Observation) -> np.ndarray:
    """A policy's actions, checked.

    Raises:
        LeaderboardError: it raised, or returned other than int64[clusters] within the actions.
    """
    actions = call(policy, name, "decide", observation)
    clusters, prefills = observation.prefill.shape
    largest = prefills * observation.decode.shape[1] * len(Source)
    expected = f"expected one integer action in 0 .. {largest} for each of {clusters} clusters"
    if not isinstance(actions, np.ndarray):
        found = type(actions).__name__
    elif actions.shape != (clusters,) or actions.dtype.kind not in "iu":
        found = f"{actions.dtype}{list(actions.shape)}"
    elif actions.min() < 0 or actions.max() > largest:
        found = f"action {actions[(actions < 0) | (actions > largest)][0]}"
    else:
        return actions.astype(np.int64, copy=False)
    raise LeaderboardError(f"policy {name!r}: decide() returned {found}; {expected}")


# --- how long a decision takes -------------------------------------------------------------------


def stored_observations(setting: Setting) -> Observation:
    """Up to `OBSERVATIONS` observations, evenly spread over a replay at load 1 under `conductor+none`."""
    policy = make_policy("conductor+none")
    assert isinstance(policy, CompiledPolicy)
    simulator = setting.simulator()
    simulator.load(0, setting.part.traces[0], recheck=False)
    gap = setting.part.traces[0].n_requests // OBSERVATIONS
    kept: list[list[np.ndarray]] = []
    while len(kept) < OBSERVATIONS and simulator.observe(0):
        tables = simulator.observation_tables
        kept.append([table[0].copy() for table in tables])
        action = int(policy.decide(tables)[0])
        pair, source = divmod(action - 1, len(Source))
        prefill, decode = divmod(pair, simulator.decodes) if action else (-1, -1)
        simulator.decide(0, prefill, decode, Source(source))
        policy.replay(simulator, 0, limit=max(0, gap - 1))
    return Observation(*(np.stack(column) for column in zip(*kept, strict=True)))


def decision_times(contestant: Contestant, stored: Observation) -> tuple[float, float]:
    """Microseconds per decision: in a batch of all stored observations, and of one alone.

    Median of repeated calls of `decide`, Python included, and the way to a submission's process and back; the making of
    the observation excluded.
    """
    name, count = contestant.name, len(stored.request)
    ones = [Observation(*(table[i : i + 1] for table in stored)) for i in range(count)]
    with contestant.playing() as policy:
        call(policy, name, "reset", count, 0)
        together = _median_s(lambda _: decide(policy, name, stored)) / count
        call(policy, name, "reset", 1, 0)
        alone = _median_s(lambda i: decide(policy, name, ones[i % count]))
    return together * 1e6, alone * 1e6


def _median_s(work: Callable[[int], object], budget_s: float = 0.1, most: int = 200) -> float:
    """Median seconds of a call, over up to `most` calls or about `budget_s` seconds, 3 at least."""
    work(0)
    spent: list[float] = []
    while len(spent) < 3 or (len(spent) < most and sum(spent) < budget_s):
        start = time.perf_counter()
        work(len(spent))
        spent.append(time.perf_counter() - start)
    return float(np.median(spent))


# --- the leaderboard -----------------------------------------------------------------------------


@dataclass
class Result:
    """Rows and comparisons, ready for JSON."""

    rows: list[dict[str, Any]]
    cells: list[dict[str, Any]]
    paired: dict[str, Any] | None
    """The first policy minus the best of the others, over all cells."""
    paired_saturated: dict[str, Any] | None
    """The same over the cells at or past capacity."""
    worst: dict[str, Any] | None
    """The cell where the first policy is furthest behind the best of the others there, or least ahead."""
    winner: str | None
    capacities: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


class Progress:
    """A bar on stderr, where stderr is a terminal."""

    def __init__(self) -> None:
        self.advance: Callable[[], None] = lambda: None

    @contextmanager
    def stage(self, what: str, total: int) -> Iterator[None]:
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            self.advance = lambda: bar.advance(task)
            try:
                yield
            finally:
                self.advance = lambda: None


class Pool:
    """Where tasks run: in threads of this process, or, those that may run anywhere, on `anywhere` if given."""

    def __init__(self, jobs: int, progress: Progress, anywhere: Executor | None = None) -> None:
        threads = ThreadPoolExecutor(jobs)
        self.executors = {Place.THREADS: threads, Place.ANYWHERE: anywhere or threads}
        self.progress = progress

    def run(self, what: str, tasks: Sequence[tuple[Place, Callable[[], Any]]]) -> list[Any]:
        """Results of tasks, in order."""
        results: list[Any] = [None] * len(tasks)
        with self.progress.stage(what, len(tasks)):
            futures = {
                self.executors[place].submit(work): i
                for i, (place, work) in enumerate(tasks)
                if place is not Place.HERE
            }
            for i, (place, work) in enumerate(tasks):
                if place is Place.HERE:
                    results[i] = work()
                    self.progress.advance()
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                self.progress.advance()
        return results


def sustained_loads(
    contestant: Contestant, setting: Setting, seeds: Sequence[int], targets: Sequence[float]
) -> list[metrics.Highest]:
    """The highest load at which a policy meets each target, all seeds together."""
    known: dict[float, float] = {}

    def attainment(loads: Sequence[float]) -> list[float]:
        new = [load for load in loads if load not in known]
        replays = contestant.replays(setting, [(load, seed) for load in new for seed in seeds])
        for i, load in enumerate(new):
            mine = replays[i * len(seeds) : (i + 1) * len(seeds)]
            known[load] = float(np.mean([replay.good.mean() for replay in mine]))
        return [known[load] for load in loads]

    return [metrics.highest_load(attainment, target) for target in targets]


def evaluate(
    contestants: Sequence[Contestant],
    cells: Sequence[Cell],
    *,
    seeds: Sequence[int] = (0,),
    sustained: bool = False,
    headroom: bool = False,
    pool: Pool | None = None,
) -> Result:
    """Every policy on every cell; rows in order of cells, best goodput first within one.

    Submissions that are disqualified have no rows, and say so (`Contestant.disqualified`).

    Raises:
        LeaderboardError: a policy fails that is no submission, or all are disqualified.
    """
    pool = pool or Pool(1, Progress())
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    scores, goods = _play_all(contestants, cells, settings, seeds, pool)
    highest: dict[tuple[Contestant, Setting], list[metrics.Highest] | None] = {}
    if sustained:
        pairs = [(contestant, setting) for setting in settings for contestant in contestants]
        found = pool.run(
            "sustained loads",
            [
                (c.place, partial(unless_disqualified, c, partial(sustained_loads, c, s, seeds, TARGETS)))
                for c, s in pairs
            ],
        )
        highest = dict(zip(pairs, found, strict=True))
    stored = {setting: stored_observations(setting) for setting in settings}
    times = {
        (c, s): unless_disqualified(c, partial(decision_times, c, stored[s])) for s in settings for c in contestants
    }
    everyone, contestants = contestants, [c for c in contestants if not c.disqualified]
    if not contestants:
        reasons = "; ".join(f"{c.name} {c.disqualified}" for c in everyone)
        raise LeaderboardError(f"no policy is left: {reasons}")
    bounds: dict[Cell, dict[str, Any]] = {}
    if headroom:
        landed_s = [max(goods[contestant, cell].landing_s for contestant in contestants) for cell in cells]
        bounding = [(Place.ANYWHERE, partial(upper_bound, cell, max(s, LANDING_S))) for cell, s in zip(cells, landed_s)]
        bounds = dict(zip(cells, pool.run("bounds", bounding), strict=True))
    rows: list[dict[str, Any]] = []
    comparisons = []
    for cell in cells:
        of_cell = []
        for contestant in contestants:
            row = {"policy": contestant.name} | scores[contestant, cell]
            row["decision_us"], row["decision_alone_us"] = times[contestant, cell.setting] or (math.nan, math.nan)
            for target, load in zip(TARGETS, highest.get((contestant, cell.setting)) or ()):
                key = f"load_at_{round(100 * target)}"
                row |= {key: load.load, f"{key}_note": load.note}
            of_cell.append(row | bounds.get(cell, {}) | _about_cell(cell, seeds))
        rows += sorted(of_cell, key=lambda row: -float(row["goodput"]))
        comparisons.append(_compare_cell(contestants, cell, goods) | bounds.get(cell, {}))
    saturated = [cell for cell in cells if cell.share is not None and cell.share >= 1]
    overall = _first_against_best(contestants, cells, goods)
    if overall is not None:
        best = next(contestant for contestant in contestants if contestant.name == overall["baseline"])
        for cell, comparison in zip(cells, comparisons, strict=True):
            comparison["against_best"] = _over_cells(contestants[0], best, [cell], goods)
    return Result(
        rows,
        comparisons,
        overall,
        _first_against_best(contestants, saturated, goods) if saturated else None,
        _worst(comparisons),
        _winner(contestants, cells, goods),
    )


def upper_bound(cell: Cell, landing_s: float) -> dict[str, Any]:
    """The goodput that no policy can exceed in a cell, whose seeds it holds for (see `envs.bound`)."""
    part = cell.setting.part
    most = most_good(cell.setting.spec, part.traces, speed=cell.load, warmup=part.warmup, landing_s=landing_s)
    return {"bound": most / part.requests, "bound_landing_s": landing_s}


class Good(NamedTuple):
    """Which requests of a cell were good under a policy, and the cell's blocks of time."""

    good: np.ndarray  # 0/1, [S, R]
    blocks: metrics.Blocks
    landing_s: float
    """The longest from the end of a good request's prefill until its KV had landed."""

    @classmethod
    def of(cls, replays: Sequence[Replay]) -> Good:
        good = np.stack([replay.good for replay in replays])
        took = [(r.outcomes["kv_ready_s"] - r.outcomes["prefill_end_s"])[r.good == 1] for r in replays]
        return cls(good, metrics.time_blocks(replays[0].arrival_s), float(np.nanmax(np.concatenate(took), initial=0.0)))


Goods = dict[tuple[Contestant, Cell], Good]


def _play_all(
    contestants: Sequence[Contestant],
    cells: Sequence[Cell],
    settings: Sequence[Setting],
    seeds: Sequence[int],
    pool: Pool,
) -> tuple[dict[tuple[Contestant, Cell], dict[str, Any]], Goods]:
    """Scores and good requests. Compiled policies: a task per cell. Stepped ones: a task per setting, all loads in a
    batch."""
    tasks: list[tuple[Place, Callable[[], list[tuple[dict[str, Any], Good]] | None]]] = []
    groups: list[tuple[Contestant, Sequence[Cell]]] = []
    for setting in settings:
        here = [cell for cell in cells if cell.setting is setting]
        for contestant in contestants:
            for group in [[cell] for cell in here] if contestant.compiled else [here]:
                play = partial(_play, contestant, group, seeds)
                tasks.append((contestant.place, partial(unless_disqualified, contestant, play)))
                groups.append((contestant, group))
    scores: dict[tuple[Contestant, Cell], dict[str, Any]] = {}
    goods: Goods = {}
    for (contestant, of_group), played in zip(groups, pool.run("replays", tasks), strict=True):
        for cell, (score, good) in zip(of_group, played or ()):
            scores[contestant, cell], goods[contestant, cell] = score, good
    return scores, goods


def _play(contestant: Contestant, cells: Sequence[Cell], seeds: Sequence[int]) -> list[tuple[dict[str, Any], Good]]:
    """What a policy makes of cells of one setting. No more is kept: a suite's requests would not fit into memory."""
    replays = contestant.replays(cells[0].setting, [(cell.load, seed) for cell in cells for seed in seeds])
    of_cells = [replays[i : i + len(seeds)] for i in range(0, len(replays), len(seeds))]
    slo = cells[0].setting.spec.slo
    return [
        (metrics.score(of_cell, seeds) | metrics.violations(of_cell, slo.ttft_s, slo.tbt_s), Good.of(of_cell))
        for of_cell in of_cells
    ]


def _about_cell(cell: Cell, seeds: Sequence[int]) -> dict[str, Any]:
    part = cell.setting.part
    return {
        "cell": str(cell),
        "setting": str(cell.setting),
        "trace": part.trace,
        "trace_checksum": part.checksum,
        "part": part.part,
        "cluster": cell.setting.cluster,
        "spec_checksum": cell.setting.spec.checksum,
        "ttft_slo_s": cell.setting.spec.slo.ttft_s,
        "tbt_slo_s": cell.setting.spec.slo.tbt_s,
        "load": cell.load,
        "capacity": cell.capacity,
        "times_capacity": cell.share,
        "seeds": len(seeds),
        "windows": 1,
        "warmup": part.warmup,
        "code_version": code_version(),
    }


# --- comparisons ---------------------------------------------------------------------------------


def _difference(ours: Contestant, theirs: Contestant, cell: Cell, goods: Goods) -> metrics.Interval:
    mine = goods[ours, cell]
    return metrics.difference(mine.good, goods[theirs, cell].good, mine.blocks)


def _ranked(contestants: Sequence[Contestant], cells: Sequence[Cell], goods: Goods) -> list[Contestant]:
    """Best mean goodput over the cells first; equal ones in the order given."""

    def goodput(contestant: Contestant) -> float:
        return float(np.mean([goods[contestant, cell].good.mean() for cell in cells]))

    return sorted(contestants, key=lambda contestant: -goodput(contestant))


def _over_cells(ours: Contestant, theirs: Contestant, cells: Sequence[Cell], goods: Goods) -> dict[str, Any]:
    """Mean difference over cells. Cells of one trace share requests, so their errors are taken to be the same: their
    intervals are averaged. Different traces are independent: what they contribute is added as squares."""
    found = [_difference(ours, theirs, cell, goods) for cell in cells]
    mean = float(np.mean([interval.mean for interval in found]))
    sides = []
    for side in ("low", "high"):
        errors: dict[str, float] = {}
        for cell, interval in zip(cells, found, strict=True):
            trace = cell.setting.part.checksum
            errors[trace] = errors.get(trace, 0.0) + abs(getattr(interval, side) - interval.mean) / len(cells)
        sides.append(math.hypot(*errors.values()))
    low, high = mean - sides[0], mean + sides[1]
    return {"policy": ours.name, "baseline": theirs.name, "mean": mean, "low": low, "high": high}


def _first_against_best(
    contestants: Sequence[Contestant], cells: Sequence[Cell], goods: Goods
) -> dict[str, Any] | None:
    """The first policy minus the best of the others over these cells."""
    others = [contestant for contestant in contestants[1:] if contestant.competes]
    if not others:
        return None
    return _over_cells(contestants[0], _ranked(others, cells, goods)[0], cells, goods)


def _winner(contestants: Sequence[Contestant], cells: Sequence[Cell], goods: Goods) -> str | None:
    contestants = [contestant for contestant in contestants if contestant.competes]
    if len(contestants) < 2:
        return None
    first, second = _ranked(contestants, cells, goods)[:2]
    return first.name if _over_cells(first, second, cells, goods)["low"] > 0 else None


def _compare_cell(contestants: Sequence[Contestant], cell: Cell, goods: Goods) -> dict[str, Any]:
    """The best policy minus the second (`paired`), and the first minus the best of the others (`first`)."""
    found: dict[str, Any] = {"cell": str(cell), "description": cell.description, "load": cell.load}
    found |= {"winner": None, "paired": None, "first": None}
    contestants = [contestant for contestant in contestants if contestant.competes]
    if len(contestants) > 1:
        best, second = _ranked(contestants, [cell], goods)[:2]
        found["paired"] = _over_cells(best, second, [cell], goods)
        found["winner"] = best.name if found["paired"]["low"] > 0 else None
        other = second if best is contestants[0] else best
        goodput = float(goods[other, cell].good.mean())
        first = _over_cells(contestants[0], other, [cell], goods)
        found["first"] = first | {"relative": first["mean"] / goodput if goodput else math.nan}
    return found


def _worst(comparisons: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The cell where the first policy does worst, as a share of what the best of the others has there."""
    known: list[dict[str, Any]] = [{"cell": c["cell"]} | c["first"] for c in comparisons if c["first"]]
    return min((c for c in known if math.isfinite(c["relative"])), key=lambda c: float(c["relative"]), default=None)


# --- from a decision log ---------------------------------------------------------------------------


@dataclass
class LogResult:
    """What a decision log says of policies, ready for JSON."""

    log: dict[str, Any]
    rows: list[dict[str, Any]]
    model: dict[str, Any] | None
    no_model: str
    about: dict[str, Any]


def run_log(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """`--log`: evaluate policies from logged decisions."""
    from runtime.decision_log import read_log

    for option in ("trace", "part", "load", "capacity", "sustained", "headroom", "plot", "site", "submissions"):
        if getattr(arguments, option):
            raise LeaderboardError(f"--{option} does not go with --log: a log has its own requests, at its own speed")
    if arguments.json not in (None, "-") and not Path(arguments.json).resolve().parent.is_dir():
        raise LeaderboardError(f"--json {arguments.json}: expected a file in a folder that exists")
    contestants = [Contestant(name) for name in names]
    log = read_log(arguments.log)
    if log.trace.n_requests <= arguments.warmup:
        raise LeaderboardError(f"--warmup {arguments.warmup}: the log has {log.trace.n_requests} requests")
    setting, no_model = log_setting(log, arguments)
    pool = Pool(arguments.jobs, Progress())
    result = evaluate_log(contestants, log, setting, arguments.warmup, pool, no_model)
    if arguments.json == "-":
        print(log_json(result))
        return
    if arguments.json:
        Path(arguments.json).write_text(log_json(result) + "\n")
    from rich.console import Console

    needed = LOG_WIDTH + max(len(name) for name in names)
    print_log(result, Console(width=max(needed, Console().width)))


def log_setting(log: Log, arguments: argparse.Namespace) -> tuple[Setting | None, str]:
    """The log's requests on the cluster given, or on the log's own; or why they cannot be replayed.

    Raises:
        LeaderboardError: the cluster given has other numbers of instances or another block size than the log's.
    """
    given = _flat(arguments.cluster, [])
    if len(given) > 1:
        raise LeaderboardError(f"--cluster {','.join(given)}: expected one cluster with --log, the one that was logged")
    if given:
        spec, cluster = load_cluster(given[0]), given[0]
    elif log.cluster is not None:
        spec = validate_cluster(log.cluster, f"{arguments.log}: cluster")
        cluster = spec.name
    else:
        return None, "the log does not say which cluster it is of; give --cluster to replay it"
    trace = log.trace
    differs = ""
    if log.logged.observed:
        most = max(log.logged.observed, key=lambda group: len(group.rows)).observation
        found = (most.prefill.shape[1], most.decode.shape[1])
        if found != (spec.n_prefill, spec.n_decode):
            differs = (
                f"was logged on {found[0]} prefill and {found[1]} decode instances, cluster {cluster!r} has "
                f"{spec.n_prefill} and {spec.n_decode}; expected the cluster that was logged"
            )
    if trace.has_blocks and trace.block_tokens != spec.block_tokens:
        differs = (
            f"has blocks of {trace.block_tokens} tokens, cluster {cluster!r} of {spec.block_tokens}; expected equal "
            "sizes (block_tokens of the cluster file)"
        )
    if differs and given:
        raise LeaderboardError(f"{arguments.log} {differs}")
    if differs:
        return None, f"the log {differs}; give --cluster"
    # The same requests for every seed: only policies that draw differ.
    part = Part(str(arguments.log), "log", trace.checksum, arguments.warmup, (trace,) * arguments.seeds)
    return Setting(part, cluster, spec), ""


def evaluate_log(
    contestants: Sequence[Contestant],
    log: Log,
    setting: Setting | None,
    warmup: int,
    pool: Pool,
    no_model: str = "",
) -> LogResult:
    """Every policy on the logged decisions, in the order given. `no_model`: why there is no setting."""
    logged = log.logged.tail(warmup)
    columns = {label: column[warmup:] for label, column in log.columns.items()}
    calibration = off_policy.Calibration.of(logged)
    logging, why = logging_policy(columns)
    replays: dict[str, list[Replay]] = {}
    model = None
    no_model = no_model or why
    if setting is not None and logging is not None:
        everyone = {contestant.name: contestant for contestant in (*contestants, logging)}
        runs = [(1.0, seed) for seed in range(len(setting.part.traces))]
        tasks = [(c.place, partial(c.replays, setting, runs)) for c in everyone.values()]
        replays = dict(zip(everyone, pool.run("replays", tasks), strict=True))
        share = float((columns["policy"] == logging.name).mean())
        model = {"policy": logging.name, "cluster": setting.cluster, "share_decided": share}
        model |= off_policy.model_bias(logged, replays[logging.name])
    rows = []
    for contestant in contestants:
        actions = logged_choices(contestant, logged)
        row: dict[str, Any] = {"policy": contestant.name, "agreement": off_policy.agreement(logged, actions)}
        row["takes"] = off_policy.takes(logged, actions)
        row["ips"] = off_policy.weighted(logged, actions)
        if calibration is None:
            row["dr"] = row["direct"] = off_policy.Estimate(None, "nothing to measure prediction errors on")
        else:
            row["dr"] = off_policy.doubly_robust(logged, actions, calibration)
            row["direct"] = off_policy.direct(logged, actions, calibration)
            row["beyond_logged"] = calibration.beyond(logged, actions)
        if model is not None and logging is not None:
            row["replay"] = off_policy.by_replay(logged, replays[contestant.name], replays[logging.name])
        rows.append(row)
    about = {"notes": off_policy.NOTES | {"method": metrics.METHOD}, "code_version": code_version()}
    return LogResult(about_log(logged, columns), rows, model, no_model, about)


def logged_choices(contestant: Contestant, logged: off_policy.Logged) -> np.ndarray:
    """What a policy would have decided on the logged observations: int64[N]."""
    policy, name = contestant.policy, contestant.name
    call(policy, name, "reset", 1, 0)

    def choose(seen: Observation) -> np.ndarray:
        # A compiled policy cannot write to it, and keeps a handle on the tables it knows.
        return decide(policy, name, seen if contestant.compiled else read_only(seen))

    return off_policy.choices(logged, choose, batched=isinstance(policy, OnnxPolicy))


def logging_policy(columns: dict[str, np.ndarray]) -> tuple[Contestant | None, str]:
    """The policy that made most of the logged decisions, or why it cannot be had."""
    decided = columns["policy"].astype(str)
    names, counts = np.unique(decided[decided != ""], return_counts=True)
    if not len(names):
        return None, "the log does not say who decided"
    name = str(names[counts.argmax()])
    try:
        return Contestant(name), ""
    except (PolicyError, LeaderboardError) as error:
        return None, f"the logged policy cannot be replayed: {error}"


def about_log(logged: off_policy.Logged, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """What was logged: requests, goodput, who decided, and what is missing."""
    known = np.isfinite(logged.good)
    names, counts = np.unique(columns["policy"].astype(str), return_counts=True)
    statuses, ended = np.unique(columns["status"].astype(str), return_counts=True)
    return {
        "requests": len(logged.good),
        "duration_s": float(np.ptp(logged.arrival_s)),
        "goodput": off_policy.mean_of(logged, known, logged.good),
        "takes": off_policy.takes(logged, logged.action),
        "policies": dict(zip(names.tolist(), counts.tolist())),
        "ended": dict(zip(statuses.tolist(), ended.tolist())),
        "fell_back": int((columns["fell_back"].astype(str) != "").sum()),
        "drawn": int((logged.propensity < 1.0).sum()),
        "outcome_unknown": int((~known).sum()),
        "output_unknown": int((~columns["output_known"].astype(bool)).sum()),
        "not_observed": int((~logged.seen).sum()),
    }


def log_json(result: LogResult) -> str:
    """The result as JSON; what does not exist as null."""
    whole = {"log": result.log, "rows": result.rows, "model": result.model, "no_model": result.no_model or None}
    return json.dumps(_plain(whole | result.about), indent=1, allow_nan=False)


# --- output --------------------------------------------------------------------------------------


_version: list[str] = []


def code_version() -> str:
    """Commit of the checkout, with "-dirty" where files differ; "unknown" outside of one."""
    if not _version:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            _version.append(done.stdout.strip())
        except (OSError, subprocess.SubprocessError):
            _version.append("unknown")
    return _version[0]


def _plain(value: Any) -> Any:
    """Whole numbers as integers, what does not exist as null, named tuples by name."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() else value
    return value


def as_json(result: Result) -> str:
    """The result as JSON; whole numbers as integers, what does not exist as null."""
    whole = {
        "rows": result.rows,
        "paired": result.paired,
        "paired_saturated": result.paired_saturated,
        "worst": result.worst,
        "winner": result.winner,
        "cells": result.cells,
        "capacities": result.capacities,
        **result.about,
    }
    return json.dumps(_plain(whole), indent=1, allow_nan=False)


BOUND = (
    "upper bound: no schedule, not even one that knows the future, has more (envs/bound.py), where the KV of good "
    f"requests lands within {LANDING_S:g} s of the prefill's end, or as long as any took in these replays."
)


def notes(seeds: int) -> dict[str, str]:
    """What the figures mean, for the table's footer and the JSON."""
    return {
        "goodput": (
            "goodput: share of all offered requests that completed within both SLOs; counts are "
            "means over seeds. Each part is one replay, caches cold unless there is a warmup."
        ),
        "seeds": (
            f"seeds: {seeds}. Seed 0 is the trace as it is; others spread requests with equal "
            "timestamps over the gap to the next one (never changing their order), and seed the policy."
        ),
        "method": metrics.METHOD,
        "bound": BOUND,
        "decision_us": (
            f"µs per decision: decide() on a batch of {OBSERVATIONS} stored observations, per "
            "observation, making it excluded; decision_alone_us in the JSON: one at a time."
        ),
    }


def note_on_submissions(limits: Limits) -> str:
    """How submissions were run."""
    limited = sandbox.unlimited() or "it can read its own files, the project's and Python's"
    return (
        "submissions: each in processes of its own, which can write nothing, reach no network and start nothing; "
        f"{limited}. Limits: {limits}. Their µs per decision include the way to that process and back."
    )


def about_policies(contestants: Sequence[Contestant], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each policy what it is made of, and the command that gives its rows alone."""
    return [
        {
            "policy": contestant.name,
            "competes": contestant.competes,
            "command": command_of(contestant, arguments),
            "configuration": contestant.configuration(),
        }
        for contestant in contestants
        if not contestant.disqualified
    ]


def disqualified(contestants: Sequence[Contestant], refused: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Submissions without rows and why: those `refused` before anything was run, then those that were run."""
    ran = [{"policy": c.name, "reason": c.disqualified} for c in contestants if c.disqualified]
    return [*refused, *ran]


def make_submissions(folder: Path, limits: Limits) -> tuple[list[Submitted], list[dict[str, str]]]:
    """The submissions in a folder, and those that are refused, with the reason.

    Raises:
        SubmissionError: the folder has none.
        LeaderboardError: this machine has no sandbox to run them in.
    """
    folders = submission_folders(folder)
    reason = sandbox.why_not()
    if reason:
        raise LeaderboardError(f"--submissions {folder}: nothing is run without a sandbox: {reason}")
    found: dict[str, Submitted] = {}
    refused = []
    for each in folders:
        try:
            submission = read_submission(each)
            if submission.name in found:
                other = found[submission.name].submission.folder
                raise SubmissionError(f"name: {submission.name} is taken by {printable(other.name)}")
            found[submission.name] = Submitted(submission, limits)
        except SubmissionError as error:
            refused.append({"policy": f"submission/{printable(each.name)}", "reason": str(error)})
    return list(found.values()), refused


def command_of(contestant: Contestant, arguments: argparse.Namespace) -> str:
    """The command that gives one policy's rows of the cells asked for."""
    given = contestant.options()
    if arguments.suite:
        given += ["--suite", arguments.suite, *(["--cells", arguments.cells] if arguments.cells else [])]
    else:
        loads = _flat(arguments.load, [])
        shares = _flat(arguments.capacity, [])
        if not (loads or shares or arguments.trace):
            loads = list(DEFAULT_LOADS)
        given += ["--trace", ",".join(_flat(arguments.trace, [DEFAULT_TRACE]))]
        given += ["--part", ",".join(_flat(arguments.part, [DEFAULT_PART]))]
        given += ["--cluster", ",".join(_flat(arguments.cluster, [DEFAULT_CLUSTER]))]
        for option, values in (("--load", loads), ("--capacity", shares)):
            given += [option, ",".join(f"{value!r}" for value in values)] if values else []
        given += ["--warmup", str(arguments.warmup)]
    given += ["--reference", arguments.reference, "--seeds", str(arguments.seeds)]
    return shlex.join(["python", "leaderboard.py", *given])


# --- command line --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a finite number above 0")
    return value


def _factors(text: str) -> list[float]:
    return [_factor(part) for part in text.split(",")]


def at_least(smallest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(f"found {text!r}; expected an integer >= {smallest}")
        return value

    return integer


def _limits(text: str) -> Limits:
    try:
        return Limits.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def policy_names(text: str) -> list[str]:
    """Split at commas, but not at those between a policy's options."""
    names: list[str] = []
    for piece in filter(None, text.split(",")):
        key, equals, _ = piece.partition("=")
        if names and equals and key.isidentifier():
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    return names


def default_policies() -> list[str]:
    """All heuristics: the conductor first, with every admission, then the other routers."""
    admissions = [name for name in ADMISSIONS if name != "slo"]
    others = [name for name in ROUTERS if name != "conductor"]
    return ["conductor", *(f"conductor+{admission}" for admission in admissions), *others]


def suite_policies() -> list[str]:
    """What a suite compares unless told: the learned policy, and the heuristics as tuned."""
    return ["learned", *tuned().values()]


def cell_options(made: argparse.ArgumentParser) -> None:
    """Add the options that say which cells."""
    add = made.add_argument
    add("--trace", action="append", type=_names, metavar="FILE",
        help=f"any public trace, builtin:NAME or mooncake:NAME (default {DEFAULT_TRACE})")  # fmt: skip
    add("--suite", metavar="NAME|FILE",
        help=f"evaluate a suite's cells: {', '.join(suite_names())}, or a YAML file like envs/suites.yaml")  # fmt: skip
    add("--cells", metavar="GLOB", help="of a suite, only the cells of these names, such as '*-1.5x'")
    add("--part", action="append", type=_names, metavar="|".join(PARTS),
        help="part of the trace, cut by time 60/20/20 (default test)")  # fmt: skip
    add("--cluster", action="append", type=_names, metavar="NAME", help=f"default {DEFAULT_CLUSTER}")
    add("--load", action="append", type=_factors, metavar="X",
        help="arrival speed, times the trace's own (default 1; without --trace, several)")  # fmt: skip
    add("--capacity", action="append", type=_factors, metavar="X",
        help="load as a multiple of capacity: the highest load at which --reference meets 90 %%")  # fmt: skip
    add(
        "--reference",
        default="conductor",
        metavar="POLICY",
        help="for --capacity (default conductor)",
    )
    add("--seeds", type=at_least(1), metavar="N",
        help=f"replays per cell; the first is the trace as it is (default {DEFAULT_SEEDS}; the suite's)")  # fmt: skip
    add("--warmup", type=at_least(0), default=0, metavar="N",
        help="requests before the part (of a whole trace its first) to simulate, not count (default 0)")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line, with lists of policies and clusters in its help."""
    made = Parser(
        prog="leaderboard.py",
        description="Compare schedulers of a prefill/decode cluster on traces, with confidence "
        "intervals. Every policy replays the same requests; the score is goodput under SLO.",
        epilog=f"{EXAMPLES}  routers: {', '.join(ROUTERS)}\n  admissions: {', '.join(ADMISSIONS)}\n"
        "  (--list tells what each does, and its options)\n\n"
        f"clusters: {', '.join(cluster_names())}, any <prefills>p<decodes>d such as 5p11d, or a YAML file\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "--policies",
        action="append",
        type=policy_names,
        metavar="A,B,...",
        help="default: all heuristics; of a suite, as tuned, and the learned policy",
    )
    cell_options(made)
    add("--submissions", metavar="FOLDER",
        help="also evaluate what others handed in: a folder of submissions, or one (docs/submissions.md)")  # fmt: skip
    add("--limits", type=_limits, default=Limits(), metavar="NAME=X,...",
        help=f"what a submission may take (default {Limits()})")  # fmt: skip
    add("--rerun", metavar="FILE",
        help="run what a --json file comes from again; are its figures the same? (exit code 1: no)")  # fmt: skip
    add("--log", metavar="FOLDER",
        help="evaluate from a decision log instead: agreement, weighted and direct estimates, replay")  # fmt: skip
    add("--sustained", action=argparse.BooleanOptionalAction, default=None,
        help="also search the highest load at 90 %% and 99 %% attainment (on without arguments)")  # fmt: skip
    add("--headroom", action="store_true", help="also say what no policy can exceed in each cell (an upper bound)")
    add(
        "--json",
        metavar="FILE|-",
        help="write the figures as JSON; - is stdout, and nothing else there",
    )
    add("--plot", metavar="FILE.png", help="plot goodput over load")
    add("--markdown", metavar="FILE.md", help="write tables of the policies and the cells for a document")
    add("--site", metavar="FOLDER", help="write a static site: rankings, filters, curves; open its index.html")
    add("--ray", nargs="?", const="", metavar="ADDRESS",
        help="compiled policies on a Ray cluster (auto, HOST:PORT); without ADDRESS, one of this machine")  # fmt: skip
    add(
        "--jobs",
        type=at_least(1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="threads (default: CPUs)",
    )
    add("--list", action="store_true", help="list policies with their meaning and options, and suites, and stop")
    add("--debug", action="store_true", help="show the traceback of an error")
    return made


def list_suites() -> str:
    """Every built-in suite with its cells."""
    lines = []
    for suite in map(load_suite, suite_names()):
        lines += [f"suite {suite.name}: {suite.about}", *(f"  {cell.name}" for cell in suite.cells)]
    return "\n".join(lines)


def list_policies() -> str:
    """Every router and admission with its meaning and options."""
    lines = []
    for kind, parts in (("routers", ROUTERS), ("admissions (+NAME)", ADMISSIONS)):
        lines.append(f"{kind}:")
        width = max(map(len, parts))
        for name, part in parts.items():
            lines.append(f"  {name:{width}}  {part.meaning}")
            lines += [
                f"  {'':{width}}    :{option.name}={option.default:g}  {option.meaning}" for option in part.options
            ]
    return "\n".join(lines)


PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def _flat(given: list[list[Any]] | None, otherwise: list[Any]) -> list[Any]:
    """All values of a repeatable option, each once, in order."""
    return list(dict.fromkeys(v for values in given for v in values)) if given else otherwise


class Wanted(NamedTuple):
    """A setting, and where on it: loads, or multiples of its capacity (each with the name of its cell, if any)."""

    setting: Setting
    loads: Sequence[float] = ()
    shares: Sequence[tuple[float, str]] = ()


def make_wanted(arguments: argparse.Namespace) -> list[Wanted]:
    """The (part, cluster) pairs asked for, and the loads on each.

    Raises:
        LeaderboardError: options that cannot be, or that exclude each other.
    """
    if arguments.load and arguments.capacity:
        raise LeaderboardError("--load and --capacity both give the load; use one of them")
    parts = _flat(arguments.part, [DEFAULT_PART])
    for part in parts:
        if part not in PARTS:
            raise LeaderboardError(f"no part is called {part!r}; expected one of {', '.join(PARTS)}")
    clusters = _flat(arguments.cluster, [DEFAULT_CLUSTER])
    for cluster in clusters:
        load_cluster(cluster)
    loads = _flat(arguments.load, [])
    shares = [(share, "") for share in _flat(arguments.capacity, [])]
    if not loads and not shares:
        loads = [1.0] if arguments.trace else list(DEFAULT_LOADS)
    wanted = []
    for given in _flat(arguments.trace, [DEFAULT_TRACE]):
        name, trace = named_trace(given)
        for part in parts:
            made = make_part(trace, part, arguments.warmup, arguments.seeds, name)
            wanted += [Wanted(make_setting(trace, made, cluster), loads, shares) for cluster in clusters]
    return wanted


def suite_wanted(suite: Suite, glob: str, seeds: int) -> list[Wanted]:
    """The settings of a suite with the loads of the cells that are called so.

    Raises:
        LeaderboardError: none is.
    """
    chosen = [cell for cell in suite.cells if fnmatchcase(cell.name, glob)]
    if not chosen:
        raise LeaderboardError(f"--cells {glob}: suite {suite.name} has {', '.join(cell.name for cell in suite.cells)}")
    settings = list(dict.fromkeys(cell.setting for cell in chosen))
    traces = {given: named_trace(given) for given in dict.fromkeys(setting.trace for setting in settings)}
    parts = {
        (given, part): make_part(traces[given][1], part, suite.warmup, seeds, traces[given][0])
        for given, part in dict.fromkeys((setting.trace, setting.part) for setting in settings)
    }
    return [
        Wanted(
            make_setting(traces[setting.trace][1], parts[setting.trace, setting.part], setting.cluster),
            shares=[(cell.share, cell.name) for cell in chosen if cell.setting is setting],
        )
        for setting in settings
    ]


def named_trace(given: str) -> tuple[str, Trace]:
    """A trace, and what results call it: what was given, but that a stand-in is called one."""
    trace = load_trace(given)
    return (trace.name if given.startswith(RELEASED_PREFIX) else given), trace


def make_cells(
    wanted: Sequence[Wanted], reference: str, seeds: int, pool: Pool
) -> tuple[list[Cell], list[dict[str, Any]]]:
    """The cells asked for, and the capacities measured for them.

    Raises:
        LeaderboardError: the reference never meets 90 %, or always.
    """
    of_capacity = [want.setting for want in wanted if want.shares]
    found: dict[Setting, metrics.Highest] = {}
    if of_capacity:
        policy = Contestant(reference)
        searches = [(policy.place, partial(sustained_loads, policy, s, range(seeds), [0.9])) for s in of_capacity]
        found = {s: highest for s, (highest,) in zip(of_capacity, pool.run("capacities", searches), strict=True)}
    cells, capacities = [], []
    for setting, loads, shares in wanted:
        cells += [Cell(setting, load) for load in loads]
        if not shares:
            continue
        capacity = found[setting].load
        if capacity is None:
            raise LeaderboardError(
                f"capacity of {setting}: 90 % attainment by {reference} is {found[setting].note}; "
                "expected a load that separates; use --load"
            )
        capacities.append(
            {
                "setting": str(setting),
                "reference": reference,
                "load": capacity,
                "meaning": f"the highest at which {reference} meets 90 % attainment",
            }
        )
        cells += [Cell(setting, share * capacity, capacity, share, name) for share, name in shares]
    return cells, capacities


def chosen_suite(arguments: argparse.Namespace) -> Suite | None:
    """The suite asked for, if one was.

    Raises:
        LeaderboardError: with options that say what the suite says.
    """
    if arguments.suite is None:
        if arguments.cells is not None:
            raise LeaderboardError(f"--cells {arguments.cells} chooses from a suite; expected --suite with it")
        return None
    for option in ("trace", "part", "cluster", "load", "capacity", "warmup", "log"):
        if getattr(arguments, option, None):
            raise LeaderboardError(f"--{option} does not go with --suite: its cells say it (--cells chooses some)")
    return load_suite(arguments.suite)


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """What the command line asked for; the exit code."""
    if arguments.list or arguments.suite == "list":
        print(list_suites() if arguments.suite else f"{list_policies()}\n{list_suites()}")
        return 0
    if arguments.rerun:
        return rerun(arguments)
    if arguments.log:
        run_log(arguments, names_of(arguments, chosen_suite(arguments)))
        return 0
    check_outputs(arguments)
    result = result_of(arguments, given)
    if arguments.plot:
        plot(result, arguments.plot)
    if arguments.markdown:
        Path(arguments.markdown).write_text(as_markdown(result, result.about["command"]))
    if arguments.site:
        write_site(json.loads(as_json(result)), Path(arguments.site))
    if arguments.json == "-":
        print(as_json(result))
        return 0
    if arguments.json:
        Path(arguments.json).write_text(as_json(result) + "\n")
    from rich.console import Console

    needed = FIGURES_WIDTH + max(len(row["policy"]) for row in result.rows)
    print_tables(result, Console(width=max(needed, Console().width)))
    return 0


def check_outputs(arguments: argparse.Namespace) -> None:
    """Whether what was asked for can be written, before the work.

    Raises:
        LeaderboardError: naming the option.
    """
    if arguments.plot and Path(arguments.plot).suffix.lower() not in PLOT_SUFFIXES:
        raise LeaderboardError(f"--plot {arguments.plot}: expected a name that ends in {', '.join(PLOT_SUFFIXES)}")
    for option in ("plot", "json", "markdown"):
        file = getattr(arguments, option)
        if file not in (None, "-") and not Path(file).resolve().parent.is_dir():
            raise LeaderboardError(f"--{option} {file}: expected a file in a folder that exists")
    if arguments.site:
        site = Path(arguments.site).resolve()
        if not site.parent.is_dir() or (site.exists() and not site.is_dir()):
            raise LeaderboardError(f"--site {arguments.site}: expected a folder, or a new one in a folder that exists")


def names_of(arguments: argparse.Namespace, suite: Suite | None) -> list[str]:
    """The policies asked for by name. Sets the number of seeds too.

    Raises:
        LeaderboardError: none, and no submissions either.
    """
    names = _flat(arguments.policies, suite_policies() if suite else default_policies())
    if not names and not arguments.submissions:
        raise LeaderboardError("--policies: expected at least one policy; see --list")
    arguments.seeds = arguments.seeds or (suite.seeds if suite else DEFAULT_SEEDS)
    return names


def result_of(arguments: argparse.Namespace, given: Sequence[str]) -> Result:
    """The result of a command line, with where it comes from."""
    suite = chosen_suite(arguments)
    contestants = [Contestant(name) for name in names_of(arguments, suite)]
    refused: list[dict[str, str]] = []
    if arguments.submissions:
        submissions, refused = make_submissions(Path(arguments.submissions), arguments.limits)
        contestants += submissions
    if not contestants:
        raise LeaderboardError("; ".join(f"{each['policy']}: {each['reason']}" for each in refused))
    wanted = suite_wanted(suite, arguments.cells or "*", arguments.seeds) if suite else make_wanted(arguments)
    asked = (suite, arguments.policies, arguments.trace, arguments.load, arguments.capacity, arguments.submissions)
    sustained = not any(asked) if arguments.sustained is None else arguments.sustained
    with far_executor(arguments.ray, arguments.jobs) as anywhere:
        pool = Pool(arguments.jobs, Progress(), anywhere)
        cells, capacities = make_cells(wanted, arguments.reference, arguments.seeds, pool)
        result = evaluate(
            contestants,
            cells,
            seeds=range(arguments.seeds),
            sustained=sustained,
            headroom=arguments.headroom,
            pool=pool,
        )
    result.capacities = capacities
    result.about = {"notes": notes(arguments.seeds), "code_version": code_version()}
    result.about["command"] = shlex.join(["python", "leaderboard.py", *given])
    result.about["policies"] = about_policies(contestants, arguments)
    result.about["disqualified"] = disqualified(contestants, refused)
    if arguments.submissions:
        result.about["notes"]["submissions"] = note_on_submissions(arguments.limits)
    return result


def rerun(arguments: argparse.Namespace) -> int:
    """`--rerun`: run the command of a result again, and print whether its figures are the same.

    Raises:
        LeaderboardError: the file is no result of `--json`.
    """
    file = arguments.rerun
    for option in ("policies", "trace", "suite", "submissions", "log", "json", "site", "plot", "markdown"):
        if getattr(arguments, option):
            raise LeaderboardError(f"--{option} does not go with --rerun: the file says what is run")
    try:
        before = json.loads(Path(file).read_text())
        command = shlex.split(before["command"])[2:]
        rows = len(before["rows"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LeaderboardError(f"--rerun {file}: expected what --json wrote, found {error!r}") from None
    again = parser().parse_args(command)
    again.jobs, again.ray = arguments.jobs, arguments.ray
    now = json.loads(as_json(result_of(again, command)))
    print(f"rerun of {shlex.join(['python', 'leaderboard.py', *command])}")
    print(f"code {before['code_version']} then, {now['code_version']} now")
    found = differences(before, now)
    if not found:
        print(f"the same: all figures of {rows} rows, the checksums of traces, clusters and policies")
        return 0
    print(f"not the same: {len(found)} figures differ")
    for difference in found[:MOST_SHOWN]:
        print(f"  {difference}")
    return EXIT_DIFFERS


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: see `exit_code`; 1 for a rerun that differs."""
    arguments = parser().parse_args(given)
    return exit_code(lambda: run(arguments, sys.argv[1:] if given is None else given), arguments.debug)


def exit_code(command: Callable[[], int], debug: bool) -> int:
    """Of a command: its own, 2 for bad input (one line on stderr), 130 when interrupted."""
    sys.path.insert(0, os.getcwd())  # module:Class is looked for where the command runs
    try:
        return command()
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LeaderboardError, PolicyError, SubmissionError, SpecError, TraceError, OSError, MemoryError) as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)  # replays in threads cannot be stopped


if __name__ == "__main__":
    import leaderboard  # under its name, by which the nodes of a Ray cluster know what they are sent

    sys.exit(leaderboard.main())
