"""What `quire inspect` and a loaded model say of a quantised checkpoint."""

import json

import pytest

from quantised_writers import FORMATS, checkpoint
from quire.cli.inspect import as_text, inspect
from quire.config import EngineConfig, ModelShape
from quire.models.inspection import weight_forms
from quire.models.registry import load_model
from quire.weights.count import count_weights


def test_inspect_tells_schemes_and_bits(tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["gptq 4 v2 asymmetric"](), layers=1)
    report = inspect(EngineConfig.from_options(model=str(folder)))
    schemes = report["weights"]["schemes"]
    said = schemes["int4 in groups of 32 (GPTQ)"]
    # 4 bits, and 16 + 4 for each 32 weights; g_idx counts too
    assert said["layers"] == 7 and 4.6 < said["bits_per_weight"] < 4.9
    assert said["activations"] == "int8" and schemes["bfloat16"]["layers"] == 1
    assert report["parameters"] == report["weights"]["parameters"] == 1_213_184
    assert "7 layers int4 in groups of 32 (GPTQ), 4." in as_text(report)


def test_inspect_tells_what_is_wrong(tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["gptq 4"](), layers=1)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    report = inspect(EngineConfig.from_options(model=str(folder)))
    assert "int8 in groups of 64 (GPTQ), but qweight is" in report["weights"]["problem"]
    assert "but qweight is" in as_text(report)


@pytest.mark.parametrize(
    ("name", "form", "bits"),
    [
        ("gptq 4", "int4 in groups of 64 (GPTQ) with int8 activations", (4.2, 5.1)),
        ("ct int8", "int8 with int8 activations", (8.0, 8.5)),
        ("fp8 block", "fp8 (e4m3) in blocks of 128 x 128 with float activations", (8.0, 8.6)),
    ],
)
def test_a_model_knows_what_it_keeps(name, form, bits, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS[name](), layers=1)
    found = weight_forms(load_model(ModelShape.from_folder(folder), folder, "auto", "cpu"))[form]
    assert found.layers == 4, "two of them stacks"
    assert bits[0] <= 8 * found.nbytes / found.weights <= bits[1]


@pytest.mark.parametrize(
    "name", ["gptq 4", "ct int8", "fp8 block", "ct mxfp4", "bnb nf4", "awq gemm"]
)
def test_memory_is_estimated_before_anything_is_read(name, tmp_path):
    """What is too much is refused at once, and the KV cache gets the rest."""
    _, folder = checkpoint(tmp_path, FORMATS[name](), layers=5)
    shape = ModelShape.from_folder(folder)
    forms = weight_forms(load_model(shape, folder, "auto", "cpu"))
    taken = sum(form.nbytes for form in forms.values())
    assert 0.9 < 2 * count_weights(folder, "auto", shape) / taken < 1.1
