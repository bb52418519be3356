"""vLLM's options that have no field here: which values are harmless, and what to say of the others.

The same table serves the command line, `--config` files, `LLM(...)` and `EngineArgs`. An option is
accepted if its value is vLLM's default, `None`, or one in `ALSO`, because then it asks for what
quire does anyway. Any other value is refused with a sentence. The rows are grouped by that
sentence, so each group reads as one statement about quire.

This module knows names and values; `config/cli.py` parses the flags.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import ConfigError


class Unset(enum.Enum):
    """Type of an option whose default is `None`, which has no type."""

    SWITCH = "switch"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    LIST = "list"
    JSON = "json"


SWITCH, INT, FLOAT = Unset.SWITCH, Unset.INT, Unset.FLOAT
TEXT, LIST, JSON = Unset.TEXT, Unset.LIST, Unset.JSON

_ONE_PROCESS: Final = "leave it out: the model runs in one process"
_ONE_API: Final = "leave it out: one process serves the API"
_REPLICA: Final = "start one server per replica"
_TEXT_ONLY: Final = "leave it out: prompts are text"
_NO_CODE: Final = (
    "leave it out: quire runs no code from a model folder; for plugins see docs/plugins.md"
)
_MERGED: Final = "give a model folder with the adapter merged into it"
_NOT_COMPILED: Final = "leave it out: nothing is compiled at start"
_NO_DRAFTS: Final = "leave it out: it never changes the output"
_STAYS: Final = "leave it out: KV blocks stay in their process"
_STATE_SPACE: Final = "leave it out: no family with state-space layers is served"
_SPLIT_EXPERTS: Final = "leave it out: all experts of a model are in one process"
_KERNELS: Final = "nearest: --attention-backend; QUIRE_KERNELS chooses the kernels"
_WEIGHTS_STAY: Final = "leave it out: weights stay as they were loaded until the process ends"

ENGINE: Final[dict[str, dict[str, Any]]] = {
    _ONE_PROCESS: {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1,
        "dcp_comm_backend": TEXT, "dcp_q_replicate": SWITCH, "dcp_kv_cache_interleave_size": 1,
        "cp_kv_cache_interleave_size": INT, "distributed_executor_backend": TEXT, "nnodes": 1,
        "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 29501,
        "distributed_timeout_seconds": INT, "cpu_distributed_timeout_seconds": INT,
        "max_parallel_loading_workers": INT, "ray_workers_use_nsight": False,
        "disable_custom_all_reduce": False, "enable_batch_sharded_sampling": SWITCH,
        "enable_hc_sp": False, "enable_dbo": False, "ubatch_size": 0,
        "dbo_decode_token_threshold": 32, "dbo_prefill_token_threshold": 512,
        "enable_shm_tensor_arena": False, "enable_nccl_comm_suspend": False, "worker_cls": "auto",
        "worker_extension_cls": "", "tokens_only": False, "enable_fault_tolerance": False,
        "fault_tolerance_config": {"engine_recovery_timeout_sec": 120},
        "aggregate_engine_logging": False, "worker_use_ray": False,
    },
    _REPLICA: {
        "data_parallel_size": 1, "data_parallel_rank": INT, "data_parallel_start_rank": INT,
        "data_parallel_size_local": INT, "data_parallel_address": TEXT,
        "data_parallel_rpc_port": INT, "data_parallel_backend": "mp",
        "data_parallel_hybrid_lb": False, "data_parallel_external_lb": False,
        "data_parallel_multi_port_external_lb": False, "dp_sync_interval": 16,
        "disable_nccl_for_dp_synchronization": SWITCH, "elastic_ep_max_dp_size": INT,
        "enable_elastic_ep": False,
    },
    _SPLIT_EXPERTS: {
        "enable_expert_parallel": False, "enable_ep_weight_filter": False, "enable_eplb": False,
        "all2all_backend": "allgather_reducescatter", "expert_placement_strategy": "linear",
        "eplb_config": {
            "window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0,
            "log_balancedness": False, "log_balancedness_interval": 1, "use_async": True,
            "policy": "default", "communicator": None, "enable_migration_batching": False,
        },
    },
    "use taskset or numactl": {
        "numa_bind": False, "numa_bind_nodes": LIST, "numa_bind_cpus": LIST,
    },
    "set CUDA_VISIBLE_DEVICES": {"device_ids": TEXT},
    "leave it out: unread formats are refused by name": {"allow_deprecated_quantization": False},
    _MERGED: {
        "enable_lora": False, "max_loras": 1, "max_lora_rank": 16, "lora_dtype": "auto",
        "max_cpu_loras": INT, "fully_sharded_loras": False, "lora_target_modules": LIST,
        "default_mm_loras": JSON, "specialize_active_lora": False, "max_lora_cls_labels": INT,
        "enable_tower_connector_lora": False, "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False, "enable_lora_bias": False, "lora_extra_vocab_size": 256,
        "enable_prompt_adapter": False,
    },
    _NO_CODE: {
        "trust_remote_code": False, "code_revision": TEXT,
        "io_processor_plugin": TEXT, "model_class_overrides": {}, "additional_config": {},
    },
    _NOT_COMPILED: {
        "compilation_config": {"mode": None, "level": None, "backend": "inductor",
                               "cudagraph_mode": None, "cudagraph_capture_sizes": None},
        "cudagraph_capture_sizes": LIST, "max_cudagraph_capture_size": INT,
        "cudagraph_metrics": False, "optimization_level": 2, "enable_flashinfer_autotune": SWITCH,
        "jit_monitor_mode": "warn", "jit_monitor_verbose": False, "max_seq_len_to_capture": 8192,
        "ir_op_priority": {
            "rms_norm": [], "fused_add_rms_norm": [], "gelu_and_mul_sparse": [],
        },
    },
    _KERNELS: {
        "attention_config": {"backend": None}, "moe_backend": "auto", "linear_backend": "auto",
        "sparse_indexer_topk_backend": "auto", "gdn_prefill_backend": TEXT,
        "kda_prefill_backend": TEXT, "kda_decode_backend": TEXT,
        "kernel_config": {
            "enable_flashinfer_autotune": None, "moe_backend": "auto", "linear_backend": "auto",
            "sparse_indexer_topk_backend": "auto", "linear_backend_per_quant": None,
            "enable_cutedsl_warmup": True, "enable_jit_warmup": True,
            "enable_rocm_segmented_attn_autotune": False,
        },
        "model_impl": "auto",
    },
    "leave it out: attention is computed the same way for every batch": {
        "disable_cascade_attn": SWITCH, "use_fp64_gumbel": False,
    },
    _STATE_SPACE: {
        "mamba_backend": "triton", "mamba_cache_dtype": "auto", "mamba_ssm_cache_dtype": "auto",
        "mamba_block_size": INT, "mamba_cache_mode": "none", "mamba_ssu_algorithm": TEXT,
        "mamba_cache_philox_rounds": 0, "enable_mamba_cache_stochastic_rounding": False,
        "enable_mamba_shared_prefix_checkpoint": False, "mamba_config": {},
        "replayssm_buffer_len": 16, "use_replayssm": False,
    },
    _NO_DRAFTS: {
        "speculative_config": JSON, "spec_method": TEXT, "spec_model": TEXT, "spec_tokens": INT,
        "per_request_spec_decode_metrics": "none", "num_speculative_tokens": INT,
        "speculative_model": TEXT,
    },
    _TEXT_ONLY: {
        "limit_mm_per_prompt": {}, "mm_processor_kwargs": JSON, "media_io_kwargs": {},
        "enable_mm_embeds": False, "interleave_mm_strings": False, "language_model_only": False,
        "mm_processor_cache_gb": 4, "mm_processor_cache_type": "lru",
        "mm_hasher_algorithm": "blake3", "mm_shm_cache_max_object_size_mb": 128,
        "mm_encoder_only": False, "mm_encoder_tp_mode": "weights", "mm_encoder_attn_backend": TEXT,
        "mm_encoder_attn_dtype": TEXT, "mm_encoder_fp8_scale_path": TEXT,
        "mm_encoder_fp8_scale_save_path": TEXT, "mm_encoder_fp8_scale_save_margin": 1.5,
        "skip_mm_profiling": False, "video_pruning_rate": FLOAT, "video_pruning_method": "evs",
        "mm_tensor_ipc": "direct_rpc", "mm_processor_device": "auto", "mm_ipc_gpu_memory_gb": 0,
        "mm_device_do_normalize": True, "enable_mm_processor_stats": False,
        "disable_chunked_mm_input": False, "allowed_local_media_path": "",
        "allowed_media_domains": LIST, "disable_mm_preprocessor_cache": False,
        "ec_transfer_config": JSON,
        "ec_manager_config": {"encoder_cache_manager_cls": None, "manager_config": {}},
    },
    "give token ids for another tokenisation": {"tokenizer_pool_size": 0},
    "send text or token ids": {"enable_prompt_embeds": False, "skip_tokenizer_init": False},
    "leave it out: llguidance follows all grammars": {
        "guided_decoding_backend": TEXT,
    },
    "leave it out: how a model marks its reasoning is found in its chat template": {
        "reasoning_parser_plugin": "", "reasoning_config": JSON, "enable_reasoning": False,
    },
    "nearest: --gpu-memory-utilization": {
        "cpu_offload_gb": 0, "cpu_offload_params": [], "offload_backend": "auto",
        "offload_params": [], "offload_group_size": 0, "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
    },
    "nearest: --swap-space": {
        "kv_offloading_size": FLOAT, "kv_offloading_backend": "native",
    },
    _STAYS: {"kv_transfer_config": JSON, "kv_events_config": JSON, "engram_config": JSON},
    "leave it out: blocks are kept until their room is needed": {
        "prefix_cache_retention_interval": 0, "prefix_match_unit": INT,
    },
    "leave it out: every layer keeps and computes its own KV": {
        "kv_sharing_fast_prefill": False, "swa_bounded_replay": True,
    },
    "leave it out: a model with windows needs them": {"disable_sliding_window": False},
    _WEIGHTS_STAY: {
        "enable_sleep_mode": False, "sleep_mode_offload_cudagraph": False,
        "sleep_preserve_parameter_names": [], "enable_cumem_allocator": False,
        "weight_transfer_config": JSON,
    },
    "leave it out: files are mapped into memory and read in parallel": {
        "safetensors_load_strategy": TEXT, "safetensors_prefetch_num_threads": 8,
        "safetensors_prefetch_block_size": 16777216, "model_loader_extra_config": {},
        "ignore_patterns": ["original/**/*"], "pt_load_map_location": "cpu",
    },
    "leave it out: how a model loads is told in the log": {"use_tqdm_on_load": True},
    "give a folder in Hugging Face format, or a GGUF file": {
        "config_format": "auto", "tokenizer_mode": "auto", "hf_config_path": TEXT,
        "model_weights": "",
    },
    "set HF_TOKEN in the environment, where other users cannot read it": {"hf_token": TEXT},
    "leave it out: logprobs are those of the model, before penalties and temperature": {
        "logprobs_mode": "raw_logprobs",
    },
    "leave it out: outputs carry tokens, text and logprobs": {
        "enable_return_routed_experts": False, "return_sampling_mask": False,
        "aux_output_config": {"enable_return_routed_experts": False, "max_bytes": None},
        "enable_trace_replay": False,
    },
    "leave it out: the output is not marked": {"watermark_config": JSON},
    "leave it out: text is generated token by token": {"diffusion_config": JSON},
    "leave it out: steps run one after the other": {
        "async_scheduling": SWITCH, "num_scheduler_steps": 1, "multi_step_stream_outputs": True,
        "disable_async_output_proc": False, "use_v2_block_manager": True, "num_lookahead_slots": 0,
    },
    "nearest: --scheduler-delay-factor": {"prefill_schedule_interval": 1},
    "nearest: --max-num-batched-tokens": {
        "max_num_scheduled_tokens": INT, "performance_mode": "balanced",
    },
    "nearest: --max-num-queued-reqs": {"max_num_active_seqs": INT},
    "leave it out: prompts are prepared in one process": {"renderer_num_workers": 1},
    "nearest: --trace-decode-steps, --collect-detailed-traces": {
        "enable_layerwise_nvtx_tracing": False,
    },
    "see docs/metrics.md for what is measured": {
        "enable_mfu_metrics": False, "show_hidden_metrics_for_version": TEXT,
        "custom_histogram_buckets": JSON,
    },
    "set QUIRE_LOGGING_LEVEL, or QUIRE_LOGGING_CONFIG_PATH": {
        "logging_config": TEXT, "log_level": TEXT, "log_config_file": TEXT,
    },
    "leave it out: a bad variable is always an error at start": {
        "fail_on_environ_validation": False,
    },
    'nearest: --hf-overrides \'{"rope_scaling": …}\'': {"rope_scaling": JSON, "rope_theta": FLOAT},
}  # fmt: skip
"""Options of an engine: by sentence, the options it applies to, with vLLM's defaults."""

