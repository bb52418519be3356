"""Incremental detokenisation: tokens in, text out, stopped at stop strings.

Every rule is a function of the token sequence alone, so the text never depends on how tokens were
grouped into updates. That is why stop strings are searched after each token, and why, of several
stop strings, the one that is complete first counts.

Knows tokens and text, but not the request they belong to, nor how the text is delivered.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol

from quire.outputs import FinishReason
from quire.params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
"""Largest number of prompt tokens given as context to a decoder that looks at neighbouring
tokens."""
MAX_PENDING_TOKENS = 8
"""A character has at most four bytes, so after this many tokens it will not become complete any
more."""


class Spelling(Protocol):
    """What is needed of a tokenizer to write text."""

    @property
    def leading_spaces(self) -> int:
        """Spaces that it puts before a whole text."""
        ...

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out."""
        ...

    @property
    def added_ids(self) -> frozenset[int]:
        """Tokens that were added to its vocabulary."""
        ...

    def token_text(self, token_id: int) -> str | None:
        """The text of its bytes, if these are whole characters."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token, if tokens are byte strings and this one has some."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ...


class TextStream(Protocol):
    """Turns tokens into text, one by one."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """The text still held back, at the end of the output."""
        ...

    def fork(self) -> TextStream:
        """A copy that goes on by itself."""
        ...


class NullStream:
    """Gives no text: there is no tokenizer, or the request wants only ids."""

    def feed(self, token_id: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""

    def fork(self) -> NullStream:
        """Itself: it has no state."""
        return self


class ByteStream:
    """For tokenizers whose tokens are byte strings: a UTF-8 decoder that is fed each token's
    bytes."""

    __slots__ = ("_begun", "_leading_spaces", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Spelling, skip: frozenset[int], leading_spaces: int) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._leading_spaces = leading_spaces
        self._begun = b""
        # a character that is not complete

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skip:
            return ""
        # Nearly every token is whole characters, and begins where the one before has ended.
        text = None if self._begun else self._tokenizer.token_text(token_id)
        if text is None:
            text = self._decode(self._tokenizer.token_bytes(token_id) or b"", final=False)
        return self._strip(text) if self._leading_spaces and text else text

    def flush(self) -> str:
        """U+FFFD if the output ends inside a character."""
        return self._decode(b"", final=True)

    def fork(self) -> ByteStream:
        """A copy, within the same character."""
        return copy.copy(self)

    def _decode(self, more: bytes, final: bool) -> str:
        known = self._begun + more
        text, used = codecs.utf_8_decode(known, "replace", final)
        self._begun = known[used:]
        return text

    def _strip(self, text: str) -> str:
        spaces = min(self._leading_spaces, len(text) - len(text.lstrip(" ")))
        self._leading_spaces = 0 if spaces < len(text) else self._leading_spaces - spaces
        return text[spaces:]


class WindowStream:
    """For decoders that look at neighbouring tokens: decodes a short window twice and subtracts.

    The window starts with a few prompt tokens, so that the first output token gets the right
    spacing. Their text is subtracted and never shown.
    """

    def __init__(
        self,
        tokenizer: Spelling,
        skip: frozenset[int],
        prompt: Sequence[int],
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        spaced = skip or spaces_between_special_tokens
        self._joined = frozenset[int]() if spaced else tokenizer.added_ids
        self._window = self._context([token for token in prompt if token not in skip])
        self._read = len(self._window)
        self._last: int | None = None

    def feed(self, token_id: int) -> str:
        """The text that this token adds, unless it ends inside a character."""
        if token_id in self._skip:
            return ""
        neighbours, self._last = (self._last, token_id), token_id
        self._window.append(token_id)
        text = self._new_text()
        incomplete = not text or text.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._read < MAX_PENDING_TOKENS:
            return ""
        self._advance(drop=not text)
        # Without `spaces_between_special_tokens`, the space that the decoder puts between two added
        # tokens is taken out again.
        both_added = all(token in self._joined for token in neighbours)
        return text.lstrip(" ") if both_added else text

    def flush(self) -> str:
        """The text of the tokens held back."""
        text = self._new_text() if len(self._window) > self._read else ""
        self._advance(drop=not text)
        return text

    def fork(self) -> WindowStream:
        """A copy with the same window."""
        made = copy.copy(self)
        made._window = list(self._window)
        return made

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._window[: self._read], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(known) :]

    def _advance(self, drop: bool) -> None:
        """The tokens that were new become the context of the next one, which starts where a
        character does. Tokens without text give no context."""
        self._window = self._window[: self._read] if drop else self._window[self._read :]
        self._read = len(self._window)

    def _context(self, prompt: list[int]) -> list[int]:
        """The shortest suffix of the prompt that consists of whole characters."""
        for length in range(1, min(CONTEXT_TOKENS, len(prompt)) + 1):
            text = self._tokenizer.decode(prompt[-length:], skip_special_tokens=False)
            if text and REPLACEMENT not in text:
                return prompt[-length:]
        return []


def text_stream(
    tokenizer: Spelling | None, params: SamplingParams, prompt_token_ids: Sequence[int]
) -> TextStream:
    """The kind of stream that the tokenizer needs."""
    if tokenizer is None or not params.detokenize:
        return NullStream()
    skip = tokenizer.all_special_ids if params.skip_special_tokens else frozenset[int]()
    if params.shown_special_ids:
        skip = skip.difference(params.shown_special_ids)
    if tokenizer.token_bytes(0) is None:
        spaces = params.spaces_between_special_tokens
        return WindowStream(tokenizer, skip, prompt_token_ids, spaces)
    # SentencePiece puts an extra space before a whole text. It is removed only if the output is the
    # start of that text, which it is not if the prompt has any text.
    starts = tokenizer.leading_spaces > 0 and not any(
        tokenizer.token_bytes(token) for token in prompt_token_ids if token not in skip
    )
    return ByteStream(tokenizer, skip, tokenizer.leading_spaces if starts else 0)


class IncrementalDetokenizer:
    """The text of one completion, which grows token by token.

    Concatenated deltas equal the final text, which equals `Tokenizer.decode` of the tokens up to
    the stop (a prompt that ends without a space keeps SentencePiece's leading one).
    """

    # Slots, in the order in which `flow` reads them: a process that sleeps between steps finds
    # little of this in its caches.
    __slots__ = (
        "token_ids", "_stream", "_late", "_sent", "can_flow", "_text", "stop_string", "_stops",
        "_include_stop", "_min_tokens", "_searched", "_holdback",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Spelling | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.token_ids: list[int] = []
        """All tokens of the output, up to the one that completed a stop string."""
        self._text = ""
        self._late: list[str] = []
        # what `text` has more than `_text`, not joined yet
        self.stop_string: str | None = None
        """The stop string that ended the output."""
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._searched = 0
        self._sent = 0
        # Text that may turn out to be the beginning of a stop string must not be sent yet: that is
        # one character less than the longest of them.
        held = self._stops and not self._include_stop
        self._holdback = max(map(len, self._stops)) - 1 if held else 0
        self._stream = text_stream(tokenizer, params, prompt_token_ids)
        self.can_flow = not self._stops
        """Whether `flow` may be called: no stop string is to be looked for."""

    @property
    def text(self) -> str:
        """All text so far, including characters held back, cut at the stop string."""
        if self._late:
            self._text += "".join(self._late)
            self._late.clear()
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._late.clear()
        self._text = text

    def flow(self, new_token_ids: Sequence[int]) -> str:
        """`update` and then `take` of a delta, in one: for outputs that go on, without stop
        strings, of which everything so far has been taken. A token costs the same however long
        the text is.

        Returns the new text.
        """
        if len(new_token_ids) == 1:  # nearly always; what serves several costs three times as much
            (token,) = new_token_ids
            self.token_ids.append(token)
            new = self._stream.feed(token)
        else:
            self.token_ids += new_token_ids
            new = "".join([self._stream.feed(token) for token in new_token_ids])
        if new:
            self._late.append(new)
            self._sent += len(new)
        return new

    def update(
        self, new_token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> str | None:
        """Take new tokens. `finish_reason` is set if the core ended the completion with them.

        Returns the stop string that was found, if any. Tokens after the one that completes it are
        dropped. A stop token (reason `STOP`) adds no text, unless `include_stop_str_in_output`.
        """
        if self.stop_string is not None:
            return self.stop_string
        silent = finish_reason is FinishReason.STOP and not self._include_stop
        last = len(new_token_ids) - 1
        for i, token in enumerate(new_token_ids):
            self.token_ids.append(token)
            if not (silent and i == last) and self._grow(self._stream.feed(token)):
                return self.stop_string
        if finish_reason is not None:
            self._grow(self._stream.flush())
        return self.stop_string

    def fork(self) -> IncrementalDetokenizer:
        """A copy: one output so far that goes on in two ways."""
        made = copy.copy(self)
        made.token_ids = list(self.token_ids)
        made._late = list(self._late)
        made._stream = self._stream.fork()
        return made

    def take(self, finished: bool, delta: bool) -> str:
        """The text to deliver: all of it or, with `delta`, what no earlier `delta` call has
        returned.

        Until the end, as many characters are held back as a stop string could still cut off.
        """
        if finished and self.stop_string is None:
            self.text += self._stream.flush()
        end = len(self.text) if finished else max(0, len(self.text) - self._holdback)
        if not delta:
            return self.text[:end]
        start, self._sent = self._sent, max(self._sent, end)
        return self.text[start:end]

    def _grow(self, new: str) -> bool:
        """Append text and look for stop strings that end in it."""
        self.text += new
        if not self._stops:
            return False
        if len(self.token_ids) > self._min_tokens and new:
            self._cut_at_stop()
        self._searched = len(self.text)
        return self.stop_string is not None

    def _cut_at_stop(self) -> None:
        """Of the stop strings found, cut at the one that is complete first; among equals, at the
        longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # A stop string that ends in the new text begins at most this far before it.
            start = self.text.find(stop, max(0, self._searched - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.stop_string = best
            self.text = self.text[: end if self._include_stop else start]
