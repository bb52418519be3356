"""What `quire bench engine` can be asked for. Loads no engine, so that `--help` is quick."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Case:
    """`prompts` x `inputs` tokens in, `outputs` tokens out of each."""

    prompts: int
    inputs: int
    outputs: int
    repeats: int = 1
    """How often in each round: what takes half a second says little if it is done once."""

    @property
    def tokens(self) -> int:
        """What the rate counts: tokens out, or tokens in if there is but one out."""
        return self.prompts * (self.inputs if self.outputs == 1 else self.outputs)

    @property
    def context(self) -> int:
        """Tokens of each sequence at its end."""
        return self.inputs + self.outputs

    @property
    def held(self) -> int:
        """Tokens of all sequences together at their end."""
        return self.prompts * self.context


CASES: Final = {
    "decode_1x16_65": Case(1, 16, 65, repeats=2),
    "8x128_128": Case(8, 128, 128),
    "32x128_128": Case(32, 128, 128),
    "prefill_1x512": Case(1, 512, 1, repeats=4),
    "long_4x4096_64": Case(4, 4096, 64),
}


@dataclass(frozen=True, slots=True)
class FormatNames:
    """How weights are kept, in each engine's words; `None`: it has no such format."""

    quire: str | None
    """`quantization`; `None`: as they are."""
    vllm: int | None
    """Bits of the copy that is made for it: 16, as they are."""
    openvino: str | None
    llama: str | None
    group: int | None = None
    """Weights that share one of quire's scales, if not as many as the scheme has by itself."""


FORMATS: Final = {
    "bf16": FormatNames(None, 16, "fp16", "bf16"),
    "int8": FormatNames("int8", 8, "int8", "q8_0"),
    "int4": FormatNames("int4", 4, "int4", "q4_0"),
    "int4_128": FormatNames("int4", None, None, None, group=128),
    "fp8": FormatNames("fp8", None, None, None),
    "mxfp4": FormatNames("mxfp4", None, None, None),
}
"""Each engine's own kind of it, made of the same bf16 weights, with a head of 8 bits."""


def own_options(form: str) -> dict[str, Any]:
    """What quire's `LLM` gets for a format: nothing, or the scheme and the head."""
    scheme, group = FORMATS[form].quire, FORMATS[form].group
    if scheme is None:
        return {}
    config: dict[str, Any] = {"targets": {"lm_head": "int8"}}
    if group is not None:
        config["group_size"] = group
    return {"quantization": scheme, "quantization_config": config}


SETTINGS: Final = ("all", "first")
PEERS: Final = {"vllm": "vLLM", "openvino": "OpenVINO GenAI", "llama": "llama.cpp"}


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    """What to measure.

    Raises:
        ConfigError: a value is out of range, a case unknown, or a peer's Python not there.
    """

    cases: str | None = None
    """Names, separated by commas; those that the model's context holds if not given."""
    formats: str = "bf16"
    """Of `FORMATS`, separated by commas."""
    settings: str = "all"
    """`all` of a peer that are worth a try, or the `first` alone, which takes less memory."""
    rounds: int = 3
    pause: float = 2.0
    """Seconds between two runs: threads of the engine that ran stop spinning."""
    peer_vllm: str | None = None
    peer_openvino: str | None = None
    peer_llama: str | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= 1000:
            raise ConfigError(f"--rounds must be 1 to 1000, got {self.rounds}")
        if not 0 <= self.pause <= 60:
            raise ConfigError(f"--pause must be 0 to 60, got {self.pause:g}")
        unknown = [name for name in (self.cases or "").split(",") if name and name not in CASES]
        if unknown or self.cases == "":
            named = unknown[0] if unknown else ""
            raise ConfigError(f"--cases: there is no {named!r}; cases: {', '.join(CASES)}")
        if self.settings not in SETTINGS:
            raise ConfigError(
                f"--settings must be one of {', '.join(SETTINGS)}, got {self.settings!r}"
            )
        if unknown := [name for name in self.kept if name not in FORMATS]:
            raise ConfigError(
                f"--formats: there is no {unknown[0]!r}; formats: {', '.join(FORMATS)}"
            )
        for peer, python in self.peers.items():
            if shutil.which(os.path.expanduser(python)) is None:
                raise ConfigError(f"--peer-{peer}: {python!r} is no program that can be run")

    @property
    def peers(self) -> dict[str, str]:
        """Pythons of the peers to compare with, by name."""
        given = {"vllm": self.peer_vllm, "openvino": self.peer_openvino, "llama": self.peer_llama}
        return {name: os.path.expanduser(python) for name, python in given.items() if python}

    @property
    def kept(self) -> tuple[str, ...]:
        """The formats, each once."""
        return tuple(dict.fromkeys(self.formats.split(",")))

    def chosen(self, longest: int) -> dict[str, Case]:
        """The cases to run on a model whose context is `longest` tokens.

        Raises:
            ConfigError: one that was asked for is longer, or none fits.
        """
        if self.cases is None:
            fitting = {name: case for name, case in CASES.items() if case.context <= longest}
            if not fitting:
                least = min(case.context for case in CASES.values())
                raise ConfigError(f"all cases need a context of {least}, the model has {longest}")
            return fitting
        asked = {name: CASES[name] for name in self.cases.split(",") if name}
        for name, case in asked.items():
            if case.context > longest:
                raise ConfigError(
                    f"--cases: {name} needs a context of {case.context}, the model has {longest}"
                )
        return asked
