"""How far a training is, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A bar on a terminal, else a line about every ten seconds: `with Progress(total, done) as show`."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.console = Console(stderr=True)
        self.total = total
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
        self.task = self.bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Callable[[int, str], None]:
        self.bar.start()
        return self.show

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, done: int, text: str) -> None:
        """`done` of the total, and what there is to say."""
        self.bar.update(self.task, completed=done, description=text)
        now_s = time.monotonic()
        if not self.console.is_terminal and (now_s - self.printed_s > 10 or done >= self.total):
            self.printed_s = now_s
            print(f"{done:>9,}/{self.total:,}  {text}", file=sys.stderr, flush=True)
