"""The members of vLLM's `LLMEngine` besides `add_request` and `step`, for scripts that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.engine.foreign import check_request_options
from quire.errors import ConfigError, NotAvailable

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.model import ModelConfig
    from quire.engine.frontend.front_end import FrontEnd
    from quire.tokenizer.tokenizer import Tokenizer


class EngineVerbs:
    """Members of `LLMEngine` that scripts for vLLM use."""

    frontend: FrontEnd

    @property
    def config(self) -> EngineConfig:
        """What holds now, with all that the model's shape settles."""
        return self.frontend.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.frontend.tokenizer

    def call(self, verb: str, args: dict[str, Any]) -> Any:
        """Run a control verb of the core."""
        raise NotImplementedError

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        usage_context: object = None,
        stat_loggers: object = None,
        enable_multiprocessing: bool = False,
    ) -> Any:
        """An engine with the options of vLLM's `EngineArgs`. It runs in the caller's process.

        Raises:
            StartupError: an option is bad.
            NotAvailable: another process or loggers of one's own are asked for.
        """
        if enable_multiprocessing:
            raise NotAvailable("enable_multiprocessing is not available: use AsyncLLM.")
        if stat_loggers:
            raise NotAvailable("stat_loggers are not available: call get_metrics().")
        return cls(engine_args.create_engine_config())  # type: ignore[call-arg]

    @property
    def model_config(self) -> ModelConfig:
        """The model's section, settled."""
        return self.config.model

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len({completion.external_id for completion in self.frontend.output.active()})

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model is run for: `generate`, or `encode` of a pooling model."""
        return ("generate",) if self.config.model.runner == "generate" else ("encode",)

    def get_metrics(self) -> list[Any]:
        """Current values of all metrics, as Counter, Gauge and Histogram records.

        Raises:
            ConfigError: statistics are off (`disable_log_stats=True`, the default of `LLM`).
        """
        if self.config.observability.disable_log_stats:
            raise ConfigError("get_metrics() needs LLM(..., disable_log_stats=False)")
        return self.frontend.prometheus.snapshot()

    def do_log_stats(self) -> None:
        """Let the stat line notice how much time has passed."""
        self.frontend.sinks.tick()

    def do_log_stats_with_interval(self) -> None:
        """The same: the line comes when its interval is over."""
        self.frontend.sinks.tick()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False while requests run.

        Raises:
            NotAvailable: requests run, and are to be restarted.
        """
        if reset_running_requests and self.get_num_unfinished_requests():
            raise NotAvailable("reset_running_requests is not available: wait, or abort them.")
        return bool(self.call("reset_prefix_cache", {}))

    def reset_mm_cache(self) -> None:
        """Forget cached images: there are none."""

    def reset_encoder_cache(self) -> None:
        """Forget cached images: there are none."""

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start a torch profiler over the engine's work.

        Raises:
            ConfigError: `QUIRE_TORCH_PROFILER_DIR` is not set.
            InvalidRequest: a name or a part of the steps is asked for.
        """
        check_request_options(
            profile_prefix=profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
        )
        self.call("start_profile", {})

    def stop_profile(self) -> None:
        """Stop the profiler and write its trace into `QUIRE_TORCH_PROFILER_DIR`."""
        self.call("stop_profile", {})

    def is_sleeping(self) -> bool:
        """Never: an engine is there or not."""
        return False

    def list_loras(self) -> set[int]:
        """None: adapters are merged into their models."""
        return set()
