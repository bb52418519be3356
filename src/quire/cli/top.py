"""`quire top`: shows a running server at a glance, updated continuously.

Reads `/metrics` and `/v1/requests`. On a terminal the screen is redrawn until `q` is pressed;
elsewhere, or with `--once`, it is printed once, in full. For a server that does not list its
requests, only the figures are shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from quire.cli.http import Client
from quire.cli.keys import Keys
from quire.cli.parser import Parser
from quire.cli.running import add_running_flags, running_client
from quire.errors import ConfigError, QuireError, RequestError
from quire.observability.explain.wording import seconds

ROWS: Final = 20
STATES: Final = {"running": "green", "preempted": "red", "swapped": "red", "waiting": "yellow"}
HINT: Final = (
    "q quits; quire explain ID tells where a request's time went (its beginning is enough)"
)
PIPED_WIDTH: Final = 2000
"""Columns if there is no terminal: more than any id needs."""
SHORTEST_ID: Final = 12
"""Fewest characters of an id that a narrow terminal shows."""


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
    """Watch until `q` or an interrupt; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if not namespace.interval >= 0.1:
        raise ConfigError(f"--interval must be at least 0.1, got {namespace.interval:g}")
    view = View(running_client(namespace))
    from rich.console import Console

    if not sys.stdout.isatty():
        console = Console(width=PIPED_WIDTH)
    else:
        console = Console()
        if not namespace.once:
            return _watch(view, console, namespace.interval)
    view.look()
    time.sleep(namespace.interval)
    console.print(view.look())
    return 0


def _watch(view: View, console: Any, interval: float) -> int:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def picture() -> Any:
        return Group(view.look(), Text(f"\n{HINT}", style="dim"))

    with Keys() as keys, Live(picture(), console=console, screen=True, auto_refresh=False) as live:
        while keys.wait(interval) not in ("q", "Q"):
            live.update(picture(), refresh=True)
    return 0


class Pace:
    """Rates measured from the end of one step to the end of a later one, so that a step longer than
    the interval does not look like a standstill."""

    def __init__(self) -> None:
        self._before: Mapping[str, Mapping[str, float]] | None = None
        self._since = 0.0
        # when the last step was seen to have ended, or nothing to be done
        self._paces: dict[str, Any] = {}

    def see(self, samples: Mapping[str, Mapping[str, float]], busy: bool, now: float) -> Any:
        """The current figures.

        Args:
            samples: Values of `/metrics`.
            busy: Whether requests are unfinished.
            now: Seconds.

        Returns:
            Figures; among them `step_seconds`, while a step is running that was running at the
            previous call.
        """
        from quire.observability.explain.metric_alerts import metric_figures

        before, since = self._before, self._since
        signals = metric_figures(before or {}, samples, now - since if before is not None else 0.0)
        ended = before is not None and _work(samples) > _work(before)
        if before is None or ended or not busy:
            self._before, self._since = samples, now
        if ended or (before is not None and not busy):
            self._paces = {name: signals[name] for name in signals if name not in _NOW}
        elif before is not None:
            signals["step_seconds"] = now - since
        return {name: signals[name] for name in signals if name in _NOW} | self._paces


_NOW: Final = ("running", "waiting", "kv_usage", "step_seconds")
"""Figures that are valid at once; the others need a step to end first."""
_WORK: Final = (
    "vllm:engine_steps_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
)
"""Counters that grow when a step ends. (Other engines do not count steps themselves.)"""


def _work(samples: Mapping[str, Mapping[str, float]]) -> float:
    return sum(sum(samples.get(name, {}).values()) for name in _WORK)


class View:
    """What is known about the server, and how to show it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pace = Pace()

    def look(self) -> Any:
        """Ask the server; returns the screen, for rich to print.

        Raises:
            QuireError: it cannot be reached.
        """
        from rich.console import Group

        from quire.observability.explain.metric_alerts import parse_metrics

        samples = parse_metrics(self._client.get("/metrics").decode())
        states = self._states()
        gauges = (samples.get(f"vllm:num_requests_{name}", {}) for name in ("running", "waiting"))
        busy = bool(states) if isinstance(states, list) else any(sum(g.values()) for g in gauges)
        signals = self._pace.see(samples, busy, time.monotonic())
        return Group(self._figures(signals), self._requests(states))

    def _states(self) -> list[dict[str, Any]] | QuireError:
        try:
            return list(self._client.get_json("/v1/requests")["data"])
        except QuireError as error:
            return error

    def _figures(self, signals: dict[str, Any]) -> Any:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        running = signals.get("step_seconds")
        step = f"  step running for {seconds(running)}" if running is not None else ""
        table.title, table.title_justify = f"quire top  {self._client.url}{step}", "left"
        for _ in _FIGURES[0]:
            table.add_column(no_wrap=True)
            table.add_column(no_wrap=True, justify="right")
        for row in _FIGURES:
            table.add_row(
                *(t for text, name, how in row for t in (text, _figure(signals, name, how)))
            )
        return table

    def _requests(self, states: list[dict[str, Any]] | QuireError) -> Any:
        from rich.table import Table
        from rich.text import Text

        if isinstance(states, QuireError):
            style = "yellow" if isinstance(states, RequestError) else "red"
            return Text(f"no list of requests: {states.message}", style=style)
        number = (
            "1 unfinished request" if len(states) == 1 else f"{len(states)} unfinished requests"
        )
        table = Table(box=None, title=number, title_justify="left")
        longest = max((len(state["id"]) for state in states), default=0)
        table.add_column("id", overflow="ellipsis", min_width=min(SHORTEST_ID, longest))
        table.add_column("state", no_wrap=True)
        table.add_column("waits for", justify="right", overflow="ellipsis")
        for name in ("age s", "prompt", "cached", "output", "preempted"):
            table.add_column(name, justify="right", no_wrap=True)
        order = sorted(states, key=lambda s: (s["state"] != "running", -s["age"]))
        for s in order[:ROWS]:
            name = f"{s['id']}[{s['index']}]" if s["index"] else s["id"]
            table.add_row(
                Text(name), Text(s["state"], style=STATES.get(s["state"], "")), waits_for(s),
                f"{s['age']:.1f}", str(s["num_prompt_tokens"]), str(s["num_cached_tokens"]),
                str(s["num_output_tokens"]), str(s["num_preemptions"]),
            )  # fmt: skip
        if len(order) > ROWS:
            table.caption = f"and {len(order) - ROWS} more"
        return table


def waits_for(state: dict[str, Any]) -> str:
    """What a request waits for: the head of the queue waits for a resource, the others wait for the
    head."""
    reason = state["wait_reason"]
    if reason is None:
        return ""
    return str(reason) if state["queue_head"] else f"queue head ({reason})"


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
