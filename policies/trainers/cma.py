"""CMA-ES on the options of a heuristic (`policies.tuning`), judged on windows of the traces.

Every few generations the mean of the distribution and the best candidates are judged on the whole validation part, and
the best so far is the run's policy; at first that is the heuristic as it was given. All that the search depends on is
the seed and what its candidates scored, so metrics.json, which has the scores, is what a run goes on from.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from envs.spec import ClusterSpec
from policies.policy import PolicyError
from policies.run_folder import write_atomically, write_policy
from policies.trainers.progress import Progress
from policies.trainers.workload import Workload
from policies.tuning import Search, Space, Trials, evolve, finalists

VALIDATE_EVERY = 5  # generations


class Options(Protocol):
    """The options of `train.py` that this trainer reads."""

    @property
    def base(self) -> str: ...
    @property
    def episode_requests(self) -> int: ...
    @property
    def generations(self) -> int: ...
    @property
    def population(self) -> int: ...
    @property
    def windows(self) -> int: ...
    @property
    def seed(self) -> int: ...


def train(
    options: Options,
    folder: Path,
    spec: ClusterSpec,
    workloads: Sequence[Workload],
    resume: bool,
) -> bool:
    """Tune into a run folder that has its config.yaml; Ctrl-C may stop it at any time, the last generation is kept.

    Raises:
        PolicyError: the folder cannot be resumed, or `base` cannot be tuned.
    """
    search = Search(Space(options.base), options.seed, options.population)
    searched = {"base": options.base, "seed": options.seed, "population": search.population}
    metrics = _read_metrics(folder) if resume else {}
    if not metrics:
        metrics = {"search": searched, "generations": 0, "seconds": 0.0, "best": None, "history": [], "validation": []}
    for name, value in searched.items():
        if metrics["search"].get(name) != value:
            raise PolicyError(f"--{name} {value}: the run in {folder} has {metrics['search'].get(name)}")
    done = metrics["generations"]
    if done >= options.generations:
        raise PolicyError(f"{folder} has {done} generations already: give --generations above that")
    for entry in metrics["history"]:
        search.ask()
        search.tell(entry["candidates"])
    trials = Trials(
        spec,
        [workload.trace for workload in workloads],
        [workload.load for workload in workloads],
        workloads[0].part,
        options.episode_requests,
    )
    scalars = _Scalars(folder / "tensorboard")
    started = time.perf_counter() - metrics["seconds"]
    if not metrics["validation"]:
        _validate(metrics, trials, 0, [options.base])
    with Progress(options.generations, done) as progress:
        for generation in range(done + 1, options.generations + 1):
            candidates, goodput = evolve(search, trials, options.windows, options.seed, generation)
            metrics["history"].append({"sigma": search.sigma, "candidates": goodput.tolist()})
            metrics["generations"] = generation
            scalars.write(generation, "train/goodput", float(goodput.mean()))
            scalars.write(generation, "train/sigma", search.sigma)
            if generation % VALIDATE_EVERY == 0 or generation == options.generations:
                _validate(metrics, trials, generation, finalists(search, candidates, goodput))
                scalars.write(generation, "validation/goodput", metrics["validation"][-1]["goodput"])
            metrics["seconds"] = round(time.perf_counter() - started, 3)
            write_policy(folder, metrics["best"]["policy"])
            write_atomically(folder / "metrics.json", json.dumps(metrics, indent=2) + "\n")
            progress.show(
                generation,
                f"goodput {goodput.mean():.3f}  validation {metrics['best']['goodput']:.4f} "
                f"(as given {metrics['validation'][0]['goodput']:.4f})  step {search.sigma:.3f}",
            )
    print(f"{metrics['best']['policy']}: validation goodput {metrics['best']['goodput']:.4f}", end="")
    print(f", {options.base} {metrics['validation'][0]['goodput']:.4f}")
    return True


def _validate(metrics: dict[str, Any], trials: Trials, generation: int, policies: list[str]) -> None:
    """Judge policies on the validation part; the best so far stays, of equals the earlier."""
    goodput = trials.goodput(policies, trials.validation())
    best = int(goodput.argmax())
    entry = {"generation": generation, "policy": policies[best], "goodput": float(goodput[best])}
    metrics["validation"].append(entry)
    if metrics["best"] is None or entry["goodput"] > metrics["best"]["goodput"]:
        metrics["best"] = entry


def _read_metrics(folder: Path) -> dict[str, Any]:
    """Those of a run to go on with; empty if it had not got as far as to write any."""
    file = folder / "metrics.json"
    try:
        metrics = json.loads(file.read_text())
        if len(metrics["history"]) != metrics["generations"]:
            raise ValueError(f"{metrics['generations']} generations, but {len(metrics['history'])} in the history")
        return {name: metrics[name] for name in ("search", "generations", "seconds", "best", "history", "validation")}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{file}: expected the metrics of a run of --algo cma: {error}") from None


class _Scalars:
    """Scalars for TensorBoard, where it is installed."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(folder))

    def write(self, step: int, name: str, value: float) -> None:
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()
