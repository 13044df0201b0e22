"""Live workers behind a gateway, a trace replayed through it, and the same trace in the gym on the same cluster.

What the live experiments (`sim_to_live`, `live_rejection`) share. They need the `serve` extra, and vLLM's environment
(`python -m runtime.vllm_workers setup`) or a cluster file of workers that run.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import yaml
from numpy.typing import NDArray

from envs.calibrate import Calibration, Plan, calibrate
from envs.spec import ClusterSpec, validate_cluster
from envs.worker_timing import LiveWorker, WorkerError
from runtime.loadgen import Prompts, Replay, Slos
from runtime.vllm_workers import VllmWorkers
from traces import Split, Trace, load

from .replays import replay

WARM_UP = 6  # requests before anything is measured
START_S = 240.0  # of a gateway; the kernels may have to be compiled first
TAIL_SHARE = 1.0  # TBT is the mean of all intervals: the longest of some twenty are the machine's, not the scheduler's
SCALE = 1 / 16  # tokens sent for each of the trace's: blocks of 512 become vLLM's of 32


class LiveError(RuntimeError):
    """A live experiment that cannot be run; the message is for the user."""


@dataclass(frozen=True)
class Options:
    """What a live experiment is run with; see `experiments.live_command`."""

    cluster: Path | None
    trace: str
    requests: int
    load: float
    repeats: int
    policies: tuple[str, ...]
    ordering: bool
    tuning: bool
    longest_tokens: int
    most_requests: int
    say: Callable[[str], None]


class Seen(NamedTuple):
    """What clients saw, or would see, of R requests: float64[R], NaN where it was not served; bool[R]."""

    ttft_s: NDArray[np.float64]
    tbt_s: NDArray[np.float64]
    good: NDArray[np.bool_]

    @property
    def served(self) -> NDArray[np.bool_]:
        """Whether it was answered: bool[R]."""
        return ~np.isnan(self.ttft_s)


@dataclass(frozen=True)
class Front:
    """A gateway that runs. url, metrics_url: without a path."""

    url: str
    metrics_url: str

    def fallbacks(self) -> dict[str, int]:
        """Decisions that its policy left to the fallback so far, by cause: `invalid` is a masked choice or none."""
        with urlopen(f"{self.metrics_url}/metrics", timeout=10.0) as response:
            text = response.read().decode()
        found = re.findall(r'^conductor_policy_fallbacks_total\{cause="(\w+)"\} (\S+)', text, re.MULTILINE)
        return {cause: int(float(count)) for cause, count in found if float(count)}


# --- live ------------------------------------------------------------------------------------------------------------


@contextmanager
def live_workers(given: Path | None, prefill: int, decode: int, *, kv_tokens: int = 65536) -> Iterator[dict[str, Any]]:
    """The cluster file's fields of workers that run: those of a file, or vLLM's, started here and ended after.

    Raises:
        LiveError: the file lists no workers. WorkersError: vLLM does not start.
    """
    if given is not None:
        fields = yaml.safe_load(given.read_text())
        if not isinstance(fields, dict) or not fields.get("workers"):
            raise LiveError(f"{given}: expected a cluster file with workers")
        yield fields
        return
    with VllmWorkers(prefill, decode, kv_tokens=kv_tokens) as workers:
        if prefill == 1 and hasattr(os, "sched_setaffinity"):
            # A core for prefill, one for everything else, so that neither phase waits for the other's.
            cores = sorted(os.sched_getaffinity(0))
            rest = set(cores[1:]) or set(cores)
            for name, process in workers.processes.items():
                pin_group(process.pid, {cores[0]} if name == "p0" else rest)
            os.sched_setaffinity(0, rest)
        yield workers.cluster()


def pin_group(group: int, cores: set[int]) -> None:
    """Have all threads of a process group run on these cores only (Linux)."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                for thread in (process / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue


@contextmanager
def gateway(cluster: dict[str, Any], policy: str, *, calibrates: bool = False) -> Iterator[Front]:
    """A gateway before workers. Unless it `calibrates`, predictions go by the cluster's profile alone, as in the gym.

    Raises:
        LiveError: it does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(yaml.safe_dump(cluster))
        faces = [word for face in ("gateway", "grpc", "metrics") for word in (f"--{face}", "127.0.0.1:0")]
        arguments = ["--cluster", str(file), "--policy", policy, *faces]
        if not calibrates:
            arguments.append("--no-calibrate")
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_policy", *arguments], stderr=subprocess.PIPE, text=True
        )
        lines: list[str] = []
        ready = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if " decides for " in line:
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        try:
            ready.wait(START_S)
            said = "".join(lines)
            served, measured = (re.search(rf"{face} on (\S+)", said) for face in ("gateway", "metrics"))
            if process.poll() is not None or served is None or measured is None:
                raise LiveError("the gateway did not start:\n" + "".join(lines[-10:]))
            front = Front(f"http://{served[1]}", f"http://{measured[1]}")
            _warm_up(front.url)
            yield front
        finally:
            end(process, 20.0)


def end(process: subprocess.Popen[Any], patience_s: float) -> None:
    """End a server, at last by force."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _warm_up(url: str) -> None:
    """The first requests load compiled code, which can take longer than a connection may: they may fail."""
    front = LiveWorker(url)
    for _ in range(WARM_UP):
        with suppress(WorkerError):
            front.first_token(64)
    front.close()


