"""GGUF: header, values and models, against the reference package; and hostile headers."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import TYPE_NUMBERS, write_model
from paged_run import load, serve
from quire import LLM, SamplingParams
from quire.checkpoint.gguf_header import TYPES, read_header
from quire.checkpoint.gguf_model import ARCHITECTURES, _llama3_factor, gguf_file
from quire.config import ModelConfig
from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.registry import load_model
from quire.weights.dummy import TINY, random_checkpoint, random_tensors
from quire.weights.files import write_safetensors
from quire.weights.formats import open_checkpoint
from quire.weights.gguf import DEQUANTISE, GGUFCheckpoint, dequantise

WIDE = {**TINY, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}


def test_types_agree_with_the_reference() -> None:
    for number, (name, block, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (block, size)


def random_blocks(dtype: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of blocks: any bits, but scales that are finite numbers."""
    _, block, size = TYPES[TYPE_NUMBERS[dtype]]
    if block == 1:
        floats = rng.standard_normal(count).astype(np.float32)
        if dtype == "BF16":
            return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return (floats if dtype == "F32" else floats.astype(np.float16)).view(np.uint8)
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
              "Q2_K": (80, 82), "Q3_K": (108,), "MXFP4": ()}  # fmt: skip
    for at in halves.get(dtype, (0,)):
        scale = rng.standard_normal((count, 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    if dtype == "MXFP4":
        raw[:, 0] = rng.integers(0, 250, count)  # beyond, the reference overflows
    return raw.reshape(-1)


@pytest.mark.parametrize("dtype", DEQUANTISE)
def test_values_are_the_references_bit_for_bit(dtype: str) -> None:
    rng = np.random.default_rng(len(dtype))
    raw = random_blocks(dtype, 40_000 if dtype == "Q8_0" else 500, rng)  # more than one slice
    _, _, size = TYPES[TYPE_NUMBERS[dtype]]
    kind = gguf.GGMLQuantizationType[dtype]
    rows = raw.view({"F32": np.float32, "F16": np.float16}.get(dtype, np.uint8)).reshape(1, -1)
    expected = gguf.quants.dequantize(rows, kind).astype(np.float32).reshape(-1)
    got = dequantise(raw, dtype)
    assert got.dtype == np.float32 and len(raw) % size == 0
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_a_type_that_is_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="GGUF type IQ1_S is not read; known: F32, F16"):
        dequantise(np.zeros(50, np.uint8), "IQ1_S")


def test_header_agrees_with_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, WIDE, dtype="Q8_0", a__list=[1, 2, 3], a__text="é", a__names=["x", "yy"],
                a__flag=True, a__number=-5)  # fmt: skip
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.metadata["a.list"] == [1, 2, 3]
    assert (header.metadata["a.text"], header.metadata["a.names"]) == ("é", ["x", "yy"])
    assert (header.metadata["a.flag"], header.metadata["a.number"]) == (True, -5)
    theirs = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert header.metadata == theirs
    assert set(header.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (entry.begin, entry.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert entry.dtype == tensor.tensor_type.name


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma"])
def test_tensors_are_the_original_checkpoints(tmp_path: Path, arch: str, dtype: str) -> None:
    expected = write_model(tmp_path / "m.gguf", WIDE, arch, dtype)
    with GGUFCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name), tensor), name


def test_a_model_from_gguf_is_the_model_from_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, permutation, sizes, tied head and rotary base: all at once."""
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")  # activations as they are
    tensors = write_model(tmp_path / "model.gguf", WIDE, dtype="Q8_0")
    plain = random_checkpoint(tmp_path / "plain", WIDE)
    write_safetensors(tensors, plain / "model.safetensors")
    shape = ModelShape.from_folder(tmp_path / "model.gguf")
    assert (shape.architecture, shape.dtype, shape.tie_word_embeddings) == (
        "LlamaForCausalLM", "bfloat16", True,
    )  # fmt: skip
    assert shape.eos_token_ids == (2,)
    model = load_model(shape, tmp_path / "model.gguf", "float32", "cpu")
    same = load(plain, dtype="float32")
    assert model.num_parameters == same.num_parameters
    for seed in range(2):
        ours = serve(model, [[1, 2, 3, 4, 5, 9, 30]], random.Random(seed))[0]
        assert torch.equal(ours, serve(same, [[1, 2, 3, 4, 5, 9, 30]], random.Random(seed))[0])


def test_the_embedded_model_as_gguf_says_the_same(tmp_path: Path) -> None:
    """From the file's bytes to text: bfloat16 loses nothing on the way."""
    folder = ModelConfig().folder
    config = json.loads((folder / "config.json").read_text())
    with open_checkpoint(folder) as checkpoint:
        tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
        write_model(tmp_path / "demo.gguf", config, dtype="BF16", tensors=tensors)
    prompts = ["The capital of France is", "2 + 3 ="]
    options: dict[str, Any] = {"max_model_len": 128}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path / "demo.gguf"), tokenizer="quire-demo", **options) as llm:
        ours = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM("quire-demo", **options) as llm:
        assert ours == [
            o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)
        ]


