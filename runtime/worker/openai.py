"""The bodies of OpenAI's API as vLLM takes and gives them, as far as a prefill or a decode worker needs them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from .engine import Generation, Handover, Holder, Pooled

DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API; a chat goes on to the end of the context


class Refusal(Exception):
    """A request that is answered with an error. `param`: the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class PrefixHolder(msgspec.Struct):
    host: str
    port: int


class KvTransferParams(msgspec.Struct):
    """As vLLM's NixlConnector has them; `prefix_holder` and `fetch_prefix` are our own (docs/workers.md)."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int | list[int]] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None
    prefix_holder: PrefixHolder | None = None
    fetch_prefix: bool | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields of both kinds of completion. Fields not named are ignored, as vLLM does."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: KvTransferParams | None = None
    n: int | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatRequest(CommonRequest, kw_only=True):
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    logprobs: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


def prompt_of(request: CompletionRequest) -> str | list[int]:
    """The one prompt of a completion: a text or token ids.

    Raises:
        Refusal: there are several, or none.
    """
    prompt: Any = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Refusal("one prompt to a request is supported", "prompt")
        prompt = prompt[0]
    if not isinstance(prompt, str) and not all(type(token) is int for token in prompt):
        raise Refusal("expected a text or a list of token ids", "prompt")
    if not prompt:
        raise Refusal("the prompt is empty", "prompt")
    found: str | list[int] = prompt
    return found


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker can take. `context`: most tokens of a sequence; the device's blocks can hold them. `pulls`,
    `hands_over`: what its role lets it do with KV. `pool`: whether it has one."""

    context: int
    vocabulary: int
    block_tokens: int
    pulls: bool
    hands_over: bool
    pool: bool = False


def generation_of(request: CommonRequest, prompt: list[int], limits: Limits) -> Generation:
    """What a body asks of the engine.

    Raises:
        Refusal: a value that cannot be, or that this worker does not do.
    """
    wrong = [token for token in prompt if not 0 <= token < limits.vocabulary]
    if wrong:
        raise Refusal(f"token id {wrong[0]} is out of the vocabulary of {limits.vocabulary}", "prompt")
    room = limits.context - len(prompt)
    if room < 1:
        raise Refusal(f"the prompt has {len(prompt)} tokens, the context is {limits.context} with the answer", "prompt")
    for name in ("n", "best_of"):
        if getattr(request, name, None) not in (None, 1):
            raise Refusal("one choice to a request is supported", name)
    for name in ("logprobs", "echo", "suffix"):
        if getattr(request, name, None) not in (None, False, ""):
            raise Refusal("is not supported", name)
    given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    default = DEFAULT_MAX_TOKENS if isinstance(request, CompletionRequest) else room
    max_tokens = min(default, room) if given is None else given
    if not 1 <= max_tokens <= room:
        raise Refusal(f"expected 1 .. {room} (the context less the prompt), found {max_tokens}", "max_tokens")
    checks = (
        ("temperature", request.temperature, 1.0, 0.0, 100.0),
        ("top_p", request.top_p, 1.0, 1e-9, 1.0),
        ("top_k", request.top_k, 0, -1, limits.vocabulary),
        ("min_tokens", request.min_tokens, 0, 0, max_tokens),
    )
    values: dict[str, Any] = {}
    for name, value, default_value, low, high in checks:
        values[name] = default_value if value is None else value
        if not low <= values[name] <= high:
            raise Refusal(f"expected {low:g} .. {high:g}, found {value}", name)
    if request.seed is not None and not -(1 << 63) <= request.seed < 1 << 63:
        raise Refusal("expected an integer of 64 bits", "seed")
    stop_token_ids = frozenset(request.stop_token_ids or ())
    if any(not 0 <= token < limits.vocabulary for token in stop_token_ids):
        raise Refusal(f"expected token ids of the vocabulary of {limits.vocabulary}", "stop_token_ids")
    hand_over, origin = _transfer(request.kv_transfer_params or KvTransferParams(), len(prompt), limits)
    return Generation(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=values["temperature"],
        top_k=max(values["top_k"], 0),
        top_p=values["top_p"],
        seed=request.seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=values["min_tokens"],
        cache_salt=request.cache_salt or "",
        hand_over=hand_over,
        origin=origin,
    )


def stop_strings(request: CommonRequest) -> list[str]:
    """The strings that end the answer; empty ones end nothing."""
    given = request.stop
    return [string for string in ([given] if isinstance(given, str) else given or []) if string]


