"""The command line of the experiments on live workers: `python -m experiments sim_to_live` and `live_rejection`."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

EXIT_BAD_INPUT = 2
TITLES = {
    "sim_to_live": "The same trace on live workers and in the gym, on one calibrated cluster.",
    "live_rejection": "Admission in overload, on live workers.",
}
LOADS = {"sim_to_live": 0.5, "live_rejection": 2.0}
POLICIES = {  # of sim_to_live none that moves KV between prefill workers: vLLM's do not
    "sim_to_live": "vllm_router,random,round_robin,cache_aware",
    "live_rejection": "round_robin+none,round_robin+baseline,round_robin+predictive",
}


def parser(name: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m experiments {name}",
        description=f"{TITLES[name]} See docs/live.md.",
        epilog="Without --cluster, vLLM workers are started here (python -m runtime.vllm_workers setup). Exit code: 0 "
        "when it ran, whatever the verdicts; 2 for bad input or workers that fail; 130 when interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--cluster", metavar="FILE", type=Path, help="cluster file of prefill and decode workers that run")
    add("--trace", default="mooncake:conversation", help="any trace that `python -m traces info` reads")
    add("--requests", type=_from(1, int), default=300, help="the first so many")
    add("--load", type=_from(0, float), default=LOADS[name], help="of the workers' capacity")
    add("--tuning", action="store_true", help="take the trace's training part, not the test part that is reported")
    add(
        "--longest-tokens",
        type=_from(512, int),
        default=2048,
        help="of a request, prompt and answer; longer are left out",
    )
    add("--most-requests", type=_from(2, int), default=8, help="largest decode batch of the calibration")
    if name == "sim_to_live":
        add("--ordering", action="store_true", help="compare --policies on two prefill workers")
        add("--policies", default=POLICIES[name], help="with --ordering")
        add("--repeats", type=_from(1, int), default=2, help="of each policy, with --ordering")
    else:
        add("--policies", default=POLICIES[name], help="the last is compared with the others")
        add("--repeats", type=_from(2, int), default=3, help="of each policy")
    add("--json", metavar="FILE|-", help="write the comparison; -: to stdout, and nothing else there")
    return made


def _from(least: float, kind: type[Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not (math.isfinite(value) and value >= least and value > 0):
            raise argparse.ArgumentTypeError(f"expected {max(least, 0):g} or more, found {text}")
        return value

    read.__name__ = kind.__name__  # what argparse calls it in its errors
    return read


def main(given: Sequence[str]) -> int:
    """Exit code: see the help."""
    name = given[0]
    arguments = parser(name).parse_args(given[1:])
    file = arguments.json
    if file not in (None, "-") and not Path(file).resolve().parent.is_dir():
        print(f"error: --json {file}: expected a file in a folder that exists", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        from envs.spec import SpecError
        from envs.worker_timing import WorkerError
        from policies import PolicyError
        from runtime.loadgen import LoadError
        from runtime.local_workers import WorkersError
        from traces import TraceError

        from . import live, live_rejection, sim_to_live
    except ImportError as error:
        print(f"error: live workers need {error.name}: pip install 'conductor-gym[serve]'", file=sys.stderr)
        return EXIT_BAD_INPUT
    from rich.console import Console

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # workers that were started here end, too
    options = live.Options(
        arguments.cluster,
        arguments.trace,
        arguments.requests,
        arguments.load,
        arguments.repeats,
        tuple(arguments.policies.split(",")),
        getattr(arguments, "ordering", False),
        arguments.tuning,
        arguments.longest_tokens,
        arguments.most_requests,
        Status(Console(stderr=True)),
    )
    experiment = {"sim_to_live": sim_to_live, "live_rejection": live_rejection}[name]
    try:
        result = experiment.run(options)
    except (live.LiveError, PolicyError, WorkerError, WorkersError, LoadError, SpecError, TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    finally:
        signal.signal(signal.SIGTERM, before)
    text = json.dumps(result, indent=1)
    if file not in (None, "-"):
        Path(file).write_text(text + "\n")
    else:
        print(text)
    return 0


class Status:
    """Says on stderr how far it is: one line that changes on a terminal, elsewhere a line for each stage."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self.stage = ""

    def __call__(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(f"\r\x1b[K{text}", end="", markup=False, highlight=False)
            return
        stage = text.rstrip("0123456789 of")
        if stage != self.stage:
            self.stage = stage
            self.console.print(text, markup=False, highlight=False)
