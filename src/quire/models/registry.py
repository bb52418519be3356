"""From the architecture that a checkpoint names to a loaded model that generates text.

Puts family, attention backend and weights together. Models that pool are loaded by
`models/pooling.py`. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from quire import envs
from quire.attention.base import AttentionBackend, AttentionNeed
from quire.attention.select import select_backend
from quire.config.online_schemes import OnlinePlan, online_plan
from quire.config.quant_methods import method_of
from quire.config.shape import LayerKV, ModelShape
from quire.errors import ModelLoadError
from quire.kernels.dispatch import Ops, default_ops
from quire.kernels.dtypes import TORCH_DTYPES, torch_dtype
from quire.layers.context import LayerContext
from quire.layers.linear_method import PLAIN, WEIGHT_FORMATS, WeightFormat
from quire.logger import get_logger
from quire.models.base import CausalLM
from quire.models.decoder import DecoderForCausalLM
from quire.models.inspection import describe
from quire.quantization.online import OnlineFormat
from quire.quantization.refused import REFUSED
from quire.registry import Registry
from quire.weights.loader import load_weights

logger = get_logger(__name__)

MODELS: Final[Registry[type[DecoderForCausalLM]]] = Registry(
    "model architecture",
    {
        name: f"quire.models.families.{place}"
        for name, place in {
            "BloomForCausalLM": "bloom:BloomForCausalLM",
            "ChatGLMForConditionalGeneration": "chatglm:ChatGLMForConditionalGeneration",
            "ChatGLMModel": "chatglm:ChatGLMForConditionalGeneration",
            "Cohere2ForCausalLM": "cohere:Cohere2ForCausalLM",
            "CohereForCausalLM": "cohere:CohereForCausalLM",
            "DeepseekV2ForCausalLM": "deepseek:DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM": "deepseek:DeepseekV3ForCausalLM",
            "FalconForCausalLM": "falcon:FalconForCausalLM",
            "Gemma2ForCausalLM": "gemma:Gemma2ForCausalLM",
            "Gemma3ForCausalLM": "gemma:Gemma3ForCausalLM",
            "Gemma3ForConditionalGeneration": "gemma:Gemma3ForCausalLM",
            "GemmaForCausalLM": "gemma:GemmaForCausalLM",
            "Glm4ForCausalLM": "glm:Glm4ForCausalLM",
            "Glm4MoeForCausalLM": "glm_moe:Glm4MoeForCausalLM",
            "GlmForCausalLM": "glm:GlmForCausalLM",
            "GPT2LMHeadModel": "gpt2:GPT2LMHeadModel",
            "GPTBigCodeForCausalLM": "gpt_bigcode:GPTBigCodeForCausalLM",
            "GPTJForCausalLM": "gptj:GPTJForCausalLM",
            "GPTNeoXForCausalLM": "gpt_neox:GPTNeoXForCausalLM",
            "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
            "GraniteForCausalLM": "granite:GraniteForCausalLM",
            "GraniteMoeForCausalLM": "granite_moe:GraniteMoeForCausalLM",
            "LlamaForCausalLM": "llama:LlamaForCausalLM",
            "MistralForCausalLM": "mistral:MistralForCausalLM",
            "MixtralForCausalLM": "mixtral:MixtralForCausalLM",
            "MPTForCausalLM": "mpt:MptForCausalLM",
            "MptForCausalLM": "mpt:MptForCausalLM",
            "Olmo2ForCausalLM": "olmo2:Olmo2ForCausalLM",
            "OlmoeForCausalLM": "olmoe:OlmoeForCausalLM",
            "OLMoForCausalLM": "olmo:OLMoForCausalLM",
            "OlmoForCausalLM": "olmo:OlmoForCausalLM",
            "OPTForCausalLM": "opt:OPTForCausalLM",
            "Phi3ForCausalLM": "phi:Phi3ForCausalLM",
            "PhiForCausalLM": "phi:PhiForCausalLM",
            "Qwen2ForCausalLM": "qwen:Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM": "qwen_moe:Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM": "qwen:Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM": "qwen_moe:Qwen3MoeForCausalLM",
            "RWForCausalLM": "falcon:FalconForCausalLM",
            "SmolLM3ForCausalLM": "smollm3:SmolLM3ForCausalLM",
            "StableLmForCausalLM": "stablelm:StableLmForCausalLM",
            "Starcoder2ForCausalLM": "starcoder2:Starcoder2ForCausalLM",
        }.items()
    },
    error=ModelLoadError,
    plugins="model",
    subclass_of="quire.models.decoder:DecoderForCausalLM",
)
"""Architecture in `config.json` to class."""


@torch.inference_mode()
def load_model(
    shape: ModelShape,
    folder: Path,
    dtype: str = "auto",
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    max_model_len: int | None = None,
    load_format: str = "auto",
    attention_backend: str | None = None,
    ops: Ops | None = None,
    quantization: str | OnlinePlan | None = None,
    kv_dtypes: frozenset[str] = frozenset(),
) -> CausalLM:
    """Build the model of a folder and load its weights.

    `dtype` `auto` is the checkpoint's own type; `device` `auto` a GPU if there is one.
    `progress(done, total)` hears bytes. `max_model_len` is the greatest length served, by which
    some rotary scalings go; `None` is what the model was made for. `load_format`,
    `attention_backend` and `quantization` are the options of those names. The model keeps the
    operations `ops`; by default they are those of the process. `kv_dtypes`: types of KV
    caches besides the model's.

    Raises:
        ModelLoadError: the architecture, a size, a file or a tensor is not as it must be.
        ConfigError: no attention backend serves the model on this device.
    """
    device = resolve_device(device)
    kind = resolve_dtype(shape, dtype)
    weights = weight_format(shape, quantization)
    model = build_model(
        shape, kind, device, max_model_len, attention_backend, ops, weights, kv_dtypes
    )
    check_names(weights)
    parameters = model.parameters()
    tree = describe(model, parameters) if envs.LOG_MODEL_INSPECTION else ""
    model.num_parameters = load_weights(
        folder, parameters, model.name_rules(), model.dtype, device, progress, load_format
    )
    if tree:
        logger.info("%s", tree)
    return model


def build_model(
    shape: ModelShape,
    dtype: str,
    device: str,
    max_model_len: int | None = None,
    attention_backend: str | None = None,
    ops: Ops | None = None,
    weights: WeightFormat | None = None,
    kv_dtypes: frozenset[str] = frozenset(),
) -> DecoderForCausalLM:
    """The model without its weights; `dtype` and `device` are settled.

    `weights` says how linear layers are kept; by default as the checkpoint has them.

    Raises:
        ModelLoadError: the architecture or a size is not as it must be.
        ConfigError: no attention backend serves the model on this device.
    """
    _mention_code(shape)
    family = MODELS.get(shape.architecture)
    _check(family, shape)
    weights = weights or weight_format(shape)
    context = LayerContext(ops or default_ops(), torch_dtype(dtype), weights)
    attention = _attention(family, shape, dtype, device, attention_backend, context.ops, kv_dtypes)
    return family(shape, torch_dtype(dtype), device, attention, max_model_len, context)


def kv_layers(shape: ModelShape) -> tuple[LayerKV, ...]:
    """What each layer of a model keeps of a token.

    Raises:
        ModelLoadError: no family of that name.
    """
    family = MODELS.get(shape.architecture)
    _check(family, shape)
    return family.kv_layers(shape)


def _check(family: type[DecoderForCausalLM], shape: ModelShape) -> None:
    """Refuse a configuration whose entries are not of the kind that the family needs.

    Raises:
        ModelLoadError: what is wrong with it.
    """
    try:
        family.style(shape).settled(shape)
        windows = [layer.window for layer in family.kv_layers(shape)]
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ModelLoadError(
            f"config.json has an entry that {shape.architecture} cannot use: {error}"
        ) from error
    for window in windows:
        if window is not None and (type(window) is not int or window < 1):
            raise ModelLoadError(
                f"config.json: 'sliding_window' must be a positive integer, got {window!r:.60}"
            )


def resolve_dtype(shape: ModelShape, dtype: str) -> str:
    """The type a model computes with: `float32`, `bfloat16` or `float16`.

    Raises:
        ModelLoadError: `dtype` is `auto` and the checkpoint's type is none of these.
    """
    if dtype != "auto":
        return dtype
    own = shape.dtype.removeprefix("torch.")
    if own not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise ModelLoadError(f"the checkpoint's dtype must be one of {known}, got {own!r}")
    return own


def resolve_device(device: str) -> str:
    """`auto` as `cuda` if there is a GPU, else `cpu`."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _attention(
    family: type[DecoderForCausalLM],
    shape: ModelShape,
    dtype: str,
    device: str,
    wanted: str | None,
    ops: Ops,
    kv_dtypes: frozenset[str],
) -> AttentionBackend:
    kind, layers = torch.device(device).type, family.kv_layers(shape)
    need = AttentionNeed(
        kind,
        dtype,
        shape.num_heads,
        layers[0].num_kv_heads,
        layers[0].key_dim,
        family.attention_features(shape),
        kv_dtypes | {layer.dtype for layer in layers if layer.dtype is not None},
    )
    selection = select_backend(need, wanted, ops)
    if wanted is not None:
        logger.info("attention backend %s: %s", wanted, selection.backend.name)
    for name, reason in selection.rejected:
        logger.info("attention backend %s not used: it %s", name, reason)
    return selection.backend