def _transfer(
    params: KvTransferParams, prompt_tokens: int, limits: Limits
) -> tuple[bool, Handover | Holder | Pooled | None]:
    where = "kv_transfer_params"
    hand_over = bool(params.do_remote_decode)
    if hand_over and params.do_remote_prefill:
        raise Refusal("do_remote_decode and do_remote_prefill exclude each other", where)
    if hand_over and not limits.hands_over:
        raise Refusal("do_remote_decode: this worker's role is decode", where)
    if params.do_remote_prefill:
        if not limits.pulls:
            raise Refusal("do_remote_prefill: this worker's role is prefill", where)
        return False, _handover(params, prompt_tokens, limits)
    if params.prefix_holder is not None:
        return hand_over, Holder(params.prefix_holder.host, _port(params.prefix_holder.port, f"{where}.prefix_holder"))
    if params.fetch_prefix and not limits.pool:
        raise Refusal("fetch_prefix: this worker has no pool (--store)", where)
    if limits.pool and (params.fetch_prefix or not limits.hands_over):
        return hand_over, Pooled(replicate=bool(params.fetch_prefix))
    return hand_over, None


def _handover(params: KvTransferParams, prompt_tokens: int, limits: Limits) -> Handover:
    where = "kv_transfer_params"
    engine_id, request_id, host = params.remote_engine_id, params.remote_request_id, params.remote_host
    ids: Any = params.remote_block_ids
    if not (engine_id and request_id and host and ids and params.remote_port):
        names = "remote_engine_id, remote_request_id, remote_block_ids, remote_host and remote_port"
        raise Refusal(f"do_remote_prefill needs {names}", where)
    if isinstance(ids[0], list):  # vLLM has a list for each group of layers; here they are one
        ids = ids[0] if len(ids) == 1 else None
    if ids is None or not all(type(each) is int for each in ids):
        raise Refusal("remote_block_ids: expected the blocks of one group of layers", where)
    blocks = -(-prompt_tokens // limits.block_tokens)
    tokens = prompt_tokens if params.remote_num_tokens is None else params.remote_num_tokens
    if len(ids) < blocks or tokens < prompt_tokens:
        found = f"{tokens} tokens in {len(ids)} blocks were left"
        raise Refusal(f"the prompt has {prompt_tokens} tokens, {blocks} blocks; {found}", where)
    port = _port(params.remote_port, f"{where}.remote_port")
    return Handover(host, port, engine_id, request_id, ids[:blocks])


def _port(port: int, where: str) -> int:
    if not 0 < port < 1 << 16:
        raise Refusal(f"expected a port, found {port}", where)
    return port


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form, with vLLM's names of types."""
    names = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 503: "ServiceUnavailableError"}
    kind = names.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(slots=True)
class Answer:
    """The bodies of one answer, whole or in chunks."""

    id: str
    model: str
    chat: bool
    prompt: list[int]
    token_ids: bool
    created: int

    @staticmethod
    def begin(request_id: str, model: str, request: CommonRequest, prompt: list[int]) -> Answer:
        chat = isinstance(request, ChatRequest)
        full_id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        return Answer(full_id, model, chat, prompt, bool(request.return_token_ids), int(time.time()))

    def whole(
        self,
        text: str,
        tokens: list[int],
        finished: str,
        stop_reason: int | str | None,
        usage: dict[str, Any],
        transfer: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """The body that is not streamed."""
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finished, "stop_reason": stop_reason}
        body = self._body("chat.completion" if self.chat else "text_completion", choice)
        if self.token_ids:
            choice["token_ids"] = tokens
            (body if self.chat else choice)["prompt_token_ids"] = self.prompt
        return body | {"usage": usage, "kv_transfer_params": transfer}

    def chunk(
        self, text: str, tokens: list[int], finished: str, stop_reason: int | str | None, first: bool
    ) -> dict[str, Any]:
        """A chunk of a stream."""
        said: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        if self.chat and first:
            said["delta"]["role"] = "assistant"
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finished or None, "stop_reason": stop_reason}
        body = self._body("chat.completion.chunk" if self.chat else "text_completion", choice)
        if self.token_ids:
            choice["token_ids"] = tokens
            if first:
                (body if self.chat else choice)["prompt_token_ids"] = self.prompt
        return body

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream whose usage was asked for."""
        return self._body("chat.completion.chunk" if self.chat else "text_completion") | {"usage": usage}

    def _body(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`usage` of an answer. `cached_tokens`: of the prompt, not computed here."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
