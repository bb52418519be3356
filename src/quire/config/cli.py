"""Command-line flags, derived from the configuration sections: no flag is written by hand.

A field's name gives the flag, its annotation decides how values are read, and the prose under it is
the help. `add_*_flags` fill an argparse parser; `engine_config` and `server_config` build the
sections from the values given. Defaults do not reach the namespace, so that a YAML file can take
precedence over them.

The parser also reads vLLM's flags that have no field here (`config/neutral.py`), so that a command
line with harmless values for them still starts; they are left out of the help. This module knows
nothing of commands.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire import envs
from quire.bounds import read_integer
from quire.config import neutral
from quire.config.engine import EngineConfig
from quire.config.online_schemes import read_config
from quire.config.server import ServerConfig
from quire.errors import ConfigError

ALIASES: Final = {
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "pooler_config": ("--override-pooler-config",),
    "stream_keep_alive": ("--sse-keep-alive-interval",),
}
"""Further spellings of a field's flag."""
FIELD_OF: Final = {
    flag.removeprefix("--").replace("-", "_"): field
    for field, spellings in ALIASES.items()
    for flag in spellings
}
"""The same as keys of a file."""

RENAMED: Final = {
    "--disable-log-requests": "--no-enable-log-requests",
}
"""Flags of older vLLM versions, and what they are called now."""

# ------------------------------------------------------------------------------ reading of values


def _checked(parse: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Turn the errors of a reader into errors that argparse prints unchanged."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None

    return read


def _json_object(text: str) -> dict[str, Any]:
    import json

    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _model_len(text: str) -> int | None:
    return None if text in ("auto", "-1", *_NONE) else read_integer(text)


_NONE: Final = ("None",)
"""How `None` is written on the command line, as in vLLM: as if the flag were not given."""


def _optional(
    parse: Callable[[str], Any], none: tuple[str, ...] = (*_NONE, "")
) -> Callable[[str], Any]:
    return lambda text: None if text in none else parse(text)


def _merged(old: Any, new: Any) -> Any:
    """Two JSON objects merged at every depth; of two other values, the newer."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def json_or_text(text: str) -> Any:
    """The text read as JSON, or the text itself if it is not JSON."""
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


class MergeFields(argparse.Action):
    """A JSON object. If it is given more than once (or as `--flag.key value`), the keys are
    merged."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Merge the keys of `values` into those given before."""
        setattr(namespace, self.dest, _merged(getattr(namespace, self.dest, {}), values))


class MergeForeignFields(MergeFields):
    """The same for a flag without a field, whose text need not be an object."""


class Listed(argparse.Action):
    """Values given one by one, or all of them as one JSON list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the list."""
        only = json_or_text(values[0]) if len(values) == 1 else values
        setattr(namespace, self.dest, only if isinstance(only, list) else list(values))


class Once(argparse.Action):
    """A value that can be given in two places on the command line; if both give it, they must
    agree."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value, or refuse a second, different one."""
        earlier = getattr(namespace, self.dest, values)
        if earlier not in (values, self.default):
            raise ConfigError(f"two models are given, {earlier!r} and {values!r}: give one")
        setattr(namespace, self.dest, values)


_SIZE: Final[dict[str, Any]] = {"type": _checked(read_integer, "a whole number"), "metavar": "N"}
_FLOAT: Final[dict[str, Any]] = {"type": _checked(float, "a number"), "metavar": "X"}


def _or_none(how: dict[str, Any]) -> dict[str, Any]:
    return {**how, "type": _optional(how.get("type", str), _NONE)}


_KINDS: Final[dict[str, dict[str, Any]]] = {
    "bool": {"action": argparse.BooleanOptionalAction},
    "int": _or_none(_SIZE),
    "int | None": _or_none(_SIZE),
    "float": _or_none(_FLOAT),
    "float | None": _or_none(_FLOAT),
    "str": {"metavar": "TEXT"},
    "str | None": _or_none({"metavar": "TEXT"}),
    "list[str]": {"nargs": "+", "action": "extend", "metavar": "TEXT"},
    "dict[str, Any]": {
        "type": _checked(_json_object, "a JSON object"),
        "action": MergeFields,
        "metavar": "JSON",
    },
}
"""How argparse reads each annotation that sections use. A new annotation needs a row here."""
_SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "max_model_len": {"type": _checked(_model_len, "a whole number, or auto"), "metavar": "N"},
    "model": {"action": Once, "metavar": "MODEL"},
    "quantization_config": {
        "type": _checked(read_config, "a JSON object or @file"),
        "action": MergeFields,
        "metavar": "JSON",
    },
    **dict.fromkeys(
        (
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
            "kv_cache_dtype_skip_layers",
        ),
        {"action": Listed, "nargs": "*", "metavar": "TEXT"},
    ),
}
"""Fields that are not read like the others of their type."""