SERVER: Final[dict[str, dict[str, Any]]] = {
    _ONE_API: {
        "api_server_count": INT, "headless": False, "grpc": False, "grpc_port": INT,
        "enable_scale_out": False, "disable_frontend_multiprocessing": False,
    },
    _REPLICA: {
        "data_parallel_supervisor_port": 9256, "dp_supervisor_probe_interval_s": 5.0,
        "dp_supervisor_probe_timeout_s": 5.0, "dp_supervisor_probe_failure_threshold": 3,
    },
    _MERGED: {"lora_modules": LIST},
    _NO_CODE: {
        "middleware": [], "tool_parser_plugin": "", "trust_request_chat_template": False,
    },
    "leave it out: arguments are constrained where a tool is strict": {
        "tool_strict_level": "auto",
    },
    "leave it out: tools are run by the client": {"tool_server": TEXT},
    "leave it out: with tool_choice none the prompt has no tools": {
        "exclude_tools_when_tool_choice_none": False,
    },
    _TEXT_ONLY: {"trust_request_mm_kwargs": False},
    "send it with each request": {
        "default_chat_template_kwargs": JSON, "return_tokens_as_token_ids": False,
    },
    "leave it out: the template says which form it takes": {
        "chat_template_content_format": "auto",
    },
    "leave it out: answers come from the assistant": {
        "response_role": "assistant", "cohere_is_reasoning_model": True, "cohere_format": "cmd4",
        "anthropic_disabled_thinking_effort": "auto", "enable_flash_late_interaction": True,
    },
    "see `quire explain` and docs/metrics.md for what is measured": {
        "enable_server_load_tracking": False, "enable_prompt_tokens_details": False,
    },
    "set QUIRE_LOGGING_LEVEL": {
        "enable_log_outputs": False, "enable_log_deltas": True, "log_error_stack": False,
    },
    "leave it out: there is no such route": {
        "enable_tokenizer_info_endpoint": False,
        "enable_offline_docs": False,
    },
    "leave it out: the length of a line and the number of headers are fixed": {
        "h11_max_incomplete_event_size": 4194304, "h11_max_header_count": 256,
    },
    "leave it out: replies name no build": {
        "fingerprint_mode": "full", "fingerprint_value": TEXT,
    },
}  # fmt: skip
"""Options of the server alone, in the same form."""

