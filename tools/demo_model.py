"""The Llama-shaped network behind quire-demo, in plain torch, for training and checking.

It knows the Hugging Face weight names (its own parameter names are those names), the
Hugging Face folder layout for a Llama model, and a small batched greedy decoder with a
key/value cache.  It does not know the corpus, the tokenizer's training, or anything of
quire's engine: the engine has its own implementation, and this one exists so that the
model can be trained without it and the engine be checked against something independent.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model; the names follow Hugging Face's LlamaConfig."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


MAIN = ModelConfig()
DRAFT = ModelConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def rotary_tables(config: ModelConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, head_dim] in the rotate-half layout."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64), config.rope_theta**-exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to x [batch, heads, length, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; with a cache it appends to it and sees all of it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.config = config
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        dim = self.config.head_dim
        q = self.q_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
            cache[:] = [k, v]
        # Repeating the key/value heads keeps this on the fast causal kernel.
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and last norm; exists so that names start with `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The whole model; the output head is the embedding (tied)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        cos, sin = rotary_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        # Residual outputs start small so that depth does not raise the variance.
        for name, weight in self.named_parameters():
            if weight.dim() != 2:
                continue
            std = 0.02 if "embed" in name else weight.shape[1] ** -0.5 * 0.6
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            nn.init.normal_(weight, std=std)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Final hidden states for ids [batch, length], causal, from position 0."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary scores of hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden(ids))


@torch.inference_mode()
def generate(
    model: Llama, prompts: list[list[int]], stops: set[int], max_tokens: int, batch: int = 64
) -> list[list[int]]:
    """Greedy continuations (without the stop token), prompts batched by similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        outputs = _generate_batch(model, [prompts[i] for i in chosen], stops, max_tokens)
        for index, output in zip(chosen, outputs, strict=True):
            results[index] = output
    return results


def _generate_batch(
    model: Llama, prompts: list[list[int]], stops: set[int], max_tokens: int
) -> list[list[int]]:
    """Left-padded batch: each row keeps its own positions, padding is masked."""
    longest = max(len(p) for p in prompts)
    pad = torch.tensor([longest - len(p) for p in prompts])
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    caches: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    seen = 0
    for _ in range(max_tokens):
        keys = torch.arange(seen + ids.shape[1])
        queries = keys[seen:]
        mask = (keys[None, :] <= queries[:, None])[None] & (keys >= pad[:, None])[:, None, :]
        # A padded query row would see nothing and give NaN; it may see itself.
        mask = (mask | (keys[None, :] == queries[:, None]))[:, None]
        positions = (queries[None, :] - pad[:, None]).clamp(min=0)
        cos, sin = model.cos[positions][:, None], model.sin[positions][:, None]
        x = model.model.embed_tokens(ids)
        for layer, cache in zip(model.model.layers, caches, strict=True):
            x = layer(x, cos, sin, mask, cache)
        best = model.logits(model.model.norm(x[:, -1])).argmax(-1).tolist()
        seen += ids.shape[1]
        for row, token in enumerate(best):
            if not done[row]:
                done[row] = token in stops
                if not done[row]:
                    outputs[row].append(token)
        if all(done):
            break
        ids = torch.tensor(best)[:, None]
    return outputs


def hf_config(config: ModelConfig, bos: int, eos: int) -> dict[str, object]:
    """The contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pad_token_id": bos,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def save_weights(model: Llama, path: Path) -> None:
    """Write model.safetensors in bfloat16 under Hugging Face's names."""
    from safetensors.torch import save_file

    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    scratch = path.with_suffix(".tmp")
    save_file(state, str(scratch), metadata={"format": "pt"})
    scratch.chmod(0o644)
    # A reader never sees half a file.
    scratch.replace(path)


def load_model(folder: Path) -> Llama:
    """Read a folder this module wrote; the (bfloat16) weights are computed in float32."""
    from safetensors.torch import load_file

    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} holds no model.safetensors; make it with tools/train_demo.py"
        )
    raw = json.loads((folder / "config.json").read_text())
    names = ModelConfig.__dataclass_fields__
    model = Llama(ModelConfig(**{k: v for k, v in raw.items() if k in names}))
    model.load_state_dict(
        {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    )
    return model.eval()
