"""Loading: shards, dtypes, names, and an error with names and shapes for every kind of fault."""

import json

import pytest
import torch

from paged_run import load, serve
from quire.attention.base import AttentionNeed, Capabilities
from quire.attention.kv_cache import allocate_kv_cache, kv_cache_bytes
from quire.attention.select import BACKENDS, select_backend
from quire.config.shape import ModelShape
from quire.errors import ConfigError, ModelLoadError
from quire.models.registry import build_model, load_model
from quire.weights.dummy import TINY, random_checkpoint, random_tensors
from quire.weights.files import INDEX, SafetensorsCheckpoint, weight_files, write_safetensors
from quire.weights.names import QKV, NameRules


def logits(folder, **options):
    import random

    return serve(load(folder, **options), [[1, 2, 3, 4, 5]], random.Random(0))[0]


def rewrite(folder, change, config=None):
    """Write the tiny checkpoint with its tensors changed."""
    random_checkpoint(folder, config)
    tensors = random_tensors({**TINY, **(config or {})}, 0)
    change(tensors)
    write_safetensors(tensors, folder / "model.safetensors")
    return folder


def refused(folder):
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    return caught.value.message


def test_shards_give_the_same_model(tmp_path):
    one = random_checkpoint(tmp_path / "one")
    many = random_checkpoint(tmp_path / "many", shards=3)
    assert len(weight_files(many)) == 3
    assert torch.equal(logits(one), logits(many))


def test_shards_without_an_index_are_found(tmp_path):
    many = random_checkpoint(tmp_path / "many", shards=2)
    (many / INDEX).unlink()
    assert torch.equal(logits(many), logits(random_checkpoint(tmp_path / "one")))


def test_progress_reaches_the_total(tmp_path):
    folder = random_checkpoint(tmp_path)
    seen = []
    load_model(ModelShape.from_folder(folder), folder, "auto", "cpu", lambda *now: seen.append(now))
    size = (folder / "model.safetensors").stat().st_size
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_tied_head_and_old_rotary_buffers_in_the_checkpoint_are_skipped(tmp_path):
    def add(tensors):
        tensors["lm_head.weight"] = torch.zeros(97, 48)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    tied = {"tie_word_embeddings": True}
    plain = random_checkpoint(tmp_path / "plain", tied)
    assert torch.equal(logits(rewrite(tmp_path / "more", add, tied)), logits(plain))


def test_the_model_keeps_nothing_of_the_file(tmp_path):
    model = load(random_checkpoint(tmp_path))
    path = tmp_path / "model.safetensors"
    import random

    before = serve(model, [[5, 6, 7]], random.Random(0))[0]
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 20_000)
    assert torch.equal(serve(model, [[5, 6, 7]], random.Random(0))[0], before)


def test_missing_unexpected_and_misshaped_are_all_told(tmp_path):
    def spoil(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(81, 48)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)

    message = refused(rewrite(tmp_path, spoil))
    assert str(tmp_path) in message
    assert (
        "wrong shape: model.layers.0.mlp.up_proj.weight (expected [80, 48], found [81, 48] in "
        "model.safetensors)"
    ) in message
    assert "missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in message
    assert "unexpected: model.layers.2.mlp.up_proj.weight" in message


def test_a_long_report_is_cut(tmp_path):
    message = refused(rewrite(tmp_path, lambda tensors: tensors.clear()))
    assert "missing: lm_head.weight, model.embed_tokens.weight" in message
    assert "and 16 more" in message


def test_biases_that_the_configuration_denies_are_unexpected(tmp_path):
    random_checkpoint(tmp_path, {"attention_bias": True})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    assert "unexpected: model.layers.0.self_attn.k_proj.bias, " in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 500, -1000])
def test_a_truncated_file_is_named(tmp_path, keep):
    path = random_checkpoint(tmp_path) / "model.safetensors"
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    message = refused(tmp_path)
    assert f"{str(path)!r} ({len(data)} bytes) is not a whole safetensors file" in message
    assert "cut short" in message


