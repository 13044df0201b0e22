"""Every heuristic with its own options tuned, each with the admission that suits it: the fair baseline.

`tuned.yaml` has them; `python -m policies tune` writes it, on training parts and, for what is kept, validation parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any

import yaml

from envs.metrics import highest_load
from envs.simulator import Simulator
from envs.spec import ClusterSpec
from traces import Trace

from .policy import PolicyError
from .registry import ADMISSIONS, ROUTERS, CompiledPolicy, make_policy
from .tuning import Contender, Space, Trials

FIRST_GENERATIONS, MORE_GENERATIONS = 8, 24  # of every router with every admission; of a router with its best one
WINDOWS, REQUESTS = 6, 1300  # per generation, and in each
REFERENCE, TARGET = "conductor", 0.9  # a capacity is the load at which it meets this share of both SLOs


def tuned() -> dict[str, str]:
    """The tuned policies that come with the project: plain name, `ROUTER+ADMISSION`, to the name with its options."""
    stored = yaml.safe_load((files("policies") / "tuned.yaml").read_text())
    return {plain: entry["policy"] for plain, entry in stored["policies"].items()}


def capacity(spec: ClusterSpec, trace: Trace) -> float:
    """The highest load, times the trace's own speed, at which `conductor` meets 90 % on the training part.

    Raises:
        PolicyError: there is none.
    """
    policy = make_policy(REFERENCE)
    assert isinstance(policy, CompiledPolicy)
    part = trace.split().train
    simulator = Simulator.with_room(spec, part)

    def attainment(loads: Sequence[float]) -> list[float]:
        found = []
        for load in loads:
            policy.reset(1, 0)
            simulator.load(0, part, speed=load, recheck=policy.recheck)
            policy.replay(simulator)
            found.append(float(simulator.outcomes(0)["good"].mean()))
        return found

    highest = highest_load(attainment, TARGET)
    if highest.load is None:
        raise PolicyError(f"trace {trace.name!r} has no capacity on {spec.name}: {TARGET:.0%} are {highest.note}")
    return highest.load


def _tune(contender: Contender) -> None:
    """FIRST_GENERATIONS more, and where they led to."""
    for _ in range(FIRST_GENERATIONS):
        contender.step()
    contender.judge()


def pairs(only: Iterable[str] = ()) -> dict[str, list[str]]:
    """What is tuned for each router: `ROUTER+ADMISSION` of all that have an option to search.

    The prior of the learned policy is not among them unless it is named: its options are part of what is learned.

    Args:
        only: routers, all admissions of each, or pairs; none: every router.

    Raises:
        PolicyError: an unknown router or admission, or a pair with nothing to tune.
    """
    found: dict[str, list[str]] = {}
    for name in only or (router for router in ROUTERS if router != "prior"):
        router, plus, _ = name.partition("+")
        if plus or router not in ROUTERS:
            Space(name)
            found.setdefault(router.partition(":")[0], []).append(name)
        else:
            admissions = [a for a in ADMISSIONS if a != "own" and (ROUTERS[router].options or ADMISSIONS[a].options)]
            found.setdefault(router, []).extend(f"{router}+{admission}" for admission in admissions)
    return found


def tune(
    routers: dict[str, list[str]], trials: Trials, seed: int, show: Callable[[int, str], None]
) -> dict[str, dict[str, Any]]:
    """Tune `pairs`, and keep of every router the best on validation; same seed, same result.

    Args:
        show: told the generations done, of `generations(routers)`, and what there is to say.

    Returns:
        for each plain name {policy, validation, default}: the tuned name, its goodput on the validation part, that of
        the plain one there.
    """
    done = 0
    kept = []
    for names in routers.values():
        contenders = []
        for name in names:
            contender = Contender(name, trials, seed, windows=WINDOWS)
            _tune(contender)
            contenders.append(contender)
            done += FIRST_GENERATIONS
            show(done, f"{name} {contender.default:.4f} -> {contender.goodput:.4f}")
        best = max(contenders, key=lambda contender: contender.goodput)
        for _ in range(MORE_GENERATIONS // FIRST_GENERATIONS):
            _tune(best)
            done += FIRST_GENERATIONS
            show(done, f"{best.base} {best.default:.4f} -> {best.goodput:.4f}")
        kept.append(best)
    return {
        best.base: {"policy": best.policy, "validation": round(best.goodput, 4), "default": round(best.default, 4)}
        for best in sorted(kept, key=lambda best: -best.goodput)
    }


def generations(routers: dict[str, list[str]]) -> int:
    """How many `tune` takes."""
    return FIRST_GENERATIONS * sum(map(len, routers.values())) + MORE_GENERATIONS * len(routers)


def as_yaml(command: str, trials: Trials, policies: dict[str, dict[str, Any]]) -> str:
    """The contents of `tuned.yaml`."""
    traces = {trace.name: trace.checksum for trace in trials.traces}
    loads = {trace.name: list(ends) for trace, ends in zip(trials.traces, trials.loads, strict=True)}
    contents = {
        "command": command,
        "trained_on": {
            "traces": traces,
            "loads": loads,
            "cluster": trials.spec.name,
            "cluster_sha256": trials.spec.checksum,
        },
        "policies": policies,
    }
    return f"# {command}\n" + yaml.safe_dump(contents, sort_keys=False, width=1000)
