"""What a request calls the fields that the engine's errors name.

All APIs have the engine constrain an output by `structured_outputs`, so that is what the engine's
errors name, when a request is submitted and while it runs. A caller who sent a `response_format`, a
tool or an `output_config` is told of that instead; and one who sent `messages` or an `input` is
told of these where the engine says `prompt`. Knows no API.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from quire.errors import InvalidRequest

ENGINE: Final = "structured_outputs"
"""The engine's field."""
_PATH: Final = re.compile(rf"{ENGINE}(?:\.\w+(?:\[\d+\])*)*")
_TAG: Final = re.compile(r"\.tags\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of one request."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The caller's name of each field. A field without a name has that of the one above it."""
    tags: Sequence[str] = ()
    """The caller's names of the tags of a structural tag, in order."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The caller's names of other fields of the engine."""

    @contextmanager
    def told(self) -> Iterator[None]:
        """Errors within are told by the caller's names."""
        try:
            yield
        except InvalidRequest as error:
            told = str(error.param)
            if self.names and told.startswith(ENGINE):
                error.param = self._name(told)
                error.message = _PATH.sub(lambda at: self._name(at[0]), error.message, count=1)
            elif (own := self.others.get(told)) is not None:
                error.param = own
                error.message = re.sub(rf"^{re.escape(told)}\b", own, error.message)
            raise

    def beside(self, others: Mapping[str, str]) -> FieldNames:
        """These names, and the caller's of other fields of the engine."""
        return replace(self, others=others)

    def _name(self, path: str) -> str:
        found = _TAG.search(path)
        if found and int(found[1]) < len(self.tags):
            return self.tags[int(found[1])]
        if path.startswith(f"{ENGINE}.structural_tag") and len(self.tags) == 1:
            return self.tags[0]
        while path not in self.names and "." in path:
            path = path.rpartition(".")[0]
        return self.names.get(path, path)


AS_THE_ENGINE: Final = FieldNames()
"""The caller gave `structured_outputs` itself, or nothing."""
