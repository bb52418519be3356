"""Small tensors written and read back by the libraries that define formats of quantised weights.

    python -m pip install --no-deps --target /tmp/formats compressed-tensors==0.20.0 loguru \
        bitsandbytes==0.50.2 mlx==0.32.4 mlx-cpu==0.32.4
    PYTHONPATH=/tmp/formats python tools/quantisation_golden.py

writes tests/quantization/golden/*.safetensors: the tensors of one layer as the library stores
them, `dequantised` as the library reads them, and `config`, the quantization_config, as metadata.
The tests need neither library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent.parent / "tests" / "quantization" / "golden"
Tensors = dict[str, torch.Tensor]


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.05


def integer_parameters(
    values: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = values.unflatten(1, (-1, group))
    if symmetric:
        scale = parts.abs().amax(2) / (2 ** (bits - 1) - 0.5)
        return scale, torch.zeros_like(scale, dtype=torch.int8)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-(2 ** (bits - 1)) - low / scale).round()
    return scale, zero.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)


def compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def write(name: str, form: str, state: Tensors, **said: Any) -> None:
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**said))
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        read = compressor.decompress(dict(stored), scheme)["weight"]
        if form.startswith(("nvfp4", "mxfp4")):
            # It reads these into bfloat16; the same formula in float32:
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
            from compressed_tensors.quantization.lifecycle.forward import dequantize

            packed = stored["weight_packed"]
            codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
            scale = stored["weight_scale"]
            exponents = 2.0 ** (scale.to(torch.int32) - 127).float()
            scale = scale.float() if form.startswith("nvfp4") else exponents
            whole = stored.get("weight_global_scale")
            read = dequantize(codes, scale, args=scheme.weights, global_scale=whole,
                              dtype=torch.float32)  # fmt: skip
        group = {"targets": ["Linear"], "weights": said}
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"g": group},
        }
        save(f"ct_{name}", stored, read, config)

    values = weight(24, 96)
    for bits in range(2, 9):
        for symmetric in (True, False):
            scale, zero = integer_parameters(values, bits, 32, symmetric)
            state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
            kind = "symmetric" if symmetric else "asymmetric"
            write(f"packed_{bits}_{kind}", "pack-quantized", state, num_bits=bits, type="int",
                  symmetric=symmetric, strategy="group", group_size=32)  # fmt: skip
    scale, zero = integer_parameters(values, 4, 96, True)
    state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
    write("packed_channel", "pack-quantized", state, num_bits=4, type="int", symmetric=True,
          strategy="channel")  # fmt: skip
    for strategy, scale in (
        ("channel", values.abs().amax(1, keepdim=True)), ("tensor", values.abs().max().reshape(1)),
    ):  # fmt: skip
        state = {"weight": values, "weight_scale": scale / 127}
        write(f"int8_{strategy}", "int-quantized", state, num_bits=8, type="int", symmetric=True,
              strategy=strategy)  # fmt: skip
        state = {"weight": values, "weight_scale": scale / 448}
        write(f"fp8_{strategy}", "float-quantized", state, num_bits=8, type="float", symmetric=True,
              strategy=strategy)  # fmt: skip
    wide = weight(40, 96)
    scale = torch.stack([
        torch.stack([wide[i : i + 16, j : j + 32].abs().max() for j in range(0, 96, 32)])
        for i in range(0, 40, 16)
    ]) / 448  # fmt: skip
    write("fp8_block", "float-quantized", {"weight": wide, "weight_scale": scale}, num_bits=8,
          type="float", symmetric=True, strategy="block", block_structure=[16, 32])  # fmt: skip
    whole = 448 * 6 / values.abs().max().reshape(1)
    scale = (values.unflatten(1, (-1, 16)).abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    state = {"weight": values, "weight_scale": scale.float(), "weight_global_scale": whole}
    write("nvfp4", "nvfp4-pack-quantized", state, num_bits=4, type="float", symmetric=True,
          strategy="tensor_group", group_size=16)  # fmt: skip
    scale = 2.0 ** (values.unflatten(1, (-1, 32)).abs().amax(2).log2().floor() - 2)
    state = {"weight": values, "weight_scale": scale}
    write("mxfp4", "mxfp4-pack-quantized", state, num_bits=4, type="float", symmetric=True,
          strategy="group", group_size=32)  # fmt: skip
    state = {"weight": values, "weight_scale": scale / 64}
    write("mxfp8", "mxfp8-quantized", state, num_bits=8, type="float", symmetric=True,
          strategy="group", group_size=32, scale_dtype=torch.uint8)  # fmt: skip


def bitsandbytes() -> None:
    from bitsandbytes import functional

    # Its CPU kernel reads a wrong scale where blocks of 64 do not divide a row.
    values = weight(16, 128)
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            codes, state = functional.quantize_4bit(
                values, blocksize=64, quant_type=kind, compress_statistics=nested
            )
            stored = {"weight": codes}
            for name, tensor in state.as_dict(packed=True).items():
                stored[f"weight.{name}"] = tensor
            read = functional.dequantize_4bit(codes, state)
            config = {
                "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
                "bnb_4bit_use_double_quant": nested,
            }  # fmt: skip
            save(f"bnb_{kind}{'_nested' if nested else ''}", stored, read, config)
    codes, scales, _ = functional.int8_vectorwise_quant(values.half())
    read = functional.int8_vectorwise_dequant(codes, scales)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    save("bnb_int8", {"weight": codes, "SCB": scales}, read, config)


def mlx() -> None:
    import mlx.core as mx

    values = mx.array(weight(24, 128).numpy())
    kinds = [("affine", bits, 32) for bits in (1, 2, 3, 4, 5, 6, 8)]
    kinds += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
    for mode, bits, group in kinds:
        made = mx.quantize(values, group, bits, mode=mode)
        read = mx.dequantize(*made, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
        names = ("weight", "scales", "biases")[: len(made)]
        stored = {name: torch.from_numpy(np.array(t)) for name, t in zip(names, made, strict=True)}
        config = {"bits": bits, "group_size": group, "mode": mode}
        save(f"mlx_{mode}_{bits}", stored, torch.from_numpy(np.array(read)), config)


def save(name: str, stored: Tensors, read: torch.Tensor, config: dict[str, Any]) -> None:
    tensors = {key: tensor.detach().contiguous() for key, tensor in stored.items()}
    read = read.detach().float().contiguous()
    text = json.dumps(config, default=str)
    save_file({**tensors, "dequantised": read}, GOLDEN / f"{name}.safetensors", {"config": text})
    print(name, {key: (str(t.dtype), list(t.shape)) for key, t in tensors.items()})


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    compressed_tensors()
    bitsandbytes()
    mlx()


if __name__ == "__main__":
    main()
