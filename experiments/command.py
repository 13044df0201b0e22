"""The command line of `python -m experiments`: what was asked for is checked first, then run, then told."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from policies import PolicyError
from policies.executor import far_executor
from traces import TraceError
from traces.command import EXIT_BAD_INPUT
from traces.released import FOLDERS

from . import page, report
from .experiment import Experiment, Outcome, Setting, TraceShelf, experiments, run
from .sensitivity import Flip, sensitivity

EXIT_DOES_NOT_HOLD = 1

DESCRIPTION = """The tables and figures of Mooncake's papers, ours beside theirs.

For each quantity: ours, the paper's, their difference, the tolerance, and whether it holds. A row is fitted where a
parameter was fitted on its figure (experiments/parameters.yaml), else predicted; rows without a tolerance are context.
"""

EXAMPLES = """examples:
  python -m experiments --list
      every experiment with its title
  python -m experiments arxiv_table1_hit_rate fast_fig15_pd_ratio --traces data
      two of them, on released traces in data/ (python -m traces download --all --to data)
  python -m experiments --all
      all: about half a minute on 2 cores, after the kernels were compiled once
  python -m experiments --all --json - | jq '.rows[] | select(.holds == false)'
      what does not hold
  python -m experiments --all --write --sensitivity
      docs/reproduction.md and its pictures, with the verdicts that change when a parameter is halved or doubled

Two more run on live workers (docs/live.md), and have options of their own:
  python -m experiments sim_to_live --json -
  python -m experiments live_rejection --json -

Without the released files, synthesised stand-ins take their place; the output says so. The JSON has rows, traces (where
each experiment's came from), quick, and flips (null without --sensitivity); a row's tolerance is a number where ours
may differ from the paper's by so much, else text like ">= 0.95".
Exit code: 0 when everything ran, whatever the verdicts; 1 with --check when a row does not hold, or when the reader of
the output went away; 2 for bad input or an experiment that fails; 130 when interrupted.
"""


class ExperimentError(ValueError):
    """Something was asked for that cannot be; the message says what was expected."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m experiments",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("names", nargs="*", metavar="NAME", help="experiments to run; see --list")
    add("--all", action="store_true", help="run all")
    add(
        "--quick",
        action="store_true",
        help="without the curves that only pictures show: same rows; with no NAME, all",
    )
    add("--list", action="store_true", help="list the experiments and end")
    add("--json", metavar="FILE|-", help="write rows and their traces as JSON; -: to stdout, and nothing else there")
    add("--write", action="store_true", help="with --all: write docs/reproduction.md and its pictures")
    add(
        "--sensitivity",
        action="store_true",
        help="then again with each unpublished parameter halved and doubled; of --all, a quarter of an hour on 2 cores",
    )
    add(
        "--traces",
        metavar="DIR",
        type=Path,
        help="folder with the released traces (default: data, where downloads go, or else ../shared/traces)",
    )
    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="on a Ray cluster (auto, HOST:PORT) that sees the same --traces; without ADDRESS, one of this machine",
    )
    add(
        "--jobs", metavar="N", type=int, default=min(8, os.cpu_count() or 1), help="experiments at a time (%(default)s)"
    )
    add("--check", action="store_true", help="exit with 1 when a row does not hold")
    add("--debug", action="store_true", help="show the traceback of an error")
    return made


def chosen(arguments: argparse.Namespace) -> list[Experiment]:
    """The experiments asked for, in the papers' order.

    Raises:
        ExperimentError: none, or an unknown one.
    """
    known = experiments()
    for name in arguments.names:
        if name not in known:
            close = get_close_matches(name, known)
            instead = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
            raise ExperimentError(f"no experiment is called {name!r}; {instead}")
    if arguments.names and arguments.all:
        raise ExperimentError("both names and --all; expected one of them")
    if arguments.write and (not arguments.all or arguments.quick):
        raise ExperimentError("--write describes all experiments and their curves; expected --all, and no --quick")
    if arguments.names:
        return [experiment for name, experiment in known.items() if name in arguments.names]
    if arguments.all or arguments.quick:
        return list(known.values())
    raise ExperimentError(f"nothing to run: expected --all or names of {', '.join(known)}")


