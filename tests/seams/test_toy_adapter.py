"""What an adapter takes: a method around that of a layer. Here: one low-rank product."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.attention.kv_cache import allocate_kv_cache
from quire.config import ModelShape
from quire.kernels.attention_metadata import AttentionMetadata
from quire.layers.linear import Linear
from quire.layers.linear_method import LinearMethod
from quire.models.registry import load_model
from quire.weights.dummy import random_checkpoint
from quire.weights.files import SINGLE

RANK = 4


class ToyAdapter(LinearMethod):
    """What another method gives, and `B A x` on top."""

    def __init__(self, method, a, b):
        super().__init__(method.spec)
        self.inner = method
        prepare = self.spec.ops.prepare_linear
        self._a, self._b = prepare(a), prepare(b)

    def apply(self, x, out_dtype=None, keep=None):
        linear = self.spec.ops.linear
        more = linear(linear(x, self._a), self._b, torch.float32)
        return (self.inner.apply(x, torch.float32) + more).to(out_dtype or x.dtype)


def adapters(model):
    """A and B for each linear layer of each decoder layer, by its name."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (
            torch.randn(RANK, module.method.spec.in_features, generator=generator) / 8,
            torch.randn(module.method.spec.out_features, RANK, generator=generator) / 8,
        )
        for name, module in model.modules()
        if isinstance(module, Linear) and ".layers." in name
    }


def merged(folder, found):
    """The checkpoint with all adapters added to its weights."""
    tensors = load_file(folder / SINGLE)
    stacks = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, (a, b) in found.items():
        head, _, last = name.rpartition(".")
        names = [f"{head}.{part}.weight" for part in stacks.get(last, (last,))]
        rows = [len(tensors[part]) for part in names]
        for part, delta in zip(names, (b @ a).split(rows), strict=True):
            tensors[part] = tensors[part] + delta
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def load(folder):
    return load_model(ModelShape.from_folder(folder), folder, "auto", "cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_adapted_layers_are_as_if_merged(tmp_path, bias):
    folder = random_checkpoint(tmp_path, {"attention_bias": bias, "mlp_bias": bias})
    model = load(folder)
    caches = allocate_kv_cache(model.kv_layers(model.shape), 3, 16, "float32", "cpu")
    metadata = AttentionMetadata.build([9], [9], [[1, 2]], 16)

    def logits(model):
        ids = torch.arange(3, 12)
        return model.compute_logits(model.forward(ids, metadata.positions, caches, metadata))

    plain = logits(model)
    found = adapters(model)
    assert len(found) == 4 * model.shape.num_layers
    linears = dict(model.modules())
    for name, (a, b) in found.items():
        linears[name].use(ToyAdapter(linears[name].method, a, b))
    adapted = logits(model)
    merged(folder, found)
    torch.testing.assert_close(adapted, logits(load(folder)), atol=1e-4, rtol=1e-4)
    assert (adapted - plain).abs().max() > 0.1
    for name in found:
        linears[name].use(linears[name].method.inner)
    assert torch.equal(logits(model), plain), "taken off, nothing of it is left"
