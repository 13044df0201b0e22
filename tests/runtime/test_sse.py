"""Server-sent events, however they are cut on their way, and what those of an answer say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.answer_events import AnswerEvents, Says, error_in
from runtime.sse import EventError, data_of, events


def response(pieces: list[bytes]) -> Any:
    async def iterate() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return SimpleNamespace(content=SimpleNamespace(iter_any=iterate))


@given(
    said=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["C", "Z"])), max_size=6),
    end=st.sampled_from(["\n\n", "\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
async def test_events_are_whole_however_they_are_cut(said, end, cuts):
    text = "".join(f"data: {each}{end}" for each in said).encode()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    found = [event async for event in events(response(pieces))]
    assert b"".join(found) == text
    assert [data_of(event).decode() for event in found] == said


async def test_a_stream_that_ends_within_an_event():
    with pytest.raises(EventError, match="within an event"):
        _ = [event async for event in events(response([b"data: 1\n\ndata: 2"]))]


def test_comments_and_lines():
    assert data_of(b": ping\n\n") == b"" and data_of(b"event: x\ndata: a\ndata: b\n\n") == b"a\nb"


def test_what_an_answer_says():
    answer = AnswerEvents(10.0)
    opens = b'{"choices":[{"delta":{"role":"assistant","content":""}}]}'
    assert answer.note(opens, 11.0) is Says.OTHER and answer.output_tokens == 0
    assert answer.note(b'{"choices":[{"delta":{"content":"a"}}]}', 12.0) is Says.TOKENS
    assert answer.note(b'{"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}', 12.5) is Says.TOKENS
    assert answer.output_tokens == 2 and answer.times.ttft_s == 2.0 and answer.times.intervals == [0.5]
    assert answer.note(b'{"choices":[],"usage":{"completion_tokens":7}}', 13.0) is Says.USAGE
    assert answer.output_tokens == 7 and not answer.done
    assert answer.note(b"[DONE]", 13.0) is Says.OTHER and answer.done and answer.error is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"object": "error", "message": "m"}', "m"),
        (b'{"choices": []}', None),
        (b"[1]", None),
        (b"no json", None),
    ],
)
def test_errors_in_the_forms_that_engines_have(body, message):
    found = error_in(body)
    assert (found or {}).get("message") == message
