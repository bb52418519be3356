"""Checkpoints of AutoRound: tensors of GPTQ or of AWQ gemm, under entries of their own.

`packing_format` says which of both; layers within `block_name_to_quantize` are quantised, and
`extra_config` says by name, or by a regular expression, which ones otherwise. After AutoRound 0.16
(https://github.com/intel/auto-round, `inference/backend.py` and `convert_model.py`). Knows no
kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from quire.errors import ModelLoadError
from quire.quantization.awq import awq_gemm
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import entry_error, group_size, switch, whole
from quire.quantization.gptq import GptqScheme, width_of
from quire.quantization.scheme import Scheme, of_integers
from quire.weights.bundles import StoredPart

_USUAL: Final = "auto_round:auto_gptq"
_AWQ: Final = "auto_round:auto_awq"
_ZEROS_LESS_ONE: Final = {_USUAL: True, "auto_round:gptqmodel": False, "auto_round": False}
"""Of those that pack as GPTQ does: whether as its version 1."""
_PLAIN_BITS: Final = 16
_OF_EXPRESSIONS: Final = frozenset("*+?^$()[]{}|\\")


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(AutoRound(config))


class AutoRound:
    """A `CheckpointFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._packing = config.get("packing_format") or _USUAL
        if self._packing not in (_AWQ, *_ZEROS_LESS_ONE):
            raise ModelLoadError(
                f"AutoRound's packing_format {self._packing!r:.40} is not read; nearest: save it "
                f"as {_USUAL} or {_AWQ}, or with the format llm_compressor"
            )
        kind = config.get("data_type") or "int"
        if kind != "int":
            raise entry_error("data_type", "int (nearest to it: the format llm_compressor)", kind)
        self._blocks = _names(config.get("block_name_to_quantize"))
        extra = config.get("extra_config") or {}
        if not isinstance(extra, dict) or not all(isinstance(v, dict) for v in extra.values()):
            raise entry_error("extra_config", "an object of objects", extra)
        self._extra: dict[str, dict[str, Any]] = extra
        width_of(config, "")

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        own = self._own(part.name)
        settings = {**self._config, **(own or {})}
        if whole(settings, ["bits"]) >= _PLAIN_BITS:
            return None
        if own is None and not self._is_within(part.name) and "qweight" not in part.tensors:
            return None
        group = min(group_size(settings, ["group_size"], columns), columns)
        if self._packing == _AWQ:
            symmetric = switch(settings, "sym", True)
            return awq_gemm(part.name, columns, width_of(settings, part.name), group, not symmetric)
        less_one = _ZEROS_LESS_ONE[self._packing]
        return GptqScheme(width_of(settings, part.name), group, less_one, of_integers())

    def _own(self, name: str) -> dict[str, Any] | None:
        """What `extra_config` says of a layer: under its name, or else under the first expression
        that is found in it."""
        if name in self._extra:
            return self._extra[name]
        return next((said for key, said in self._extra.items() if _is_found(key, name)), None)

    def _is_within(self, name: str) -> bool:
        """Whether it stands in a block that is quantised; all do if none is named."""
        inside = (name.startswith(f"{block}.") for block in self._blocks)
        return not self._blocks or any(inside)


def _names(said: object) -> tuple[str, ...]:
    """Beginnings of names: a list, perhaps of lists, or a text with commas."""
    listed = said.split(",") if isinstance(said, str) else said or []
    if isinstance(listed, list):
        found = [n for part in listed for n in (part if isinstance(part, list) else [part])]
        if all(isinstance(name, str) for name in found):
            return tuple(name.strip() for name in found)
    raise entry_error("block_name_to_quantize", "names, in a list or with commas", said)


def _is_found(key: str, name: str) -> bool:
    if not _OF_EXPRESSIONS & set(key):
        return False
    try:
        return re.search(key, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise entry_error("extra_config", f"regular expressions ({error})", key) from None
