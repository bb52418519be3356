"""The fuzz tests are tested: each defect below is put into a copy of the source, and the case named
beside it, one of the short run, must fail; `None`: any of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MUTANTS = {
    "counts go into the array that was too small": (
        "sampling/counts.py",
        "place = self._place_of(token)  # first: it may put a larger array in place\n"
        "                self._counts[place] += 1.0",
        "self._counts[self._place_of(token)] += 1.0",
        "test_sampling.py::test_large_vocabularies",
        0,
    ),
    "counts begin anew with a larger array": (
        "sampling/counts.py",
        "np.concatenate((self._counts, np.zeros_like(self._counts)))",
        "np.zeros(2 * len(self._counts), dtype=np.float32)",
        "test_sampling.py::test_real_logits",
        2,
    ),
    "a frequency counts as a presence": (
        "sampling/penalties.py",
        "-= penalty * counts\n",
        "-= penalty * (counts > 0)\n",
        "test_sampling.py::test_large_vocabularies",
        5,
    ),
    "the prompt counts as output": (
        "sampling/counts.py",
        "self._counts = np.zeros(len(self._ids), dtype=np.float32)",
        "self._counts = np.ones(len(self._ids), dtype=np.float32)",
        "test_sampling.py::test_large_vocabularies",
        3,
    ),
    "stop ids are masked for one token too long": (
        "sampling/processors.py",
        "< meta.requests[row].params.min_tokens",
        "<= meta.requests[row].params.min_tokens",
        "test_sampling.py::test_large_vocabularies",
        1,
    ),
    "a banned word needs one token more": (
        "sampling/processors.py",
        "if length <= len(output):",
        "if length < len(output):",
        "test_sampling.py::test_large_vocabularies",
        25,
    ),
    "random numbers do not know their position": (
        "sampling/sampler.py",
        "positions = np.array([len(output) for output in meta.outputs], dtype=np.int64)",
        "positions = np.array([0 for output in meta.outputs], dtype=np.int64)",
        "test_sampling.py::test_large_vocabularies",
        0,
    ),
    "log-probabilities are those of changed logits": (
        "sampling/sampler.py",
        "        raw_logprobs,\n        to_float32,\n        allowed_token_ids,",
        "        to_float32,\n        allowed_token_ids,\n        raw_logprobs,",
        "test_sampling.py::test_large_vocabularies",
        0,
    ),
    "prompts of one request share a stream": (
        "serving/submission.py",
        "with_seed(prompt_seed(streams[0].seed, len(streams)))",
        "with_seed(streams[0].seed)",
        "test_streams.py::test_equal_prompts_of_one_request_differ",
        0,
    ),
    "a stop string is sought in new text only": (
        "tokenizer/detokenizer.py",
        "self.text.find(stop, max(0, self._searched - len(stop) + 1))",
        "self.text.find(stop, self._searched)",
        "test_streams.py::test_outputs_of_every_kind_join_to_the_same",
        5,
    ),
    "a stop string may be streamed": (
        "tokenizer/detokenizer.py",
        "max(map(len, self._stops)) - 1 if held else 0",
        "max(map(len, self._stops)) - 2 if held else 0",
        "test_streams.py::test_outputs_of_every_kind_join_to_the_same",
        63,
    ),
    "a block stays registered though its step failed": (
        "core/kv/pool.py",
        "if block.origin is not None and block.origin.ready_at <= step + 1:",
        "if block.origin is not None:",
        "test_step.py::test_a_step_left_at_any_statement_has_not_happened",
        None,  # which statements a case leaves follows from the source, this change included
    ),
    "what a step computes can be copied in it": (
        "core/kv/pool.py",
        "if origin.ready_at <= self.step:",
        "if True:",
        "test_mixes.py::test_together_as_alone",
        1,
    ),
}
"""Name: file under src/quire, what stands there, the defect, the test, the number of its case.
Where a change of the cases makes a mutant pass, take the number of another case that it fails."""

RUN_COPIES = """
import os, sys
import httpx, numpy, pytest, tokenizers, torch  # once: most of what a run of one case costs
# An editable install names its own source tree before PYTHONPATH is asked.
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
for line in sys.stdin:
    source, number, test, log = line.split()
    child = os.fork()
    if not child:
        os.environ["PYTHONPATH"] = source
        if number != "None":
            os.environ["QUIRE_FUZZ_SEED"] = number
        sys.path.insert(0, source)
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "tests/fuzz/" + test]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs a case on each copy of the source that it is told, in a process of its own."""


def copied_source(folder: Path) -> Path:
    """The source as it is, compiled files too, without copying models."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("assets"))
    (folder / "src/quire/assets").symlink_to(ROOT / "src/quire/assets", target_is_directory=True)
    return folder / "src"


class Runner:
    """Runs cases on copies of the source, one after the other."""

    def __init__(self) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_FUZZ")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN_COPIES],
            cwd=ROOT, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, source: Path, number: int | None, test: str) -> tuple[int, str]:
        """Pytest's exit code and what it said of a case, or of all up to the first that fails."""
        log = source / "log"
        assert self._process.stdin is not None and self._process.stdout is not None
        print(source, number, test, log, file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return code, log.read_text("utf-8", "replace")

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate("")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, runner: Runner, tmp_path: Path) -> None:
    file, right, wrong, test, number = MUTANTS[name]
    source = copied_source(tmp_path)
    text = (source / "quire" / file).read_text("utf-8")
    assert text.count(right) == 1, f"{right!r} must stand once in {file}"
    (source / "quire" / file).write_text(text.replace(right, wrong), "utf-8")
    code, said = runner.run(source, number, test)
    assert code == 1 and "1 failed" in said, f"nothing noticed that {name}\n{said[-800:]}"


def test_a_copy_without_a_mutant_passes(runner: Runner, tmp_path: Path) -> None:
    """The copies are whole, and it is they that run."""
    source = copied_source(tmp_path)
    test = "test_sampling.py::test_large_vocabularies"
    code, said = runner.run(source, 0, test)
    assert code == 0 and "1 passed" in said, said[-800:]
    (source / "quire/sampling/counts.py").unlink()
    assert runner.run(source, 0, test)[0] not in (0, 1)
