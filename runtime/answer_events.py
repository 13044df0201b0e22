"""What the events of a streamed completion say, in the form OpenAI gave them: tokens, usage, an error, the end."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import orjson

from .sse import DONE
from .token_times import TokenTimes


class Says(Enum):
    """What an event is about."""

    TOKENS = 1
    USAGE = 2  # and nothing else
    OTHER = 3


class AnswerEvents:
    """Takes down the events of one answer.

    Attributes:
        times: when its tokens came. done: whether it came to its end. error: what went wrong, where an event says so.
    """

    def __init__(self, arrival_s: float) -> None:
        self.times = TokenTimes(arrival_s)
        self.done = False
        self.error: dict[str, Any] | None = None
        self._counted: int | None = None

    @property
    def output_tokens(self) -> int:
        """As the usage says, else the number of events that had any."""
        if self._counted is not None:
            return self._counted
        return 0 if math.isnan(self.times.first_s) else len(self.times.intervals) + 1

    def note(self, data: bytes, at_s: float) -> Says:
        """Take down an event."""
        if data == DONE:
            self.done = True
            return Says.OTHER
        said = _object(data)
        self.error = error_of(said) or self.error
        choices, usage = said.get("choices"), said.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._counted = usage["completion_tokens"]
        if not isinstance(choices, list) or not choices:
            return Says.USAGE if isinstance(usage, dict) else Says.OTHER
        if _opens(choices[0]):
            return Says.OTHER
        self.times.token(at_s)
        return Says.TOKENS


def error_in(data: bytes) -> dict[str, Any] | None:
    """The error that a body or an event is; None where it is none."""
    return error_of(_object(data))


def error_of(said: dict[str, Any]) -> dict[str, Any] | None:
    """The error in an answer: OpenAI's form, or the flat one that engines had before."""
    error = said.get("error")
    if error is None:
        return said if said.get("object") == "error" else None
    return error if isinstance(error, dict) else {"message": str(error)}


def _object(data: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _opens(choice: Any) -> bool:
    """Whether this opens a conversation's answer, before any token of it."""
    delta = choice.get("delta") if isinstance(choice, dict) else None
    return isinstance(delta, dict) and "role" in delta and not delta.get("content") and not choice.get("finish_reason")
