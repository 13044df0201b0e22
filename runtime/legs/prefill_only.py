"""The body of a request of which only the prefill is wanted."""

from __future__ import annotations

from typing import Any

_OF_THE_ANSWER = ("stream", "stream_options", "stop", "max_completion_tokens", "n", "best_of")


def prefill_only(fields: dict[str, Any]) -> dict[str, Any]:
    """It makes one token, which nobody reads, and that token does not end it: KV is kept only for what goes on."""
    kept = {name: value for name, value in fields.items() if name not in _OF_THE_ANSWER}
    return kept | {"stream": False, "max_tokens": 1, "min_tokens": 1}
