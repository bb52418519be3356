"""`--quantization` and `--quantization-config` for an unquantised checkpoint: which scheme each
kind of layer gets.

The names are quire's own (`int8`, `int4`) and vLLM's online ones (vllm-project/vllm,
`vllm/config/quantization.py`). Knows no tensors; what a scheme makes of a weight is in
`quire.quantization.online`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.config.quant_methods import quant_method
from quire.errors import ConfigError
from quire.spelling import did_you_mean

FLAG: Final = "--quantization-config"
GROUPS: Final = (32, 64, 128)
"""Columns that one scale of int4 may have."""
_REGEX: Final = "re:"


@dataclass(frozen=True, slots=True)
class OnlineScheme:
    """What a name stands for."""

    about: str
    """For people."""
    bytes_per_weight: float
    """In memory, scales included; 0: not known beforehand, at most as many as the model's type."""
    experts_only: bool = False
    """Layers that are no experts stay as they are."""
    codes_ends: bool = False
    """Embeddings and heads are kept as int8; else they stay as they are."""


SCHEMES: Final[dict[str, OnlineScheme]] = {
    "int8": OnlineScheme("int8, one scale for each row", 1.03, codes_ends=True),
    "int4": OnlineScheme("int4 in groups", 0.6, codes_ends=True),
    "w8a8_int8": OnlineScheme("int8, one scale for each row", 1.03, codes_ends=True),
    "int8_weight_only": OnlineScheme("int8, one scale for each row", 1.03, codes_ends=True),
    "fp8_per_tensor": OnlineScheme("fp8 (e4m3), one scale for each layer", 1.04),
    "fp8_per_channel": OnlineScheme("fp8 (e4m3), one scale for each row", 1.04),
    "fp8_per_block": OnlineScheme("fp8 (e4m3) in blocks of 128 x 128", 1.06),
    "mxfp8": OnlineScheme("mxfp8", 1.05),
    "mxfp4": OnlineScheme("mxfp4", 0.55),
    "nvfp4_per_token": OnlineScheme("nvfp4", 0, experts_only=True),
    "int8_per_channel_weight_only": OnlineScheme(
        "int8, one scale for each row", 0, experts_only=True
    ),
}
ALIASES: Final = {
    "fp8": "fp8_per_tensor",
    "experts_int8": "int8_per_channel_weight_only",
    # Names of weights in vLLM's `{"weight": ..., "activation": ...}`
    "fp8_per_tensor_static": "fp8_per_tensor",
    "fp8_per_channel_static": "fp8_per_channel",
    "fp8_per_block_static": "fp8_per_block",
    "int8_per_channel_static": "int8_per_channel_weight_only",
}
NAMES: Final = (*SCHEMES, "fp8", "experts_int8", "online")
"""What `--quantization` takes for an unquantised checkpoint. `online`: as the config says."""
_NEAREST: Final = {
    "awq": "int4", "gptq": "int4", "bitsandbytes": "int4", "nf4": "int4", "torchao": "int8",
    "int2": "int4", "int3": "int4", "int5": "int8", "int6": "int8",
    "lut_b_moe": "int4", "fp4": "mxfp4", "nvfp4": "mxfp4", "fp8_e5m2": "fp8_per_channel",
    "compressed-tensors": "int8", "hqq": "int4", "gguf": "int4",
}  # fmt: skip
_KEYS: Final = ("linear", "moe", "ignore", "targets", "group_size")
_OLDER: Final = {"linear_scheme_override": "linear", "moe_scheme_override": "moe"}


@dataclass(frozen=True, slots=True)
class OnlineChoice:
    """What becomes of a layer."""

    scheme: str
    """A name in `SCHEMES`."""
    group: int = GROUPS[0]
    """Columns of a scale of int4."""


Named = tuple[tuple[str, OnlineChoice | None], ...]


@dataclass(frozen=True, slots=True)
class OnlinePlan:
    """What becomes of each layer of a model. `None` instead of a choice: it stays as it is."""

    linear: OnlineChoice | None = None
    moe: OnlineChoice | None = None
    """Experts of a mixture."""
    ignore: tuple[str, ...] = ()
    """Layers that stay: names, or `re:` and a regular expression that the name begins with."""
    targets: Named = ()
    """Choices for layers by name, before `linear` and `moe`; the first that fits."""

    @property
    def codes_ends(self) -> bool:
        """See `OnlineScheme.codes_ends`."""
        return self.linear is not None and SCHEMES[self.linear.scheme].codes_ends

    @property
    def bytes_per_weight(self) -> float:
        """The most of both kinds; 0: at most as many as the model's type."""
        both = [SCHEMES[c.scheme].bytes_per_weight for c in (self.linear, self.moe) if c]
        return max(both) if both and all(both) and self.linear and self.moe else 0


def read_config(given: Any) -> dict[str, Any]:
    """The option as an object: one already, JSON, `@file`, or the path of a JSON file.

    Raises:
        ConfigError: it is none of these, or says what is not known.
    """
    if isinstance(given, str):
        given = _from_text(given)
    if not isinstance(given, dict):
        raise ConfigError(f"{FLAG} must be a JSON object or @file, got {given!r:.80}")
    _settings(None, given)
    return given


