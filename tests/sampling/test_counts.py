"""Token counts at the sizes of real conversations: they grow many times over."""

import random
from collections import Counter

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.sampling.counts import TokenCounts

VOCAB = 150_000


def read(counts, output):
    """What the counter says of an output, by token."""
    ids, numbers = counts.follow(np.array(output, dtype=np.int32))
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


def expected(prompt, output):
    return dict.fromkeys(prompt, 0) | {t: n for t, n in Counter(output).items() if t < VOCAB}


@pytest.mark.parametrize("num_prompt", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("at_once", [1, 7, 64, 5000])
def test_counts_are_those_of_a_plain_counter_while_they_grow(num_prompt, at_once):
    rng = random.Random(num_prompt * 10_000 + at_once)
    prompt = sorted(rng.sample(range(VOCAB), num_prompt))
    # Few words often, many once; some lie outside the vocabulary.
    output = [rng.choice([rng.randrange(40), rng.randrange(VOCAB + 50)]) for _ in range(3000)]
    counts = TokenCounts(np.array(prompt, dtype=np.int64), VOCAB)
    for end in range(0, len(output) + 1, at_once):
        told = read(counts, output[:end])
        if end % 64 < 3 or end > 2900:  # around each growth, and at the end
            assert told == expected(prompt, output[:end])
    assert read(counts, output) == expected(prompt, output)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_holds_for_more_than_64_different_tokens(penalty):
    params = SamplingParams(
        temperature=1.5, seed=3, max_tokens=300, ignore_eos=True, **{penalty: 1.1}
    )
    with LLM() as llm:
        (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.finish_reason, output.error) == ("length", None)
    assert len(set(completion.token_ids)) > 64
