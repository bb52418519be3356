"""All environment variables, in one typed table.

`envs.LOGGING_LEVEL` reads `QUIRE_LOGGING_LEVEL`, else `VLLM_LOGGING_LEVEL`, else the default, at
the moment of access. An empty value counts as unset. A bad value raises `ConfigError`, which
names the variable, the value and what is allowed. `ensure_valid()` reads them all, so that a bad
one is an error at start and not an hour later.

The annotations below are the table: mypy takes the type from them, `table()` the rest. (That is
why this module does not postpone the evaluation of annotations.) Nothing here knows what the
variables are for.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from quire.errors import ConfigError

PREFIXES = ("QUIRE_", "VLLM_")
"""Spellings of each variable; the first that is set wins."""
_SWITCH = {"1": True, "true": True, "on": True, "yes": True}
_SWITCH |= {"0": False, "false": False, "off": False, "no": False}
_STREAMS = {"stderr": "stderr", "stdout": "stdout"}
_STREAMS |= {f"ext://sys.{name}": name for name in ("stderr", "stdout")}


NOT_READ = {
    "ALLOW_LONG_MAX_MODEL_LEN": "--max-model-len is limited to what the model was made for",
    "ALLOW_RUNTIME_LORA_UPDATING": "give a model folder with the adapter merged into it",
    "ENABLE_COHERE_API": "Cohere's API is not served; use /v1/chat/completions",
    "ENABLE_RESPONSES_API_STORE": "responses are stored; --max-stored-responses says how many",
    "LORA_RESOLVER_CACHE_DIR": "give a model folder with the adapter merged into it",
    "LORA_RESOLVER_HF_REPO_LIST": "give a model folder with the adapter merged into it",
    "MAX_BAD_WORDS_TOTAL_TOKENS": "the limit is fixed; docs/http.md has it",
    "MAX_NUM_BAD_WORDS": "the limit is fixed; docs/http.md has it",
    "MAX_STOP_STRINGS": "the limit is fixed; docs/http.md has it",
    "PP_LAYER_PARTITION": "the model runs in one process",
    "REGEX_COMPILATION_TIMEOUT_S": "a server gives each grammar 2 seconds to compile",
    "SERVER_DEV_MODE": "routes for operators need a key of the role admin",
    "USE_FASTOKENS": "there is one tokenizer",
    "USE_MODELSCOPE": "give a model folder",
    "XGRAMMAR_CACHE_MB": "llguidance follows all grammars",
}
"""vLLM's variables that change nothing here, and what to do instead."""


class _Bad(Exception):
    """A value is not allowed; the message says what is."""


@dataclass(frozen=True)
class Var:
    """One row: how the text is read, and the default."""

    parse: Callable[[str], Any]
    default: Any
    help: str


def _one_of(table: dict[str, Any]) -> Callable[[str], Any]:
    lower = {key.lower(): value for key, value in table.items()}

    def parse(text: str) -> Any:
        if text.lower() not in lower:
            raise _Bad("one of " + ", ".join(table))
        return lower[text.lower()]

    return parse


