"""Policy improvement by counterfactual rollouts: what would have become of the other decisions?

0. The prior of the network, Algorithm 1 with early rejection, gets the options that CMA-ES finds on windows of the
   training part.
1. Clusters replay windows under the policy so far, or one that accepts more or less. At some requests every candidate
   decision (reject, other prefill instances and sources, other decode instances) is tried in a copy of the cluster: the
   same requests arrive, the policy decides about the next `horizon`, and what is counted is how many become good
   (`Simulator.branch`). All else being equal, the differences are what the decision is worth: in good requests, the
   leaderboard's own unit.
2. A set scorer is fitted to these differences.
3. It decides as the prior does, unless another decision is worth more by a margin. The margin is chosen on the
   validation part. Then the next round, from 1.

All is one network, gate and margin in it, and is exported as any other.
"""

from __future__ import annotations

import json
import os
import signal
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from envs.simulator import Simulator
from envs.spec import ClusterSpec
from envs.state import Observation
from policies.clairvoyant import CANDIDATES, candidates
from policies.networks import SetScorer
from policies.policy import PolicyError
from policies.registry import CompiledPolicy, compiled_policy, gate_of
from policies.run_folder import (
    action_masks,
    checkpoint_file,
    float32_tables,
    save_weights,
    weights_of,
    write_atomically,
)
from policies.trainers.progress import Progress
from policies.trainers.workload import Workload
from policies.tuning import VALIDATION_JITTERS, Contender, Trials

CLUSTERS = 16  # replayed side by side
BRANCHED = 25  # one of as many requests is branched at
HELD_OUT = 20  # one of as many branches is kept from the fit
MOST_GAIN = 4.0  # good requests: what is beyond in a difference is luck of what follows
MARGINS = (0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.3, 2.0, 8.0)  # good requests; beyond the last nothing is changed
MOST_WORSE = 0.005  # goodput that a margin may cost on some part of the validation
BEHAVIOURS = 3  # priors of other gates beside the policy itself
TIMES_GATE = np.array([[0.02, 0.4, 0.2, 0.1], [4.0, 1.2, 3.0, 4.0]])  # by what these differ, from, to
BATCH = 512
RECHECK = True  # decode nodes check the TBT SLO again
VALIDATE_EVERY = 5  # generations of the prior


