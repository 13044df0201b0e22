"""`python serve_policy.py`: the scheduling sidecar. Decides for live requests with any policy, heuristic or learned."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

EXIT_BAD_INPUT = 2

EPILOG = """examples:

python serve_policy.py --policy conductor+predictive --cluster cluster.yaml

    decide over gRPC (conductor.v1.Conductor) on 127.0.0.1:50051

python serve_policy.py --policy learned --shadow conductor+slo --cluster cluster.yaml \\
    --ext-proc 127.0.0.1:9002 --metrics 127.0.0.1:9090

    the shipped learned policy (docs/learning.md) as Envoy's endpoint picker, beside it a heuristic without effect

python serve_policy.py --cluster cluster.yaml --gateway 127.0.0.1:8000

    an OpenAI-compatible server in front of the workers of the cluster file

python serve_policy.py --cluster cluster.yaml --canary runs/new --canary-share 0.05 --log decisions/

    a new policy for one request in twenty, every decision logged; then: python leaderboard.py --log decisions/

python serve_policy.py demo

    prefill and decode workers, gateway, sidecar and live page, all on this machine
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True, epilog=EPILOG)
def serve(
    context: typer.Context,
    policy: Annotated[
        str, typer.Option(help="ROUTER[+ADMISSION] (python -m policies list), learned, a run folder, an exported .onnx")
    ] = "conductor+predictive",
    cluster: Annotated[
        str, typer.Option(help="Cluster file (a ClusterSpec with a workers section), or a built-in cluster: 2p2d, 8p8d")
    ] = "2p2d",
    grpc: Annotated[
        str, typer.Option(help="HOST:PORT of the gRPC service; port 0 takes a free one")
    ] = "127.0.0.1:50051",
    ext_proc: Annotated[str, typer.Option(help="HOST:PORT of Envoy's external processing; may equal --grpc")] = "",
    metrics: Annotated[str, typer.Option(help="HOST:PORT of /metrics, /healthz and /readyz")] = "",
    indexer: Annotated[str, typer.Option(help="HOST:PORT of Mooncake's indexer API; may equal --metrics")] = "",
    live: Annotated[str, typer.Option(help="HOST:PORT of the live page (/live); may equal --metrics")] = "",
    live_outside: Annotated[bool, typer.Option(help="Let --live be reached from other machines")] = False,
    gateway: Annotated[
        str, typer.Option(help="HOST:PORT of the OpenAI-compatible front, which runs the legs itself (docs/gateway.md)")
    ] = "",
    tokenizer: Annotated[
        str, typer.Option(help="Of the gateway: a tokenizer.json for text prompts; else the engine is asked")
    ] = "",
    leg_timeout_s: Annotated[
        float,
        typer.Option(
            min=0.1, max=36000.0, help="Of the gateway: longest wait for a prefill or the next piece of an answer"
        ),
    ] = 300.0,
    config: Annotated[
        str, typer.Option(help="YAML with policies that may change while serving; read again on SIGHUP")
    ] = "",
    fallback: Annotated[str, typer.Option(help="Heuristic that decides where the policy fails")] = "conductor+slo",
    shadow: Annotated[str, typer.Option(help="Policy that decides beside the first, without effect")] = "",
    canary: Annotated[str, typer.Option(help="Policy that decides for a share of the requests")] = "",
    canary_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="That share")] = 0.0,
    deadline_ms: Annotated[float, typer.Option(min=0.01, help="Most time for a decision, else the fallback's")] = 5.0,
    lease_s: Annotated[
        float, typer.Option(min=0.1, help="A reservation ends by itself after so long without report")
    ] = 120.0,
    log: Annotated[str, typer.Option(help="Folder for the decision log (Parquet)")] = "",
    log_keep_gib: Annotated[
        float, typer.Option(min=0.0, help="Size above which the log's oldest segments go; 0 keeps all")
    ] = 0.0,
    snapshot: Annotated[str, typer.Option(help="File that keeps the prefix index over restarts")] = "",
    snapshot_every_s: Annotated[float, typer.Option(min=0.1, help="How often that file is written")] = 30.0,
    peer: Annotated[str, typer.Option(help="HOST:PORT of another sidecar to start warm from")] = "",
    calibrate: Annotated[bool, typer.Option(help="Fit each worker's latency from what is reported")] = True,
    blocks: Annotated[int, typer.Option(min=1024, help="Distinct KV blocks to remember")] = 1 << 20,
    in_flight: Annotated[int, typer.Option(min=1, help="Most requests in flight")] = 1 << 16,
    scrape_interval_s: Annotated[float, typer.Option(min=0.01, help="Between two scrapes of a worker")] = 0.25,
    approximate_ttl_s: Annotated[
        float,
        typer.Option(min=0.1, help="How long what was routed to a worker without KV events is taken to be cached"),
    ] = 300.0,
    observe_responses: Annotated[
        bool, typer.Option(help="Keep ext_proc streams open to see what became of requests")
    ] = False,
    ext_proc_fallbacks: Annotated[
        int, typer.Option(min=0, help="Further endpoints in the destination header, where Envoy's cluster takes a list")
    ] = 0,
    base_models: Annotated[
        str, typer.Option(help="Names of the served model, comma separated; another model in a body is a LoRA adapter")
    ] = "",
    max_message_bytes: Annotated[int, typer.Option(min=1024, help="Largest message and request body")] = 16 << 20,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Most calls and streams at a time")] = 4096,
    tls_certificate: Annotated[str, typer.Option(help="PEM file; with --tls-key, serve gRPC with TLS")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file")] = "",
    tls_client_ca: Annotated[str, typer.Option(help="PEM file; clients must show a certificate it signed (mTLS)")] = "",
    otel_endpoint: Annotated[str, typer.Option(help="OTLP gRPC endpoint for traces, e.g. http://127.0.0.1:4317")] = "",
    drain_s: Annotated[float, typer.Option(min=0.0, help="How long calls may go on after SIGTERM")] = 10.0,
    external_clock: Annotated[
        bool, typer.Option(help="Time is what requests and reports say (simulated workers)")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random policies and of the canary")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more")] = False,
) -> None:
    """Serve a scheduling policy on live traffic."""
    if context.invoked_subcommand is not None:
        return
    given = {name: value for name, value in locals().items() if name not in ("context", "verbose")}
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    raise typer.Exit(_serve(given))


