"""Vectors of encoders are the same bits alone and in any crowd, for each instruction set, type and
family, with one thread or two."""

import random

import pytest
import torch

import tiny
from quire import LLM, PoolingParams
from quire.kernels import compiled

FAMILIES = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", {}),
    "cross-encoder": ("BertForSequenceClassification", {"num_labels": 3}),
    "decoder": ("LlamaModel", {}),
}
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param)
    architecture, changes = FAMILIES[request.param]
    tiny.make(made, architecture, **changes)
    return str(made)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return request.param


def bits(llm, prompts):
    outputs = llm.encode(prompts, RAW, use_tqdm=False)
    return [output.outputs.data.tobytes() for output in outputs]


def test_alone_as_in_a_crowd(isa, folder, dtype):
    """Small steps, large ones, and prompts side by side in another order each time."""
    rng = random.Random(3)
    prompts = tiny.prompts(12, longest=150)
    torch_threads = torch.get_num_threads()
    try:
        with LLM(folder, dtype=dtype, runner="pooling", enable_prefix_caching=False) as llm:
            alone = [bits(llm, [prompt])[0] for prompt in prompts]
        assert len(set(alone)) == len(prompts), "vectors that are all alike prove nothing"
        for budget in (160, 1000):
            with LLM(
                folder,
                dtype=dtype,
                runner="pooling",
                max_num_batched_tokens=budget,
                enable_prefix_caching=False,
            ) as llm:
                for threads in (1, 2):
                    compiled.lib.set_num_threads(threads, [])
                    torch.set_num_threads(threads)
                    order = rng.sample(range(len(prompts)), len(prompts))
                    order += rng.choices(range(len(prompts)), k=8)
                    got = bits(llm, [prompts[i] for i in order])
                    assert got == [alone[i] for i in order], f"{threads} threads, budget {budget}"
    finally:
        torch.set_num_threads(torch_threads)
