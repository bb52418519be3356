"""Tiny random models made by transformers, saved as users have them, and a small vocabulary."""

from __future__ import annotations

import functools
import json
import string
import warnings
from pathlib import Path
from typing import Any

import torch

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
VOCAB = [*SPECIAL, *LETTERS, "hello", "world", "paris", "france", "the", ".", ",", "?"]
WORDS = ["hello", "world", "paris", "france", "the", "cat", "sat", ".", "?"]

BASE: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
LLAMA: dict[str, Any] = {"num_key_value_heads": 2, "num_hidden_layers": 2}
MODERN: dict[str, Any] = {
    "local_attention": 16, "cls_token_id": 2, "sep_token_id": 3, "num_hidden_layers": 4,
}  # fmt: skip


@functools.cache
def transformers() -> Any:
    """The library; its import may warn of things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers as library

        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        return library


def make(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Any:
    """Save a random model of an architecture; returns transformers' own, ready to compare."""
    library = transformers()
    kind = getattr(library, architecture)
    defaults = {"Llama": LLAMA, "Qwen": LLAMA, "Modern": MODERN}
    extra = next((e for name, e in defaults.items() if architecture.startswith(name)), {})
    torch.manual_seed(seed)
    model = kind(kind.config_class(**{**BASE, **extra, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial weights are so small that every text would look alike.
            if parameter.dim() > 1:
                parameter.mul_(10.0)
            elif "bias" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """`vocab.txt` and its configuration: no tokenizer.json."""
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n", "utf-8")
    config = {"do_lower_case": True, "tokenizer_class": "BertTokenizer", "cls_token": "[CLS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def sentence_transformer(
    folder: Path, mode: str = "pooling_mode_mean_tokens", *, normalize: bool = True, **extra: Any
) -> None:
    """The files that make a folder a sentence-transformers model."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    kinds += [(place, "Dense") for place in extra.pop("dense", ())]
    kinds += [("2_Normalize", "Normalize")] if normalize else []
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 48, mode: True, **extra}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), "utf-8")


def prompts(count: int = 7, longest: int = 120, seed: int = 1) -> list[list[int]]:
    """Random prompts of many lengths, in the form [CLS] ... [SEP]."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(1, longest - 2, count).int().tolist()
    draw = [torch.randint(5, len(VOCAB), (n,), generator=generator).tolist() for n in lengths]
    return [[2, *ids, 3] for ids in draw]


def hidden(model: Any, ids: list[int]) -> torch.Tensor:
    """Last hidden states of one prompt, `[n, H]`, by transformers."""
    base = getattr(model, model.base_model_prefix, model)
    with torch.inference_mode():
        return base(torch.tensor([ids])).last_hidden_state[0]


def logits(model: Any, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """Classification logits of one prompt, by transformers."""
    extra = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        return model(torch.tensor([ids]), **extra).logits[0]
