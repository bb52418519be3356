"""Every family against transformers' implementation, and against itself: one runner.

Rows stand in `rows_dense.py` and `rows_moe.py`.
"""

import random

import pytest
import torch

from hf_checkpoint import build, hf_greedy, hf_logits
from paged_run import load, serve
from rows_dense import DENSE
from rows_moe import MOE

ROWS = {row.name: row for row in (*DENSE, *MOE)}
NEW_TOKENS = 6
TYPICAL = 0.06
"""Relative error of the better quarter of tokens in bf16: holds where some change experts, too."""


def bits(x):
    return x.contiguous().view(torch.int32)


def prompts_of(row, vocab):
    rng = random.Random(row.name)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in row.lengths]


@pytest.fixture(scope="module", params=ROWS)
def case(request, tmp_path_factory):
    """(row, transformers model, our model, prompts); the weights are bf16 numbers."""
    torch.set_num_threads(1)
    row = ROWS[request.param]
    folder = tmp_path_factory.mktemp("family")
    judge = build(row, folder, torch.bfloat16)
    ours = load(folder, "float32")
    return row, folder, judge, ours, prompts_of(row, ours.shape.vocab_size)


def test_float32_equals_transformers(case):
    """Greedy ids equal and all logprobs within the row's tolerance; batched, in random cuts."""
    row, _, judge, ours, prompts = case
    full = [hf_greedy(judge, prompt, NEW_TOKENS) for prompt in prompts]
    rng = random.Random(0)
    got = serve(ours, full, rng, 16, lambda: rng.randint(1, 60))
    for prompt, ids, logits in zip(prompts, full, got, strict=True):
        want = hf_logits(judge, ids)
        assert want.std() > 0.1, "logits that are all alike prove nothing"
        torch.testing.assert_close(
            logits.log_softmax(-1), want.log_softmax(-1), atol=row.exact, rtol=0
        )
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :]


def test_same_bits_alone_batched_and_step_by_step(case):
    _, _, _, ours, prompts = case
    rng = random.Random(1)
    alone = [serve(ours, [prompt], rng)[0] for prompt in prompts]
    together = serve(ours, prompts, rng, 8, lambda: rng.randint(1, 40))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(bits(one), bits(other))
    steps = serve(ours, prompts[-1:], rng, 16, lambda: 1)[0]
    assert torch.equal(bits(steps), bits(alone[-1]))


def test_bfloat16_is_near_float32(case):
    row, folder, _, ours, prompts = case
    short = load(folder)
    assert short.dtype == torch.bfloat16
    got = serve(short, prompts, random.Random(2))
    want = serve(ours, prompts, random.Random(2))
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() / b.norm() < row.bf16
        token = (a - b).norm(dim=-1) / b.norm(dim=-1)
        assert token.quantile(0.25) < TYPICAL
    alone = serve(short, prompts[:1], random.Random(3), chunk=lambda: 1)[0]
    assert torch.equal(bits(alone), bits(got[0]))
