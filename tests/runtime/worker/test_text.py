"""Text that comes token by token is the text of all tokens, and ends before a stop string."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runtime.worker.text import Detokenizer, StopStrings, Text, TextError, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@cache
def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token for every byte, and three for pairs."""
    vocabulary = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("l", "l"), ("o", "Ġ"), ("h", "e")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    return fast


@given(st.text(max_size=40))
def test_pieces_make_up_the_text(text: str) -> None:
    tokenizer = Text(byte_tokenizer())
    words = Detokenizer(tokenizer)
    pieces = [words.add(token) for token in tokenizer.tokens(text)]
    assert "".join(pieces) + words.rest() == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_half_a_character_is_told_at_the_end() -> None:
    tokenizer = Text(byte_tokenizer())
    words = Detokenizer(tokenizer)
    assert [words.add(token) for token in tokenizer.tokens("aé")[:2]] == ["a", ""]
    assert words.rest() == "\ufffd"


def test_without_a_tokenizer_a_token_is_its_number() -> None:
    words = Detokenizer(Text(None))
    assert [words.add(token) for token in (7, 12, 7)] == [" 7", " 12", " 7"]
    with pytest.raises(TextError, match="as token ids"):
        Text(None).tokens("hello")
    with pytest.raises(TextError, match="as token ids"):
        Text(None).chat_tokens([{"role": "user", "content": "hello"}])


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_a_text_ends_before_the_first_stop_string(text: str, strings: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *[cut for cut in cuts if cut < len(text)]})
    stop, told = StopStrings(strings), ""
    for start, end in pairwise(edges):
        told += stop.add(text[start:end])
        if stop.found is not None:
            break
    else:
        told += stop.rest()
    # The first to be complete ends it; of those in one piece, the one that begins first.
    ends = [text.find(string) for string in strings if string in text]
    if not ends:
        assert told == text and stop.found is None
    else:
        assert stop.found in strings
        assert text.startswith(told + str(stop.found))
        assert not any(string in told for string in strings)


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path).tokenizer is None
    byte_tokenizer().save_pretrained(tmp_path)
    text = load_tokenizer(tmp_path)
    assert text.text(text.tokens("hello")) == "hello"
    chat = [{"role": "user", "content": "hello"}]
    assert text.text(text.chat_tokens(chat)) == "<user>hello<a>"
    assert text.text(text.chat_tokens(chat, begin_answer=False)) == "<user>hello"
    with pytest.raises(TextError, match="no chat template"):
        Text(byte_tokenizer(None)).chat_tokens(chat)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
