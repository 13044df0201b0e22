"""When the tokens of an answer came: TTFT and TBT as docs/physics.md has them, of one request."""

from __future__ import annotations

import math


class TokenTimes:
    """Times of a request's tokens, by the same clock as `arrival_s`."""

    __slots__ = ("_last_s", "arrival_s", "first_s", "intervals")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.first_s = math.nan
        self._last_s = math.nan
        self.intervals: list[float] = []

    def token(self, at_s: float) -> None:
        """One has come."""
        if math.isnan(self.first_s):
            self.first_s = at_s
        else:
            self.intervals.append(at_s - self._last_s)
        self._last_s = at_s

    @property
    def ttft_s(self) -> float:
        """NaN before the first token."""
        return self.first_s - self.arrival_s

    def tbt_s(self, tail_share: float) -> float:
        """Mean of the longest share of the intervals; 0 where there is none."""
        if not self.intervals:
            return 0.0
        longest = max(1, math.ceil(tail_share * len(self.intervals) - 1e-9))
        return sum(sorted(self.intervals)[-longest:]) / longest
