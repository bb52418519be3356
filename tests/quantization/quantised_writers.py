"""Checkpoints in every format that is read, made of a plain one: the simplest writers there are.

Each writer takes a weight `[N, K]` and gives the tensors of its format and the weight that they
stand for. Bits are packed with numpy's `packbits`, which has nothing in common with the readers.
"""

import json
import math
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quire.config.model import EMBEDDED_FOLDER

DEMO = EMBEDDED_FOLDER / "quire-demo"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes, bits):
    """Unsigned codes `[R, C]`, one field after another, as int32 `[R, ceil(C * bits / 32)]`."""
    rows, columns = codes.shape
    fields = np.unpackbits(codes.numpy().astype(np.uint8)[..., None], axis=2, bitorder="little")
    flat = fields[:, :, :bits].reshape(rows, columns * bits)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view(np.int32).copy())


def grouped(weight, group):
    """`[N, G, group]`; a short last group is filled up with zeros."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group))
    return padded.unflatten(1, (-1, group))


def integers(weight, bits, group, symmetric):
    """Unsigned codes `[N, K]`, scales and zeros `[N, G]`, and the weight."""
    parts, most = grouped(weight, group), 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(2) / (2 ** (bits - 1) - 0.5)).half().float()
        zeros = torch.full(scales.shape, 2.0 ** (bits - 1))
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(0, most)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    value = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    columns = weight.shape[1]
    codes = codes.flatten(1)[:, :columns].to(torch.uint8)
    return codes, scales, zeros.to(torch.uint8), value[:, :columns]


def gptq(bits=4, group=64, symmetric=True, version=1, act_order=False):
    def write(weight):
        order = torch.arange(weight.shape[1])
        if act_order:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1))
        codes, scales, zeros, value = integers(weight[:, order], bits, group, symmetric)
        back = order.argsort()
        stored = (zeros.to(torch.int16) - int(version == 1)) & (2**bits - 1)
        tensors = {
            "qweight": packed(codes[:, back], bits).t().contiguous(),
            "qzeros": packed(stored.t(), bits),
            "scales": scales.t().contiguous().half(),
            "g_idx": (back // group).int(),
        }
        return tensors, value[:, back]

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": act_order, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return config, write


def awq(version="gemm", group=64):
    def write(weight):
        codes, scales, zeros, value = integers(weight, 4, group, False)
        if version == "gemv":
            groups = scales.shape[1]
            multiple = {64: 2, 32: 4}.get(group, 1)
            words = math.ceil(math.ceil(groups / 8) / multiple) * multiple
            wide = torch.zeros(len(weight), words * 8)
            wide[:, :groups] = scales
            padded = torch.zeros(len(weight), words * 8)
            padded[:, :groups] = zeros
            return {
                "qweight": packed(codes, 4), "qzeros": packed(padded, 4), "scales": wide.half(),
            }, value  # fmt: skip

        def words_of(numbers):
            return packed(numbers.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4)

        return {
            "qweight": words_of(codes.t()), "qzeros": words_of(zeros.t()),
            "scales": scales.t().contiguous().half(),
        }, value  # fmt: skip

    config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
        "version": version,
    }  # fmt: skip
    return config, write


def auto_round(packing):
    """AutoRound: tensors as of GPTQ or AWQ."""
    made = {"auto_awq": awq, "auto_gptq": gptq, "gptqmodel": lambda: gptq(4, 64, False, 2)}
    said, write = made[packing]()
    config = {
        "quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": packing == "auto_gptq",
        "data_type": "int", "iters": 200, "autoround_version": "0.16.1",
        "packing_format": f"auto_round:{packing}", "block_name_to_quantize": "model.layers",
    }  # fmt: skip
    return config, write


def mlx(bits=4, group=64, mode="affine"):
    """mlx-lm. Its entry has no name of a method."""

    def affine(weight):
        parts = grouped(weight, group)
        biases = parts.amin(2).bfloat16().float()
        scales = ((parts.amax(2) - biases) / (2**bits - 1)).bfloat16().float()
        codes = ((parts - biases[..., None]) / scales[..., None]).round().clamp(0, 2**bits - 1)
        value = (codes * scales[..., None] + biases[..., None]).flatten(1)
        words = packed(codes.flatten(1).to(torch.uint8), bits).view(torch.uint32)
        tensors = {"weight": words, "scales": scales.bfloat16(), "biases": biases.bfloat16()}
        return tensors, value

    def floats(weight):
        if mode == "nvfp4":
            parts = grouped(weight, group)
            scales = (parts.abs().amax(2) / 6).clamp(2**-6, 448).to(torch.float8_e4m3fn)
            codes = nearest(parts / scales.float()[..., None], E2M1)
            value = (E2M1[codes.long()] * scales.float()[..., None]).flatten(1)
            codes = halves(codes.flatten(1))
        else:
            tensors, value = {"mxfp4": ct_mxfp4, "mxfp8": ct_mxfp8}[mode]()[1](weight)
            codes, scales = tensors.values()
        words = codes.view(torch.uint8).contiguous().view(torch.uint32)
        return {"weight": words, "scales": scales.view(torch.uint8)}, value

    config = {"bits": bits, "group_size": group, "mode": mode}
    return config, affine if mode == "affine" else floats


def ct_config(form, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def ct_int8():
    def write(weight):
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes * scales

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    return ct_config("int-quantized", weights, inputs), write


def ct_packed(bits=4, group=32, symmetric=True, act_order=False):
    def write(weight):
        order = torch.arange(weight.shape[1])
        if act_order:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1))
        codes, scales, zeros, value = integers(weight[:, order], bits, group, symmetric)
        back = order.argsort()
        tensors = {
            "weight_packed": packed(codes[:, back], bits), "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.t(), bits).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = (back // group).int()
        return tensors, value[:, back]

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group",
        "group_size": group, "actorder": "group" if act_order else None,
    }  # fmt: skip
    return ct_config("pack-quantized", weights), write


def e4m3(weight, scales):
    return (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def ct_fp8(strategy="tensor"):
    def write(weight):
        if strategy == "block":
            return fp8_blocks(weight, "weight_scale")
        most = weight.abs().amax() if strategy == "tensor" else weight.abs().amax(1, keepdim=True)
        scales = (most / 448).reshape(-1, *([1] if strategy == "channel" else []))
        codes = e4m3(weight, scales)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    return ct_config("float-quantized", weights, {"num_bits": 8, "type": "float"}), write


def fp8_blocks(weight, name, size=128):
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // size), -(-columns // size))
    codes, value = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = e4m3(weight[at], scales[i, j])
            value[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, name: scales}, value


def fp8(block=True):
    def write(weight):
        if block:
            return fp8_blocks(weight, "weight_scale_inv")
        scale = weight.abs().max() / 448
        codes = e4m3(weight, scale)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
        return tensors, codes.float() * scale

    config = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    return config | ({"weight_block_size": [128, 128]} if block else {}), write


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(values, table):
    return (values[..., None] - table).abs().argmin(-1).to(torch.uint8)


def halves(codes, high_first=False):
    first, second = codes[..., 0::2], codes[..., 1::2]
    return first << 4 | second if high_first else second << 4 | first


def mxfp(weight, most, group=32):
    parts = grouped(weight, group)
    exponents = parts.abs().amax(2).clamp(min=1e-30).log2().ceil() - most
    return parts, (exponents + 127).to(torch.uint8), 2.0**exponents


def ct_mxfp4():
    def write(weight):
        parts, exponents, scales = mxfp(weight, 2)
        codes = nearest(parts / scales[..., None], E2M1)
        value = (E2M1[codes.long()] * scales[..., None]).flatten(1)
        return {"weight_packed": halves(codes.flatten(1)), "weight_scale": exponents}, value

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return ct_config("mxfp4-pack-quantized", weights), write


def ct_mxfp8():
    def write(weight):
        parts, exponents, scales = mxfp(weight, 8)
        codes = e4m3(parts, scales[..., None])
        value = (codes.float() * scales[..., None]).flatten(1)
        return {"weight": codes.flatten(1), "weight_scale": exponents}, value

    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    return ct_config("mxfp8-quantized", weights), write


def nvfp4(weight):
    """Codes, scales e4m3, the factor of the tensor, the weight."""
    parts = grouped(weight, 16)
    most = parts.abs().amax(2)
    factor = weight.abs().max() / (448 * 6)
    scales = (most / 6 / factor).to(torch.float8_e4m3fn)
    return parts, scales, factor


def ct_nvfp4():
    def write(weight):
        parts, scales, factor = nvfp4(weight)
        whole = 1 / factor
        each = scales.float() / whole
        codes = nearest(parts / each[..., None], E2M1)
        tensors = {
            "weight_packed": halves(codes.flatten(1)), "weight_scale": scales,
            "weight_global_scale": whole.reshape(1),
        }  # fmt: skip
        return tensors, (E2M1[codes.long()] * each[..., None]).flatten(1)

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return ct_config("nvfp4-pack-quantized", weights), write


def modelopt_nvfp4():
    def write(weight):
        parts, scales, factor = nvfp4(weight)
        each = scales.float() * factor
        codes = nearest(parts / each[..., None], E2M1)
        tensors = {
            "weight": halves(codes.flatten(1)), "weight_scale": scales, "weight_scale_2": factor,
            "input_scale": torch.tensor(0.5),
        }  # fmt: skip
        return tensors, (E2M1[codes.long()] * each[..., None]).flatten(1)

    config = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"],
        "group_size": 16,
    }  # fmt: skip
    return config, write


def modelopt_fp8():
    config, write = fp8(block=False)
    return {"quant_method": "modelopt", "quant_algo": "FP8"}, write


def quark(kind, way="per_channel", **weight):
    """AMD Quark: `ct_*` tensors under other names and another configuration."""
    made = {"fp8_e4m3": lambda: ct_fp8("channel" if way == "per_channel" else "tensor"),
            "int8": ct_int8, "fp4": ct_mxfp4}[kind]()[1]  # fmt: skip

    def write(matrix):
        tensors, value = made(matrix)
        codes = tensors.pop("weight_packed", tensors.get("weight"))
        tensors |= {"weight": codes, "input_scale": torch.tensor(0.5)}
        if kind != "fp4":
            tensors["weight_scale"] = tensors["weight_scale"].squeeze()
        if kind == "int8":
            tensors["weight_zero_point"] = torch.zeros(len(codes), dtype=torch.int8)
        return tensors, value

    said = {"dtype": kind, "qscheme": way, "symmetric": True, "ch_axis": 0, **weight}
    inputs = {"dtype": kind, "is_dynamic": False, "qscheme": "per_tensor"}
    layer = {"weight": said, "input_tensors": inputs, "output_tensors": None, "bias": None}
    config = {
        "quant_method": "quark", "exclude": ["lm_head", "re:.*mlp.gate$"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "global_quant_config": layer, "layer_quant_config": {"*v_proj": layer},
        "layer_type_quant_config": {},
    }  # fmt: skip
    return config, write


def bnb_int8():
    def write(weight):
        most = weight.abs().amax(1)
        codes = (weight * (127 / most)[:, None]).round().to(torch.int8)
        step = torch.tensor(7.874015718698502e-3)
        tensors = {
            "weight": codes,
            "SCB": most,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return tensors, codes * (most * step)[:, None]

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, write


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def bnb_nf4(block=64):
    def write(weight):
        flat = weight.reshape(-1, block)
        absmax = flat.abs().amax(1)
        codes = nearest(flat / absmax[:, None], NF4)
        state = {"blocksize": block, "quant_type": "nf4", "dtype": "bfloat16",
                 "shape": list(weight.shape)}  # fmt: skip
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors = {
            "weight": halves(codes.reshape(-1), True).reshape(-1, 1), "weight.absmax": absmax,
            "weight.quant_map": NF4.clone(), "weight.quant_state.bitsandbytes__nf4": text,
        }  # fmt: skip
        return tensors, (NF4[codes.long()] * absmax[:, None]).reshape(weight.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return config, write


def checkpoint(folder, made, layers=5):
    """The embedded model, its `_proj` layers in a format, and a plain twin with the weights that
    these stand for: two folders. It may be cut to fewer layers."""
    config, write = made
    known = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": layers}
    plain, quantised = {}, {}
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers:
            continue
        if "_proj.weight" not in name:
            plain[name] = quantised[name] = tensor
            continue
        tensors, value = write(tensor.float())
        stem = name.removesuffix("weight")
        quantised |= {stem + rest: t.contiguous() for rest, t in tensors.items()}
        plain[name] = value.contiguous()
    folders = folder / "plain", folder / "quantised"
    for to, tensors in zip(folders, (plain, quantised), strict=True):
        to.mkdir(parents=True)
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (DEMO / name).exists():
                shutil.copy(DEMO / name, to / name)
    (folders[0] / "config.json").write_text(json.dumps(known))
    if "quant_method" not in config:
        known["quantization"] = config
    (folders[1] / "config.json").write_text(json.dumps({**known, "quantization_config": config}))
    return folders


FORMATS = {
    "ct int8": ct_int8,
    "ct int4 g32": ct_packed,
    "ct int4 g64 asymmetric": lambda: ct_packed(4, 64, False),
    "ct int3 g32": lambda: ct_packed(3, 32, False),
    "ct int8 g64 packed": lambda: ct_packed(8, 64),
    "ct int4 actorder": lambda: ct_packed(4, 64, True, True),
    "ct fp8 tensor": ct_fp8,
    "ct fp8 channel": lambda: ct_fp8("channel"),
    "ct fp8 block": lambda: ct_fp8("block"),
    "ct nvfp4": ct_nvfp4,
    "ct mxfp4": ct_mxfp4,
    "ct mxfp8": ct_mxfp8,
    "gptq 4": gptq,
    "gptq 4 v2 asymmetric": lambda: gptq(4, 32, False, 2),
    "gptq 4 desc_act": lambda: gptq(4, 64, False, 1, True),
    "gptq 3": lambda: gptq(3, 64, False),
    "gptq 2": lambda: gptq(2, 32, False),
    "gptq 8": lambda: gptq(8, 64, False),
    "gptq 4 short last group": lambda: gptq(4, 96),
    "gptq 8 desc_act short last group": lambda: gptq(8, 96, False, 1, True),
    "awq gemm": awq,
    "awq gemv": lambda: awq("gemv"),
    "auto-round gptq": lambda: auto_round("auto_gptq"),
    "auto-round gptqmodel": lambda: auto_round("gptqmodel"),
    "auto-round awq": lambda: auto_round("auto_awq"),
    "mlx 3": lambda: mlx(3, 32),
    "mlx 4": mlx,
    "mlx 6": lambda: mlx(6),
    "mlx 8": lambda: mlx(8, 128),
    "mlx mxfp4": lambda: mlx(4, 32, "mxfp4"),
    "mlx mxfp8": lambda: mlx(8, 32, "mxfp8"),
    "mlx nvfp4": lambda: mlx(4, 16, "nvfp4"),
    "fp8 block": fp8,
    "fp8 tensor": lambda: fp8(False),
    "modelopt fp8": modelopt_fp8,
    "modelopt nvfp4": modelopt_nvfp4,
    "quark fp8 tensor": lambda: quark("fp8_e4m3", "per_tensor"),
    "quark fp8 channel": lambda: quark("fp8_e4m3"),
    "quark int8": lambda: quark("int8"),
    "quark mxfp4": lambda: quark("fp4", "per_group", group_size=32, scale_format="e8m0"),
    "bnb int8": bnb_int8,
    "bnb nf4": bnb_nf4,
}
