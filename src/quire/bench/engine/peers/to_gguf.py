"""A folder of bf16 safetensors as a GGUF file for llama.cpp: the same weights, no tokenizer.

    python to_gguf.py MODEL_DIR OUT.gguf [bf16|q8_0|q4_0]

For timings on ids, and for the shapes of `make_model.py` (Qwen2 and Llama). Needs the package
`gguf` and neither torch nor quire: it runs in the peer's environment. Matrices stay bf16, vectors
become float32, as llama.cpp asks for them. Other kinds are what llama.cpp itself makes of that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm"}


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor as its bf16 bits, by Hugging Face's name."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        size = int(data[:8].view("<u8")[0])
        start = 8 + size
        for name, about in json.loads(data[8:start].tobytes()).items():
            if name == "__metadata__":
                continue
            if about["dtype"] != "BF16":
                sys.exit(f"{name} is {about['dtype']}; only bf16 weights can be converted")
            first, last = (start + offset for offset in about["data_offsets"])
            yield name, data[first:last].view("<u2").reshape(about["shape"])


def their_name(name: str) -> str:
    """What llama.cpp calls a tensor."""
    module, _, kind = name.removeprefix("model.").rpartition(".")
    if not module.startswith("layers."):
        return f"{WHOLE[module]}.{kind}"
    _, layer, rest = module.split(".", 2)
    return f"blk.{layer}.{LAYER[rest]}.{kind}"


def interleaved(bits: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in the order of llama.cpp's rotary embedding for Llama: pairs side by side."""
    halves = bits.reshape(heads, 2, -1, *bits.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(bits.shape)


def convert(folder: Path, target: Path) -> None:
    """Write the file."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = config["model_type"]
    writer = gguf.GGUFWriter(target, kind)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads["attn_q"])
    writer.add_head_count_kv(heads["attn_k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # Where newer configurations keep it, too.
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    for name, bits in tensors(folder):
        new = their_name(name)
        part = new.split(".")[-2]
        if kind == "llama" and part in heads:
            bits = interleaved(bits, heads[part])
        if bits.ndim == 1:
            writer.add_tensor(new, (bits.astype("<u4") << 16).view("<f4"))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(new, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, target: Path, kind: str) -> None:
    """llama.cpp's own quantisation of a bf16 file, with its defaults."""
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        sys.exit(f"llama.cpp cannot quantise {source} to {kind}")


def main() -> None:
    """Convert, and quantise if that is asked for."""
    folder, target, kind = Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or ["bf16"])[0]
    if kind == "bf16":
        convert(folder, target)
        return
    plain = target.with_suffix(".bf16")
    convert(folder, plain)
    quantise(plain, target, kind)
    plain.unlink()


if __name__ == "__main__":
    main()
