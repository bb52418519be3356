"""Dense families and their variants, for `test_families.py`."""

from hf_checkpoint import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What most configuration classes call their sizes."""


def row(name, config, **changes):
    """A row that starts from `SIZES`."""
    own = {k: changes.pop(k) for k in ("patch", "exact", "bf16", "lengths") if k in changes}
    return Row(name, config, {**SIZES, **changes}, **own)


DENSE: tuple[Row, ...] = (
    row("llama", "LlamaConfig"),
    row("llama tied", "LlamaConfig", tie_word_embeddings=True, num_key_value_heads=1),
)
