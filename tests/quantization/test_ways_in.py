"""Quantised checkpoints by other ways: pickled files, scales for a KV cache, random weights, a head
that is quantised too."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantised_writers import FORMATS, checkpoint
from quire import LLM, SamplingParams
from quire.config import ModelShape
from quire.models.inspection import weight_forms
from quire.models.registry import load_model


def forms(folder, load_format="auto"):
    shape = ModelShape.from_folder(folder)
    return weight_forms(load_model(shape, folder, "auto", "cpu", load_format=load_format))


def test_pickled_files(tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["gptq 4"](), layers=1)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert forms(folder, "pt")["int4 in groups of 64 (GPTQ) with int8 activations"].layers == 4


def test_scales_for_a_kv_cache_are_read_past(tmp_path, caplog):
    _, folder = checkpoint(tmp_path, FORMATS["ct fp8 tensor"](), layers=1)
    tensors = load_file(folder / "model.safetensors")
    for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "attn.q_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor([0.5])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    assert forms(folder)["fp8 (e4m3) with float activations"].layers == 4
    assert "--kv-cache-dtype fp8 uses them" in caplog.text


SAME = [name for name in FORMATS if not name.startswith("bnb")]


@pytest.mark.parametrize("name", SAME)
def test_random_weights_are_kept_as_the_checkpoint_has_them(name, tmp_path):
    """In the same form, and in the same memory: scales and zeros take a little more or less."""
    _, folder = checkpoint(tmp_path, FORMATS[name](), layers=1)
    real, made = forms(folder), forms(folder, "dummy")
    assert {k: (f.layers, f.weights) for k, f in real.items()} == {
        k: (f.layers, f.weights) for k, f in made.items()
    }
    assert all(0.9 < made[k].nbytes / real[k].nbytes < 1.1 for k in real)


@pytest.mark.parametrize("name", ["ct int4 g32", "fp8 block", "gptq 4 desc_act", "modelopt nvfp4"])
def test_random_weights_compute(name, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS[name](), layers=1)
    with LLM(str(folder), load_format="dummy", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    assert not output.error and len(output.outputs[0].token_ids) == 4


def test_random_weights_of_other_formats_are_plain(tmp_path, caplog):
    _, folder = checkpoint(tmp_path, FORMATS["bnb nf4"](), layers=1)
    assert set(forms(folder, "dummy")) == {"bfloat16"}
    assert "layers of this checkpoint's format are kept in the model's type" in caplog.text


def test_a_head_that_is_quantised_and_one_that_is_left_out(tmp_path):
    config, write = FORMATS["gptq 4"]()
    _, folder = checkpoint(tmp_path, (config | {"lm_head": True}, write), layers=1)
    said = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(said))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    assert forms(folder)["bfloat16"].layers == 1, "a plain head is taken as it is"
    head, _ = write(embedding.float())
    tensors |= {f"lm_head.{name}": tensor.contiguous() for name, tensor in head.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert {name: form.layers for name, form in forms(folder).items()} == {
        "int4 in groups of 64 (GPTQ) with int8 activations": 5
    }
