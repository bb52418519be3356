"""A model family of a plugin, as `docs/plugins.md` shows it: the same tokens as the family that it
renames, inline and through the core's process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from distributions import Distributions, entry_points
from documented import install, modules
from quire import LLM, EngineConfig, SamplingParams
from quire.config.model import EMBEDDED_FOLDER
from quire.engine.async_llm import AsyncLLM
from quire.errors import ModelLoadError

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
PROMPT = "The capital of France is"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model as another family would store it."""
    made = tmp_path / "renamed"
    shutil.copytree(EMBEDDED_FOLDER / "quire-demo", made)
    config = json.loads((made / "config.json").read_text("utf-8"))
    config["architectures"] = ["FfnForCausalLM"]
    (made / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = load_file(made / "model.safetensors")
    renamed = {name.replace(".mlp.", ".ffn."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, made / "model.safetensors", {"format": "pt"})
    return made


async def test_the_documented_family_computes_what_llama_does(
    distributions: Distributions, folder: Path
) -> None:
    assert len(modules("A model family")["ffn_family"].splitlines()) <= 20
    with LLM(max_num_seqs=2) as llm:
        expected = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(ModelLoadError, match="unknown model architecture 'FfnForCausalLM'"):
        LLM(str(folder))
    install("A model family", distributions)
    with LLM(str(folder), max_num_seqs=2) as llm:
        found = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    assert list(found) == list(expected)
    async with await AsyncLLM.start(EngineConfig.from_options(model=str(folder))) as engine:
        await engine.wait_ready()
        outputs = [output async for output in engine.generate(PROMPT, PARAMS, "r")]
    assert list(outputs[-1].outputs[0].token_ids) == list(expected)


async def test_a_broken_one_ends_the_start_with_its_reason(
    distributions: Distributions, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["architectures"] = ["OddForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    rows = entry_points(model__OddForCausalLM="odd_family:OddForCausalLM")
    distributions.install("quire-odd", {"odd_family": "class OddForCausalLM: pass"}, rows)
    why = (
        r"'OddForCausalLM' \(entry point model.OddForCausalLM of quire-odd 1.0\) is not a subclass "
        "of quire.models.decoder.DecoderForCausalLM"
    )
    with pytest.raises(ModelLoadError, match=why):
        LLM(str(folder))
    engine = await AsyncLLM.start(EngineConfig.from_options(model=str(folder)))
    with pytest.raises(ModelLoadError, match=why):
        await engine.wait_ready()
    await engine.shutdown()
