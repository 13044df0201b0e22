"""`python -m traces`: look at traces, convert, cut, synthesise, fit, download them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from traces.command import EXIT_BAD_INPUT, plain_errors
from traces.trace import Trace, TraceError

if TYPE_CHECKING:
    from traces.statistics import Statistics


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Traces of LLM serving: look at them, convert, cut, synthesise, fit, download.

    FILE is any public trace (Mooncake, Qwen-Bailian, RAGPulse, kv-cache-tester, Azure, BurstGPT) or
    this project's Parquet, plain, gzip or zstd, told apart by content; or one of the built-in
    workloads, which need no download: builtin:NAME or builtin:NAME@RATE with conversation,
    toolagent, synthetic, arxiv-summarization, l-eval, simulated-16k, -32k, -64k, -128k,
    hotspot, bursty; or mooncake:conversation, mooncake:toolagent, mooncake:synthetic: the released
    file in data/ or in ../shared/traces, else the built-in stand-in, saying so.

    \b
    Examples:
      python -m traces info builtin:conversation
      python -m traces info conversation_trace.jsonl --plot reuse.png
      python -m traces info trace.jsonl --json - | jq .lru_hit
      python -m traces convert qwen_traceA_blksz_16.jsonl qwen.parquet --reblock 512
      python -m traces slice trace.jsonl test.parquet --part test
      python -m traces synth toolagent big.parquet --requests 1000000 --seed 7
      python -m traces synth servegen/m-small busy.parquet --start 3600 --duration 600 --rate 20
      python -m traces fit mylog.parquet mine.yaml
      python -m traces download conversation --to data
    """,
)

OnError = Literal["raise", "skip"]
In = Annotated[str, typer.Argument(metavar="FILE", help="trace file, folder, builtin:NAME or mooncake:NAME")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help=".parquet, or .jsonl[.gz|.zst] for Mooncake's format")]
Bad = Annotated[OnError, typer.Option("--on-error", help="bad rows: stop at the first, or skip and count them")]
Sort = Annotated[bool, typer.Option("--sort", help="order rows by time where the file is not")]
Reblock = Annotated[int | None, typer.Option(help="coarser blocks of this many tokens, a multiple of the file's")]


def _load(file: str, on_error: OnError, sort: bool = False, reblock: int | None = None) -> Trace:
    from traces.formats import load

    trace = load(file, on_error=on_error, sort=sort, reblock=reblock)
    if trace.skipped_rows:
        print(f"skipped {trace.skipped_rows} bad rows, among them:", file=sys.stderr)
        for reason in trace.skip_reasons:
            print(f"  {reason}", file=sys.stderr)
    return trace


def _save(trace: Trace, out: Path) -> None:
    from traces.formats import save

    save(trace, out)
    print(f"{out}: {trace.n_requests} requests over {trace.duration_s:.1f} s")


@app.command()
@plain_errors(TraceError)
def info(
    file: In,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE|-", help="write the figures as JSON; - is stdout"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="plot the reuse curve")] = None,
    on_error: Bad = "raise",
    sort: Sort = False,
    reblock: Reblock = None,
) -> None:
    """Show rates, lengths and possible reuse.

    Statistics of a trace, and what one prefix cache of several sizes could reuse of it.

    \b
    Examples:
      python -m traces info builtin:toolagent
      python -m traces info trace.jsonl.gz --json - --on-error skip
    """
    from traces.statistics import statistics_of

    trace = _load(file, on_error, sort, reblock)
    table = statistics_of(trace)
    if json_to is not None:
        text = json.dumps(table.as_dict(), indent=2) + "\n"
        if json_to == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            from traces.formats import write_whole

            write_whole(Path(json_to), text.encode())
    if json_to != "-":
        _print_table(table)
    if plot is not None:
        _plot_reuse(trace, plot)


