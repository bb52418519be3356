"""Who guesses the next tokens: what a draft proposer is, and the table of them.

The worker asks after it has sampled, not the scheduler: a draft model, or heads that read the
target's hidden states, must be where the tensors are, and a search in the tokens so far can be
anywhere. What is proposed travels in `BatchResult.draft_token_ids`, the scheduler decides how much
of it the next step verifies, and the runner samples at each of these positions. A draft is accepted
while it equals the sample, so no proposer can change an output: a bad one only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol

import numpy as np

from quire.config import EngineConfig, ModelShape
from quire.logger import get_logger
from quire.registry import Registry
from quire.utils.signals import pass_on_signals

logger = get_logger(__name__)


class Proposer(Protocol):
    """Guesses how requests go on."""

    def propose(
        self, req_ids: Sequence[str], tokens: Sequence[np.ndarray]
    ) -> Sequence[Sequence[int]]:
        """Draft tokens after the known ones of some requests.

        Called once in each step in which requests got tokens, with those requests. They may have
        ended with these tokens, and one that is not named may go on later.

        Args:
            req_ids: The requests; the same id is the same request until it is aborted or ends.
            tokens: Of each, prompt and output so far: int32, not to be written to, and valid until
                this call returns.

        Returns:
            Of each request, any number of drafts. From the first that is no token of the
            vocabulary, and beyond the context, they are left out.
        """
        ...


ProposerFactory = Callable[[EngineConfig, ModelShape], Proposer]

PROPOSERS: Final[Registry[ProposerFactory]] = Registry("draft proposer", plugins="draft_proposer")
"""By name; a `Worker` is told which one."""


class Drafting:
    """Asks a proposer, and lets nothing it does harm a step.

    Args:
        proposer: Who guesses.
        vocab_size: Of the model; other ids are no drafts.
        max_model_len: Longest prompt plus output.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, max_model_len: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._has_failed = False

    def drafts(self, req_ids: Sequence[str], tokens: Sequence[np.ndarray]) -> dict[str, list[int]]:
        """What can be verified of a proposal; nothing if the proposer raises, or answers for
        another number of requests."""
        try:
            proposed = self._proposer.propose(req_ids, tokens)
            found = {
                req_id: self._usable(drafts, self._max_model_len - len(known) - 1)
                for req_id, known, drafts in zip(req_ids, tokens, proposed, strict=True)
            }
        except Exception as error:
            pass_on_signals(error)
            if not self._has_failed:  # once: it may raise in every step
                logger.error("the draft proposer failed; going on without drafts", exc_info=error)
            self._has_failed = True
            return {}
        return {req_id: drafts for req_id, drafts in found.items() if drafts}

    def _usable(self, drafts: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens, up to the first that is none."""
        kept: list[int] = []
        for token in islice(drafts, max(0, most)):
            if not 0 <= token < self._vocab_size or token != int(token):
                break
            kept.append(int(token))
        return kept