def family(arch: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and weights of a tiny model of a family that is Llama with something more."""
    config: dict[str, Any] = {
        "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        "gemma": {"architectures": ["GemmaForCausalLM"], "model_type": "gemma",
                  "hidden_act": "gelu_pytorch_tanh"},
    }[arch]  # fmt: skip
    config = {**WIDE, **config}
    tensors = random_tensors(config, 0)
    generator = torch.Generator().manual_seed(1)
    for i in range(config["num_hidden_layers"]):
        head = f"model.layers.{i}.self_attn"
        for part, heads in (("q", 4), ("k", 2), ("v", 2)):
            if arch == "qwen2":
                bias = torch.randn(heads * config["head_dim"], generator=generator)
                tensors[f"{head}.{part}_proj.bias"] = bias
            elif arch == "qwen3" and part != "v":
                norm = 1 + torch.randn(config["head_dim"], generator=generator) / 4
                tensors[f"{head}.{part}_norm.weight"] = norm
    return config, tensors


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma"])
def test_other_families_from_gguf(tmp_path: Path, arch: str) -> None:
    config, tensors = family(arch)
    plain = random_checkpoint(tmp_path / "plain", config)
    kept = write_model(tmp_path / "model.gguf", config, arch, tensors=tensors)
    write_safetensors(kept, plain / "model.safetensors")
    shape = ModelShape.from_folder(tmp_path / "model.gguf")
    assert shape.architecture == config["architectures"][0]
    ours, same = load_model(shape, tmp_path / "model.gguf", "float32", "cpu"), load(plain)
    for prompt in ([1, 2, 3, 4, 5, 9, 30], [7]):
        expected = serve(same, [prompt], random.Random(0))[0]
        assert torch.equal(serve(ours, [prompt], random.Random(0))[0], expected)
    assert expected.isfinite().all()


def test_permutation_matters(tmp_path: Path) -> None:
    """The test above would not see a forgotten permutation if the model did not."""
    write_model(tmp_path / "m.gguf", WIDE)
    with GGUFCheckpoint(tmp_path) as checkpoint:
        name = "model.layers.0.self_attn.q_proj.weight"
        plain = checkpoint.read(name)
        object.__setattr__(checkpoint._layout, "permuted", False)
        try:
            assert not torch.equal(plain, checkpoint.read(name))
        finally:
            object.__setattr__(checkpoint._layout, "permuted", True)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "w.gguf", WIDE)
    header = read_header(tmp_path / "w.gguf")
    names = [f"s-0000{i}-of-00002.gguf" for i in (1, 2)]
    reader = gguf.GGUFReader(tmp_path / "w.gguf")
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        if number == 0:
            for key, value in header.metadata.items():
                if key != "general.architecture":
                    writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (tmp_path / "w.gguf").unlink()
    assert gguf_file(tmp_path) == tmp_path / names[0]
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(whole)
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(checkpoint.read(name), whole[name])
    assert ModelShape.from_folder(tmp_path).vocab_size == TINY["vocab_size"]
    with pytest.raises(ModelLoadError, match="is not the first part"):
        GGUFCheckpoint(tmp_path / names[1])
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelLoadError, match="00002-of-00002.gguf' is missing"):
        GGUFCheckpoint(tmp_path)


def rope_file(path: Path, factors: list[float], theta: Any = None, **split: Any) -> Path:
    write_model(path.with_name("plain.gguf"), WIDE)
    reader = gguf.GGUFReader(path.with_name("plain.gguf"))
    writer = gguf.GGUFWriter(path, "llama", **split)
    metadata = read_header(path.with_name("plain.gguf")).metadata
    if theta is not None:
        metadata["llama.rope.freq_base"] = theta
    for key, value in metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_name("plain.gguf").unlink()
    return path


def test_llama_3_rotary_factors_become_their_parameters(tmp_path: Path) -> None:
    factors = [_llama3_factor(10000.0 ** (-i / 8), 8.0, 8192) for i in range(8)]
    assert factors[0] == 1.0 and factors[-1] == 8.0 and 1 < factors[6] < 8
    shape = ModelShape.from_folder(rope_file(tmp_path / "m.gguf", factors))
    assert shape.rope_scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    from quire.layers.rotary import inverse_frequencies

    plain = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    expected = plain / torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(inverse_frequencies(shape).double(), expected, rtol=1e-6, atol=0)
    with GGUFCheckpoint(tmp_path) as checkpoint:
        assert "rope_freqs.weight" not in checkpoint.tensors
    factors[6] *= 1.01
    with pytest.raises(ModelLoadError, match="does not follow the rule of Llama 3.1"):
        ModelShape.from_folder(rope_file(tmp_path / "m.gguf", factors))


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_rotary_factors_in_another_part(tmp_path: Path, small_first_shard: bool) -> None:
    """`llama-gguf-split --no-tensor-in-first-split` leaves no tensor in the first part."""
    factors = [_llama3_factor(10000.0 ** (-i / 8), 8.0, 8192) for i in range(8)]
    split = {"split_max_tensors": 5, "small_first_shard": small_first_shard}
    rope_file(tmp_path / "m.gguf", factors, **split)
    shape = ModelShape.from_folder(tmp_path)
    assert shape.rope_scaling is not None and shape.rope_scaling["factor"] == 8.0


@pytest.mark.parametrize(
    ("factors", "theta"), [([0.0] * 8, None), ([8.0] * 8, "ten thousand"), ([8.0] * 8, -10000.0)]
)
def test_rotary_factors_that_no_rule_gives(
    tmp_path: Path, factors: list[float], theta: object
) -> None:
    with pytest.raises(ModelLoadError, match="the rotary frequencies are wrong"):
        ModelShape.from_folder(rope_file(tmp_path / "m.gguf", factors, theta))


def test_experts_of_a_model_without_any(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_expert_count(0)
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((0, 4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"expert_count \(0\); it has the shape \[0, 4, 4\]"):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_several_models_in_a_folder_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", WIDE)
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    with pytest.raises(ModelLoadError, match=r"has 2 GGUF models \(a.gguf, b.gguf\)"):
        ModelShape.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("arch", "words"),
    [("lama", "did you mean 'llama'?"), ("mamba", "Known: llama, qwen2, qwen3, gemma")],
)
def test_an_unknown_architecture_names_the_known(tmp_path: Path, arch: str, words: str) -> None:
    write_model(tmp_path / "m.gguf", WIDE, arch)
    with pytest.raises(ModelLoadError) as caught:
        ModelShape.from_folder(tmp_path)
    assert words in caught.value.message


# ----------------------------------------------------------------------------- hostile headers

HEAD = b"GGUF" + struct.pack("<I", 3)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"GGUX", "does not begin with 'GGUF'"),
        (b"GGUF\x01\0\0\0", "version is 1"),
        (b"GGUF\0\0\0\x03", "version is 50331648"),
        (HEAD + struct.pack("<QQ", 2**60, 0), "entries are announced"),
        (HEAD + struct.pack("<QQ", 0, 2**63), "entries are announced"),
        (HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**62) + bytes(9), "are missing"),
        (HEAD + struct.pack("<QQ", 0, 1) + key(b"k", 77, bytes(8)), "unknown type 77"),
        (HEAD + struct.pack("<QQ", 0, 1) + key(b"k", 9, struct.pack("<IQ", 4, 2**61)),
         "entries are announced"),
        (HEAD + struct.pack("<QQ", 0, 1) + key(b"k", 9, struct.pack("<IQ", 8, 2**40)),
         "entries are announced"),
        (HEAD + struct.pack("<QQ", 0, 1) + key(b"k", 9, struct.pack("<IQ", 9, 1) * 5),
         "unknown type 9"),
        (HEAD + struct.pack("<QQ", 0, 2) + key(b"k", 0, b"\1") * 2, "'k' twice"),
        (HEAD + struct.pack("<QQ", 0, 1) + key(b"general.alignment", 4, bytes(4)), "alignment"),
        (HEAD + struct.pack("<QQ", 1, 0) + struct.pack("<QI", 0, 9) + bytes(12), "9 dimensions"),
        (HEAD + struct.pack("<QQ", 1, 0) + struct.pack("<QIQIQ", 0, 1, 4, 5, 0), "type 5"),
        (HEAD + struct.pack("<QQ", 1, 0) + struct.pack("<QIQIQ", 0, 1, 33, 8, 0), "shape (33,)"),
        (HEAD + struct.pack("<QQ", 1, 0) + struct.pack("<QIQQIQ", 0, 2, 2**40, 2**40, 0, 0),
         "impossible shape"),
        (HEAD + struct.pack("<QQ", 1, 0) + struct.pack("<QIQIQ", 0, 1, 2**40, 0, 0), "ends at"),
        (HEAD + struct.pack("<QQ", 1, 0) + struct.pack("<QIQIQ", 0, 1, 8, 0, 2**63), "ends at"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_headers_that_are_wrong(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data + (bytes(8) if data else b""))
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
    assert words in caught.value.message
    assert "cut short" in caught.value.message


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_changed_good_file_never_crashes(tmp_path_factory: Any, data: st.DataObject) -> None:
    base = tmp_path_factory.getbasetemp() / "good.gguf"
    if not base.exists():
        write_model(base, {**WIDE, "num_hidden_layers": 1}, a__list=[1, 2], a__names=["x", "y"])
    raw = bytearray(base.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    folder = base.with_name("changed")
    folder.mkdir(exist_ok=True)
    (folder / "m.gguf").write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        ModelShape.from_folder(folder)
        GGUFCheckpoint(folder)
    except ModelLoadError as error:
        assert len(error.message) < 1000


def test_every_row_names_a_class_of_hugging_face() -> None:
    import transformers

    for layout in ARCHITECTURES.values():
        assert hasattr(transformers, layout.architecture)
        assert layout.model_type in transformers.CONFIG_MAPPING
