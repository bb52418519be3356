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
from quire.errors import ConfigError
from quire.evaluation.compare import compare
from quire.evaluation.scored_model import ScoredModel
from quire.models.inspection import weight_forms
from quire.models.registry import load_model
from quire.weights.files import write_safetensors

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
    # 0.485 to 0.505: the text is the model's own, which depends on the arithmetic of the processor.
    assert report["bytes"] < 0.53 * report["bytes_before"]
    stored = sum(t.nbytes for t in load_file(out / "model.safetensors").values())
    assert abs(stored - report["bytes"]) < 0.01 * stored
    before = report["bytes_before"] / report["bytes"]
    assert report["predicted_tokens_per_second"] > 0.99 * before * report["predicted_before"]


def test_errors_carried_help_in_most_layers(mixed):
    _, report = mixed
    klds = [layer["kld"] for layer in report["layers"] if layer["name"] != "lm_head"]
    both = [(kld["int4, nearest"], kld["int4, gptq"]) for kld in klds]
    # 16 to 18 of 20, by the arithmetic of the processor.
    assert sum(carried < plain for plain, carried in both) > 0.7 * len(both)
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
        if not isinstance(module, torch.nn.Linear):
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
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    plain = load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(theirs.model.embed_tokens.weight, plain)


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
    assert "more memory: see --head shared" in report["kept"]["lm_head"]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_one_scheme_for_all(scheme, text, tmp_path):
    report = quantized(tmp_path / "one", text, scheme=scheme, group=32, max_tokens=400)
    layers = {layer["name"]: layer["choice"] for layer in report["layers"]}
    assert layers.pop("lm_head") == "int8" and set(layers.values()) == {scheme}
    said = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert said["format"] == {"int8": "int-quantized", "int4": "mixed-precision"}[scheme]
    assert report["held_out"]["kld"] < {"int8": 0.006, "int4": 0.15}[scheme]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_a_head_that_is_the_embedding(text, tmp_path):
    """Apart from it fewer bytes are read, as one with it fewer are kept, too."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    made = {
        head: quantized(tmp_path / head, text, scheme="int8", head=head, max_tokens=400)
        for head in ("int8", "shared", "keep")
    }
    rows, columns = load_file(DEMO / "model.safetensors")["model.embed_tokens.weight"].shape
    size = rows * columns
    sizes = {head: report["bytes"] for head, report in made.items()}
    assert sizes["keep"] - sizes["shared"] == size - 2 * rows
    assert sizes["int8"] - sizes["keep"] == size + 2 * rows
    speeds = {h: r["predicted_tokens_per_second"] / r["bandwidth"] for h, r in made.items()}
    assert abs(1 / speeds["int8"] - sizes["shared"]) < 1 and speeds["int8"] > 1.1 * speeds["keep"]
    assert [report["head_apart"] for report in made.values()] == [True, False, False]
    assert made["keep"]["kept"] == {"lm_head": "it is the head: see --head"}
    tied = [ModelShape.from_folder(tmp_path / head).tie_word_embeddings for head in made]
    assert tied == [False, True, True]
    model = load_model(ModelShape.from_folder(tmp_path / "shared"), tmp_path / "shared", "auto")
    assert set(weight_forms(model)) == {"int8 with int8 activations"}
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "shared", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    stored = load_file(tmp_path / "shared" / "model.safetensors")
    name = "model.embed_tokens.weight"
    ours = (stored[name].float() * stored[f"{name}_scale"].float()).bfloat16()
    assert torch.equal(theirs.lm_head.weight, ours)
    assert torch.equal(
        model.children()["model"].children()["embed_tokens"](torch.arange(rows)), ours
    )


def test_a_head_of_its_own(text, tmp_path):
    """Its int8 takes fewer bytes in every way, and under --memory, too."""
    source = tmp_path / "untied"
    shutil.copytree(DEMO, source)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(1).contiguous()
    (source / "model.safetensors").unlink()
    write_safetensors(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (source / "config.json").unlink()
    (source / "config.json").write_text(json.dumps(config))
    model = ModelConfig(model=str(source))
    for name, memory in (("plain", None), ("small", 4_800_000)):
        how = QuantizeOptions(tmp_path / name, "mixed", None, memory, text, 400)
        report = quantize(model, how, lambda *_: None)
        choices = {layer["name"]: layer["choice"] for layer in report["layers"]}
        assert choices["lm_head"] == "int8" and not report["head_apart"]
    with pytest.raises(ConfigError, match="--head shared: the head of .* is not its embedding"):
        quantize(model, QuantizeOptions(tmp_path / "no", text=text, head="shared"), lambda *_: None)


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
    how = QuantizeOptions(tmp_path / "out", "int4", text=text, max_tokens=300, group=32)
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
        (("quire-demo", out, "--head", "int4"), "must be int8, shared, keep, got 'int4'"),
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


@pytest.mark.parametrize(("scheme", "memory"), [("mixed", 1_000_000), ("int8", 4_000_000)])
def test_what_can_never_fit_is_refused_before_anything_is_measured(tmp_path, text, scheme, memory):
    phases = []
    how = QuantizeOptions(
        tmp_path / "out", text=text, max_tokens=TOKENS, scheme=scheme, memory=memory
    )
    with pytest.raises(ConfigError, match="--memory: the layers take at least"):
        quantize(ModelConfig(), how, lambda phase, done, total: phases.append(phase))
    assert set(phases) == {"Loading weights"}


def test_the_command(capsys, tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    out = tmp_path / "out"
    given = ["quantize", "quire-demo", str(out), "--scheme", "int8", "--calibration-tokens", "300",
             "--calibration", str(tmp_path / "text.txt")]  # fmt: skip
    assert cli.main(given) == 0
    printed = capsys.readouterr()
    assert "21 int8" in printed.out and "held out" in printed.out and "GB/s" in printed.out
    assert "apart from the embedding, which stays as it was" in printed.out
    assert "Measuring layers" in printed.err and (out / "config.json").is_file()