_FOREIGN: Final[dict[neutral.Unset, dict[str, Any]]] = {
    neutral.SWITCH: {"action": argparse.BooleanOptionalAction},
    neutral.INT: {"type": _optional(json_or_text)},
    neutral.FLOAT: {"type": _optional(json_or_text)},
    neutral.TEXT: {"type": _optional(str)},
    neutral.LIST: {"action": Listed, "nargs": "*"},
    neutral.JSON: {"type": _optional(json_or_text), "action": MergeForeignFields},
}
"""How argparse reads flags without a field. It refuses no value, because the table gives a better
message."""


# ------------------------------------------------------------------------------- the table of flags


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of a section as a command-line flag."""

    section: str
    """Name of the section: `model`, `cache`, …"""
    field: str
    annotation: str
    default: Any
    help: str
    """The prose under the field."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flag, then its aliases and short forms."""
        name = "--" + self.field.replace("_", "-")
        short = (short for short, field in neutral.SHORT.items() if field == self.field)
        return (name, *ALIASES.get(self.field, ()), *short)

    @property
    def help_with_default(self) -> str:
        """Prose for a terminal: without markup, and with the default unless the prose mentions
        it."""
        text = self.help.replace("`", "")
        if "Default:" in text or self.default in (None, [], {}, ""):
            return text
        return f"{text} Default: {show(self.default)}."


def show(value: Any) -> str:
    """A default as a reader would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def sections(root: type) -> dict[str, type]:
    """The sections of `EngineConfig` by name, or the server's alone."""
    if root is ServerConfig:
        return {"server": ServerConfig}
    found: dict[str, type] = {}
    for field in dataclasses.fields(root):
        kind: Any = field.default_factory
        assert isinstance(kind, type), f"{root.__name__}.{field.name} is not a section"
        found[field.name] = kind
    return found


