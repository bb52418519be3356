"""The door to llguidance: a model's vocabulary, and grammars compiled for it.

Compiling takes milliseconds, under limits of llguidance that count work and not time. The library
lets go of the interpreter lock while it compiles and while it makes masks. A compiled grammar
cannot leave its process: llguidance has no form in which to save it. So whoever checks a grammar in
one process hands on its text, and it is compiled once more where it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import takewhile
from typing import Final

import llguidance
import numpy as np

from quire.errors import InvalidRequest
from quire.structured.params import Grammar, StructuredOutputsParams
from quire.structured.settle import settle
from quire.utils.host import available_cores

LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Of llguidance, for compiling and for each mask. The default for lexer states would let one
request take half a gigabyte; the other values are its defaults. Its verbose errors hold the grammar
and the output so far."""
_INSIDE: Final = r'[^"\\\x00-\x1F\x7F]'
"""What a string of JSON may hold as it is."""
SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_INSIDE}{{1,{most}}}" for most in (10, 40, 128)),
    f"{_INSIDE}+",
)
"""Sets of tokens that a mask takes as a whole where the grammar allows all of their texts. They
change no mask. Where a string has a longest length, no mask can be used twice, and a token in none
of the bounded sets is walked each time: llguidance's own sets leave out those of more than 30
bytes, which are few and take as long as all the rest."""
MAX_MESSAGE: Final = 400
"""Characters of llguidance's message that a caller gets."""


class Vocabulary:
    """A model's tokens, as llguidance needs them.

    Args:
        tokenizer: The text of `tokenizer.json`.
        vocab_size: Width of the logits; rows beyond the tokenizer's tokens are never allowed.
        eos_token_ids: What may end an output, at least one.

    Raises:
        InvalidRequest: this kind of tokenizer does not spell bytes token by token.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        """Words of a mask: 32 tokens each."""
        self.eos_token_ids = list(eos_token_ids)
        if not self.eos_token_ids:
            raise _refused("this model has no end-of-sequence token, which ends such an output")
        try:
            self.tokens = llguidance.LLTokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=self.eos_token_ids, slices=list(SLICES)
            )
        except Exception:
            raise _refused("this model's tokenizer does not spell bytes token by token") from None
        self.limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        added = json.loads(tokenizer).get("added_tokens") or ()
        self.special = {
            t["content"]: t["id"]
            for t in added
            if t["id"] < vocab_size and self.tokens.is_special_token(t["id"])
        }
        """Tokens that llguidance takes for special ones, text to id: all that look like tags, even
        if they are ordinary to the tokenizer. They do not match the letters of their text."""

    def settle(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar that a request asks for; see `settle.settle`.

        Raises:
            InvalidRequest: it uses what cannot be enforced, or is malformed.
        """
        return settle(params, self.special)

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the beginning of a grammar.

        Raises:
            InvalidRequest: it is malformed, cannot be satisfied, or exceeds a limit.
        """
        matcher = llguidance.LLMatcher(self.tokens, grammar.text, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise _refused(_said(matcher, grammar.kind), grammar.kind)
        return matcher

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar and make its first mask, which is where some exceed their limits.

        Raises:
            InvalidRequest: see `compile`; or no output is possible.
        """
        matcher = self.compile(grammar)
        mask = matcher.compute_bitmask()
        if forced := matcher.compute_ff_tokens():
            matcher.consume_token(forced[0])
        if matcher.is_error():
            raise _refused(_said(matcher, grammar.kind), grammar.kind)
        if not any(mask):
            raise _refused("no output can satisfy it", grammar.kind)

    def make_masks(self, matchers: Sequence[llguidance.LLMatcher]) -> np.ndarray:
        """The next masks of some matchers, made on several cores: int32
        `[len(matchers), num_words]`. One that failed is in its error state."""
        masks = np.empty((len(matchers), self.num_words), dtype=np.int32)
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        size = masks.itemsize * self.num_words
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, size, len(matchers))
        return masks

    def begin_masks(self, matchers: Sequence[llguidance.LLMatcher]) -> Future[np.ndarray]:
        """As `make_masks`, on a thread of its own. Nobody may use the matchers meanwhile."""
        return self._helper.submit(self.make_masks, matchers)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(max(1, min(8, available_cores())))

    @cached_property
    def _helper(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")


_QUOTE: Final = re.compile(r"\s*\d+ \| ")
"""A line of the grammar in a message."""
_SAYS: Final = {"NoExtensionBias": "it leads to itself and to nothing else"}
"""Messages that say too little."""


def _said(matcher: llguidance.LLMatcher, kind: str) -> str:
    """What llguidance says is wrong, in one line; its messages quote the grammar and nothing
    else. The caller knows the grammar only where the request has one."""
    lines = matcher.get_error().split("<non-verbose/>")[0].splitlines()
    if kind != "grammar":
        lines = list(takewhile(lambda line: not _QUOTE.match(line), lines))
    for word, meaning in _SAYS.items():
        lines = [line.replace(word, meaning) for line in lines]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def _refused(text: str, kind: str | None = None) -> InvalidRequest:
    param = "structured_outputs" if kind is None else f"structured_outputs.{kind}"
    return InvalidRequest(f"{param}: {text}", param=param)