ALSO: Final[dict[str, tuple[Any, ...]]] = {
    "api_server_count": (1,),
    "compilation_config": (0, {"mode": 0}, {"level": 0}, {"mode": "NONE"},
                           {"cudagraph_mode": "NONE"}, {"mode": 0, "cudagraph_mode": "NONE"}),
    "config_format": ("hf",),
    "data_parallel_rank": (0,),
    "data_parallel_size_local": (1,),
    "disable_async_output_proc": (True,),
    "disable_cascade_attn": (True, False),
    "disable_chunked_mm_input": (True,),
    "disable_custom_all_reduce": (True,),
    "disable_frontend_multiprocessing": (True,),
    "disable_mm_preprocessor_cache": (True,),
    "disable_nccl_for_dp_synchronization": (True, False),
    "distributed_executor_backend": ("uni",),
    "enable_prompt_tokens_details": (True,),
    "enable_reasoning": (True,),
    "enable_server_load_tracking": (True,),
    "guided_decoding_backend": ("auto", "guidance"),
    "exclude_tools_when_tool_choice_none": (True,),
    "fingerprint_mode": ("none",),
    "language_model_only": (True,),
    "mm_device_do_normalize": (False,),
    "model_impl": ("vllm",),
    "multi_step_stream_outputs": (False,),
    "optimization_level": (0,),
    "safetensors_load_strategy": ("lazy",),
    "skip_mm_profiling": (True,),
    "tokenizer_mode": ("hf", "fast"),
    "trust_remote_code": (True,),
    "use_v2_block_manager": (False,),
}  # fmt: skip
"""Further values that change nothing here: they turn off what quire does not have, or permit what
quire never does."""

