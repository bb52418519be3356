"""Telling what a signal's handler raises from what the interrupted code raises.

Whoever contains the failure of one request catches `Exception`. An alarm's handler may raise one,
too, at any statement; it is meant for whoever set the alarm, and no fault of a request.
"""

from __future__ import annotations

import signal
from types import CodeType, FunctionType, MethodType
from typing import Any


def pass_on_signals(error: BaseException) -> None:
    """Raise an error again if the handler of a signal has raised it; otherwise nothing happens."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            raise error
        traceback = traceback.tb_next


def _code_of(handler: Any) -> CodeType | None:
    """The code of a Python function or method; none of anything else."""
    if isinstance(handler, MethodType):
        handler = handler.__func__
    return handler.__code__ if isinstance(handler, FunctionType) else None
