"""`quire explain REQUEST_ID`: where the time of one request went, as a picture or as JSON.

The picture is a waterfall: one line per cause, with a bar that shows when it acted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from quire.cli.parser import Parser
from quire.cli.running import add_running_flags, is_url, running_client
from quire.errors import ConfigError

COLOURS: Final = {
    "queued": "yellow",
    "preempted": "red",
    "recomputed": "magenta",
    "stalled": "red",
    "prefill": "blue",
    "decode": "green",
    "decode_beside_prefill": "cyan",
}
"""Colours of the bars; other causes are grey."""
BAR: Final = 40
EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "explain", "Tell where the time of one request of a running server went.", intermixed=True
    )
    parser.add_argument(
        "request_id", metavar="REQUEST_ID", nargs="?", default=None,
        help="The id of the reply, the X-Request-Id that was sent, or as much of its beginning as "
        "no other request has.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", default=False, help="Print JSON.")
    add_running_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the explanation; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if is_url(namespace.request_id):  # URL REQUEST_ID
        first, second = namespace.request_id, getattr(namespace, "server", None)
        namespace.request_id, namespace.server = second, first
    if namespace.request_id is None:
        raise ConfigError(
            "no request is given. Try: quire explain REQUEST_ID; quire top lists running ones"
        )
    path = f"/v1/requests/{quote(namespace.request_id, safe='')}/explain"
    told = running_client(namespace).get_json(path)
    if namespace.json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        show(told["completions"])
    return 0


def show(completions: list[dict[str, Any]]) -> None:
    """Print the waterfall of each completion."""
    import msgspec
    from rich.console import Console
    from rich.text import Text

    from quire.observability.explain.explanation import Explanation, slowest_sentence, summary

    console = Console(soft_wrap=True, highlight=False)
    for data in completions:
        told = msgspec.convert(data, Explanation)
        console.print(Text(summary(told), style="bold"))
        for bar, cause, text in waterfall(told):
            style = COLOURS.get(cause, "bright_black")
            console.print(Text.assemble("  [", (bar, style), f"] {text}"))
        if told.slowest_step is not None:
            console.print(Text(f"  {slowest_sentence(told.slowest_step)}"))
        if told.prefix is not None:
            console.print(Text(f"  prefix: {told.prefix.text}"))


def waterfall(told: Any) -> Iterator[tuple[str, str, str]]:
    """(bar, cause, text) for each part, in the order in which they began."""
    from quire.observability.explain.wording import seconds

    for part in told.parts:
        line = f"{seconds(part.seconds):>8} {part.share:>4.0%}  {part.text}"
        yield draw(part.spans, told.seconds), part.cause, line


def draw(spans: Sequence[tuple[float, float]], total: float, width: int = BAR) -> str:
    """The intervals as a bar. Each cell is filled to the degree that they cover it; even the
    shortest is visible."""
    cells = [0.0] * width
    scale = width / total if total > 0 else 0.0
    for start, end in spans:
        low, high = max(0.0, start * scale), min(float(width), end * scale)
        for cell in range(int(low), min(width, int(high) + 1)):
            cells[cell] += max(0.0, min(high, cell + 1) - max(low, cell))
    return "".join(EIGHTHS[min(8, max(1, round(8 * c)))] if c > 0 else " " for c in cells)
