"""An argparse parser whose errors are like all of quire's: one line, with a remedy.

Beyond argparse it accepts `--max_num_seqs` for `--max-num-seqs`, `--flag.key value` for JSON flags,
a `--config file.yaml` that ranks between command line and defaults, and `--help=TOPIC`, and it
suggests the nearest flag for a misspelled one. It does not know what the flags mean.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from quire.config import neutral
from quire.config.cli import (
    FIELD_OF,
    Listed,
    MergeFields,
    MergeForeignFields,
    load_yaml,
    unknown_flag,
)
from quire.config.flag_spelling import normalised
from quire.errors import ConfigError
from quire.registry import Registry
from quire.spelling import did_you_mean

_WITH_FILES: Final[Registry[Callable[[], Parser]]] = Registry(
    "command",
    {
        "serve": "quire.cli.serve:build_parser",
        "chat": "quire.cli.chat:build_parser",
        "complete": "quire.cli.complete:build_parser",
        "inspect": "quire.cli.inspect:build_parser",
        "plan": "quire.cli.plan:build_parser",
        "calibrate": "quire.cli.calibrate:build_parser",
        "simulate": "quire.cli.simulate:build_parser",
        "tune": "quire.cli.tune:build_parser",
        "eval": "quire.cli.eval:build_parser",
        "profile": "quire.cli.profile:build_parser",
        "run-batch": "quire.cli.run_batch:build_parser",
        "lab": "quire.cli.lab:build_parser",
        "bench throughput": "quire.cli.benches.throughput:build_parser",
        "bench latency": "quire.cli.benches.latency:build_parser",
        "bench startup": "quire.cli.benches.startup:build_parser",
        "bench prefix-caching": "quire.cli.benches.repeats:prefix_caching_parser",
        "bench long-document-qa": "quire.cli.benches.repeats:long_document_qa_parser",
        "bench prioritization": "quire.cli.benches.prioritization:build_parser",
    },
)
"""Commands with `--config`."""
_HELP = "Show this and exit; also --help=listgroup, --help=GROUP, --help=FLAG."


class Parser(argparse.ArgumentParser):
    """The parser of one subcommand.

    Defaults given to `add_argument` are applied after the YAML file was read. Flags without a
    default are absent from the namespace unless they were given.
    """

    def __init__(
        self,
        command: str,
        description: str,
        *,
        epilog: str | None = None,
        intermixed: bool = False,
    ) -> None:
        """With `intermixed`, flags may stand between several arguments without a flag."""
        super().__init__(
            prog=f"quire {command}", description=description, epilog=epilog, allow_abbrev=False,
            add_help=False, formatter_class=_Formatter,
        )  # fmt: skip
        self._late: dict[str, Any] = {}
        self._read = self.parse_known_intermixed_args if intermixed else super().parse_known_args
        self.add_argument("-h", "--help", action="help", help=_HELP)

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Like argparse's, but the default is applied only after the file was read."""
        late = how.get("default", argparse.SUPPRESS)
        how["default"] = argparse.SUPPRESS
        action = super().add_argument(*names, **how)
        if late is not argparse.SUPPRESS:
            self._late[action.dest] = late
        return action

    def set_late_default(self, name: str, value: Any) -> None:
        """Use a value for what neither the command line nor the file gives. For flags of groups,
        whose own defaults argparse would apply before the file is read."""
        self._late[name] = value

    def add_config_flag(self) -> None:
        """Add `--config`."""
        self.add_argument(
            "--config", metavar="FILE", default=None,
            help="YAML file of flags (max-num-seqs: 64), for all commands: each reads its own. The "
            "command line wins over it.",
        )  # fmt: skip

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Read the command line, then the file it names, then the defaults.

        Raises:
            ConfigError: a flag is unknown, or a value cannot be read.
            SystemExit: help was asked for.
        """
        tokens = list(normalised(arguments, self._option_string_actions))
        self._answer_help(tokens)
        namespace, rest = self._read(tokens)
        if rest:
            raise ConfigError(self._unexpected(rest))
        path = getattr(namespace, "config", None)
        if path is not None:
            self._apply(path, namespace)
        for name, value in self._late.items():
            if not hasattr(namespace, name):
                setattr(namespace, name, value)
        return namespace

    def error(self, message: str) -> NoReturn:
        """Raise argparse's errors as an exception like all others, instead of exiting."""
        text = message.removeprefix("argument ")
        flag, _, rest = text.partition(": ")
        text = rest if rest.startswith(f"{flag}: ") else text  # the reader named it, too
        raise ConfigError(f"{text}; see {self.prog} --help")

    @property
    def known(self) -> list[str]:
        """Every spelling of every flag."""
        return list(self._option_string_actions)

    @property
    def suggested(self) -> list[str]:
        """The spellings to suggest: flags that have an effect. Nobody means an option that is only
        accepted."""
        names = {flag: flag[2:].removeprefix("no-").replace("-", "_") for flag in self.known}
        return [flag for flag, name in names.items() if not neutral.row(name)]

    # --------------------------------------------------------------------------- the command line

    def _unexpected(self, rest: list[str]) -> str:
        wrong = next((token for token in rest if token.startswith("-")), None)
        if wrong is None:
            return f"unexpected argument {rest[0]!r}; see {self.prog} --help"
        return unknown_flag(wrong, self.suggested, f"; see {self.prog} --help")

    # ------------------------------------------------------------------------------------ the file

    def _apply(self, path: str, namespace: argparse.Namespace) -> None:
        """Use the file's values where the command line gave none."""
        actions = {action.dest: action for action in self._actions if action.option_strings}
        for unwanted in ("help", "config"):
            actions.pop(unwanted, None)
        namespace.from_file = set()
        for said, value in load_yaml(path).items():
            key = FIELD_OF.get(said, said)
            if key in namespace.from_file:
                raise ConfigError(f"--config: {path!r}: {key} is given twice, also as {said}")
            if key not in actions and key not in _keys_of_commands():
                raise ConfigError(f"--config: {path!r}: {self._unknown_key(key)}")
            if key in actions and value is not None and not hasattr(namespace, key):
                try:
                    setattr(namespace, key, _from_yaml(actions[key], value))
                except (argparse.ArgumentTypeError, ConfigError) as error:
                    raise ConfigError(f"--config: {path!r}: {key}: {error}") from None
                namespace.from_file.add(key)

    def _unknown_key(self, key: str) -> str:
        ours = [name.removeprefix("--").replace("-", "_") for name in self.suggested]
        theirs = [name for name in _keys_of_commands() if not neutral.row(name)]
        return f"unknown key {key!r}{did_you_mean(key, ours) or did_you_mean(key, theirs)}"

    # ---------------------------------------------------------------------------------------- help

    def _answer_help(self, tokens: list[str]) -> None:
        topic = next((t.partition("=")[2] for t in tokens if t.startswith("--help=")), None)
        if topic is None:
            return
        if topic == "all":
            self.print_help()
        else:
            print(self._topic(topic))
        raise SystemExit(0)

    def _topic(self, topic: str) -> str:
        groups = {group.title or "": group for group in self._action_groups if group.description}
        if topic.lower() == "listgroup":
            rows = (f"  {title:<16}{g.description or ''}" for title, g in groups.items())
            return "\n".join(["Groups of flags, for --help=GROUP:", *rows])
        formatter = self._get_formatter()
        by_name = {title.lower(): group for title, group in groups.items()}
        flag = "--" + topic.lstrip("-").replace("_", "-")
        if topic.lower() in by_name:
            group = by_name[topic.lower()]
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        elif (row := neutral.row(flag[2:].replace("-", "_"))) and flag in self.known:
            return f"{flag}: taken as vLLM's default; other values: {row.remedy}."
        elif flag in self._option_string_actions:
            formatter.add_arguments([self._option_string_actions[flag]])
        else:
            hint = did_you_mean(topic, [*groups, *self.known])
            raise ConfigError(f"no group or flag {topic!r}{hint or '; see --help=listgroup'}")
        return formatter.format_help().rstrip()


