"""`python -m experiments`: the papers' tables and figures, ours beside theirs; and live workers beside the gym."""

from __future__ import annotations

import os
import sys

EXIT_INTERRUPTED = 130


def main() -> int:
    """Exit code: see the help."""
    try:
        # Imports take a second, in which Ctrl-C should be quiet, too.
        if len(sys.argv) > 1 and sys.argv[1] in ("sim_to_live", "live_rejection"):
            from .live_command import main as live_command

            return live_command(sys.argv[1:])
        from .command import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)  # replays in threads cannot be stopped


if __name__ == "__main__":
    sys.exit(main())
