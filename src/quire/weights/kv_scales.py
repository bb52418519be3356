"""Names that checkpoints have for the scales and zero points of a layer's keys and values.

Scales after vLLM 0.32 (`model_loader/weight_utils.py`, `maybe_remap_kv_scale_name`), zero points
after compressed-tensors 0.20 (`quantization/lifecycle/initialize.py`). Knows names alone.
"""

from __future__ import annotations

import re
from typing import Final

BOTH: Final = ("k_scale", "v_scale")
"""Of keys and of values, below the layer's attention: our names."""
ZEROS: Final = ("k_zero_point", "v_zero_point")
"""Zero points of both."""
_SPELLINGS: Final = tuple(
    (re.compile(pattern), names)
    for pattern, names in (
        (r"(.+)\.k_proj\.(?:k_scale|output_scale)", BOTH[:1]),  # AutoFP8, ModelOpt, Quark
        (r"(.+)\.v_proj\.(?:v_scale|output_scale)", BOTH[1:]),
        (r"(.+)\.qkv_proj\.k_scale", BOTH[:1]),
        (r"(.+)\.qkv_proj\.v_scale", BOTH[1:]),
        (r"(.+\.self_attn)\.attn\.k_scale", BOTH[:1]),
        (r"(.+\.self_attn)\.attn\.v_scale", BOTH[1:]),
        (r"(.+)\.k_cache\.scale", BOTH[:1]),
        (r"(.+)\.v_cache\.scale", BOTH[1:]),
        (r"(.+\.self_attn)\.(?:attn\.)?kv_scale", BOTH),  # older ones: one for both
        (r"(.+)\.k_proj\.output_zero_point", ZEROS[:1]),
        (r"(.+)\.v_proj\.output_zero_point", ZEROS[1:]),
        (r"(.+\.self_attn)\.attn\.k_zero_point", ZEROS[:1]),
        (r"(.+\.self_attn)\.attn\.v_zero_point", ZEROS[1:]),
    )
)
_UNUSED: Final = re.compile(
    r".+\.(?:q_scale|prob_scale|prob_output_scale|q_proj\.q_scale|q_proj\.output_scale"
    r"|q_zero_point|q_proj\.output_zero_point)"
)
"""Of queries and of weights of values, which stay floats here."""
_ENDS: Final = ("scale", "zero_point")


def our_names(name: str) -> tuple[str, ...]:
    """What a tensor is called here: mostly as it is."""
    if not name.endswith(_ENDS):
        return (name,)
    for pattern, ours in _SPELLINGS:
        found = pattern.fullmatch(name)
        if found is not None:
            return tuple(f"{found[1]}.{one}" for one in ours)
    return (name,)


def is_unused(name: str) -> bool:
    """Whether it is a scale or zero point of attention that nothing here needs."""
    return name.endswith(_ENDS) and _UNUSED.fullmatch(name) is not None
