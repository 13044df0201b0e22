"""`python -m runtime.loadgen`: replay a trace against an OpenAI-compatible server, and measure what its clients see.

Requests are sent when the trace says, divided by `--speed`, whether or not earlier ones have been answered (open loop).
Their prompts are token ids that share prefixes exactly as the trace's block ids do.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import orjson
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from traces import Trace, TraceError, load

from .answer_events import AnswerEvents, Says, error_in
from .request_headers import PAIR, REQUEST_ID
from .sse import EventError, data_of, events

SHED = (429, 503)  # statuses that turn a request away; others are errors
EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130

err = Console(stderr=True)


class LoadError(ValueError):
    """A load that cannot be made; the message is for the user."""


class Prompts:
    """Prompts of a trace: equal block ids are equal tokens, and nothing else is.

    Args:
        scale: tokens of a prompt for each of the trace's; a block keeps a whole number of tokens, at least one.
        vocabulary: token ids are below this. seed: of the tokens.

    Attributes:
        block_tokens: of a block as it is sent. An engine shares what the trace does where its own blocks divide this.
    """

    def __init__(self, trace: Trace, *, scale: float = 1.0, vocabulary: int = 256, seed: int = 0) -> None:
        self.trace = trace
        self.block_tokens = max(1, round(trace.block_tokens * scale))
        self.scale = self.block_tokens / trace.block_tokens
        self.vocabulary = vocabulary
        self.seed = seed

    def input_tokens(self, row: int) -> int:
        """Length of a prompt."""
        return max(1, math.ceil(int(self.trace.input_tokens[row]) * self.scale - 1e-9))

    def output_tokens(self, row: int) -> int:
        """How many tokens its answer has."""
        return max(1, round(int(self.trace.output_tokens[row]) * self.scale))

    def tokens(self, row: int) -> NDArray[np.uint32]:
        """A prompt. What has no block id is shared with no other."""
        length = self.input_tokens(row)
        parts = [self._random(0, int(block), self.block_tokens) for block in self.trace.blocks(row)]
        missing = length - self.block_tokens * len(parts)
        if missing > 0:
            parts.append(self._random(1, row, missing))
        return np.concatenate(parts)[:length]

    def _random(self, kind: int, number: int, count: int) -> NDArray[np.uint32]:
        return np.random.default_rng((self.seed, kind, number)).integers(0, self.vocabulary, count, np.uint32)


@dataclass(slots=True)
class Result:
    """What became of a request; times in seconds since the replay's start, NaN where there was none."""

    row: int
    request_id: str
    due_s: float
    sent_s: float
    ended_s: float = math.nan
    input_tokens: int = 0
    output_tokens: int = 0
    status: int = 0  # of HTTP; 0: no answer
    error: str = ""
    pair: str = ""  # who served, where the server tells
    answer: AnswerEvents = field(default_factory=lambda: AnswerEvents(0.0))

    @property
    def completed(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def rejected(self) -> bool:
        return self.status in SHED


@dataclass(frozen=True, slots=True)
class Slos:
    """What makes a request good. TBT is the mean of the longest share of its intervals (docs/physics.md)."""

    ttft_s: float = math.inf
    tbt_s: float = math.inf
    tbt_tail_share: float = 0.1

    def met(self, result: Result) -> bool:
        """Whether a request is good."""
        times = result.answer.times
        return result.completed and times.ttft_s <= self.ttft_s and times.tbt_s(self.tbt_tail_share) <= self.tbt_s


class Replay:
    """One replay.

    Args:
        url: of the server, without /v1. speed: how much faster than the trace. extra: further fields of each body.
    """

    def __init__(
        self,
        url: str,
        prompts: Prompts,
        *,
        speed: float = 1.0,
        requests: int | None = None,
        model: str = "",
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.prompts = prompts
        self.speed = speed
        trace = prompts.trace
        self.count = trace.n_requests if requests is None else min(requests, trace.n_requests)
        self.model = model
        self.extra = extra or {}
        self.headers = headers or {}
        self.timeout_s = timeout_s
        self.results: list[Result] = []
        self.started_s = 0.0
        self.ended = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send no more, and give up what is under way."""
        self._stopped.set()

    async def run(self) -> None:
        """Replay; returns when every request has ended, or after `stop`.

        Raises:
            LoadError: the server does not say which model it serves.
        """
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
            if not self.model:
                self.model = await self._served(session)
            arrivals = self.prompts.trace.arrival_s[: self.count]
            due = (arrivals - arrivals[0]) / self.speed if self.count else arrivals
            self.started_s = time.monotonic()
            tasks: list[asyncio.Task[None]] = []
            for row, due_s in enumerate(due.tolist()):
                body = self._body(row)  # made before it is due
                wait_s = self.started_s + due_s - time.monotonic()
                if await self._wait(max(0.0, wait_s)):
                    break
                result = Result(row, str(uuid.uuid4()), due_s, self._now(), input_tokens=self.prompts.input_tokens(row))
                self.results.append(result)
                tasks.append(asyncio.create_task(self._send(session, result, body)))
            everything: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
            stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stopped.wait())
            await asyncio.wait([everything, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            for task in tasks:
                task.cancel()
            await everything

    async def _wait(self, seconds: float) -> bool:
        """Wait; whether it was stopped."""
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _served(self, session: aiohttp.ClientSession) -> str:
        try:
            async with session.get(f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise LoadError(f"{self.url}/v1/models: {error!r}; give --url of a server, or --model") from None

    def _body(self, row: int) -> bytes:
        output_tokens = self.prompts.output_tokens(row)
        fields = {
            "model": self.model,
            "prompt": self.prompts.tokens(row),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)

    async def _send(self, session: aiohttp.ClientSession, result: Result, body: bytes) -> None:
        headers = {"content-type": "application/json", REQUEST_ID: result.request_id, **self.headers}
        answer = result.answer = AnswerEvents(result.sent_s)
        try:
            async with session.post(f"{self.url}/v1/completions", data=body, headers=headers) as response:
                result.status = response.status
                result.pair = response.headers.get(PAIR, "")
                if response.status != 200:
                    said = error_in(await response.read()) or {}
                    result.error = str(said.get("message", response.reason))
                    return
                async for event in events(response):
                    if answer.note(data_of(event), self._now()) is Says.TOKENS:
                        result.output_tokens = answer.output_tokens
                result.output_tokens = answer.output_tokens
                if answer.error is not None:
                    result.error = str(answer.error.get("message", "an error without message"))
                elif not answer.done:
                    result.error = "the stream ended before its answer"
        except (aiohttp.ClientError, OSError, TimeoutError, EventError) as error:
            result.error = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            result.error = "interrupted"
            raise
        finally:
            result.ended_s = self._now()
            self.ended += 1

    def _now(self) -> float:
        return time.monotonic() - self.started_s


def summary(results: list[Result], slos: Slos, seconds: float) -> dict[str, Any]:
    """The replay in numbers. `goodput` is the share of what was offered that met both SLOs."""
    done = [result for result in results if result.completed]
    good = sum(slos.met(result) for result in results)
    rejected = sum(result.rejected for result in results)
    ttft_s = [result.answer.times.ttft_s for result in done]
    tbt_s = [result.answer.times.tbt_s(slos.tbt_tail_share) for result in done if result.answer.times.intervals]
    e2e_s = [result.ended_s - result.sent_s for result in done]
    late_s = [result.sent_s - result.due_s for result in results]
    offered = len(results)
    return {
        "offered": offered,
        "completed": len(done),
        "good": good,
        "goodput": good / offered if offered else None,
        "goodput_per_s": good / seconds if seconds > 0 else None,
        "rejected": rejected,
        "errors": offered - len(done) - rejected,
        "ttft_p50_s": _quantile(ttft_s, 0.5),
        "ttft_p90_s": _quantile(ttft_s, 0.9),
        "ttft_p99_s": _quantile(ttft_s, 0.99),
        "tbt_p50_s": _quantile(tbt_s, 0.5),
        "tbt_p90_s": _quantile(tbt_s, 0.9),
        "tbt_p99_s": _quantile(tbt_s, 0.99),
        "e2e_p50_s": _quantile(e2e_s, 0.5),
        "e2e_p90_s": _quantile(e2e_s, 0.9),
        "output_tokens": sum(result.output_tokens for result in done),
        "input_tokens": sum(result.input_tokens for result in done),
        "seconds": seconds,
        "late_p99_s": _quantile(late_s, 0.99),  # how late requests were sent: the generator's own fault
    }


def _quantile(values: list[float], share: float) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return float(np.quantile(finite, share)) if finite else None


def exported(results: list[Result], started_unix_s: float) -> Iterator[dict[str, Any]]:
    """One record for each request, in the form of aiperf's profile_export.jsonl; times there are in milliseconds."""
    for result in results:
        times = result.answer.times

        def nanoseconds(at_s: float) -> int | None:
            return round((started_unix_s + at_s) * 1e9) if math.isfinite(at_s) else None

        yield {
            "metadata": {
                "session_num": result.row,
                "x_request_id": result.request_id,
                "request_start_ns": nanoseconds(result.sent_s),
                "request_end_ns": nanoseconds(result.ended_s),
                "worker_id": result.pair or None,
                "benchmark_phase": "profiling",
                "was_cancelled": result.error == "interrupted",
            },
            "metrics": {
                "time_to_first_token": _milliseconds(times.ttft_s),
                "inter_token_latency": _milliseconds(float(np.mean(times.intervals)) if times.intervals else math.nan),
                "request_latency": _milliseconds(result.ended_s - result.sent_s),
                "input_sequence_length": {"value": result.input_tokens, "unit": "tokens"},
                "output_sequence_length": {"value": result.output_tokens, "unit": "tokens"},
                "inter_chunk_latency": {"value": [1e3 * gap for gap in times.intervals], "unit": "ms"},
            },
            "error": {"code": result.status or None, "message": result.error} if result.error else None,
        }


def _milliseconds(seconds: float) -> dict[str, Any] | None:
    return {"value": 1e3 * seconds, "unit": "ms"} if math.isfinite(seconds) else None


# --- the command -----------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    url: Annotated[str, typer.Option(help="Of an OpenAI-compatible server, e.g. http://127.0.0.1:8000")],
    trace: Annotated[str, typer.Option(help="Any trace that `python -m traces info` reads")],
    speed: Annotated[float, typer.Option(min=1e-9, help="How much faster than the trace")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="The first so many only")] = None,
    tokens_scale: Annotated[
        float, typer.Option(min=1e-6, help="Tokens sent for each of the trace's, prompts and answers alike")
    ] = 1.0,
    vocabulary: Annotated[int, typer.Option(min=2, help="Token ids are below this")] = 256,
    seed: Annotated[int, typer.Option(help="Of the tokens")] = 0,
    model: Annotated[str, typer.Option(help="Default: what the server serves")] = "",
    extra: Annotated[str, typer.Option(help="JSON object with further fields of each body")] = "{}",
    ttft_slo_s: Annotated[float, typer.Option(min=0.0, help="Of goodput")] = math.inf,
    tbt_slo_s: Annotated[float, typer.Option(min=0.0, help="Of goodput")] = math.inf,
    tbt_tail_share: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Longest intervals that are a TBT")] = 0.1,
    send_slos: Annotated[bool, typer.Option("--send-slos", help="Tell the server the SLOs in headers")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Of a request")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Each request in a line, as aiperf's profile_export.jsonl")] = None,
    as_json: Annotated[str, typer.Option("--json", help="Write the numbers to a file; - is standard output")] = "",
) -> None:
    """Replay a trace against a server."""
    try:
        fields = json.loads(extra)
        if not isinstance(fields, dict):
            raise LoadError(f"--extra: expected a JSON object, found {extra[:40]!r}")
        prompts = Prompts(load(trace), scale=tokens_scale, vocabulary=vocabulary, seed=seed)
    except (TraceError, LoadError, OSError, json.JSONDecodeError) as error:
        print(f"loadgen: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    slos = Slos(ttft_slo_s, tbt_slo_s, tbt_tail_share)
    replay = Replay(
        url,
        prompts,
        speed=speed,
        requests=requests,
        model=model,
        extra=fields,
        headers=_slo_headers(slos) if send_slos else {},
        timeout_s=timeout_s,
    )
    started_unix_s = time.time()
    try:
        interrupted = asyncio.run(_shown(replay))
    except LoadError as error:
        print(f"loadgen: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    told = [result for result in replay.results if result.error != "interrupted"]
    numbers = summary(told, slos, max((result.ended_s for result in told), default=0.0))
    if out is not None:
        out.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in exported(replay.results, started_unix_s)))
    if as_json:
        text = json.dumps(numbers, indent=1)
        if as_json == "-":
            print(text)
        else:
            Path(as_json).write_text(text + "\n")
    if as_json != "-":
        for name, value in numbers.items():
            print(f"{name:16} {'-' if value is None else f'{value:.4g}' if isinstance(value, float) else value}")
    for message, times in _most_common(told):
        print(f"{times} times: {message}", file=sys.stderr)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


async def _shown(replay: Replay) -> bool:
    """Run with a progress bar; whether it was interrupted."""
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        replay.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        bar = progress.add_task("replay", total=replay.count)
        running = asyncio.create_task(replay.run())
        while not running.done():
            progress.update(bar, completed=replay.ended, description=f"{len(replay.results)} sent, ended")
            await asyncio.wait([running], timeout=0.2)
        await running
    return interrupted


def _slo_headers(slos: Slos) -> dict[str, str]:
    named = (("x-llm-d-slo-ttft-ms", slos.ttft_s), ("x-llm-d-slo-tpot-ms", slos.tbt_s))
    return {name: f"{1e3 * slo_s:g}" for name, slo_s in named if math.isfinite(slo_s)}


def _most_common(results: list[Result], most: int = 3) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for result in results:
        if result.error and not result.rejected:
            counts[result.error] = counts.get(result.error, 0) + 1
    return sorted(counts.items(), key=lambda row: -row[1])[:most]


if __name__ == "__main__":
    app()