class First(argparse.Action):
    """A single value. A file may hold several (a server's keys); the first one counts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value."""
        setattr(namespace, self.dest, values)


@functools.cache
def _keys_of_commands() -> frozenset[str]:
    """All keys that some command reads from a file, because all commands can share one file."""
    parsers = [_WITH_FILES.get(name)() for name in _WITH_FILES]
    return frozenset(
        action.dest for parser in parsers for action in parser._actions if action.option_strings
    ) - {"help", "config"}


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


def _from_yaml(action: argparse.Action, value: Any) -> Any:
    """A YAML value, read as the flag would read it.

    Raises:
        ArgumentTypeError: the value does not fit the flag.
    """
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError(f"expected true or false, got {value!r}")
        return value
    if isinstance(action, MergeFields) and isinstance(value, dict):
        return value
    if isinstance(action, Listed | MergeForeignFields):
        return value
    if action.nargs == "+":
        values = value if isinstance(value, list) else [value]
        return [_scalar(action, entry) for entry in values]
    return _scalar(action, value)


def _scalar(action: argparse.Action, value: Any) -> Any:
    if isinstance(action, First) and isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, (bool, list, dict)):
        raise argparse.ArgumentTypeError(f"expected one value, got {value!r}")
    read = action.type
    return read(str(value)) if callable(read) else str(value)