def _from_text(text: str) -> Any:
    path = None
    if text.startswith("@"):
        path = Path(text[1:])
    elif not text.lstrip().startswith("{"):
        path = Path(text)
    try:
        return json.loads(text if path is None else path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{FLAG}: cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        where = "" if path is None else f" in {str(path)!r}"
        raise ConfigError(f"{FLAG}: not JSON{where}: {error!s:.120}") from None


def online_plan(quantization: str | None, config: Mapping[str, Any]) -> OnlinePlan | None:
    """The plan of both options; `None` if neither asks for anything.

    Raises:
        ConfigError: the name is none of `NAMES`, or the config says what is not known or nothing
            that would have an effect.
    """
    if quantization is None and not config:
        return None
    base = OnlinePlan() if quantization in (None, "online") else _whole(quantization, config)
    plan = _settings(base, config)
    if plan.linear is None and plan.moe is None and not any(c for _, c in plan.targets):
        raise ConfigError(
            f"{'--quantization online' if quantization else FLAG} names no scheme: give "
            f'--quantization int8, or "linear", "moe" or "targets" in {FLAG}'
        )
    return plan


def _whole(name: str | None, config: Mapping[str, Any]) -> OnlinePlan:
    choice = _choice("--quantization", name, config)
    assert choice is not None
    only = SCHEMES[choice.scheme].experts_only
    return OnlinePlan(None if only else choice, choice)


def _settings(base: OnlinePlan | None, config: Mapping[str, Any]) -> OnlinePlan:
    """A plan with what the config says instead."""
    found = {_OLDER.get(key, key): value for key, value in config.items()}
    for key in found:
        if key not in (*_KEYS, "global_scheme"):
            known = did_you_mean(str(key), _KEYS) or f"; it has {', '.join(_KEYS)}"
            raise ConfigError(f"{FLAG} has an unknown key {key!r:.60}{known}")
    _group(found.get("group_size"), FLAG)
    base = base or OnlinePlan()
    if found.get("global_scheme") is not None and base == OnlinePlan():
        base = _whole(found["global_scheme"], found)
    linear, moe = base.linear, base.moe
    if "linear" in found:
        linear = _spec("linear", found["linear"], found)
    if "moe" in found:
        moe = _spec("moe", found["moe"], found)
    return OnlinePlan(linear, moe, _ignored(found.get("ignore")), _targets(found))


def _spec(key: str, said: Any, config: Mapping[str, Any]) -> OnlineChoice | None:
    choice = _choice(f"{FLAG}: {key}", said, config)
    if choice is not None and key == "linear" and SCHEMES[choice.scheme].experts_only:
        raise ConfigError(
            f"{FLAG}: linear: {choice.scheme} is for experts of a mixture; nearest: int8"
        )
    return choice


def _choice(where: str, said: Any, config: Mapping[str, Any]) -> OnlineChoice | None:
    """A name, or `{"weight": name, "activation": null}`, or `{"scheme": name, "group_size": n}`."""
    size = config.get("group_size")
    if isinstance(said, dict):
        unknown = set(said) - {"weight", "activation", "scheme", "group_size"}
        if unknown:
            raise ConfigError(
                f"{where} has an unknown key {min(map(str, unknown))!r:.60}; it has scheme, "
                "group_size, weight, activation"
            )
        if said.get("activation") is not None:
            raise ConfigError(
                f"{where}: activation {said['activation']!r:.60} cannot be chosen: it is part of a "
                "scheme (int8 for int8 and int4, as they are for the others). Leave it out"
            )
        size = said.get("group_size", size)
        said = said.get("scheme", said.get("weight"))
    if said is None:
        return None
    name = ALIASES.get(said, said) if isinstance(said, str) else said
    if not isinstance(name, str) or name not in SCHEMES:
        raise ConfigError(_unknown(where, said))
    return OnlineChoice(name, _group(size, where) or GROUPS[0])


def _unknown(where: str, said: Any) -> str:
    near = did_you_mean(str(said), NAMES)
    if isinstance(said, str) and quant_method(said) in _NEAREST:
        near = f"; nearest: {_NEAREST[quant_method(said)]}"
    return (
        f"{where} must be one of {', '.join(NAMES)} for a checkpoint that is not quantised, got "
        f"{said!r:.60}{near}"
    )


def _group(size: Any, where: str) -> int | None:
    if size is None:
        return None
    if type(size) is not int or size not in GROUPS:
        near = ""
        if type(size) is int:
            near = f"; nearest: {min(GROUPS, key=lambda known: abs(known - size))}"
        raise ConfigError(
            f"{where}: group_size must be {', '.join(map(str, GROUPS))}, got {size!r:.40}{near}"
        )
    return size


def _ignored(said: Any) -> tuple[str, ...]:
    if said is None:
        return ()
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise ConfigError(f"{FLAG}: ignore must be a list of names, got {said!r:.80}")
    for name in said:
        _check_pattern(name)
    return tuple(said)


def _targets(config: Mapping[str, Any]) -> Named:
    said = config.get("targets")
    if said is None:
        return ()
    if not isinstance(said, dict):
        raise ConfigError(
            f'{FLAG}: targets must be an object of schemes by name ({{"re:.*down_proj": "int8"}}), '
            f"got {said!r:.80}"
        )
    for name in said:
        _check_pattern(name)
    return tuple((n, _choice(f"{FLAG}: targets: {n}", one, config)) for n, one in said.items())


def _check_pattern(name: str) -> None:
    if not name.startswith(_REGEX):
        return
    try:
        re.compile(name.removeprefix(_REGEX))
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{FLAG}: {name!r:.80} is no regular expression: {error}") from None
