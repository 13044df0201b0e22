"""`python replay.py`: one episode under one or two policies as a page that shows why one of them lost.

The same requests, on the same simulated cluster, are decided by each policy. What it knew at every decision is kept
beside what became of the request; `replay_page` draws both. A cell is given as to `leaderboard.py`, and what is
recorded is, bit for bit, the leaderboard's own replay of it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs import metrics
from envs.simulator import Simulator
from envs.spec import ClusterSpec
from envs.state import Observation, Records, Status
from leaderboard import (
    DEFAULT_SEEDS,
    Cell,
    Contestant,
    LeaderboardError,
    Parser,
    Pool,
    Progress,
    at_least,
    call,
    cell_options,
    chosen_suite,
    code_version,
    decide,
    exit_code,
    make_cells,
    make_wanted,
    policy_names,
    read_only,
    suite_wanted,
)
from policies.clairvoyant import Clairvoyant
from replay_page import write_page

REQUESTS = 5000
EXAMPLES = """examples:
  python replay.py --policies learned,conductor+predictive --out replay.html
      both on the same requests of a built-in workload, and where they part
  python replay.py --policies learned,conductor+predictive --suite heldout --cells conversation-8p8d-1.5x --out replay.html
      a cell of a suite
  python replay.py --policies conductor --trace trace.jsonl.gz --capacity 1.2 --skip 4000 --requests 1000 --out replay.html
      one policy, and a thousand requests out of the middle of a trace
"""  # noqa: E501


class Recording(NamedTuple):
    """An episode of R requests under a policy."""

    outcomes: Records
    """`OUTCOME` [R]."""
    seen: Observation
    """What was known at each decision: leading axis R."""
    holders: NDArray[np.int32]
    """Whom each request fetched from, int32[R]; -1 where it did not."""


class Watched(Simulator):
    """A simulator that keeps what was observed before every step of its first cluster."""

    def step(
        self, actions: NDArray[np.int64], done: NDArray[np.bool_], start: int = 0, stop: int | None = None
    ) -> None:
        self.kept.append([table[0].copy() for table in self.observation_tables])
        super().step(actions, done, start, stop)

    def load(self, cluster: int, *given: Any, **named: Any) -> None:
        self.kept: list[list[NDArray[Any]]] = []
        super().load(cluster, *given, **named)


def record(contestant: Contestant, cell: Cell, seed: int, last: int) -> Recording:
    """Replay the first `last` requests of a cell's part, its warm-up included, under a policy.

    Raises:
        LeaderboardError: the policy raised, or returned what is no action.
    """
    policy, name = contestant.policy, contestant.name
    trace = cell.setting.part.traces[seed]
    simulator = Watched.with_room(cell.setting.spec, trace, clusters=2)  # the clairvoyant tries out in the second
    call(policy, name, "reset", 1, seed)
    simulator.load(0, trace, 0, last, speed=cell.load, recheck=policy.recheck)
    if isinstance(policy, Clairvoyant):
        policy.replay(simulator, 0)
    else:
        simulator.observe(0)
        observation = Observation(*(table[:1] for table in simulator.observation_tables))
        shown = observation if contestant.compiled else read_only(observation)
        actions, done = np.zeros(2, np.int64), np.zeros(2, np.bool_)
        while not done[0]:
            actions[:1] = decide(policy, name, shown)
            simulator.step(actions, done, 0, 1)
    seen = Observation(*(np.stack(column) for column in zip(*simulator.kept, strict=True)))
    return Recording(simulator.outcomes(0).copy(), seen, simulator.batch.jobs[0, :last]["holder"].copy())


# --- what the page is given ------------------------------------------------------------------------

REASONS = (
    "",
    "no prefill instance was predicted to meet the TTFT SLO",
    "no decode instance was predicted to meet the TBT SLO",
    "the policy's own choice, some pair of instances was predicted to meet both SLOs",
    "second check of the TBT SLO, when its KV arrived",
    "prompt and output are larger than the decode instance's KV room",
)


def reasons(recording: Recording, spec: ClusterSpec, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Why each request was rejected, as an index of `REASONS`: int64[R].

    Args:
        tokens: input and output of each request together.
    """
    prefill, decode = recording.seen.prefill, recording.seen.decode
    up_p, up_d = recording.seen.prefill_mask[:, :, 0] != 0, recording.seen.decode_mask != 0
    ttft_s = np.minimum(prefill["ttft_local_s"], prefill["ttft_fetch_s"]).min(1, where=up_p, initial=np.inf)
    tbt_s = decode["tbt_assigned_s"].min(1, where=up_d, initial=np.inf)
    at_arrival = np.where(ttft_s > spec.slo.ttft_s, 1, np.where(tbt_s > spec.slo.tbt_s, 2, 3))
    room = spec.parameters().decode["kv_capacity_tokens"][recording.outcomes["decode"]]
    at_decode = np.where(tokens > room, 5, 4)
    status = recording.outcomes["status"]
    found: NDArray[np.int64] = np.select(
        [status == Status.REJECTED_AT_ARRIVAL, status == Status.REJECTED_AT_DECODE], [at_arrival, at_decode], 0
    )
    return found


