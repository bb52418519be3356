"""`logprob_token_ids`: log-probabilities of the tokens that a request names."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import InvalidRequest
from quire.kernels.dispatch import ops
from quire.params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata

VOCAB = 151_936


def row_of(**fields: Any) -> RequestSampling:
    params = SamplingParams(**{"temperature": 0.0, "seed": 3} | fields)
    return RequestSampling.from_params(params, [1, 2, 3], VOCAB)


def sample(requests: list[RequestSampling], logits: torch.Tensor) -> Any:
    outputs = [np.arange(10, dtype=np.int32)] * len(requests)
    return Sampler()(logits.clone(), SamplingMetadata.build(requests, outputs))


@pytest.mark.parametrize("seed", range(3))
def test_named_tokens_have_the_models_own_log_probabilities(seed: int) -> None:
    """Whatever is done to the logits before a token is picked, with all other rows around it."""
    rng = random.Random(seed)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    expected = ops.log_softmax(logits.clone())
    named = [rng.sample(range(VOCAB), n) for n in (1, 5, MAX_LOGPROB_TOKEN_IDS)]
    requests = [
        row_of(logprob_token_ids=named[0]),
        row_of(logprob_token_ids=named[1], logprobs=20, temperature=1.3, top_k=50),
        row_of(logprob_token_ids=named[2], repetition_penalty=1.7, frequency_penalty=0.5),
        row_of(logprobs=3),
        row_of(),
        row_of(logprob_token_ids=named[1], allowed_token_ids=[7, 8], logit_bias={7: 50}),
    ]
    together = sample(requests, logits)
    for row, ids in ((0, named[0]), (1, named[1]), (2, named[2]), (5, named[1])):
        found = together.logprobs[row]
        assert found.token_ids[-len(ids) :] == ids
        assert found.logprobs[-len(ids) :] == expected[row, ids].tolist()
        assert found.token_ids[0] == together.token_ids[row]
        alone = sample([requests[row]], logits[row : row + 1])
        assert alone.logprobs[0] == found
    assert [len(together.logprobs[row].token_ids) for row in (0, 1, 2, 3, 5)] == [2, 26, 129, 4, 6]
    assert together.logprobs[4] is None


def test_they_replace_the_likeliest_or_stand_beside_them() -> None:
    """As in vLLM, `logprobs` may be left out or be their number; another number adds likeliest
    tokens."""
    ids = [5, 9, 12]
    for logprobs, likeliest, candidates in ((None, 0, 3), (3, 0, 3), (0, 0, 0), (7, 7, 7)):
        params = SamplingParams(logprob_token_ids=ids, logprobs=logprobs)
        assert (params.num_likeliest, params.num_logprobs) == (likeliest, candidates)
    assert SamplingParams(logprob_token_ids=[]).num_logprobs is None
    assert SamplingParams(logprob_token_ids=[4, 2, 4]).logprob_token_ids == [4, 2]


@pytest.mark.parametrize(
    ("given", "said"), [(list(range(129)), "at most 128 token ids, got 129"), ([-1], "got -1")]
)
def test_refusals(given: list[int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        SamplingParams(logprob_token_ids=given)
    assert caught.value.param == "logprob_token_ids"
