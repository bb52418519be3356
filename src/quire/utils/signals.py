"""Tells exceptions raised by a signal handler from those raised by the code it interrupted.

Code that contains the failure of one request catches `Exception`. The handler of an alarm may raise
one, too, at any statement. That one is for the code that set the alarm, and no fault of a request.
"""

from __future__ import annotations

import signal
from types import CodeType, FunctionType, MethodType
from typing import Any


def pass_on_signals(error: BaseException) -> None:
    """Raise the error again if a signal handler raised it; otherwise do nothing."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            raise error
        traceback = traceback.tb_next


def _code_of(handler: Any) -> CodeType | None:
    """The code object of a Python function or method; `None` for anything else."""
    if isinstance(handler, MethodType):
        handler = handler.__func__
    return handler.__code__ if isinstance(handler, FunctionType) else None