def _print_table(stats: Statistics) -> None:
    from rich.console import Console
    from rich.table import Table

    def row(label: str, value: str) -> None:
        table.add_row(label, value)

    table = Table(title=stats.name or "trace", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    row("requests", f"{stats.requests:,}")
    if stats.skipped_rows:
        row("skipped rows", f"{stats.skipped_rows:,}")
    row("duration", f"{stats.duration_s:,.1f} s")
    row("rate", "-" if stats.rate is None else f"{stats.rate:,.3f} requests/s")
    row("distinct arrival times", f"{stats.distinct_arrival_times:,}")
    row("largest burst", f"{stats.largest_burst:,} requests at one time")
    for label, mean, percentiles in (
        ("input tokens", stats.input_mean, stats.input_percentiles),
        ("output tokens", stats.output_mean, stats.output_percentiles),
    ):
        row(f"{label}, mean", f"{mean:,.1f}")
        row(
            f"{label}, {' / '.join(percentiles)}",
            " / ".join(f"{v:,.0f}" for v in percentiles.values()),
        )
    if stats.sessions is not None:
        row("sessions", f"{stats.sessions:,}")
    if stats.lru_hit is None:
        row("blocks", "none in the source: reuse unknown")
    else:
        row("block size", f"{stats.block_tokens} tokens")
        row("blocks requested", f"{stats.blocks_requested:,}")
        row("blocks distinct", f"{stats.blocks_distinct:,}")
        row("never reused", f"{stats.never_reused_share:.1%} of distinct blocks")
        row("ten most used blocks", f"{stats.top10_blocks_share:.1%} of requested blocks")
        for capacity, rate in stats.lru_hit.items():
            size = "unbounded" if capacity == "inf" else f"{int(capacity):,} blocks"
            row(f"LRU hit rate, {size}", f"{rate:.1%}")
    Console().print(table)


def _plot_reuse(trace: Trace, out: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from traces.statistics import lru_hit_curve

    sizes = np.unique(np.geomspace(10, max(trace.n_distinct_blocks, 100), 60).astype(int))
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.semilogx(sizes, lru_hit_curve(trace, list(map(float, sizes))), marker=".")
    axes.set_xlabel(f"cache size, blocks of {trace.block_tokens} tokens")
    axes.set_ylabel("hit blocks / requested blocks")
    axes.set_title(f"{trace.name}: one LRU cache, requests in order")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot be written ({error})", file=out, expected="a .png, .svg or .pdf file") from None
    plt.close(figure)


@app.command()
@plain_errors(TraceError)
def convert(file: In, out: Out, on_error: Bad = "raise", sort: Sort = False, reblock: Reblock = None) -> None:
    """Rewrite as Parquet or Mooncake JSONL.

    The suffix of OUT says which.

    \b
    Examples:
      python -m traces convert conversation_trace.jsonl conversation.parquet
      python -m traces convert qwen_traceA_blksz_16.jsonl qwen.jsonl.zst --reblock 512
    """
    if Path(str(file)).exists() and out.exists() and out.samefile(file):
        raise TraceError(f"{out}: is the file that is read; expected another name for what is written")
    _save(_load(file, on_error, sort, reblock), out)


@app.command("slice")
@plain_errors(TraceError)
def slice_(
    file: In,
    out: Out,
    start: Annotated[float | None, typer.Option(help="from this time on, seconds")] = None,
    stop: Annotated[float | None, typer.Option(help="up to this time, seconds")] = None,
    part: Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option(help="one part of the 60/20/20 split by time"),
    ] = None,
    speed_up: Annotated[float | None, typer.Option(help="2: arrivals twice as fast")] = None,
    jitter: Annotated[int | None, typer.Option(metavar="SEED", help="spread requests that share a time stamp")] = None,
    reblock: Reblock = None,
    on_error: Bad = "raise",
    sort: Sort = False,
) -> None:
    """Cut and reshape a trace.

    In this order: coarser blocks, part, times, jitter, speed.

    \b
    Examples:
      python -m traces slice builtin:conversation hour2.parquet --start 600 --stop 1200
      python -m traces slice trace.jsonl fast.jsonl --part test --jitter 0 --speed-up 1.5
    """
    trace = _load(file, on_error, sort, reblock)
    if part is not None:
        trace = getattr(trace.split(), part)
    if start is not None or stop is not None:
        low = 0.0 if start is None else start
        trace = trace.window(low, float("inf") if stop is None else stop)
    if jitter is not None:
        trace = trace.jitter(jitter)
    if speed_up is not None:
        trace = trace.speed_up(speed_up)
    if not trace.n_requests:
        raise TraceError(f"no request of {file} is left", expected="a range with requests in it")
    _save(trace, out)


@app.command()
@plain_errors(TraceError)
def synth(
    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE",
            help="a built-in workload; a profile's YAML; a CSV of lengths; a folder of ServeGen's clients",
        ),
    ],
    out: Out,
    requests: Annotated[int | None, typer.Option(help="how many; default as many as the profile's source")] = None,
    duration: Annotated[float | None, typer.Option(help="or how long, seconds")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second")] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same trace")] = 0,
    cv: Annotated[float | None, typer.Option(help="of the gaps, for lengths: 1, the default, is Poisson")] = None,
    start: Annotated[float | None, typer.Option(help="ServeGen: from this time of its windows on, seconds")] = None,
    sessions: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="ServeGen: invent sessions as in this profile")
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option("--on-error", help="ServeGen: clients that lack a file stop it, or are left out"),
    ] = "raise",
) -> None:
    """Sample a trace from a workload profile, lengths or clients.

    Lengths (arxiv-summarization, l-eval, simulated-16k, ... or a CSV such as Vidur's) are sent at --rate.
    ServeGen's clients are each sampled at the rate, burstiness and lengths of their windows.

    \b
    Examples:
      python -m traces synth conversation chat.parquet --seed 1
      python -m traces synth mine.yaml busy.jsonl --duration 600 --rate 20
      python -m traces synth arxiv-summarization arxiv.jsonl --rate 2.5 --requests 2000
      python -m traces synth servegen/m-small day1.parquet --duration 600 --on-error skip
    """
    from traces.arrivals import is_lengths, sent
    from traces.formats.servegen import is_folder, servegen
    from traces.synthesis import profile as profile_of
    from traces.synthesis import synthesize

    profile = profile.removeprefix("builtin:")
    clients, lengths = is_folder(Path(profile)), is_lengths(profile)
    for option, given, fits in (
        ("--cv", cv, lengths),
        ("--start", start, clients),
        ("--sessions", sessions, clients),
        ("--requests", requests, not clients),
    ):
        if given is not None and not fits:
            raise TraceError(f"{option} says nothing for {profile!r}", expected="it left out")
    if clients:
        if duration is None:
            raise TraceError("no --duration", expected="how many seconds of the clients to sample")
        invented = None if sessions is None else profile_of(sessions)
        trace = servegen(profile, start or 0.0, duration, seed, rate, on_error=on_error, sessions=invented)
        for reason in trace.skip_reasons:
            print(f"left out: {reason}", file=sys.stderr)
    elif lengths:
        trace = sent(profile, seed, requests, duration_s=duration, rate=rate, cv=cv)
    else:
        trace = synthesize(profile_of(profile), n_requests=requests, duration_s=duration, seed=seed, rate=rate)
    _save(trace, out)


