"""When requests come, apart from what they ask: arrival processes, and sets of lengths to send at a rate of one's own.

    >>> traces.at_rate(traces.lengths("arxiv-summarization", 2000), rate=2.5, seed=1)
    >>> traces.at_rate(traces.lengths("arxiv_summarization_stats.csv"), rate=2.5)    # Vidur's table of lengths
    >>> traces.at_rate(traces.load("conversation_trace.jsonl"), rate=4, cv=2)        # its requests at other times
    >>> traces.load("builtin:simulated-16k@0.5")

A set of lengths is a `Trace` whose requests all come at time 0; `at_rate` moves those of any trace to new times, in
their order, so reuse stays.

The built-in sets stand for the workloads of Mooncake's Figures 11 and 12 (arXiv 2407.00079), of which only means and
cache ratios are published, or make one thing hard: `hotspot` and `bursty`. `LENGTH_SETS` says what each assumes.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.trace import DEFAULT_BLOCK_TOKENS, Trace, TraceError, densify, joined_ranges, offsets_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Literal["gamma", "weibull"]

DEFAULT_REQUESTS = 1000
MAX_INPUT_TOKENS = 131_072


# -- processes --------------------------------------------------------------------------------


class Renewal(NamedTuple):
    """A renewal process by its gaps: gamma or Weibull of a shape; 1 is Poisson in both."""

    kind: Kind = "gamma"
    shape: float = 1.0

    def gaps(self, n: int, rng: np.random.Generator) -> Floats:
        """float64[n], of mean 1."""
        if self.kind == "gamma":
            return rng.gamma(self.shape, 1 / self.shape, n)
        return rng.weibull(self.shape, n) / math.gamma(1 + 1 / self.shape)

    def first(self, rng: np.random.Generator) -> float:
        """From a time that has nothing to do with the process to its next arrival, in mean gaps.

        A time falls into a gap in proportion to its length, and anywhere in it.
        """
        if self.kind == "gamma":
            around = rng.gamma(self.shape + 1) / self.shape
        else:
            around = rng.gamma(1 + 1 / self.shape) ** (1 / self.shape) / math.gamma(1 + 1 / self.shape)
        return float(rng.random() * around)

    def window(self, rate: float, duration_s: float, rng: np.random.Generator) -> Floats:
        """Arrivals of the stationary process in [0, duration_s): rate * duration_s of them on average, exactly."""
        expected = rate * duration_s
        parts = [np.array([self.first(rng)])]
        while parts[-1][-1] < expected:
            left = expected - parts[-1][-1]
            parts.append(parts[-1][-1] + np.cumsum(self.gaps(int(left + 4 * math.sqrt(left)) + 16, rng)))
        times = np.concatenate(parts) / rate
        return times[times < duration_s]


def poisson(n: int, rate: float, seed: int = 0) -> Floats:
    """Times of n arrivals of a Poisson process: float64[n], seconds from 0."""
    return gamma(n, rate, 1.0, seed)


def gamma(n: int, rate: float, cv: float, seed: int = 0) -> Floats:
    """Times of n arrivals with gamma gaps of a coefficient of variation: float64[n], seconds from 0.

    Raises:
        TraceError: a rate or cv that is not above 0.
    """
    for label, value in (("rate", rate), ("cv", cv)):
        if not (math.isfinite(value) and value > 0):
            raise TraceError(f"{label} {value}", expected="a finite number > 0")
    times: Floats = np.cumsum(Renewal("gamma", 1 / cv**2).gaps(n, np.random.default_rng([seed, 1]))) / rate
    return times


def at_rate(lengths: Trace, rate: float, seed: int = 0, *, cv: float = 1.0) -> Trace:
    """The requests of a trace, in order, at new times: Poisson arrivals of `rate`, or gamma gaps of `cv`.

    Raises:
        TraceError: a rate or cv that is not above 0.
    """
    return replace(lengths, arrival_s=gamma(lengths.n_requests, rate, cv, seed))


# -- sets of lengths --------------------------------------------------------------------------


@dataclass(frozen=True)
class LengthSet:
    """A built-in set: what it stands for and assumes, the rate it is sent at unless told, and how it is drawn.

    Unless told, it has `requests` requests, and gaps with a coefficient of variation of `cv`.
    """

    meaning: str
    rate: float
    draw: Callable[[int, np.random.Generator], _Requests]
    requests: int = DEFAULT_REQUESTS
    cv: float = 1.0


class _Requests(NamedTuple):
    input_tokens: Ints
    output_tokens: Ints
    document: Ints
    """Whose first blocks a request shares: a number."""
    shared_blocks: Ints
    """How many."""


def _lognormal(n: int, mean: float, sigma: float, rng: np.random.Generator) -> Ints:
    # Even levels, shuffled: a short set has the mean it should.
    levels = (rng.permutation(n) + rng.uniform(1e-9, 1, n)) / n
    normal = np.array([NormalDist().inv_cdf(level) for level in levels.tolist()])
    drawn = np.exp(math.log(mean) - sigma**2 / 2 + sigma * normal)
    return np.clip(np.rint(drawn), 1, MAX_INPUT_TOKENS).astype(np.int64)


def _arxiv(n: int, rng: np.random.Generator) -> _Requests:
    none = np.zeros(n, np.int64)
    return _Requests(_lognormal(n, 8088, 0.75, rng), _lognormal(n, 229, 0.795, rng), none, none)


L_EVAL_QUESTIONS, L_EVAL_QUESTION_TOKENS, L_EVAL_SPREAD = 7, 100, 4


def _l_eval(n: int, rng: np.random.Generator) -> _Requests:
    lengths, document = _asked_about(n, L_EVAL_QUESTIONS, L_EVAL_SPREAD, 19_019 - L_EVAL_QUESTION_TOKENS, rng)
    question = rng.poisson(L_EVAL_QUESTION_TOKENS - 1, n) + 1
    return _about_documents(lengths, document, question, _lognormal(n, 72, 1.0, rng))


def _asked_about(n: int, times: int, spread: int, mean: float, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Lengths of documents of a mean, and n of them, each so many times within about `times * spread` requests."""
    documents = -(-n // times)
    lengths = _lognormal(documents, mean, 0.7, rng)
    document = np.repeat(np.arange(documents), times)
    when = document + spread * rng.random(len(document))
    return lengths, document[np.argsort(when, kind="stable")][:n]


def _about_documents(lengths: Ints, document: Ints, question: Ints, output: Ints) -> _Requests:
    """Requests that have a document before them, and a question of their own."""
    # A block that holds the document's end and the question is nobody else's.
    shared = lengths[document] // DEFAULT_BLOCK_TOKENS
    tokens = np.minimum(lengths[document] + question, MAX_INPUT_TOKENS)
    return _Requests(tokens, output, document, shared)


HOT_DOCUMENTS, HOT_EXPONENT, HOT_FOR = 200, 1.5, 1000


def _hotspot(n: int, rng: np.random.Generator) -> _Requests:
    shares = np.arange(1, HOT_DOCUMENTS + 1) ** -HOT_EXPONENT
    rank = rng.choice(HOT_DOCUMENTS, size=n, p=shares / shares.sum())
    period = np.arange(n) // HOT_FOR
    ranking = np.stack([rng.permutation(HOT_DOCUMENTS) for _ in range(int(period[-1]) + 1)])
    lengths = _lognormal(HOT_DOCUMENTS, 12_000, 0.7, rng)
    return _about_documents(lengths, ranking[period, rank], _lognormal(n, 4000, 1.0, rng), _lognormal(n, 300, 0.8, rng))


BURSTY_QUESTIONS, BURSTY_SPREAD, BURSTY_CV = 3, 100, 5.0


def _bursty(n: int, rng: np.random.Generator) -> _Requests:
    lengths, document = _asked_about(n, BURSTY_QUESTIONS, BURSTY_SPREAD, 8000, rng)
    return _about_documents(lengths, document, _lognormal(n, 3000, 1.0, rng), _lognormal(n, 300, 0.8, rng))


SIMULATED_PREFIXES = 8


def _simulated(tokens: int) -> Callable[[int, np.random.Generator], _Requests]:
    def draw(n: int, rng: np.random.Generator) -> _Requests:
        same = np.ones(n, np.int64)
        prefix = rng.integers(SIMULATED_PREFIXES, size=n)
        return _Requests(tokens * same, 512 * same, prefix, tokens // 2 // DEFAULT_BLOCK_TOKENS * same)

    return draw


_SIMULATED = (
    f"prompts of {{}} tokens, 512 out, the first half of each one of {SIMULATED_PREFIXES} texts drawn evenly, so that "
    "half of all blocks are hits but for each text's first use (Mooncake Figure 12: cache ratio 50 %)"
)

LENGTH_SETS: dict[str, LengthSet] = {
    "arxiv-summarization": LengthSet(
        "8,088 in and 229 out on average, nothing shared (Mooncake Figure 11); lognormal, sigma 0.75 in, where the "
        "part below 4,000 tokens has the median of Vidur's table (2,730), and 0.795 out, whose median is that table's",
        1.0,
        _arxiv,
    ),
    "l-eval": LengthSet(
        f"19,019 in and 72 out on average (Mooncake Figure 11: cache ratio above 80 %); documents lognormal (sigma "
        f"0.7, assumed), each asked about {L_EVAL_QUESTIONS} times, which gives that ratio, within about "
        f"{L_EVAL_SPREAD * L_EVAL_QUESTIONS} requests; outputs lognormal (sigma 1, assumed)",
        0.5,
        _l_eval,
    ),
    "simulated-16k": LengthSet(_SIMULATED.format("16,384"), 0.5, _simulated(16_384)),
    "simulated-32k": LengthSet(_SIMULATED.format("32,768"), 0.2, _simulated(32_768)),
    "simulated-64k": LengthSet(_SIMULATED.format("65,536"), 0.1, _simulated(65_536)),
    "simulated-128k": LengthSet(_SIMULATED.format("131,072"), 0.05, _simulated(131_072)),
    "hotspot": LengthSet(
        f"a few prefixes take most requests: {HOT_DOCUMENTS} documents (12,000 tokens on average) asked about with "
        f"shares by Zipf of exponent {HOT_EXPONENT} (the four hottest: two thirds), dealt anew every {HOT_FOR:,} "
        "requests, 4,000 tokens of one's own and 300 out on average; all invented, lognormal",
        4.0,
        _hotspot,
        requests=10_000,
    ),
    "bursty": LengthSet(
        f"requests in bursts: gamma gaps with a coefficient of variation of {BURSTY_CV:g}; documents of 8,000 tokens "
        f"on average, each asked about {BURSTY_QUESTIONS} times within about {BURSTY_QUESTIONS * BURSTY_SPREAD} "
        "requests, 3,000 tokens of one's own and 300 out on average; all invented, lognormal",
        4.0,
        _bursty,
        requests=10_000,
        cv=BURSTY_CV,
    ),
}


def lengths(source: str | os.PathLike[str], n_requests: int | None = None, seed: int = 0) -> Trace:
    """A set of lengths, all arrivals at 0: built in, or a CSV of `num_prefill_tokens, num_decode_tokens` (Vidur's).

    Args:
        source: a name of `LENGTH_SETS`, or a file, plain, gzip or zstd.
        n_requests: how many; by default the number of a built-in set, and all rows of a file in their order. Of a file,
            so many are drawn: without repetition while there are enough.

    Raises:
        TraceError: no such set or file, or a bad row.
    """
    if n_requests is not None and n_requests < 1:
        raise TraceError(f"n_requests {n_requests}", expected="an integer >= 1")
    rng = np.random.default_rng(seed)
    if isinstance(source, str) and source in LENGTH_SETS:
        chosen = LENGTH_SETS[source]
        drawn = chosen.draw(chosen.requests if n_requests is None else n_requests, rng)
        return _with_blocks(drawn, source)
    path = Path(source)
    if isinstance(source, str) and not path.exists():
        raise TraceError(f"no lengths called {source!r}", expected=f"one of {', '.join(LENGTH_SETS)}, or a CSV file")
    tokens, output = _read_lengths(path)
    n = len(tokens)
    if n_requests is not None:
        rows = rng.permutation(n)[:n_requests] if n_requests <= n else rng.integers(n, size=n_requests)
        tokens, output = tokens[rows], output[rows]
    return Trace(
        arrival_s=np.zeros(len(tokens)),
        input_tokens=tokens,
        output_tokens=output,
        block_offsets=np.zeros(len(tokens) + 1, np.int64),
        block_ids=np.zeros(0, np.int32),
        name=path.name.split(".")[0],
    )


def _with_blocks(drawn: _Requests, name: str) -> Trace:
    """Ids: a document's first blocks are the same in each of its requests, all others occur once."""
    n = len(drawn.input_tokens)
    counts = -(-drawn.input_tokens // DEFAULT_BLOCK_TOKENS)
    offsets = offsets_of(counts)
    shared = np.minimum(drawn.shared_blocks, counts)
    documents = int(drawn.document.max()) + 1
    longest = np.zeros(documents, np.int64)
    np.maximum.at(longest, drawn.document, shared)
    ids = longest.sum() + np.arange(offsets[-1])
    ids[joined_ranges(offsets[:-1], shared)] = joined_ranges(offsets_of(longest)[:-1][drawn.document], shared)
    return Trace(
        arrival_s=np.zeros(n),
        input_tokens=drawn.input_tokens.astype(np.int32),
        output_tokens=drawn.output_tokens.astype(np.int32),
        block_offsets=offsets,
        block_ids=densify(ids),
        name=name,
    )


LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def _read_lengths(path: Path) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    from traces.formats.rows import MAX_TOKENS, read_bytes

    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise TraceError("bytes that are not UTF-8", file=path, expected="CSV text") from None
    reader = csv.reader(lines)
    header = [cell.strip() for cell in next(reader)]
    for column in LENGTH_COLUMNS:
        if column not in header:
            raise TraceError(
                "column missing from the header",
                file=path,
                line=1,
                field=column,
                expected=f"the columns {' and '.join(LENGTH_COLUMNS)}",
            )
    places = [header.index(column) for column in LENGTH_COLUMNS]
    found: list[list[int]] = [[], []]
    for cells in reader:
        if not cells:
            continue
        for column, place, values in zip(LENGTH_COLUMNS, places, found):
            cell = cells[place].strip() if place < len(cells) else "nothing"
            value = int(cell) if cell.isdecimal() and cell.isascii() and len(cell) < 18 else 0
            if not 1 <= value <= MAX_TOKENS:
                raise TraceError(
                    f"found {cell[:40]}",
                    file=path,
                    line=reader.line_num,
                    field=column,
                    expected=f"an integer from 1 to {MAX_TOKENS}",
                )
            values.append(value)
    if not found[0]:
        raise TraceError("no row of lengths", file=path, expected="at least one request")
    return np.array(found[0], np.int32), np.array(found[1], np.int32)


def is_lengths(source: str) -> bool:
    """Whether `source` names a built-in set or a file of lengths."""
    if source in LENGTH_SETS:
        return True
    path = Path(source)
    if not path.is_file():
        return False
    from traces.formats.rows import read_bytes

    try:
        first = read_bytes(path).split(b"\n", 1)[0]
    except TraceError:
        return False
    return LENGTH_COLUMNS[0].encode() in first


# -- workloads by name ------------------------------------------------------------------------


def named_rate(text: str) -> tuple[str, float | None]:
    """A workload's name and the rate behind its `@`, if there is one.

    Raises:
        TraceError: what stands there is no rate.
    """
    name, at, given = text.partition("@")
    if not at:
        return name, None
    try:
        rate = float(given)
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError
    except ValueError:
        raise TraceError(f"builtin:{text}: rate {given!r}", expected="requests per second > 0 behind the @") from None
    return name, rate


def builtin(
    name: str,
    seed: int = 0,
    n_requests: int | None = None,
    *,
    duration_s: float | None = None,
    rate: float | None = None,
    cv: float | None = None,
) -> Trace:
    """A synthesised workload; needs no download.

    Either a stand-in for one of Mooncake's released traces (`conversation`, `toolagent`, `synthetic`; see
    `traces.synthesis`), or a set of `LENGTH_SETS` sent at `rate` with gamma gaps of `cv` (1: Poisson).

    Raises:
        TraceError: no such workload, or options that contradict each other.
    """
    from traces import synthesis

    if name in synthesis.BUILTIN_NAMES:
        if cv is not None:
            raise TraceError(f"cv {cv} for {name!r}", expected=f"it only with {', '.join(LENGTH_SETS)}")
        return synthesis.builtin(name, seed, n_requests, duration_s=duration_s, rate=rate)
    if name not in LENGTH_SETS:
        raise TraceError(f"no built-in workload {name!r}", expected=", ".join((*synthesis.BUILTIN_NAMES, *LENGTH_SETS)))
    return sent(name, seed, n_requests, duration_s=duration_s, rate=rate, cv=cv)


def sent(
    source: str,
    seed: int = 0,
    n_requests: int | None = None,
    *,
    duration_s: float | None = None,
    rate: float | None = None,
    cv: float | None = None,
) -> Trace:
    """`lengths` at a rate; a built-in set has one of its own, and a coefficient of variation.

    Raises:
        TraceError: as `lengths` and `at_rate`; no rate for a file.
    """
    if rate is None:
        if source not in LENGTH_SETS:
            raise TraceError("lengths without arrival times", file=source, expected="a rate", hint="rate=, or --rate")
        rate = LENGTH_SETS[source].rate
    if duration_s is not None:
        if n_requests is not None:
            raise TraceError("both a number of requests and a duration", expected="one of them")
        if not (math.isfinite(duration_s) and duration_s > 0):
            raise TraceError(f"duration {duration_s} s", expected="seconds > 0")
        n_requests = max(1, round(duration_s * rate))
    if cv is None:
        cv = LENGTH_SETS[source].cv if source in LENGTH_SETS else 1.0
    return at_rate(lengths(source, n_requests, seed), rate, seed, cv=cv)
