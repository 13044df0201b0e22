"""Text to token ids and back. Without a tokenizer a token's text is its number, with a space before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

_INCOMPLETE = "\ufffd"


class TextError(ValueError):
    """Text that cannot be made into tokens; the message says why."""


class Text:
    """The tokenizer of a model folder; `Text(None)` where there is none."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text. `special`: with those that begin a prompt.

        Raises:
            TextError: there is no tokenizer.
        """
        return list(self._needed().encode(text, add_special_tokens=special))

    def chat_tokens(self, messages: list[Any], begin_answer: bool = True) -> list[int]:
        """Token ids of a conversation by the model's chat template.

        Raises:
            TextError: there is no template, or it does not take these messages.
        """
        tokenizer = self._needed()
        if not tokenizer.chat_template:
            raise TextError("the model has no chat template")
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin_answer)
        except Exception as error:  # whatever a template raises
            raise TextError(f"messages: the chat template refuses them: {error}") from None
        return self.tokens(text, special=False)

    def text(self, tokens: list[int]) -> str:
        """The text of token ids; tokens that are no text are left out."""
        if self.tokenizer is None:
            return "".join(f" {token}" for token in tokens)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _needed(self) -> Any:
        if self.tokenizer is None:
            raise TextError("this model has no tokenizer: give the prompt as token ids to /v1/completions")
        return self.tokenizer


class Detokenizer:
    """The text of tokens that come one by one. A character is told when all its tokens are there."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._context = 0  # tokens before this one are not looked at again
        self._told = 0  # tokens whose text has been told

    def add(self, token: int) -> str:
        """What a token adds to the text."""
        self._tokens.append(token)
        text = self._new()
        if text.endswith(_INCOMPLETE):
            return ""
        # The tokens told last stay as context: what a token's text is (a space before it) may depend on them.
        self._context, self._told = self._told, len(self._tokens)
        return text

    def rest(self) -> str:
        """What is left of an incomplete character."""
        return self._new()

    def _new(self) -> str:
        before = self._text.text(self._tokens[self._context : self._told])
        return self._text.text(self._tokens[self._context :])[len(before) :]


class StopStrings:
    """Ends a text before the first of some strings in it. What may be the beginning of one is held back."""

    def __init__(self, strings: list[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What can be told now. `found` is the string that ended the text."""
        held = self._held + text
        places = [(held.find(string), string) for string in self._strings if string in held]
        if places:
            at, self.found = min(places)
            self._held = ""
            return held[:at]
        longest = max((len(string) for string in self._strings), default=0)
        keep = next(
            (n for n in range(min(longest - 1, len(held)), 0, -1) if self._may_begin(held[-n:])),
            0,
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """What is held back when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(string.startswith(text) for string in self._strings)


def load_tokenizer(folder: Path) -> Text:
    """The tokenizer of a model folder, if it has one.

    Raises:
        TextError: it has one that cannot be read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return Text(None)
    try:
        return Text(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise TextError(f"{folder}: {str(error).splitlines()[0]}") from None
