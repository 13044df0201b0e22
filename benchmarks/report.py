"""What the benchmarks share: repeated timing, and a result as text or JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", help="write the result there as JSON; - for standard output, alone")
    made.add_argument("--runs", type=int, default=7, help="timed runs; the median counts (default: %(default)s)")
    return made


def seconds(run: Callable[[], Any], *, before: Callable[[], Any] = lambda: None, runs: int) -> list[float]:
    """Wall seconds of `runs` calls of `run`, each after an untimed `before`; one call more comes first, uncounted."""
    taken = []
    for i in range(runs + 1):
        before()
        start = time.perf_counter()
        run()
        if i:
            taken.append(time.perf_counter() - start)
    return taken


def median(numbers: list[float]) -> float:
    return statistics.median(numbers)


def report(result: dict[str, Any], where: str | None) -> None:
    """Print the result, or write it as JSON."""
    text = json.dumps(result, indent=2)
    if where == "-":
        print(text)
    elif where is not None:
        Path(where).write_text(text + "\n")
        print(f"written to {where}", file=sys.stderr)
    else:
        for name, value in result.items():
            print(f"{name:28s} {value}")


def entry(main: Callable[[], None]) -> None:
    """Run a benchmark as a command: bad input is one line and exit code 2, Ctrl-C is 130."""
    try:
        main()
    except ValueError as error:  # of traces, clusters and policies alike
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
