"""Calibration: each worker's latency profile, fitted from what happened while it runs.

The times that predictions are made of (docs/physics.md: prefill polynomial, iteration time, transfer) come from the
cluster file's hardware profile. Here every measured prefill, decode and transfer moves them towards what the worker
really does, and every request's prediction is held against its outcome.

The fit, per worker and kind: seconds = sum of coefficient times feature. Errors are relative to the larger of
prediction and measurement, so that short and long requests count alike, and twice too long weighs as much as twice too
short.

- Recursive least squares in information form. The profile is the prior: it weighs as much as `PRIOR` measurements.
- Forgetting goes by direction (Cao and Schwartz, 2000): only what a new measurement says something about is forgotten.
  Where all requests are alike, the coefficients they cannot tell apart stay as they are, and nothing winds up.
  The larger the usual error, the faster.
- Huber weights: an error above `HUBER` times the usual one pulls no harder than that. What is usual is a running median
  of the absolute log error, so that a wrong profile is left as surely as single outliers are ignored.
- A worker that is slower or faster altogether (the wrong profile, a throttled GPU) shows by `SHIFT` errors in a row on
  one side: then all coefficients move by the median of them, and the fit goes on from there.
- Coefficients stay within `LEAST` and `MOST` times the profile's; the best point within those bounds is found exactly
  enough by a few sweeps, not by clipping each.

Drift is found by a two-sided CUSUM on log(actual / predicted), with a slack and a threshold in units of the noise
(`Drift`), and wherever all coefficients had to move at once. It takes about ten requests to see a worker become 1.5
times slower at 10 % noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from envs.kernel.latency import longest_chunk
from envs.state import Parameters

log = logging.getLogger(__name__)

FORMAT = 1
PRIOR = 1.0  # measurements that the profile weighs as much as
HUBER = 2.5
LEAST, MOST = 0.01, 100.0
USUAL_ERROR, LEAST_ERROR, MOST_ERROR = 0.3, 0.01, 1.0  # median absolute log error: at first, and its bounds
SHIFT, LEAST_SHIFT = 12, 0.25  # errors on one side, and how far, until all coefficients are moved at once
MOST_WAIT = 0.05  # share of a prefill that is spent behind another in a pipelined group
LEAST_KNOWN = 1e-6  # information below which nothing more is forgotten
LONGEST_S = 86_400.0


class CalibrationError(ValueError):
    """A saved calibration that cannot be read; the message names the field."""


class Mode(StrEnum):
    """FIT: fit, and predict by it. SHADOW: fit, but leave the predictions alone. FROZEN: only look for drift."""

    FIT = "fit"
    SHADOW = "shadow"
    FROZEN = "frozen"


class Kind(StrEnum):
    """What is predicted: seconds of a prefill, a decode iteration and a transfer; a request's TTFT and TBT."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"
    TTFT = "ttft"
    TBT = "tbt"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A change of a drift alarm. `ratio`: actual over predicted, of late."""

    worker: str
    kind: Kind
    raised: bool
    ratio: float
    observations: int


@dataclass(frozen=True, slots=True)
class Report:
    """How good the predictions of one kind for one worker are.

    `ratio`: geometric moving mean of actual over predicted. `absolute_error`: moving mean of |actual / predicted - 1|,
    each at most 10. `slowdown`: fitted over configured time of its typical work (NaN for TTFT and TBT).
    `coefficients`: as fitted.
    """

    worker: str
    kind: Kind
    observations: int
    ratio: float
    absolute_error: float
    alarm: bool
    slowdown: float = math.nan
    coefficients: tuple[float, ...] = ()


class Drift:
    """Whether log(actual / predicted) has left 0. Two CUSUMs, one for each side.

    With s the noise (from differences of successive errors, which a shift of their mean does not touch), each error is
    first clipped to max(0.3, 2 s): then an outlier counts for no more than a shift would. What exceeds the slack
    max(0.1, s / 2) adds up; the alarm is raised at max(1.6, 14 s). At 10 % noise it takes a lasting error above 10 %
    and, at 50 %, eight requests. It is cleared when the moving mean has stayed within max(0.08, s / 4) for 32 requests.
    """

    __slots__ = ("absolute", "alarm", "calm", "down", "last", "mean", "noise", "observations", "up")

    def __init__(self) -> None:
        self.mean = self.absolute = self.up = self.down = 0.0
        self.noise = 0.2  # median of absolute differences
        self.last = math.nan
        self.alarm = False
        self.calm = self.observations = 0

    def update(self, error: float) -> bool:
        """Take log(actual / predicted); True: the alarm has changed."""
        self.observations += 1
        weight = max(0.05, 1.0 / self.observations)
        self.absolute += weight * (min(10.0, abs(math.exp(min(error, 3.0)) - 1.0)) - self.absolute)
        if self.last == self.last:
            apart = abs(error - self.last)
            self.noise = min(1.0, max(0.02, self.noise * (1.01 if apart > self.noise else 1.0 / 1.01)))
        self.last = error
        sigma = self.noise / 0.954
        most = max(0.3, 2.0 * sigma)
        error = min(most, max(-most, error))
        self.mean += weight * (error - self.mean)
        slack, threshold = max(0.1, 0.5 * sigma), max(1.6, 14.0 * sigma)
        self.up = min(2.0 * threshold, max(0.0, self.up + error - slack))
        self.down = min(2.0 * threshold, max(0.0, self.down - error - slack))
        if not self.alarm:
            if self.up < threshold and self.down < threshold:
                return False
            self.alarm = True
            self.calm = 0
            return True
        self.calm = self.calm + 1 if abs(self.mean) < max(0.08, 0.25 * sigma) else 0
        if self.calm < 32:
            return False
        self.alarm = False
        self.up = self.down = 0.0
        return True

    def found(self) -> bool:
        """Drift was found in another way; True: the alarm has changed."""
        changed = not self.alarm
        self.alarm = True
        self.calm = 0
        return changed


class Fit:
    """One recursive fit.

    Args:
        prior: coefficients of the profile. typical: sizes that would matter; a coefficient is thought uncertain by its
            prior or by that, whichever is the larger.
        memory: measurements after which one is all but forgotten.
    """

    __slots__ = (
        *("error", "forget", "information", "least", "most", "multiples"),
        *("observations", "prior", "recent", "scale", "slowdown"),
    )

    def __init__(self, prior: Sequence[float], typical: Sequence[float], memory: float) -> None:
        self.prior = tuple(float(value) for value in prior)
        self.scale = tuple(map(max, self.prior, typical))
        self.multiples = [value / scale for value, scale in zip(self.prior, self.scale, strict=True)]
        self.least = [LEAST * each for each in self.multiples]
        self.most = [MOST * (each or 1.0) for each in self.multiples]
        size = len(self.prior)
        self.information = [[PRIOR if i == j else 0.0 for j in range(size)] for i in range(size)]
        self.forget = 1.0 / memory
        self.error = USUAL_ERROR
        self.recent: list[float] = []  # log errors since the last common shift
        self.observations = 0
        self.slowdown = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(g * scale for g, scale in zip(self.multiples, self.scale, strict=True))

    def predict(self, features: Sequence[float], fixed_s: float = 0.0) -> float:
        """Seconds; `fixed_s` is known and not fitted."""
        total = fixed_s
        for g, scale, x in zip(self.multiples, self.scale, features, strict=True):
            total += g * scale * x
        return total

    def update(self, features: Sequence[float], seconds: float, fixed_s: float = 0.0) -> bool:
        """Move towards a measurement; what cannot be one is passed over. True: all coefficients moved at once."""
        predicted = self.predict(features, fixed_s)
        if not (0.0 < predicted < math.inf and 0.0 < seconds < math.inf):
            return False
        configured = fixed_s + sum(value * x for value, x in zip(self.prior, features, strict=True))
        error = math.log(seconds / predicted)
        self.observations += 1
        larger = max(seconds, predicted)
        f = [scale * x / larger for scale, x in zip(self.scale, features, strict=True)]
        residual = (seconds - predicted) / larger
        limit = HUBER * self.error
        weight = 1.0 if abs(residual) <= limit else limit / abs(residual)
        forget = min(0.1, self.forget * (1.0 + (self.error / 0.15) ** 2))
        self.error *= 1.05 if abs(error) > self.error else 1.0 / 1.05
        self.error = min(MOST_ERROR, max(LEAST_ERROR, self.error))

        self.recent.append(error)
        if len(self.recent) >= SHIFT and self._shifted():
            self._slowed(configured, self.predict(features, fixed_s))
            return True
        a = self.information
        size = len(f)
        af = [sum(a[i][j] * f[j] for j in range(size)) for i in range(size)]
        known = sum(f[i] * af[i] for i in range(size))
        if not 0.0 < known < math.inf:
            return False
        forgotten = forget * weight / known if known > LEAST_KNOWN else 0.0
        for i in range(size):
            for j in range(size):
                a[i][j] += weight * f[i] * f[j] - forgotten * af[i] * af[j]
        step = _solved(a, f)
        target = [g + weight * residual * each for g, each in zip(self.multiples, step, strict=True)]
        self.multiples = self._within_bounds(target)
        self._slowed(configured, self.predict(features, fixed_s))
        return False

    def _slowed(self, configured: float, fitted: float) -> None:
        if configured > 0.0 and fitted > 0.0:
            self.slowdown += max(0.05, 1.0 / self.observations) * (math.log(fitted / configured) - self.slowdown)

    def _shifted(self) -> bool:
        """Where all but one of the last errors lie clearly on one side: move all coefficients by what is common."""
        errors = sorted(self.recent[-SHIFT:])
        self.recent = self.recent[1 - SHIFT :]
        if errors[1] < 0.0 < errors[-2]:
            return False
        middle = _median(errors)
        spread = _median(sorted(abs(each - middle) for each in errors))
        if abs(middle) - spread < LEAST_SHIFT:
            return False
        factor = min(MOST, max(LEAST, math.exp(middle)))
        doubt = 0.2 / factor**2  # what was known of the ratios of the coefficients holds, with a fifth of the weight
        self.information = [
            [each * doubt + (LEAST_KNOWN if i == j else 0.0) for j, each in enumerate(row)]
            for i, row in enumerate(self.information)
        ]
        self.multiples = [
            min(high, max(low, g * factor)) for low, g, high in zip(self.least, self.multiples, self.most, strict=True)
        ]
        self.error = max(LEAST_ERROR, min(MOST_ERROR, spread))
        self.recent = []
        return True

    def _within_bounds(self, target: list[float]) -> list[float]:
        """The point within the bounds that is nearest to the target, as the information measures it."""
        least, most = self.least, self.most
        if all(low <= each <= high for low, each, high in zip(least, target, most, strict=True)):
            return target
        if not all(map(math.isfinite, target)):
            return self.multiples
        a = self.information
        point = [min(high, max(low, each)) for low, each, high in zip(least, target, most, strict=True)]
        size = len(point)
        for _ in range(20):
            for i in range(size):
                pull = sum(a[i][j] * (point[j] - target[j]) for j in range(size) if j != i)
                point[i] = min(most[i], max(least[i], target[i] - pull / a[i][i]))
        return point

    def saved(self) -> dict[str, Any]:
        """What `restore` takes, as JSON has it."""
        return {
            "prior": list(self.prior),
            "multiples": list(self.multiples),
            "information": [list(row) for row in self.information],
            "error": self.error,
            "observations": self.observations,
            "slowdown": self.slowdown,
        }

    def restore(self, saved: dict[str, Any], where: str) -> bool:
        """Go on from what was saved; False: it was fitted from another profile.

        Raises:
            CalibrationError: it is not what `saved` gives.
        """
        size = len(self.prior)
        prior = _numbers(saved.get("prior"), size, f"{where}: prior")
        if any(abs(old - new) > 1e-9 * max(old, new) for old, new in zip(prior, self.prior, strict=True)):
            return False
        multiples = _numbers(saved.get("multiples"), size, f"{where}: multiples")
        rows = saved.get("information")
        if not isinstance(rows, list) or len(rows) != size:
            raise CalibrationError(f"{where}: information: expected {size} rows, found {rows!r}")
        information = [_numbers(row, size, f"{where}: information") for row in rows]
        error, observations, slowdown = _numbers(
            [saved.get("error"), saved.get("observations"), saved.get("slowdown")], 3, f"{where}: error, observations"
        )
        if any(not low <= g <= high for low, g, high in zip(self.least, multiples, self.most, strict=True)):
            raise CalibrationError(f"{where}: multiples: expected {self.least} to {self.most}, found {multiples!r}")
        if not _positive_definite(information):
            raise CalibrationError(f"{where}: information: expected a positive definite matrix")
        self.multiples, self.information = multiples, information
        self.error = min(MOST_ERROR, max(LEAST_ERROR, error))
        self.observations, self.slowdown = max(0, int(observations)), slowdown
        return True


def _median(ascending: list[float]) -> float:
    middle = len(ascending) // 2
    return ascending[middle] if len(ascending) % 2 else 0.5 * (ascending[middle - 1] + ascending[middle])


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x with matrix x = right, for a small positive definite matrix; all 0 where it is too near to singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = rows[i][i]
        if not 1e-12 < pivot < math.inf:
            return [0.0] * size
        for k in range(i + 1, size):
            factor = rows[k][i] / pivot
            if factor:
                for j in range(i, size + 1):
                    rows[k][j] -= factor * rows[i][j]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x


def _positive_definite(matrix: list[list[float]]) -> bool:
    size = len(matrix)
    symmetric = all(
        abs(matrix[i][j] - matrix[j][i]) <= 1e-6 * (1.0 + abs(matrix[i][j])) for i in range(size) for j in range(i)
    )
    return symmetric and any(_solved(matrix, [1.0] * size))


def _numbers(values: Any, count: int, where: str) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise CalibrationError(f"{where}: expected {count} numbers, found {values!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CalibrationError(f"{where}: expected a finite number, found {value!r}")
    return [float(value) for value in values]


class Calibration:
    """Fits the latency profiles of the workers, and writes them into the tables that predictions read.

    The tables' present values are the prior. One thread, the event loop's, calls everything. About 40 us for a measured
    prefill or decode.

    Args:
        parameters: of the cluster; its records are written.
        prefills, decodes: ids of the workers in the order of the tables; prefill-0 .. and decode-0 .. where not given.
        mode: see `Mode`.
        write_every: measurements of a worker between two writes.
        memory: measurements after which one is all but forgotten.
        on_alarm: called when a drift alarm is raised or cleared.
    """

    def __init__(
        self,
        parameters: Parameters,
        prefills: Sequence[str] | None = None,
        decodes: Sequence[str] | None = None,
        *,
        mode: Mode = Mode.FIT,
        write_every: int = 16,
        memory: float = 100.0,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        if write_every < 1:
            raise ValueError(f"write_every: expected at least 1, found {write_every}")
        if not 2.0 <= memory < math.inf:
            raise ValueError(f"memory: expected at least 2 measurements, found {memory}")
        self.mode = mode
        self.write_every = write_every
        self.memory = memory
        self.on_alarm = on_alarm
        self.taken = self.refused = 0
        self._fits: dict[tuple[str, Kind], Fit] = {}
        self._drifts: dict[tuple[str, Kind], Drift] = {}
        self._latency_prior_s = float(parameters.cluster[0]["transfer_latency_s"])
        self.parameters = parameters
        self.prefills: tuple[str, ...] = ()
        self.decodes: tuple[str, ...] = ()
        self._bind(parameters, prefills, decodes)

    @property
    def enabled(self) -> bool:
        """Whether predictions are made by what is fitted."""
        return self.mode is Mode.FIT

    # --- tables

    def _bind(self, parameters: Parameters, prefills: Sequence[str] | None, decodes: Sequence[str] | None) -> None:
        p_count, d_count = len(parameters.prefill), len(parameters.decode)
        self.prefills = tuple(prefills) if prefills is not None else tuple(f"prefill-{i}" for i in range(p_count))
        self.decodes = tuple(decodes) if decodes is not None else tuple(f"decode-{i}" for i in range(d_count))
        for what, names, count in (("prefills", self.prefills, p_count), ("decodes", self.decodes, d_count)):
            if len(names) != count or len(set(names)) != count:
                raise ValueError(f"{what}: expected {count} different ids, found {list(names)}")
        self.parameters = parameters
        if (parameters.prefill["pipeline_nodes"] > 1).any():
            longest_chunk(parameters.prefill[0], 1, 0)  # compiled now, not at the first measurement

    def rebind(
        self,
        parameters: Parameters,
        prefills: Sequence[str] | None = None,
        decodes: Sequence[str] | None = None,
    ) -> None:
        """The cluster has other workers, or new tables, which hold the profiles again. Fits go with their worker's id.

        A worker whose profile is another than before starts anew.
        """
        self._latency_prior_s = float(parameters.cluster[0]["transfer_latency_s"])
        old, drifts = self._fits, self._drifts
        self._bind(parameters, prefills, decodes)
        self._fits, self._drifts = {}, {}
        for key in self._keys():
            if key in old and self._new_fit(*key).prior == old[key].prior:
                self._fits[key] = old[key]
        names = {*self.prefills, *self.decodes}
        self._drifts = {key: drift for key, drift in drifts.items() if key[0] in names}
        self._write_all()

    def _keys(self) -> Iterator[tuple[str, Kind]]:
        for name in self.prefills:
            yield name, Kind.PREFILL
            yield name, Kind.TRANSFER
        for name in self.decodes:
            yield name, Kind.DECODE

    def _new_fit(self, worker: str, kind: Kind) -> Fit:
        """A fit from the present values of the tables."""
        if kind is Kind.DECODE:
            row = self.parameters.decode[self.decodes.index(worker)]
            base, request, token = (float(row[name]) for name in ("step_base_s", "step_request_s", "step_token_s"))
            return Fit((base, request, token), (base, base / 64.0, base / 131072.0), self.memory)
        row = self.parameters.prefill[self.prefills.index(worker)]
        if kind is Kind.PREFILL:
            base, linear, quadratic = (float(row[name]) for name in ("base_s", "linear_s", "quadratic_s"))
            return Fit((base, linear, quadratic), (512.0 * linear, linear, linear / 65536.0), self.memory)
        slowness = 1.0 / float(row["nic_bytes_per_s"])
        return Fit((self._latency_prior_s, slowness), (1e-3, 1e-11), self.memory)

    def _fit(self, worker: str, kind: Kind) -> Fit:
        fit = self._fits.get((worker, kind))
        if fit is None:
            fit = self._fits[worker, kind] = self._new_fit(worker, kind)
        return fit

    def _write(self, worker: str, kind: Kind, fit: Fit) -> None:
        if self.mode is not Mode.FIT:
            return
        values = fit.coefficients
        if not all(0.0 <= value < math.inf for value in values):
            return  # cannot be; but nothing else may ever get into the tables
        if kind is Kind.DECODE:
            row = self.parameters.decode[self.decodes.index(worker)]
            row["step_base_s"], row["step_request_s"], row["step_token_s"] = values
        elif kind is Kind.PREFILL:
            row = self.parameters.prefill[self.prefills.index(worker)]
            row["base_s"], row["linear_s"], row["quadratic_s"] = values
        else:
            self.parameters.prefill[self.prefills.index(worker)]["nic_bytes_per_s"] = 1.0 / values[1]
            latencies = sorted(
                each.coefficients[0]
                for (_, of), each in self._fits.items()
                if of is Kind.TRANSFER and each.observations >= self.write_every
            )
            if latencies:
                self.parameters.cluster[0]["transfer_latency_s"] = latencies[len(latencies) // 2]

    def _write_all(self) -> None:
        for (worker, kind), fit in self._fits.items():
            if fit.observations:
                self._write(worker, kind, fit)

    # --- what happened

    def prefill_observed(
        self,
        p: int,
        input_tokens: int,
        reused_tokens: int,
        seconds: float,
        *,
        load_s: float = 0.0,
        drain_s: float = 0.0,
    ) -> None:
        """A prefill took `seconds`, waiting excluded, to the end of the last stage where p is a pipelined group.

        Args:
            load_s: predicted seconds for the reused prefix to come from host memory. Compute and load overlap; where
                the load is the longer one the measurement says nothing about compute, and is refused.
            drain_s: predicted seconds in the later stages of a group. Where much of that is spent behind the request
                before it, the measurement says more of that one, and is refused.
        """
        if not (0 <= reused_tokens < input_tokens < 1 << 40 and self._possible(seconds) and 0.0 <= load_s < LONGEST_S):
            self.refused += 1
            return
        row = self.parameters.prefill[p]
        nodes = int(row["pipeline_nodes"])
        new = float(input_tokens - reused_tokens)
        squares = float(input_tokens) ** 2 - float(reused_tokens) ** 2
        features = (1.0 / nodes, new / nodes, squares / nodes)
        fixed_s = 0.0
        overhead_s = float(row["chunk_overhead_s"])
        if overhead_s > 0.0:
            fixed_s = overhead_s * (math.ceil(new / int(row["chunk_tokens"])) - 1) / nodes
        if load_s > 0.0:
            if load_s >= seconds or load_s >= self._fit(self.prefills[p], Kind.PREFILL).predict(features, fixed_s):
                self.refused += 1
                return
            fixed_s += load_s * nodes / float(self.parameters.cluster[0]["layers"])
        if nodes > 1:
            later = (nodes - 1) / nodes
            start, stop, longest_s = longest_chunk(row, input_tokens, reused_tokens)
            if drain_s - later * longest_s > MOST_WAIT * seconds:
                self.refused += 1
                return
            first, tokens, squares = start == reused_tokens, stop - start, float(stop) ** 2 - float(start) ** 2
            features = (features[0] + later * first, features[1] + later * tokens, features[2] + later * squares)
            fixed_s += 0.0 if first else later * overhead_s
        self._observed(self.prefills[p], Kind.PREFILL, features, seconds, fixed_s)

    def decode_observed(self, d: int, batch: float, kv_tokens: float, tbt_s: float, *, stall_s: float = 0.0) -> None:
        """An iteration of a decode batch took `tbt_s` in the mean.

        Args:
            batch, kv_tokens: requests and their context tokens, in the mean. stall_s: of `tbt_s`, what was waited for
                others to join.
        """
        possible = 0.0 < batch < 1e9 and 0.0 <= kv_tokens < 1e15 and self._possible(tbt_s) and 0.0 <= stall_s < tbt_s
        if not possible:
            self.refused += 1
            return
        self._observed(self.decodes[d], Kind.DECODE, (1.0, float(batch), float(kv_tokens)), tbt_s, stall_s)

    def transfer_observed(self, p: int, transferred_bytes: float, seconds: float, *, flows: float = 1.0) -> None:
        """A transfer that instance p sent took `seconds`, from its start to its arrival.

        Only transfers that ran at full speed say anything: fetches, not streams that wait for the prefill.

        Args:
            flows: transfers that shared the NIC in the mean, this one included.
        """
        if not (0.0 < transferred_bytes < 1e18 and self._possible(seconds) and 1.0 <= flows < 1e6):
            self.refused += 1
            return
        self._observed(self.prefills[p], Kind.TRANSFER, (1.0, float(transferred_bytes) * flows), seconds, 0.0)

    def joined(
        self,
        p: int,
        d: int,
        *,
        predicted_ttft_s: float = math.nan,
        ttft_s: float = math.nan,
        predicted_tbt_s: float = math.nan,
        tbt_s: float = math.nan,
    ) -> None:
        """What was predicted for a request at its decision, and what became of it; NaN: not known."""
        for worker, kind, predicted, actual in (
            (self.prefills[p], Kind.TTFT, predicted_ttft_s, ttft_s),
            (self.decodes[d], Kind.TBT, predicted_tbt_s, tbt_s),
        ):
            if self._possible(predicted) and self._possible(actual):
                self._drifted(worker, kind, math.log(actual / predicted))

    @staticmethod
    def _possible(seconds: float) -> bool:
        return 1e-9 < seconds < LONGEST_S

    def _observed(self, worker: str, kind: Kind, features: tuple[float, ...], seconds: float, fixed_s: float) -> None:
        fit = self._fit(worker, kind)
        predicted = fit.predict(features, fixed_s)
        if predicted <= 0.0:
            self.refused += 1
            return
        self.taken += 1
        self._drifted(worker, kind, math.log(seconds / predicted))
        if self.mode is Mode.FROZEN:
            return
        if fit.update(features, seconds, fixed_s):
            self._write(worker, kind, fit)
            drift = self._drifts[worker, kind]
            if drift.found():
                self._changed(worker, kind, drift)
        elif fit.observations % self.write_every == 0:
            self._write(worker, kind, fit)

    def _drifted(self, worker: str, kind: Kind, error: float) -> None:
        drift = self._drifts.get((worker, kind))
        if drift is None:
            drift = self._drifts[worker, kind] = Drift()
        if drift.update(error):
            self._changed(worker, kind, drift)

    def _changed(self, worker: str, kind: Kind, drift: Drift) -> None:
        alarm = Alarm(worker, kind, drift.alarm, math.exp(drift.mean), drift.observations)
        if alarm.raised:
            log.warning("%s of %s drifts: actual is %.2f times what is predicted", kind, worker, alarm.ratio)
        else:
            log.info("%s of %s is as predicted again", kind, worker)
        if self.on_alarm is not None:
            try:
                self.on_alarm(alarm)
            except Exception:
                log.exception("on_alarm")

    # --- what is known

    def reports(self) -> list[Report]:
        """How good the predictions are, for each worker and kind that anything was heard of."""
        rows = []
        for (worker, kind), drift in self._drifts.items():
            fit = self._fits.get((worker, kind))
            rows.append(
                Report(
                    worker,
                    kind,
                    drift.observations,
                    math.exp(drift.mean),
                    drift.absolute,
                    drift.alarm,
                    math.nan if fit is None else math.exp(fit.slowdown),
                    () if fit is None else fit.coefficients,
                )
            )
        return rows

    @property
    def alarms(self) -> frozenset[tuple[str, Kind]]:
        """(worker, kind) of the alarms that are on."""
        return frozenset(key for key, drift in self._drifts.items() if drift.alarm)

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Values for the metrics of `runtime.metrics.METRICS`, by metric and labels."""
        reports = self.reports()
        return {
            "conductor_prediction_drift_ratio": {(row.worker, str(row.kind)): row.ratio for row in reports},
            "conductor_prediction_absolute_error_ratio": {
                (row.worker, str(row.kind)): row.absolute_error for row in reports
            },
            "conductor_drift_alarm": {(row.worker, str(row.kind)): float(row.alarm) for row in reports},
            "conductor_calibration_slowdown_ratio": {
                (row.worker, str(row.kind)): row.slowdown for row in reports if row.slowdown == row.slowdown
            },
            "conductor_calibration_observations_total": {
                ("taken",): float(self.taken),
                ("refused",): float(self.refused),
            },
        }

    def state(self) -> dict[str, Any]:
        """All fits, as JSON has it, for `restore`. Drift is not kept: an alarm needs evidence of its own."""
        fits: dict[str, dict[str, Any]] = {}
        for (worker, kind), fit in self._fits.items():
            if fit.observations:
                fits.setdefault(worker, {})[str(kind)] = fit.saved()
        return {"format": FORMAT, "fits": fits}

    def restore(self, state: Any) -> int:
        """Go on from what `state` gave; returns how many fits were taken over.

        Fits of workers that are not here, or whose profile is another now, are left out.

        Raises:
            CalibrationError: it is not what `state` gives; then nothing has changed.
        """
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, dict) else state
            raise CalibrationError(f"calibration: expected format {FORMAT}, found {found!r}")
        saved = state.get("fits")
        if not isinstance(saved, dict):
            raise CalibrationError(f"calibration: fits: expected a mapping, found {saved!r}")
        restored = {}
        for worker, kind in self._keys():
            row = saved.get(worker)
            if row is None:
                continue
            if not isinstance(row, dict):
                raise CalibrationError(f"calibration: fits.{worker}: expected a mapping, found {row!r}")
            fields = row.get(str(kind))
            if fields is None:
                continue
            where = f"calibration: fits.{worker}.{kind}"
            if not isinstance(fields, dict):
                raise CalibrationError(f"{where}: expected a mapping, found {fields!r}")
            present = self._fits.get((worker, kind))
            fit = Fit(present.prior, present.scale, self.memory) if present else self._new_fit(worker, kind)
            if fit.restore(fields, where):
                restored[worker, kind] = fit
            else:
                log.warning("%s: fitted from another hardware profile; left out", where)
        self._fits.update(restored)
        self._write_all()
        return len(restored)
