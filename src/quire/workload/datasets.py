"""The table of datasets, and those that are made up: random lengths, and prefixes that repeat.

A dataset is a function from options, a maker of prompts and a random generator to requests. Those
that are read from files are in `files.py` and `timed.py`, the stand-ins for well-known sets in
`synthetic.py`. Knows no server: what is done with the requests is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from quire.errors import ConfigError
from quire.registry import Registry
from quire.workload.lengths import UniformLength
from quire.workload.options import DatasetOptions
from quire.workload.prompts import Codec, PromptMaker, WordCodec
from quire.workload.request import WorkloadRequest

Dataset = Callable[[DatasetOptions, PromptMaker, np.random.Generator], list[WorkloadRequest]]

DATASETS: Final[Registry[Dataset]] = Registry(
    "dataset",
    {
        "random": "quire.workload.datasets:random_lengths",
        "random-rerank": "quire.workload.datasets:random_rerank",
        "prefix_repetition": "quire.workload.datasets:prefix_repetition",
        "custom": "quire.workload.files:custom",
        "sharegpt": "quire.workload.files:sharegpt",
        "burstgpt": "quire.workload.files:burstgpt",
        "spec_bench": "quire.workload.files:spec_bench",
        "timed_trace": "quire.workload.timed:timed_trace",
        "synthetic-sharegpt": "quire.workload.synthetic:sharegpt",
        "synthetic-chat": "quire.workload.synthetic:chat",
        "synthetic-code": "quire.workload.synthetic:code",
        "synthetic-rag": "quire.workload.synthetic:rag",
        "synthetic-agents": "quire.workload.synthetic:agents",
    },
)
"""Datasets by name."""
REFUSED: Final = {
    "hf": "it is read from the Hugging Face hub with a library that quire does not use: write its "
    "prompts to a JSONL file and use --dataset-name custom",
    "speed_bench": "it is read from the Hugging Face hub: write its prompts to a JSONL file and "
    "use --dataset-name custom",
    "random-mm": "quire serves text only: use random",
    "custom_audio": "quire serves text only: use custom",
    "custom_image": "quire serves text only: use custom",
    "custom_mm": "quire serves text only: use custom",
    "sonnet": "vLLM has removed it: use prefix_repetition",
}
"""Datasets of vLLM that quire lacks, and what to use."""
OF_FILES: Final = ("custom", "sharegpt", "burstgpt", "spec_bench", "timed_trace")


def make_requests(options: DatasetOptions, codec: Codec | None = None) -> list[WorkloadRequest]:
    """The requests of a dataset; equal options give equal ones.

    Args:
        options: Which.
        codec: The target's tokenizer; without one, tokens are words.

    Raises:
        ConfigError: there is no such dataset, its file is missing or malformed, or it is empty.
    """
    name = options.dataset_name
    if name in REFUSED:
        raise ConfigError(f"--dataset-name {name}: {REFUSED[name]}")
    if name in OF_FILES and not options.dataset_path:
        raise ConfigError(f"--dataset-name {name} reads a file: give --dataset-path")
    if options.dataset_path and name not in OF_FILES:
        raise ConfigError(
            f"--dataset-path is for {', '.join(OF_FILES)}; --dataset-name {name} reads no file"
        )
    rng = np.random.default_rng(options.seed)
    return DATASETS.get(name)(options, PromptMaker(codec or WordCodec(), rng), rng)


def random_lengths(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Random tokens, with lengths around those asked for; all prompts may share a prefix."""
    prefix = maker.ids(options.random_prefix_len)
    inputs, outputs = _random_lengths(options, rng)
    if len(prefix) + inputs.min() < 1:
        raise ConfigError("--random-input-len with its range must leave a prompt of a token, got 0")
    texts = [maker.text([*prefix, *maker.ids(n)]) for n in inputs]
    requests = []
    size = options.random_batch_size
    for i, output in zip(range(0, len(texts), size), outputs[::size], strict=True):
        batch, lengths = zip(*texts[i : i + size], strict=True)
        prompt = batch[0] if size == 1 else list(batch)
        requests.append(
            WorkloadRequest(prompt, sum(lengths), int(output), shared_prefix=len(prefix))
        )
    return requests


def _random_lengths(
    options: DatasetOptions, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    num, ratio = options.num_prompts * options.random_batch_size, options.random_range_ratio
    length = options.random_input_len if options.input_len is None else options.input_len
    output = options.random_output_len if options.output_len is None else options.output_len
    inputs = UniformLength.around(length, ratio).sample(num, rng)
    return inputs, UniformLength.around(output, ratio, least=1).sample(num, rng)


def random_rerank(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """A query and `--random-batch-size` documents per request; the query is the first text."""
    inputs, _ = _random_lengths(options, rng)
    requests, size = [], options.random_batch_size
    for i in range(0, len(inputs), size):
        query, length = maker.text(maker.ids(max(1, int(inputs[i]) // 4)))
        pairs = [maker.text(maker.ids(max(1, int(n) - length))) for n in inputs[i : i + size]]
        total = sum(n for _, n in pairs) + length * len(pairs)
        requests.append(WorkloadRequest([query, *(text for text, _ in pairs)], total, 1))
    return requests


def prefix_repetition(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """A few prefixes in turns, each with a new suffix every time, in random order."""
    num = options.prefix_repetition_num_prefixes
    if num > options.num_prompts:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes must be at most --num-prompts "
            f"({options.num_prompts}), got {num}"
        )
    length, suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    if length + suffix < 1:
        raise ConfigError(
            "prefix and suffix of prefix_repetition are both empty: give one a length"
        )
    output = options.output_len or options.prefix_repetition_output_len
    prefixes = [maker.ids(length) for _ in range(num)]
    requests = []
    for i in range(options.num_prompts):
        text, tokens = maker.text([*prefixes[i % num], *maker.ids(suffix)])
        requests.append(WorkloadRequest(text, tokens, output, shared_prefix=length))
    if not options.disable_shuffle:
        rng.shuffle(requests)
    return requests
