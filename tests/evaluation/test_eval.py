"""`quire eval`: its numbers against those of the engine's own log-probabilities, and its errors."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gguf_files import write_model
from quantised_writers import DEMO, FORMATS, checkpoint
from quire import LLM, SamplingParams
from quire.checkpoint.config_files import read_json
from quire.cli import main as cli
from quire.config import EngineConfig
from quire.evaluation import scored_model
from quire.evaluation.compare import DistanceTally, compare
from quire.evaluation.scored_model import ScoredModel
from quire.evaluation.windows import cut
from quire.tokenizer import Tokenizer
from quire.weights.dummy import random_checkpoint

TEXT = " ".join(f"The capital of France is Paris, and {i} plus 2 is {i + 2}." for i in range(30))
LENGTH = 64


@pytest.fixture(autouse=True)
def logs(monkeypatch):
    """Of this process stay as other tests expect them."""
    monkeypatch.setattr("quire.cli.eval.quiet_logs", lambda: None)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def report(capsys, *arguments):
    assert cli.main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def engine_scores(ids, **options):
    """Log-probabilities `[T, V]` of each window, as requests get them."""
    with LLM(max_logprobs=-1, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
        given = [{"prompt_token_ids": list(window)} for window in ids]
        found = []
        for output in llm.generate(given, params, use_tqdm=False):
            for place in output.prompt_logprobs[1:]:
                row = np.zeros(len(place))
                for token, entry in place.items():
                    row[token] = entry.logprob
                found.append(row)
        return np.array(found)


def test_it_is_what_the_engine_computes(capsys, text):
    """All numbers made anew, in numpy, out of what requests get."""
    found = report(
        capsys, "quire-demo", "--text", text, "--window", str(LENGTH), "--max-windows", "3",
        "--quantization", "int4", "--reference", "quire-demo",
    )  # fmt: skip
    with ScoredModel(EngineConfig.from_options(), LENGTH) as model:
        windows = cut(model.tokenizer, TEXT, LENGTH, 3)
    p = engine_scores(windows.ids)
    q = engine_scores(windows.ids, quantization="int4")
    targets = [token for window in windows.ids for token in window[1:]]
    assert found["positions"] == len(targets) == 3 * (LENGTH - 1) and found["windows"] == 3
    at = np.arange(len(targets))
    assert math.isclose(found["perplexity"], math.exp(-q[at, targets].mean()), rel_tol=1e-5)
    assert math.isclose(
        found["reference_perplexity"], math.exp(-p[at, targets].mean()), rel_tol=1e-5
    )
    kld = (np.exp(p) * (p - q)).sum(1)
    assert math.isclose(found["kld"], kld.mean(), rel_tol=1e-3)
    assert math.isclose(found["kld_p99"], np.quantile(kld, 0.99), rel_tol=1e-3)
    assert math.isclose(found["kld_max"], kld.max(), rel_tol=1e-3)
    assert math.isclose(found["same_top"], (p.argmax(1) == q.argmax(1)).mean())
    assert set(found["layers"]) == {"int4 in groups of 32", "int8"}


def test_a_model_is_itself(capsys, text):
    found = report(capsys, "--text", text, "--reference", "quire-demo", "--max-windows", "2")
    assert found["kld"] == found["kld_max"] == 0 and found["same_top"] == 1
    assert found["perplexity"] == found["reference_perplexity"]
    assert found["window"] == 512


def test_the_type_of_keys_and_values_counts(capsys, text):
    """The reference keeps its own."""
    how = ("--text", text, "--reference", "quire-demo", "--kv-cache-dtype", "fp8")
    found = report(capsys, *how)
    assert 0 < found["kld"] < 0.05


def test_chunks_change_no_bit(monkeypatch):
    with ScoredModel(EngineConfig.from_options(), 300) as model:
        windows = cut(model.tokenizer, TEXT, 300)
        whole = compare(windows, model.passes)
        monkeypatch.setattr(scored_model, "CHUNK", 48)
        monkeypatch.setattr(scored_model, "ROWS", 7)
        assert compare(windows, model.passes) == whole


def test_every_token_is_in_one_window():
    with ScoredModel(EngineConfig.from_options(), 50) as model:
        tokenizer = model.tokenizer
        windows = cut(tokenizer, TEXT, 50)
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    starts = tokenizer.encode("")[:1] == [bos]
    bare = [list(w[1:] if starts else w) for w in windows.ids]
    assert sum(bare, []) == ids[: len(sum(bare, []))] and len(ids) - len(sum(bare, [])) < 2


def test_known_distributions():
    tally, p = DistanceTally(), torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    tally.add(q.log(), torch.tensor([0, 1]), p.log())
    found = tally.scores
    assert math.isclose(found.kld, (0.25 * math.log(2) + math.log(2)) / 2, rel_tol=1e-6)
    assert found.same_top == 0 and math.isclose(found.perplexity, 4, rel_tol=1e-6)
    assert math.isclose(found.reference_perplexity, 2, rel_tol=1e-6)


def refusal(capsys, *arguments):
    assert cli.main(["eval", *arguments]) in (1, 2)
    return capsys.readouterr().err


def test_errors_are_one_line(capsys, text, tmp_path):
    assert "--text FILE" in refusal(capsys)
    assert "cannot be read" in refusal(capsys, "--text", str(tmp_path / "none"))
    (tmp_path / "short").write_text("a")
    assert "too short" in refusal(capsys, "--text", str(tmp_path / "short"))
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    assert "byte 2 is not" in refusal(capsys, "--text", str(tmp_path / "bytes"))
    assert "at least 2, got 1" in refusal(capsys, "--text", text, "--window", "1")
    assert "positions of the model" in refusal(capsys, "--text", text, "--window", "100000")
    assert "at least 1, got 0" in refusal(capsys, "--text", text, "--max-windows", "0")


def test_models_with_other_tokens_are_not_compared(capsys, text, tmp_path):
    with ScoredModel(EngineConfig.from_options(), 8) as model:
        folder = model.model.shape
    other = random_checkpoint(tmp_path / "other", {"vocab_size": folder.vocab_size + 64})
    source = EngineConfig.from_options().model.folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((source / name).read_bytes())
    told = refusal(capsys, "--text", text, "--reference", str(other))
    assert "same vocabulary" in told
    said = read_json(other / "tokenizer.json")
    said["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(said))
    assert "THE" not in Tokenizer.from_folder(other).decode(
        Tokenizer.from_folder(other).encode("THE")
    )
    assert "different tokens" in refusal(capsys, "--text", text, "--reference", str(other))


def test_quantised_checkpoints(capsys, text, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["gptq 4"]())
    found = report(capsys, str(folder), "--text", text, "--reference", "quire-demo")
    assert 0 < found["kld"] < 0.3 and found["same_top"] > 0.7
    assert "int4 in groups of 64 (GPTQ) with int8 activations" in found["layers"]


def test_gguf(capsys, text, tmp_path):
    config = json.loads((DEMO / "config.json").read_text())
    tensors = {k: v.float() for k, v in load_file(DEMO / "model.safetensors").items()}
    path = tmp_path / "model.gguf"
    write_model(path, config, "llama", dict.fromkeys(tensors, "Q8_0"), tensors)
    how = ("--text", text, "--reference", "quire-demo", "--tokenizer", str(DEMO))
    found = report(capsys, str(path), *how)
    assert 0 < found["kld"] < 0.01 and found["same_top"] > 0.9
