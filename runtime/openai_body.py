"""What an inference request asks for: model, prompt, and how it is to be answered, out of its JSON body.

Known paths: completions, chat completions, responses and embeddings as OpenAI has them, messages as Anthropic has
them, `/inference/v1/generate` of vLLM (tokens in and out), `/generate` of SGLang. Token ids are taken as they are.
Text is not tokenized here: its UTF-8 bytes, cut in groups of four and read as little-endian uint32, stand for tokens.
Equal beginnings of texts have equal beginnings of such pseudo-tokens, and four bytes to a token is about right for the
length. `Body.text` says which of the two it is; they must never share a namespace.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from envs.kernel.compile import entry_point

from .kernel.json_integers import scan_token_ids
from .request import RequestError

BYTES_PER_TOKEN = 4  # of text, where there is no tokenizer
IMAGE_TOKENS = 256  # that an image (or other non-text part) stands for
_NOTHING = np.zeros(0, np.uint32)
_STAND_IN = 1 << 62 | secrets.randbits(62)


@dataclass(slots=True)
class Body:
    """What a body asks for.

    Args:
        model: its name; "" where the path does not ask for one.
        tokens: uint32[n], the (first) prompt; empty where only `input_tokens` is known.
        input_tokens: length of the prompt.
        text: whether `tokens` are pseudo-tokens.
        stream: whether the answer is to come as server-sent events.
        max_tokens: the most that may be generated; None where it is left to the engine.
        cache_salt, user: as given; "" where not.
        fields: all of it; token ids as an array.
    """

    model: str
    tokens: NDArray[np.uint32]
    input_tokens: int
    text: bool
    stream: bool = False
    max_tokens: int | None = None
    cache_salt: str = ""
    user: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


def is_inference(path: str) -> bool:
    """Whether a request on this path has a prompt; all others can go to any worker."""
    return _form(path) is not None


def parse(path: str, data: bytes) -> Body:
    """What the body of a POST to `path` asks for.

    Raises:
        RequestError: no JSON object, or a field that is missing or not what it should be; the message names the field.
    """
    form = _form(path)
    if form is None:
        raise RequestError(f"path: {path!r} takes no prompt")
    prompt, ids_in, needs_model = form
    fields = _read(data, ids_in)
    model = fields.get("model")
    if model is None and not needs_model:
        model = ""
    elif type(model) is not str or not model:
        raise RequestError(f"model: expected the name of a model, found {_kind(model)}")
    tokens, text = prompt(fields, data)
    stream = fields.get("stream")
    if stream is not None and type(stream) is not bool:
        raise RequestError(f"stream: expected true or false, found {_kind(stream)}")
    return Body(
        model=model,
        tokens=tokens,
        input_tokens=len(tokens) or max(1, len(data) // BYTES_PER_TOKEN),
        text=text,
        stream=bool(stream),
        max_tokens=_max_tokens(fields),
        cache_salt=_string(fields, "cache_salt"),
        user=_string(fields, "user"),
        fields=fields,
    )


def pseudo_tokens(text: bytes) -> NDArray[np.uint32]:
    """The text's bytes in groups of four, little-endian, the last filled up with zeros."""
    rest = -len(text) % BYTES_PER_TOKEN
    return np.frombuffer(text + bytes(rest) if rest else text, "<u4")


_ALSO_SAID = ("reasoning_content", "tool_calls", "tool_call_id", "name", "arguments", "output")
Prompt = tuple[NDArray[np.uint32], bool]  # tokens, and whether they are pseudo-tokens


def _completion(fields: dict[str, Any], data: bytes) -> Prompt:
    if fields.get("prompt") is None and fields.get("prompt_embeds") is not None:
        return _NOTHING, True
    return _prompt(fields, "prompt")


def _embedding(fields: dict[str, Any], data: bytes) -> Prompt:
    if fields.get("input") is None and fields.get("messages") is not None:
        return _chat(fields, data)
    return _prompt(fields, "input")


def _generate(fields: dict[str, Any], data: bytes) -> Prompt:
    return _prompt(fields, "token_ids")


def _sglang(fields: dict[str, Any], data: bytes) -> Prompt:
    if fields.get("input_embeds") is not None:
        return _NOTHING, True
    return _prompt(fields, "text" if fields.get("input_ids") is None else "input_ids")


def _chat(fields: dict[str, Any], data: bytes) -> Prompt:
    messages = fields.get("messages")
    if type(messages) is not list or not messages:
        raise RequestError(f"messages: expected a list with at least one message, found {_kind(messages)}")
    return pseudo_tokens(_conversation(fields, "messages", messages)), True


def _responses(fields: dict[str, Any], data: bytes) -> Prompt:
    given = fields.get("input")
    if type(given) is str:
        given = [{"role": "user", "content": given}]
    if type(given) is not list or not given:
        raise RequestError(f"input: expected a string or a list with at least one item, found {_kind(given)}")
    return pseudo_tokens(_conversation(fields, "input", given)), True


# how the prompt is read; the field that may be an array of token ids; whether a model must be named
Form = tuple[Callable[[dict[str, Any], bytes], Prompt], str, bool]
_FORMS: dict[str, Form] = {
    "/v1/completions": (_completion, "prompt", True),
    "/v1/chat/completions": (_chat, "", True),
    "/v1/responses": (_responses, "", True),
    "/v1/embeddings": (_embedding, "input", True),
    "/v1/messages": (_chat, "", True),
    "/inference/v1/generate": (_generate, "token_ids", False),
    "/generate": (_sglang, "input_ids", False),
}

