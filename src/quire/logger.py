"""Standard logging with one handler: `(APIServer pid=7) INFO 11-20 10:35:02 [file.py:12] text`.

Loggers hang below `quire`; that one carries the handler and does not propagate, so a program that
configures the root logger sees nothing twice. `QUIRE_LOGGING_FORMAT=json` writes objects instead
of lines, `QUIRE_CONFIGURE_LOGGING=0` leaves everything to the program, and
`QUIRE_LOGGING_CONFIG_PATH` hands everything to a `dictConfig` file.

This module does not know who logs what, and never formats numbers.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from typing import Any, Final, cast

from quire import envs
from quire.errors import ConfigError
from quire.log_thread import LogThread

ROOT: Final = "quire"
_FORMAT: Final = "%(asctime)s [%(filename)s:%(lineno)d]"
_DATE: Final = "%m-%d %H:%M:%S"
_COLORS: Final = {"DEBUG": 37, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 35}
_ONCE_LIMIT: Final = 1024
_said: set[tuple[int, str]] = set()
_process_name = "Main"
_configured = False


class QuireLogger(logging.Logger):
    """A logger with `*_once` methods, for warnings that repeat with every request."""

    def info_once(self, message: str, *args: object) -> None:
        """Log at INFO unless the same text was logged before in this process."""
        self._once(logging.INFO, message, args)

    def warning_once(self, message: str, *args: object) -> None:
        """Log at WARNING unless the same text was logged before in this process."""
        self._once(logging.WARNING, message, args)

    def _once(self, level: int, message: str, args: tuple[object, ...]) -> None:
        key = (level, message % args if args else message)
        if key in _said:
            return
        if len(_said) >= _ONCE_LIMIT:  # texts with values in them must not grow without bound
            _said.clear()
        _said.add(key)
        self.log(level, message, *args, stacklevel=3)


class LineFormatter(logging.Formatter):
    """Puts the head before every line of a record, so that no text can pass for a record."""

    def __init__(self, color: bool = False, prefix: str = "") -> None:
        super().__init__(_FORMAT, _DATE)
        self._color = color
        self._prefix = f"{prefix} " if prefix else ""

    def format(self, record: logging.LogRecord) -> str:
        """One or more lines, without the final newline."""
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        level = record.levelname
        if self._color:
            level = f"\x1b[{_COLORS.get(level, 37)}m{level}\x1b[0m"
        process = f"{self._prefix}({_process_name} pid={os.getpid()})"
        head = f"{process} {level} {self.formatMessage(record)} "
        text = record.message
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            text += "\n" + self.formatStack(record.stack_info)
        return "\n".join(head + line for line in text.splitlines() or [""])


class JsonFormatter(logging.Formatter):
    """One JSON object per record: no text can pass for a record, and machines can read it."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """The object on one line, without the final newline."""
        import json

        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "file": record.filename,
            "line": record.lineno,
            "process": _process_name,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        if self._prefix:
            entry["prefix"] = self._prefix
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class _CurrentStream(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is now: tests and notebooks replace it after import."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._name = name

    @property
    def stream(self) -> Any:
        """The stream of this moment."""
        return getattr(sys, self._name)


def get_logger(name: str) -> QuireLogger:
    """The logger of a module: `logger = get_logger(__name__)`.

    Raises:
        ConfigError: a logging variable has a bad value.
    """
    if not _configured:
        _configure()
    logger = logging.getLogger(name if name.split(".")[0] == ROOT else f"{ROOT}.{name}")
    if type(logger) is logging.Logger:
        # The program may have created it by its name, so the class comes afterwards.
        logger.__class__ = QuireLogger
    return cast(QuireLogger, logger)


def setup_logging(process_name: str | None = None, *, detached: bool = False) -> None:
    """Name this process in its log lines and read the logging variables again.

    Args:
        process_name: What lines call it.
        detached: A thread writes the lines, so that nothing in this process waits for their reader.

    Raises:
        ConfigError: a logging variable has a bad value, or its file cannot be used.
    """
    global _process_name
    _process_name = process_name or _process_name
    _configure(detached)


def flush_logs() -> None:
    """Have lines written before the process ends in a way that Python does not see."""
    for handler in logging.getLogger(ROOT).handlers:
        if isinstance(handler, LogThread):
            handler.leave()
    sys.stderr.flush()


def _configure(detached: bool = False) -> None:
    global _configured
    path = envs.LOGGING_CONFIG_PATH
    if envs.CONFIGURE_LOGGING:
        if path:
            _from_file(path)
        else:
            _own_handler(detached)
    elif path:
        raise ConfigError(
            f"QUIRE_LOGGING_CONFIG_PATH is {path!r}, but QUIRE_CONFIGURE_LOGGING=0 says that no "
            "logging is configured: unset one of them"
        )
    _configured = True


def _own_handler(detached: bool) -> None:
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        if isinstance(handler, _CurrentStream | LogThread):
            logger.removeHandler(handler)
    stream = envs.LOGGING_STREAM
    logger.addHandler(_handler(stream, _descriptor(stream) if detached else None))
    logger.setLevel(_level())
    logger.propagate = False


def _handler(stream: str, descriptor: int | None) -> logging.Handler:
    if descriptor is not None:
        return LogThread(descriptor, _formatter(stream))
    handler = _CurrentStream(stream)
    handler.setFormatter(_formatter(stream))
    return handler


def _descriptor(stream: str) -> int | None:
    """Of a real stream; a program may have put something else in its place."""
    try:
        return int(getattr(sys, stream).fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _formatter(stream: str) -> logging.Formatter:
    if envs.LOGGING_FORMAT == "json":
        return JsonFormatter(envs.LOGGING_PREFIX)
    return LineFormatter(_wants_color(getattr(sys, stream)), envs.LOGGING_PREFIX)


def _level() -> int | str:
    """The variable's, else that of a root logger which the program opened wider than INFO."""
    root = logging.getLogger()
    opened = root.handlers and logging.NOTSET < root.level < logging.INFO
    if opened and not envs.source("LOGGING_LEVEL"):
        return root.level
    return envs.LOGGING_LEVEL


def _wants_color(stream: Any) -> bool:
    choice = envs.LOGGING_COLOR
    if choice == "auto":
        return not os.environ.get("NO_COLOR") and bool(getattr(stream, "isatty", bool)())
    return choice == "1"


def _from_file(path: str) -> None:
    import json
    import logging.config

    try:
        with open(path, encoding="utf-8") as file:
            logging.config.dictConfig(json.load(file))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"QUIRE_LOGGING_CONFIG_PATH: cannot configure logging from {path!r}: {error}"
        ) from None
