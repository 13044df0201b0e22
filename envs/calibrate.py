"""`python -m envs.calibrate`: measure live workers, fit the latency model, write a hardware profile.

Requests are timed alone and together, so that what a worker is busy with can be told from what a request waits for:

- prefill: k equal prompts sent together take latency + k (base + linear (n - h) + quadratic (n^2 - h^2)) until the last
  is answered, with n tokens of which h are cached. The terms in brackets are the profile's; the latency keeps nobody
  busy.
- decode: an iteration takes base + per_request B + per_token K, with B requests and K context tokens.
- join: while a request joins, the intervals of one that is decoded take longer than before by bytes / rate in all.
- hand-over: from the prefill worker's answer to the decode worker's first token it takes latency + bytes / bandwidth +
  the join + one iteration.
- gateway: what a first token through it takes longer than all of these together. With a gateway, decode batches are
  timed through it, as its clients see them.

The latencies together are `transfer_latency_s` of a cluster file. A quarter of what was measured is held out; the
errors are those of the fit there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import typer
import yaml
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .hardware import DecodeTimes, HardwareProfile, PrefillTimes, relative_fit
from .worker_timing import DecodeTime, FirstTokenTime, JoinTime, LiveWorker, PrefillTime, WorkerError

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130
SHORTEST, LEAST_CONTEXT = 64, 512  # tokens: of the shortest prompt, and of what a worker must take
LENGTHS, BATCHES = 6, (1, 2, 4, 8, 16, 32, 64)
TOGETHER = 3  # prompts sent together
CACHED_SHARES = (0.5, 0.75)
PREFIX_STEP = 128  # cached prefixes are multiples of this, which are whole blocks of most engines
ITERATIONS = 32  # of a decode batch that is timed
HELD_OUT = 4  # one point in so many
NOT_MEASURED = 1e12  # bytes/s where nothing had to move

err = Console(stderr=True)
Time = TypeVar("Time", PrefillTime, DecodeTime, FirstTokenTime, JoinTime)
Point = TypeVar("Point")


class Part(NamedTuple):
    """What was fitted: `terms` [N, T] times the coefficients [T], and what was known `besides`, are `seconds` [N]."""

    name: str
    terms: NDArray[np.float64]
    besides: NDArray[np.float64]
    seconds: NDArray[np.float64]
    held_out: NDArray[np.bool_]
    coefficients: NDArray[np.float64]

    @property
    def predicted(self) -> NDArray[np.float64]:
        """Seconds by the fit, [N]."""
        return self.terms @ self.coefficients + self.besides

    @property
    def errors(self) -> dict[str, float | int]:
        """Relative errors on the points that were held out."""
        apart = np.abs(self.predicted / self.seconds - 1)[self.held_out]
        return {
            "points": int((~self.held_out).sum()),
            "held_out": int(self.held_out.sum()),
            "median_relative_error": float(np.median(apart)),
            "p90_relative_error": float(np.quantile(apart, 0.9)),
        }


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
        latency_s: of a prefill's answer, of the hand-over and of the gateway; none of them keeps a worker busy.
    """

    profile: HardwareProfile
    latency_s: dict[str, float]
    kv_bytes_per_token: float | None
    parts: list[Part] = field(default_factory=list)
    times: dict[str, list[Any]] = field(default_factory=dict)  # as measured, by part

    @property
    def cluster(self) -> dict[str, Any]:
        """What a cluster file says beside the profile. One layer: KV moves when the prefill is done, not meanwhile."""
        says: dict[str, Any] = {"transfer_latency_s": sum(self.latency_s.values())}
        if self.kv_bytes_per_token:
            says["model"] = {"layers": 1, "kv_bytes_per_token": self.kv_bytes_per_token}
        return says

    def report(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "fit": {part.name: part.errors for part in self.parts},
            "latency_s": self.latency_s,
            "cluster": self.cluster,
            "profile": self.profile.model_dump(),
        }


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        longest_tokens: of prompts. most_requests: of a decode batch. repeats: of every point, whose median counts.
    """

    longest_tokens: int = 2048
    most_requests: int = 16
    repeats: int = 3

    def lengths(self) -> list[int]:
        """Tokens of prompts, equally far apart by ratio; whole blocks, as far as an engine's divide `SHORTEST`."""
        return [SHORTEST * round(n / SHORTEST) for n in np.geomspace(SHORTEST, self.longest_tokens, LENGTHS)]

    def prefills(self) -> list[tuple[int, int, int]]:
        """New tokens, cached tokens, prompts at once."""
        points = [(n, 0, k) for n in self.lengths() for k in (1, TOGETHER)]
        for n in self.lengths():
            for share in CACHED_SHARES:
                cached = int(share * n) // PREFIX_STEP * PREFIX_STEP
                if cached:
                    points += [(n - cached, cached, k) for k in (1, TOGETHER)]
        return points

    def decodes(self, kv_tokens: int) -> list[tuple[int, int]]:
        """Requests and context of each, as far as their KV has room."""
        contexts = self.lengths()[::2]
        batches = [b for b in BATCHES if b <= self.most_requests]
        return [(b, c) for b in batches for c in contexts if b * (c + ITERATIONS) <= kv_tokens // 2]


def calibrate(
    prefill: LiveWorker,
    decode: LiveWorker,
    plan: Plan,
    *,
    gateway: LiveWorker | None = None,
    kv_bytes_per_token: float | None = None,
    kv_tokens: int | None = None,
    earlier: Calibration | None = None,
    one_machine: bool = False,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Calibration:
    """Measure two workers, or one that does both, and fit.

    Args:
        gateway: before the two, where clients go through one.
        earlier: of the same workers; what was measured then counts as well. A machine's speed changes.
        one_machine: prefill and decode worker share one, its memory and perhaps its cores. A prompt is prefilled more
            slowly there while others are decoded, as they are in service, and so prefills are timed meanwhile.
        kv_bytes_per_token, kv_tokens: of the model, and of a worker's KV cache; None where the workers say so.
        tell: is told what is measured, how many of it are done and how many there are.

    Raises:
        WorkerError: a worker cannot be measured, or does not say what has to be known.
    """
    served = [worker.served for worker in (prefill, decode)]
    longest = min([plan.longest_tokens, *(s.longest_tokens - ITERATIONS for s in served if s.longest_tokens)])
    if longest < LEAST_CONTEXT:
        raise WorkerError(f"{prefill.url}: takes {longest} tokens; expected {LEAST_CONTEXT} or more to be measured")
    plan = Plan(longest, plan.most_requests, plan.repeats)
    room = kv_tokens or min([s.kv_tokens for s in served if s.kv_tokens], default=0)
    if not room:
        raise WorkerError(f"{prefill.url}: does not say how much KV it holds; expected --kv-tokens")
    moves = prefill is not decode
    shared = one_machine and moves
    measured: dict[str, list[Any]] = {}

    def timed(part: str, points: Sequence[Point], once: Callable[[Point], Time]) -> list[Time]:
        """The median of each point, after those of before."""
        new = [_median([once(point) for _ in range(plan.repeats)]) for point in _told(part, points, tell)]
        measured[part] = (earlier.times.get(part, []) if earlier else []) + new
        return measured[part]

    def as_in_service() -> AbstractContextManager[None]:
        return (gateway or decode).decoding(SHORTEST) if shared else nullcontext()

    with as_in_service():
        times = timed("prefill", plan.prefills(), lambda point: prefill.prefill(*point))
    tokens = np.array([(t.new_tokens, t.prefix_tokens, t.at_once) for t in times], float)
    new, cached, at_once = tokens.T
    terms = np.stack([np.ones_like(new), at_once, at_once * new, at_once * ((new + cached) ** 2 - cached**2)], axis=1)
    prefill_part = fit("prefill", terms, [t.seconds for t in times])

    batches = timed("decode", plan.decodes(room), lambda point: (gateway or decode).decode(*point, ITERATIONS))
    terms = np.array([(1.0, t.batch, t.context_tokens) for t in batches])
    decode_part = fit("decode", terms, [t.seconds for t in batches])
    parts = [prefill_part, decode_part]
    latency_s = {"prefill": float(prefill_part.coefficients[0])}

    nic_bytes_per_s = join_bytes_per_s = NOT_MEASURED
    if moves:
        lengths = [n for n in plan.lengths() for _ in range(2)]
        moved = decode.metric("vllm:nixl_bytes_transferred_sum") or 0.0
        hand_overs = timed("hand-over", lengths, lambda n: prefill.hand_over(decode, n))
        sent = plan.repeats * sum(lengths)
        counted = (decode.metric("vllm:nixl_bytes_transferred_sum") or 0.0) - moved
        kv_bytes_per_token = kv_bytes_per_token or (counted / sent if counted > 0 else None)
        if not kv_bytes_per_token:
            raise WorkerError(f"{decode.url}: does not say how large the KV is; expected --kv-bytes-per-token")
        joins = gateway.first_token if gateway is not None else lambda n: prefill.hand_over(decode, n)
        joined = timed("join", lengths, lambda n: (gateway or decode).join(n, joins, SHORTEST, ITERATIONS))
        terms = np.array([(kv_bytes_per_token * t.tokens,) for t in joined])
        own = np.array([(0.0, 1.0, t.tokens) for t in joined]) @ decode_part.coefficients  # of the iteration it is in
        besides = own + [t.undisturbed_s for t in joined]
        part = fit("join", terms, [t.seconds for t in joined], besides=besides)
        join_bytes_per_s = 1 / max(float(part.coefficients[0]), 1 / NOT_MEASURED)
        parts.append(part)
        moved_bytes = kv_bytes_per_token * np.array([t.tokens for t in hand_overs], float)
        besides = np.array([(1.0, 1.0, t.tokens) for t in hand_overs]) @ decode_part.coefficients
        besides += moved_bytes / join_bytes_per_s
        terms = np.stack([np.ones_like(moved_bytes), moved_bytes], axis=1)
        part = fit("hand-over", terms, [t.seconds for t in hand_overs], besides=besides)
        latency_s["hand-over"] = float(part.coefficients[0])
        nic_bytes_per_s = 1 / max(float(part.coefficients[1]), 1 / NOT_MEASURED)
        parts.append(part)
    if gateway is not None:
        lengths = [n for n in plan.lengths() for _ in range(2)]
        with as_in_service():
            firsts = timed("gateway", lengths, gateway.first_token)
        n = np.array([t.tokens for t in firsts], float)
        known = np.stack([np.ones_like(n), np.ones_like(n), n, n**2], axis=1) @ prefill_part.coefficients
        # beside another, it waits for half an iteration of that one, and shares its own with it
        iterations, requests, context = (1.5, 2.0, 1.5 * SHORTEST) if shared else (1.0, 1.0, 0.0)
        known += np.array([(iterations, requests, context + each) for each in n]) @ decode_part.coefficients
        if moves:
            known += latency_s["hand-over"]
            known += n * (kv_bytes_per_token or 0.0) * (1 / nic_bytes_per_s + 1 / join_bytes_per_s)
        part = fit("gateway", np.ones((len(n), 1)), [t.seconds for t in firsts], besides=known)
        latency_s["gateway"] = float(part.coefficients[0])
        parts.append(part)

    _, base_s, linear_s, quadratic_s = prefill_part.coefficients.tolist()
    step_s, request_s, token_s = decode_part.coefficients.tolist()
    where = f"{prefill.url}, {decode.url}" if moves else prefill.url
    profile = HardwareProfile(
        source=f"measured on {where} by envs.calibrate",
        model=prefill.model,
        prefill=PrefillTimes(base_s=base_s, linear_s=max(linear_s, 1e-12), quadratic_s=quadratic_s),
        decode=DecodeTimes(base_s=max(step_s, 1e-9), per_request_s=request_s, per_token_s=token_s),
        nic_bytes_per_s=nic_bytes_per_s,
        h2d_bytes_per_s=NOT_MEASURED,  # what a cached prefix costs to load is in the prefill's terms
        join_bytes_per_s=join_bytes_per_s,
        device_kv_tokens=room,
        host_kv_tokens=room,
        decode_kv_tokens=room,
    )
    return Calibration(profile, latency_s, kv_bytes_per_token, parts, measured)


def fit(name: str, terms: NDArray[np.float64], seconds: Sequence[float], besides: ArrayLike = 0.0) -> Part:
    """Fit three points in four; `besides` [N] seconds are known already."""
    measured = np.array(seconds)
    known = np.broadcast_to(np.asarray(besides, float), measured.shape)
    held_out = np.zeros(len(measured), bool)
    held_out[np.random.default_rng(0).permutation(len(measured))[::HELD_OUT]] = True
    kept = ~held_out
    found = relative_fit(terms[kept], measured[kept], known[kept])
    return Part(name, terms, known, measured, held_out, found)


def _median(times: Sequence[Time]) -> Time:
    """The time in the middle of the same measurement, repeated."""
    return sorted(times, key=lambda each: each.seconds)[len(times) // 2]


def _told(what: str, points: Sequence[Point], tell: Callable[[str, int, int], None]) -> Iterator[Point]:
    """The points, in an order that has nothing to do with their size: a machine that slows down harms no end of it."""
    for done, i in enumerate(np.random.default_rng(1).permutation(len(points)).tolist()):
        tell(what, done, len(points))
        yield points[i]
    tell(what, len(points), len(points))


def drawn(calibration: Calibration, file: Path) -> None:
    """Draw what was measured over what was fitted, a panel for each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(calibration.parts), 4), layout="constrained")
    for axes, part in zip(np.atleast_1d(figure.subplots(1, len(calibration.parts))), calibration.parts):
        for chosen, label in ((~part.held_out, "fitted"), (part.held_out, "held out")):
            axes.plot(1e3 * part.predicted[chosen], 1e3 * part.seconds[chosen], "o", label=label)
        ends = [1e3 * float(np.min(part.seconds)), 1e3 * float(np.max(part.seconds))]
        axes.plot(ends, ends, "k:", linewidth=1)
        error = part.errors["median_relative_error"]
        axes.set(xscale="log", yscale="log", xlabel="fit, ms", ylabel="measured, ms")
        axes.set_title(f"{part.name}: median error {100 * error:.1f} %")
        axes.legend()
    figure.savefig(file)


# --- the command -----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    url: Annotated[str, typer.Option("--url", "--endpoint", help="A worker that does both, http://HOST:PORT")] = "",
    prefill_url: Annotated[str, typer.Option(help="Or a prefill worker")] = "",
    decode_url: Annotated[str, typer.Option(help="and the decode worker that it hands KV to")] = "",
    gateway_url: Annotated[str, typer.Option(help="And the gateway before them, for what its clients see")] = "",
    out: Annotated[Path, typer.Option(help="The hardware profile")] = Path("profile.yaml"),
    cluster: Annotated[Path | None, typer.Option(help="A cluster file of such workers, to be written too")] = None,
    as_json: Annotated[str, typer.Option("--json", help="Write the fit to a file; - is standard output")] = "",
    plot: Annotated[Path | None, typer.Option(help="A picture of the fit")] = None,
    longest_tokens: Annotated[int, typer.Option(min=LEAST_CONTEXT, help="Longest prompt")] = 2048,
    most_requests: Annotated[int, typer.Option(min=2, max=256, help="Largest decode batch")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts")] = 3,
    one_machine: Annotated[
        bool, typer.Option("--one-machine", help="Both are on this one: time prefills while others are decoded")
    ] = False,
    kv_bytes_per_token: Annotated[
        float | None, typer.Option(min=1e-9, help="KV of a token, all layers; default: as NIXL's metrics count it")
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(min=1, help="KV a worker holds; default: as its metrics say")] = None,
    model: Annotated[str, typer.Option(help="Default: what the worker serves")] = "",
    vocabulary: Annotated[int, typer.Option(min=2, help="Token ids are below this")] = 256,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token")] = "",
) -> None:
    """Measure live workers and write a hardware profile."""
    try:
        if bool(url) == bool(prefill_url or decode_url) or bool(prefill_url) != bool(decode_url):
            raise WorkerError("expected --url, or --prefill-url and --decode-url")
        for file in (out, cluster, plot):
            if file is not None and not file.resolve().parent.is_dir():
                raise WorkerError(f"{file}: expected a file in a folder that exists")
        started_s = time.monotonic()
        prefill = LiveWorker(prefill_url or url, model=model, vocabulary=vocabulary, api_key=api_key)
        decode = prefill
        if decode_url:
            decode = LiveWorker(decode_url, model=model, vocabulary=vocabulary, api_key=api_key)
        gateway = LiveWorker(gateway_url, model=model, vocabulary=vocabulary, api_key=api_key) if gateway_url else None
        plan = Plan(longest_tokens, most_requests, repeats)
        with _shown() as tell:
            found = calibrate(
                prefill,
                decode,
                plan,
                gateway=gateway,
                kv_bytes_per_token=kv_bytes_per_token,
                kv_tokens=kv_tokens,
                one_machine=one_machine,
                tell=tell,
            )
    except WorkerError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)  # requests under way are not waited for
    out.write_text(yaml.safe_dump(found.profile.model_dump(), sort_keys=False))
    if cluster is not None:
        hardware = os.path.relpath(out.resolve(), cluster.resolve().parent)
        pools = {pool: [{"count": 1, "hardware": hardware}] for pool in ("prefill", "decode")}
        cluster.write_text(yaml.safe_dump(found.cluster | pools, sort_keys=False))
    if plot is not None:
        drawn(found, plot)
    report = found.report() | {"seconds": time.monotonic() - started_s}
    if as_json and as_json != "-":
        Path(as_json).write_text(json.dumps(report, indent=1) + "\n")
    if as_json == "-":
        print(json.dumps(report, indent=1))
    else:
        for part in found.parts:
            errors = part.errors
            print(
                f"{part.name:9} relative error on {errors['held_out']} held-out points: "
                f"median {100 * errors['median_relative_error']:.1f} %, P90 {100 * errors['p90_relative_error']:.1f} %"
            )
        print(f"{out}: {found.profile.source}")


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each part."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        bars: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        yield tell


if __name__ == "__main__":
    app()
