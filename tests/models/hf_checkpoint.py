"""Tiny random checkpoints of any family, made and judged by transformers.

A row of a table (`rows_*.py`) is a configuration; `build` writes the folder and returns
transformers' own model, which `hf_logits` and `hf_greedy` ask.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Row:
    """One family or variant."""

    name: str
    config: str
    """Name of a transformers configuration class."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    patch: dict[str, Any] = field(default_factory=dict)
    """Entries written over the saved config.json; `None` removes one. For other spellings."""
    prepare: Callable[[Any], None] | None = None
    """Called with the transformers model before it is saved."""
    convert: Callable[[Path], None] | None = None
    """Called with the folder once it is written, to give it another naming."""
    architecture: str | None = None
    """Name of the transformers model class, if not the one for causal language models."""
    attention: str = "eager"
    """Which of transformers' implementations judges."""
    lengths: tuple[int, ...] = (5, 90, 33)
    """Tokens of each prompt; at least one is longer than any window."""
    exact: float = 1e-4
    """Largest difference of a float32 logprob."""
    bf16: float = 0.05
    """Largest relative error of bf16 logits: norm of the difference by norm of the logits."""


def build(row: Row, folder: Path, dtype=torch.float32):
    """Write the row's checkpoint; returns the transformers model in float32, on the same weights
    (rounded to `dtype`)."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = getattr(transformers, row.config)(**row.kwargs)
    config._attn_implementation = row.attention
    torch.manual_seed(0)
    if row.architecture:
        model = getattr(transformers, row.architecture)(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=row.attention
        )
    model = model.eval().float()
    with torch.no_grad():
        _randomise(model)
        if row.prepare:
            row.prepare(model)
        for p in model.parameters():
            p.copy_(p.to(dtype).float())
    # A copy, because rotary frequencies and the like must stay float32 in the judge.
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    _patch(folder / "config.json", row.patch)
    if row.convert:
        row.convert(folder)
    return model


def _randomise(model):
    """Weights that give logits worth comparing; no norm weight or bias stays at its default."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.add_(noise * (0.2 if p.dim() < 2 else p.shape[-1] ** -0.5))


def _patch(path: Path, changes: dict[str, Any]):
    config = {**json.loads(path.read_text()), **changes}
    gone = [name for name, value in changes.items() if value is None]
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in gone}))


@torch.inference_mode()
def hf_logits(model, ids):
    """Logits `[len(ids), V]` of one request, without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def hf_greedy(model, ids, count):
    """`ids` and the `count` tokens that follow greedily."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(hf_logits(model, ids)[-1].argmax()))
    return ids
