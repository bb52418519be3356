"""The exception tree. Every error says what happened, names the limit and the given value.

    QuireError
    ├── RequestError                 the request is at fault; nothing else is disturbed (4xx)
    │   ├── InvalidRequest           a field is wrong                                    400
    │   │   ├── ContextLengthExceeded  prompt does not fit the model's context           400
    │   │   ├── UnsupportedTask      the model is not made for this task                 400
    │   │   ├── GrammarFailed        its grammar cannot be compiled or followed          400
    │   │   └── ProcessorRefused     a logits processor does not take its parameters     400
    │   ├── Unauthorized             missing or wrong key                                401
    │   ├── ForbiddenOrigin          a web page that may not call                        403
    │   ├── NotFound                 unknown model, route or id                          404
    │   ├── Conflict                 it conflicts with the current state                 409
    │   ├── PayloadTooLarge          body over the limit                                 413
    │   ├── SlowReader               the reply was read too slowly                       408
    │   └── TooManyRequests          a queue limit is reached                            429
    ├── StartupError                 the engine cannot start: configuration, files, memory, port
    │   ├── ConfigError              an option or environment variable has a bad value
    │   ├── ModelLoadError           a model folder misses files, or its weights do not fit
    │   └── NotEnoughMemory          weights or one request's KV cache do not fit
    ├── NotAvailable                 vLLM has it, quire does not: a member, a class              501
    └── EngineError                  the engine is at fault (5xx)
        ├── EngineDead               the engine core stopped and could not be replaced   503
        ├── DeadlineUnreachable      it could not begin in time                          503
        └── StepFailed               one request failed inside a step                    500
            └── ProcessorFailed      a logits processor failed on it                     500

This module knows the HTTP status and the code of each error, but not how a reply is written.
"""

from __future__ import annotations

from typing import Final

NOT_A_NUMBER: Final = "numerical: the model's output is not a finite number"
"""The message of a request that failed because its logits held NaN or infinity; metrics count
these."""


GRAMMAR: Final = "structured_outputs"
"""How the message of a request begins that failed because of its own grammar."""
PROCESSOR_REFUSED: Final = "logits_processors refuse the request"
PROCESSOR_FAILED: Final = "logits_processors failed"
"""How the messages of requests begin that a logits processor refused or failed on."""
POISON: Final = "poison_request: the engine died each time it worked on this request"
"""The message of a request that was taken out because cores died of it."""


class QuireError(Exception):
    """Base of every error quire raises on purpose."""

    status: int = 500
    """HTTP status a server answers with."""
    type: str = "InternalServerError"
    """Value of `error.type` in the OpenAI envelope."""
    code: str | None = None
    """Machine-readable `error.code`; `None` means the status number is used."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the offending request field or option, if there is one."""


class RequestError(QuireError):
    """The request is at fault."""

    status = 400
    type = "BadRequestError"


class InvalidRequest(RequestError, ValueError):
    """A field of the request has a bad value."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit into the model's context."""

    code = "context_length_exceeded"


class UnsupportedTask(InvalidRequest):
    """The model is not made for this task; for example, an embedding model was asked for text."""

    code = "unsupported_task"


class GrammarFailed(InvalidRequest):
    """The grammar of a request could not be compiled or followed to the end by the engine. Other
    requests are not disturbed."""

    code = "grammar_failed"


class ProcessorRefused(InvalidRequest):
    """A logits processor of the operator does not take the parameters of a request."""

    code = "logits_processor_refused"

    @classmethod
    def by(cls, processor: str, said: str = "") -> ProcessorRefused:
        """The refusal of one processor, with what it said, if that is meant for the client."""
        what = said or "what it takes is in vllm_xargs (extra_args), and the log has the reason"
        return cls(f"{PROCESSOR_REFUSED}: {processor}: {what}", param="extra_args")


class Unauthorized(RequestError):
    """The key is missing or wrong."""

    status = 401
    type = "Unauthorized"
    code = "invalid_api_key"


class ForbiddenOrigin(RequestError):
    """A web page calls that may not.

    Args:
        header: The header that says so, in lower case.
        given: Its value.
        flag: The flag that would allow it.
    """

    status = 403
    type = "Forbidden"
    code = "forbidden_origin"

    def __init__(self, header: str, given: str, flag: str) -> None:
        super().__init__(
            "This server has no API key, so it serves programs of this machine, and no web page of "
            f"another origin: the header {header.title()} is {given[:100]!r}. Its operator can "
            f"allow it with {flag}, or set a key.",
            param=header,
        )