def _file(text: str) -> str:
    if not os.path.isfile(text):
        raise _Bad("the path of a file")
    return os.path.abspath(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise _Bad("names separated by commas, or none")
    return () if names == ("none",) else names


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -1e15 < value < 1e15:
        raise _Bad("a number")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= (value := int(text[:20])) < 2**31:
        raise _Bad("a whole number from 1 to 2147483647")
    return value


def _interval(text: str) -> float:
    """Zero or less falls back to the default, as in vLLM."""
    value = _number(text)
    return value if value > 0 else 10.0


def _interval_or_off(text: str) -> float | None:
    """Zero or less means off, as in vLLM."""
    value = _number(text)
    return value if value > 0 else None


def _gib(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise _Bad("a number of GiB of at least 0 (0: the default)")
    return value


def _cores(text: str) -> str | tuple[int, ...]:
    """`auto`, `nobind`, or a list such as `0-3,6`."""
    if text in ("auto", "nobind"):
        return text
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first,)
        if not all(text.isdecimal() and len(text) < 6 for text in numbers):
            raise _Bad("auto, nobind or a list of cores like 0-3,6")
        cores += range(int(first), int(last or first) + 1)
    if not cores or len(set(cores)) != len(cores):
        raise _Bad("a list of different cores like 0-3,6")
    return tuple(cores)


def _one_engine(text: str) -> bool:
    if not _one_of(_SWITCH)(text):
        raise _Bad("1: quire has one engine, the V1 one")
    return True


LOGGING_LEVEL: Annotated[
    str,
    Var(
        _one_of({name: name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}),
        "INFO",
        "Level of the `quire` logger: `DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`. With "
        "`DEBUG`, errors of the command line show their traceback.",
    ),
]
LOGGING_STREAM: Annotated[
    str, Var(_one_of(_STREAMS), "stderr", "Where log lines go: `stderr` or `stdout`.")
]
LOGGING_COLOR: Annotated[
    str,
    Var(
        _one_of({"auto": "auto", "1": "1", "0": "0"}),
        "auto",
        "Colour of the level in log lines: `auto` (on a terminal, unless `NO_COLOR` is set), "
        "`1`, `0`.",
    ),
]
LOGGING_FORMAT: Annotated[
    str,
    Var(
        _one_of({"text": "text", "json": "json"}),
        "text",
        "`text`: lines for people; `json`: one JSON object per line, with `time`, `level`, "
        "`logger`, `file`, `line`, `process`, `pid`, `message` and, if there is one, `exception`.",
    ),
]
LOGGING_PREFIX: Annotated[
    str, Var(str, "", "Text before every log line, for example the name of a replica.")
]
CONFIGURE_LOGGING: Annotated[
    bool,
    Var(
        _one_of(_SWITCH),
        True,
        ("`0` leaves the handlers and the level of the `quire` logger as they are."),
    ),
]
LOGGING_CONFIG_PATH: Annotated[
    str | None,
    Var(str, None, "JSON file for `logging.config.dictConfig`, instead of quire's own handler."),
]
LOG_STATS_INTERVAL: Annotated[
    float,
    Var(_interval, 10.0, "Seconds between two stat lines; 0 or less means 10."),
]
LOG_BATCHSIZE_INTERVAL: Annotated[
    float | None,
    Var(
        _interval_or_off,
        None,
        "Seconds between two lines that list batch sizes (tokens of a step) with their number and "
        "median forward time; 0 or less: no such lines.",
    ),
]
TRACE_FUNCTION: Annotated[
    bool,
    Var(
        _one_of(_SWITCH),
        False,
        "`1` writes every call of one of quire's functions in the engine's process to a file per "
        "thread in the folder for temporary files. Very slow.",
    ),
]
CPU_KVCACHE_SPACE: Annotated[
    float,
    Var(
        _gib,
        0.0,
        "GiB for the KV cache on a CPU, unless `--kv-cache-memory-bytes` is given; 0 means the "
        "default.",
    ),
]
MAX_N_SEQUENCES: Annotated[
    int,
    Var(
        _count,
        16384,
        "Largest `n`: completions of one prompt. `--max-n-sequences` limits all completions of one "
        "HTTP request.",
    ),
]
API_KEY: Annotated[
    str | None,
    Var(str, None, "Key that clients must send, unless `--api-key` gives one; `chat` and "
                   "`complete` send it."),
]  # fmt: skip
ADMIN_API_KEY: Annotated[
    str | None,
    Var(
        str,
        None,
        "Key of the server's operators, unless `--admin-api-key` gives one; commands that ask a "
        "running server what only they may send it.",
    ),
]
KERNELS: Annotated[
    str,
    Var(
        _one_of({"auto": "auto", "native": "native", "reference": "reference"}),
        "auto",
        "`native`: the compiled kernels; `reference`: plain torch, which defines them and is much "
        "slower; `auto`: native where they are built, else reference.",
    ),
]
KERNELS_FILE: Annotated[
    str | None,
    Var(
        _file,
        None,
        "File with compiled kernels to load instead of the installed ones, for example a build "
        "with sanitizers. Default: the installed ones.",
    ),
]
CPU_ISA: Annotated[
    str,
    Var(
        _one_of(
            {
                name: name
                for name in (
                    "auto",
                    "amx",
                    "avx512_bf16",
                    "avx512_vnni",
                    "avx512",
                    "avx_vnni",
                    "avx2",
                    "portable",
                )
            }
        ),
        "auto",
        "Instruction set of the native kernels: `auto` (the best here), `amx`, `avx512_bf16`, "
        "`avx512_vnni`, `avx512`, `avx_vnni`, `avx2` or `portable`.",
    ),
]
CPU_OMP_THREADS_BIND: Annotated[
    str | tuple[int, ...],
    Var(
        _cores,
        "auto",
        "Cores that kernel threads are bound to: a list like `0-3,6` (one thread each), `auto` "
        "(all cores of this process) or `nobind`.",
    ),
]
DEBUG_KV_CACHE: Annotated[
    bool,
    Var(
        _one_of(_SWITCH),
        False,
        "`1` finds kernels that read or write out of bounds: KV blocks are filled with NaN before "
        "a request gets them, and the cache lies between pages that may not be accessed.",
    ),
]
LOG_MODEL_INSPECTION: Annotated[
    bool,
    Var(
        _one_of(_SWITCH),
        False,
        "`1` logs the tree of the model, with shapes and the kernels chosen, when it is loaded.",
    ),
]
CPU_INT4_W4A8: Annotated[
    bool,
    Var(
        _one_of(_SWITCH),
        True,
        "Layers of checkpoints with int2 to int8 weights that say nothing of activations (GPTQ, "
        "AWQ, AutoRound, MLX, GGUF, weight-only compressed-tensors) multiply int8 activations, "
        "rounded for each token; `0`: the activations as they are, which is more exact and slower.",
    ),
]
ATTENTION_BACKEND: Annotated[
    str | None,
    Var(str, None, "Attention backend, unless `--attention-backend` names one."),
]
PLUGINS: Annotated[
    tuple[str, ...] | None,
    Var(
        _names,
        None,
        "The only plugins that count, separated by commas: names of entry points "
        "(`policy.lifo`) or of distributions; `none`: no plugins. Unset: all that are installed, "
        "each when it is asked for.",
    ),
]
TORCH_COMPILE_CACHE_DIR: Annotated[
    str | None,
    Var(
        str,
        None,
        "Folder in which torch keeps what it compiles, in the engine's process. quire compiles "
        "nothing on a CPU; this is for code of your own, such as a scheduling policy.",
    ),
]
TORCH_PROFILER_DIR: Annotated[
    str | None,
    Var(str, None, "Folder for the traces of `start_profile()`; profiling is off without it."),
]
NVTX_LOGGING: Annotated[
    bool,
    Var(
        _one_of(_SWITCH),
        False,
        "`1` names operations and phases of steps as NVTX ranges, for Nsight Systems; CUDA only.",
    ),
]
USE_V1: Annotated[
    bool,
    Var(_one_engine, True, "`1` is accepted, `0` is refused: there is one engine."),
]


def table() -> dict[str, Var]:
    """The rows by name, without prefix, in the order of the documentation."""
    rows = sys.modules[__name__].__annotations__
    return {name: get_args(row)[1] for name, row in rows.items() if name.isupper()}


def source(name: str) -> str | None:
    """The variable that decides `name` (`QUIRE_X` or `VLLM_X`), or `None` if neither is set."""
    for prefix in PREFIXES:
        if os.environ.get(prefix + name):
            return prefix + name
    return None


def get(name: str) -> Any:
    """The value of a variable, read now.

    Raises:
        ConfigError: the value is not allowed.
        KeyError: there is no such row.
    """
    row = table()[name]
    variable = source(name)
    if variable is None:
        return row.default
    text = os.environ[variable].strip()
    try:
        return row.parse(text)
    except _Bad as allowed:
        raise ConfigError(f"{variable} must be {allowed}, got {text!r}", param=variable) from None


def __getattr__(name: str) -> Any:
    if name.isupper() and name in table():
        return get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def ensure_valid() -> None:
    """Read every variable.

    Raises:
        ConfigError: the first bad value.
    """
    for name in table():
        get(name)


def without_effect() -> list[str]:
    """A sentence for each `QUIRE_…` or `VLLM_…` variable that is set but read by no row.

    These are warnings, never errors, because Kubernetes sets `QUIRE_PORT` and the like for a
    service called quire. Such variables are left out.
    """
    from quire.spelling import did_you_mean

    known = {prefix + name for prefix in PREFIXES for name in table()}

    def told(name: str) -> str:
        if why := NOT_READ.get(name.removeprefix("VLLM_")):
            return f": {why}."
        return did_you_mean(name, known) or "."

    return [
        f"{name} is set, but quire reads no such variable{told(name)}"
        for name in sorted(os.environ)
        if name.startswith(PREFIXES) and name not in known and not _from_kubernetes(name)
    ]


def _from_kubernetes(name: str) -> bool:
    rest = name.split("_", 1)[1]
    return rest in ("PORT", "HOST") or rest.startswith(("SERVICE_", "PORT_"))
