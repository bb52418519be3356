"""Benchmarks of repeated prompts, priorities and structured outputs."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from quire import LLM, SamplingParams
from quire.bench.offline.options import LongDocumentOptions, PrefixCachingOptions
from quire.bench.offline.repeats import document_jobs, prefix_jobs, repeated
from quire.bench.result import RequestRecord
from quire.cli import main as cli
from quire.cli.benches.prioritization import waits
from quire.cli.benches.structured_output import correctness
from quire.errors import ConfigError
from quire.params import StructuredOutputsParams
from quire.workload.structured import FIELD, KINDS, matches_schema, structured_requests


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_orders_of_repetition():
    assert repeated("ab", 2, "tile", 0) == ["a", "b", "a", "b"]
    assert repeated("ab", 2, "interleave", 0) == ["a", "a", "b", "b"]
    mixed = repeated(range(20), 3, "random", 1)
    assert Counter(mixed) == dict.fromkeys(range(20), 3) and mixed != sorted(mixed)
    assert mixed == repeated(range(20), 3, "random", 1) != repeated(range(20), 3, "random", 2)


def test_prompts_share_their_prefix_and_nothing_else():
    options = PrefixCachingOptions(
        num_prompts=9, repeat_count=2, prefix_len=50, input_length_range="60:90", sort=True
    )
    jobs = prefix_jobs(options, 2048)
    assert len(jobs) == 18 and jobs[:9] == jobs[9:]
    assert [j.prompt_len for j in jobs[:9]] == sorted(len(j.prompt) for j in jobs[:9])
    assert all(60 <= len(j.prompt) <= 90 for j in jobs)
    assert len({tuple(j.prompt[:50]) for j in jobs}) == 1
    assert len({tuple(j.prompt[:51]) for j in jobs}) > 5


def test_documents_differ_from_their_beginning():
    jobs = document_jobs(LongDocumentOptions(4, 100, 5, 3, "tile"), 2048)
    assert len(jobs) == 12 and len({tuple(j.prompt[:8]) for j in jobs}) == 4


def test_hits_are_counted(capsys, tmp_path):
    """In turns, each document but the first time is found whole, save its last token."""
    path = tmp_path / "qa.json"
    code, out, _ = run(
        capsys, "long-document-qa", "--num-documents", "3", "--document-length", "160",
        "--repeat-count", "4", "--repeat-mode", "tile", "--max-num-seqs", "1",
        "--output-json", str(path),
    )  # fmt: skip
    result = json.loads(path.read_text())
    assert code == 0 and out.startswith("Time to execute all requests: ")
    assert result["prefix_queries"] == 12 * 160 and result["prefix_hits"] == 9 * 159
    code, out, _ = run(
        capsys, "prefix-caching", "--num-prompts", "3", "--no-enable-prefix-caching",
        "--output-json", str(path),
    )  # fmt: skip
    assert code == 0 and out.startswith("Cost time ")
    assert json.loads(path.read_text())["prefix_hits"] == 0


def test_urgent_requests_come_first(capsys, tmp_path):
    path = tmp_path / "priorities.json"
    code, out, _ = run(
        capsys, "prioritization", "--num-prompts", "24", "--input-len", "16", "--output-len", "4",
        "--max-num-seqs", "1", "--output-json", str(path),
    )  # fmt: skip
    result = json.loads(path.read_text())["mean_ttft_ms_by_priority"]
    assert code == 0 and out.startswith("Throughput: ") and result["0"] < result["1"]


def test_waits_by_priority():
    records = [RequestRecord(0.0, 1, 1, t, [], t, priority=p) for p, t in ((0, 1), (0, 3), (1, 5))]
    failed = RequestRecord(0.0, 1, error="no", priority=1)
    assert waits([*records, failed]) == {"0": 2000, "1": 5000}


@pytest.mark.parametrize("kind", list(KINDS))
def test_structured_replies_of_the_engine_are_correct(kind):
    requests, checkers = structured_requests(kind, 4, 120, 1.0, 0)
    params = [
        SamplingParams(
            temperature=1, seed=1, max_tokens=120,
            structured_outputs=StructuredOutputsParams(**r.extra[FIELD]),
        )
        for r in requests
    ]  # fmt: skip
    with LLM(num_gpu_blocks_override=400) as llm:
        outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=False)
    texts = [o.outputs[0].text for o in outputs]
    assert correctness(texts, checkers)["correct"] == 4
    assert correctness([t[:-1] for t in texts], checkers)["correct"] == 0
    assert correctness(["no such thing"] * 4, checkers)["correct"] == 0


def test_schemas_are_checked():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
    }
    good, bad = [{"n": 0}, {"n": 9}], [{}, {"n": 10}, {"n": -1}, {"n": True}, {"n": 1, "m": 1}, []]
    assert all(matches_schema(v, schema) for v in good)
    assert not any(matches_schema(v, schema) for v in bad)


def test_some_requests_ask_for_nothing():
    requests, checkers = structured_requests("regex", 10, 5, 0.3, 1)
    assert [FIELD in r.extra for r in requests] == [c is not None for c in checkers]
    assert sum(c is not None for c in checkers) == 3
    assert correctness(["x"] * 10, checkers) == {"checked": 3, "correct": 0, "correct_rate": 0}
    assert correctness([None], [str]) == {"checked": 0, "correct": 0, "correct_rate": None}


BAD = [
    (("prefix-caching", "--input-length-range", "9:8"), "got '9:8'"),
    (("prefix-caching", "--prefix-len", "200"), "at least 1 and --prefix-len 200"),
    (("prefix-caching", "--repeat-count", "0"), "--repeat-count must be at least 1, got 0"),
    (("long-document-qa",), "more than the context of 2048"),
    (("long-document-qa", "--repeat-mode", "x"), "tile or interleave, got 'x'"),
    (("prioritization", "--backend", "hf"), "--backend must be vllm (this engine), got 'hf'"),
    (("structured-output", "--dataset", "xml"), "--dataset must be one of json"),
    (("structured-output", "--structured-output-ratio", "2"), "must be in [0, 1], got 2"),
    (("structured-output", "--port", "1"), "cannot reach http://127.0.0.1:1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_clear_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code in (1, 2) and out == ""
    assert message in err.strip().splitlines()[-1]


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="must be one of"):
        structured_requests("x", 1, 1, 1.0, 0)
