"""What a device takes: a row for itself, one for its kernels, and here one for its attention."""

from collections import Counter

import pytest

from quire import LLM, SamplingParams
from quire.attention.base import Capabilities
from quire.attention.paged import PagedAttention
from quire.attention.select import BACKENDS
from quire.config.model import DEVICES
from quire.errors import ConfigError
from quire.kernels import reference
from quire.kernels.dispatch import IMPLEMENTATIONS, Implementation, choose, ops, select
from quire.worker.device import CpuDevice, select_device

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
calls = Counter()


# ---- the device: what a plug-in would bring ---------------------------------------------------


class ToyDevice(CpuDevice):
    """The host's memory under another name."""

    name = "toy"
    where = "a toy"
    dtypes = ("float32",)


def counted(name, function):
    def call(*args, **options):
        calls[name] += 1
        return function(*args, **options)

    return call


TOY_KERNELS = Implementation(
    {name: counted(name, f) for name, f in reference.OPS.items() if f is not None}, device="toy"
)


class ToyAttention(PagedAttention):
    """Another way to the same numbers."""

    name = "toy"
    can_fuse = False
    capabilities = Capabilities(frozenset({"cpu"}), frozenset({"float32"}))

    def forward(self, *args):
        calls["attention"] += 1
        return super().forward(*args)


# ---- what it is held against ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    for table, row in ((DEVICES, ToyDevice), (IMPLEMENTATIONS, TOY_KERNELS),
                       (BACKENDS, ToyAttention)):  # fmt: skip
        monkeypatch.setattr(table, "_rows", {**table._rows, "toy": row})
        monkeypatch.setattr(table, "_loaded", dict(table._loaded))
    calls.clear()


def generate(**options):
    with LLM(dtype="float32", max_model_len=128, num_gpu_blocks_override=40, **options) as llm:
        model = llm.llm_engine.core.executor.model
        (output,) = llm.generate("The capital of France is", PARAMS, use_tqdm=False)
        return output.outputs[0].token_ids, output.outputs[0].logprobs, model


def test_a_model_runs_on_it():
    before = ops.name
    tokens, logprobs, model = generate(device="toy", attention_backend="toy")
    assert model.ops.name == "toy"
    assert model.attention.name == "toy"
    layers = model.shape.num_layers
    assert calls["attention"] == PARAMS.max_tokens * layers
    for name in ("paged_attention", "write_kv", "rotary"):
        assert calls[name] == PARAMS.max_tokens * layers, name
    assert calls["gated_linear"] == PARAMS.max_tokens * layers
    assert calls["log_softmax"] == PARAMS.max_tokens, "sampling is on it, too"
    assert ops.name == before, "models elsewhere do not notice"
    seen = calls.total()
    try:
        select("reference")
        assert generate(device="cpu")[:2] == (tokens, logprobs)
    finally:
        select(before)
    assert calls.total() == seen, "only the model that asked for it computes there"


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="--dtype bfloat16 does not work on toy"):
        LLM(device="toy", dtype="bfloat16")
    with pytest.raises(
        ConfigError, match="--device must be one of auto, cpu, cuda, toy, got 'tyo'"
    ):
        select_device("tyo")


def test_kernels_of_one_device_are_not_for_another():
    assert choose(device="toy").name == "toy", "before those that run anywhere"
    assert choose(device="cpu").name != "toy"
    with pytest.raises(ConfigError, match="=toy computes on the toy only, and the device is cpu"):
        choose("toy")
