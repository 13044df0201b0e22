"""How far a training is, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A bar on a terminal, else a line about every ten seconds: `with Progress(...) as progress`."""

    def __init__(self, steps: int, done: int) -> None:
        self.console = Console(stderr=True)
        self.steps = steps
        self.printed_s = time.monotonic()
        self.bar = Bar(
            TextColumn("{task.completed:>9,.0f}/{task.total:,.0f}"),
            BarColumn(20),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, steps: int, text: str) -> None:
        self.bar.update(self.task, completed=steps, description=text)
        now_s = time.monotonic()
        if not self.console.is_terminal and (now_s - self.printed_s > 10 or steps >= self.steps):
            self.printed_s = now_s
            print(f"{steps:>9,}/{self.steps:,}  {text}", file=sys.stderr, flush=True)
