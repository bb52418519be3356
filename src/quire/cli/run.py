"""`quire run script.py [args]`: run a script written for vllm, unmodified.

In this process `import vllm` gives quire: the names below and nothing else. The script sees
`sys.argv`, `sys.path[0]` and `__name__ == "__main__"` as under `python script.py`, and its
exceptions look as they do there. No file is changed and no package installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, Final

from quire.cli.parser import Parser
from quire.errors import ConfigError, ModelLoadError
from quire.registry import load

VLLM_VERSION: Final = "0.32.0"
"""`vllm.__version__`: the version whose names these are. Scripts compare against it."""
_PARAMS = {name: f"quire.params:{name}" for name in ("SamplingParams", "RequestOutputKind")}
_POOLED = {
    f"{kind}{what}": f"quire.outputs:{kind}{what}"
    for kind in ("Pooling", "Embedding", "Classification", "Scoring")
    for what in ("Output", "RequestOutput")
}
_OUTPUTS = _POOLED | {
    name: f"quire.outputs:{name}" for name in ("RequestOutput", "CompletionOutput", "FinishReason")
}
MODULES: Final[dict[str, dict[str, str]]] = {
    "vllm": {
        "LLM": "quire:LLM",
        "SamplingParams": "quire.params:SamplingParams",
        "RequestOutput": "quire.outputs:RequestOutput",
        "CompletionOutput": "quire.outputs:CompletionOutput",
        "PoolingParams": "quire.params:PoolingParams",
        **_POOLED,
    },
    "vllm.config": {"PoolerConfig": "quire.config.pooling:pooler_config"},
    "vllm.pooling_params": {"PoolingParams": "quire.params:PoolingParams"},
    "vllm.sampling_params": _PARAMS,
    "vllm.outputs": _OUTPUTS,
    "vllm.logprobs": {"Logprob": "quire.outputs:Logprob"},
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": {"LLM": "quire:LLM"},
    "vllm.profiler": {"LayerwiseProfiler": "quire.profiler:LayerwiseProfiler"},
    "vllm.logger": {"init_logger": "quire.logger:get_logger"},
}
"""Modules of vllm that exist here, and where their names really live."""


def build_parser() -> Parser:
    """The parser of what comes before the script."""
    parser = Parser("run", "Run a Python script written for vllm: `import vllm` gives quire.")
    parser.add_argument(
        "--model", metavar="MODEL", default=None,
        help="Model to use instead of the one the script names, for example quire-demo.",
    )  # fmt: skip
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", default=None,
        help="Everything after it is the script's.",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the script; returns 1 if it raised."""
    ours, script, theirs = _split(arguments)
    namespace = build_parser().parse([*ours, *script])
    path = namespace.script
    if path is None:
        raise ConfigError("no script is given; see quire run --help")
    if not os.path.isfile(path):
        raise ConfigError(f"there is no script {path!r}")
    Alias(namespace.model).install()
    sys.argv = [path, *theirs]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    return _execute(path)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Our flags, the script (if any), the script's arguments."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] == "--model" else 1
    return (
        list(arguments[:index]),
        list(arguments[index : index + 1]),
        list(arguments[index + 1 :]),
    )


def _execute(path: str) -> int:
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception as error:
        trace = _from_script(error.__traceback__, path)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, ModelLoadError):
            hint = f"quire run --model quire-demo {path}"
            print(f"quire: to run it with the model that ships: {hint}", file=sys.stderr)
        return 1
    return 0


def _from_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The part of a traceback that python would show: without the frames that led to the script."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != path:
        inner = inner.tb_next
    # A syntax error has no frame of the script; python shows none either.
    return inner


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `import vllm` find the modules of `MODULES`."""

    def __init__(self, model: str | None = None) -> None:
        """`model` replaces the one that the script names."""
        self._model = model

    def install(self) -> None:
        """Come before every other finder: an installed vllm is not looked at."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Claim `vllm` and everything below.

        Raises:
            ModuleNotFoundError: vllm may have such a module, quire does not.
        """
        if fullname.partition(".")[0] != "vllm":
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"quire has no module {fullname!r}; of vllm it offers {', '.join(MODULES)}",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names; each is imported when the script asks for it."""
        rows = MODULES[module.__name__]

        def resolve(name: str) -> Any:
            if name not in rows:
                known = ", ".join(sorted(rows)) or "no names"
                raise AttributeError(
                    f"quire's {module.__name__!r} has no {name!r}; it offers {known}"
                )
            value = load(rows[name])
            if rows[name] == "quire:LLM" and self._model is not None:
                value = _with_model(value, self._model)
            setattr(module, name, value)
            return value

        module.__dict__["__getattr__"] = resolve
        module.__dict__["__all__"] = list(rows)
        if module.__name__ == "vllm":
            module.__dict__["__version__"] = VLLM_VERSION


def _with_model(base: Any, model: str) -> Any:
    """`LLM` that loads `model` whatever it is told, with that model's own tokenizer."""

    class LLM(base):  # type: ignore[misc]
        __doc__ = base.__doc__

        def __init__(self, *args: Any, **options: Any) -> None:
            for name in ("model", "tokenizer"):
                options.pop(name, None)
            super().__init__(model, *args[1:], **options)

    return LLM
