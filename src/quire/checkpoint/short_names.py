"""What a name like `llama3.2` or `qwen2.5:0.5b` may mean, which is neither a folder nor `org/name`.

Nothing is downloaded on a guess: the user gets a full name to copy. Knows the names of popular
models and of those in the cache.
"""

from __future__ import annotations

import contextlib
from typing import Final

from quire.checkpoint.hub_cache import cached_models
from quire.spelling import nearest

EXAMPLES: Final = {
    "all-minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "bge": "BAAI/bge-small-en-v1.5",
    "bloom": "bigscience/bloom-560m",
    "deepseek": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "falcon": "tiiuae/falcon-7b-instruct",
    "gemma": "google/gemma-3-1b-it",
    "gpt-oss": "openai/gpt-oss-20b",
    "gpt2": "openai-community/gpt2",
    "granite": "ibm-granite/granite-3.1-2b-instruct",
    "llama": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama": "meta-llama/Llama-3.2-1B-Instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "olmo": "allenai/OLMo-2-0425-1B-Instruct",
    "opt": "facebook/opt-125m",
    "phi": "microsoft/Phi-3.5-mini-instruct",
    "pythia": "EleutherAI/pythia-160m",
    "qwen3": "Qwen/Qwen3-0.6B",
    "qwen": "Qwen/Qwen2.5-0.5B-Instruct",
    "smollm": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "stablelm": "stabilityai/stablelm-2-1_6b-chat",
    "starcoder": "bigcode/starcoder2-3b",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""By the beginning of a family's names, an example; a small model if the family has one."""
_EMBEDDED: Final = "quire-demo"


def advice(name: str) -> str:
    """The rest of a message about a name that has no slash and is not a folder."""
    short = name.lower().partition(":")[0]
    if (near := nearest(short, [_EMBEDDED, *_cached()])) is not None:
        return f"; did you mean {_cached().get(near, near)}?"
    example = EXAMPLES.get(family(name))
    if example is None:
        return ""
    return f": a model on the hub has a name like org/name, here perhaps {example}"


def family(name: str) -> str:
    """The row of `EXAMPLES` for a name, or an empty string."""
    rows = (key for key in EXAMPLES if name.lower().startswith(key))
    return max(rows, key=len, default="")


def _cached() -> dict[str, str]:
    """Full names in the cache, by the part after the slash."""
    with contextlib.suppress(OSError):
        return {model.name.partition("/")[2].lower(): model.name for model in cached_models()}
    return {}
