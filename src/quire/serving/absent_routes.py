"""Routes of vLLM that there are not, and what to do instead: the 404 for their paths says so."""

from __future__ import annotations

from typing import Final

from quire.errors import NotFound

_LORA: Final = "give a model folder with the adapter merged into it"
_TEXT_ONLY: Final = "this server takes and gives text only"
_REPLICA: Final = "start one server per replica"
_RECOVERS: Final = "an engine core that ends is replaced by itself"
_WEIGHTS: Final = "weights stay as they were loaded until the process ends"
_STAYS: Final = "weights and KV cache stay in memory until the server ends"
_PAUSE: Final = "lower the limits with POST /limits"

ABSENT_ROUTES: Final[dict[str, str]] = {
    "/tokenizer_info": "the files of the tokenizer are in the model's folder",
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/kv_event_sources": "KV blocks stay in their process",
    "/redoc": "see /docs",
    "/v1/chat/completions/derender": "send the tokens to /detokenize",
    "/v1/completions/derender": "send the tokens to /detokenize",
    "/v1/responses/render": "use /v1/chat/completions/render",
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/v2/embed": "use /v1/embeddings",
    "/v1/systemone": "use structured_outputs.choice, or logprob_token_ids, on /v1/completions",
    "/generative_scoring": "use logprob_token_ids with max_tokens 1 on /v1/completions",
    "/inference/v1/abort_requests": "close the connection of a request to end it",
    "/abort_requests": "close the connection of a request to end it",
    "/scale_elastic_ep": _REPLICA,
    "/is_scaling_elastic_ep": _REPLICA,
    "/fault_tolerance/apply": _RECOVERS,
    "/fault_tolerance/status": _RECOVERS,
    "/v1/audio/transcriptions": _TEXT_ONLY,
    "/v1/audio/translations": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/reset_mm_cache": _TEXT_ONLY,
    "/reset_encoder_cache": _TEXT_ONLY,
    "/collective_rpc": "the model runs in one process, and takes no calls of others",
    "/get_world_size": "the model runs in one process",
    "/sleep": _STAYS,
    "/wake_up": _STAYS,
    "/is_sleeping": _STAYS,
    "/release_kv_cache_memory": _STAYS,
    "/pause": _PAUSE,
    "/resume": _PAUSE,
    "/is_paused": _PAUSE,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/start_draft_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/update_weight_version": _WEIGHTS,
    "/weight_info": "`quire verify` checks a model's files",
    "/weight_checker": "`quire verify` checks a model's files",
    "/ready": "use /readyz",
}


def refuse_absent(path: str) -> None:
    """Say why a path is not served, if it is one of these.

    Raises:
        NotFound: with what to do instead.
    """
    if why := ABSENT_ROUTES.get(path):
        raise NotFound(f"{path} is not available: {why}. GET / says what there is.")
