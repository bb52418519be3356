"""All layers in one native call give the bits of the same layers called one by one."""

import random

import pytest
import torch

from paged_run import load, serve
from quire.kernels import scopes
from quire.kernels.dispatch import ops
from quire.weights.dummy import random_checkpoint

KINDS = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "odd sizes": {"hidden_size": 50, "head_dim": 10, "intermediate_size": 33, "vocab_size": 51},
    "head of 80": {
        "hidden_size": 72,
        "head_dim": 80,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": 509,
    },
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 30,
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_layer_by_layer(isa, dtype, kind, tmp_path, monkeypatch):
    model = load(random_checkpoint(tmp_path, KINDS[kind] | {"torch_dtype": dtype}))
    rng = random.Random(1)
    prompts = [[rng.randrange(51) for _ in range(n)] for n in (1, 40, 70)]
    fuse, made = ops.fuse_decoder, []
    monkeypatch.setitem(ops.__dict__, "fuse_decoder", lambda parts: made.append(fuse(parts)))
    apart = serve(model, prompts, random.Random(2), chunk=lambda: 17)
    assert len(made) == 1 and made[0] is not None, "these layers were meant to be fused"
    monkeypatch.setitem(ops.__dict__, "fuse_decoder", fuse)
    fused = serve(model, prompts, random.Random(2), chunk=lambda: 17)
    for one, other in zip(apart, fused, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_while_a_profiler_records_operations_have_names(isa, tmp_path):
    from torch.profiler import ProfilerActivity, profile

    model = load(random_checkpoint(tmp_path, {"torch_dtype": "bfloat16"}))
    prompts = [[1, 2, 3], list(range(50))]
    fused = serve(model, prompts, random.Random(2))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        scopes.follow()
        apart = serve(model, prompts, random.Random(2))
    scopes.follow()
    names = {event.key for event in seen.key_averages()}
    assert {"quire::linear", "quire::gated_linear", "quire::paged_attention"} <= names
    for one, other in zip(apart, fused, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
