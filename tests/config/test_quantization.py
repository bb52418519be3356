"""`--quantization` against what the checkpoint is."""

import json
import shutil

import pytest

from quire.cli.serve import build_parser
from quire.config import EngineConfig
from quire.config.cli import engine_config
from quire.config.model import EMBEDDED_FOLDER
from quire.errors import ConfigError


def settled(folder, said, wanted):
    config = json.loads((EMBEDDED_FOLDER / "quire-demo" / "config.json").read_text())
    if said is not None:
        config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / "quire-demo" / name, folder / name)
    return resolved(EngineConfig.from_options(model=str(folder), quantization=wanted))


def resolved(given):
    return given.resolve(given.model.read_shape())[0].model.quantization


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (None, None),
        (None, "int8"),
        (None, "int4"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "awq"}, "auto_awq"),
        ({"quant_method": "gptq"}, "auto_gptq"),
        ({"quant_method": "mxfp4"}, "gpt_oss_mxfp4"),
    ],
)
def test_what_can_be_said(said, wanted, tmp_path):
    assert settled(tmp_path, said, wanted) == wanted


@pytest.mark.parametrize("flag", ["--quantization", "-q"])
@pytest.mark.parametrize(
    ("method", "wanted"), [("awq", "auto_awq"), ("gptq", "auto_gptq"), ("mxfp4", "gpt_oss_mxfp4")]
)
def test_other_names_on_a_command_line(method, wanted, flag, tmp_path):
    settled(tmp_path, {"quant_method": method}, None)
    assert resolved(engine_config(build_parser().parse([str(tmp_path), flag, wanted]))) == wanted


@pytest.mark.parametrize(
    ("said", "wanted", "told"),
    [
        (
            None,
            "awq",
            "for a checkpoint that is not quantised, got 'awq'; nearest: int4",
        ),
        (None, "auto_awq", "got 'auto_awq'; nearest: int4"),
        (None, "int3", "got 'int3'"),
        ({"quant_method": "awq"}, "int8", "quantised already (awq); leave the option out"),
        ({"quant_method": "awq"}, "gptq", "quantised already (awq)"),
        ({"quant_method": "awq"}, "auto_gptq", "quantised already (awq)"),
        ({"bits": 4}, "int8", "quantised already; leave"),
    ],
)
def test_what_contradicts(said, wanted, told, tmp_path):
    with pytest.raises(ConfigError) as caught:
        settled(tmp_path, said, wanted)
    assert told in caught.value.message
