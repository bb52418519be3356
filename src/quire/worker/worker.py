"""One rank of a model: chooses device and type, loads the model, sizes and allocates the KV cache,
and runs steps.

It does not know who calls it: an executor in the same process, or one elsewhere.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Sequence

from quire import envs
from quire.attention.kv_cache import allocate_kv_cache
from quire.checkpoint.manifest import verify
from quire.config import EngineConfig, ModelShape, read_pooler
from quire.config.kv_dtypes import kept_layers
from quire.core.batch import BatchResult, ScheduledBatch
from quire.errors import ConfigError, InvalidRequest
from quire.kernels.dispatch import title_of
from quire.kernels.dtypes import TORCH_DTYPES, torch_dtype
from quire.kernels.scopes import enable_nvtx
from quire.layers.module import Module
from quire.logger import get_logger
from quire.models.base import CausalLM
from quire.models.inspection import weight_forms
from quire.models.layer_times import LayerTimer
from quire.models.pooling import (
    DecoderForPooling,
    EncoderForPooling,
    load_pooling_model,
    pooling_kv_layers,
)
from quire.models.registry import kv_layers, load_model
from quire.tokenizer import Tokenizer
from quire.utils.host import available_memory, trim_heap
from quire.utils.math import human_bytes
from quire.weights.count import count_weights
from quire.weights.kept import kept_weights
from quire.worker.device import (
    choose_kernels,
    place,
    resolve_dtype,
    select_device,
    set_compile_cache,
    set_torch_threads,
)
from quire.worker.grammars import GrammarStore
from quire.worker.input_batch import InputBatch
from quire.worker.kv_transfer import make_transfer
from quire.worker.memory import (
    KVCachePlan,
    MemoryFacts,
    check_weights,
    log_plan,
    plan_kv_cache,
    plan_without_cache,
)
from quire.worker.model_runner import ModelRunner
from quire.worker.pooling_runner import PoolingRunner
from quire.worker.processors import ProcessorStore
from quire.worker.profile import make_profiler
from quire.worker.proposer import PROPOSERS, Drafting

logger = get_logger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


class Worker:
    """One rank of one model.

    Args:
        config: Resolved, so `max_model_len` is settled.
        shape: The model's sizes.
        proposer: Name of a row of `PROPOSERS`; `None`: no drafts.

    Raises:
        ConfigError: the device or type asked for cannot be had here, or there is no such proposer.
    """

    def __init__(
        self, config: EngineConfig, shape: ModelShape, proposer: str | None = None
    ) -> None:
        assert config.model.max_model_len is not None, "resolve() settles it"
        self._make_proposer = None if proposer is None else PROPOSERS.get(proposer)
        self.config = config
        self.shape = shape
        self.pooler = read_pooler(config.model, shape)
        self.max_model_len = config.model.max_model_len
        self.device = select_device(config.model.device)
        self.place = place(self.device, config.model.device)
        self.ops = choose_kernels(self.device)
        self.dtype = resolve_dtype(config.model.dtype, shape.dtype, self.device)
        own = pooling_kv_layers(self.pooler, shape) if self.pooler else kv_layers(shape)
        cache = config.cache
        self.kv_layers = kept_layers(
            own, self.dtype, cache.kv_cache_dtype, cache.kv_cache_dtype_skip_layers
        )
        self.weight_bytes = 0
        self.plan: KVCachePlan | None = None
        self.grammars = GrammarStore(
            self._read_tokenizer, shape.vocab_size, config.scheduler.max_num_seqs
        )
        if self.pooler is not None and config.model.logits_processors:
            raise ConfigError(
                "--logits-processors are for models that generate text, and this one is pooling, "
                f"got {', '.join(config.model.logits_processors)}"
            )
        self.processors = ProcessorStore(config, shape, self.device.torch_device)
        self._runner: ModelRunner | PoolingRunner | None = None
        self._profiler = make_profiler(
            config.observability.profiler_config, with_cuda=self.device.name == "cuda"
        )
        set_compile_cache()
        observability = config.observability
        self._times_itself = observability.traces_worker
        self._details = observability.traces_layers or self._times_itself
        self._layers: LayerTimer | None = None
        enable_nvtx()

    def load(self, progress: Progress | None = None) -> KVCachePlan:
        """Read the weights, then size and allocate the KV cache.

        Returns:
            The size of the KV cache.

        Raises:
            ModelLoadError: files are missing or do not fit the model.
            NotEnoughMemory: weights or the KV cache of one request do not fit.
        """
        logger.info("running on %s", self.place)
        set_torch_threads(self.shape.hidden_size, self.pooler is None, self.ops)
        tell = progress or _silent
        self.plan = self.size()
        held = self._kept_bytes()
        if self.config.model.verify and not held:
            verify(self.config.model.folder, functools.partial(tell, "Verifying files"))
        model = self._load_model(tell)
        tell("Allocating KV cache", 0, self.plan.bytes)
        self._runner = self._make_runner(model, self.plan)
        if self.config.observability.traces_layers:
            self._layers = _clocks(model)
        tell("Allocating KV cache", self.plan.bytes, self.plan.bytes)
        if self.plan.bytes:
            log_plan(self.plan, self.device.name, self.max_model_len)
        return self.plan

    def size(self, free: int | None = None) -> KVCachePlan:
        """Size the KV cache, from the headers of the weights alone.

        Args:
            free: Bytes of memory to go by; `None`: what is free now.

        Raises:
            NotEnoughMemory: weights or the KV cache of one request do not fit.
        """
        self.weight_bytes = self._estimate_weights()
        facts = MemoryFacts(
            self.device.name,
            # Weights that are here already are not free, and will not be taken a second time.
            self.device.free_memory() + self._kept_bytes() if free is None else free,
            self.weight_bytes,
            self.device.default_kv_bytes,
            _swap_room(self.config.cache.swap_dir),
        )
        # Both are settled before the long read, so that a bad limit shows at once.
        check_weights(facts, self.config.cache)
        return self._plan(facts)

    def _kept_bytes(self) -> int:
        kept = kept_weights() if self.device.name == "cpu" else None
        return kept.size if kept is not None else 0

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        """Run one step."""
        assert self._runner is not None, "load() comes first"
        self._profiler.step()
        if not self._details:
            return self._runner.execute(batch)
        started = time.monotonic()
        if self._layers is not None:
            self._layers.reset()
        result = self._runner.execute(batch)
        if self._times_itself:
            result.worker_start, result.worker_seconds = started, time.monotonic() - started
        if self._layers is not None:
            result.layer_times = [
                (t.started, t.total, t.attention, t.mlp) for t in self._layers.times if t.calls
            ]
        return result

    @property
    def model(self) -> CausalLM | EncoderForPooling | DecoderForPooling:
        """The loaded model."""
        assert self._runner is not None, "load() comes first"
        return self._runner.model

    def reset(self) -> None:
        """Forget all requests; model and cache stay."""
        if self._runner is not None:
            self._runner.reset()

    def release_memory(self, block_ids: Sequence[int]) -> int:
        """Give the pages of KV blocks, in ascending order, back to the machine, and those of the
        heap that hold nothing; gives the bytes of the former."""
        trim_heap()
        return 0 if self._runner is None else self._runner.release_blocks(block_ids)

    def start_profile(self) -> None:
        """Begin a recording of this process.

        Raises:
            ConfigError: no folder is set for it.
            Conflict: one runs already.
        """
        self._profiler.start()

    def stop_profile(self) -> None:
        """End the recording and write it.

        Raises:
            Conflict: none runs.
        """
        self._profiler.stop()

    def shutdown(self) -> None:
        """Release model and cache. Safe to call twice."""
        self._runner = None
        self.grammars.close()

    def _read_tokenizer(self) -> str:
        """The text of `tokenizer.json`, which grammars are compiled for."""
        return Tokenizer.from_folder(self.config.model.tokenizer_folder).to_json()

    def _estimate_weights(self) -> int:
        """Bytes of the weights in memory: their number times the size of the type they are stored
        in."""
        model = self.config.model
        count = count_weights(model.folder, model.load_format, self.shape)
        return model.weight_bytes(self.shape, count, torch_dtype(self.dtype).itemsize)

    def _load_model(self, tell: Progress) -> CausalLM | EncoderForPooling | DecoderForPooling:
        given, where = self.config.model, str(self.device.torch_device)
        model: CausalLM | EncoderForPooling | DecoderForPooling

        def progress(done: int, total: int) -> None:
            tell("Loading weights", done, total)

        common = (
            self.shape, given.folder, self.dtype, where, progress, self.max_model_len,
            given.load_format, given.attention_backend or envs.ATTENTION_BACKEND, self.ops,
            given.online_plan(self.shape),
            frozenset(layer.dtype for layer in self.kv_layers if layer.dtype is not None),
        )  # fmt: skip
        progress(0, 0)  # building the model is part of it
        if self.pooler is None:
            model = load_model(*common)
        else:
            model = load_pooling_model(self.pooler, *common)
        self.weight_bytes = _bytes_of(model, torch_dtype(self.dtype).itemsize)
        return model

    def _plan(self, facts: MemoryFacts) -> KVCachePlan:
        if not self.kv_layers:
            scheduler = self.config.scheduler
            return plan_without_cache(
                self.config.cache.block_size,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                max_num_seqs=scheduler.max_num_seqs,
                max_model_len=self.max_model_len,
            )
        return plan_kv_cache(
            self.kv_layers,
            self.config.cache,
            facts,
            bytes_per_element=torch_dtype(self.dtype).itemsize,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            max_chunk_tokens=self.config.scheduler.max_num_batched_tokens,
        )

    def _make_runner(
        self, model: CausalLM | EncoderForPooling | DecoderForPooling, plan: KVCachePlan
    ) -> ModelRunner | PoolingRunner:
        where = str(self.device.torch_device)
        caches = allocate_kv_cache(
            self.kv_layers, plan.num_blocks, plan.block_size, self.dtype, where, plan.groups
        )
        logger.info(
            "%s in %s on %s (%s kernels): weights %s, KV cache %s in %s",
            self.shape.architecture,
            self.dtype,
            self.device.name,
            title_of(self.ops),
            human_bytes(self.weight_bytes),
            human_bytes(plan.bytes),
            " and ".join(sorted({layer.dtype or self.dtype for layer in self.kv_layers})) or "none",
        )
        state = InputBatch(
            self.config.scheduler.max_num_seqs,
            self.max_model_len,
            plan.block_size,
            self.shape.vocab_size,
            plan.windows,
            self.grammars,
            self.processors,
        )
        groups = [group.layers for group in plan.groups]
        transfer = make_transfer(caches, plan.num_swap_blocks, self.config.cache.swap_dir)
        if isinstance(model, (EncoderForPooling, DecoderForPooling)):
            return PoolingRunner(model, caches, state, self.device, groups, transfer)
        return ModelRunner(
            model, caches, state, self.device, groups, transfer, self._make_drafting()
        )

    def _make_drafting(self) -> Drafting | None:
        if self._make_proposer is None:
            return None
        proposer = self._make_proposer(self.config, self.shape)
        return Drafting(proposer, self.shape.vocab_size, self.max_model_len)


def _bytes_of(model: CausalLM | EncoderForPooling | DecoderForPooling, itemsize: int) -> int:
    """Of the weights in memory. Says how they are kept, if that is not the model's type."""
    forms = weight_forms(model) if isinstance(model, Module) else {}
    rest = model.num_parameters - sum(form.weights for form in forms.values())
    total = max(0, rest) * itemsize + sum(form.nbytes for form in forms.values())
    if not forms.keys() <= TORCH_DTYPES.keys():
        said = "; ".join(
            f"{form.layers} linear layers in {name}, {human_bytes(form.nbytes)} "
            f"({8 * form.nbytes / max(1, form.weights):.2f} bits per weight)"
            for name, form in forms.items()
        )
        logger.info("weights: %s", said)
    return total


def _clocks(model: CausalLM | EncoderForPooling | DecoderForPooling) -> LayerTimer:
    """Clocks for the layers of a model, for detailed traces.

    Raises:
        ConfigError: the model has no layers that can be measured.
    """
    try:
        timer = LayerTimer(model)
    except InvalidRequest as error:
        raise ConfigError(f"--collect-detailed-traces model: {error.message}") from None
    timer.start()
    return timer


def _swap_room(folder: str | None) -> int | None:
    """Bytes free for a second tier; `None` if that is not known."""
    if folder is None:
        return available_memory()
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None  # whoever makes the file says why


def _silent(phase: str, done: int, total: int) -> None:
    """A progress callback that ignores everything."""
