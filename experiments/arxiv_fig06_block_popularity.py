"""arXiv Fig 6: how often blocks are used.

The paper counts how often each block of its trace is used: more than half of the blocks once, a few thousands of times.
The trace it released, which is the tool&agent trace but for a few tokens, is not the one in the figure: 78.5 % of its
blocks are used once, by a measurement a reader of the repository published. Verdicts go by that one, the figure is
context.
"""

from __future__ import annotations

import numpy as np

from .experiment import Panel, Result, Row, Series, Setting, Within, paper

NEAR = Within(0.02)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 9, 20)


def run(setting: Setting) -> Result:
    numbers = paper("arxiv_fig06")
    trace = setting.trace("toolagent")
    uses = np.bincount(trace.block_ids)
    shares = [float(np.mean(uses <= count)) for count in COUNTS]
    theirs = [numbers[str(count)] for count in COUNTS]
    measured = numbers["measured"]
    most_used = np.sort(uses)[::-1]
    rows = [Row("released trace, blocks used once", shares[0], measured["used_once"], NEAR)]
    rows += [
        Row(f"released trace, references to the {n} most used", float(most_used[:n].sum() / uses.sum()), share, NEAR)
        for n, share in measured["references_to_most_used"].items()
    ]
    rows += [
        Row(f"blocks used at most {count} times", ours, share) for count, ours, share in zip(COUNTS, shares, theirs)
    ]
    rows.append(Row("uses of the most used block", int(uses.max()), numbers["max"]))
    panel = Panel(
        "toolagent",
        "uses at most",
        "share of blocks",
        [Series("ours", COUNTS, shares), Series("ours", COUNTS, theirs, of_paper=True)],
        log_x=True,
    )
    return Result(rows, [panel])
