"""`quire bench engine`: engines in turns, peers with each of their settings, made-up ones here."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.bench.engine.limit import ModelWork, codes_of, limit
from quire.bench.engine.measure import measure, warm_up
from quire.bench.engine.options import CASES, Case, EngineBenchOptions
from quire.bench.engine.rounded_copy import write_rounded
from quire.bench.engine.text import engine_text
from quire.bench.engine.workers import BenchedEngine, Contest, start_peers
from quire.cli.benches.engine import main, scarce
from quire.config import EngineConfig
from quire.config.locate import located
from quire.errors import ConfigError, StartupError
from quire.kernels.probe import Rates
from quire.models.inspection import weight_forms

PEER = """
import json, sys
script, *given = sys.argv[1:]
if script.endswith("to_gguf.py"):
    open(given[1], "w").write("converted")
    sys.exit()
if given[0] == "vllm":
    sys.exit("no such package: vllm")
assert open(given[0]).read() == "converted"
setting = given[1]
print(json.dumps({"llama_cpp": "0.9", "build": "AVX", "settings": "kv " + setting}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    rows = job["prompts"]
    # Split is quicker for several sequences, unified for one.
    seconds = {"split": 0.2, "unified": 0.1 * rows}[setting] + job["seed"] // 1000
    print(json.dumps({"seconds": seconds}), flush=True)
"""


def program(path: Path, text: str) -> str:
    """A Python that runs `text` whatever script it is given."""
    (path.with_suffix(".py")).write_text(text)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {path.with_suffix(".py")} "$@"\n')
    path.chmod(0o755)
    return str(path)


class Paper:
    def rates(self) -> Rates:
        return Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e9)

    def seconds(self, case: Case, work: Mapping[str, int], rates: Rates) -> float:
        return work["weight_bytes"] / rates.read


def constant(seconds: float) -> list[str]:
    """An engine that always takes so long, and one more in each round."""
    text = (
        "import json, sys\n"
        'print(\'{"quire": "0.1", "work": {"weight_bytes": 50000000}}\', flush=True)\n'
        "for line in sys.stdin: print(json.dumps("
        f"{{'seconds': {seconds} + json.loads(line)['seed'] // 1000}}), flush=True)"
    )
    return [sys.executable, "-c", text]


@pytest.fixture
def contest(tmp_path: Path) -> Any:
    made = Contest(tmp_path, 100, 300, 1200)
    yield made
    made.close()


def test_the_best_setting_of_a_peer_counts_for_each_case(contest: Contest, tmp_path: Path) -> None:
    contest.start("quire", "bf16", "", constant(0.1), {})
    contest.start("quire", "int8", "", constant(0.05), {})
    llama = program(tmp_path / "llama", PEER)
    start_peers(contest, {"llama": llama}, ["bf16", "int8"], tmp_path)
    cases = {"one": Case(1, 4, 5), "eight": Case(8, 4, 5)}
    report = measure(contest.workers, cases, 3, Paper())
    for case, setting, first in (("one", "unified", 0.1), ("eight", "split", 0.2)):
        row = report["results"][case]["llama bf16"]
        assert row["setting"] == setting and set(row["tried"]) == {"split", "unified"}
        assert row["seconds"] == [first, 1 + first, 2 + first], "in the order of the rounds"
        ratios = report["ratios"][case]
        assert ratios["llama bf16"] == pytest.approx((1 + first) / 1.1, abs=1e-3)
        assert ratios["llama int8"] == pytest.approx((1 + first) / 1.05, abs=1e-3)
        assert ratios["quire int8"] == pytest.approx(1.1 / 1.05, abs=1e-3)
    ours = report["results"]["eight"]["quire bf16"]
    assert ours["tokens_per_second"] == round(8 * 5 / 1.1, 1)
    assert ours["limit"]["fraction"] == pytest.approx(0.05 / 1.1, abs=1e-3)
    text = engine_text({**report, "model": "m", "version": "0.1", "rounds": 3})
    assert "(unified, " in text and "(split, " in text
    for setting in ("split", "unified"):
        assert f"- llama bf16 {setting}: llama_cpp 0.9, build AVX, settings kv {setting}" in text


def test_the_largest_case_is_run_first_and_not_counted(contest: Contest, tmp_path: Path) -> None:
    """What is touched for the first time, the system gives then: no timed run pays for it."""
    told = tmp_path / "jobs"
    text = constant(0.1)[2].replace(
        "print(json", f"open({str(told)!r}, 'a').write(line) and print(json"
    )
    contest.start("quire", "bf16", "", [sys.executable, "-c", text], {})
    cases = {"one": Case(1, 4, 5), "large": Case(8, 4, 5), "long": Case(1, 9, 5)}
    warm_up(contest.workers, cases)
    report = measure(contest.workers, cases, 2, Paper())
    jobs = [json.loads(line) for line in told.read_text().splitlines()]
    assert [job["prompts"] for job in jobs] == [8, 1, 1, 8, 8, 1, 1]
    assert all(len(row["quire bf16"]["seconds"]) == 2 for row in report["results"].values())
    assert contest.pool["num_gpu_blocks_override"] * 16 > contest.tokens


def test_an_interruption_leaves_the_cases_that_are_done(contest: Contest) -> None:
    contest.start("quire", "bf16", "", constant(0.1), {})
    cases = {"one": Case(1, 4, 5), "two": Case(2, 4, 5)}

    def interrupt(case: str, done: int, total: int) -> None:
        if (case, done) == (last, 1):
            raise KeyboardInterrupt

    last = "two"
    report = measure(contest.workers, cases, 2, Paper(), seen=interrupt)
    assert list(report["results"]) == list(report["ratios"]) == ["one"]
    assert "| engine | one |" in engine_text({**report, "model": "m", "version": "1", "rounds": 2})
    last = "one"
    with pytest.raises(KeyboardInterrupt):
        measure(contest.workers, cases, 2, Paper(), seen=interrupt)


def test_little_memory_is_told() -> None:
    assert scarce(2 << 30) is None
    assert "1.5 GiB are left" in str(scarce(3 << 29))


def test_the_first_setting_alone_starts_no_other(contest: Contest, tmp_path: Path) -> None:
    first = dataclasses.replace(contest, settings="first")
    start_peers(
        first, {"llama": program(tmp_path / "llama", PEER)}, ["bf16", "int8", "fp8"], tmp_path
    )
    assert [worker.name for worker in first.workers] == ["llama bf16 split", "llama int8 split"]


def test_an_engine_that_ends_leaves_the_cases_that_are_done(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Such as one that the system kills when memory runs out."""
    contest.start("quire", "bf16", "", constant(0.1), {})
    text = "import json, sys\nprint('{}', flush=True)\nfor i in range(2):\n sys.stdin.readline()\n"
    text += " print(json.dumps({'seconds': 1.0}), flush=True)\nsys.exit('no memory')"
    contest.start("x", "bf16", "", [sys.executable, "-c", text], {})
    cases = {"one": Case(1, 4, 5), "two": Case(2, 4, 5)}
    report = measure(contest.workers, cases, 2, Paper())
    assert list(report["results"]) == list(report["ratios"]) == ["one"]
    assert report["ended"] == "x bf16 ended; it said last: no memory"
    at_once = BenchedEngine("y", "bf16", "", [sys.executable, "-c", "print('{}')"], {}, 100)
    with pytest.raises(StartupError, match="y bf16 ended"):
        measure([contest.workers[0], at_once], cases, 2, Paper())

    told = {**report, "model": "m", "version": "1", "rounds": 2, "interrupted": True}
    monkeypatch.setattr("quire.cli.benches.engine._measured", lambda model, options: told)
    path = tmp_path / "kept.json"
    assert main(["--output-json", str(path)]) == 1
    assert "before this: x bf16 ended; it said last: no memory" in capsys.readouterr().err
    assert list(json.loads(path.read_text())["results"]) == ["one"]


def test_a_peer_that_ends_is_an_error_with_its_last_words(contest: Contest, tmp_path: Path) -> None:
    python = program(tmp_path / "python", PEER)
    with pytest.raises(
        StartupError, match="vllm bf16 tuned ended; it said last: no such package: vllm"
    ):
        start_peers(contest, {"vllm": python}, ["bf16"], tmp_path)
    talker = [sys.executable, "-c", "print('Loading the model...')"]
    with pytest.raises(StartupError, match="x bf16 said 'Loading the model"):
        BenchedEngine("x", "bf16", "", talker, {}, 100)
    short = BenchedEngine("x", "bf16", "", [sys.executable, "-c", "print('{}')"], {}, 100)
    with pytest.raises(StartupError, match="x bf16 ended"):
        short.run(Case(1, 1, 1), 0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rounds": 0}, "--rounds must be 1 to 1000, got 0"),
        ({"pause": -1.0}, "--pause must be 0 to 60, got -1"),
        ({"formats": "int8,int9"}, "there is no 'int9'; formats: bf16, int8, int4, int4_128, fp8,"),
        ({"settings": "best"}, "--settings must be one of all, first, got 'best'"),
        ({"cases": "8x8_8"}, "there is no '8x8_8'; cases: decode_1x16_65"),
        ({"peer_llama": "/nowhere/python"}, "--peer-llama: '/nowhere/python' is no program"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineBenchOptions(**given)


def test_cases_that_a_model_cannot_hold_are_left_out_or_refused() -> None:
    assert set(CASES) - set(EngineBenchOptions().chosen(2048)) == {"long_4x4096_64"}
    with pytest.raises(
        ConfigError, match="long_4x4096_64 needs a context of 4160, the model has 9"
    ):
        EngineBenchOptions(cases="long_4x4096_64").chosen(9)


def test_the_command_measures_this_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    options = [
        "--cases",
        "decode_1x16_65",
        "--rounds",
        "1",
        "--pause",
        "0",
        "--formats",
        "bf16,int4,int4_128",
    ]
    assert main([*options, "--output-json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "| decode_1x16_65 |" in said and "in groups of 32 that are scaled" in said
    report = json.loads(path.read_text())
    assert report["results"]["decode_1x16_65"]["quire bf16"]["tokens_per_second"] > 0
    for form in (forms := ("bf16", "int4", "int4_128")):
        # Not below 1: the limit was measured at another moment, when others may have computed.
        assert report["results"]["decode_1x16_65"][f"quire {form}"]["limit"]["fraction"] > 0
    assert list(report["ratios"]["decode_1x16_65"]) == ["quire int4", "quire int4_128"]
    kept = {form: report["versions"][f"quire {form}"]["work"] for form in forms}
    assert kept["bf16"]["weight_bytes"] == 2 * (kept["bf16"]["body"] + kept["bf16"]["head"])
    assert kept["int4"]["weight_bytes"] * 3 < kept["bf16"]["weight_bytes"]
    assert kept["int4_128"]["weight_bytes"] < kept["int4"]["weight_bytes"]
    assert kept["int4"]["body_codes4"] == kept["int4"]["body"]
    assert kept["int4"]["head_codes8"] == kept["int4"]["head"]
    assert kept["int4"]["body_groups4"] * 32 == kept["int4"]["body"]
    assert kept["int4"]["head_groups8"] == 0
    assert not any(number for name, number in kept["bf16"].items() if "codes" in name)


@pytest.mark.parametrize(
    ("form", "codes"),
    [
        ("bfloat16", None),
        ("int8", (8, 0)),
        ("int4 in groups of 32", (4, 32)),
        ("int4 in groups of 128 (AWQ gemm) with int8 activations", (4, 128)),
        ("int4 in groups of 128 (AWQ gemm) with float activations", None),
        ("int8 in groups of 64 with int8 activations", (8, 64)),
        ("int8, products in bfloat16", None),
        ("fp8 in groups of 128 x 128", None),
    ],
)
def test_what_a_form_is_multiplied_as(form: str, codes: tuple[int, int] | None) -> None:
    assert codes_of(form) == codes


def test_the_limit_counts_bytes_or_operations_whichever_takes_longer() -> None:
    work = {
        "weight_bytes": 1000, "body": 600, "body_codes8": 150, "body_codes4": 50, "head": 100,
        "head_codes8": 70, "head_codes4": 30, "kv_bytes": 10, "attention": 3,
        "body_groups8": 5, "body_groups4": 2, "head_groups8": 7, "head_groups4": 1,
    }  # fmt: skip
    assert set(work) == set(ModelWork.__slots__)
    endless = 1e30
    slow_memory = Rates(1.0, *[endless] * 5)
    # A prompt, then two steps that see 5 and 6 positions of each of two requests.
    assert limit(Case(2, 4, 3), work, slow_memory) == 1000 + 1000 + 100 + 1000 + 120
    computing = 2 * (400 * 8 + 2 * 3 * 10 * 2), 2 * (400 * 2 + 2 * 3 * 5 * 2)
    assert limit(Case(2, 4, 1), work, Rates(endless, 1.0, *[endless] * 4)) == computing[0]
    assert limit(Case(2, 4, 2), work, Rates(endless, 1.0, *[endless] * 4)) == sum(computing)
    for_eight = 2 * (150 * 8 + 70 * 2)
    assert (
        limit(Case(2, 4, 1), work, Rates(*[endless] * 2, 1.0, endless, 1.0, endless)) == for_eight
    )
    for_four = 2 * (50 * 8 + 30 * 2)
    assert limit(Case(2, 4, 1), work, Rates(*[endless] * 3, 1.0, endless, 1.0)) == for_four
    # A group takes what 32 of its products take, twice as long as without.
    scaled = for_eight + 64 * (5 * 8 + 7 * 2)
    assert limit(Case(2, 4, 1), work, Rates(*[endless] * 2, 1.0, endless, 0.5, endless)) == scaled
    scaled = for_four + 64 * (2 * 8 + 1 * 2)
    assert limit(Case(2, 4, 1), work, Rates(*[endless] * 3, 1.0, endless, 0.5)) == scaled


@pytest.mark.parametrize("bits", [8, 4])
def test_the_copy_for_a_peer_is_the_model_rounded(tmp_path: Path, bits: int) -> None:
    model = located(EngineConfig.from_options(model="quire-demo")).model
    write_rounded(Path(model.folder), tmp_path / "copy", bits)
    copy = EngineConfig.from_options(model=str(tmp_path / "copy"))
    shape = located(copy).model.read_shape()
    assert not shape.tie_word_embeddings
    how = SamplingParams(max_tokens=8, temperature=0)
    texts = []
    for folder in (model.folder, tmp_path / "copy"):
        with LLM(str(folder)) as llm:
            texts.append(llm.generate(["The capital of France is"], how)[0].outputs[0].text)
            forms = weight_forms(llm.llm_engine.core.executor.model)
    assert texts[0] == texts[1]
    layers = {form[:4]: total.layers for form, total in forms.items()}
    assert layers == ({"int8": 5 * 4 + 1} if bits == 8 else {"int4": 5 * 4, "int8": 1}), forms
