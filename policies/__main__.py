"""`python -m policies`: list policies, export a trained one to ONNX, look into such a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from policies.policy import PolicyError
from traces.command import plain_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Policies: list them, export a trained one, look into an exported one.

    A policy decides for every arriving request: reject it, or which prefill instance, which decode
    instance and where its cached prefix comes from. Heuristics go by name; a trained policy by its
    run folder, or by the one .onnx file exported from it, which serves any number of instances and
    needs ONNX Runtime only, no torch. All of them run on the leaderboard and in the sidecar.

    \b
    Examples:
      python -m policies list
      python -m policies export runs/mine --out mine.onnx
      python -m policies show mine.onnx
      python leaderboard.py --policies mine.onnx,conductor+predictive
    """,
)


@app.command("list")
@plain_errors(PolicyError)
def list_() -> None:
    """List routers and admissions with their options.

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
                print(f"  {'':{width}}    :{option.name}={option.default:g}  {option.meaning}")
    print("others:")
    print("  RUN          a run folder of train.py")
    print("  FILE.onnx    what `python -m policies export` made of one")
    print("  module:Class a class of your own with a decide(observation) method")


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
