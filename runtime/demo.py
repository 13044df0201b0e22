"""A whole P/D cluster on a laptop: real workers, the gateway and the sidecar before them, the live page.

`python serve_policy.py demo`. The workers are vLLM's CPU build where it is set up (`python -m runtime.vllm_workers
setup`), else the reference worker. Their model is tiny and its weights are random; all else is real.
"""

from __future__ import annotations

import asyncio
import contextlib
from enum import StrEnum

import numpy as np
from rich.console import Console

from policies import make_policy
from traces import Trace, load

from .loadgen import LoadError, Prompts, Replay
from .local_workers import LocalWorkers, WorkersError
from .reference_workers import ReferenceWorkers
from .sidecar import FAULTS, Options, Sidecar, host_and_port
from .vllm_workers import VllmWorkers, default_environment, is_set_up
from .workers import Connector

TRACE = "builtin:conversation"
SCALE = 1 / 16  # of its tokens: blocks of 512 become blocks of 32, which the workers' are
LONGEST_TOKENS = 4096  # of a prompt and its answer as they are sent
DEMO_FAULTS = (WorkersError, *FAULTS)

out = Console()


class Engine(StrEnum):
    """Whose workers."""

    VLLM = "vllm"
    REFERENCE = "reference"


def workers_of(engine: Engine | None, prefill: int, decode: int, connector: Connector) -> LocalWorkers:
    """Workers that are not started yet; None takes vLLM where it is set up."""
    if engine is None:
        engine = Engine.VLLM if is_set_up(default_environment(), connector) else Engine.REFERENCE
    if engine == Engine.VLLM:
        return VllmWorkers(prefill, decode, connector=connector)
    return ReferenceWorkers(prefill, decode, connector=connector)


def check(policy: str, gateway: str, page: str) -> None:
    """What would otherwise be found out when the workers have started.

    Raises:
        DEMO_FAULTS: it cannot be.
    """
    make_policy(policy)
    host_and_port("gateway", gateway)
    host_and_port("page", page)


async def run(workers: LocalWorkers, policy: str, gateway: str, page: str, requests_per_s: float) -> int:
    """Serve before started workers until SIGINT or SIGTERM; the exit status.

    Args:
        gateway, page: HOST:PORT; port 0 takes a free one. requests_per_s: of a load of one's own, 0 for none.

    Raises:
        DEMO_FAULTS: an option that cannot be, an address that cannot be bound.
    """
    sidecar = Sidecar(
        Options(
            policy=policy,
            cluster=str(workers.cluster_file),
            grpc="127.0.0.1:0",
            metrics=page,
            live=page,
            gateway=gateway,
            drain_s=1.0,
        )
    )
    serving = asyncio.create_task(sidecar.run())
    telling = asyncio.create_task(_tell(sidecar, workers, requests_per_s))
    try:
        return await serving
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling


async def _tell(sidecar: Sidecar, workers: LocalWorkers, requests_per_s: float) -> None:
    """Say where everything is, once it is there, and send the load."""
    while not {"gateway", "live", "grpc"} <= sidecar.bound.keys():
        await asyncio.sleep(0.05)
    url = f"http://{sidecar.bound['gateway']}"
    places = ", ".join(f"{name} {workers.address(name)}" for name in workers.roles)
    body = '{"model": "tiny", "prompt": "It was a bright cold day", "max_tokens": 8, "stream": true}'
    out.print(
        f"live page  http://{sidecar.bound['live']}/live\n"
        f"metrics    http://{sidecar.bound['live']}/metrics\n"
        f"gateway    {url}/v1\n"
        f"gRPC       {sidecar.bound['grpc']}\n"
        f"workers    {places}; logs: {workers.folder}\n\n"
        f"curl {url}/v1/completions -H 'content-type: application/json' -d '{body}'\n\n"
        f"Ctrl-C ends it all.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if not requests_per_s:
        return
    trace = _shortened(load(TRACE))
    speed = requests_per_s * trace.duration_s / trace.n_requests
    while not sidecar.conductor.draining:
        try:
            await Replay(url, Prompts(trace, scale=SCALE), speed=speed).run()
        except LoadError as error:  # as it must when the gateway is the first to go
            if not sidecar.conductor.draining:
                out.print(f"no more load: {error}", markup=False, highlight=False)
            return


def _shortened(trace: Trace) -> Trace:
    """The requests that the workers' context holds."""
    tokens = (trace.input_tokens + trace.output_tokens) * SCALE
    return trace.take(np.flatnonzero(tokens <= LONGEST_TOKENS))