OF_OUTCOME = (
    *("status", "good", "prefill", "decode", "source", "fetched_blocks", "reused_tokens", "device_tokens"),
    *("predicted_ttft_s", "predicted_tbt_s", "prefill_start_s", "prefill_end_s", "prefill_s", "kv_ready_s"),
    *("join_s", "finish_s", "ttft_s", "tbt_s"),
)
OF_SCORE = (
    *("offered", "goodput", "good", "rejected_at_arrival", "rejected_at_decode", "violated_ttft", "violated_tbt"),
    *("wasted_prefill_s", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "tbt_p50_s", "tbt_p90_s"),
    *("hit_rate", "hit_rate_device", "hit_rate_host", "hit_rate_fetched"),
)


def episode(recordings: dict[str, Recording], cell: Cell, seed: int, first: int) -> dict[str, Any]:
    """What the page is given: columns of requests, and for each policy what it knew and what became of them.

    Requests from `first` on are shown and counted; of those before only what is still in the cluster by then is drawn.
    """
    spec, trace = cell.setting.spec, cell.setting.part.traces[seed]
    any_of = next(iter(recordings.values())).outcomes
    last = len(any_of)
    arrival_s = any_of["arrival_s"]
    start_s = float(arrival_s[first])
    there = np.zeros(first, np.bool_)
    for recording in recordings.values():
        ended = [recording.outcomes[name][:first] for name in ("finish_s", "kv_ready_s", "prefill_end_s")]
        there |= np.nan_to_num(np.fmax.reduce(ended), nan=-1.0) > start_s
    rows = np.concatenate([np.flatnonzero(there), np.arange(first, last)])
    parameters = spec.parameters()
    return {
        "cell": str(cell),
        "description": cell.description,
        "seed": seed,
        "first": first,
        "part_requests": trace.n_requests,
        "start_s": start_s,
        "block_tokens": spec.block_tokens,
        "ttft_slo_s": spec.slo.ttft_s,
        "tbt_slo_s": spec.slo.tbt_s,
        "kv_capacity_tokens": parameters.decode["kv_capacity_tokens"].tolist(),
        "reasons": REASONS,
        "trace_checksum": cell.setting.part.checksum,
        "spec_checksum": spec.checksum,
        "requests": {
            "number": rows.tolist(),
            "arrival_s": _rounded(arrival_s[rows]),
            "input_tokens": trace.input_tokens[rows].tolist(),
            "output_tokens": trace.output_tokens[rows].tolist(),
        },
        "policies": [
            {
                "name": name,
                "score": _score(recording, cell, seed, first),
                "outcomes": _outcomes(recording, spec, (trace.input_tokens + trace.output_tokens)[:last], rows),
                "seen": _seen(Observation(*(table[first:] for table in recording.seen)), spec.block_tokens),
            }
            for name, recording in recordings.items()
        ],
    }


def _rounded(values: NDArray[np.float64], digits: int = 4) -> list[float | None]:
    """To what can be read; what does not exist as null."""
    return [None if value != value else value for value in np.round(values, digits).tolist()]


def _score(recording: Recording, cell: Cell, seed: int, first: int) -> dict[str, Any]:
    """The leaderboard's figures of the requests that count, and how busy each instance was while they arrived."""
    spec, trace, outcomes = cell.setting.spec, cell.setting.part.traces[seed], recording.outcomes
    counted = slice(first, len(outcomes))
    replay = metrics.Replay(
        outcomes["arrival_s"][counted],
        trace.input_tokens[counted],
        trace.output_tokens[counted],
        outcomes[counted],
        spec.block_tokens,
    )
    row = metrics.score([replay]) | metrics.violations([replay], spec.slo.ttft_s, spec.slo.tbt_s)
    start_s, stop_s = outcomes["arrival_s"][first], outcomes["arrival_s"][-1]

    def mean_there(pool: str, size: int, since: str, until: str) -> list[float | None]:
        """How many requests each instance had between two of their times, on average."""
        spent = np.minimum(outcomes[until], stop_s) - np.maximum(outcomes[since], start_s)
        sums = [np.nansum(np.maximum(spent[outcomes[pool] == i], 0)) for i in range(size)]
        return _rounded(np.array(sums) / max(stop_s - start_s, 1e-9))

    figures = {key: None if row[key] != row[key] else round(float(row[key]), 6) for key in OF_SCORE}
    return figures | {
        "prefill_busy": mean_there("prefill", spec.n_prefill, "prefill_start_s", "prefill_end_s"),
        "decode_batch": mean_there("decode", spec.n_decode, "join_s", "finish_s"),
    }


