"""Counts how much of vLLM's surface quire takes: flags, parameters, members, imports, routes.

`python tools/drop_in.py` prints a table, `--json` the counts with what is missing. `--markdown`
writes docs/drop-in.md, and docs/compatibility.md with a verdict for each name (`compatibility.py`);
`--check` fails if one of them is not current, or a name neither works nor is refused. The surface
is in vllm_surface.json. Nothing is started: a flag counts if its value gets through the parser and
the configuration.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compatibility

ROOT = Path(__file__).resolve().parent.parent
SURFACE = json.loads((ROOT / "tools" / "vllm_surface.json").read_text("utf-8"))
PAGE = ROOT / "docs" / "drop-in.md"
NAMES_PAGE = ROOT / "docs" / "compatibility.md"
KEYS = ("QUIRE_API_KEY", "VLLM_API_KEY")


DIFFERS = """\
## What differs although the name is there

- `LLM` and `LLMEngine` run the engine in the caller's process. `AsyncLLM` runs it in a process of
  its own, which starts with the first request.
- A value out of range is an error as soon as `SamplingParams` is made. If a field is set to such a
  value later, the error is raised at once and the field keeps its old value.
- The tokenizer is quire's own. It has the usual members, but `decode` leaves out special tokens by
  default, `apply_chat_template` returns text unless `tokenize=True`, and nothing is padded or
  turned into tensors.
- Configuration objects (`CompilationConfig(mode=0)`) are plain mappings. quire checks what they ask
  for when an engine is made from them.
