"""`python -m policies`: list policies, tune heuristics, export a trained one to ONNX, look into such a file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated

import typer

from envs.spec import SpecError
from policies.policy import PolicyError
from traces import TraceError
from traces.command import plain_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Policies: list them, tune heuristics, export a trained one, look into an exported one.

    A policy decides for every arriving request: reject it, or which prefill instance, which decode
    instance and where its cached prefix comes from. Heuristics go by name; a trained policy by its
    run folder, or by the one .onnx file exported from it, which serves any number of instances and
    needs ONNX Runtime only, no torch. All of them run on the leaderboard and in the sidecar.

    \b
    Examples:
      python -m policies list
      python -m policies tune --trace conversation_trace.jsonl --capacity 0.9,2.0 --out tuned.yaml
      python -m policies export runs/mine --out mine.onnx
      python -m policies show mine.onnx
      python leaderboard.py --policies mine.onnx,conductor+predictive
    """,
)


@app.command("list")
@plain_errors(PolicyError)
def list_() -> None:
    """List routers and admissions with their options, the default of each, and where it is searched when tuned.

    A policy is ROUTER[:option=value,...][+ADMISSION[:option=value,...]]. Without an admission,
    conductor checks both SLOs, the other routers accept everything.

    \b
    Examples:
      conductor
      cache_aware+early
      conductor:threshold=3+predictive:threshold=0.95
    """
    from policies.registry import ADMISSIONS, ROUTERS

    for kind, parts in (("routers", ROUTERS), ("admissions, after a +", ADMISSIONS)):
        print(f"{kind}:")
        width = max(map(len, parts))
        for name, part in parts.items():
            print(f"  {name:{width}}  {part.meaning}")
            for option in part.options:
                searched = "" if option.low is None else f" ({option.low:g} .. {option.high:g})"
                print(f"  {'':{width}}    :{option.name}={option.default:g}  {option.meaning}{searched}")
    print("others:")
    print("  RUN          a run folder of train.py")
    print("  FILE.onnx    what `python -m policies export` made of one")
    print("  module:Class a class of your own with a decide(observation) method")


@app.command()
@plain_errors(PolicyError, TraceError, SpecError)
def tune(
    trace: Annotated[str, typer.Option(metavar="A[,B...]", help="traces, files or builtin:NAME")],
    out: Annotated[Path, typer.Option(metavar="FILE.yaml", help="file to write")],
    cluster: Annotated[str, typer.Option(help="a name such as 8p8d, or a YAML file")] = "8p8d",
    load: Annotated[str, typer.Option(metavar="LOW,HIGH", help="arrival speeds, times a trace's own")] = "",
    capacity: Annotated[
        str,
        typer.Option(metavar="LOW,HIGH", help="or times the load at which conductor meets 90 % on its training part"),
    ] = "",
    only: Annotated[str, typer.Option(metavar="NAME,...", help="of these routers, or pairs, only")] = "",
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same file")] = 0,
) -> None:
    """Tune the options of every heuristic, the fair baseline for a learned policy.

    Every router is tuned with every admission by CMA-ES on the training part of each trace (its first 60 %); of each
    router the best on the validation part is kept, the plain one if nothing is better. The test part is not read.
    All routers take about ten minutes on two cores.

    \b
    Examples:
      python -m policies tune --trace builtin:conversation --load 1.0,2.0 --out tuned.yaml
      python -m policies tune --trace builtin:synthetic --capacity 0.9,2.0 --only llmd,conductor+early --out t.yaml
    """
    from envs.spec import load_cluster
    from policies.trainers.progress import Progress
    from policies.tuned import REQUESTS, as_yaml, generations, pairs, tune
    from policies.tuned import capacity as capacity_of
    from policies.tuning import Trials
    from traces import load as load_trace

    if bool(load) == bool(capacity):
        raise PolicyError("expected one of --load LOW,HIGH and --capacity LOW,HIGH")
    low, high = _range(load or capacity)
    names = list(filter(None, only.split(",")))
    routers = pairs(names)
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)) or out.is_dir():
        raise PolicyError(f"--out {out}: cannot be written")
    spec = load_cluster(cluster)
    traces = [load_trace(name) for name in filter(None, trace.split(","))]
    for found in traces:
        if found.has_blocks and found.block_tokens != spec.block_tokens:
            raise PolicyError(
                f"{found.name} has blocks of {found.block_tokens} tokens, {spec.name} of {spec.block_tokens}"
            )
    units = [capacity_of(spec, found) if capacity else 1.0 for found in traces]
    trials = Trials(spec, traces, [(low * unit, high * unit) for unit in units], requests=REQUESTS)
    with Progress(generations(routers), 0) as progress:
        policies = tune(routers, trials, seed, progress.show)
    command = f"python -m policies tune --trace {trace} --cluster {cluster}"
    command += f" --load {load}" if load else f" --capacity {capacity}"
    command += f" --only {only}" if only else ""
    out.write_text(as_yaml(f"{command} --seed {seed} --out {out}", trials, policies))
    for name, entry in policies.items():
        print(f"{name:28} {entry['default']:.4f} -> {entry['validation']:.4f}  {entry['policy']}")


