"""The exception tree. Every error says what happened, names the limit and the given value.

    QuireError
    ├── RequestError                 the request is at fault; nothing else is disturbed (4xx)
    │   ├── InvalidRequest           a field is wrong                                    400
    │   │   ├── ContextLengthExceeded  prompt does not fit the model's context           400
    │   │   ├── UnsupportedTask      the model is not made for this task                 400
    │   │   └── GrammarFailed        its grammar cannot be compiled or followed          400
    │   ├── Unauthorized             missing or wrong key                                401
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

This module knows the HTTP status and the code of each error, but not how a reply is written.
"""

from __future__ import annotations

from typing import Final

NOT_A_NUMBER: Final = "numerical: the model's output is not a finite number"
"""The message of a request that failed because its logits held NaN or infinity; metrics count
these."""


GRAMMAR: Final = "structured_outputs"
"""How the message of a request begins that failed because of its own grammar."""
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


class Unauthorized(RequestError):
    """The key is missing or wrong."""

    status = 401
    type = "Unauthorized"
    code = "invalid_api_key"


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


class PoisonRequest(StepFailed):
    """Every engine core that worked on the request died; the others went on."""

    code = "poison_request"
