"""`quire run-batch -i IN -o OUT`: runs the requests of a batch file. What a batch is, and how it is
run, is in `quire.serving.batch`."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quire.cli.parser import Parser
from quire.cli.progress import make_bar
from quire.config.cli import (
    add_engine_flags,
    add_server_flags,
    engine_config,
    server_config,
    taken_line,
)
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.serving.batch.command import Batch

EPILOG: Final = (
    "Example: quire run-batch -i requests.jsonl -o replies.jsonl --model ./my-model. A run that "
    "was interrupted is continued by the same command."
)
_SERVER_FLAGS: Final = (
    "host", "port", "allow_unauthenticated", "max_body_bytes", "enable_auto_tool_choice",
    "tool_call_parser", "reasoning_parser", "response_role", "enable_prompt_tokens_details",
    "enable_force_include_usage", "unknown_request_fields", "enable_in_reasoning",
)  # fmt: skip
_OF_METRICS: Final = ("host", "port", "allow_unauthenticated")
LEAVE_SECONDS: Final = 5.0
"""Seconds that a thread which still reads the input can delay the exit."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "run-batch", "Run the requests in a file of OpenAI's batch format.", epilog=EPILOG
    )
    group = parser.add_argument_group("Batch", "What to run.")
    group.add_argument(
        "-i", "--input-file", metavar="PATH", default=None,
        help="File of requests, one JSON object per line; or its http(s) URL, read with GET.",
    )  # fmt: skip
    group.add_argument(
        "-o", "--output-file", metavar="PATH", default=None,
        help="File of replies, in the order of the requests; or its http(s) URL, written with PUT.",
    )  # fmt: skip
    group.add_argument(
        "--output-tmp-dir", metavar="DIR", default=None,
        help="Where the replies are until they are uploaded to a URL. Default: the system's.",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", metavar="N", type=int, default=None,
        help="Requests in work at once. Default: twice --max-num-seqs.",
    )  # fmt: skip
    group.add_argument(
        "--enable-metrics", action="store_true", default=False,
        help="Serve /metrics and the probes on --host and --port meanwhile.",
    )  # fmt: skip
    parser.add_config_flag()
    add_engine_flags(parser)
    add_server_flags(parser, _SERVER_FLAGS)
    group.add_argument(
        "--url", dest="host", metavar="HOST", default=argparse.SUPPRESS,
        help="The same as --host, under vLLM's name.",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run a batch; returns the exit code: 0 if every line has a result, be it an error."""
    namespace = build_parser().parse(arguments)
    for name in ("input_file", "output_file"):
        if getattr(namespace, name) is None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} (-{name[0]}) is needed; see quire run-batch --help")
    engine, server = engine_config(namespace), server_config(namespace)
    if not namespace.enable_metrics:
        for name in _OF_METRICS:
            if hasattr(namespace, name) and name not in getattr(namespace, "from_file", ()):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag} says where metrics are served: give --enable-metrics too"
                )
    if namespace.max_concurrency is not None and namespace.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {namespace.max_concurrency}")

    import dataclasses

    from quire import envs
    from quire.config.locate import located
    from quire.logger import get_logger, setup_logging
    from quire.serving.batch.command import Batch
    from quire.serving.batch.files import count_lines

    envs.ensure_valid()
    setup_logging("BatchRunner")
    if line := taken_line(namespace):
        get_logger(__name__).info(line)
    output = _output(namespace)
    total = count_lines(namespace.input_file)  # a wrong path is told before a model is loaded
    engine = located(engine)
    engine.resolve(engine.model.read_shape())
    batch = Batch(
        namespace.input_file,
        namespace.output_file,
        output,
        engine,
        dataclasses.replace(server, disable_uvicorn_access_log=True),
        namespace.max_concurrency,
        namespace.enable_metrics,
    )
    return _run(batch, total)


def _output(namespace: argparse.Namespace) -> Path:
    """The file in which replies are put together.

    Raises:
        ConfigError: it cannot be made, or is the input.
    """
    from quire.serving.batch.files import is_url

    target = namespace.output_file
    if is_url(target):
        folder = Path(namespace.output_tmp_dir or tempfile.gettempdir())
        digest = hashlib.sha256(f"{os.getuid()} {namespace.input_file} {target}".encode())
        output = folder / f"quire-batch-{digest.hexdigest()[:16]}.jsonl"
    elif namespace.output_tmp_dir is not None:
        raise ConfigError("--output-tmp-dir is for an --output-file that is a URL")
    else:
        output = Path(target)
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent} for the output")
    if output.is_dir():
        raise ConfigError(f"--output-file {output} is a folder")
    if Path(namespace.input_file).resolve() == output.resolve():
        raise ConfigError("--input-file and --output-file are the same file")
    return output


def _run(batch: Batch, total: int | None) -> int:
    from quire.serving.batch.command import run_batch
    from quire.serving.batch.files import shown
    from quire.utils.process import leave_within, raise_descriptor_limit

    raise_descriptor_limit()
    with _Progress(total) as progress:
        try:
            asyncio.run(run_batch(batch, progress.seen))
        except asyncio.CancelledError:
            progress.close()
            kept = f"what is done is in {batch.unfinished}; the same command goes on with the rest"
            print(f"quire run-batch: interrupted; {kept}", file=sys.stderr, flush=True)
            leave_within(LEAVE_SECONDS, 130)
            return 130
    print(f"quire run-batch: {progress.summary}; {shown(batch.target)}", file=sys.stderr)
    return 0


class _Progress:
    """A bar on a terminal; elsewhere a line for every tenth of the batch."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = self._failed = 0
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            self._bar, self._task = make_bar("Running batch:", self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def seen(self, failed: bool) -> None:
        """One more line is done."""
        self._done += 1
        self._failed += failed
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._total and self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            print(f"quire run-batch: {self.summary}", file=sys.stderr, flush=True)

    @property
    def summary(self) -> str:
        """What is done so far."""
        of = "" if self._total is None else f" of {self._total}"
        failed = f", {self._failed} of them failed" if self._failed else ""
        return f"{self._done}{of} requests{failed}, {time.monotonic() - self._started:.1f} s"
