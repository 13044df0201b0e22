"""The traces Mooncake released, by name: `traces.load("mooncake:conversation")`.

A file is taken where one is at hand, plain or compressed: in `data/`, where downloads go, or in `../shared/traces`,
both seen from the current folder and from the checkout. Where there is none a synthesised stand-in takes its place, and
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from traces.formats.rows import OnError
from traces.trace import Trace, TraceError

PREFIX = "mooncake:"
RELEASED = {"conversation": 12_031, "synthetic": 3_993, "toolagent": 23_608}
"""The traces Mooncake released, and how many requests each has."""
FEWEST_REQUESTS = 1000
"""A file of fewer says nothing of percentiles, and is surely not a released one."""

FILES = ("{}_trace.jsonl", "mooncake_{}_trace.jsonl")
SUFFIXES = ("", ".gz", ".zst")
FOLDERS = (Path("data"), Path("../shared/traces"))
"""Where `python -m traces download` puts files unless told otherwise; where a checkout may have traces beside it."""
CHECKOUT = Path(__file__).resolve().parents[1]


class Released(NamedTuple):
    """A trace, and in words where it came from."""

    trace: Trace
    origin: str
    stand_in: bool = False


def folders() -> list[Path]:
    """Where released files are looked for, in order."""
    return [base / folder for base in (Path(), CHECKOUT) for folder in FOLDERS]


def released(
    name: str, places: Sequence[Path] | None = None, *, on_error: OnError = "raise", sort: bool = False, seed: int = 0
) -> Released:
    """A released trace, or its stand-in. Only the released one is named `mooncake:NAME`.

    Args:
        name: `conversation`, `synthetic` or `toolagent`.
        places: folders to look in, in order; by default `folders()`.
        on_error, sort: as `traces.load` has them, for a file.
        seed: of a stand-in.

    Raises:
        TraceError: no such trace, or its file cannot be read.
    """
    if name not in RELEASED:
        raise TraceError(f"no released trace is called {name!r}", expected=", ".join(RELEASED))
    from traces.formats import load

    file = _find(name, folders() if places is None else places)
    if file is None:
        stand_in = f"builtin:{name}"
        origin = f"stand-in {stand_in}, synthesised: the released file is not at hand"
        return Released(replace(load(stand_in, seed=seed), name=stand_in), origin, stand_in=True)
    try:
        trace = load(file, on_error=on_error, sort=sort)
    except TraceError as error:  # without its hint, which is of options that only `python -m traces` has
        raise TraceError(
            error.found, expected=error.expected, file=error.file, line=error.line, field=error.field
        ) from error
    found = trace.n_requests
    if found < FEWEST_REQUESTS:
        raise TraceError(f"has {found} requests", expected=f"the released trace of {RELEASED[name]:,}", file=file)
    if found != RELEASED[name]:
        return Released(trace, f"file {file.name}, {found:,} requests (the released one has {RELEASED[name]:,})")
    return Released(replace(trace, name=f"{PREFIX}{name}"), f"released file {file.name}")


def _find(name: str, places: Sequence[Path]) -> Path | None:
    """The first file of that name.

    Raises:
        TraceError: something is called so that is no file.
    """
    for place in places:
        for pattern in FILES:
            for suffix in SUFFIXES:
                file = place / (pattern.format(name) + suffix)
                if file.is_file():
                    return file
                if file.exists() or file.is_symlink():
                    found = "a folder" if file.is_dir() else "a link to nothing, or a special file"
                    raise TraceError(found, expected="a file", file=file)
    return None
