"""`quire quantize` from a model folder to a checkpoint that others read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from quire.cli import main as cli
from quire.compress import command
from quire.compress.command import QuantizeOptions, quantize
from quire.compress.study import Texts
from quire.config import EngineConfig, ModelConfig, ModelShape
from quire.evaluation.compare import compare
from quire.evaluation.scored_model import ScoredModel
from quire.models.inspection import weight_forms
from quire.models.registry import load_model

DEMO = EngineConfig().model.folder
TOKENS = 1200


@pytest.fixture(autouse=True)
def logs(monkeypatch):
    """Of this process stay as other tests expect them."""
    monkeypatch.setattr("quire.cli.quantize.quiet_logs", lambda: None)


@pytest.fixture(scope="module")
def text():
    """What the model writes."""
    model = ModelConfig()
    return command._own_text(model, model.read_shape())


def quantized(out, text, **how):
    phases = []
    report = quantize(
        ModelConfig(),
        QuantizeOptions(out, text=text, **{"max_tokens": TOKENS, **how}),
        lambda phase, done, total: phases.append(phase),
    )
    assert {"Loading weights", "Measuring layers", "Writing"} <= set(phases)
    return report


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("quantize") / "mixed"
    return out, quantized(out, text, budget=0.003)


def test_a_mixture_within_the_budget(mixed):
    out, report = mixed
    choices = {layer["choice"] for layer in report["layers"]}
    assert choices == {"int8", "int4"}
    assert 0.0005 < report["chosen_by"]["kld"] <= 0.003
    assert report["held_out"]["kld"] < 0.01 and report["held_out"]["same_top"] > 0.93
    assert report["bytes"] < 0.5 * report["bytes_before"]
    stored = sum(t.nbytes for t in load_file(out / "model.safetensors").values())
    assert abs(stored - report["bytes"]) < 0.01 * stored
    before = report["bytes_before"] / report["bytes"]
    assert report["predicted_tokens_per_second"] > 0.99 * before * report["predicted_before"]


def test_errors_carried_help_in_most_layers(mixed):
    _, report = mixed
    both = [(la["kld"]["int4, nearest"], la["kld"]["int4, gptq"]) for la in report["layers"]]
    assert sum(carried < plain for plain, carried in both) > 0.8 * len(both)
    assert sum(c for _, c in both) < 0.8 * sum(p for p, _ in both)


def test_what_was_judged_is_what_is_read(mixed, text):
    """The engine with the written checkpoint has the very divergence of the report."""
    out, report = mixed
    options = QuantizeOptions(out, text=text, max_tokens=TOKENS)
    windows = command._windows(ModelConfig(), options, ModelConfig().read_shape())
    length = max(map(len, windows.ids))
    with (
        ScoredModel(EngineConfig.from_options(model=str(out)), length) as model,
        ScoredModel(EngineConfig(), length) as reference,
    ):
        found = compare(Texts.of(windows).held_out, model.passes, reference.passes)
    assert found.to_dict() == report["held_out"]


def test_transformers_reads_the_same_weights(mixed):
    from transformers import AutoModelForCausalLM

    out, report = mixed
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    with torch.no_grad():
        theirs(torch.tensor([[1, 2, 3]]))  # which unpacks the weights
    tensors, groups = load_file(out / "model.safetensors"), set()
    for name, module in theirs.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        scale = tensors[f"{name}.weight_scale"].double()
        if f"{name}.weight" in tensors:
            codes = tensors[f"{name}.weight"].double()
        else:
            words = tensors[f"{name}.weight_packed"].to(torch.int64)
            codes = (words[..., None] >> torch.arange(0, 32, 4) & 15).flatten(1).double() - 8
        groups.add(codes.shape[1] // scale.shape[1])
        ours = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        assert torch.equal(module.weight.data, ours.to(torch.bfloat16)), name
    assert len(groups) > 2 and report["scheme"] == "mixed"


def test_it_is_read_here_as_it_was_chosen(mixed):
    out, report = mixed
    model = load_model(ModelShape.from_folder(out), out, "auto", "cpu")
    forms = weight_forms(model)
    int8 = sum(form.layers for name, form in forms.items() if name.startswith("int8"))
    assert int8 == sum(layer["choice"] == "int8" for layer in report["layers"])
    assert all("int8 activations" in name for name in forms if name != "bfloat16")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (DEMO / name).read_bytes()
    page = (out / "quantisation_report.html").read_text()
    assert "Plotly.newPlot" in page and "self_attn.qkv_proj" in page and "http" in page
    assert json.loads((out / "quantisation_report.json").read_text())["layers"] == report["layers"]


def test_memory(text, tmp_path):
    most = 3_300_000
    report = quantized(tmp_path / "small", text, memory=most, max_tokens=400)
    assert 0.9 * most < report["bytes"] <= most


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_one_scheme_for_all(scheme, text, tmp_path):
    report = quantized(tmp_path / "one", text, scheme=scheme, group=32, max_tokens=400)
    assert {layer["choice"] for layer in report["layers"]} == {scheme}
    said = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert said["format"] == {"int8": "int-quantized", "int4": "pack-quantized"}[scheme]
    assert report["held_out"]["kld"] < {"int8": 0.006, "int4": 0.15}[scheme]


def test_a_mixture_of_experts(tmp_path, text):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    source = tmp_path / "mixture"
    MixtralForCausalLM(MixtralConfig(
        hidden_size=64, intermediate_size=64, head_dim=32, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, vocab_size=2048, num_hidden_layers=1,
        max_position_embeddings=512, dtype="bfloat16",
    )).to(torch.bfloat16).save_pretrained(source)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, source / name)
    model = ModelConfig(model=str(source))
    how = QuantizeOptions(tmp_path / "out", "int4", text=text, max_tokens=300, group=32,
                          include_head=True)  # fmt: skip
    report = quantize(model, how, lambda *_: None)
    names = {layer["name"] for layer in report["layers"]}
    assert any("experts.*.down_proj" in name for name in names) and "lm_head" in names
    assert "it chooses experts" in report["kept"].values()
    loaded = load_model(ModelShape.from_folder(how.out), how.out, "auto", "cpu")
    assert sum(form.layers for form in weight_forms(loaded).values()) > 10


# ---- what is refused -----------------------------------------------------------------------------


def refusal(capsys, *arguments):
    assert cli.main(["quantize", *arguments]) in (1, 2)
    return capsys.readouterr().err


def test_errors_are_one_line_and_leave_nothing(capsys, tmp_path, mixed):
    out = str(tmp_path / "out")
    (tmp_path / "short.txt").write_text("A short text.")
    (tmp_path / "exists").mkdir()
    short = str(tmp_path / "short.txt")
    for arguments, told in (
        (("quire-demo",), "quire quantize MODEL OUT"),
        (("quire-demo", out, "--scheme", "int3"), "got 'int3'; nearest: int4"),
        (("quire-demo", out, "--scheme", "fp8"), "nearest: int8"),
        (("quire-demo", out, "--group-size", "100"), "got 100; nearest: 128"),
        (("quire-demo", out, "--budget-kld", "-1"), "must be 0 or more, got -1"),
        (("quire-demo", out, "--memory", "much"), "'much'"),
        (("quire-demo", str(tmp_path / "exists")), "exists: give a name that is free"),
        (("quire-demo", str(tmp_path / "no" / "out")), "there is no folder"),
        (("quire-demo", out, "--calibration", short), "at least 192 tokens are needed, there are"),
        (("quire-demo", out, "--calibration-tokens", "100"), "--calibration-tokens: at least 192"),
        ((str(mixed[0]), out), "is quantised already (compressed-tensors)"),
        (("quire-demo", out, "--memory", "1M", "--calibration-tokens", "400"), "--memory: the"),
    ):
        assert told in refusal(capsys, *arguments), arguments
    assert {path.name for path in tmp_path.iterdir()} == {"short.txt", "exists"}


def test_the_command(capsys, tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    out = tmp_path / "out"
    given = ["quantize", "quire-demo", str(out), "--scheme", "int8", "--calibration-tokens", "300",
             "--calibration", str(tmp_path / "text.txt")]  # fmt: skip
    assert cli.main(given) == 0
    printed = capsys.readouterr()
    assert "20 int8" in printed.out and "held out" in printed.out and "GB/s" in printed.out
    assert "Measuring layers" in printed.err and (out / "config.json").is_file()
