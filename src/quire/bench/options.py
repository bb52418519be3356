"""The options of a run against a server: those of `vllm bench serve`, and a few of quire's own.

Commands make their flags from these fields. Checks that need nothing but the values are here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import ConfigError
from quire.workload.arrivals import Ramp, check_rate


def _option(default: Any, text: str, group: str) -> Any:
    metadata = {"help": text, "group": group}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


TARGET, LOAD, SAMPLING, OUTPUT = "Target", "Load", "Sampling", "Output"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to ask of which server, how fast, and what to do with the result.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    backend: str = _option(
        "openai", "API: openai, openai-chat, ... (all: docs/benchmarks.md).", TARGET
    )
    base_url: str | None = _option(None, "The server, with or without /v1.", TARGET)
    host: str = _option("127.0.0.1", "Its host, without --base-url.", TARGET)
    port: int = _option(8000, "Its port, without --base-url.", TARGET)
    endpoint: str | None = _option(None, "Path to ask; default: the backend's.", TARGET)
    header: list[str] = _option([], "K=V of every request.", TARGET)
    api_key: str | None = _option(
        None, "Its key; default: QUIRE_API_KEY, else OPENAI_API_KEY.", TARGET
    )
    model: str | None = _option(None, "Model; default: the first that the server lists.", TARGET)
    served_model_name: str | None = _option(None, "Its name in requests, if another.", TARGET)
    tokenizer: str | None = _option(
        None,
        "Folder or name of its tokenizer; default: the model's, if it is on this machine.",
        TARGET,
    )
    insecure: bool = _option(False, "Take any TLS certificate.", TARGET)
    extra_body: dict[str, Any] = _option({}, "JSON: further fields of every request.", TARGET)
    chat_template_kwargs: dict[str, Any] = _option({}, "JSON, for chat templates.", TARGET)
    lora_modules: list[str] = _option([], "Names to ask for instead of the model.", TARGET)
    lora_assignment: str = _option("random", "How they are chosen: random or round-robin.", TARGET)

    request_rate: float = _option(math.inf, "Requests per second; inf: all at once.", LOAD)
    burstiness: float = _option(
        1.0, "1: Poisson arrivals; below: burstier; above: more regular.", LOAD
    )
    max_concurrency: int | None = _option(None, "Requests unanswered at a time.", LOAD)
    ramp_up_strategy: str | None = _option(None, "linear or exponential, from start to end.", LOAD)
    ramp_up_start_rps: float | None = _option(None, "Rate at the first request.", LOAD)
    ramp_up_end_rps: float | None = _option(None, "Rate at the last request.", LOAD)
    self_timed: bool | None = _option(
        None, "Requests come when the dataset says; default: for timed_trace.", LOAD
    )
    num_warmups: int = _option(0, "Requests before the run, which do not count.", LOAD)
    ready_check_timeout_sec: float = _option(
        0.0, "Wait so long for a first answer before the run.", LOAD
    )
    probe_request_rate: float = _option(
        0.0, "Requests of one token per second beside the load, timed apart.", LOAD
    )
    request_timeout: float = _option(21600.0, "Seconds for one request.", LOAD)
    stall_timeout: float = _option(
        120.0, "Give up if the server is silent so long with requests unanswered.", LOAD
    )
    unreachable_timeout: float = _option(
        10.0, "Give up if no connection can be made for so long.", LOAD
    )
    profile: bool = _option(False, "Start the server's profiler for the run.", LOAD)

    temperature: float | None = _option(None, "Of every request; default: the server's.", SAMPLING)
    top_p: float | None = _option(None, "Likewise.", SAMPLING)
    top_k: int | None = _option(None, "Likewise.", SAMPLING)
    min_p: float | None = _option(None, "Likewise.", SAMPLING)
    frequency_penalty: float | None = _option(None, "Likewise.", SAMPLING)
    presence_penalty: float | None = _option(None, "Likewise.", SAMPLING)
    repetition_penalty: float | None = _option(None, "Likewise.", SAMPLING)
    use_beam_search: bool = _option(False, "Ask for beam search.", SAMPLING)
    logprobs: int | None = _option(None, "Log-probabilities per token.", SAMPLING)
    ignore_eos: bool | None = _option(
        None, "Generate up to the length; default: for random prompts.", SAMPLING
    )

    percentile_metrics: str | None = _option(
        None, "Latencies to print: ttft,tpot,itl (default), e2el.", OUTPUT
    )
    metric_percentiles: str = _option("99", "Percentiles of them, with commas.", OUTPUT)
    goodput: list[str] = _option([], "SLOs in milliseconds: ttft:200 tpot:50 e2el:900.", OUTPUT)
    save_result: bool = _option(False, "Write the result to a JSON file.", OUTPUT)
    save_detailed: bool = _option(False, "With every request in it; needed to compare.", OUTPUT)
    append_result: bool = _option(False, "Append it to the file.", OUTPUT)
    result_dir: str | None = _option(None, "Folder of the file.", OUTPUT)
    result_filename: str | None = _option(
        None, "Its name; default: label, rate, model, time.", OUTPUT
    )
    metadata: list[str] = _option([], "K=V, into the result.", OUTPUT)
    label: str | None = _option(None, "Name of this run; default: the backend.", OUTPUT)
    report: str | None = _option(None, "Write an HTML report with plots to this file.", OUTPUT)
    plot_timeline: bool = _option(
        False, "Write a plot of when each request ran: the result's name, .timeline.html.", OUTPUT
    )
    plot_dataset_stats: bool = _option(
        False, "Write a plot of the lengths: the result's name, .dataset_stats.html.", OUTPUT
    )
    disable_tqdm: bool = _option(False, "No progress bar.", OUTPUT)
    request_id_prefix: str = _option("bench-", "How ids of requests begin.", OUTPUT)

    def __post_init__(self) -> None:
        check_rate(self.request_rate)
        for name, (least, above) in _LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not (value > least if above else value >= least) or math.isnan(value):
                rule = "above" if above else "at least"
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be {rule} {least}, got {value:g}"
                )
        if self.lora_assignment not in ("random", "round-robin"):
            raise ConfigError(
                f"--lora-assignment must be random or round-robin, got {self.lora_assignment!r}"
            )
        if self.base_url is None and not 0 < self.port < 65536:
            raise ConfigError(f"--port must be from 1 to 65535, got {self.port}")
        self.ramp  # noqa: B018  it is checked by being made

    @property
    def ramp(self) -> Ramp | None:
        """The ramp, if there is one.

        Raises:
            ConfigError: its options do not fit together.
        """
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ConfigError(
                    "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy"
                )
            return None
        if start is None or end is None:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        if not math.isinf(self.request_rate):
            raise ConfigError("--ramp-up-strategy and --request-rate exclude each other: give one")
        return Ramp(self.ramp_up_strategy, start, end)

    @property
    def url(self) -> str:
        """The server as given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port}"

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        fields = {name: value for name, value in given.items() if value is not None}
        return fields | ({"use_beam_search": True} if self.use_beam_search else {})


_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_LEAST: Final[dict[str, tuple[float, bool]]] = {
    "burstiness": (0, True),
    "max_concurrency": (1, False),
    "num_warmups": (0, False),
    "ready_check_timeout_sec": (0, False),
    "probe_request_rate": (0, False),
    "request_timeout": (0, True),
    "stall_timeout": (0, True),
    "unreachable_timeout": (0, True),
    "logprobs": (0, False),
}


def pairs_of(flag: str, texts: list[str]) -> dict[str, str]:
    """Read `K=V` texts.

    Raises:
        ConfigError: one has no `=` or no key.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} takes KEY=VALUE, got {text!r}")
        found[key.strip()] = value.strip()
    return found