_SHOWN: Final = 10
"""Largest number of names in the line about options without effect."""

SHORT: Final = {
    "-O": "optimization_level",
    "-ac": "attention_config",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-dc": "diffusion_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpl": "data_parallel_size_local",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-r": "node_rank",
    "-sc": "speculative_config",
    "-tp": "tensor_parallel_size",
}
"""vLLM's short flags."""


@dataclass(frozen=True, slots=True)
class NeutralOption:
    """One option of vLLM without a field here."""

    name: str
    kind: Unset
    default: Any
    """vLLM's default; for a JSON object, the entries it may have."""
    remedy: str
    server: bool

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flag, then its short form."""
        return (self.flag, *(short for short, name in SHORT.items() if name == self.name))

    def asks_nothing(self, value: Any) -> bool:
        """Whether `value` asks for what quire does anyway."""
        if value is None or any(_equal(value, other) for other in ALSO.get(self.name, ())):
            return True
        if self.kind is Unset.JSON and isinstance(value, Mapping):
            known = self.default or {}
            return all(key in known and _equal(value[key], known[key]) for key in value)
        if self.kind is Unset.LIST and not value:
            return True
        return _equal(value, self.default)


def _equal(one: Any, other: Any) -> bool:
    """Equal as settings: an enum's member is its value, a tuple or set its list."""
    one = one.value if isinstance(one, enum.Enum) else one
    one = list(one) if isinstance(one, (tuple, set, frozenset)) else one
    # A switch is not a number: `True` is no degree of parallelism.
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    return bool(one == other)


