"""Which sinks the statistics of steps go to: decided once, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from quire import envs
from quire.config import EngineConfig
from quire.observability.metrics.log_line import BatchSizeLog, IterationLog, LogLine
from quire.observability.metrics.prometheus import PrometheusSink
from quire.observability.metrics.tensorboard import TensorBoardSink
from quire.observability.sinks import StatSink, StatSinks
from quire.utils.timing import Clock


def make_sinks(
    config: EngineConfig, clock: Clock, *first: StatSink
) -> tuple[StatSinks, PrometheusSink]:
    """The sinks, and the metrics, which are among them unless statistics are off. `first` are the
    sinks that hear before the metrics do."""
    model = config.model
    observability = config.observability
    enabled = not observability.disable_log_stats
    wanted = {
        "kv_cache_metrics": observability.kv_cache_metrics,
        "warm_spare": config.recovery.warm_spare,
    }
    prometheus = PrometheusSink(
        model.names[0],
        max_model_len=model.max_model_len or 32768,
        clock=clock,
        enabled=enabled,
        options=[option for option, is_on in wanted.items() if is_on],
    )
    sinks = StatSinks([*first, prometheus] if enabled else first)
    if observability.tensorboard_dir is not None:
        sinks.add(TensorBoardSink(observability.tensorboard_dir))
    return sinks, prometheus


def cache_facts(config: EngineConfig, info: Mapping[str, object]) -> dict[str, object]:
    """Labels of `vllm:cache_config_info`: the section, then what the worker measured."""
    return {**asdict(config.cache), **info}


def add_log_sinks(sinks: StatSinks, config: EngineConfig, clock: Clock, device: str) -> None:
    """Add the sinks that write log lines. Later than the others: the lines name the device."""
    if not config.observability.disable_log_stats:
        sinks.add(LogLine(envs.LOG_STATS_INTERVAL, device, clock=clock))
    if config.observability.enable_logging_iteration_details:
        sinks.add(IterationLog(device))
    if interval := envs.LOG_BATCHSIZE_INTERVAL:
        sinks.add(BatchSizeLog(interval, clock))
