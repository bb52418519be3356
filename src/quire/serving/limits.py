"""How much one HTTP request may ask for: a table of limits, and the message that refuses more.

The size of the body is limited by `--max-body-bytes`. `n`, stop strings, banned words and biases
have limits in `quire.params`, which apply to `LLM` as well. The limits here apply to HTTP only: a
body of a few bytes can ask for a thousand times the work, and what is decoded or checked in one go
stops all streams meanwhile. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.errors import InvalidRequest
from quire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that is allowed of something, and the sentence that refuses more."""

    most: int
    rule: str
    """The rule as a sentence with `{most}`."""
    least: int = 0

    def check(self, given: int, param: str | None) -> None:
        """Refuse a count above the limit, or below the minimum.

        Raises:
            InvalidRequest: naming the limit and what was given.
        """
        if not self.least <= given <= self.most:
            rule = self.rule.format(param=param, most=self.most)
            raise InvalidRequest(f"{rule}, got {given}.", param=param)

    def check_arriving(self, so_far: int) -> None:
        """The same for a count of what has arrived, while more may come.

        Raises:
            InvalidRequest: naming the limit and what there was when it was passed.
        """
        if so_far > self.most:
            rule = self.rule.format(most=self.most)
            raise InvalidRequest(f"{rule}, got {so_far} or more.")


HEADER_BYTES: Final = Limit(
    2**15, "The request line and the headers may have at most {most} bytes in all"
)
DEPTH: Final = Limit(64, "The body may be nested at most {most} levels deep")
CONTAINERS: Final = Limit(100_000, "The body may hold at most {most} objects and arrays in all")
ENTRIES: Final = Limit(200_000, "The objects of the body may have at most {most} fields in all")
VALUES: Final = Limit(2**20, "The body may hold at most {most} values in all")
"""As many token ids as the longest contexts have."""
LABEL: Final = Limit(1024, "{param} may have at most {most} characters")
"""Of a salt, a user's name and other labels."""
REQUEST_ID: Final = Limit(
    128, "{param} must be 1 to {most} visible ASCII characters without spaces", least=1
)
METADATA: Final = Limit(16, "{param} may have at most {most} entries")
PROMPTS: Final = Limit(1024, "{param} may hold at most {most} prompts")


def completions(most: int) -> Limit:
    """Of the completions of one request, at most `--max-n-sequences`."""
    rule = "A request may ask for at most {most} completions (prompts times n; --max-n-sequences)"
    return Limit(most, rule)


INPUTS: Final = Limit(2048, "{param} must hold from 1 to {most} texts", least=1)
"""OpenAI's limit."""
TOOLS: Final = Limit(512, "{param} may hold at most {most} tools")
IDEMPOTENCY_KEY: Final = Limit(255, "{param} must have from 1 to {most} characters", least=1)
"""Stripe's limit."""
LIST_IDS: Final = Limit(2**19, "{param} may hold at most {most} ids")
"""Twice the largest vocabularies."""
COPIED: Final = Limit(
    2**22,
    "The entries of allowed_token_ids, stop_token_ids and logit_bias and the characters of stop "
    "and bad_words, times the number of completions, may be at most {most}",
)
"""Each completion is sent to the engine core separately, with its own copy of these."""
SENT_AT_ONCE: Final = Limit(
    2**20,
    "The entries of allowed_token_ids, stop_token_ids and logit_bias and the characters of stop "
    "and bad_words, times n, may be at most {most}",
)
"""All choices of a prompt are sent in one go."""
FANNED_OUT: Final = Limit(
    2**22, "The tokens of the prompts, times n, may be at most {most} where n is above 1"
)
"""Each choice has its own copy of the prompt."""
SCORED: Final = Limit(
    2**21,
    "The log-probabilities of the prompts may be at most {most} numbers in all (tokens of the "
    "prompts, times candidates, times n)",
)
"""A number takes some 70 bytes in a reply."""


def check_lists(params: SamplingParams, completions: int) -> None:
    """Refuse parameters whose lists are too long for this many completions.

    Raises:
        InvalidRequest: naming the limit and what was given.
    """
    lists = (params.allowed_token_ids, params.stop_token_ids, params.logit_bias)
    entries = sum(len(entries or ()) for entries in lists)
    characters = sum(map(len, (*params.stop_strings, *(params.bad_words or ()))))
    SENT_AT_ONCE.check((entries + characters) * params.n, None)
    COPIED.check((entries + characters) * completions, None)


def check_prompts(
    lengths: Sequence[int], n: int, logprobs: int | None, vocab_size: int, param: str = "prompt"
) -> None:
    """Refuse prompts that are too long to be copied, or scored, for each of `n` choices.

    Args:
        lengths: Tokens of each prompt.
        n: Choices of each.
        logprobs: Candidates per position of the prompt, -1 for all; `None`: no prompt logprobs.
        vocab_size: The number that -1 stands for.
        param: The field that holds the prompts.

    Raises:
        InvalidRequest: naming the limit and what was given.
    """
    total = sum(lengths) * n
    if n > 1:
        FANNED_OUT.check(total, param)
    if logprobs is not None:
        each = 1 + (vocab_size if logprobs < 0 else logprobs)
        SCORED.check(total * each, "prompt_logprobs")
