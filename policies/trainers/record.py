"""What a run keeps while it trains: metrics.json, the validation history, the best weights."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.spec import ClusterSpec
from policies.policy import PolicyError
from policies.registry import compiled_policy
from policies.run_folder import write_atomically
from policies.trainers.validation import goodput
from policies.trainers.workload import Workload

if TYPE_CHECKING:
    from policies.networks import SetScorer

VALIDATED = 3  # loads of the validation
OUTCOMES = ("good", "violated", "rejected_at_arrival", "rejected_at_decode")


class Record:
    """The record of one run folder.

    Args:
        folder: the run folder. spec: the cluster.
        workloads: policies are compared on their validation parts, at the lowest, the middle and the highest load.
        requests: per window of the validation.

    Raises:
        PolicyError: the folder's metrics.json is none.
    """

    def __init__(
        self,
        folder: Path,
        spec: ClusterSpec,
        workloads: Sequence[Workload],
        requests: int,
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.workloads = workloads
        self.requests = requests
        self.metrics = _read_metrics(folder)
        self.eval_s = 0.0
        self.evaluated_at = -1

    def evaluate(self, steps: int, scorer: SetScorer, save: Callable[[Path], None]) -> float:
        """Goodput on the validation part after `steps` steps; has `best.zip` saved if it is the best so far."""
        self.evaluated_at = steps
        started = time.perf_counter()
        policy = compiled_policy(scorer, "present", self.spec.decode_recheck)
        by_trace = {
            workload.trace.name: goodput(
                policy, self.spec, workload.validation, workload.loads(VALIDATED), self.requests
            )
            for workload in self.workloads
        }
        score = float(np.mean([np.mean(scores) for scores in by_trace.values()]))
        loads = {workload.trace.name: workload.loads(VALIDATED) for workload in self.workloads}
        self.metrics["validation"].append({"steps": steps, "goodput": score, "by_trace": by_trace, "loads": loads})
        best, file = self.metrics.get("best"), self.folder / "best.zip"
        if best is None or score > best["goodput"] or not file.is_file():
            self.metrics["best"] = {"steps": steps, "goodput": score}
            save(file)
        self.eval_s += time.perf_counter() - started
        self.write(steps)
        return score

    def end_session(self, steps: int, seconds: float, environment_s: float) -> None:
        """Note what one call of the trainer did: its steps and where the time went."""
        self.metrics.setdefault("sessions", []).append(
            {
                "steps": steps,
                "seconds": round(seconds, 3),
                "environment_s": round(environment_s, 3),
                "validation_s": round(self.eval_s, 3),
            }
        )

    def write(self, steps: int) -> None:
        """Write metrics.json."""
        self.metrics["steps"] = steps
        write_atomically(self.folder / "metrics.json", json.dumps(self.metrics, indent=2) + "\n")


def _read_metrics(folder: Path) -> dict[str, Any]:
    file = folder / "metrics.json"
    if not file.is_file():
        return {"steps": 0, "validation": []}
    try:
        metrics: dict[str, Any] = json.loads(file.read_text())
        metrics["validation"] = list(metrics["validation"])
    except (ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{file}: expected the metrics of a run: {error}") from None
    return metrics
