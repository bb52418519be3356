"""Draft proposers, which guess the next tokens: their protocol, and the table of them.

The worker asks for drafts after it has sampled, and not the scheduler, because a draft model, or
heads that read the target's hidden states, must be where the tensors are; a search in the tokens so
far can be anywhere. The drafts travel in `BatchResult.draft_token_ids`. The scheduler decides how
many of them the next step verifies, and the runner samples at each of their positions. Drafts are
accepted as long as they equal the samples, so no proposer can change an output: a bad one only
costs time.
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
    """Guesses how requests continue."""

    def propose(
        self, req_ids: Sequence[str], tokens: Sequence[np.ndarray]
    ) -> Sequence[Sequence[int]]:
        """Draft tokens after the known ones of some requests.

        Called once in each step in which requests got tokens, with those requests. A request may
        have ended with these tokens, and a request that is missing here may continue later.

        Args:
            req_ids: The requests; the same id is the same request until it is aborted or ends.
            tokens: The prompt and output so far of each, as int32. Read-only, and valid until this
                call returns.

        Returns:
            Any number of drafts for each request. Drafts are dropped from the first that is not in
            the vocabulary, and beyond the context length.
        """
        ...


ProposerFactory = Callable[[EngineConfig, ModelShape], Proposer]

PROPOSERS: Final[Registry[ProposerFactory]] = Registry("draft proposer", plugins="draft_proposer")
"""Proposers by name; a `Worker` is given a name."""


class Drafting:
    """Asks a proposer, and keeps its failures from harming a step.

    Args:
        proposer: The proposer to ask.
        vocab_size: Of the model; ids beyond it are not drafts.
        max_model_len: Longest prompt plus output.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, max_model_len: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._has_failed = False

    def drafts(self, req_ids: Sequence[str], tokens: Sequence[np.ndarray]) -> dict[str, list[int]]:
        """The drafts that can be verified. There are none if the proposer raises or returns the
        wrong number of entries."""
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
        """At most `most` tokens, up to the first invalid one."""
        kept: list[int] = []
        for token in islice(drafts, max(0, most)):
            if not 0 <= token < self._vocab_size or token != int(token):
                break
            kept.append(int(token))
        return kept