class Options(Protocol):
    """The options of `train.py` that this trainer reads."""

    @property
    def base(self) -> str: ...
    @property
    def generations(self) -> int: ...
    @property
    def population(self) -> int: ...
    @property
    def windows(self) -> int: ...
    @property
    def states(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def horizon(self) -> int: ...
    @property
    def fit_epochs(self) -> int: ...
    @property
    def fit_lr(self) -> float: ...
    @property
    def hidden(self) -> int: ...
    @property
    def episode_requests(self) -> int: ...
    @property
    def seed(self) -> int: ...


class Branches(NamedTuple):
    """N visited states of P x D clusters, and what became of K candidates in each."""

    request: NDArray[np.float32]  # [N, 5]
    prefill: NDArray[np.float32]  # [N, P, 13]
    decode: NDArray[np.float32]  # [N, D, 10]
    cluster: NDArray[np.float32]  # [N, 7]
    masks: NDArray[np.bool_]  # [N, 1 + P D 3]
    actions: NDArray[np.int64]  # [N, K], the policy's own first; -1 where there are fewer
    good: NDArray[np.float32]  # [N, K], requests that became good

    def rows(self, numbers: NDArray[np.int64]) -> Branches:
        """Some of the states."""
        columns: Any = (column[numbers] for column in self)
        return Branches(*columns)


class Branching:
    """Replays windows of a workload under a policy, and branches at some of the requests.

    Args:
        window: requests per window. horizon: requests per branch. workers: threads, each with a scratch cluster.
    """

    def __init__(self, spec: ClusterSpec, workload: Workload, window: int, horizon: int, workers: int) -> None:
        self.trace, self.load = workload.train, workload.load
        self.window, self.horizon = min(window, self.trace.n_requests), horizon
        self.simulator = Simulator.with_room(spec, self.trace, clusters=CLUSTERS + workers, requests=self.window)
        self.workers = workers

    def gather(
        self, scorer: SetScorer, rng: np.random.Generator, threads: ThreadPoolExecutor, stopped: Callable[[], bool]
    ) -> Branches | None:
        """The branches of one batch of windows under a scorer, in the branches too; None when it was stopped."""
        simulator = self.simulator
        observation = Observation(*(table[:CLUSTERS] for table in simulator.observation_tables))
        policy, router = (compiled_policy(scorer, "", RECHECK, rejects=rejects) for rejects in (True, False))
        behaviours = [policy, *(compiled_policy(other, "", RECHECK) for other in _others(scorer, rng))]
        for decider in (router, *behaviours):
            decider.reset(CLUSTERS, 0)
        behaviour = rng.integers(len(behaviours), size=CLUSTERS)
        for c in range(CLUSTERS):
            first = int(rng.integers(self.trace.n_requests - self.window + 1))
            speed = float(np.exp(rng.uniform(*np.log(self.load))))
            simulator.load(c, self.trace, first, first + self.window, speed=speed, recheck=RECHECK)
            simulator.observe(c)
        actions, done = np.zeros(simulator.clusters, np.int64), np.zeros(simulator.clusters, np.bool_)
        pieces = []
        for _ in range(self.window):
            if stopped():
                return None
            chosen = np.flatnonzero(rng.random(CLUSTERS) < 1 / BRANCHED)
            if len(chosen):
                own, routed = policy.decide(observation), router.decide(observation)
                tried = [candidates(observation, int(c), int(own[c]), int(routed[c]), rng) for c in chosen]
                pieces.append(self._branch(policy, observation, chosen, tried, threads))
            decided = np.stack([decider.decide(observation) for decider in behaviours])
            actions[:CLUSTERS] = decided[behaviour, np.arange(CLUSTERS)]
            simulator.step(actions, done, 0, CLUSTERS)
        return joined(pieces)

    def _branch(
        self,
        policy: CompiledPolicy,
        observation: Observation,
        clusters: NDArray[np.int64],
        tried: list[list[int]],
        threads: ThreadPoolExecutor,
    ) -> Branches:
        actions = np.full((len(clusters), CANDIDATES), -1, np.int64)
        good = np.zeros((len(clusters), CANDIDATES), np.float32)
        for row, found in zip(actions, tried, strict=True):
            row[: len(found)] = found

        def work(worker: int) -> None:
            for i in range(worker, len(clusters), self.workers):
                count, scratch = len(tried[i]), CLUSTERS + worker
                good[i, :count] = policy.branch(
                    self.simulator, int(clusters[i]), scratch, actions[i, :count], horizon=self.horizon
                )

        list(threads.map(work, range(self.workers)))
        seen = Observation(*(table[clusters] for table in observation))
        return Branches(**float32_tables(seen), masks=action_masks(seen), actions=actions, good=good)


def _others(scorer: SetScorer, rng: np.random.Generator) -> list[SetScorer]:
    """Priors that accept more or less than a scorer's: they lead to fuller and emptier clusters than it does itself.

    A scorer fitted to states of its own kind only may be wrong about others, and stay there: one that rejects all of
    what comes to an empty cluster sees nothing else from then on.
    """
    found = []
    for _ in range(BEHAVIOURS):
        other = SetScorer(1, anchored=True)
        factors = np.exp(rng.uniform(*np.log(TIMES_GATE)))
        other.gate.copy_(scorer.gate * torch.from_numpy(factors).float())
        found.append(other)
    return found


def joined(pieces: Sequence[Branches]) -> Branches:
    """All of some branches."""
    columns: Any = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    return Branches(*columns)


def loss_of(scorer: SetScorer, batch: Branches) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared error of the differences between candidates, and the same of a scorer that sees none."""
    tables = {name: torch.from_numpy(getattr(batch, name)) for name in ("request", "prefill", "decode", "cluster")}
    actions = torch.from_numpy(batch.actions)
    there = (actions >= 0).float()
    scores = scorer(tables, torch.from_numpy(batch.masks)).gather(1, actions.clamp(min=0))
    good = torch.from_numpy(batch.good)

    def centred(values: torch.Tensor) -> torch.Tensor:
        mean = (values * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
        return (values - mean) * there

    differences = centred(good).clamp(-MOST_GAIN, MOST_GAIN)
    count = there.sum()
    return ((centred(scores) - differences) ** 2).sum() / count, (differences**2).sum() / count


def fit(
    scorer: SetScorer, branches: Branches, epochs: int, lr: float, rng: np.random.Generator, stopped: Callable[[], bool]
) -> float:
    """Fit a scorer to branches; returns how much of the variance it explains in those held out."""
    margin = float(scorer.margin)
    scorer.margin.fill_(0.0)
    scorer.train()
    numbers = rng.permutation(len(branches.good))
    held_out, fitted = np.split(numbers, [len(numbers) // HELD_OUT])
    steps = max(1, epochs * -(-len(fitted) // BATCH))
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(fitted), -(-len(fitted) // BATCH)):
            if stopped():
                return 0.0
            loss, _ = loss_of(scorer, branches.rows(rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    scorer.eval()
    scorer.margin.fill_(margin)
    if not len(held_out):
        return 0.0
    with torch.inference_mode():
        loss, blind = loss_of(scorer, branches.rows(held_out))
    return float(1.0 - loss / blind)


class Run:
    """One training: its folder, its workloads, and what has been found so far."""

    def __init__(self, options: Options, folder: Path, spec: ClusterSpec, workloads: Sequence[Workload]) -> None:
        gate_of(options.base)
        self.options, self.folder, self.spec, self.workloads = options, folder, spec, workloads
        traces, loads = [w.trace for w in workloads], [w.load for w in workloads]
        self.trials = Trials(spec, traces, loads, workloads[0].part, options.episode_requests)
        self.metrics: dict[str, Any] = {"steps": 0, "validation": []}
        self.stops = 0
        self.branches = 0
        self.branch_s = 0.0

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: stop soon; a second signal interrupts at once."""
        self.stops += 1
        signal.signal(number, signal.default_int_handler)

    def stopped(self) -> bool:
        return self.stops > 0

    def find_prior(self) -> str | None:
        """The prior with the options that do best on validation of those CMA-ES finds; None when it was stopped."""
        options = self.options
        contender = Contender(
            options.base, self.trials, options.seed, windows=options.windows, population=options.population
        )
        with Progress(options.generations, 0) as progress:
            for generation in range(1, options.generations + 1):
                if self.stopped():
                    return None
                goodput = contender.step()
                if generation % VALIDATE_EVERY == 0 or generation == options.generations:
                    contender.judge()
                progress.show(generation, f"prior: goodput {goodput:.3f}  validation {contender.goodput:.4f}")
        return contender.policy

    def new_scorer(self, prior: str) -> SetScorer:
        """Untrained: decides as the prior."""
        torch.manual_seed(self.options.seed)
        scorer = SetScorer(self.options.hidden, anchored=True)
        scorer.gate.copy_(torch.from_numpy(gate_of(prior)))
        return scorer.eval()

    def goodputs(self, scorer: SetScorer) -> NDArray[np.float64]:
        """Of a scorer in the windows of the validation parts: float64[windows]."""
        policy = compiled_policy(scorer, "present", RECHECK)
        scores: NDArray[np.float64] = self.trials.scores([policy], self.trials.validation())[0]
        return scores

    def choose_margin(self, scorer: SetScorer, base: NDArray[np.float64]) -> NDArray[np.float64]:
        """The margin with the best mean goodput on validation of those that make no trace at no load much worse.

        Args:
            base: that of the prior, by window.

        Returns:
            That of the scorer with this margin, by window.
        """
        found = []
        for margin in MARGINS:
            scorer.margin.fill_(margin)
            found.append(self.goodputs(scorer))

        def rank(i: int) -> tuple[bool, float]:
            worst = (found[i] - base).reshape(-1, VALIDATION_JITTERS).mean(1).min()
            return bool(worst >= -MOST_WORSE), float(found[i].mean())

        best = max(range(len(MARGINS)), key=rank)
        scorer.margin.fill_(MARGINS[best])
        chosen: NDArray[np.float64] = found[best]
        return chosen

    def note(self, states: int, found: NDArray[np.float64], **more: Any) -> float:
        """Add to the validation history; the mean goodput."""
        score = float(found.mean())
        by_load = found.reshape(len(self.workloads), -1, VALIDATION_JITTERS).mean(2)
        by_trace = dict(zip((w.trace.name for w in self.workloads), by_load.tolist(), strict=True))
        self.metrics["validation"].append({"steps": states, "goodput": score, "by_trace": by_trace, **more})
        self.metrics["steps"] = states
        return score

    def write(self) -> None:
        write_atomically(self.folder / "metrics.json", json.dumps(self.metrics, indent=2) + "\n")


def train(options: Options, folder: Path, spec: ClusterSpec, workloads: Sequence[Workload], resume: bool) -> bool:
    """Train into a run folder that has its config.yaml; False when a signal stopped it.

    The prior found and whole batches of branches are kept in checkpoints/ until the end, so that a resumed run does the
    rest only and ends with the same weights.

    Raises:
        PolicyError: a base that is not the network's prior.
    """
    torch.set_num_threads(1)  # the second core branches, or is somebody else's
    run = Run(options, folder, spec, workloads)
    before = {number: signal.signal(number, run.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    started, cpu = time.perf_counter(), time.process_time()
    try:
        finished = _rounds(run)
    except KeyboardInterrupt:  # the second signal
        return False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    session = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    session |= {"branches": run.branches, "branch_cpu_s": run.branch_s}
    run.metrics["sessions"] = [{name: round(value, 3) for name, value in session.items()}]
    if finished:
        run.write()
        for file in folder.glob("checkpoints/branches_*.npz"):
            file.unlink()
    return finished


def _rounds(run: Run) -> bool:
    from torch.utils.tensorboard import SummaryWriter

    options, folder = run.options, run.folder
    kept = folder / "checkpoints" / "prior.txt"
    prior = kept.read_text().strip() if kept.is_file() else run.find_prior()
    if prior is None:
        return False
    write_atomically(kept, prior + "\n")
    scorer = run.new_scorer(prior)
    scorer.margin.fill_(max(MARGINS))
    base = run.goodputs(scorer)
    best = run.note(0, base, prior=prior)
    run.metrics["best"] = {"steps": 0, "goodput": best}
    save_weights(folder / "best.zip", weights_of(scorer), {})
    workers = os.cpu_count() or 1
    gathered: list[Branches] = []
    states, total = 0, options.rounds * options.states
    with (
        ThreadPoolExecutor(workers) as threads,
        SummaryWriter(str(folder / "tensorboard")) as board,
        Progress(total, 0) as progress,
    ):
        window, horizon = options.episode_requests, options.horizon
        branchings = [Branching(run.spec, workload, window, horizon, workers) for workload in run.workloads]
        for number in range(options.rounds):
            while states < (number + 1) * options.states:
                batch = len(gathered)
                file = folder / "checkpoints" / f"branches_{batch:06d}.npz"
                branches = read_branches(file)
                if branches is None:
                    cpu = time.process_time()
                    rng = np.random.default_rng([options.seed, batch])
                    branches = branchings[batch % len(branchings)].gather(scorer, rng, threads, run.stopped)
                    if branches is None:
                        return False
                    run.branch_s += time.process_time() - cpu
                    run.branches += int((branches.actions >= 0).sum())
                    write_branches(file, branches)
                gathered.append(branches)
                states += len(branches.good)
                speed = f"{run.branches / run.branch_s:,.0f} branches per CPU second" if run.branches else "kept"
                progress.show(min(states, total), f"round {number + 1}: {speed}")
            scorer = run.new_scorer(prior)
            rng = np.random.default_rng([options.seed, number])
            explained = fit(scorer, joined(gathered), options.fit_epochs, options.fit_lr, rng, run.stopped)
            if run.stopped():
                return False
            found = run.choose_margin(scorer, base)
            score = run.note(states, found, margin=float(scorer.margin), explained=explained)
            save_weights(checkpoint_file(folder, states), weights_of(scorer), {})
            if score > best:
                best = score
                run.metrics["best"] = {"steps": states, "goodput": score}
                save_weights(folder / "best.zip", weights_of(scorer), {})
            board.add_scalar("validation/goodput", score, states)
            board.add_scalar("fit/explained_variance", explained, states)
            run.write()
            progress.show(min(states, total), f"round {number + 1}: goodput {base.mean():.4f} -> {score:.4f}")
    save_weights(folder / "final.zip", weights_of(scorer), {})
    return True


def write_branches(file: Path, branches: Branches) -> None:
    """Keep branches, so that a reader never sees half of them."""
    unfinished = file.with_name(file.stem + ".unfinished.npz")
    np.savez(unfinished, **branches._asdict())
    unfinished.replace(file)


def read_branches(file: Path) -> Branches | None:
    """Branches that were kept; None if there is no such file.

    Raises:
        PolicyError: it is damaged.
    """
    if not file.is_file():
        return None
    try:
        with np.load(file) as stored:
            return Branches(**{name: stored[name] for name in Branches._fields})
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise PolicyError(f"{file}: cannot be read: {error}; delete it to have it made anew") from None
