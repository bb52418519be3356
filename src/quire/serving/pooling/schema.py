"""Request bodies of the pooling endpoints, and tables of what is not supported.

A field is `None` when it is absent or null. Nothing here computes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from quire.serving.conversation import ChatMessage
from quire.serving.decode import Unsupported, refused

Input = str | list[str | int | list[int]]
"""A text, token ids, or a list of either."""


class PoolingBase(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every pooling endpoint takes."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class InputRequest(PoolingBase, kw_only=True):
    """What endpoints over single prompts take."""

    FREE_FORM: ClassVar[tuple[str, ...]] = ("messages", "chat_template_kwargs")

    input: Input | None = None
    messages: list[ChatMessage] | None = None
    """A conversation, as the model's chat template shows it, instead of `input`."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(InputRequest, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    encoding_format: str | None = None
    """`float` or `base64`."""
    dimensions: int | None = None
    normalize: bool | None = None
    """vLLM's older name of `use_activation`."""


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """Body of `POST /pooling`."""

    task: str | None = None


class ClassificationRequest(InputRequest, kw_only=True):
    """Body of `POST /classify`."""

    activation: bool | None = None
    """vLLM's older name of `use_activation`."""


class ScoreRequest(PoolingBase, kw_only=True):
    """Body of `POST /score`: one text against many, or pair by pair. Three spellings."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    activation: bool | None = None


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(PoolingBase, kw_only=True):
    """Body of `POST /rerank` in Jina's and Cohere's shapes."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    """Only the best so many; absent or 0: all."""
    return_documents: bool | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    activation: bool | None = None


_MEDIA: Final = "this server takes text only"
_BASE: Final[dict[str, Unsupported]] = {
    "mm_processor_kwargs": refused(_MEDIA, {}),
    "media_io_kwargs": refused(_MEDIA, {}),
    "padding": refused("prompts are never padded", False),
    "softmax": refused("it is called use_activation"),
}
_NUMBERS: Final[dict[str, Unsupported]] = {
    "embed_dtype": refused("numbers are float32", "float32", "float"),
    "endianness": refused("base64 holds little-endian numbers", "native", "little"),
    "chat_template": refused("a template is code; the operator sets it with --chat-template"),
    "documents": refused("send one text, or several in input"),
}
INPUT_UNSUPPORTED: Final = _BASE | _NUMBERS
PAIR_UNSUPPORTED: Final = _BASE | {
    "instruction": refused("put it into the query"),
    "rank_fields": refused("documents are texts"),
    "max_chunks_per_doc": refused("documents are cut to max_tokens_per_doc, not split"),
    "chat_template": _NUMBERS["chat_template"],
}
