"""Token ids of a prompt that came as text: from a tokenizer at hand, or from the engine, which knows its template."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from .legs.upstream import LegFailed, Upstream, said
from .request import RequestError
from .workers import Worker

log = logging.getLogger(__name__)

ASK_AGAIN_S = 60.0  # of a worker that could not tell


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; the message is for the user."""


class PromptTokens:
    """Turns text into token ids.

    Args:
        tokenizer: a tokenizer.json, or a folder with one, for completions; conversations need the engine, as only that
            has the model's chat template. "": the engine for both.

    Raises:
        TokenizerError: it cannot be read, or the `tokenizers` package is not there.
    """

    def __init__(self, upstream: Upstream, tokenizer: str = "") -> None:
        self._upstream = upstream
        self._tokenizer = _load(tokenizer) if tokenizer else None
        self._silent: dict[tuple[str, str], float] = {}  # by worker and path: until when it is not asked

    async def of(self, path: str, fields: dict[str, Any], worker: Worker | None) -> NDArray[np.uint32] | None:
        """Token ids of a prompt; None where nobody can tell.

        Args:
            path: of the endpoint. worker: who may be asked.

        Raises:
            RequestError: the engine says what is wrong with the prompt.
        """
        prompt = fields.get("prompt")
        if self._tokenizer is not None and isinstance(prompt, str):
            return np.array(self._tokenizer.encode(prompt).ids, np.uint32)
        if worker is None:
            return None
        for where, asked in ((f"{path}/render", fields), ("/tokenize", _tokenize(fields))):
            if time.monotonic() < self._silent.get((worker.id, where), 0.0):
                continue
            ids = await self._ask(worker, where, asked)
            if ids is not None and len(ids):
                return ids
            self._silent[worker.id, where] = time.monotonic() + ASK_AGAIN_S
        return None

    async def _ask(self, worker: Worker, path: str, fields: dict[str, Any]) -> NDArray[np.uint32] | None:
        try:
            status, body = await self._upstream.pass_on("POST", worker, path, orjson.dumps(fields))
        except LegFailed as failure:
            log.warning("%s cannot be asked for tokens: %s", worker.id, failure)
            return None
        if status == 400:
            raise RequestError(f"prompt: {said(body)}")
        if status != 200:
            return None
        try:
            reply = orjson.loads(body)
            first = reply[0] if isinstance(reply, list) else reply
            return np.array(first["token_ids"] if "token_ids" in first else first["tokens"], np.uint32)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            log.warning("%s answers %s with what cannot be read: %r", worker.id, path, error)
            return None


def _tokenize(fields: dict[str, Any]) -> dict[str, Any]:
    """The body of vLLM's /tokenize for the prompt of another body."""
    wanted = ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "tools", "chat_template")
    return {name: fields[name] for name in wanted if name in fields}


def _load(tokenizer: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TokenizerError(
            "--tokenizer needs the tokenizers package: pip install 'conductor-gym[tokenizer]'"
        ) from None
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise TokenizerError(f"--tokenizer: {path}: {error}") from None