@functools.cache
def flags(root: type) -> tuple[Flag, ...]:
    """All flags of `EngineConfig` or `ServerConfig`, in the order of the source."""
    return tuple(
        Flag(name, f.name, str(f.type), _default(f), prose(section).get(f.name, ""))
        for name, section in sections(root).items()
        for f in dataclasses.fields(section)
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def prose(section: type) -> dict[str, str]:
    """The string under each field, read from the source file; empty if there is no source file."""
    return _prose_of_module(section.__module__).get(section.__name__, {})


@functools.cache
def _prose_of_module(name: str) -> dict[str, dict[str, str]]:
    """The prose by class and field. The whole module is parsed, because finding the lines of a
    class alone is slower."""
    import ast
    import inspect

    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except OSError:
        return {}
    found: dict[str, dict[str, str]] = {}
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for statement, following in zip(section.body, section.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=field)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found.setdefault(section.name, {})[field] = " ".join(text.split())
    return found


def add_engine_flags(
    parser: argparse.ArgumentParser, *, positional: bool = True, without: Sequence[str] = ()
) -> None:
    """Add a group of flags for each engine section, and the MODEL argument if `positional`.

    `without` names fields that get no flag because the command uses the name otherwise.
    """
    if positional:
        parser.add_argument(
            "model", nargs="?", action=Once, metavar="MODEL", default=argparse.SUPPRESS,
            help="Same as --model. Put it first: flags with several values would swallow it.",
        )  # fmt: skip
    _add(parser, EngineConfig, without)
    _add_neutral(parser, neutral.engine_rows(), EngineConfig, without)


def add_server_flags(parser: argparse.ArgumentParser, only: Sequence[str] | None = None) -> None:
    """Add the flags of the HTTP server, or `only` those of these names."""
    rows = neutral.server_rows()
    if only is None:
        _add(parser, ServerConfig)
        _add_neutral(parser, rows, ServerConfig)
        return
    _add(parser, ServerConfig, [one.field for one in flags(ServerConfig) if one.field not in only])
    _add_neutral(parser, {name: rows[name] for name in only if name in rows}, ServerConfig)


def _add_neutral(
    parser: argparse.ArgumentParser,
    rows: Mapping[str, neutral.NeutralOption],
    root: type,
    without: Sequence[str] = (),
) -> None:
    """Let the parser read flags that have no field. Their values are checked when the sections are
    built."""
    fields = {flag.field for flag in flags(root)}
    for row in rows.values():
        if row.name not in fields:
            names = [name for name in row.spellings if name not in without]
            how = _FOREIGN[row.kind]
            parser.add_argument(
                *names, dest=row.name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how
            )


def _add(parser: argparse.ArgumentParser, root: type, without: Sequence[str] = ()) -> None:
    for name, section in sections(root).items():
        about = (section.__doc__ or "").split("\n")[0]
        group = parser.add_argument_group(name.capitalize(), about)
        for flag in flags(root):
            if flag.section == name and flag.field not in without:
                how = _SPECIAL.get(flag.field) or _KINDS[flag.annotation]
                group.add_argument(
                    *(name for name in flag.spellings if name not in without),
                    dest=flag.field,
                    default=argparse.SUPPRESS,
                    help=flag.help_with_default.replace("%", "%%"),
                    **how,
                )


# ----------------------------------------------------------------------- from flags to the sections


def given_options(namespace: argparse.Namespace, root: type) -> dict[str, Any]:
    """The values given for `EngineConfig` or `ServerConfig`, by field."""
    names = (flag.field for flag in flags(root))
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


def given_neutral(
    namespace: argparse.Namespace, rows: Mapping[str, neutral.NeutralOption]
) -> dict[str, Any]:
    """The values given for flags without a field, by name."""
    return {name: getattr(namespace, name) for name in rows if hasattr(namespace, name)}


def taken_line(namespace: argparse.Namespace) -> str | None:
    """One line naming the flags that were given and have no effect here, or None."""
    rows = {**neutral.engine_rows(), **neutral.server_rows()}
    return neutral.taken(given_neutral(namespace, rows))


def engine_config(namespace: argparse.Namespace) -> EngineConfig:
    """Build the engine's sections.

    Raises:
        ConfigError: a value is out of range.
    """
    given = given_options(namespace, EngineConfig)
    return EngineConfig.from_options(**given, **given_neutral(namespace, neutral.engine_rows()))


def server_config(namespace: argparse.Namespace) -> ServerConfig:
    """Build the server's section; without `--api-key`, the key comes from `QUIRE_API_KEY`,
    and without `--admin-api-key` that of admins from `QUIRE_ADMIN_API_KEY`.

    Raises:
        ConfigError: a value is out of range, or others could reach the server without a key.
    """
    for name, value in given_neutral(namespace, neutral.server_rows()).items():
        neutral.check(neutral.server_rows()[name], value)
    given = given_options(namespace, ServerConfig)
    given = {name: value for name, value in given.items() if value is not None}
    for name, key in (("api_key", envs.API_KEY), ("admin_api_key", envs.ADMIN_API_KEY)):
        if key is not None and not given.get(name):
            given[name] = [key]
    return ServerConfig(**given)


# ---------------------------------------------------------------------------- files and wrong flags


def load_yaml(path: str) -> dict[str, Any]:
    """Read the mapping of a `--config` file; `max-num-seqs` and `max_num_seqs` are the same key.

    Sections may be nested (`cache: {block_size: 32}`); they are flattened. As on the command line,
    `option.key: value` is an entry of an object.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise ConfigError(f"--config: {path!r}{line} is not YAML: {problem}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config: {path!r} must be a mapping of flags to values")
    return _flatten(data)


def _flatten(data: Mapping[Any, Any]) -> dict[str, Any]:
    groups = {*sections(EngineConfig), *sections(ServerConfig)}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if key in groups and isinstance(value, dict):
            flat.update(_flatten(value))
        else:
            name, dot, entry = str(key).replace("-", "_").partition(".")
            flat[name] = _merged(flat.get(name), {entry: value} if dot else value)
    return flat


def unknown_flag(flag: str, known: Sequence[str], otherwise: str = "") -> str:
    """One sentence on a flag that neither quire nor vLLM knows; it ends with the nearest flag, or
    `otherwise`."""
    from quire.spelling import nearest

    flag = flag.partition("=")[0]
    dashed = "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag
    near = nearest(dashed, known)
    return f"unknown flag {flag}" + (f"; did you mean {near}?" if near else otherwise)
