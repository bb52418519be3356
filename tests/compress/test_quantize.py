"""`quire quantize` from a model folder to a checkpoint that others read."""

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quire.cli import main as cli
from quire.compress import command
from quire.compress.command import QuantizeOptions, quantize
from quire.compress.report import REPORT, as_text
from quire.compress.study import Texts
from quire.config import EngineConfig, ModelConfig, ModelShape
from quire.errors import ConfigError, StartupError
from quire.evaluation.compare import compare
from quire.evaluation.scored_model import ScoredModel
from quire.models.inspection import weight_forms
from quire.models.registry import load_model
from quire.quantization.entries import matches
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
    told = [report["transformers"] for report in made.values()]
    assert told[::2] == [None, None] and "dequantize=True) alone" in told[1]
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


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_a_quantised_embedding_beside_int4_is_told_of(text, tmp_path):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    out = tmp_path / "out"
    report = quantized(out, text, scheme="int4", head="shared", max_tokens=300)
    assert "cannot read it: the embedding" in report["transformers"]
    load_model(ModelShape.from_folder(out), out, "auto")
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(
            out, quantization_config=CompressedTensorsConfig(dequantize=True)
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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A small one, whose experts need groups of two sizes at most 64."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    source = tmp_path_factory.mktemp("quantize") / "mixture"
    MixtralForCausalLM(MixtralConfig(
        hidden_size=64, intermediate_size=96, head_dim=32, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, vocab_size=2048, num_hidden_layers=1,
        max_position_embeddings=512, dtype="bfloat16",
    )).to(torch.bfloat16).save_pretrained(source)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, source / name)
    return ModelConfig(model=str(source))