def check_writable(file: Path) -> None:
    """Before the work, not after it.

    Raises:
        ExperimentError: the file cannot be written.
    """
    if file.is_fifo():  # to open it would wait for its reader
        return
    new = not file.exists()
    try:
        with file.open("a"):
            pass
    except OSError as error:
        raise ExperimentError(f"--json {file}: cannot be written: {error.strerror}") from error
    if new:
        file.unlink()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str, bool], None]]:
    """A bar on stderr where that is a terminal, else lines; told how far an experiment is, and whether it is done."""
    if not sys.stderr.isatty():
        done = [0]

        def tell(text: str, finished: bool) -> None:
            done[0] += finished
            if finished:
                print(f"{what} {done[0]}/{total}: {text}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, finished: bar.update(task, description=text, advance=int(finished))


def outcome_of(experiment: Experiment, setting: Setting) -> tuple[Outcome, list[str]]:
    """An experiment's outcome, and the traces for which there was a stand-in; here or in another process."""
    try:
        return run(experiment, setting), setting.shelf.stand_ins
    except (TraceError, OSError):
        raise
    except Exception as error:  # of a trace or of parameters that nobody thought of
        fault = f"{type(error).__name__}: {error} (--debug shows the traceback)"
        raise ExperimentError(f"experiment {experiment.name}: {fault}") from error


def run_all(
    wanted: Sequence[Experiment], setting: Setting, what: str, jobs: int, far: Executor | None = None
) -> list[Outcome]:
    """Run experiments in threads, which the compiled replays leave the interpreter to, or on `far`; in order.

    Raises:
        ExperimentError: something went wrong inside one.
        TraceError: a trace cannot be read.
    """
    outcomes: dict[str, Outcome] = {}
    threads = ThreadPoolExecutor(jobs)
    with progress(what, len(wanted)) as tell:

        def told(experiment: Experiment) -> Setting:
            return replace(setting, say=lambda text: tell(f"{experiment.name}: {text}", False))

        if far is None:
            futures = [threads.submit(outcome_of, experiment, told(experiment)) for experiment in wanted]
        else:
            futures = [far.submit(outcome_of, experiment, setting) for experiment in wanted]
        try:
            for future in as_completed(futures):
                outcome, stand_ins = future.result()
                setting.shelf.stand_ins += [name for name in stand_ins if name not in setting.shelf.stand_ins]
                outcomes[outcome.experiment.name] = outcome
                tell(f"{outcome.experiment.name} ({outcome.seconds:.1f} s)", True)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # what went wrong is told at once
    return [outcomes[experiment.name] for experiment in wanted]


def command(arguments: argparse.Namespace) -> int:
    if arguments.list:
        if arguments.names or arguments.json is not None:
            raise ExperimentError("--list prints the names of all as text; expected no NAME and no --json with it")
        width = max(len(name) for name in experiments())
        for experiment in experiments().values():
            print(f"{experiment.name:{width}}  {experiment.title}")
        return 0
    wanted = chosen(arguments)
    if arguments.jobs < 1:
        raise ExperimentError(f"--jobs {arguments.jobs}; expected 1 or more")
    if arguments.traces is not None and not arguments.traces.is_dir():
        raise ExperimentError(f"--traces {arguments.traces}: expected a folder")
    if arguments.json == "":
        raise ExperimentError("--json '': expected a file, or - for stdout")
    if arguments.json not in (None, "-"):
        if not Path(arguments.json).resolve().parent.is_dir():
            raise ExperimentError(f"--json {arguments.json}: expected a file in a folder that exists")
        check_writable(Path(arguments.json))
    setting = Setting(quick=arguments.quick, shelf=TraceShelf(arguments.traces))

    with far_executor(arguments.ray, arguments.jobs) as far:

        def runs(these: Sequence[Experiment], under: Setting, what: str) -> list[Outcome]:
            return run_all(these, under, what, arguments.jobs, far)

        outcomes = runs(wanted, setting, "experiments")
        flips: list[Flip] | None = sensitivity(wanted, setting, runs) if arguments.sensitivity else None
    if arguments.json or arguments.traces is not None:
        places = arguments.traces or " or ".join(map(str, FOLDERS))
        for name in setting.shelf.stand_ins:
            print(f"warning: no {name}_trace.jsonl in {places}: a stand-in was used", file=sys.stderr)
    if arguments.write:
        print(page.write(outcomes, setting.parameters, flips, page.DOCS), file=sys.stderr)
    document = report.as_json(outcomes, setting, flips)
    if arguments.json == "-":
        print(document)
    else:
        if arguments.json:
            Path(arguments.json).write_text(document + "\n")
        report.print_tables(outcomes, setting.parameters)
        if flips is not None:
            report.print_flips(flips)
    fails = report.verdicts(outcomes)[False] > 0
    return EXIT_DOES_NOT_HOLD if arguments.check and fails else 0


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: see the help."""
    arguments = parser().parse_args(given)
    try:
        code = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ExperimentError, PolicyError, TraceError, OSError) as error:
        if arguments.debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return code
