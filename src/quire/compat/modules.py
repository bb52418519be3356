"""The table of vLLM's modules that scripts import, and of where their names are defined in quire.

A name that quire cannot provide still has a row if scripts commonly import it: it is refused with a
message when it is used (`refused.py`). Modules without a row are refused on import, with the
message in `ELSEWHERE` if there is one.
"""

from __future__ import annotations

from typing import Final

VLLM_VERSION: Final = "0.32.0"
"""`vllm.__version__`: the version that these names are taken from. Scripts compare against it."""


def _of(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_POOLED = tuple(
    f"{kind}{what}"
    for kind in ("Pooling", "Embedding", "Classification", "Scoring")
    for what in ("Output", "RequestOutput")
)
_OUTPUTS = _of("quire.outputs", "RequestOutput", "CompletionOutput", *_POOLED, "FinishReason")
_VERSION = _of("quire.compat.version", "__version__", "__version_tuple__")
_LLM = {"LLM": "quire:LLM"}
_ENGINE = {"LLMEngine": "quire.compat.llm_engine:LLMEngine"}
_ASYNC = {
    "AsyncLLM": "quire.compat.async_llm:AsyncLLM",
    "AsyncLLMEngine": "quire.compat.async_llm:AsyncLLM",
}
_ARGUMENTS = _of("quire.compat.engine_args", "EngineArgs", "AsyncEngineArgs")
_PROMPTS = {
    **_of("quire.engine.frontend.prompts", "TextPrompt", "TokensPrompt", "PromptType"),
    "SingletonPrompt": "quire.engine.frontend.prompts:PromptType",
    **_of("quire.compat.refused", "EmbedsPrompt", "ExplicitEncoderDecoderPrompt"),
}
_PARAMS = {
    **_of("quire.params", "SamplingParams", "RequestOutputKind", "SamplingType",
          "StructuredOutputsParams", "RepetitionDetectionParams"),
    **_of("quire.engine.frontend.beam_params", "BeamSearchParams"),
    **_of(
        "quire.compat.refused",
        "GuidedDecodingParams",
    ),
}  # fmt: skip
_BEAMS = _of("quire.outputs", "BeamSearchOutput", "BeamSearchSequence")
_POOLING = _of("quire.params", "PoolingParams")
_LOGPROBS = {
    "Logprob": "quire.outputs:Logprob",
    "SampleLogprobs": "quire.compat.types:SampleLogprobs",
    "PromptLogprobs": "quire.compat.types:PromptLogprobs",
}
_METRICS = {
    **_of("quire.observability.metrics.store", "Counter", "Gauge", "Histogram", "Vector"),
    "Metric": "quire.observability.metrics.store:Sample",
}
_PARSER = _of("quire.compat.arguments", "FlexibleArgumentParser")
_UTILS = _of(
    "quire.compat.utils",
    "Counter", "GiB_bytes", "MiB_bytes", "KiB_bytes", "cdiv", "round_up", "round_down",
    "get_open_port", "is_list_of", "random_uuid", "merge_async_iterators",
)  # fmt: skip
_PROCESSORS = _of(
    "quire.sampling.logits_processor",
    "LogitsProcessor", "AdapterLogitsProcessor", "RequestLogitsProcessor", "BatchUpdate",
    "MoveDirectionality", "process_dict_updates",
)  # fmt: skip
_CONFIGS = (
    "AttentionConfig", "CacheConfig", "CompilationConfig", "KVEventsConfig", "KVTransferConfig",
    "KernelConfig", "LoRAConfig", "ObservabilityConfig", "ParallelConfig", "ProfilerConfig",
    "SchedulerConfig", "SpeculativeConfig", "StructuredOutputsConfig",
)  # fmt: skip
_PARALLEL = _of(
    "quire.compat.utils",
    "cleanup_dist_env_and_memory", "destroy_model_parallel", "destroy_distributed_environment",
)  # fmt: skip
_TOKENIZER = _of("quire.compat.tokenizers", "get_tokenizer")

MODULES: Final[dict[str, dict[str, str]]] = {
    "vllm": {
        **_LLM, **_ENGINE, **_ASYNC, **_ARGUMENTS, **_VERSION, **_POOLING,
        **_of("quire.params", "SamplingParams"), **_OUTPUTS,
        **{name: _PROMPTS[name] for name in ("TextPrompt", "TokensPrompt", "PromptType")},
        **_of("quire.compat.model_registry", "ModelRegistry"),
        **_of("quire.compat.refused", "initialize_ray_cluster"),
    },
    "vllm.version": _VERSION,
    "vllm.sampling_params": _PARAMS,
    "vllm.pooling_params": _POOLING,
    "vllm.outputs": _OUTPUTS,
    "vllm.logprobs": _LOGPROBS,
    "vllm.sequence": _of("quire.outputs", "Logprob", "RequestMetrics"),
    "vllm.inputs": _PROMPTS,
    "vllm.inputs.data": _PROMPTS,
    "vllm.inputs.llm": _PROMPTS,
    "vllm.lora": {},
    "vllm.lora.request": _of("quire.compat.lora", "LoRARequest"),
    "vllm.config": {
        "PoolerConfig": "quire.config.pooler_options:pooler_config",
        **dict.fromkeys(_CONFIGS, "quire.compat.settings:section"),
        **_of("quire.compat.settings", "CompilationMode", "CUDAGraphMode", "VllmConfig"),
    },
    "vllm.engine": {},
    "vllm.engine.arg_utils": _ARGUMENTS,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.engine.async_llm_engine": _ASYNC,
    "vllm.engine.protocol": {"EngineClient": _ASYNC["AsyncLLM"]},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.v1.engine.async_llm": _ASYNC,
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": _PROCESSORS,
    "vllm.v1.sample.logits_processor.interface": _PROCESSORS,
    "vllm.v1.sample.logits_processor.builtin": {
        name: _PROCESSORS[name] for name in ("process_dict_updates",)
    },
    "vllm.v1.sample.logits_processor.state": {"BatchUpdate": _PROCESSORS["BatchUpdate"]},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.reader": _METRICS,
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": _LLM,
    "vllm.entrypoints.generate": {},
    "vllm.entrypoints.generate.beam_search": {},
    "vllm.entrypoints.generate.beam_search.utils": _BEAMS,
    "vllm.beam_search": _BEAMS,
    "vllm.usage": {},
    "vllm.usage.usage_lib": _of("quire.compat.settings", "UsageContext"),
    "vllm.distributed": _PARALLEL,
    "vllm.distributed.parallel_state": _PARALLEL,
    "vllm.tokenizers": _TOKENIZER,
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": _TOKENIZER,
    "vllm.platforms": _of("quire.compat.utils", "current_platform"),
    "vllm.envs": {},
    "vllm.utils": {**_UTILS, **_PARSER},
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.utils.async_utils": _of("quire.compat.utils", "merge_async_iterators"),
    "vllm.utils.collection_utils": _of("quire.compat.utils", "is_list_of"),
    "vllm.utils.counter": _of("quire.compat.utils", "Counter"),
    "vllm.utils.math_utils": _of("quire.compat.utils", "cdiv", "round_up", "round_down"),
    "vllm.utils.mem_constants": _of("quire.compat.utils", "GiB_bytes", "MiB_bytes", "KiB_bytes"),
    "vllm.utils.mem_utils": _of("quire.compat.utils", "GiB_bytes", "MiB_bytes", "KiB_bytes"),
    "vllm.utils.network_utils": _of("quire.compat.utils", "get_open_port"),
    "vllm.profiler": _of("quire.profiler", "LayerwiseProfiler"),
    "vllm.logger": {"init_logger": "quire.logger:get_logger"},
}  # fmt: skip
"""vLLM's modules that exist here: for each name, where it is defined."""

ELSEWHERE: Final = {
    "vllm.assets": "the files of vLLM's examples do not come with quire",
    "vllm.benchmarks": "`quire bench` lists the benchmarks",
    "vllm.compilation": "nothing is compiled",
    "vllm.entrypoints.cli": "the command is `quire`",
    "vllm.entrypoints.openai": "start the server with `quire serve`",
    "vllm.model_executor": "models are families of quire; see docs/adding-a-model.md",
    "vllm.multimodal": "prompts are text",
    "vllm.plugins": "plugins are entry points of quire.plugins; see docs/plugins.md",
    "vllm.reasoning": "reasoning comes back as text",
    "vllm.tool_parsers": "tool calls come back as text",
    "vllm.v1.core": "write a policy of your own with --scheduler-cls; see docs/scheduling.md",
    "vllm.v1.metrics.loggers": "LLM.get_metrics() and GET /metrics give the numbers",
    "vllm.v1.sample.sampler": "the sampler is quire's own; see docs/logits-processors.md",
    "vllm.v1.worker": "the worker is quire's own",
}
"""What to say about modules that do not exist here, by their longest prefix."""