def unpacked(tensors, name):
    """A layer's weight by the definition of the format, in bfloat16."""
    scales = tensors[f"{name}.weight_scale"].double()
    words = tensors[f"{name}.weight_packed"].to(torch.int64)
    columns = int(tensors[f"{name}.weight_shape"][1])
    bits = 32 * words.shape[1] // columns
    codes = (words[..., None] >> torch.arange(0, 32, bits)) % (1 << bits)
    codes = codes.flatten(1).double() - (1 << (bits - 1))
    return (codes * scales.repeat_interleave(columns // scales.shape[1], 1)).bfloat16()


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_a_mixture_of_experts(scheme, tmp_path, text, mixture):
    from transformers import AutoModelForCausalLM

    how = QuantizeOptions(tmp_path / "out", scheme, text=text, max_tokens=300, group=64)
    report = quantize(mixture, how, lambda *_: None)
    names = {layer["name"] for layer in report["layers"]}
    assert any("experts.*.down_proj" in name for name in names) and "lm_head" in names
    assert "it chooses experts" in report["kept"].values() and report["transformers"] is None
    loaded = load_model(ModelShape.from_folder(how.out), how.out, "auto", "cpu")
    forms = weight_forms(loaded)
    assert sum(form.layers for name, form in forms.items() if name.startswith(scheme)) >= 10
    assert all("int8 activations" in name for name in forms if name.startswith("int"))

    tensors = load_file(how.out / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(how.out, dtype="auto").model.layers[0]
    for i in range(4):
        stem = f"model.layers.0.block_sparse_moe.experts.{i}"
        gate, up = theirs.mlp.experts.gate_up_proj[i].chunk(2)
        for ours, weight in (("w1", gate), ("w3", up), ("w2", theirs.mlp.experts.down_proj[i])):
            assert torch.equal(weight, unpacked(tensors, f"{stem}.{ours}")), (i, ours)


def test_experts_are_named_by_patterns_that_vllm_looks_for_too(tmp_path, text, mixture):
    """It asks for `gate_proj` of expert 0, whatever the checkpoint calls that."""
    how = QuantizeOptions(tmp_path / "out", "int8", text=text, max_tokens=300)
    quantize(mixture, how, lambda *_: None)
    said = json.loads((how.out / "config.json").read_text())["quantization_config"]
    for leaf in ("w1", "gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.0.block_sparse_moe.experts.0.{leaf}"
        found = [
            group
            for group in said["config_groups"].values()
            if any(matches(name, target) for target in group["targets"])
        ]
        assert [group["format"] for group in found] == ["pack-quantized"]
        assert not matches(name.replace("layers.0", "layers.00"), found[0]["targets"][0])


def test_experts_of_several_schemes_are_told_of_and_not_read_wrongly(
    tmp_path, text, mixture, monkeypatch
):
    """transformers has one scheme for all experts: the others must not become other weights."""
    from transformers import AutoModelForCausalLM

    def choose(study, _budget, _memory):
        names = [of.unit.name for of in study.units]
        chosen = {n: "int8" if "down" in n or n == "lm_head" else "int4" for n in names}
        return chosen, study._judged(chosen, study._texts.chosen)

    monkeypatch.setattr("quire.compress.study.Study.choose", choose)
    how = QuantizeOptions(tmp_path / "out", text=text, max_tokens=300)
    report = quantize(mixture, how, lambda *_: None)
    assert "experts are not all of one scheme" in report["transformers"]
    assert "cannot read it: experts" in as_text(report)
    with pytest.raises(RuntimeError, match="conversion|mismatch"):
        AutoModelForCausalLM.from_pretrained(how.out, dtype="auto")
    loaded = load_model(ModelShape.from_folder(how.out), how.out, "auto", "cpu")
    assert {name[:4] for name in weight_forms(loaded)} >= {"int8", "int4"}


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


def test_a_folder_that_cannot_be_written_is_told_of_before_any_work(capsys, tmp_path, monkeypatch):
    def work(*_):
        raise AssertionError("it has begun")

    monkeypatch.setattr(command, "_windows", work)
    assert "nothing can be written in '/proc'" in refusal(capsys, "quire-demo", "/proc/x")
    long = str(tmp_path / ("x" * 300))
    assert "cannot be written (File name too long)" in refusal(capsys, "quire-demo", long)

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "/secret")

    monkeypatch.setattr("tempfile.mkdtemp", denied)
    told = refusal(capsys, "quire-demo", str(tmp_path / "out"))
    assert "(Permission denied): give an OUT in a folder where files can be made" in told
    assert told.count("\n") == 1


def test_a_long_name_that_is_allowed(tmp_path, text):
    out = tmp_path / ("x" * 250)
    quantized(out, text, scheme="int8", max_tokens=300)
    assert (out / "config.json").is_file()


@pytest.mark.parametrize(
    ("place", "scheme"),
    [
        ("study.write_safetensors", "int4"),
        ("writer.write_safetensors", "int8"),
        ("command.write_report", "int8"),
    ],
)
def test_a_full_disk(tmp_path, text, monkeypatch, place, scheme):
    def full(*_):
        if "safetensors" in place:
            raise SafetensorError("No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device", "/secret")

    monkeypatch.setattr(f"quire.compress.{place}", full)
    how = QuantizeOptions(tmp_path / "out", scheme, text=text, max_tokens=200)
    told = "cannot be written .No space left on device.*: make room on that disk"
    with pytest.raises(StartupError, match=told):
        quantize(ModelConfig(), how, lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_a_copy_whose_name_was_taken_meanwhile_is_kept(tmp_path, text):
    out, other = tmp_path / "out", tmp_path / "out-3"
    (tmp_path / "out-2").mkdir()

    def tell(phase, _done, _total):
        if phase == "Writing":
            out.mkdir(exist_ok=True)
            (out / "file").write_text("")

    how = QuantizeOptions(out, scheme="int8", text=text, max_tokens=300)
    with pytest.raises(ConfigError, match="meanwhile .*: the quantised copy is complete") as caught:
        quantize(ModelConfig(), how, tell)
    assert str(other) in caught.value.message and (other / "config.json").is_file()
    load_model(ModelShape.from_folder(other), other, "auto")
    assert json.loads((other / REPORT).read_text())["out"] == str(other)
    assert not list(other.glob("*.part"))
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out-2", "out-3"}
    assert [path.name for path in out.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing(tmp_path, monkeypatch, number):
    def told_to_end(*_):
        assert [path.name[:5] for path in tmp_path.iterdir()] == [".out-"]
        os.kill(os.getpid(), number)

    def of_tests(*_):
        raise AssertionError("nothing handled it")

    monkeypatch.setattr(command, "_windows", told_to_end)
    before = signal.signal(number, of_tests)
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main(["quantize", "quire-demo", str(tmp_path / "out")])
        assert signal.getsignal(number) is of_tests
    finally:
        signal.signal(number, before)
    assert caught.value.code == 128 + number and not list(tmp_path.iterdir())


def test_a_budget_that_is_not_kept_on_the_text_held_out_is_told_of(mixed):
    _, report = mixed
    assert report["held_out_within_budget"] == (report["held_out"]["kld"] <= 0.003)
    for within in (True, False):
        told = as_text(report | {"held_out_within_budget": within})
        assert ("above --budget-kld 0.003" in told) != within
        assert ("more calibration text" in told) != within


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