def test_a_corrupt_header_is_named(tmp_path):
    path = random_checkpoint(tmp_path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:40] = b"\xff" * 20
    path.write_bytes(data)
    assert "is not a whole safetensors file" in refused(tmp_path)
    path.write_bytes((2**60).to_bytes(8, "little") + bytes(100))
    assert "is not a whole safetensors file" in refused(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    folder = random_checkpoint(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors' is missing" in refused(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("not json", "cannot read"),
        ('{"weight_map": [1]}', "cannot read"),
        ("{}", "cannot read"),
        ('{"weight_map": {}}', "names no files"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "is not a plain file name"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, index, message):
    folder = random_checkpoint(tmp_path, shards=2)
    (folder / INDEX).write_text(index)
    assert message in refused(folder)


def test_no_weights_at_all(tmp_path):
    random_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no *.safetensors" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin: see --load-format" in refused(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        write_safetensors({"x": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelLoadError, match=r"'x' is in both a.safetensors and b.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_quantised_weights_are_refused(tmp_path):
    def shrink(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    message = refused(rewrite(tmp_path, shrink))
    assert "has type I8" in message and "reads BF16, F16, F32" in message
    random_checkpoint(tmp_path, {"quantization_config": {"quant_method": "hqq"}})
    assert "quantised (hqq)" in refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalML"]}, "did you mean 'LlamaForCausalLM'?"),
        ({"hidden_act": "gelo"}, "got 'gelo'; did you mean 'gelu'?"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "'sliding_window' must be a positive integer, got 0",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": "wide"},
            "config.json has an entry that Gemma2ForCausalLM cannot use",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types must have 2 entries, got 1",
        ),
    ],
)
def test_what_the_family_cannot_do_is_refused(tmp_path, config, message):
    random_checkpoint(tmp_path)
    shape = ModelShape.from_hf_json({**TINY, **config})
    with pytest.raises(ModelLoadError) as caught:
        load_model(shape, tmp_path, "auto", "cpu")
    assert message in caught.value.message


@pytest.mark.parametrize("entry", [-1, 0.5, True, [1]])
def test_an_activation_that_is_no_name_is_refused(entry):
    sizes = {"vocab_size": 101, "n_embd": 48, "n_inner": 96, "n_layer": 2, "n_head": 4}
    shape = ModelShape.from_hf_json(
        {"architectures": ["GPT2LMHeadModel"], **sizes, "activation_function": entry}
    )
    with pytest.raises(ModelLoadError, match=r"hidden_act must be one of .*, got "):
        build_model(shape, "float32", "cpu")


def test_an_unknown_checkpoint_type_is_refused(tmp_path):
    random_checkpoint(tmp_path)
    shape = ModelShape.from_hf_json({**TINY, "torch_dtype": "float8_e4m3fn"})
    with pytest.raises(ModelLoadError, match="got 'float8_e4m3fn'"):
        load_model(shape, tmp_path, "auto", "cpu")


def test_name_rules():
    rules = NameRules(merges=(QKV,), renames=(("language_model.", ""),), ignore=(r".*\.inv_freq",))
    assert rules.renamed("language_model.model.x") == "model.x"
    assert rules.renamed("model.x") == "model.x"
    assert rules.ignored("a.inv_freq") and not rules.ignored("a.inv_freq.b")
    assert rules.sources("l.0.qkv_proj.bias") == (
        "l.0.q_proj.bias",
        "l.0.k_proj.bias",
        "l.0.v_proj.bias",
    )
    assert rules.sources("l.0.o_proj.bias") == ("l.0.o_proj.bias",)


def test_kv_cache_size_is_what_is_allocated():
    layers = ModelShape.from_hf_json(TINY).uniform_kv_layers()
    caches = allocate_kv_cache(layers, 5, 8, "bfloat16", "cpu")
    assert [tuple(key.shape) for key, _ in caches] == [(5, 8, 2, 16)] * 2
    assert sum(t.nbytes for pair in caches for t in pair) == kv_cache_bytes(
        layers, 5, 8, "bfloat16"
    )
    assert all(not t.any() for pair in caches for t in pair)
    with pytest.raises(ConfigError, match="got 'int4'"):
        kv_cache_bytes(layers, 5, 8, "int4")


def test_attention_selection_tells_its_reasons(monkeypatch):
    class Narrow:
        can_fuse = False
        name = "narrow"
        capabilities = Capabilities(frozenset({"cpu"}), frozenset({"float32"}), frozenset({64}))

        def __init__(self, ops):
            pass

    monkeypatch.setattr(BACKENDS, "_rows", {"narrow": Narrow, **BACKENDS._rows})
    monkeypatch.setattr(BACKENDS, "_loaded", {})
    fits = select_backend(AttentionNeed("cpu", "float32", 4, 2, 64))
    assert (fits.backend.name, fits.rejected) == ("narrow", ())
    other = select_backend(AttentionNeed("cpu", "float32", 4, 2, 32))
    assert other.backend.name == "paged"
    assert other.rejected == (("narrow", "has heads of 64, not of 32"),)
    with pytest.raises(ConfigError, match="narrow computes with float32, not with bfloat16"):
        select_backend(AttentionNeed("cpu", "bfloat16", 4, 2, 64), "narrow")