def _range(text: str) -> tuple[float, float]:
    """`LOW,HIGH` as numbers."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = 0.0, 0.0
    if not 0 < low <= high < math.inf:
        raise PolicyError(f"{text!r}: expected LOW,HIGH with 0 < LOW <= HIGH")
    return low, high


@app.command()
@plain_errors(PolicyError)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder of train.py")],
    out: Annotated[Path, typer.Option(metavar="FILE.onnx", help="file to write")],
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="best|final|FILE",
            help="best on validation, end of the training, or a checkpoint such as steps_000000200000.zip",
        ),
    ] = "best",
    force: Annotated[bool, typer.Option("--force", help="replace FILE.onnx")] = False,
) -> None:
    """Write a trained policy to one ONNX file.

    The file holds the network, what it reads, how features are scaled, and how it was trained. It is
    written only if ONNX Runtime decides as torch does on random observations of clusters of 1 to 47
    instances. The same run and the same packages give the same bytes. Takes about half a minute;
    needs torch, onnx, onnxscript and onnxruntime.

    \b
    Examples:
      python -m policies export runs/mine --out mine.onnx
      python -m policies export runs/mine --out early.onnx --checkpoint steps_000000200000.zip
    """
    from policies.artifact import CHECKED_POOLS, export_run

    about = export_run(run, out, checkpoint, force=force)
    training = about["training"]
    pools = ", ".join(f"{p}x{d}" for p, d in CHECKED_POOLS)
    print(f"{out}: {out.stat().st_size >> 10} KiB, {training['checkpoint']} of {run}", end="")
    if training["validation"]:
        print(f", validation goodput {training['validation']['goodput']:.4f} after {training['steps']:,} steps", end="")
    print(f"; decides as torch does in pools of {pools}")


@app.command()
@plain_errors(PolicyError)
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="exported policy")],
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show what an exported policy says of itself.

    What it reads and how it scales that, how it was trained and validated, and with which versions.
    Also of files that this version cannot run, because they read another observation.

    \b
    Examples:
      python -m policies show mine.onnx
      python -m policies show mine.onnx --json | jq .training.validation
    """
    import yaml

    from policies.artifact import read_metadata

    about = read_metadata(file)
    if as_json:
        print(json.dumps(about, indent=2))
    else:
        print(yaml.safe_dump(about, sort_keys=False, width=100, default_flow_style=None), end="")


def main(arguments: list[str] | None = None) -> None:
    """Run a command; `arguments` defaults to the process's own.

    Raises:
        SystemExit: always, with the exit code.
    """
    app(args=arguments, prog_name="python -m policies")


if __name__ == "__main__":
    main()