_KIND_OF: Final = {
    bool: SWITCH, int: INT, float: FLOAT, str: TEXT, list: LIST, dict: JSON,
}  # fmt: skip


def _rows(groups: Mapping[str, Mapping[str, Any]], server: bool) -> dict[str, NeutralOption]:
    found: dict[str, NeutralOption] = {}
    for remedy, options in groups.items():
        for name, value in options.items():
            bare = isinstance(value, Unset)
            kind = value if bare else _KIND_OF[type(value)]
            assert name not in found, f"{name} has two rows"
            found[name] = NeutralOption(name, kind, None if bare else value, remedy, server)
    return found


@functools.cache
def engine_rows() -> dict[str, NeutralOption]:
    """Options of an engine, by name."""
    return _rows(ENGINE, server=False)


@functools.cache
def server_rows() -> dict[str, NeutralOption]:
    """Options of the server alone, by name."""
    return _rows(SERVER, server=True)


def row(name: str) -> NeutralOption | None:
    """The row of an option. None if quire has a field for it, or if vLLM has no such option."""
    return engine_rows().get(name) or server_rows().get(name)


def check(row: NeutralOption, value: Any) -> None:
    """Accept a harmless value.

    Raises:
        ConfigError: it asks for something that quire does not do.
    """
    if not row.asks_nothing(value):
        raise ConfigError(f"{row.flag}{_shown(value)} is not supported yet; {row.remedy}")


def _shown(value: Any) -> str:
    """The value as shown after the flag in a message, shortened."""
    if value is True:
        return ""
    text = repr(value) if isinstance(value, (dict, list, tuple, set)) else str(value)
    return " " + (text if len(text) <= 60 else text[:57] + "...")


def taken(options: Mapping[str, Any]) -> str | None:
    """One line naming the options that were accepted and have no effect; None if there are none."""
    names = sorted(name for name in options if row(name) is not None)
    if not names:
        return None
    shown = ", ".join("--" + name.replace("_", "-") for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"taken from vLLM's options, and without effect here: {shown}{more}"


def beyond_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose value differs from vLLM's default. (Programs often pass on every
    option.)"""
    rows = engine_rows()
    return {
        name: value
        for name, value in options.items()
        if name in rows and value and not _equal(value, rows[name].default)
    }
