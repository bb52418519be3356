"""What becomes of each name of vLLM, one by one: the rows of docs/compatibility.md.

A name works, or is refused with a reason; if one is neither, `drop_in.py --check` fails. Every
verdict is read from the tables that the program itself uses, never written down here. `drop_in.py`
calls this; it counts what a default does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WORKS, REFUSED, UNKNOWN = "works", "refused", "neither"


@dataclass(frozen=True)
class Verdict:
    """What becomes of one name."""

    name: str
    state: str
    why: str = ""
    """The reason of a refusal, or what is to be known of a name that works."""


@dataclass(frozen=True)
class Part:
    """One table of the page."""

    title: str
    rows: list[Verdict]

    def count(self, state: str) -> int:
        return sum(row.state == state for row in self.rows)


def parts(surface: dict[str, Any]) -> list[Part]:
    """All tables, in the order of the page."""
    return [
        Part("Starred flags", [flag(name) for name in surface["starred"]]),
        Part("Routes", [route(name) for name in route_names(surface)]),
        *fields_of_routes(surface),
        Part("Environment variables", [variable(name) for name in surface["environment"]]),
        Part("Methods of `LLM`", list(llm_methods(surface))),
        Part("Members of `SamplingParams`", list(sampling_members(surface))),
    ]


# ---- flags and variables -------------------------------------------------------------------------


def flag(name: str) -> Verdict:
    from quire.config import EngineConfig, ServerConfig, neutral
    from quire.config.cli import ALIASES, flags

    own = {spelling for root in (EngineConfig, ServerConfig) for f in flags(root)
           for spelling in f.spellings}  # fmt: skip
    own |= {spelling for spellings in ALIASES.values() for spelling in spellings}
    if name in own or name == "--config":
        return Verdict(name, WORKS)
    rows = {**neutral.engine_rows(), **neutral.server_rows()}
    row = rows.get(name.removeprefix("--").replace("-", "_"))
    if row is None:
        return Verdict(name, UNKNOWN)
    also = " or ".join(json.dumps(value) for value in neutral.ALSO.get(row.name, ()))
    taken = f"its default and {also} are" if also else "its default is"
    return Verdict(name, REFUSED, f"{row.remedy}; {taken} accepted")


def variable(name: str) -> Verdict:
    from quire import envs

    short = name.removeprefix("VLLM_")
    if short in envs.table():
        return Verdict(name, WORKS)
    if short in envs.NOT_READ:
        return Verdict(name, REFUSED, f"{envs.NOT_READ[short]} (a warning at the start)")
    return Verdict(name, UNKNOWN)


# ---- HTTP ----------------------------------------------------------------------------------------


def plain(path: str) -> str:
    return re.sub(r"{[^}]*}", "{}", path)  # what stands in the braces is nobody's business


@functools.cache
def served_routes() -> dict[str, str]:
    """Our paths, by method and plain path."""
    from quire.serving.app import ROUTES

    return {
        f"{method} {plain(path)}": path for path in ROUTES for method in ROUTES.get(path).methods
    }


def route_names(surface: dict[str, Any]) -> list[str]:
    listed = [
        f"{method.upper()} {path}"
        for path, methods in surface["routes"].items()
        for method in methods
    ]
    return list(dict.fromkeys((*listed, *surface["routes_of_other_modes"])))


def route(name: str) -> Verdict:
    from quire.serving.absent_routes import ABSENT_ROUTES

    if plain(name) in served_routes():
        return Verdict(name, WORKS)
    why = ABSENT_ROUTES.get(name.partition(" ")[2])
    return Verdict(name, UNKNOWN) if why is None else Verdict(name, REFUSED, why)


def fields_of_routes(surface: dict[str, Any]) -> Iterator[Part]:
    fields = {
        f"{method.upper()} {path}": names
        for path, methods in surface["routes"].items()
        for method, names in methods.items()
    } | surface["routes_of_other_modes"]
    for name, listed in fields.items():
        if listed and route(name).state == WORKS:
            rows = [body_field(name, field) for field in sorted(listed)]
            yield Part(f"Fields of `{name}`", rows)


def body_field(name: str, field: str) -> Verdict:
    from quire.serving.app import ROUTES
    from quire.serving.unread_fields import CHANGES_NOTHING

    kind = ROUTES.get(served_routes()[plain(name)]).body
    assert kind is not None, f"{name} has fields and no type of its body"
    refusals = unsupported()[kind.__name__]
    if field in CHANGES_NOTHING and field != "store":
        return Verdict(field, WORKS, CHANGES_NOTHING[field].why)
    if field in kind.__struct_fields__:
        return Verdict(field, WORKS, LIMITED.get(field, ""))
    if field in refusals:
        row = refusals[field]
        taken = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        return Verdict(field, REFUSED, row.why + (f"; {taken} is accepted" if taken else ""))
    return Verdict(field, UNKNOWN)


LIMITED = {"best_of": "only with the value of `n`"}
"""What to know of fields that work within a limit."""


def unsupported() -> dict[str, Any]:
    """The refused fields of each body, as its handler passes them."""
    from quire.serving.anthropic import schema as anthropic
    from quire.serving.inference import tokens
    from quire.serving.openai import schema as openai
    from quire.serving.pooling import schema as pooling
    from quire.serving.responses import schema as responses

    return {
        "ChatRequest": openai.CHAT_UNSUPPORTED,
        "BatchChatRequest": openai.BATCH_CHAT_UNSUPPORTED,
        "CompletionRequest": openai.COMPLETION_UNSUPPORTED,
        "TokenizeRequest": openai.TOKENIZE_UNSUPPORTED,
        "DetokenizeRequest": {},
        "ResponsesRequest": responses.RESPONSES_UNSUPPORTED,
        "MessagesRequest": anthropic.MESSAGES_UNSUPPORTED,
        "CountTokensRequest": anthropic.COUNT_UNSUPPORTED,
        "TokensRequest": tokens.UNSUPPORTED,
        "EmbeddingRequest": pooling.INPUT_UNSUPPORTED,
        "PoolingRequest": pooling.INPUT_UNSUPPORTED,
        "ClassificationRequest": pooling.INPUT_UNSUPPORTED,
        "ScoreRequest": pooling.PAIR_UNSUPPORTED,
        "RerankRequest": pooling.PAIR_UNSUPPORTED,
    }


# ---- Python --------------------------------------------------------------------------------------


def llm_methods(surface: dict[str, Any]) -> Iterator[Verdict]:
    from quire import LLM

    for name in surface["members"]["LLM"]:
        yield member(LLM, name)


def sampling_members(surface: dict[str, Any]) -> Iterator[Verdict]:
    from quire.params import NOT_DONE, SamplingParams

    for name in dict.fromkeys((*surface["sampling_params"], *surface["sampling_params_members"])):
        if name in NOT_DONE:
            yield Verdict(name, REFUSED, f"{NOT_DONE[name][1]}; its default is accepted")
        else:
            yield member(SamplingParams, name)


def member(kind: type, name: str) -> Verdict:
    found = getattr(kind, name, None)
    if found is None:
        return Verdict(name, UNKNOWN)
    why = getattr(found, "refused", None)
    return Verdict(name, WORKS) if why is None else Verdict(name, REFUSED, why)


# ---- the page ------------------------------------------------------------------------------------

ABOUT = """\
Each public name of vLLM {version} that people use, and what quire does with it. *Works*: it has the
meaning that it has in vLLM. *Refused*: there is an error (of a variable: a warning; of a route: a
404) with the reason that stands here; nothing is taken and then ignored. [drop-in.md](drop-in.md)
counts the whole surface, [config.md](config.md) has all flags, and
[http.md](http.md#fields-without-effect) the fields of other clients that change nothing."""


def page(surface: dict[str, Any]) -> str:
    """docs/compatibility.md."""
    tables = parts(surface)
    lines = [
        "# What becomes of each name of vLLM",
        "",
        "<!-- Written by `python tools/drop_in.py --markdown`: change the code, then run it. -->",
        "",
        *ABOUT.format(version=surface["version"]).splitlines(),
        "",
        "| Part | names | work | are refused |",
        "|---|---:|---:|---:|",
        *(
            f"| {part.title} | {len(part.rows)} | {part.count(WORKS)} | {part.count(REFUSED)} |"
            for part in tables
        ),
    ]
    for part in tables:
        lines += ["", f"## {part.title}", ""]
        working = [row for row in part.rows if row.state == WORKS and not row.why]
        if working:
            lines += ["Work: " + ", ".join(f"`{row.name}`" for row in working) + ".", ""]
        told = [row for row in part.rows if row not in working]
        if told:
            lines += ["| Name | | |", "|---|---|---|"]
            lines += [f"| `{row.name}` | {row.state} | {cell(row.why)} |" for row in told]
    return "\n".join(lines).rstrip() + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def undecided(surface: dict[str, Any]) -> list[str]:
    """Names that neither work nor are refused."""
    return [
        f"{part.title}: {row.name}"
        for part in parts(surface)
        for row in part.rows
        if row.state == UNKNOWN
    ]
