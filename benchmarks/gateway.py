"""The gateway beside vllm-router (PyPI, vLLM's own), before the same workers with the same requests, in one run.

- `added_ms`: median milliseconds that a first token takes longer than when the two legs are sent by hand, one request
  at a time, in turn: directly, through our gateway and through vllm-router; negative where the hand is slower.
  `ttft_ratio`: the median time to the first token through ours, over that through theirs.
- `goodput`, `ttft_p50_s`, `ttft_p90_s`, `tbt_p50_s`: of a trace's test part, replayed through each in turn, each time
  with other tokens. `goodput_difference`: ours minus theirs, by request, with its 95 % interval.

Two prefill workers and one that decodes: vLLM's, started here (`python -m runtime.vllm_workers setup`), or those of
--cluster. Where vllm-router is not installed, neither here nor where --vllm-router says, its part is left out, and
the result says so.

    python -m benchmarks.gateway [--vllm-router FILE] [--only added,trace]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from envs.metrics import difference, time_blocks
from envs.worker_timing import LiveWorker, WorkerError
from experiments import live
from runtime.loadgen import LoadError, Slos
from runtime.local_workers import WorkersError, free_ports, is_healthy
from traces import load

from .report import entry, median, parser, report

PARTS = ("added", "trace")
POLICY = "cache_aware"  # both have one of this name
PROMPT_TOKENS = 64
LONGEST = 2048  # tokens of a request
SLOS = Slos(2.0, 0.1, live.TAIL_SHARE)
ROUTER_START_S = 60.0


@contextmanager
def vllm_router(program: str, cluster: dict[str, Any]) -> Iterator[str]:
    """vllm-router before workers; its URL."""
    port, metrics = free_ports(2)
    workers: list[str] = []
    for row in cluster["workers"]:
        workers += [f"--{row['role']}", f"http://{row['address']}"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--policy", POLICY]
    command = [program, "--vllm-pd-disaggregation", *workers, "--kv-connector", "nixl", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + ROUTER_START_S
        while not is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"vllm-router does not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        live.end(process, 10.0)


def added(cluster: dict[str, Any], urls: dict[str, str], runs: int) -> dict[str, Any]:
    """What each front adds to a first token, over the legs sent by hand."""
    rows = {row["role"]: row for row in cluster["workers"]}
    prefill, decode = (LiveWorker(f"http://{rows[role]['address']}") for role in ("prefill", "decode"))
    fronts = {name: LiveWorker(url, model=prefill.model) for name, url in urls.items()}
    taken: dict[str, list[float]] = {name: [] for name in ("direct", *fronts)}
    for _ in range(runs):
        start_s = time.perf_counter()
        prefill.hand_over(decode, PROMPT_TOKENS)
        taken["direct"].append(time.perf_counter() - start_s)
        for name, front in fronts.items():
            taken[name].append(front.first_token(PROMPT_TOKENS).seconds)
    for worker in (prefill, decode, *fronts.values()):
        worker.close()
    direct = np.array(taken["direct"])
    result: dict[str, Any] = {"direct_ttft_ms": round(1e3 * float(np.median(direct)), 3)}
    result["added_ms"] = {name: round(1e3 * float(np.median(np.array(taken[name]) - direct)), 3) for name in fronts}
    if "vllm_router" in fronts:
        result["ttft_ratio"] = round(median(taken["ours"]) / median(taken["vllm_router"]), 3)
    return result


def replays(urls: dict[str, str], given: Any) -> dict[str, Any]:
    """A trace through each front in turn."""
    trace = live.sent(load(given.trace).jitter(0).split().test, given.requests, LONGEST).speed_up(given.speed)
    seen: dict[str, list[live.Seen]] = {name: [] for name in urls}
    for repeat in range(given.repeats):
        for place, (name, url) in enumerate(urls.items()):
            seed = 1 + repeat * len(urls) + place
            print(f"trace, {name} ...", file=sys.stderr)
            seen[name].append(live.replayed(url, trace, SLOS, seed, lambda text: None, name))
    result: dict[str, Any] = {"requests": trace.n_requests, "repeats": given.repeats}
    for measure, value in (
        ("goodput", lambda each: float(each.good.mean())),
        ("ttft_p50_s", lambda each: float(np.nanquantile(each.ttft_s, 0.5))),
        ("ttft_p90_s", lambda each: float(np.nanquantile(each.ttft_s, 0.9))),
        ("tbt_p50_s", lambda each: float(np.nanquantile(each.tbt_s, 0.5))),
    ):
        result[measure] = {name: round(float(np.mean([value(one) for one in each])), 4) for name, each in seen.items()}
    if "vllm_router" in seen:
        ours, theirs = (np.stack([one.good for one in seen[name]]) for name in ("ours", "vllm_router"))
        result["goodput_difference"] = difference(ours, theirs, time_blocks(trace.arrival_s))._asdict()
    return result


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--only", default=",".join(PARTS), help="parts to run (default: %(default)s)")
    options.add_argument("--vllm-router", metavar="FILE", default="vllm-router", help="its program, in any environment")
    options.add_argument("--cluster", metavar="FILE", type=Path, help="cluster file of workers that run")
    options.add_argument("--trace", default="mooncake:conversation", help="(default: %(default)s)")
    options.add_argument("--requests", type=int, default=150, help="of the trace (default: %(default)s)")
    options.add_argument("--speed", type=float, default=1.0, help="of the trace (default: %(default)s)")
    options.add_argument("--repeats", type=int, default=2, help="of the trace (default: %(default)s)")
    options.set_defaults(runs=40)
    given = options.parse_args()
    wanted = given.only.split(",")
    if not set(wanted) <= set(PARTS):
        raise ValueError(f"--only: expected some of {', '.join(PARTS)}, found {given.only}")
    program = shutil.which(given.vllm_router)
    result: dict[str, Any] = {}
    try:
        with live.live_workers(given.cluster, 2, 1) as cluster, ExitStack() as fronts:
            urls = {"ours": fronts.enter_context(live.gateway(cluster, f"{POLICY}+none")).url}
            if program is None:
                result["vllm_router"] = f"left out: no program {given.vllm_router}; pip install vllm-router==0.1.17"
            else:
                urls["vllm_router"] = fronts.enter_context(vllm_router(program, cluster))
            if "added" in wanted:
                print("added ...", file=sys.stderr)
                result |= added(cluster, urls, given.runs)
            if "trace" in wanted:
                result |= replays(urls, given)
    except (WorkerError, WorkersError, LoadError, live.LiveError, OSError) as error:
        raise ValueError(str(error)) from None
    report(result, given.json)


if __name__ == "__main__":
    entry(main)
