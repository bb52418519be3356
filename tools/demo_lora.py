"""Low-rank adapters for the training-side model, saved under PEFT's names.

It knows how a frozen linear layer gets a low-rank addition and what PEFT calls the parts.
It does not know what the adapter is trained to say.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from demo_model import Llama

LORA_RANK = 8
LORA_ALPHA = 16
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """base(x) + alpha / r * B A x, with only A and B trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.lora_B = nn.Linear(LORA_RANK, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * (LORA_ALPHA / LORA_RANK)


def add_lora(model: Llama) -> Llama:
    """Freeze the model and put an untrained adapter on every target."""
    for weight in model.parameters():
        weight.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, part in list(block.named_children()):
                if name in LORA_TARGETS:
                    setattr(block, name, LoraLinear(part))
    return model


def save_lora(model: Llama, path: Path) -> None:
    """Write the adapter's weights in bfloat16."""
    from safetensors.torch import save_file

    state = {
        f"base_model.model.{name}": weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if ".lora_" in name
    }
    scratch = path.with_suffix(".tmp")
    save_file(state, str(scratch), metadata={"format": "pt"})
    scratch.chmod(0o644)
    scratch.replace(path)


def load_lora(model: Llama, path: Path) -> Llama:
    """Put a saved adapter on a model."""
    from safetensors.torch import load_file

    prefix = "base_model.model."
    state = {k.removeprefix(prefix): v.float() for k, v in load_file(path).items()}
    add_lora(model).load_state_dict(state, strict=False)
    return model.eval()