@app.command("fit")
@plain_errors(TraceError)
def fit_(
    file: In,
    profile: Annotated[Path, typer.Argument(metavar="PROFILE.yaml", help="profile to write")],
    on_error: Bad = "raise",
    sort: Sort = False,
    reblock: Reblock = None,
) -> None:
    """Measure a workload profile from a trace.

    To synthesise more of its kind.

    \b
    Example:
      python -m traces fit decisions.parquet mine.yaml
      python -m traces synth mine.yaml more.parquet --requests 100000
    """
    from traces.formats import write_whole
    from traces.synthesis import fit

    fitted = fit(_load(file, on_error, sort, reblock))
    write_whole(profile, fitted.to_yaml().encode())
    print(f"{profile}: profile of {fitted.n_requests} requests, {len(fitted.strata)} strata")


@app.command()
@plain_errors(TraceError)
def download(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="none: list them")] = None,
    all_: Annotated[bool, typer.Option("--all", help="every known trace")] = False,
    to: Annotated[Path, typer.Option(metavar="DIR", help="folder to download to")] = Path("data"),
    mirror: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="CONDUCTOR_TRACE_MIRROR",
            help="take files from this address instead of GitHub's, same paths below it",
        ),
    ] = None,
) -> None:
    """Fetch public traces, checked, resumable.

    \b
    Examples:
      python -m traces download
      python -m traces download conversation toolagent --to data
    """
    from traces.download import SOURCES
    from traces.download import download as fetch

    wanted = list(SOURCES) if all_ else (names or [])
    if not wanted:
        for name, source in SOURCES.items():
            print(f"{name:15} {source.about} ({source.licence})")
        return
    unknown = [name for name in wanted if name not in SOURCES]
    if unknown:
        raise TraceError(f"no public trace {unknown[0]!r}", expected=", ".join(SOURCES))
    from rich.console import Console
    from rich.progress import Progress

    failed = 0
    with Progress(console=Console(stderr=True)) as bars:
        for name in wanted:
            task = bars.add_task(name, total=None)

            def show(have: int, total: int | None, task: Any = task) -> None:
                bars.update(task, completed=have, total=total)

            try:
                file = fetch(name, to, mirror=mirror, progress=show)
            except TraceError as error:
                # One missing file must not keep the others from coming.
                bars.console.print(f"error: {error}", markup=False, soft_wrap=True)
                failed += 1
            else:
                print(file)
    if failed:
        raise typer.Exit(EXIT_BAD_INPUT)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; `arguments` defaults to the process's own.

    Raises:
        SystemExit: always, with the exit code.
    """
    app(args=arguments, prog_name="python -m traces")


if __name__ == "__main__":
    main()
