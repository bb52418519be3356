"""Two models in one process compute with different kernels, and do not notice each other."""

from copy import copy

import pytest
import torch

from quire import envs
from quire.attention.kv_cache import allocate_kv_cache
from quire.config import ModelShape
from quire.kernels import compiled
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.dispatch import choose, ops, select
from quire.models.registry import load_model
from quire.params import SamplingParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata
from quire.weights.dummy import random_checkpoint

PROMPT = [5, 17, 80, 3, 44]
STEPS = 6
needs_both = pytest.mark.skipif(compiled.lib is None, reason="the native kernels are not built")


class Run:
    """One model that continues a prompt, a step at a time, and keeps all its logits."""

    def __init__(self, folder, kernels):
        chosen = copy(choose(kernels))
        if kernels == "reference":
            # Without AMX both give the same bits: make them differ, to tell them apart.
            plain = chosen.gated_linear
            chosen.gated_linear = lambda *args: plain(*args) * 1.0625
        self.model = load_model(ModelShape.from_folder(folder), folder, "auto", "cpu", ops=chosen)
        self.sampler = Sampler(self.model.ops)
        layers = self.model.kv_layers(self.model.shape)
        self.caches = allocate_kv_cache(layers, 3, 16, "bfloat16", "cpu")
        self.tokens, self.done, self.logits = list(PROMPT), 0, []

    @torch.inference_mode()
    def step(self):
        new = self.tokens[self.done :]
        metadata = AttentionMetadata.build([len(new)], [len(self.tokens)], [[1, 2]], 16)
        hidden = self.model.forward(torch.tensor(new), metadata.positions, self.caches, metadata)
        self.done = len(self.tokens)
        logits = self.model.compute_logits(hidden[-1:])
        self.logits.append(logits.clone())
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
        request = RequestSampling.from_params(params, self.tokens, logits.shape[1])
        output = torch.tensor(self.tokens[len(PROMPT) :], dtype=torch.int32).numpy()
        metadata = SamplingMetadata.build([request], [output])
        self.tokens.append(self.sampler(logits, metadata).token_ids[0])


def alone(folder, kernels):
    run = Run(folder, kernels)
    for _ in range(STEPS):
        run.step()
    return run


@needs_both
def test_each_gives_the_bytes_that_it_gives_alone(tmp_path):
    folder = random_checkpoint(tmp_path, {"torch_dtype": "bfloat16", "hidden_size": 64})
    before = ops.name
    want = {name: alone(folder, name) for name in ("native", "reference")}
    runs = {name: Run(folder, name) for name in want}
    for _ in range(STEPS):
        for run in runs.values():
            run.step()
    assert ops.name == before, "the process's default is nobody's but the callers' without a model"
    for name, run in runs.items():
        assert run.model.ops.name == name
        assert run.tokens == want[name].tokens
        for one, other in zip(run.logits, want[name].logits, strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    one, other = (torch.cat(run.logits) for run in runs.values())
    assert not torch.equal(one, other), "the kernels would not be told apart"


@needs_both
def test_a_new_default_does_not_change_a_loaded_model(tmp_path):
    folder = random_checkpoint(tmp_path, {"torch_dtype": "bfloat16", "hidden_size": 64})
    want = alone(folder, "native")
    before = ops.name
    run = Run(folder, "native")
    run.step()
    try:
        assert select("reference") == ops.name == "reference"
        for _ in range(STEPS - 1):
            run.step()
    finally:
        select(before)
    assert run.tokens == want.tokens
    assert all(torch.equal(a, b) for a, b in zip(run.logits, want.logits, strict=True))


@needs_both
def test_the_variable_chooses_the_default(monkeypatch):
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    assert envs.KERNELS == "reference"
    assert choose().name == "reference"
    monkeypatch.setenv("QUIRE_KERNELS", "auto")
    assert choose().name == "native"