class NotFound(RequestError):
    """Unknown model, route or id."""

    status = 404
    type = "NotFoundError"


class Conflict(RequestError):
    """The request conflicts with the current state; for example, the profiler is already
    running."""

    status = 409
    type = "ConflictError"


class PayloadTooLarge(RequestError):
    """The body is larger than the server accepts."""

    status = 413
    type = "PayloadTooLarge"


class TooManyRequests(RequestError):
    """A queue limit is reached; trying again later can succeed."""

    status = 429
    type = "TooManyRequests"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which there is likely room; `None` if unknown."""


class KeyLimitReached(TooManyRequests):
    """A limit of the caller's key is reached, while others may go on."""

    code = "key_limit_reached"

    def __init__(
        self,
        key: str,
        limit: str,
        value: float,
        why: str,
        *,
        retry_after: float | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__(
            f"The key {key!r} has reached its limit {limit}={value}: {why}", retry_after=retry_after
        )
        self.limit = limit
        """Its name, a field of `KeyLimits`."""
        self.exact = exact
        """Whether `retry_after` is computed and no estimate."""
        self.extra = {"limit": limit, "limit_value": value, "key": key}


class KeyShareTooSmall(InvalidRequest):
    """A request is larger than the share of the queue that the caller's key has ever."""

    code = "key_share_too_small"

    def __init__(self, key: str, share: float, message: str) -> None:
        super().__init__(message)
        self.extra = {"limit": "queue_share", "limit_value": share, "key": key}


class SlowReader(RequestError):
    """The caller left so much of its reply unread that the request was ended."""

    status = 408
    type = "RequestTimeout"
    code = "slow_reader"


class NotAvailable(QuireError, NotImplementedError):
    """vLLM has such a member, class or mode, and quire does not."""

    status = 501
    type = "NotImplementedError"
    code = "not_available"


class StartupError(QuireError):
    """The engine cannot start."""

    exit_code: int = 1


class ConfigError(StartupError, ValueError):
    """An option or environment variable has a bad value."""

    exit_code = 2


class ModelLoadError(StartupError):
    """A model folder misses files or its weights do not match its configuration."""


class NotEnoughMemory(StartupError, MemoryError):
    """Weights or the KV cache of one request do not fit."""


class EngineError(QuireError):
    """The engine is at fault."""


class EngineDead(EngineError):
    """The engine core stopped and could not be replaced."""

    status = 503
    type = "ServiceUnavailable"
    code = "engine_dead"

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice
        """For whoever runs the engine, not for its clients: the likely cause, and what to do."""


class JournalMismatch(EngineError):
    """A request from the journal of another process would get other tokens here."""

    status = 410
    type = "Gone"
    code = "journal_mismatch"

    def __init__(self, what: str) -> None:
        super().__init__(
            "The server was restarted, and this request cannot go on with the same output: not the "
            f"same as before: {what}. Send the request again."
        )


def told(error: QuireError) -> str:
    """An error as one line for the terminal, with advice for the operator."""
    advice = getattr(error, "advice", "")
    text = f"{error.message}. {advice}" if advice else error.message
    return " ".join(text.split())


class DeadlineUnreachable(EngineError):
    """So much is ahead of the request that its caller would not wait for its turn."""

    status = 503
    type = "ServiceUnavailable"
    code = "deadline_unreachable"

    def __init__(self, wait: float, max_wait: float) -> None:
        super().__init__(
            f"The request would wait about {wait:.1f} s for its turn, and its deadline is in "
            f"{max_wait:.1f} s."
        )
        self.retry_after = wait - max_wait
        """Seconds after which the same deadline can likely be met."""


class StepFailed(EngineError):
    """One request failed inside an engine step; the others went on."""

    code = "step_failed"


class ProcessorFailed(StepFailed):
    """A logits processor of the operator raised, or returned no logits; other requests went on."""

    code = "logits_processor_failed"

    @classmethod
    def of(cls, processor: str, what: str) -> ProcessorFailed:
        """The failure of one processor."""
        return cls(f"{PROCESSOR_FAILED}: {processor}: {what}")


class PoisonRequest(StepFailed):
    """Every engine core that worked on the request died; the others went on."""

    code = "poison_request"
