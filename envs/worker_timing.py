"""Times live workers by plain HTTP: prefills, decode batches and the hand-over of KV, in OpenAI's and vLLM's form.

Prompts are random token ids, new ones in every run, so that nothing is cached but what was sent to be.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np

KEEP = {  # asks a prefill worker of vLLM's NixlConnector to keep the KV for a decode worker
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
Answer = TypeVar("Answer")


class WorkerError(RuntimeError):
    """A worker that cannot be timed; the message is for the user."""


class PrefillTime(NamedTuple):
    """`at_once` equal requests sent together; seconds until the last was answered. Tokens are those of one."""

    new_tokens: int
    prefix_tokens: int
    at_once: int
    seconds: float


class DecodeTime(NamedTuple):
    """Seconds of an iteration; context summed over the batch, in the middle of what was measured."""

    batch: int
    context_tokens: float
    seconds: float


class FirstTokenTime(NamedTuple):
    """Seconds to a first token of a prompt that was handed over, or sent, at 0."""

    tokens: int
    seconds: float


class JoinTime(NamedTuple):
    """A request that was decoded while another with so many tokens joined: what its intervals took meanwhile, and what
    as many took before."""

    tokens: int
    seconds: float
    undisturbed_s: float


@dataclass(frozen=True)
class Served:
    """What a worker says of itself. None: it does not say."""

    model: str
    longest_tokens: int | None
    kv_tokens: int | None


class _Countdown(threading.Event):
    """Set when it was counted so many times."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self._left, self._lock = left, threading.Lock()

    def count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.set()


