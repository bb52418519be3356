"""Logits of a request are the same bits alone, among up to 64 strangers, however it is cut, in
blocks of any size, with one thread or two, prefilled or decoded token by token.

A few thousand random cases: for each instruction set, type, number of KV heads and window, a set
of prompts is computed alone, then in crowds; each prompt of a crowd is one case.
"""

import random

import pytest
import torch

from paged_run import load, serve
from quire.kernels import compiled
from quire.weights.dummy import random_checkpoint

HEADS = {"MQA": 1, "GQA": 2, "MHA": 4}
ROUNDS = 5
SUBJECTS = 24
BASE = {"num_hidden_layers": 2, "hidden_size": 80, "intermediate_size": 96, "vocab_size": 131}


def bits(x):
    return x.contiguous().view(torch.int32)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=HEADS)
def model(request, isa, dtype, window, tmp_path_factory):
    config = {**BASE, "torch_dtype": dtype, "num_key_value_heads": HEADS[request.param]}
    if window:
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return load(random_checkpoint(tmp_path_factory.mktemp("model"), config))


@pytest.fixture(scope="module", params=[None, 50], ids=["no window", "window"])
def window(request):
    return request.param


def prompts_of(model, rng, count):
    lengths = [
        rng.choice([1, 2, 15, 16, 17, 63, 64, 65, rng.randint(3, 300)]) for _ in range(count)
    ]
    return [[rng.randrange(model.shape.vocab_size) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def alone(model):
    """Prompts and the bits of their logits, each computed on its own in one piece."""
    compiled.lib.set_num_threads(1, [])
    rng = random.Random(5)
    prompts = prompts_of(model, rng, SUBJECTS)
    return prompts, [bits(serve(model, [p], rng)[0]) for p in prompts]


def check(model, subjects, rng, **how):
    prompts, want = subjects
    picked = rng.sample(range(len(prompts)), rng.randint(2, len(prompts)))
    crowd = serve(model, [prompts[i] for i in picked], rng, **how)
    for i, got in zip(picked, crowd, strict=True):
        assert torch.equal(bits(got), want[i]), f"prompt of {len(prompts[i])} tokens"


def test_in_crowds_and_pieces(model, alone):
    rng = random.Random(7)
    for number in range(ROUNDS):
        compiled.lib.set_num_threads(1 + number % 2, [])
        limit = rng.choice([2, 7, 33, 100, 400])
        check(
            model,
            alone,
            rng,
            block_size=rng.choice([8, 16, 32, 64, 128]),
            chunk=lambda limit=limit: rng.randint(1, limit),
        )


def test_token_by_token(model, alone):
    prompts, want = alone
    compiled.lib.set_num_threads(2, [])
    short = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))[:16]
    crowd = serve(model, [prompts[i] for i in short], random.Random(8), chunk=lambda: 1)
    for i, got in zip(short, crowd, strict=True):
        assert torch.equal(bits(got), want[i])


def test_among_64_strangers(model, alone):
    prompts, want = alone
    rng = random.Random(9)
    compiled.lib.set_num_threads(2, [])
    strangers = [p[:40] for p in prompts_of(model, rng, 64)]
    crowd = serve(model, [*strangers[:32], prompts[3], *strangers[32:]], rng, 32, lambda: 25)
    assert torch.equal(bits(crowd[32]), want[3])