def _mention_code(shape: ModelShape) -> None:
    if shape.raw.get("auto_map"):
        logger.warning(
            "config.json names code of its own (auto_map); quire never runs it and uses its own %s",
            shape.architecture,
        )


def check_names(weights: WeightFormat) -> None:
    """Once a model is built with it: every layer that options name is there.

    Raises:
        ConfigError: one is not.
    """
    if isinstance(weights, OnlineFormat):
        weights.check_names()


def weight_format(
    shape: ModelShape, quantization: str | OnlinePlan | None = None, encoder: bool = False
) -> WeightFormat:
    """How linear layers are kept: as the checkpoint's `quantization_config` says, or, if it has
    none, as a plan or the name of a scheme says (`quire.config.online_schemes`).

    Raises:
        ModelLoadError: in a way that nothing here reads.
        ConfigError: there is no such scheme.
    """
    said = shape.raw.get("quantization_config")
    if not said:
        plan = quantization
        if isinstance(plan, str):
            plan = online_plan(plan, {})
        return PLAIN if plan is None else OnlineFormat(plan, encoder)
    if not isinstance(said, dict):
        raise ModelLoadError(f"quantization_config must be an object, got {said!r:.80}")
    method = method_of(said)
    if not isinstance(method, str) or method not in WEIGHT_FORMATS:
        advice = REFUSED.get(str(method), "use a float32, bfloat16 or float16 one")
        raise ModelLoadError(
            f"the checkpoint is quantised ({method or said!s:.80}), which quire does not "
            f"read: {advice}. It reads {', '.join(sorted(WEIGHT_FORMATS))}"
        )
    return WEIGHT_FORMATS.get(method)(said)