class LiveWorker:
    """One worker.

    Args:
        url: with scheme, without /v1. vocabulary: token ids are below this.
        api_key: sent as bearer token, where there is one.

    Raises:
        WorkerError: no server is there, or none that serves a model in OpenAI's form.
    """

    def __init__(
        self, url: str, *, model: str = "", vocabulary: int = 256, api_key: str = "", timeout_s: float = 120.0
    ) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise WorkerError(f"{url}: expected a URL like http://127.0.0.1:8000")
        self._parts = parts
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.vocabulary = vocabulary
        self.timeout_s = timeout_s
        self._random = np.random.default_rng()
        self._connection = threading.local()
        self._threads = ThreadPoolExecutor(256)
        self.served = self._ask()
        self.model = model or self.served.model

    def close(self) -> None:
        """Let its threads end."""
        self._threads.shutdown()

    def tokens(self, count: int) -> list[int]:
        """A prompt that no one has sent before."""
        return list(self._random.integers(0, self.vocabulary, count).tolist())

    # --- what is timed -----------------------------------------------------------------------------------------------

    def prefill(self, new_tokens: int, prefix_tokens: int, at_once: int) -> PrefillTime:
        """Time prompts whose first `prefix_tokens` are cached, as far as the worker caches them.

        Raises:
            WorkerError: a request fails.
        """
        prefix = self.tokens(prefix_tokens)
        if prefix:
            self.complete(prefix)
        prompts = [prefix + self.tokens(new_tokens) for _ in range(at_once)]
        start_s = time.perf_counter()
        replies = self._together(self.complete, prompts)
        seconds = time.perf_counter() - start_s
        told = [_cached(reply) for reply in replies]
        cached = prefix_tokens if None in told else round(float(np.mean([count or 0 for count in told])))
        return PrefillTime(new_tokens + prefix_tokens - cached, cached, at_once, seconds)

    def decode(self, batch: int, context_tokens: int, iterations: int) -> DecodeTime:
        """Time a batch whose members have `context_tokens` each, from when all have begun to when the first ends.

        Raises:
            WorkerError: a request fails, or they were not together long enough.
        """
        prompts = [self.tokens(context_tokens) for _ in range(batch)]
        most = self._room(context_tokens)
        together, timed = _Countdown(batch), _Countdown(batch)

        def stream(prompt: list[int]) -> list[float]:
            times: list[float] = []
            inside = 0
            try:
                for at_s in self.stream(prompt, most):
                    if not times:
                        together.count()
                    times.append(at_s)
                    inside += together.is_set()
                    if inside == iterations:
                        timed.count()
                    if timed.is_set():
                        break
            finally:  # where one fails or ends, the others need not wait for it
                together.set()
                timed.set()
            return times

        times = [np.array(each) for each in self._together(stream, prompts)]
        all_there_s, first_ends_s = max(t[0] for t in times), min(t[-1] for t in times)
        context, spans = 0.0, []
        for t in times:
            inside = t[(t >= all_there_s) & (t <= first_ends_s)]
            context += context_tokens + int((t < all_there_s).sum()) + len(inside) / 2
            if len(inside) > 1:
                spans.append((inside[-1] - inside[0]) / (len(inside) - 1))
        if len(spans) < batch:
            raise WorkerError(f"{self.url}: {batch} requests sent together were not decoded together")
        return DecodeTime(batch, context, float(np.mean(spans)))

    def hand_over(self, to: LiveWorker, tokens: int) -> FirstTokenTime:
        """Time how KV gets from this prefill worker to a decode worker (vLLM's NixlConnector).

        Raises:
            WorkerError: a request fails, or this worker hands no KV over.
        """
        prompt = self.tokens(tokens)
        params = self.complete(prompt, kv_transfer_params=KEEP).get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise WorkerError(
                f"{self.url}: its answer has no kv_transfer_params; expected a prefill worker with vLLM's NixlConnector"
            )
        start_s = time.perf_counter()
        first_s = max(to.stream(prompt, 1, kv_transfer_params=params))
        return FirstTokenTime(tokens, first_s - start_s)

    def join(
        self, tokens: int, joins: Callable[[int], FirstTokenTime], context_tokens: int, iterations: int
    ) -> JoinTime:
        """Time how much a request that joins holds up one that is decoded.

        Args:
            tokens, joins: of the one that joins, and what sends it. context_tokens: of the other. iterations: of the
                other alone, before.

        Raises:
            WorkerError: a request fails, or the first ends before the other has joined.
        """
        prompt = self.tokens(context_tokens)
        most = self._room(context_tokens)
        settled, joined = threading.Event(), threading.Event()

        def stream() -> list[float]:
            times: list[float] = []
            after = 0
            try:
                for at_s in self.stream(prompt, most):
                    times.append(at_s)
                    if len(times) == iterations:
                        settled.set()
                    after += joined.is_set()
                    if after == 2:  # whoever has joined is in the first of them for certain
                        break
            finally:
                settled.set()
            return times

        running = self._threads.submit(stream)
        settled.wait()
        start_s = time.perf_counter()
        try:
            joins(tokens)
        finally:
            joined.set()
        times = np.array(running.result())
        usual_s = float(np.median(np.diff(times[1:iterations])))
        meanwhile = times[np.searchsorted(times, start_s) - 1 :]
        if len(meanwhile) < 2:
            raise WorkerError(f"{self.url}: a request ended before another had joined it")
        return JoinTime(tokens, float(meanwhile[-1] - meanwhile[0]), usual_s * (len(meanwhile) - 1))

    @contextmanager
    def decoding(self, context_tokens: int) -> Iterator[None]:
        """A request is decoded meanwhile, and another when it has ended.

        Raises:
            WorkerError: at the end, where it fails.
        """
        most = self._room(context_tokens)
        begun, ended = threading.Event(), threading.Event()

        def decode() -> None:
            try:
                while not ended.is_set():
                    for _ in self.stream(self.tokens(context_tokens), most):
                        begun.set()
                        if ended.is_set():
                            break
            finally:
                begun.set()

        running = self._threads.submit(decode)
        begun.wait()
        try:
            yield
        finally:
            ended.set()
            running.result()

    def first_token(self, tokens: int) -> FirstTokenTime:
        """Time the first token of a prompt that nobody else keeps waiting.

        Raises:
            WorkerError: the request fails.
        """
        prompt = self.tokens(tokens)
        start_s = time.perf_counter()
        return FirstTokenTime(tokens, max(self.stream(prompt, 1)) - start_s)

    # --- requests ----------------------------------------------------------------------------------------------------

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """The reply to a prompt, of one token.

        Raises:
            WorkerError: there is none.
        """
        response = self._post(prompt, 1, fields)
        return _object(self._read(response), self.url)

    def stream(self, prompt: Sequence[int], output_tokens: int, **fields: Any) -> Iterator[float]:
        """When the tokens of an answer come, by `time.perf_counter`; at least one. Who stops early gives it up.

        Raises:
            WorkerError: it is no stream of tokens.
        """
        response = self._post(prompt, output_tokens, {"stream": True} | fields)
        came = False
        try:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = _object(line[5:], self.url)
                if "error" in event:
                    raise WorkerError(f"{self.url}: {_message(event)}")
                if event.get("choices"):
                    came = True
                    yield time.perf_counter()
        except (OSError, HTTPException) as error:
            raise WorkerError(f"{self.url}: its stream broke off: {error!r}") from None
        finally:
            if not response.isclosed():
                response.close()
                self._connection.open.close()
        if not came:
            raise WorkerError(f"{self.url}: its stream has no tokens")

    def metric(self, name: str) -> float | None:
        """The sum of a Prometheus metric's series; None where it has none."""
        try:
            text = self._get("/metrics").decode(errors="replace")
        except WorkerError:
            return None
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
        return sum(map(float, found)) if found else None

    def _room(self, context_tokens: int) -> int:
        """How many tokens an answer to a prompt of so many may have."""
        return (self.served.longest_tokens or 1 << 20) - context_tokens

    def _post(self, prompt: Sequence[int], output_tokens: int, fields: dict[str, Any]) -> HTTPResponse:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        response = self._request("POST", "/v1/completions", json.dumps(body | fields))
        if response.status != 200:
            said = self._read(response)
            try:
                message = _message(json.loads(said))
            except ValueError:
                message = said[:200].decode(errors="replace")
            raise WorkerError(f"{self.url}/v1/completions: status {response.status}: {message}")
        return response

    def _ask(self) -> Served:
        said = _object(self._get("/v1/models"), f"{self.url}/v1/models")
        try:
            model = said["data"][0]
            name, longest = str(model["id"]), model.get("max_model_len")
        except (LookupError, TypeError, AttributeError):
            raise WorkerError(f"{self.url}/v1/models: names no model; expected an OpenAI-compatible server") from None
        try:
            text = self._get("/metrics").decode(errors="replace")
        except WorkerError:
            text = ""
        cache = re.search(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
        size = {key: int(value) for key, value in re.findall(r'(\w+)="(\d+)"', cache[1])} if cache else {}
        blocks, block = size.get("num_gpu_blocks"), size.get("block_size")
        return Served(name, longest, blocks * block if blocks and block else None)

    def _get(self, path: str) -> bytes:
        response = self._request("GET", path, None)
        text = self._read(response)
        if response.status != 200:
            raise WorkerError(
                f"{self.url}{path}: status {response.status}; expected an OpenAI-compatible server (a URL without /v1)"
            )
        return text

    def _request(self, method: str, path: str, body: str | None) -> HTTPResponse:
        kept: HTTPConnection | None = getattr(self._connection, "open", None)
        try:
            if kept is not None:
                try:
                    return self._over(kept, method, path, body)
                except (ConnectionError, HTTPException):  # the server has closed it meanwhile
                    kept.close()
            made = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
            self._connection.open = made(self._parts.netloc, timeout=self.timeout_s)
            return self._over(self._connection.open, method, path, body)
        except TimeoutError:
            raise WorkerError(f"{self.url}: no answer within {self.timeout_s:g} s") from None
        except (OSError, HTTPException) as error:
            raise WorkerError(f"{self.url}: no server answers there: {error}") from None

    def _over(self, connection: HTTPConnection, method: str, path: str, body: str | None) -> HTTPResponse:
        connection.request(method, self._parts.path + path, body, self._headers)
        return connection.getresponse()

    def _read(self, response: HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, HTTPException) as error:
            raise WorkerError(f"{self.url}: its answer broke off: {error!r}") from None

    def _together(self, ask: Callable[[list[int]], Answer], prompts: Sequence[list[int]]) -> list[Answer]:
        return list(self._threads.map(ask, prompts))


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise WorkerError(f"{where}: no JSON object but {text[:60]!r}; expected an OpenAI-compatible server")
    return said


def _message(said: Any) -> str:
    error = said.get("error", said) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _cached(reply: dict[str, Any]) -> int | None:
    try:
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError, ValueError):
        return None
