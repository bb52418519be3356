"""The embedded model as a GGUF file with several types, in the engine."""

import json

import pytest
from safetensors.torch import load_file

from gguf_files import write_model
from quantised_writers import DEMO
from quire import LLM, SamplingParams
from quire.config import ModelShape
from quire.models.inspection import weight_forms
from quire.models.registry import load_model
from quire.weights.count import count_weights

PROMPTS = ["The capital of France is", "One, two, three,", "The largest planet is"]
TYPES = {"v_proj": "Q8_0", "down_proj": "Q5_1", "o_proj": "Q4_0", "embed_tokens": "Q4_1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Queries and keys in Q4_1, values in Q8_0: a stack of different kinds."""
    folder = tmp_path_factory.mktemp("gguf")
    config = json.loads((DEMO / "config.json").read_text())
    tensors = {k: v.float() for k, v in load_file(DEMO / "model.safetensors").items()}
    kinds = {name: TYPES.get(name.split(".")[-2], "Q4_1") for name in tensors}
    write_model(folder / "model.gguf", config, "llama", kinds, tensors)
    return folder / "model.gguf"


def generate(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


def test_text_is_sensible_and_the_same_alone_and_together(model):
    options = {"tokenizer": str(DEMO), "max_model_len": 128}
    with LLM(str(model), **options) as llm:
        together = generate(llm, PROMPTS)
        alone = [generate(llm, [prompt])[0] for prompt in PROMPTS]
    with LLM(str(model), max_num_batched_tokens=16, **options) as llm:
        chunked = generate(llm, PROMPTS)
    assert together[0].text.startswith(" Paris")
    for others in (alone, chunked):
        assert [o.token_ids for o in others] == [o.token_ids for o in together]


def test_memory_is_estimated_by_the_types_of_tensors(model):
    shape = ModelShape.from_folder(model)
    forms = weight_forms(load_model(shape, model, "bfloat16", "cpu"))
    taken = sum(form.nbytes for form in forms.values())
    assert 0.9 < 2 * count_weights(model, "auto", shape) / taken < 1.1
