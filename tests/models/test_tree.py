"""The tree of modules: names, walks, and changing a part of a loaded model."""

import pytest
import torch

from paged_run import load
from quire.attention.kv_cache import allocate_kv_cache
from quire.kernels.attention_metadata import AttentionMetadata
from quire.layers.module import Module
from quire.layers.norm import Norm
from quire.weights.dummy import random_checkpoint


@pytest.fixture
def model(tmp_path):
    return load(random_checkpoint(tmp_path, {"num_hidden_layers": 2}))


def test_names_are_those_of_the_parameters(model):
    names = [name for name, _ in model.modules()]
    assert len(names) == len(set(names))
    assert names[:3] == ["", "model", "model.embed_tokens"]
    for parameter in model.parameters():
        assert parameter.rpartition(".")[0] in names
    modules = dict(model.modules())
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if name:
            assert modules[parent].children()[last] is module


class Silent(Module):
    """Adds nothing to the stream."""

    def __call__(self, x):
        return torch.zeros_like(x)


def one_step(model, caches):
    """Hidden states of a short prompt, on caches that stay the same from step to step."""
    metadata = AttentionMetadata.build([4], [4], [[1]], 16)
    return model.forward(torch.tensor([1, 2, 3, 4]), metadata.positions, caches, metadata)


def test_a_replaced_part_is_computed_with_at_once(model):
    """Even where all layers had been fused into one call."""
    caches = allocate_kv_cache(model.kv_layers(model.shape), 2, 16, "float32", "cpu")
    before = one_step(model, caches)
    layer = dict(model.modules())["model.layers.1"]
    mlp = layer.children()["mlp"]
    layer.replace_child("mlp", Silent())
    assert isinstance(dict(model.modules())["model.layers.1.mlp"], Silent)
    assert not torch.equal(one_step(model, caches), before)
    layer.replace_child("mlp", mlp)
    assert torch.equal(one_step(model, caches), before)
    with pytest.raises(KeyError):
        layer.replace_child("mpl", Silent())


def test_a_norm_and_a_whole_layer_can_be_replaced(model):
    caches = allocate_kv_cache(model.kv_layers(model.shape), 2, 16, "float32", "cpu")
    before = one_step(model, caches)
    modules = dict(model.modules())
    for parent, name in (("model.layers.0", "input_layernorm"), ("model.layers", "1")):
        honest = modules[parent].children()[name]
        other = doubled(honest)
        modules[parent].replace_child(name, other)
        assert not torch.equal(one_step(model, caches), before)
        modules[parent].replace_child(name, honest)
    assert torch.equal(one_step(model, caches), before)


def doubled(module):
    """A module that does as another, and then doubles it."""

    class Doubled(Norm):
        def __call__(self, *args):
            out = module(*args)
            return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return Doubled()
