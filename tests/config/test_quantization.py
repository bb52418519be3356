"""`--quantization` against what the checkpoint is."""

import json
import shutil

import pytest

from quire.config import EngineConfig
from quire.config.model import EMBEDDED_FOLDER
from quire.errors import ConfigError


def settled(folder, said, wanted):
    config = json.loads((EMBEDDED_FOLDER / "quire-demo" / "config.json").read_text())
    if said is not None:
        config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / "quire-demo" / name, folder / name)
    given = EngineConfig.from_options(model=str(folder), quantization=wanted)
    return given.resolve(given.model.read_shape())[0].model.quantization


@pytest.mark.parametrize(
    ("said", "wanted"),
    [(None, None), (None, "int8"), (None, "int4"), ({"quant_method": "awq"}, "awq")],
)
def test_what_can_be_said(said, wanted, tmp_path):
    assert settled(tmp_path, said, wanted) == wanted


@pytest.mark.parametrize(
    ("said", "wanted", "told"),
    [
        (
            None,
            "awq",
            "for a checkpoint that is not quantised, got 'awq'; nearest: int4",
        ),
        (None, "int3", "got 'int3'"),
        ({"quant_method": "awq"}, "int8", "quantised already (awq); leave the option out"),
        ({"quant_method": "awq"}, "gptq", "quantised already (awq)"),
        ({"bits": 4}, "int8", "quantised already; leave"),
    ],
)
def test_what_contradicts(said, wanted, told, tmp_path):
    with pytest.raises(ConfigError) as caught:
        settled(tmp_path, said, wanted)
    assert told in caught.value.message
