"""`FlexibleArgumentParser`: argparse as scripts for vLLM use it.

`--max_tokens` finds `--max-tokens`, `--compilation-config.mode 0` is JSON, and `--config file.yaml`
holds flags; the command line takes precedence over it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from quire.config.cli import load_yaml
from quire.config.flag_spelling import normalised
from quire.errors import ConfigError


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that accepts other spellings, and files."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Like argparse's. A file that cannot be read ends the program with a message."""
        given = list(sys.argv[1:] if args is None else args)
        try:
            tokens = [*self._of_file(given), *normalised(given, self._option_string_actions)]
        except ConfigError as error:
            self.error(error.message)
        return super().parse_known_args(tokens, namespace)

    def _of_file(self, given: list[str]) -> Iterator[str]:
        """The flags in the file named by `--config`, which is removed from `given`."""
        at = next((i for i, t in enumerate(given) if t.partition("=")[0] == "--config"), None)
        if at is None or "--config" in self._option_string_actions:
            return
        _, equals, path = given.pop(at).partition("=")
        if not equals:
            if at == len(given):
                raise ConfigError("--config: expected a file")
            path = given.pop(at)
        for name, value in load_yaml(path).items():
            yield from _as_tokens("--" + name.replace("_", "-"), value)


def _as_tokens(flag: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