- Refusals raise `quire.errors.NotAvailable`, a `NotImplementedError`, or
  `quire.errors.InvalidRequest`, a `ValueError`. Bad options raise `quire.errors.ConfigError`, also
  a `ValueError`.""".splitlines()


@dataclass
class Count:
    """One row of the table."""

    title: str
    names: list[str]
    missing: list[str]
    refused: list[str] = field(default_factory=list)
    """There, and answers with a sentence that says what to do instead."""

    @property
    def taken(self) -> int:
        return len(self.names) - len(self.missing)


def count(title: str, names: Iterable[str], holds: Callable[[str], bool]) -> Count:
    listed = list(names)
    return Count(title, listed, [name for name in listed if not holds(name)])


# ----------------------------------------------------------------------------------------- flags


def long_name(row: dict[str, Any]) -> str:
    return next(o for o in row["opts"] if o.startswith("--") and not o.startswith("--no-"))


def tokens(row: dict[str, Any]) -> list[str]:
    """The command line that gives a flag its default."""
    flag, value = long_name(row), row["default"]
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, list) and row.get("nargs") == "+" and value:
        return [flag, *value]
    text = value if isinstance(value, str) else json.dumps(value)
    return [f"{flag}={text}"]


@functools.cache
def parser() -> Any:
    from quire.cli.serve import build_parser

    return build_parser()


def starts(arguments: list[str]) -> str | None:
    """Why this command line does not get as far as loading a model; None if it does."""
    from quire.config.cli import engine_config, server_config
    from quire.errors import QuireError

    try:
        namespace = parser().parse(arguments)
        engine_config(namespace)
        server_config(namespace)
    except QuireError as error:
        return str(error)
    return None


def from_file(name: str, value: Any) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps({name: value}), "utf-8")
        return starts(["--config", str(path)]) is None


def as_option(name: str, value: Any) -> bool:
    from quire.config import EngineConfig

    try:
        EngineConfig.from_options(**{name: value})
    except Exception:  # an error of ours, or a raw one: both stop a start
        return False
    return True


def flag_counts() -> Iterator[Count]:
    rows = {long_name(row): row for row in SURFACE["flags"] if long_name(row) != "--help"}
    with_default = {name: row for name, row in rows.items() if "default" in row}
    yield count(
        "flags at their own default, command line",
        with_default,
        lambda name: starts(tokens(with_default[name])) is None,
    )
    yield count(
        "flags at their own default, `--config` file",
        with_default,
        lambda name: from_file(name[2:], with_default[name]["default"]),
    )
    options = {n: row["default"] for n, row in SURFACE["engine_args"].items() if "default" in row}
    yield count(
        "options at their own default, `LLM(...)`",
        options,
        lambda name: as_option(name, options[name]),
    )
    spelled = [option for row in rows.values() for option in row["opts"]]
    yield count(
        "spellings of flags, known or refused by name",
        spelled,
        lambda option: "unknown flag" not in (starts([option, "1"]) or ""),
    )


# ------------------------------------------------------------------------------------ parameters


def constructs(kind: type, name: str, value: Any) -> bool:
    try:
        kind(**{name: value})
    except Exception:
        return False
    return True


def parameter_counts() -> Iterator[Count]:
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.params import PoolingParams, RequestOutputKind, SamplingParams

    defaults = {**SURFACE["sampling_params"], "output_kind": RequestOutputKind.CUMULATIVE}
    yield count(
        "parameters of `SamplingParams` at their default",
        defaults,
        lambda name: constructs(SamplingParams, name, defaults[name]),
    )
    members = [m for m in SURFACE["sampling_params_members"] if m not in defaults]
    others = count(
        "other members of `SamplingParams`", members, lambda name: hasattr(SamplingParams, name)
    )
    others.refused = [m for m in members if hasattr(getattr(SamplingParams, m, None), "refused")]
    yield others
    fields = [name for name in SURFACE["pooling_params"] if name != "output_kind"]
    yield count(
        "parameters of `PoolingParams` at `None`",
        fields,
        lambda name: constructs(PoolingParams, name, None),
    )
    for kind, listed in (
        (RequestOutput, SURFACE["request_output"]),
        (CompletionOutput, SURFACE["completion_output"]),
    ):
        has = {f.name for f in __import__("dataclasses").fields(kind)} | set(dir(kind))
        yield count(f"attributes of `{kind.__name__}`", listed, has.__contains__)


# --------------------------------------------------------------------------------------- members


def engine_class(name: str) -> type:
    """The class that a script gets under this name of vLLM."""
    places = {
        "LLM": ("quire.engine.llm", "LLM"),
        "LLMEngine": ("quire.compat.llm_engine", "LLMEngine"),
        "AsyncLLM": ("quire.compat.async_llm", "AsyncLLM"),
    }
    module, attribute = places[name]
    place = module.rpartition(".")[2]
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        found = getattr(importlib.import_module(f"quire.engine.{place}"), attribute)
    assert isinstance(found, type)
    return found


def member_counts() -> Iterator[Count]:
    for name, members in SURFACE["members"].items():
        kind = engine_class(name)
        declared = {m for base in kind.__mro__ for m in inspect.get_annotations(base)}
        present = [m for m in members if hasattr(kind, m) or m in declared]
        found = count(f"members of `{name}`", members, present.__contains__)
        found.refused = [m for m in present if hasattr(getattr(kind, m, None), "refused")]
        yield found
        if name == "LLM":
            yield parameters_of_members(kind, members, list(present))


def parameters_of_members(kind: type, members: dict[str, Any], present: list[str]) -> Count:
    all_of, missing = [], []
    for member, listed in members.items():
        has = set(inspect.signature(getattr(kind, member)).parameters) if member in present else ()
        for parameter in listed or ():
            name = f"{member}({parameter['name']}=)"
            all_of.append(name)
            if parameter["name"] not in has and not {"kwargs", "_"} & {*has}:
                missing.append(name)
    return Count("parameters of the members of `LLM`", all_of, missing)


# ------------------------------------------------------------------------------ imports and routes


def import_counts() -> Iterator[Count]:
    from quire.cli.run import Alias

    Alias().install()
    names = [f"{module}.{name}" for module, listed in SURFACE["imports"].items() for name in listed]

    def found(path: str) -> bool:
        module, _, name = path.rpartition(".")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            return False
        return True

    yield count("names that scripts import", names, found)


def route_counts() -> Iterator[Count]:
    from quire.serving.app import ROUTES

    def plain(path: str) -> str:
        return re.sub(r"{[^}]*}", "{}", path)  # what stands in the braces is nobody's business

    ours = {(plain(path), method) for path in ROUTES for method in ROUTES.get(path).methods}
    listed = {
        f"{method.upper()} {path}": (plain(path), method.upper())
        for path, methods in SURFACE["routes"].items()
        for method in methods
    }
    yield count("HTTP routes", listed, lambda name: listed[name] in ours)
    for path in ("/v1/chat/completions", "/v1/completions"):
        known = request_fields(path)
        names = SURFACE["routes"][path]["post"]
        yield count(
            f"fields of `POST {path}`, known or refused by name",
            names,
            known.__contains__,
        )


def request_fields(path: str) -> set[str]:
    from quire.serving.openai import schema

    kind, table = {
        "/v1/chat/completions": (schema.ChatRequest, schema.CHAT_UNSUPPORTED),
        "/v1/completions": (schema.CompletionRequest, schema.COMPLETION_UNSUPPORTED),
    }[path]
    return {*kind.__struct_fields__, *table}


# ----------------------------------------------------------------------------------------- output


def counts() -> list[Count]:
    for key in KEYS:
        os.environ.pop(key, None)
    parts = (flag_counts, parameter_counts, member_counts, import_counts, route_counts)
    return [row for part in parts for row in part()]


def table(rows: list[Count]) -> Iterator[str]:
    yield "| Of vLLM's | total | accepted | of these, refused when used | missing |"
    yield "|---|---:|---:|---:|---|"
    for row in rows:
        shown = ", ".join(f"`{name}`" for name in row.missing[:8])
        more = f" and {len(row.missing) - 8} more" if len(row.missing) > 8 else ""
        refused = len(row.refused) or ""
        yield f"| {row.title} | {len(row.names)} | {row.taken} | {refused} | {shown + more} |"


def page(rows: list[Count]) -> str:
    version = SURFACE["version"]
    lines = [
        "# How much of vLLM's surface there is",
        "",
        "<!-- Written by `python tools/drop_in.py --markdown`: change the code, then run it. -->",
        "",
        f"Counted by `python tools/drop_in.py` against the public names of vLLM {version} "
        "(`tools/vllm_surface.json`). A flag or option counts as accepted if an engine starts with "
        "its default; a parameter, member or name counts if it exists. Some of those that exist "
        'only answer with a sentence on what quire does not do; the column "refused when used" '
        "counts them again. [config.md](config.md) lists the values that options without a setting "
        "here may have, [cli.md](cli.md) the modules of `import vllm`.",
        "",
        *table(rows),
        "",
        *DIFFERS,
    ]
    return "\n".join(lines) + "\n"


def as_json(rows: list[Count]) -> dict[str, Any]:
    return {
        row.title: {
            "all": len(row.names),
            "taken": row.taken,
            "refused": row.refused,
            "missing": row.missing,
        }
        for row in rows
    }


def pages(rows: list[Count]) -> dict[Path, str]:
    return {PAGE: page(rows), NAMES_PAGE: compatibility.page(SURFACE)}


def check(rows: list[Count]) -> int:
    """0 if the pages are current and every name has a verdict."""
    stale = [
        path.name
        for path, text in pages(rows).items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    undecided = compatibility.undecided(SURFACE)
    for name in stale:
        print(f"stale: docs/{name}; run python tools/drop_in.py --markdown", file=sys.stderr)
    for name in undecided:
        print(f"neither works nor is refused: {name}", file=sys.stderr)
    return 1 if stale or undecided else 0


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--json", action="store_true", help="print counts and what is missing")
    words.add_argument("--markdown", action="store_true", help="write both pages")
    words.add_argument("--check", action="store_true", help="fail if one is not current")
    options = words.parse_args()
    rows = counts()
    if options.json:
        print(json.dumps(as_json(rows), indent=1))
    elif options.markdown:
        for path, text in pages(rows).items():
            path.write_text(text, "utf-8")
    elif options.check:
        return check(rows)
    else:
        print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
