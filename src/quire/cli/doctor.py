"""`quire doctor`: checks this machine or, given a URL, runs the on-call drill on a server.

The drill scrapes `/metrics` twice, has the server apply `quire.observability.explain.diagnosis` to
its records, and prints the likely causes with their evidence and the flag to change. The exit code
is 1 if something is wrong.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final

from quire.cli.http import Client
from quire.cli.machine import FAIL, Check, check_machine
from quire.cli.parser import Parser
from quire.cli.running import DEFAULT_PORT, add_running_flags, running_client, server_named
from quire.errors import ConfigError, RequestError

MARKS = {"ok": ("green", "ok  "), "warn": ("yellow", "warn"), "fail": ("red", "FAIL")}


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "doctor",
        "Check this machine; with the URL of a running server, find out why that is slow.",
    )
    parser.add_argument("--json", action="store_true", default=False, help="Print JSON.")
    parser.add_argument(
        "--seconds", metavar="X", type=float, default=60.0,
        help="How far back a server's records are read. Default: 60.",
    )  # fmt: skip
    parser.add_argument(
        "--watch", metavar="X", type=float, default=2.0,
        help="Seconds between two looks at a server's metrics. Default: 2.",
    )  # fmt: skip
    add_running_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Check and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    for name in ("seconds", "watch"):
        if not getattr(namespace, name) > 0:
            raise ConfigError(f"--{name} must be positive, got {getattr(namespace, name):g}")
    if server_named(namespace):
        return _drill(running_client(namespace), namespace.seconds, namespace.watch, namespace.json)
    return _local(namespace.json)


def _local(as_json: bool) -> int:
    checks = check_machine(DEFAULT_PORT)
    if as_json:
        fields = ("name", "verdict", "found", "remedy")
        print(json.dumps([{f: getattr(c, f) for f in fields} for c in checks], indent=2))
    else:
        _print_checks(checks)
    return int(any(check.verdict == FAIL for check in checks))


def _print_checks(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for check in checks:
        colour, mark = MARKS[check.verdict]
        remedy = f"; {check.remedy}" if check.remedy else ""
        console.print(Text.assemble((mark, colour), f"  {check.name:<12}{check.found}{remedy}"))


# --------------------------------------------------------------------------------- a running server


def _drill(client: Client, window: float, watch: float, as_json: bool) -> int:
    report = examine(client, window, watch)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(client, report)
    return int(bool(report["findings"]))


def examine(client: Client, window: float, watch: float) -> dict[str, Any]:
    """The figures from metrics and records, and the findings.

    Raises:
        QuireError: the server cannot be reached.
    """
    from quire.observability.explain.metric_alerts import (
        check_alerts,
        metric_figures,
        parse_metrics,
    )

    before = parse_metrics(client.get("/metrics").decode())
    time.sleep(watch)
    after = parse_metrics(client.get("/metrics").decode())
    metrics = metric_figures(before, after, watch)
    try:
        told = client.get_json(f"/v1/diagnosis?seconds={window:g}")
    except RequestError as error:
        # Another engine with vLLM's metrics, or --record-steps 0.
        told = {"signals": None, "findings": [], "no_records": error.message}
    trio = [
        {"figure": figure, "above_limit": above, "meaning": meaning}
        for figure, above, meaning in check_alerts(metrics)
    ]
    return {"seconds": window, "metrics": metrics, "trio": trio, **told}


def seen(signals: dict[str, Any]) -> str:
    """Which steps the figures cover, and why no earlier ones."""
    from quire.observability.explain.wording import plural, seconds

    back = seconds(signals["seen_seconds"])
    text = _SEEN[signals["seen_since"]].format(back)
    return f"{plural(signals['steps'], 'step')}, {seconds(signals['span_seconds'])} of work, {text}"


_SEEN: Final = {
    "window": "in the last {}",
    "records": "in the last {} (older ones are not kept: --record-steps keeps more)",
    "limits": "since the limits were changed {} ago",
    "start": "since the first one {} ago",
}


def nothing_found(signals: dict[str, Any]) -> str:
    """What the absence of findings means."""
    from quire.observability.explain.diagnosis import MIN_STEPS

    if signals["steps"] < MIN_STEPS:
        return f"too few steps to judge (at least {MIN_STEPS})"
    return "nothing stands out"


def _try(client: Client, limits: dict[str, Any]) -> str:
    """A command that changes limits of the running server."""
    url = client.url.rstrip("/").removesuffix("/v1")
    key = ' -H "Authorization: Bearer $QUIRE_ADMIN_API_KEY"' if client.has_key else ""
    body = json.dumps(limits)
    return f"curl -X POST {url}/limits -H 'Content-Type: application/json'{key} -d '{body}'"


def _print_report(client: Client, report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console, url = Console(soft_wrap=True, highlight=False), client.url
    console.print(Text(f"{url}: first the usual figures", style="bold"))
    for gate in report["trio"]:
        colour, mark = MARKS["warn" if gate["above_limit"] else "ok"]
        meaning = f": {gate['meaning']}" if gate["above_limit"] else ""
        console.print(Text.assemble((mark, colour), f"  {gate['figure']}{meaning}"))
    if "no_records" in report:
        console.print(Text(f"no records: {report['no_records']}", style="yellow"))
        return
    signals, findings = report["signals"], report["findings"]
    console.print(Text(f"then the records: {seen(signals)}", "bold"))
    if not findings:
        console.print(Text.assemble(("ok  ", "green"), f"  {nothing_found(signals)}"))
    for number, finding in enumerate(findings, 1):
        head = "likely cause" if number == 1 else "also"
        console.print(Text.assemble((f"{head}: ", "red"), (finding["cause"], "bold")))
        for name in ("symptom", "evidence", "remedy"):
            console.print(Text(f"    {name + ':':<10}{finding[name]}"))
        if finding.get("limits"):
            console.print(Text(f"    {'try:':<10}{_try(client, finding['limits'])}"))
    if findings and (latest := signals.get("latest_request")) is not None:
        late = f"{signals['latest_ttft']:.2f} s to its first token"
        console.print(Text(f"look closer: quire explain {latest} --url {url}  ({late})"))
