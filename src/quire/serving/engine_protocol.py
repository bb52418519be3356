"""What the server needs of an engine and its tokenizer, as protocols.

`quire.engine.async_llm.AsyncLLM` implements them, and so does the fake engine of the tests. Nothing
here knows HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from quire.config import EngineConfig, PoolerSpec
from quire.core.stats import StepStats
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.disk.disk_journal import DiskJournal
from quire.engine.frontend.disk.stored import Resumption
from quire.engine.frontend.meter import Entry, Meter
from quire.engine.frontend.questions import Question
from quire.engine.frontend.stream import StreamBuffers
from quire.errors import QuireError
from quire.outputs import RequestOutput
from quire.params import PoolingParams, SamplingParams
from quire.tokenizer.chat_template import ChatTemplate
from quire.tokenizer.detokenizer import Spelling
from quire.tokenizer.pairs import EncodedPair
from quire.tokenizer.template_helper import TemplateHelper

if TYPE_CHECKING:
    from quire.observability.explain.explanation import Explanation


class TokenizerLike(Spelling, Protocol):
    """Text to tokens and back."""

    @property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens, which are left out of text, by their own text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def encode_within(
        self, text: str, max_tokens: int, side: str = "right", add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text, truncated to `max_tokens` without losing special tokens."""
        ...

    def encode_pair(
        self,
        first: str,
        second: str,
        max_tokens: int | None = None,
        max_first: int | None = None,
        max_second: int | None = None,
    ) -> EncodedPair:
        """Two texts as one prompt of a cross-encoder."""
        ...

    def id_to_text(self, token_id: int) -> str:
        """Text of one token."""
        ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation as a prompt.

        Raises:
            InvalidRequest: the template refuses the conversation, or there is none.
        """
        ...


class OutputStream(Protocol):
    """The outputs of one submitted request."""

    @property
    def checked(self) -> CheckedParams:
        """Its checked parameters, for submitting further prompts with them."""
        ...

    @property
    def seed(self) -> int:
        """The seed used."""
        ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def aclose(self) -> None:
        """Abort the request unless it has finished. May be called again."""
        ...


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def config(self) -> EngineConfig:
        """The configuration, with everything resolved that depends on the model's shape."""
        ...

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits: ids below it are valid."""
        ...

    @property
    def default_params(self) -> SamplingParams:
        """The parameters for fields that a request leaves out."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """What the core reported when it was ready: blocks, device, memory."""
        ...

    @property
    def last_step(self) -> StepStats | None:
        """What the core said of its latest step; `None` before the first."""
        ...

    @property
    def pooler(self) -> PoolerSpec | None:
        """How the model pools; `None` if it generates text."""
        ...

    @property
    def templates(self) -> TemplateHelper | None:
        """Renders conversations in processes that may be killed; None without a template."""
        ...

    @property
    def buffers(self) -> StreamBuffers:
        """What readers have yet to take."""
        ...

    @property
    def state(self) -> str:
        """`loading`, `ready`, `replacing` or `dead`."""
        ...

    @property
    def error(self) -> QuireError | None:
        """Why the engine is dead; `None` while it is not."""
        ...

    @property
    def progress(self) -> tuple[str, int, int]:
        """While loading or replacing: phase, done, total."""
        ...

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams | PoolingParams | CheckedParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        trace_headers: Mapping[str, str] | None = None,
        max_wait: float | None = None,
        continues: bool = False,
        entry: Entry | None = None,
    ) -> OutputStream:
        """Admit a request; after `max_wait` seconds its caller has no use for it. If it `continues`
        what was accepted before, no limit of the queue is reached by it. The meter of `entry` is
        charged for it.

        Raises:
            RequestError: the request is invalid or a queue limit is reached.
            DeadlineUnreachable: its turn would come later than `max_wait`.
            EngineDead: the engine cannot take it.
        """
        ...

    def check_room(self, meter: Meter | None = None) -> None:
        """Refuse a request before it costs anything, if not even the smallest could be queued.

        Args:
            meter: Of whoever would be charged for it.

        Raises:
            TooManyRequests: the queue, or the party's share of it, is full.
        """
        ...

    def check_fits(self, meter: Meter, count: int) -> None:
        """Refuse a request for so many completions if they can never be queued together.

        Raises:
            KeyShareTooSmall: they are more than the party's share of the queue.
        """
        ...

    async def resume(
        self,
        params: SamplingParams | PoolingParams | CheckedParams,
        request_id: str,
        resumption: Resumption,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        entry: Entry | None = None,
    ) -> OutputStream:
        """Go on with a request from the journal of another process; its stream begins with what
        there was.

        Raises:
            JournalMismatch: its parameters mean something else here.
            RequestError: it is not valid here.
        """
        ...

    def keep_journal(self, journal: DiskJournal) -> None:
        """Have a journal on disk hear of requests."""
        ...

    async def abort(self, request_id: str, error: QuireError | None = None) -> None:
        """End a request early; its stream yields a last output, or raises `error` if that is given.
        Unknown ids are ignored."""
        ...

    async def call(self, verb: str, /, **args: Any) -> Any:
        """Run a control verb; `quire.engine.verbs` says what there is and what each takes.

        Raises:
            QuireError: there is no such verb, its arguments do not fit, or it failed.
        """
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether its core makes no progress, though none is being put in its place yet."""
        ...

    def question(self) -> Question:
        """A copy of the records, which can answer questions on any thread.

        Raises:
            InvalidRequest: no records are kept.
        """
        ...

    async def explain(self, request_id: str) -> list[Explanation]:
        """Where the time of a request went, by completion.

        Raises:
            NotFound: the id is in no record.
            InvalidRequest: no records are kept.
        """
        ...

    def metrics_text(self) -> bytes:
        """Prometheus text."""
        ...

    async def wait_ready(self) -> None:
        """Return when the model is loaded.

        Raises:
            StartupError: it cannot be loaded.
        """
        ...

    async def shutdown(self) -> None:
        """Stop the core and free everything."""
        ...