def replayed(url: str, trace: Trace, slos: Slos, seed: int, say: Callable[[str], None], what: str) -> Seen:
    """Replay a trace, as `sent` makes it, through a gateway; `what` is said with how far it is.

    Another seed gives other tokens, of which nothing is cached.

    Raises:
        LiveError: a request was neither served nor rejected.
    """
    prompts = Prompts(trace, seed=seed)
    sending = Replay(url, prompts, timeout_s=300.0)

    async def run() -> None:
        running: asyncio.Task[None] = asyncio.create_task(sending.run())
        while not running.done():
            say(f"{what}: {sending.ended} of {trace.n_requests}")
            await asyncio.wait([running], timeout=1.0)
        await running

    asyncio.run(run())
    failed = [result for result in sending.results if not result.completed and not result.rejected]
    if failed:
        raise LiveError(f"{len(failed)} of {len(sending.results)} requests failed, one with: {failed[0].error}")
    times = [result.answer.times for result in sending.results]
    served = np.array([result.completed for result in sending.results])
    return Seen(
        np.where(served, [t.ttft_s for t in times], np.nan),
        np.where(served, [t.tbt_s(slos.tbt_tail_share) for t in times], np.nan),
        np.array([slos.met(result) for result in sending.results]),
    )


def measured(
    cluster: dict[str, Any], plan: Plan, tell: Callable[[str], None], earlier: Calibration | None = None
) -> Calibration:
    """Calibrate on the first prefill and decode worker of a cluster, through a gateway before just these two.

    `earlier`: what was measured of them before counts as well.
    """
    pair = [next(row for row in cluster["workers"] if row["role"] == role) for role in ("prefill", "decode")]
    one_machine = all(str(row["address"]).startswith("127.0.0.1:") for row in pair)
    with gateway(cluster | {"workers": pair}, "round_robin") as running:
        prefill, decode, front = [LiveWorker(at) for at in (*(f"http://{row['address']}" for row in pair), running.url)]
        try:
            return calibrate(
                prefill,
                decode,
                plan,
                gateway=front,
                kv_bytes_per_token=float(cluster["model"]["kv_bytes_per_token"]),
                earlier=earlier,
                one_machine=one_machine,
                tell=lambda what, done, total: tell(f"{what} {done} of {total}"),
            )
        finally:
            for worker in (prefill, decode, front):
                worker.close()


# --- the same in the gym ---------------------------------------------------------------------------------------------


def calibrated(cluster: dict[str, Any], found: Calibration, slo: dict[str, float]) -> dict[str, Any]:
    """A cluster's fields with what calibration has found in them, for gateway and gym alike."""
    profile = found.profile.model_dump()
    roles = [row["role"] for row in cluster["workers"]]
    pools = {pool: [{"count": roles.count(pool), "hardware": profile}] for pool in ("prefill", "decode")}
    return cluster | found.cluster | pools | {"slo": slo | {"tbt_tail_share": TAIL_SHARE}}


def spec_of(cluster: dict[str, Any]) -> ClusterSpec:
    """The gym's cluster."""
    return validate_cluster({name: value for name, value in cluster.items() if name != "workers"}, "cluster")


def trace_of(options: Options) -> Trace:
    """The part that is reported on, or with `tuning` the one that a procedure may be made on. Times are spread.

    Raises:
        TraceError: it cannot be read.
    """
    parts = parts_of(options.trace)
    return parts.train if options.tuning else parts.test


@cache
def parts_of(trace: str) -> Split:
    """A trace's parts: `train` is what whoever serves the others has seen before. Times are spread.

    Raises:
        TraceError: it cannot be read.
    """
    return load(trace).jitter(0).split()


def sent(trace: Trace, requests: int, longest_tokens: int, scale: float = SCALE) -> Trace:
    """The first requests of a trace as they are sent: fewer tokens, blocks as much smaller.

    Args:
        longest_tokens: prompt and answer of a request, as sent. Longer ones are left out: nobody measured such.
    """
    prompts = Prompts(trace, scale=scale)
    rows = range(trace.n_requests)
    inputs = np.array([prompts.input_tokens(row) for row in rows], np.int32)
    outputs = np.array([prompts.output_tokens(row) for row in rows], np.int32)
    taken = np.flatnonzero(inputs + outputs <= longest_tokens)[:requests]
    some = trace.take(taken)
    return replace(
        some,
        arrival_s=some.arrival_s - some.arrival_s[0],
        input_tokens=inputs[taken],
        output_tokens=outputs[taken],
        block_tokens=prompts.block_tokens,
    )


def simulated(cluster: ClusterSpec, trace: Trace, policy: str, seed: int = 0) -> Seen:
    """What the clients of a trace would see; `seed` is that of a random policy.

    vLLM's decode workers sample an answer's first token themselves, from KV that was handed over, where the papers'
    prefill worker has it: so one more token is decoded, and the first is there an iteration after the join.
    """
    longer = replace(trace, output_tokens=trace.output_tokens + 1)
    outcomes = replay(cluster, longer, policy, seed=seed).outcomes
    tbt_s = outcomes["tbt_mean_s"]
    ttft_s = outcomes["join_s"] + tbt_s - outcomes["arrival_s"]
    tbt_s = np.where(np.isnan(ttft_s) | (trace.output_tokens > 1), tbt_s, 0.0)
    good = (ttft_s <= cluster.slo.ttft_s) & (tbt_s <= cluster.slo.tbt_s)
    return Seen(ttft_s, np.where(np.isnan(ttft_s), np.nan, tbt_s), good)


def prefill_busy_s(cluster: ClusterSpec, trace: Trace, policy: str) -> float:
    """Seconds that a trace's prefills keep each prefill worker busy, by the gym; it depends on what is cached."""
    return float(np.nansum(replay(cluster, trace, policy).outcomes["prefill_s"])) / cluster.n_prefill
