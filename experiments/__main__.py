"""`python -m experiments`: the papers' tables and figures, ours beside theirs."""

from __future__ import annotations

import os
import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """Exit code: see the help."""
    try:
        from .command import main as command  # takes a second, in which Ctrl-C should be quiet, too

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)  # replays in threads cannot be stopped


if __name__ == "__main__":
    sys.exit(main())
