"""What the command lines of the packages share: how a command ends when something is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130


def plain_errors(*faults: type[Exception]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands: one of the `faults` is one line on stderr and exit code 2; Ctrl-C is quiet."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                command(*args, **kwargs)
            except faults as error:
                print(f"error: {error}", file=sys.stderr)
                raise typer.Exit(EXIT_BAD_INPUT) from None
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                raise typer.Exit(EXIT_INTERRUPTED) from None
            except BrokenPipeError:
                # The reader of our output went away; keep the interpreter from complaining at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(1) from None

        return wrapped

    return decorate
