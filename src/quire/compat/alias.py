"""Makes `import vllm` find the modules of the table in `modules.py`, in this process."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, Final

from quire.compat.modules import ELSEWHERE, MODULES
from quire.registry import load
from quire.spelling import did_you_mean

_TAKES_MODEL: Final = (
    "quire:LLM",
    "quire.compat.engine_args:EngineArgs",
    "quire.compat.engine_args:AsyncEngineArgs",
)
"""The classes to which `quire run --model` gives another model."""


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and fills the modules listed in `MODULES`."""

    def __init__(self, model: str | None = None) -> None:
        """`model` replaces the one that the script names."""
        self._model = model
        self._replaced: dict[str, Any] = {}

    def install(self) -> None:
        """Register before every other finder, so that an installed vllm is ignored."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Claim `vllm` and everything below.

        Raises:
            ModuleNotFoundError: quire has no such module, even if vllm does.
        """
        if fullname.partition(".")[0] != "vllm":
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(_not_there(fullname), name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names; each is imported when the script first uses it."""
        rows = MODULES[module.__name__]

        def resolve(name: str) -> Any:
            if module.__name__ == "vllm.envs":
                value = _variable(name)
            elif name not in rows:
                raise AttributeError(_no_name(module.__name__, name, list(rows)))
            else:
                value = self._value(rows[name])
            if module.__name__ != "vllm.envs":
                setattr(module, name, value)
            return value

        module.__dict__["__getattr__"] = resolve
        module.__dict__["__dir__"] = lambda: sorted(rows)
        module.__dict__["__all__"] = [name for name in rows if not name.startswith("_")]
        if module.__name__ == "vllm":
            module.__dict__["__version__"] = self._value(rows["__version__"])

    def _value(self, target: str) -> Any:
        if self._model is None or target not in _TAKES_MODEL:
            return load(target)
        if target not in self._replaced:
            self._replaced[target] = with_model(load(target), self._model)
        return self._replaced[target]


def install_once() -> None:
    """Install an `Alias`, unless this process has one."""
    if not any(isinstance(finder, Alias) for finder in sys.meta_path):
        Alias().install()


def _not_there(module: str) -> str:
    """Why a module does not exist, and which ones do."""
    why = next((ELSEWHERE[p] for p in sorted(ELSEWHERE, reverse=True) if _below(module, p)), None)
    reason = f": {why}" if why else did_you_mean(module, MODULES)
    return f"quire has no module {module!r}{reason}; of vllm it offers {', '.join(MODULES)}"


def _below(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _no_name(module: str, name: str, rows: list[str]) -> str:
    known = ", ".join(sorted(rows)) or "no names"
    hint = did_you_mean(name, rows)
    return f"quire's {module!r} has no {name!r}{hint}; it offers {known}"


def _variable(name: str) -> Any:
    """A variable of `vllm.envs`, as quire reads it."""
    from quire import envs

    bare = name.removeprefix("VLLM_")
    if bare == name or bare not in envs.table():
        raise AttributeError(f"quire's 'vllm.envs' has no {name!r}; docs/config.md lists them")
    return getattr(envs, bare)


def with_model(base: Any, model: str) -> Any:
    """`LLM` or `EngineArgs` that always uses `model` and its own tokenizer, whatever it is
    given."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in ("model", "tokenizer"):
            options.pop(name, None)
        base.__init__(self, model, *args[1:], **options)

    namespace = {"__init__": __init__, "__doc__": base.__doc__, "__module__": base.__module__}
    return type(base.__name__, (base,), namespace)
