"""The embedded model in every format that is read, against a plain twin with the same weights."""

import pytest
import torch

from quantised_writers import FORMATS, checkpoint
from quire import LLM, SamplingParams
from quire.attention.kv_cache import allocate_kv_cache
from quire.config import ModelShape
from quire.kernels.attention_metadata import AttentionMetadata
from quire.models.registry import load_model

PROMPTS = [[1, 40, 7, 900, 35, 2000, 77], [5], list(range(300, 340))]
SENSIBLE = (
    "ct int8", "ct int4 g32", "ct fp8 tensor", "gptq 4", "gptq 8", "awq gemm", "fp8 block",
    "bnb int8", "bnb nf4",
)  # fmt: skip


def logits(folder, dtype="float32"):
    """Of every position, prompts in one batch."""
    model = load_model(ModelShape.from_folder(folder), folder, dtype, "cpu")
    lens = [len(prompt) for prompt in PROMPTS]
    tables = [[4 * r + i for i in range(4)] for r in range(len(lens))]
    caches = allocate_kv_cache(model.kv_layers(model.shape), 4 * len(lens), 16, dtype, "cpu")
    metadata = AttentionMetadata.build(lens, lens, tables, 16)
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    hidden = model.forward(ids, metadata.positions, caches, metadata)
    return model.compute_logits(hidden).double()


def divergence(want, got):
    """Mean KLD in nats."""
    want, got = want.log_softmax(1), got.log_softmax(1)
    return float((want.exp() * (want - got)).sum(1).mean())


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_the_tensors_stand_for(name, tmp_path, monkeypatch):
    plain, quantised = checkpoint(tmp_path, FORMATS[name](), layers=1)
    want = logits(plain)
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")
    exact = logits(quantised)
    if name not in ("ct int8", "quark int8", "bnb int8"):  # which have int8 activations in any case
        assert torch.allclose(want, exact, rtol=0, atol=2e-4 * float(want.abs().max()))
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "1")
    assert divergence(want, logits(quantised)) < 0.03


@pytest.mark.parametrize("name", SENSIBLE)
def test_the_capital_of_france(name, tmp_path):
    _, quantised = checkpoint(tmp_path, FORMATS[name]())
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(str(quantised), max_model_len=64) as llm:
        (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris"), output.outputs[0].text
