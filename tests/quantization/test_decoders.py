"""Tensors to weights: bit for bit what the format's own library reads (tests/quantization/golden,
written by tools/quantisation_golden.py), or what a slow decoder reads field by field."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quantised_writers import AWQ_ORDER, FORMATS, packed
from quire.errors import ModelLoadError
from quire.layers.linear_method import WEIGHT_FORMATS
from quire.quantization.bits import fields, powers_of_two, words_for
from quire.quantization.scheme import LayerData, check_headers
from quire.weights.bundles import StoredPart, StoredTensor

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))
NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
    torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.uint32: "U32",
}  # fmt: skip


def coded(config, tensors, rows, columns, name="model.layers.0.mlp.up_proj"):
    """The weight of a layer that has these tensors."""
    headers = {
        rest: StoredTensor(f"{name}.{rest}", tuple(t.shape), NAMES[t.dtype])
        for rest, t in tensors.items()
    }
    part = StoredPart(name, rows, headers)
    method = config.get("quant_method", "mlx")
    scheme = WEIGHT_FORMATS.get(method)(config).checkpoint.scheme(part, columns)
    check_headers(part, scheme, scheme.tensors(rows, columns))
    return scheme.decode(LayerData(part, columns, tensors))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_weights_are_those_that_the_library_reads(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    want = tensors.pop("dequantised")
    got = coded(config, tensors, *want.shape).dequantise()
    if path.stem == "bnb_int8":  # (code * SCB) / 127 there, code * (SCB / 127) here
        assert torch.allclose(got, want, rtol=2**-23, atol=0)
        return
    assert torch.equal(got, want)


def test_all_formats_have_golden_files():
    assert len(GOLDEN) == 38


# ---- slow decoders of published layouts, one field at a time --------------------------------


def field(words, index, bits):
    """Field `index` of words (Python numbers) that lie one after another."""
    value = 0
    for bit in range(bits):
        word, place = divmod(index * bits + bit, 32)
        value |= ((int(words[word]) & 0xFFFFFFFF) >> place & 1) << bit
    return value


@pytest.mark.parametrize("bits", range(1, 9))
def test_fields_across_words(bits):
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(-(2**31), 2**31, (3, words_for(70, bits)), generator=generator)
    got = fields(words.int(), bits, 70)
    want = [[field(row, i, bits) for i in range(70)] for row in words.tolist()]
    assert got.tolist() == want


def slow_gptq(tensors, bits, version):
    """[N, K], one number at a time."""
    qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
    scales, g_idx = tensors["scales"].float().tolist(), tensors["g_idx"].tolist()
    columns = list(zip(*qweight, strict=True))
    weight = []
    for n, words in enumerate(columns):
        row = []
        for k, g in enumerate(g_idx):
            zero = field(qzeros[g], n, bits)
            if version == 1:
                zero = 0 if zero == 2**bits - 1 else zero + 1
            row.append((field(words, k, bits) - zero) * scales[g][n])
        weight.append(row)
    return torch.tensor(weight)


def slow_awq(tensors, group):
    """[N, K], one number at a time: nibble i of a word is column AWQ_ORDER[i]."""
    qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
    scales = tensors["scales"].float().tolist()
    place = {column: i for i, column in enumerate(AWQ_ORDER)}

    def nibble(words, n):
        return int(words[n // 8]) >> 4 * place[n % 8] & 15

    return torch.tensor([
        [
            (nibble(words, n) - nibble(qzeros[k // group], n)) * scales[k // group][n]
            for k, words in enumerate(qweight)
        ]
        for n in range(len(scales[0]))
    ])  # fmt: skip


def random_gptq(bits, rows, groups, group):
    """Words of any bits, columns in groups of any order."""
    generator = torch.Generator().manual_seed(bits)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, generator=generator).int()

    columns = groups * group
    order = torch.randperm(columns, generator=generator)
    return {
        "qweight": words(words_for(columns, bits), rows),
        "qzeros": words(groups, words_for(rows, bits)),
        "scales": torch.rand(groups, rows, generator=generator).half(),
        "g_idx": (order // group).int(),
    }


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_field_by_field(bits, version):
    tensors = random_gptq(bits, 32, 3, 32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": True}
    config["checkpoint_format"] = ["gptq", "gptq_v2"][version - 1]
    got = coded(config, tensors, 32, 96).dequantise()
    assert torch.equal(got, slow_gptq(tensors, bits, version))


@pytest.mark.parametrize("columns", [64, 288, 352], ids=lambda k: f"K={k}")
@pytest.mark.parametrize("desc_act", [False, True], ids=["in order", "desc_act"])
@pytest.mark.parametrize("sym", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_whose_last_group_is_short(bits, sym, desc_act, columns):
    """As GPTQModel writes it: ceil(K / group) groups, the last of what is left. Of 64 columns it is
    the only one."""
    tensors = random_gptq(bits, 32, 3, 128)
    groups = -(-columns // 128)
    of_column = torch.arange(columns) // 128
    if desc_act:
        of_column = of_column[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    tensors = {
        "qweight": tensors["qweight"][: words_for(columns, bits)],
        "qzeros": tensors["qzeros"][:groups], "scales": tensors["scales"][:groups],
        "g_idx": of_column.int(),
    }  # fmt: skip
    if sym:
        zero = packed(torch.full((groups, 32), 2 ** (bits - 1) - 1), bits)
        tensors["qzeros"] = zero
    config = {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": desc_act}
    want = slow_gptq(tensors, bits, 1)
    assert torch.equal(coded(config, tensors, 32, columns).dequantise(), want)
    if not desc_act:  # older writers leave it out
        del tensors["g_idx"]
        assert torch.equal(coded(config, tensors, 32, columns).dequantise(), want)


def test_awq_has_whole_groups_alone():
    part = StoredPart("model.layers.0.mlp.down_proj", 32, {})
    awq = WEIGHT_FORMATS.get("awq")({"quant_method": "awq", "bits": 4, "group_size": 128})
    with pytest.raises(ModelLoadError) as caught:
        awq.checkpoint.scheme(part, 352)
    assert caught.value.message.startswith(
        "layer 'model.layers.0.mlp.down_proj' has 352 columns, which groups of 128 do not divide"
    )


@pytest.mark.parametrize(("version", "word"), [("gptq", 0x77777777), ("gptq_v2", 0x88888888)])
def test_symmetric_zeros_of_both_versions_are_eight(version, word):
    tensors = random_gptq(4, 32, 3, 32)
    tensors["qzeros"] = torch.full((3, 4), word - (word >> 31 << 32), dtype=torch.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "format": version}
    assert coded(config, tensors, 32, 96).zeros.unique().tolist() == [8]


def test_a_stored_zero_of_all_ones_does_not_carry():
    """Adding 0x11111111 to the word 0xffffffff would change all fields but the first."""
    tensors = random_gptq(4, 32, 3, 32)
    tensors["qzeros"] = torch.tensor([[-1] * 4, [0x0F0F0F0F] * 4, [0] * 4], dtype=torch.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    zeros = coded(config, tensors, 32, 96).zeros
    assert zeros[:, 0].tolist() == [0] * 32
    assert zeros[:, 1].tolist() == [0, 1] * 16
    assert zeros[:, 2].tolist() == [1] * 32


def test_awq_field_by_field():
    _, write = FORMATS["awq gemm"]()
    tensors, value = write(torch.randn(32, 128, generator=torch.Generator().manual_seed(0)))
    got = coded({"quant_method": "awq", "bits": 4, "group_size": 64}, tensors, 32, 128)
    assert torch.equal(got.dequantise(), slow_awq(tensors, 64))
    assert torch.equal(got.dequantise(), value)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name):
    """The writers of the other tests, whose weights are known without any decoder."""
    config, write = FORMATS[name]()
    values = torch.randn(128, 256, generator=torch.Generator().manual_seed(3))
    tensors, want = write(values)
    assert torch.equal(coded(config, tensors, 128, 256).dequantise(), want)


def test_blocks_of_bitsandbytes_may_run_through_rows():
    config, write = FORMATS["bnb nf4"]()
    tensors, want = write(torch.randn(32, 96, generator=torch.Generator().manual_seed(3)))
    got = coded(config, tensors, 32, 96)
    assert got.group == 32 and torch.equal(got.dequantise(), want)


def test_exponents():
    got = powers_of_two(torch.arange(256, dtype=torch.uint8))
    assert got[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert got[255].isnan()


# ---- which layers ------------------------------------------------------------------------------


def scheme(config, name, tensors=(), columns=256):
    part = StoredPart(name, 128, {t: StoredTensor(f"{name}.{t}", (1,), "I32") for t in tensors})
    found = WEIGHT_FORMATS.get(config["quant_method"])(config).checkpoint.scheme(part, columns)
    return None if found is None else found.label


def test_gptq_dynamic_rules():
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 128,
        "dynamic": {
            r"-:model\.layers\.0\..*": {}, r"+:.*\.1\.mlp\..*down.*": {"bits": 8, "group_size": 32},
            r".*\.1\.mlp\..*": {"group_size": 64},
        },
    }  # fmt: skip
    assert scheme(config, "model.layers.0.mlp.up_proj") is None
    assert scheme(config, "model.layers.1.mlp.down_proj") == "int8 in groups of 32 (GPTQ)"
    assert scheme(config, "model.layers.1.mlp.up_proj") == "int4 in groups of 64 (GPTQ)"
    assert scheme(config, "model.layers.2.mlp.up_proj") == "int4 in groups of 128 (GPTQ)"
    assert scheme(config, "lm_head") is None
    assert scheme(config | {"lm_head": True}, "lm_head") == "int4 in groups of 128 (GPTQ)"
    listed = config | {"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.down_proj"]]}
    assert scheme(listed, "model.layers.2.self_attn.q_proj") is None
    assert scheme(listed, "model.layers.2.mlp.up_proj") == "int4 in groups of 128 (GPTQ)"


def test_compressed_tensors_groups_and_ignored_layers():
    def group(bits, *targets):
        weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
        return {"targets": list(targets), "weights": weights}

    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", r"re:.*\.3\.self_attn\..*"],
        "config_groups": {
            "a": group(4, "Linear"), "b": group(8, r"re:.*down_proj"),
            "c": group(2, "model.layers.1.mlp.up_proj"),
        },
    }  # fmt: skip
    assert scheme(config, "lm_head") is None
    assert scheme(config, "model.layers.3.self_attn.q_proj") is None
    assert scheme(config, "model.layers.3.mlp.up_proj") == "int4 (pack-quantized)"
    assert scheme(config, "model.layers.3.mlp.down_proj") == "int8 (pack-quantized)"
    assert scheme(config, "model.layers.1.mlp.up_proj") == "int2 (pack-quantized)"


def test_lists_of_other_formats():
    fp8 = {"quant_method": "fp8", "ignored_layers": ["lm_head", "model.layers.1.mlp"]}
    assert scheme(fp8, "model.layers.1.mlp.up_proj") is None
    assert scheme(fp8, "model.layers.11.mlp.up_proj") == "fp8 (e4m3)"
    awq = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}
    assert scheme(awq, "model.layers.1.self_attn.q_proj") is None
    modelopt = {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "MIXED_PRECISION", "exclude_modules": ["*layers.0*"],
            "quantized_layers": {
                "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.1.mlp.down_proj": {"quant_algo": "FP8"},
            },
        },
    }  # fmt: skip
    assert scheme(modelopt, "model.layers.1.mlp.up_proj") == "nvfp4"
    assert scheme(modelopt, "model.layers.1.mlp.down_proj") == "fp8 (e4m3)"
    assert scheme(modelopt, "model.layers.2.mlp.down_proj") is None
    assert scheme(modelopt, "model.layers.0.mlp.down_proj") is None
