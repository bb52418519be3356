"""Writes docs/{cli,config,metrics,required}.md from the tables that the program itself uses.

`python tools/gen_docs.py` writes, `--check` fails if a file is not what would be written.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from metric_sections import grouped, series
from quire import envs
from quire.cli.bench import BENCHMARKS
from quire.cli.benches.sweep import SWEEPS
from quire.cli.main import COMMANDS, overview
from quire.cli.parser import Parser
from quire.config import EngineConfig, ServerConfig, neutral
from quire.config.cli import ALIASES, RENAMED, flags, sections, show
from quire.observability.metrics.http_metrics import HTTP_METRICS
from quire.observability.metrics.store import buckets_1_2_5
from quire.observability.metrics.table import CACHE_INFO, CACHE_INFO_HELP, Metric, MetricKind

DOCS = Path(__file__).resolve().parent.parent / "docs"
GENERATED = "<!-- Written by tools/gen_docs.py: change the source, then run it. -->"
TYPES = {
    "bool": "switch",
    "int": "whole number",
    "int | None": "whole number",
    "float": "number",
    "float | None": "number",
    "str": "text",
    "str | None": "text",
    "list[str]": "one or more texts",
    "dict[str, Any]": "JSON object",
}
SECTIONS = {name.capitalize() for root in (EngineConfig, ServerConfig) for name in sections(root)}


def cell(text: str) -> str:
    """Text that cannot break a table row."""
    return " ".join(text.split()).replace("|", "\\|")


def config_page() -> Iterator[str]:
    yield "# Configuration\n"
    yield GENERATED + "\n"
    yield (
        "Each setting is a flag of `quire serve`, an argument of `LLM(...)` with the same name in "
        "`snake_case`, and a key of a `--config` file. The command line takes precedence over the "
        "file, and the file over the default. Whole numbers may be written `8k` (8000) or `8K` "
        "(8192). Switches have a `--no-…` form. JSON flags also take `--flag.key value`.\n"
    )
    yield "```yaml\n# quire serve --config server.yaml\nmodel: ./my-model\nmax-num-seqs: 64"
    yield "cache:            # sections may be nested\n  block_size: 32\nport: 9000\n```"
    for root in (EngineConfig, ServerConfig):
        for name, section in sections(root).items():
            yield f"\n## {name.capitalize()}\n"
            yield (section.__doc__ or "").split("\n")[0] + "\n"
            yield "| Flag | Type | Default | Meaning |\n| --- | --- | --- | --- |"
            for flag in flags(root):
                if flag.section == name:
                    spellings = ", ".join(f"`{spelling}`" for spelling in flag.spellings)
                    empty = flag.default in (None, "", [], {})
                    default = "" if empty else f"`{show(flag.default)}`"
                    kind = TYPES[flag.annotation]
                    yield f"| {spellings} | {kind} | {default} | {cell(flag.help)} |"
    yield from environment_part()
    yield from old_flags_part()


def environment_part() -> Iterator[str]:
    yield "\n## Environment variables\n"
    yield (
        "Each variable is also read with the prefix `VLLM_`; `QUIRE_` takes precedence. An empty "
        "value counts as unset; a bad one is an error at start.\n"
    )
    yield "| Variable | Default | Meaning |\n| --- | --- | --- |"
    for name, row in envs.table().items():
        default = "" if row.default is None else f"`{show(row.default)}`"
        yield f"| `QUIRE_{name}` | {default} | {cell(row.help)} |"


def old_flags_part() -> Iterator[str]:
    yield "\n## Other names of vLLM's flags\n"
    yield "Underscores may stand for dashes. These mean the same as the flag beside them:\n"
    yield "| Spelling | Flag |\n| --- | --- |"
    for field, spellings in ALIASES.items():
        for spelling in spellings:
            yield f"| `{spelling}` | `--{field.replace('_', '-')}` |"
    for old, new in RENAMED.items():
        yield f"| `{old}` | `{new}` |"
    yield from neutral_part()


def neutral_part() -> Iterator[str]:
    yield "\n## vLLM's options that have no setting here\n"
    yield (
        "Each is accepted as a flag, in a file and in `LLM(...)` if its value asks for what quire "
        "does anyway: the values shown, or `None`. One line at the start names those that were "
        "given. Any other value is refused with the sentence beside it.\n"
    )
    yield "| Sentence | Options, and the values that are accepted |\n| --- | --- |"
    rows = [*neutral.engine_rows().values(), *neutral.server_rows().values()]
    for remedy in dict.fromkeys(row.remedy for row in rows):
        listed = ", ".join(neutral_cell(row) for row in rows if row.remedy == remedy)
        yield f"| {cell(remedy)} | {listed} |"
    forms = (f"`{short}` {name.replace('_', '-')}" for short, name in neutral.SHORT.items())
    yield f"\nShort forms: {', '.join(forms)}."


def neutral_cell(row: neutral.NeutralOption) -> str:
    also = neutral.ALSO.get(row.name, ())
    empty = row.default is None or row.kind is neutral.JSON
    values = [*([] if empty else [row.default]), *also]
    shown = " or ".join(f"`{json.dumps(value)}`" for value in values if value not in ("", []))
    return f"`{row.flag}`" + (f" {shown}" if shown else "")


def cli_page() -> Iterator[str]:
    yield "# Command line\n"
    yield GENERATED + "\n"
    yield f"```\n{overview()}\n```\n"
    yield (
        "An error is one line on stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 "
        "interrupted. `QUIRE_LOGGING_LEVEL=DEBUG` shows tracebacks."
    )
    for name in COMMANDS:
        yield from command_part(name, parser_of(COMMANDS.target(name)))
        if name == "bench":
            for one in BENCHMARKS:
                yield from command_part(f"bench {one}", parser_of(BENCHMARKS.target(one)))
            for one in SWEEPS:
                yield from command_part(f"bench sweep {one}", parser_of(SWEEPS.target(one)))


def parser_of(target: str) -> Parser:
    """The parser of a command that is `module:function`."""
    module_name, _, function = target.partition(":")
    module = importlib.import_module(module_name)
    one_of_many = hasattr(module, f"{function}_parser")
    parser: Parser = getattr(module, f"{function}_parser" if one_of_many else "build_parser")()
    return parser


def command_part(name: str, parser: Parser) -> Iterator[str]:
    yield f"\n## quire {name}\n"
    yield f"{parser.description}\n"
    yield "| Argument | Meaning |\n| --- | --- |"
    borrowed = []
    for group in parser._action_groups:
        if group.title in SECTIONS:
            borrowed.append(group.title)
            continue
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS:  # vLLM's flags without effect: docs/drop-in.md
                continue
            names = ", ".join(f"`{flag}`" for flag in action.option_strings)
            value = action.metavar or action.dest.upper()
            names = names or f"`{value}`"
            takes = f" `{value}`" if action.option_strings and action.nargs != 0 else ""
            yield f"| {names}{takes} | {cell((action.help or '').replace('%%', '%'))} |"
    if borrowed:
        links = ", ".join(f"[{title}](config.md#{title.lower()})" for title in borrowed)
        yield f"\nAnd the flags of these sections: {links}."
    if name == "chat":
        from quire.cli.chat import HELP

        yield f"\nInside:\n\n```\n{HELP}\n```"
    elif name == "run":
        from quire.compat.modules import MODULES

        yield "\nWhat `import vllm` offers:\n\n| Module | Names |\n| --- | --- |"
        for module, names in MODULES.items():
            yield f"| `{module}` | {', '.join(f'`{n}`' for n in names)} |"


def metrics_page() -> Iterator[str]:
    yield "# Metrics\n"
    yield GENERATED + "\n"
    yield (
        "`GET /metrics` returns Prometheus text, at most a quarter of a second old. `LLM(..., "
        "disable_log_stats=False).get_metrics()` returns the same values as objects. All metrics "
        "have the labels `model_name` and `engine`. Counters end in `_total`, histograms in "
        "`_bucket`, `_sum` and `_count`. `--disable-log-stats` turns them off: they are then "
        "absent, not 0. The page also has the `process_*`, `python_info` and `python_gc_*` "
        "metrics of the API process. Dashboards, alerts and a scrape configuration are in "
        "[deploy](../deploy).\n"
    )
    for section, metrics in grouped():
        yield f"## {section.title}\n"
        yield section.prose + "\n"
        yield "| Metric | Kind | Meaning |\n| --- | --- | --- |"
        for metric in metrics:
            kind = "counter" if metric.kind is MetricKind.VECTOR else metric.kind.value
            needs = f" Exists with `--{metric.option.replace('_', '-')}`." if metric.option else ""
            about = cell(metric.help + needs)
            yield f"| `{series(metric)}`{label_part(metric)} | {kind} | {about} |"
        yield ""
    yield "## HTTP\n"
    yield (
        "These cover the requests that the server has answered, except those for probes and "
        "metrics. Names and buckets are those of the usual instrumentation of Python servers, so "
        "there is no label `model_name`. `handler` is the route as written in the server's table "
        "(`none`: no route matched), `status` is `2xx`, `4xx` or `5xx`; a client that "
        "disconnected before its reply began counts as `4xx`. Durations last until the end of the "
        "reply, streams included; sizes are those of the bodies.\n"
    )
    yield "| Metric | Kind | Meaning |\n| --- | --- | --- |"
    for row in HTTP_METRICS:
        name = f"{row.name}_total" if row.kind is MetricKind.COUNTER else row.name
        by = f" by {', '.join(f'`{label}`' for label in row.labels)}" if row.labels else ""
        yield f"| `{name}`{by} | {row.kind.value} | {cell(row.help)} |"
    yield "\n## Configuration\n"
    yield f"`{CACHE_INFO}` is 1. {CACHE_INFO_HELP}\n"
    yield "## Buckets\n"
    yield "| Histograms | Upper bounds |\n| --- | --- |"
    yield from bucket_rows([m for _, metrics in grouped() for m in metrics])


def required_page() -> Iterator[str]:
    yield "# What guides to vLLM describe, and the tests that show it\n"
    yield GENERATED + "\n"
    yield (
        "Guides to vLLM's V1 engine tell their readers which metrics and log lines to watch and "
        "which flags and variables to set. Each such thing is a row here, with a letter (B "
        "behaviour, C flag, D variable, E endpoint, F trace, G metric, H log line, J profiler) "
        "and a test in tests/required.\n"
    )
    yield "| Row | What holds | Test |\n| --- | --- | --- |"
    for rows, what, test in sorted(required_tests(), key=lambda r: (r[0][0][0], int(r[0][0][1:]))):
        yield f"| {', '.join(row.upper() for row in rows)} | {cell(what)} | `{test}` |"


def required_tests() -> Iterator[tuple[list[str], str, str]]:
    """Rows, what holds and where, of each test that is named after rows."""
    for path in sorted((DOCS.parent / "tests" / "required").glob("test_*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                words = node.name.removeprefix("test_").split("_")
                rows = list(itertools.takewhile(re.compile(r"[a-j]\d+").fullmatch, words))
                if rows:
                    yield rows, ast.get_docstring(node) or "", f"{path.name}::{node.name}"


def label_part(metric: Metric) -> str:
    if metric.label is None:
        return ""
    values = ", ".join(metric.label_values)
    values = values or ("0, 1, ..." if metric.kind is MetricKind.VECTOR else "")
    return f" by `{metric.label}`" + (f" ({values})" if values else "")


def bucket_rows(metrics: list[Metric]) -> Iterator[str]:
    families: dict[tuple[float, ...], list[str]] = {}
    for metric in metrics:
        if metric.kind is MetricKind.HISTOGRAM:
            families.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    for bounds, names in families.items():
        shown = ", ".join(f"{bound:g}" for bound in bounds or buckets_1_2_5(50))
        yield f"| {', '.join(names)} | {shown}{'' if bounds else ', ... up to the length'} |"


PAGES = {"cli.md": cli_page, "config.md": config_page, "metrics.md": metrics_page}
PAGES["required.md"] = required_page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on differences")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        text = "\n".join(page()).rstrip() + "\n"
        path = DOCS / name
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, "utf-8")
    if stale and check:
        print(f"stale: {', '.join(stale)}; run python tools/gen_docs.py", file=sys.stderr)
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