_ARRAYS = {name: re.compile(rb'"%b"\s*:\s*\[' % name.encode()) for _, name, _ in _FORMS.values() if name}


def _form(path: str) -> Form | None:
    path = path.partition("?")[0].rstrip("/")
    return _FORMS.get(path) or _FORMS.get(path[max(path.rfind("/v1/"), 0) :])  # gateways put prefixes before /v1


def _read(data: bytes, ids_in: str) -> dict[str, Any]:
    """The fields of a body; token ids in the field `ids_in` as uint32[n].

    A Python object for each id would take most of the time that a request spends here. So they are read by themselves,
    and in the JSON a number that nobody can guess stands for their array. Where it does not come back as the field's
    value, the array was something else (part of a text, say), and all is read as it is.
    """
    try:
        array = _ARRAYS[ids_in].search(data) if ids_in else None
        if array is not None:
            start = array.end() - 1
            ids = np.empty(
                len(data) - start >> 1, np.uint32
            )  # more than there can be; what is not written is not there
            count, stop = _scan_token_ids()(np.frombuffer(data, np.uint8), start, ids)
            if count > 0:
                fields = orjson.loads(b"%b%d%b" % (data[:start], _STAND_IN, data[stop:]))
                if type(fields) is dict and fields.get(ids_in) == _STAND_IN:
                    fields[ids_in] = ids[:count]
                    return fields
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if type(fields) is not dict:
        raise RequestError(f"the body must be a JSON object, found {_kind(fields)}")
    return fields


@cache
def _scan_token_ids() -> Callable[..., tuple[int, int]]:
    return entry_point(scan_token_ids, np.frombuffer(b"[]", np.uint8), 0, _NOTHING)


def _prompt(fields: dict[str, Any], name: str) -> Prompt:
    """A string, token ids, or a list of either; of a list the first stands for all, as they share an engine's step."""
    given = fields.get(name)
    if type(given) is np.ndarray:
        return given, False
    if type(given) is list and given and type(given[0]) in (str, list):
        given = given[0]
    if type(given) is str:
        return pseudo_tokens(_utf8(given, name)), True
    if type(given) is not list or not given:
        raise RequestError(f"{name}: expected a string, token ids or a list of these, found {_kind(given)}")
    try:
        return np.frombuffer(struct.pack(f"<{len(given)}I", *given), "<u4"), False
    except struct.error:
        raise RequestError(f"{name}: expected token ids, integers from 0 to 2**32 - 1") from None


def _conversation(fields: dict[str, Any], name: str, messages: list[Any]) -> bytes:
    """A conversation in the order chat templates have it: tools, what the system is told, the messages."""
    parts: list[bytes] = []
    if fields.get("tools"):
        parts += b"tools\n", _dumped(fields["tools"], "tools"), b"\n"
    for key in ("system", "instructions"):
        if fields.get(key):
            parts += b"system\n", *_content(fields[key], key), b"\n"
    for i, message in enumerate(messages):
        where = f"{name}.{i}"
        if type(message) is not dict:
            raise RequestError(f"{where}: expected an object, found {_kind(message)}")
        role = message.get("role", "")
        if type(role) is not str:
            raise RequestError(f"{where}.role: expected a string, found {_kind(role)}")
        parts += _utf8(role, f"{where}.role"), b"\n", *_content(message.get("content"), f"{where}.content")
        for key in _ALSO_SAID:
            if message.get(key) is not None:
                parts += key.encode(), _dumped(message[key], f"{where}.{key}")
        parts.append(b"\n")
    return b"".join(parts)


def _content(content: Any, where: str) -> list[bytes]:
    if type(content) is str:
        return [_utf8(content, where)]
    if content is None:
        return []
    if type(content) is not list:
        raise RequestError(f"{where}: expected a string or a list of parts, found {_kind(content)}")
    found: list[bytes] = []
    for i, part in enumerate(content):
        text = part.get("text") if type(part) is dict else part
        if type(text) is str:
            found.append(_utf8(text, f"{where}.{i}"))
        elif type(part) is dict:
            found.append(_thing(part, f"{where}.{i}"))
        else:
            raise RequestError(f"{where}.{i}: expected a string or an object, found {_kind(part)}")
    return found


def _thing(part: dict[str, Any], where: str) -> bytes:
    """An image or the like: as long as one, and the same only where it is the same."""
    digest = hashlib.blake2b(_dumped(part, where), digest_size=16).digest()
    return digest * (IMAGE_TOKENS * BYTES_PER_TOKEN // len(digest))


def _dumped(value: Any, where: str) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # reading goes deeper than writing
        raise RequestError(f"{where}: nested too deeply") from None


def _max_tokens(fields: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"):
        for place in (fields, fields.get("sampling_params")):
            value = place.get(key) if type(place) is dict else None
            if value is None:
                continue
            if type(value) is not int or value < 0:
                raise RequestError(f"{key}: expected a number of tokens, found {_kind(value)}")
            return value
    return None


def _string(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if type(value) is not str:
        raise RequestError(f"{name}: expected a string, found {_kind(value)}")
    return value


def _utf8(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{where}: holds half of a surrogate pair, which is no text") from None


def _kind(value: Any) -> str:
    """A few words on what was found, short whatever it is."""
    if value is None:
        return "nothing"
    if type(value) is str:
        return repr(value if len(value) <= 40 else f"{value[:40]}…")
    if type(value) in (int, float, bool):
        return orjson.dumps(value).decode()
    return "an object" if type(value) is dict else "a list" if value else "an empty list"
