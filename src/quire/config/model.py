"""Which model runs, where its files are, and what they are read as.

Knows nothing of memory or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quire.bounds import check_section
from quire.checkpoint.hub_cache import is_repo_id, snapshot
from quire.config.online_schemes import OnlinePlan, online_plan, read_config
from quire.config.quant_methods import method_of, quant_method
from quire.config.shape import ModelShape
from quire.config.structured_options import check_structured
from quire.errors import ConfigError
from quire.registry import Registry

EMBEDDED_MODEL = "quire-demo"
"""Name of the model that ships with the package."""
EMBEDDED_FOLDER = Path(__file__).resolve().parent.parent / "assets"

DTYPES = ("auto", "float32", "bfloat16", "float16")
OTHER_DTYPES = {"half": "float16", "float": "float32"}
FORMATS: Final[Registry[Any]] = Registry(
    "load format",
    {
        "safetensors": "quire.weights.files:SafetensorsCheckpoint",
        "gguf": "quire.weights.gguf:GGUFCheckpoint",
        "pt": "quire.weights.torch_files:TorchCheckpoint",
    },
    plugins="load_format",
)
"""Formats of weights that have files, and what opens each: `opener(folder)` gives a
`quire.weights.formats.Checkpoint`. `auto` chooses among the first two; `dummy` has no files."""
DEVICES: Final[Registry[Any]] = Registry(
    "device",
    {"cpu": "quire.worker.device:CpuDevice", "cuda": "quire.worker.device:CudaDevice"},
    plugins="device",
)
"""Where a model can run, and what tells of it: each row makes a `quire.worker.device.Device`."""
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
TASKS = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "none"),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "score": ("pooling", "auto"),
}
"""Values of the older option `--task`, as runner and conversion."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and its tokenizer."""

    model: str = EMBEDDED_MODEL
    """Folder of a model in Hugging Face format, a GGUF file, a name on the Hugging Face hub
    (`org/name`), or `quire-demo`, the model that ships with quire."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, if it is not the model's."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: main."""
    tokenizer_revision: str | None = None
    """The same for a tokenizer that is not the model's."""
    download_dir: str | None = None
    """Where models from the hub are kept. Default: the hub's own cache (`HF_HOME`)."""
    served_model_name: list[str] = field(default_factory=list)
    """Names under which the API knows the model; the first is the one in replies. Default: the
    model as given."""
    dtype: str = "auto"
    """Type of weights and activations: `auto` (the checkpoint's), `float32`, `bfloat16`,
    `float16`."""
    quantization: str | None = None
    """How weights are kept: `int8` or `int4` makes codes of an unquantised checkpoint while it is
    loaded; so do `w8a8_int8`, `int8_weight_only`, `fp8_per_tensor`, `fp8_per_channel`,
    `fp8_per_block`, `mxfp8`, `mxfp4`, and for experts `int8_per_channel_weight_only` and
    `nvfp4_per_token`; `online` leaves all to `--quantization-config` (see docs/quantisation.md).
    The method that a quantised checkpoint names itself may be repeated here. Default: as the
    checkpoint has them."""
    quantization_config: dict[str, Any] = field(default_factory=dict)
    """JSON object, or `@file`, that says which scheme of `--quantization` layers get: `linear`,
    `moe` (experts), `targets` (an object of schemes by layer name, or `re:` and a regular
    expression), `ignore` (a list of such names), `group_size` (of int4: 32, 64 or 128). For
    checkpoints that are not quantised."""
    device: str = "auto"
    """Where the model runs: `auto` (a GPU if there is one), `cpu`, `cuda`."""
    runner: str = "auto"
    """What the model is run for: `auto` (what its files say), `generate` (text) or `pooling`
    (embeddings, classes, scores)."""
    convert: str = "auto"
    """What to make of the model with `--runner pooling`: `auto`, `none` (use it as it is), `embed`
    (return hidden states, without the model's own head), `classify`."""
    task: str | None = None
    """Older spelling of `--runner` and `--convert` in one: `auto`, `generate`, `embed`, `classify`
    or `score`."""
    pooler_config: dict[str, Any] = field(default_factory=dict)
    """JSON object that takes precedence over the pooling files of the model: `pooling_type` (`CLS`,
    `MEAN`, `LAST`, `MAX`), `use_activation` (scale embeddings to length 1, apply the softmax or
    sigmoid), `dimensions`, `is_matryoshka`, `matryoshka_dimensions`."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens. Default: what the model was made for."""
    seed: int = 0
    """Seed from which requests without a seed of their own get one."""
    max_logprobs: int = 20
    """Largest number of log-probabilities a request may ask for at each position; -1 means no
    limit."""
    generation_config: str = "auto"
    """Where default sampling parameters come from: `auto` (the model folder), `vllm` (neutral
    defaults) or a folder."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """JSON object of default sampling parameters that take precedence over `generation_config`."""
    chat_template: str | None = None
    """File with a Jinja chat template, or the template itself. Default: the tokenizer's."""
    load_format: str = "auto"
    """Format of the weights: `auto` (safetensors, else GGUF), `safetensors`, `gguf`, `pt` (pickled
    `*.bin` files, read without running code in them), `dummy` (random values), or the name of a
    plugin's."""
    verify: bool = False
    """Compare every file of the model with its checksum (from `SHA256SUMS` or the hub's cache)
    before loading it; see `quire verify`."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """JSON object of entries that take precedence over the model's `config.json`."""
    attention_backend: str | None = None
    """Attention backend: `auto` (the first that serves the model), `FLASH_ATTN`, on a CPU also
    `CPU_ATTN`, or `paged`; the other names stand for it. `QUIRE_KERNELS` chooses the kernels
    that compute it. Default: `QUIRE_ATTENTION_BACKEND`, else `auto`."""
    logits_processors: list[str] = field(default_factory=list)
    """Classes that change logits before a token is chosen, as `module:Class`, in this order; see
    docs/logits-processors.md. Their code runs in the engine core."""
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """JSON object of what holds for the forms of all requests: `disable_any_whitespace` (JSON
    without whitespace between its tokens), `disable_additional_properties` (objects have only the
    properties that their schema names), `enable_in_reasoning` (as `--enable-in-reasoning`). The
    `backend` is always llguidance."""
    enforce_eager: bool = False
    """Never compile or capture graphs. quire's CPU path never does."""

    def __post_init__(self) -> None:
        # `LLM(dtype=torch.float16)` and `--dtype half` are common: they have one spelling here.
        name = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", OTHER_DTYPES.get(name, name))
        given: Any = self.logits_processors
        if isinstance(given, (list, tuple)):  # `LLM` takes classes, too
            object.__setattr__(self, "logits_processors", [_place_of(one) for one in given])
        asked: Any = self.quantization_config
        object.__setattr__(self, "quantization_config", read_config(asked or {}))
        check_section(self)
        check_structured(self.structured_outputs_config)
        _one_of("dtype", self.dtype, DTYPES)
        if self.device != "auto" and self.device not in DEVICES:
            _one_of("device", self.device, ("auto", *DEVICES.names()))
        _one_of("runner", self.runner, RUNNERS)
        _one_of("convert", self.convert, CONVERSIONS)
        if self.task is not None:
            _one_of("task", self.task, tuple(TASKS))
        if self.load_format not in ("auto", "dummy") and self.load_format not in FORMATS:
            _one_of("load-format", self.load_format, ("auto", *FORMATS.names(), "dummy"))

    @property
    def folder(self) -> Path:
        """Folder of the weights; an embedded model is found by its name."""
        return self._local(self.model, self.revision)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer."""
        if self.tokenizer is None:
            return self.folder
        return self._local(self.tokenizer, self.tokenizer_revision)

    def is_remote(self, name: str) -> bool:
        """Whether a name means a model on the hub: it is spelled like one, and there is no such
        folder."""
        return is_repo_id(name) and not Path(name).exists()

    def _local(self, name: str, revision: str | None) -> Path:
        """Folder that a name means: an embedded model's, one in the hub's cache, or the path
        itself."""
        embedded = EMBEDDED_FOLDER / name
        if "/" not in name and not Path(name).exists() and embedded.is_dir():
            return embedded
        if not self.is_remote(name):
            return Path(name)
        return snapshot(name, revision, self.download_dir) or Path(name)

    def read_shape(self) -> ModelShape:
        """The model's sizes: its `config.json` with `hf_overrides` over it.

        Raises:
            ModelLoadError: the folder or file is missing, or a size is missing or senseless.
        """
        return ModelShape.from_folder(self.folder, self.hf_overrides)

    def weight_bytes(self, shape: ModelShape, count: int, itemsize: int) -> int:
        """About how much memory `count` weights take, `itemsize` bytes each as they are."""
        plan = self.online_plan(shape)
        share = plan.bytes_per_weight if plan else 0
        if not share:
            return count * itemsize
        ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
        of_end = 1.03 if plan and plan.codes_ends else itemsize
        return int(of_end * ends + share * max(0, count - ends))

    def online_plan(self, shape: ModelShape) -> OnlinePlan | None:
        """What becomes of the layers of an unquantised checkpoint; `None`: they stay, or the
        checkpoint is quantised.

        Raises:
            ConfigError: the options contradict the checkpoint, or name no scheme.
        """
        said = shape.raw.get("quantization_config")
        if not said:
            return online_plan(self.quantization, self.quantization_config)
        own = None
        if isinstance(said, dict):
            own = method_of(said)
        by = f" ({own})" if own else ""
        if self.quantization_config:
            raise ConfigError(
                f"--quantization-config: the checkpoint is quantised already{by}; leave it out"
            )
        if self.quantization is not None and quant_method(self.quantization) != own:
            raise ConfigError(
                f"--quantization {self.quantization}: the checkpoint is quantised already{by}; "
                "leave the option out"
            )
        return None

    @property
    def names(self) -> list[str]:
        """Names under which the API knows the model."""
        return list(self.served_model_name) or [self.model]


def _place_of(given: Any) -> Any:
    """A class as `module:Class`.

    Raises:
        ConfigError: it cannot be imported by such a name.
    """
    if not isinstance(given, type):
        return given
    if "." in given.__qualname__:
        raise ConfigError(
            f"--logits-processors must be classes at the top of a module, got {given.__qualname__}"
        )
    return f"{given.__module__}:{given.__name__}"


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"--{option} must be one of {', '.join(allowed)}, got {value!r}")
