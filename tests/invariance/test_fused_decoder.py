"""All layers in one native call give the bits of the same layers called one by one."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from gguf_files import write_model
from paged_run import load, serve
from quantised_writers import DEMO, FORMATS
from quantised_writers import checkpoint as quantised_checkpoint
from quire.attention.kv_cache import allocate_kv_cache
from quire.kernels import scopes
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.dispatch import ops
from quire.weights.dummy import random_checkpoint
from quire.weights.files import SINGLE, write_safetensors

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
    "leaves": {"intermediate_size": 512, "mlp_bias": True},
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 30,
    },
}


NO_NORM_WEIGHTS = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}


CODES = ["int8", "int4"]
GGUF_TYPES = {"v_proj": "Q8_0", "down_proj": "Q5_1", "gate_proj": "Q5_0"}
LATER_LAYERS = tuple(f"model.layers.{i}." for i in range(2, 5))


def checkpoint(folder, config, dtype):
    """A random one; OLMo has no weights of norms."""
    random_checkpoint(folder, config | {"torch_dtype": dtype})
    if config is NO_NORM_WEIGHTS:
        tensors = load_file(folder / SINGLE)
        write_safetensors({n: t for n, t in tensors.items() if "norm" not in n}, folder / SINGLE)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", [*KINDS, "no norm weights"])
def test_same_bits_as_layer_by_layer(isa, dtype, kind, tmp_path, monkeypatch):
    model = load(checkpoint(tmp_path, KINDS.get(kind, NO_NORM_WEIGHTS), dtype))
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


@pytest.mark.parametrize("quantization", CODES)
def test_codes_too(isa, quantization, tmp_path, monkeypatch):
    """Layers of int4, int8 and floats side by side: 50 columns are no whole groups."""
    folder = checkpoint(tmp_path, KINDS["odd sizes"] | {"intermediate_size": 512}, "bfloat16")
    check_both_ways(load(folder, quantization=quantization), monkeypatch)


@pytest.mark.parametrize("name", ["fp8 block", "ct fp8 tensor", "ct mxfp4", "ct nvfp4", "bnb nf4"])
def test_checkpoints_with_float_activations_too(isa, name, tmp_path, monkeypatch):
    """And they give what the weights that the codes stand for give, rounded to the model's type;
    8-bit floats are not rounded to it."""
    plain, quantised = quantised_checkpoint(tmp_path, FORMATS[name](), layers=2)
    codes = check_both_ways(load(quantised, "bfloat16"), monkeypatch)
    numbers = check_both_ways(load(plain, "bfloat16"), monkeypatch)
    for one, other in zip(codes, numbers, strict=True):
        if "fp8" in name:
            torch.testing.assert_close(one, other, rtol=0, atol=0.3)
        else:
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_blocks_of_gguf_with_minima_and_stacks_of_unlike_types_too(isa, tmp_path, monkeypatch):
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": 2}
    stored = load_file(DEMO / "model.safetensors")
    tensors = {n: t.float() for n, t in stored.items() if not n.startswith(LATER_LAYERS)}
    kinds = {name: GGUF_TYPES.get(name.split(".")[-2], "Q4_1") for name in tensors}
    write_model(tmp_path / "model.gguf", config, "llama", kinds, tensors)
    check_both_ways(load(tmp_path / "model.gguf", "bfloat16"), monkeypatch)


def check_both_ways(model, monkeypatch):
    """Logits, the same in one call and layer by layer."""
    prompts = [[7, 3, 9], [5] * 40]
    fuse, made = ops.fuse_decoder, []
    monkeypatch.setitem(ops.__dict__, "fuse_decoder", lambda parts: made.append(fuse(parts)))
    apart = serve(model, prompts, random.Random(2), chunk=lambda: 17)
    assert len(made) == 1 and made[0] is not None, "these layers were meant to be fused"
    monkeypatch.setitem(ops.__dict__, "fuse_decoder", fuse)
    fused = serve(model, prompts, random.Random(2), chunk=lambda: 17)
    for one, other in zip(apart, fused, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    return fused


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_asked_for(isa, kind, tmp_path):
    """The last layer computes only these; they have the bits that they have among all."""
    model = load(random_checkpoint(tmp_path, KINDS[kind] | {"torch_dtype": "bfloat16"}))
    rng = random.Random(3)
    for _ in range(6):
        lens = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 6))]
        asked = [rng.randrange(min(4, n + 1)) for n in lens]  # last ones of each request
        tables = [[3 * r + i for i in range(3)] for r in range(len(lens))]
        step = AttentionMetadata.build(lens, lens, tables, 16)
        ids = torch.tensor([rng.randrange(51) for _ in range(sum(lens))])
        starts = [sum(asked[:r]) for r in range(len(lens) + 1)]
        ends = step.query_start_loc[1:].tolist()
        wanted = [end - n + i for end, n in zip(ends, asked, strict=True) for i in range(n)]
        some = replace(
            step,
            wanted=torch.tensor(wanted, dtype=torch.int64),
            wanted_start_loc=torch.tensor(starts, dtype=torch.int32),
            scratch={},
        )
        found = []
        for metadata in (step, some):
            layers = model.kv_layers(model.shape)
            caches = allocate_kv_cache(layers, 3 * len(lens), 16, "bfloat16", "cpu")
            hidden = model.forward(ids, step.positions, caches, metadata)
            found.append((hidden, caches))
        (everything, full), (few, trimmed) = found
        assert torch.equal(everything[wanted].view(torch.int16), few.view(torch.int16))
        for one, other in zip(full, trimmed, strict=True):
            for a, b in zip(one, other, strict=True):
                assert torch.equal(a.view(torch.int16), b.view(torch.int16))


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
