"""How an engine core takes a message, in whichever process it runs."""

from __future__ import annotations

from typing import Any

from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests, AddRequests, Call, Reply, ToCore
from quire.errors import QuireError
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
