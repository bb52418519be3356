"""`quire top`: a running server at a glance, again and again.

Reads `/metrics` and `/v1/requests`. On a terminal the picture is redrawn; elsewhere, or with
`--once`, it is printed once. Against a server that lists no requests the figures remain.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from quire.cli.http import Client
from quire.cli.parser import Parser
from quire.cli.running import add_running_flags, running_client
from quire.errors import ConfigError, QuireError, RequestError
from quire.observability.explain_text import seconds

ROWS: Final = 20
STATES: Final = {"running": "green", "preempted": "red", "swapped": "red", "waiting": "yellow"}


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("top", "Watch a running server: load, latency, and each unfinished request.")
    parser.add_argument(
        "--interval", metavar="X", type=float, default=1.0,
        help="Seconds between pictures. Default: 1.",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", default=False, help="Print once and end.")
    add_running_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Watch until interrupted; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if not namespace.interval >= 0.1:
        raise ConfigError(f"--interval must be at least 0.1, got {namespace.interval:g}")
    view = View(running_client(namespace))
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if namespace.once or not sys.stdout.isatty():
        view.look()
        time.sleep(namespace.interval)
        console.print(view.look())
        return 0
    with Live(view.look(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(namespace.interval)
            live.update(view.look(), refresh=True)


class View:
    """What is known of the server, and how to show it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: dict[str, dict[str, float]] = {}
        self._time = 0.0

    def look(self) -> Any:
        """Ask the server; the picture, to be printed by rich.

        Raises:
            QuireError: it cannot be reached.
        """
        from rich.console import Group

        from quire.observability.signals import metric_signals, parse_metrics

        samples = parse_metrics(self._client.get("/metrics").decode())
        now = time.monotonic()
        signals = metric_signals(self._before, samples, now - self._time if self._time else 0.0)
        self._before, self._time = samples, now
        return Group(self._figures(signals), self._requests())

    def _figures(self, signals: dict[str, Any]) -> Any:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.title, table.title_justify = f"quire top  {self._client.url}", "left"
        for _ in _FIGURES[0]:
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True, justify="right")
        for row in _FIGURES:
            table.add_row(
                *(t for text, name, how in row for t in (text, _figure(signals, name, how)))
            )
        return table

    def _requests(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        try:
            states = self._client.get_json("/v1/requests")["data"]
        except RequestError as error:
            return Text(f"no list of requests: {error.message}", style="yellow")
        except QuireError as error:
            return Text(f"no list of requests: {error.message}", style="red")
        table = Table(box=None, title=f"{len(states)} unfinished requests", title_justify="left")
        for name in (
            "id",
            "state",
            "waits for",
            "age s",
            "prompt",
            "cached",
            "output",
            "preempted",
        ):
            table.add_column(name, justify="left" if name in ("id", "state") else "right")
        order = sorted(states, key=lambda s: (s["state"] != "running", -s["age"]))
        for s in order[:ROWS]:
            name = f"{s['id']}[{s['index']}]" if s["index"] else s["id"]
            table.add_row(
                name, Text(s["state"], style=STATES.get(s["state"], "")), waits_for(s),
                f"{s['age']:.1f}", str(s["num_prompt_tokens"]), str(s["num_cached_tokens"]),
                str(s["num_output_tokens"]), str(s["num_preemptions"]),
            )  # fmt: skip
        if len(order) > ROWS:
            table.caption = f"and {len(order) - ROWS} more"
        return table


def waits_for(state: dict[str, Any]) -> str:
    """What a request waits for: the head of the queue for something, the others for it."""
    reason = state["wait_reason"]
    if reason is None:
        return ""
    return str(reason) if state["queue_head"] else f"others ({reason})"


_FIGURES: Final = (
    (
        ("Running", "running", "{:.0f}"),
        ("Waiting", "waiting", "{:.0f}"),
        ("KV usage", "kv_usage", "{:.1%}"),
        ("Preempted/s", "preemptions_per_second", "{:.1f}"),
    ),
    (
        ("Prompt tok/s", "prompt_tokens_per_second", "{:.0f}"),
        ("Output tok/s", "generation_tokens_per_second", "{:.0f}"),
        ("TTFT p95", "ttft_metric_p95", seconds),
        ("ITL p95", "itl_metric_p95", seconds),
    ),
)
"""Lines of (text, signal, format or function)."""


def _figure(signals: dict[str, Any], name: str, how: str | Callable[[float], str]) -> str:
    value = signals.get(name)
    if value is None:
        return "-"
    return how.format(value) if isinstance(how, str) else how(value)