def _outcomes(
    recording: Recording, spec: ClusterSpec, tokens: NDArray[np.int64], rows: NDArray[np.int64]
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in OF_OUTCOME:
        column = recording.outcomes[name][rows]
        found[name] = column.tolist() if column.dtype.kind == "i" else _rounded(column)
    return found | {
        "holder": recording.holders[rows].tolist(),
        "reason": reasons(recording, spec, tokens)[rows].tolist(),
    }


def _seen(seen: Observation, block_tokens: int) -> dict[str, list[int]]:
    """Features of every instance at every decision, instance by instance, as whole numbers: milliseconds of a queue
    and a TTFT, tenths of milliseconds of a TBT, blocks of the prompt, tokens, requests."""
    prefill, decode = seen.prefill, seen.decode
    columns = {
        "queue_ms": prefill["queue_s"] * 1e3,
        "queue_requests": prefill["queue_requests"],
        "local_blocks": np.ceil(prefill["local_tokens"] / block_tokens),
        "device_blocks": np.ceil(prefill["device_tokens"] / block_tokens),
        "fetch_blocks": np.ceil(prefill["fetch_tokens"] / block_tokens),
        "ttft_local_ms": prefill["ttft_local_s"] * 1e3,
        "ttft_fetch_ms": prefill["ttft_fetch_s"] * 1e3,
        "batch": decode["batch"],
        "kv_tokens": decode["kv_tokens"],
        "pending_requests": decode["pending_requests"],
        "tbt_now": decode["tbt_now_s"] * 1e4,
        "tbt_assigned": decode["tbt_assigned_s"] * 1e4,
        "tbt_at_join": decode["tbt_at_join_s"] * 1e4,
        "in_flight": seen.cluster["in_flight"],
    }
    return {
        name: np.rint(np.clip(column, -1e9, 1e9)).astype(np.int64).T.ravel().tolist()
        for name, column in columns.items()
    }


# --- command line ----------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="replay.py",
        description="Record one episode under one or two policies, and write a page that shows why one of them lost.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "--policies", action="extend", type=policy_names, required=True, metavar="A[,B]", help="as leaderboard.py takes"
    )
    add("--out", required=True, metavar="FILE.html", help="the page; it is one file and loads nothing")
    cell_options(made)
    add("--seed", type=at_least(0), default=0, metavar="N", help="which of the --seeds replays (default 0)")
    add(
        "--skip",
        type=at_least(0),
        default=0,
        metavar="N",
        help="requests of the part to simulate and not show (default 0)",
    )
    add("--requests", type=at_least(1), default=REQUESTS, metavar="N",
        help=f"requests to show at most (default {REQUESTS:,}); no more arrive after them")  # fmt: skip
    add("--debug", action="store_true", help="show the traceback of an error")
    return made


def chosen_cell(arguments: argparse.Namespace) -> Cell:
    """The one cell that is asked for.

    Raises:
        LeaderboardError: there are several.
    """
    suite = chosen_suite(arguments)
    if suite:
        arguments.seeds = arguments.seeds or suite.seeds
    elif not (arguments.load or arguments.capacity):
        arguments.load = [[1.0]]
    arguments.seeds = max(arguments.seeds or DEFAULT_SEEDS, arguments.seed + 1)
    wanted = suite_wanted(suite, arguments.cells or "*", arguments.seeds) if suite else make_wanted(arguments)
    found = sum(len(want.loads) + len(want.shares) for want in wanted)
    if found != 1:
        how = "--cells NAME" if suite else "one --trace, --part, --cluster and --load"
        raise LeaderboardError(f"a page shows one cell, {found} are asked for; expected {how}")
    cells, _ = make_cells(wanted, arguments.reference, arguments.seeds, Pool(os.cpu_count() or 1, Progress()))
    return cells[0]


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """What the command line asked for; its exit code."""
    names = list(dict.fromkeys(arguments.policies))
    if len(names) not in (1, 2):
        raise LeaderboardError(f"--policies: a page shows one policy or two, found {len(names)}")
    out = Path(arguments.out)
    if not out.resolve().parent.is_dir() or out.is_dir():
        raise LeaderboardError(f"--out {out}: expected a file in a folder that exists")
    contestants = [Contestant(name) for name in names]
    cell = chosen_cell(arguments)
    part = cell.setting.part
    first = part.warmup + arguments.skip
    last = min(first + arguments.requests, part.traces[0].n_requests)
    if first >= last:
        raise LeaderboardError(
            f"--skip {arguments.skip}: {part.trace} ({part.part}) has {part.requests} requests; expected less"
        )
    recordings = {contestant.name: record(contestant, cell, arguments.seed, last) for contestant in contestants}
    shown = episode(recordings, cell, arguments.seed, first)
    shown |= {"command": shlex.join(["python", "replay.py", *given]), "code_version": code_version()}
    write_page(shown, out)
    figures = ", ".join(f"{policy['name']} {policy['score']['goodput']:.4f}" for policy in shown["policies"])
    print(f"{out}: {last - first} requests of {cell}; goodput {figures}")
    return 0


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: as `leaderboard.exit_code`."""
    arguments = parser().parse_args(given)
    return exit_code(lambda: run(arguments, sys.argv[1:] if given is None else given), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
