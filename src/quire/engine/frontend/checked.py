"""Sampling parameters that a gate has checked, shared by all prompts and choices of one call.

Copies share their lists: `allowed_token_ids` or `logit_bias` can be as long as the vocabulary, and
must not be copied or checked once per prompt. Knows no model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.frontend.seeds import choice_seed
from quire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class CheckedParams:
    """Sampling parameters that a model's gate has checked, good for any number of prompts.

    Long lists are read and words are tokenised once, and all prompts share them.
    """

    params: SamplingParams
    """With all that the model fills in; `max_tokens` and `seed` only if they were given."""

    def with_seed(self, seed: int) -> CheckedParams:
        """The same with another seed, from 0 to `MAX_SEED`."""
        return CheckedParams(filled(self.params, seed=seed))


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of completion `index`: a seed of its own; the prompt is scored only once."""
    if params.n == 1:
        return params
    assert params.seed is not None
    made = filled(params, n=1, seed=choice_seed(params.seed, index))
    if index == 0:
        return made
    return filled(
        made, prompt_logprobs=None, prompt_logprob_token_ids=None, prompt_logprob_start=None
    )


def filled(params: SamplingParams, **changes: Any) -> SamplingParams:
    """A copy with values that are known to be good. `replace` would check all fields again, long
    lists too, for every prompt and choice."""
    made = copy.copy(params)
    for name, value in changes.items():
        msgspec.structs.force_setattr(made, name, value)
    return made


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order given."""
    return list(dict.fromkeys(values))
