"""`python -m experiments`: the papers' tables and figures, ours beside theirs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from traces import TraceError
from traces.command import EXIT_BAD_INPUT, EXIT_INTERRUPTED

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
  python -m experiments --all --quick
      all, with shorter inputs where an experiment takes long: within a minute
  python -m experiments --all --json - | jq '.rows[] | select(.holds == false)'
      what does not hold
  python -m experiments --all --write --sensitivity
      docs/reproduction.md and its pictures, with the verdicts that change when a parameter is halved or doubled

Without the released files, synthesised stand-ins take their place; the output says so. In the JSON, tolerance is a
number where ours may differ from the paper's by so much, else text like ">= 0.95".
Exit code: 0 when everything ran, whatever the verdicts; 1 with --check when a row does not hold; 2 for bad input.
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
    add("--quick", action="store_true", help="shorter inputs where an experiment takes long; with no NAME, all")
    add("--list", action="store_true", help="list the experiments and end")
    add("--json", metavar="FILE|-", help="write the rows as JSON; -: to stdout, and nothing else there")
    add("--write", action="store_true", help="with --all: write docs/reproduction.md and its pictures")
    add(
        "--sensitivity",
        action="store_true",
        help="then again, on quick inputs, with each unpublished parameter halved and doubled: twenty minutes",
    )
    add(
        "--traces", metavar="DIR", type=Path, help="folder with the released traces (default: data, where downloads go)"
    )
    add(
        "--jobs", metavar="N", type=int, default=min(8, os.cpu_count() or 1), help="experiments at a time (%(default)s)"
    )
    add("--check", action="store_true", help="exit with 1 when a row does not hold")
    return made


def chosen(arguments: argparse.Namespace) -> list[Experiment]:
    """The experiments asked for, in the papers' order.

    Raises:
        ExperimentError: none, or an unknown one.
    """
    known = experiments()
    for name in arguments.names:
        if name not in known:
            raise ExperimentError(f"no experiment is called {name!r}; there are {', '.join(known)}")
    if arguments.names and arguments.all:
        raise ExperimentError("both names and --all; expected one of them")
    if arguments.write and (not arguments.all or arguments.quick):
        raise ExperimentError("--write describes all experiments on whole inputs; expected --all, and no --quick")
    if arguments.names:
        return [experiment for name, experiment in known.items() if name in arguments.names]
    if arguments.all or arguments.quick:
        return list(known.values())
    raise ExperimentError(f"nothing to run: expected --all or names of {', '.join(known)}")


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


def run_all(wanted: Sequence[Experiment], setting: Setting, what: str, jobs: int) -> list[Outcome]:
    """Run experiments in threads, which the compiled replays leave the interpreter to; in order."""
    outcomes: dict[str, Outcome] = {}
    threads = ThreadPoolExecutor(jobs)
    with progress(what, len(wanted)) as tell:

        def go(experiment: Experiment) -> Outcome:
            return run(experiment, replace(setting, say=lambda text: tell(f"{experiment.name}: {text}", False)))

        futures = [threads.submit(go, experiment) for experiment in wanted]
        try:
            for future in as_completed(futures):
                outcome = future.result()
                outcomes[outcome.experiment.name] = outcome
                tell(f"{outcome.experiment.name} ({outcome.seconds:.1f} s)", True)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # what went wrong is told at once
    return [outcomes[experiment.name] for experiment in wanted]


def command(arguments: argparse.Namespace) -> int:
    if arguments.list:
        width = max(len(name) for name in experiments())
        for experiment in experiments().values():
            print(f"{experiment.name:{width}}  {experiment.title}")
        return 0
    wanted = chosen(arguments)
    if arguments.jobs < 1:
        raise ExperimentError(f"--jobs {arguments.jobs}; expected 1 or more")
    if arguments.traces is not None and not arguments.traces.is_dir():
        raise ExperimentError(f"--traces {arguments.traces}: expected a folder")
    if arguments.json not in (None, "-") and not Path(arguments.json).resolve().parent.is_dir():
        raise ExperimentError(f"--json {arguments.json}: expected a file in a folder that exists")
    setting = Setting(quick=arguments.quick, shelf=TraceShelf(arguments.traces))

    def runs(these: Sequence[Experiment], under: Setting, what: str) -> list[Outcome]:
        return run_all(these, under, what, arguments.jobs)

    outcomes = runs(wanted, setting, "experiments")
    flips: list[Flip] | None = sensitivity(wanted, setting, runs) if arguments.sensitivity else None
    if arguments.write:
        print(page.write(outcomes, setting.parameters, flips, page.DOCS), file=sys.stderr)
    rows = report.as_json(outcomes, setting.parameters)
    if arguments.json == "-":
        print(rows)
    else:
        if arguments.json:
            Path(arguments.json).write_text(rows + "\n")
        report.print_tables(outcomes, setting.parameters)
        if flips is not None:
            report.print_flips(flips)
    fails = report.verdicts(outcomes)[False] > 0
    return EXIT_DOES_NOT_HOLD if arguments.check and fails else 0


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: see the help; 130 when interrupted."""
    try:
        return command(parser().parse_args(given))
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ExperimentError, TraceError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)  # replays in threads cannot be stopped


if __name__ == "__main__":
    sys.exit(main())
