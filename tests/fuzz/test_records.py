"""Files that commands wrote and others read, with random damage: traces, results, step times. Every
command reads them, or says in one line what is wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fuzz_kit import cases
from hostile import damage
from quire import LLM, SamplingParams
from quire.bench.result import detailed, summary
from quire.cli import main as cli
from quire.sim.step_time import StepTimeModel
from test_result import random_record

COMMANDS: dict[str, tuple[str, ...]] = {
    # {0}: the damaged file; the others are good
    "trace.jsonl": (
        "simulate --trace {0} --step-times {times.json}",
        "simulate --trace {0} --pace recorded",
        "replay {0}",
        "calibrate --from {0} --out {out}",
    ),
    "times.json": (
        "simulate --trace {trace.jsonl} --step-times {0}",
        "plan quire-demo --users 2 --step-times {0}",
    ),
    "result.json": (
        "bench compare {result.json} {0}",
        "bench compare {0} {0} --report {out}",
    ),
}
TIMES = StepTimeModel(1e-4, (1e-5,) * 14, spread=(0.5, 1.0, 1.5), spells=((1.0, 1.1), (1.2, 0.9)))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good file of each kind."""
    folder = tmp_path_factory.mktemp("good")
    with LLM("quire-demo", max_model_len=256, record=str(folder / "trace.jsonl")) as llm:
        prompts = [*["What is 23 + 45?"] * 4, "Hello", "Once upon a time"]
        llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    TIMES.write(folder / "times.json")
    rng = random.Random(1)
    records = [random_record(rng) for _ in range(30)]
    result = summary(records, 9.0) | detailed(records) | {"num_prompts": 30}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def damaged(rng: random.Random, text: str) -> tuple[bytes, list[str]]:
    """The file with one or two values or bytes changed, and which."""
    lines: list[Any] = [json.loads(line) for line in text.splitlines()]
    done = [damage(rng, lines[rng.choice([0, -1, rng.randrange(len(lines))])] or [0])]
    if rng.random() < 0.5:
        done.append(damage(rng, lines[0] or [0]))
    data = bytearray("\n".join(map(json.dumps, lines)).encode())
    if rng.random() < 0.2:
        start = rng.randrange(len(data))
        data[start : start + rng.randrange(40)] = bytes([rng.randrange(256)])
        done.append(f"bytes from {start}")
    return bytes(data), done


@cases(20)
def test_damage_is_told_in_one_line(
    rng: random.Random, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, commands in COMMANDS.items():
        text = (good / name).read_text()
        if name != "trace.jsonl":
            text = json.dumps(json.loads(text))
        for command in commands:
            data, done = damaged(rng, text)
            (tmp_path / name).write_bytes(data)
            words = [filled(word, tmp_path / name, good, tmp_path) for word in command.split()]
            code = told(words, done)
            said = capsys.readouterr().err.strip().splitlines()
            assert code in (0, 1, 2) and "Traceback" not in "\n".join(said), (command, done)
            assert code != 2 or said, (command, done)


def filled(word: str, damaged_file: Path, good: Path, out: Path) -> str:
    """A word of a command with the names of files in it."""
    if word == "{0}":
        return str(damaged_file)
    inside = word.removeprefix("{").removesuffix("}")
    return word if inside == word else str(out / "out") if inside == "out" else str(good / inside)


def told(words: list[str], done: list[str]) -> int:
    """The exit code of a command; whatever it raises is an error of ours."""
    try:
        return cli.main(words)
    except SystemExit as left:
        return int(left.code or 0)
    except Exception as error:
        raise AssertionError(f"{words}: {done}") from error