@app.command()
def demo(
    workers: Annotated[
        str, typer.Option(help="vllm (its CPU build), or reference; default: vllm where it is set up")
    ] = "",
    connector: Annotated[str, typer.Option(help="How KV moves: nixl, or store, a Mooncake Store")] = "nixl",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers")] = 2,
    policy: Annotated[str, typer.Option(help="As of serve_policy.py")] = "conductor+predictive",
    gateway: Annotated[str, typer.Option(help="HOST:PORT of the gateway; port 0 takes a free one")] = "127.0.0.1:8000",
    page: Annotated[str, typer.Option(help="HOST:PORT of the live page and the metrics")] = "127.0.0.1:9090",
    load: Annotated[float, typer.Option(min=0.0, help="Requests per second to look at; 0: none")] = 0.3,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more")] = False,
) -> None:
    """A whole cluster on this machine: prefill and decode workers, gateway, sidecar, live page. Ctrl-C ends it."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        from runtime.demo import DEMO_FAULTS, Engine, check, run, workers_of
        from runtime.workers import Connector
    except ImportError as error:
        print(f"serving needs {error.name}: pip install 'conductor-gym[serve]'", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    if workers not in ("", *Engine):
        raise typer.BadParameter(f"expected {' or '.join(Engine)}, found {workers!r}", param_hint="--workers")
    if connector not in (Connector.NIXL, Connector.STORE):
        raise typer.BadParameter(f"expected nixl or store, found {connector!r}", param_hint="--connector")
    try:
        check(policy, gateway, page)
        made = workers_of(Engine(workers) if workers else None, prefill, decode, Connector(connector))
        with made, asyncio.Runner(loop_factory=_fast_loop()) as runner:
            raise typer.Exit(runner.run(run(made, policy, gateway, page, load)))
    except DEMO_FAULTS as error:
        print(f"serve_policy.py: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:  # while workers start
        raise typer.Exit(130) from None


def _serve(given: dict[str, Any]) -> int:
    try:
        from runtime.sidecar import FAULTS, Options, Sidecar
    except ImportError as error:
        print(f"serving needs {error.name}: pip install 'conductor-gym[serve]'", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            return runner.run(Sidecar(Options(**given)).run())
    except FAULTS as error:
        print(f"serve_policy.py: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed (not on Windows), else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


if __name__ == "__main__":
    app()
