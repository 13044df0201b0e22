"""Behaviour cloning: the set scorer learns to decide as a heuristic does, by its name.

The heuristic, the teacher, says what it would do in every state; who acts is drawn for every decision: the teacher or,
with probability `dagger`, what has been learned so far (DAgger, Ross et al., arXiv 1011.0686), so that the states are
also those the learner gets itself into. The teacher's choices are the targets of a cross-entropy on the masked logits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from envs.cluster_env import Episodes
from envs.spec import ClusterSpec
from policies.networks import SetScorer
from policies.policy import Policy, PolicyError
from policies.registry import make_policy
from policies.run_folder import (
    checkpoint_file,
    last_checkpoint,
    load_run_weights,
    load_weights,
    save_weights,
    weights_of,
)
from policies.trainers.progress import Progress
from policies.trainers.record import Record
from policies.trainers.stream import RequestStream
from policies.trainers.workload import Workload, at_one_load


class Options(Protocol):
    """The options of `train.py` that this trainer reads."""

    @property
    def base(self) -> str: ...
    @property
    def dagger(self) -> float: ...
    @property
    def init(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def envs(self) -> int: ...
    @property
    def episode_requests(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def epochs(self) -> int: ...
    @property
    def minibatch(self) -> int: ...
    @property
    def n_steps(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def eval_requests(self) -> int: ...


class Lessons:
    """States of a stream with the teacher's choice in each, and the share of them in which the learner agreed."""

    def __init__(self, teacher: Policy, scorer: SetScorer, stream: RequestStream, dagger: float, seed: int) -> None:
        self.teacher = teacher
        self.scorer = scorer
        self.stream = stream
        self.dagger = dagger
        self.rng = np.random.default_rng(seed)
        self.environment_s = 0.0
        teacher.reset(stream.num_envs, seed)
        stream.seed(seed)
        self.tables = stream.reset()

    def gather(self, steps: int) -> tuple[dict[str, Tensor], Tensor, Tensor, float]:
        """`steps` decisions of every cluster: tables [N, ...], masks [N, A], the teacher's actions [N]; agreement."""
        tables: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.tables}
        masks, targets, agreed = [], [], 0
        for _ in range(steps):
            mask = self.stream.action_masks()
            taught = self.teacher.decide(self.stream.observation)
            taught = _own_choices(taught, mask)
            with torch.inference_mode():
                present = {name: torch.from_numpy(table) for name, table in self.tables.items()}
                learned = self.scorer(present, torch.from_numpy(mask)).argmax(1).numpy()
            agreed += int((learned == taught).sum())
            for name, table in self.tables.items():
                tables[name].append(table)
            masks.append(mask)
            targets.append(taught)
            by_learner = self.rng.random(len(taught)) < self.dagger
            started = time.perf_counter()
            self.stream.step_async(np.where(by_learner, learned, taught))
            self.tables = self.stream.step_wait()[0]
            self.environment_s += time.perf_counter() - started
        return (
            {name: torch.from_numpy(np.concatenate(rows)) for name, rows in tables.items()},
            torch.from_numpy(np.concatenate(masks)),
            torch.from_numpy(np.concatenate(targets)),
            agreed / (steps * self.stream.num_envs),
        )


def _own_choices(actions: NDArray[np.int64], masks: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Actions whose source is no choice of its own (fetching where there is nothing to fetch) as the LOCAL they are."""
    valid = masks[np.arange(len(actions)), actions]
    return np.where(valid, actions, actions - (actions - 1) % 3)


def train(
    options: Options,
    folder: Path,
    spec: ClusterSpec,
    workloads: Sequence[Workload],
    resume: bool,
) -> bool:
    """Clone `options.base` into a run folder that has its config.yaml; False when Ctrl-C stopped it, all saved.

    Raises:
        PolicyError: no such teacher, or the folder cannot be resumed.
    """
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    teacher = make_policy(options.base)
    scorer = load_run_weights(Path(options.init), options.hidden) if options.init else SetScorer(options.hidden)
    record = Record(folder, spec, workloads, options.eval_requests)
    steps = 0
    if resume:
        steps = int(record.metrics["steps"])
        file = last_checkpoint(folder)
        if file is None or steps >= options.steps:
            raise PolicyError(f"{folder} has {steps:,} steps already: give --steps above that")
        scorer = load_weights(file, {"hidden": options.hidden, "anchored": False})
        if file.name == "final.zip":
            file.replace(checkpoint_file(folder, steps))
    first = steps
    traces, load = at_one_load(workloads)
    episodes = Episodes(options.episode_requests, load)
    stream = RequestStream(options.envs, spec, traces, workloads[0].part, episodes)
    lessons = Lessons(teacher, scorer, stream, options.dagger, options.seed + steps)
    optimizer = torch.optim.Adam(scorer.parameters(), options.lr)

    def save(file: Path) -> None:
        save_weights(file, weights_of(scorer), {})

    started = time.perf_counter()
    checkpoint_at = steps
    finished = False
    try:
        with Progress(options.steps, steps) as progress:
            while steps < options.steps:
                if record.evaluated_at < 0 or steps - record.evaluated_at >= options.eval_every:
                    record.evaluate(steps, scorer, save)
                if steps - checkpoint_at >= options.checkpoint_every:
                    checkpoint_at = steps
                    save(checkpoint_file(folder, steps))
                tables, masks, targets, agreement = lessons.gather(options.n_steps)
                learn(scorer, optimizer, tables, masks, targets, options.epochs, options.minibatch)
                steps += len(targets)
                optimizer.param_groups[0]["lr"] = options.lr * max(0.05, 1.0 - steps / options.steps)
                record.metrics.setdefault("agreement", []).append({"steps": steps, "share": agreement})
                progress.show(steps, f"agreement {agreement:.3f}")
        record.evaluate(steps, scorer, save)
        finished = True
    except KeyboardInterrupt:
        save(checkpoint_file(folder, steps))
    if finished:
        save(folder / "final.zip")
    record.end_session(steps - first, time.perf_counter() - started, lessons.environment_s)
    record.write(steps)
    return finished


def learn(
    scorer: SetScorer,
    optimizer: torch.optim.Optimizer,
    tables: dict[str, Tensor],
    masks: Tensor,
    targets: Tensor,
    epochs: int,
    minibatch: int,
) -> None:
    """`epochs` passes over lessons with the cross-entropy of the targets."""
    scorer.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(targets)).split(minibatch):
            logits = scorer({name: table[rows] for name, table in tables.items()}, masks[rows])
            loss = torch.nn.functional.cross_entropy(logits, targets[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
            optimizer.step()
    scorer.eval()
