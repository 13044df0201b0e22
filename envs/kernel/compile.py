"""`compiled`: Numba with a disk cache that cannot serve stale code.

Numba's own cache looks only at the file that defines a function, so an edited helper in another module would go
unnoticed. Here the cache directory is named by a hash of every source file that can end up in a kernel.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from platformdirs import user_cache_path

_ROOT = Path(__file__).resolve().parents[2]
# What can end up in a kernel, by the package that defines it: policies are compiled against the contract of envs.
_CONTRACT = (
    "envs/state.py",
    "envs/observe.py",
    "envs/kernel/compile.py",
    "envs/kernel/memory.py",
    "envs/kernel/splitmix.py",
)
_SOURCES = {
    "envs": (*_CONTRACT, "envs/kernel/*.py"),
    "policies": (
        *_CONTRACT,
        "policies/routers.py",
        "policies/peers.py",
        "policies/early_rejection.py",
        "policies/compiled_scorer.py",
    ),
    "runtime": (*_CONTRACT, "envs/kernel/*.py", "runtime/kernel/*.py"),
}

F = TypeVar("F", bound=Callable[..., Any])


@cache
def cache_directory(package: str) -> Path:
    """Where the machine code of the package's present sources lives; made if need be.

    Raises:
        OSError: no writable directory was found.
    """
    digest = hashlib.sha256()
    checked = os.environ.get("CONDUCTOR_CHECK_BOUNDS", "0")
    for part in (numba.__version__, np.__version__, platform.python_version(), str(_ROOT), checked):
        digest.update(part.encode())
    for pattern in _SOURCES[package]:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    name = f"{package}-{digest.hexdigest()[:16]}"
    configured = os.environ.get("NUMBA_CACHE_DIR")
    first = Path(configured) if configured else user_cache_path("conductor-gym")
    for parent in (first, Path(tempfile.gettempdir()) / f"conductor-gym-{os.getuid()}"):
        directory = parent / name
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK):
            return directory
    raise OSError(f"no writable directory for compiled kernels under {first}: set NUMBA_CACHE_DIR to one")


@cache
def announce() -> None:
    """Say once, on standard error, that kernels will be compiled, when none of this version are in the cache."""
    directory = cache_directory("envs")
    if not any(directory.rglob("*.nbi")):
        print(
            f"compiling the simulator, which takes about a minute; kept in {directory} for the next time",
            file=sys.stderr,
        )


def compiled(function: F) -> F:
    """Compile `function` (nopython, without the GIL), cached in `cache_directory()` of its package."""
    config: Any = numba.config
    package = function.__module__.partition(".")[0]
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_directory(package))  # read once, when the dispatcher is made
    try:
        dispatcher: Any = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before
    _specialise_once(dispatcher)
    return dispatcher  # type: ignore[no-any-return]


def entry_point(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """The machine code of a compiled function for arguments of these types.

    Calling it skips looking the types up, which takes longer than a short kernel runs. The arguments of every call must
    be of the same types: nobody checks.
    """
    dispatcher: Any = function
    kinds = tuple(numba.typeof(argument) for argument in arguments)
    dispatcher.compile(kinds)
    return dispatcher.overloads[kinds].entry_point  # type: ignore[no-any-return]


def _specialise_once(dispatcher: Any) -> None:
    """Have calls from other kernels use 64-bit integers, whatever they pass.

    Numba would compile a function anew for every mix of int32, int64 and literal constants among its arguments, which
    more than doubles the time of the first compilation.
    """
    original = dispatcher.get_call_template

    def get_call_template(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return original(tuple(map(_widened, args)), {name: _widened(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = get_call_template


def _widened(kind: Any) -> Any:
    plain: Any = types.unliteral(kind)
    return types.int64 if getattr(plain, "signed", False) else plain
