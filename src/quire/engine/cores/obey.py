"""What the messages of a front end make an engine core do: the same in whichever process it runs.

A fault while one request is queued, ended or asked about belongs to that request. `obey` leaves it
to its caller, which is what a core in the caller's process wants; `obey_contained` makes an answer
of it, so that nobody else notices.
"""

from __future__ import annotations

from typing import Any

from quire.core.output import EngineCoreOutput, failed_output
from quire.engine.core import EngineCore
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    Call,
    EngineCoreRequest,
    Outputs,
    Reply,
    ToCore,
)
from quire.errors import ProcessorFailed, ProcessorRefused, QuireError
from quire.logger import get_logger

logger = get_logger(__name__)


def obey(core: EngineCore, message: ToCore, number: int) -> Reply | None:
    """Do what a message asks.

    Args:
        core: That is ready.
        message: Any but `Start`.
        number: For the reply, if there is one.

    Returns:
        What to answer, if anything.
    """
    match message:
        case AddRequests(requests=requests):
            for request in requests:
                core.add_request(request)
        case AbortRequests(request_ids=request_ids):
            core.abort_requests(request_ids)
        case Call():
            return _call(core, message, number)
        case _:
            logger.error("unexpected message %s", type(message).__name__)
    return None


def obey_contained(core: EngineCore, message: ToCore, number: int) -> Reply | Outputs | None:
    """`obey`, but what fails is told as the end of the request that it failed for.

    Raises:
        Exception: the books could not be brought back to before the fault.
    """
    match message:
        case AddRequests(epoch=epoch, requests=requests):
            queued = [_add(core, request) for request in requests]
            failed = [output for output in queued if output is not None]
            return Outputs(epoch, number, failed) if failed else None
        case AbortRequests(request_ids=request_ids):
            _abort(core, request_ids)
            return None
    return obey(core, message, number)


def _add(core: EngineCore, request: EngineCoreRequest) -> EngineCoreOutput | None:
    try:
        core.add_request(request)
    except Exception as error:
        core.recover()  # where that failed the first time, and the fault is not this request's
        name = request.request_id
        if isinstance(error, (ProcessorRefused, ProcessorFailed)):
            return failed_output(name, error.message)
        if name in core.scheduler.requests:
            # An id that is in use; ours is ended on the other side, where both have one name.
            core.abort_requests([name])
        logger.exception("request %s could not be queued", name)
        reason = f"internal error when it was queued ({type(error).__name__}); see the server's log"
        return failed_output(name, reason)
    return None


def _abort(core: EngineCore, request_ids: list[str]) -> None:
    """End requests, each by itself if one of them cannot be ended. Nobody waits for those, so one
    that goes on to its own end harms nobody."""
    try:
        return core.abort_requests(request_ids)
    except Exception as error:
        core.recover()
        logger.warning("ending requests raised %s; trying one by one", type(error).__name__)
    for request_id in request_ids:
        try:
            core.abort_requests([request_id])
        except Exception:
            core.recover()
            logger.exception("request %s could not be ended", request_id)


def _call(core: EngineCore, call: Call, number: int) -> Reply:
    result: Any = None
    error, kind = None, "EngineError"
    try:
        result = core.call(call.verb, call.args)
    except QuireError as refusal:
        error, kind = refusal.message, type(refusal).__name__
    except Exception as fault:
        # A control verb must never take the engine down with it.
        logger.exception("verb %s failed", call.verb)
        error = f"{type(fault).__name__}: {fault}"
    return Reply(call.epoch, number, call.call_id, result, error, kind)
