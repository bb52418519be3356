"""Datasets: exact lengths with a real tokenizer, sharing, files good and bad."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.tokenizer.tokenizer import Tokenizer
from quire.workload.datasets import DATASETS, REFUSED, make_requests
from quire.workload.options import DatasetOptions
from quire.workload.trace import TraceRequest, write_trace


@pytest.fixture(scope="module")
def codec() -> Tokenizer:
    return Tokenizer.from_folder(Path(str(files("quire.assets") / "quire-demo")))


def count(codec: Tokenizer, text: object) -> int:
    assert isinstance(text, str)
    return len(codec.encode(text, add_special_tokens=False))


def made(codec: Any = None, **options: Any) -> list[Any]:
    return make_requests(DatasetOptions(**options), codec)


def test_random_prompts_have_the_lengths_that_were_asked_for(codec):
    requests = made(
        codec, num_prompts=150, random_input_len=100, random_output_len=40, random_range_ratio=0.5,
        random_prefix_len=20,
    )  # fmt: skip
    assert len(requests) == 150
    exact = sum(count(codec, r.prompt) == r.prompt_len for r in requests)
    assert exact == 150, "prompt_len is what the tokenizer counts"
    assert all(68 <= r.prompt_len <= 173 for r in requests)
    assert {r.output_len for r in requests} <= set(range(20, 61))
    assert len({r.prompt_len for r in requests}) > 30
    begins = {tuple(codec.encode(r.prompt, add_special_tokens=False)[:15]) for r in requests}
    assert len(begins) == 1, "all begin with the prefix"


def test_nearly_all_prompts_have_exactly_the_length(codec):
    requests = made(codec, num_prompts=200, random_input_len=128)
    assert sum(r.prompt_len == 128 for r in requests) > 190


def test_equal_options_make_equal_requests(codec):
    once, again = (made(codec, num_prompts=20, random_input_len=30, seed=4) for _ in range(2))
    assert once == again
    assert once != made(codec, num_prompts=20, random_input_len=30, seed=5)


def test_without_a_tokenizer_tokens_are_words():
    requests = made(num_prompts=5, random_input_len=12)
    assert all(len(r.prompt.split()) == 12 == r.prompt_len for r in requests)


def test_batches_for_pooling():
    requests = made(num_prompts=3, random_input_len=4, random_batch_size=5)
    assert [len(r.prompt) for r in requests] == [5, 5, 5]
    assert [r.prompt_len for r in requests] == [20, 20, 20]
    rerank = made(dataset_name="random-rerank", num_prompts=3, random_batch_size=4)
    assert [len(r.prompt) for r in rerank] == [5, 5, 5]


def test_prefixes_repeat(codec):
    requests = made(
        codec, dataset_name="prefix_repetition", num_prompts=30, prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=64, prefix_repetition_suffix_len=32, seed=1,
    )  # fmt: skip
    begins = [tuple(codec.encode(r.prompt, add_special_tokens=False)[:56]) for r in requests]
    assert sorted(begins.count(b) for b in set(begins)) == [7, 7, 8, 8]
    assert len({r.prompt for r in requests}) == 30
    with pytest.raises(ConfigError, match="must be at most --num-prompts .3., got 10"):
        made(dataset_name="prefix_repetition", num_prompts=3)


# ---- files ---------------------------------------------------------------------------------------


def written(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


def test_custom_lines(tmp_path, codec):
    path = written(
        tmp_path / "a.jsonl",
        {"prompt": "one", "output_tokens": 7, "priority": 3},
        "",
        {"messages": [{"role": "user", "content": "What is 23 + 45?"}], "output_tokens": 9},
    )
    how = {"dataset_name": "custom", "dataset_path": path, "disable_shuffle": True}
    requests = made(codec, **how, num_prompts=2, custom_output_len=-1)
    assert [(r.prompt, r.output_len, r.priority) for r in requests] == [
        ("one", 7, 3), ("What is 23 + 45?", 9, 0),
    ]  # fmt: skip
    assert requests[1].messages == [{"role": "user", "content": "What is 23 + 45?"}]
    assert [r.output_len for r in made(**how, num_prompts=2)] == [256, 256]
    assert len(made(**how, num_prompts=7)) == 7, "lines are used again"
    assert len(made(**how, num_prompts=7, no_oversample=True)) == 2


def test_lines_end_at_line_feeds_alone(tmp_path):
    texts = ["one\u2028two", "three\x85four\u2029", "five\x0c"]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(lines).encode())
    how = {"dataset_name": "custom", "dataset_path": str(path), "disable_shuffle": True}
    assert [r.prompt for r in made(**how, num_prompts=3)] == texts
    table = tmp_path / "a.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
    rows = '5,GPT-4,10,20,30,a\u2028b\r\n6,GPT-4,11,21,32,"c\nd"\r\n'
    table.write_bytes((head + rows).encode())
    found = made(dataset_name="burstgpt", dataset_path=str(table), num_prompts=2)
    assert [(r.arrival, r.output_len) for r in found] == [(0.0, 20), (1.0, 21)]


def test_bad_lines_are_told_with_their_numbers(tmp_path, caplog):
    path = written(
        tmp_path / "a.jsonl", {"prompt": "one"}, "{oops", {"text": "x"}, "", {"prompt": 5}, "[1]",
        {"prompt": "two"},
    )  # fmt: skip
    how = {"dataset_name": "custom", "dataset_path": path, "num_prompts": 2}
    with pytest.raises(ConfigError) as told:
        made(**how)
    for part in (path, "line 2: ", "line 3: 'prompt' is missing", "line 5: prompt must be a text",
                 "line 6: not a JSON object", "--bad-lines skip"):  # fmt: skip
        assert part in str(told.value)
    with caplog.at_level("WARNING"):
        assert sorted(r.prompt for r in made(**how, bad_lines="skip")) == ["one", "two"]
    assert "line 6" in caplog.text


def test_files_that_cannot_be_used(tmp_path):
    how = {"dataset_name": "custom"}
    with pytest.raises(ConfigError, match="cannot read .*nothing"):
        made(**how, dataset_path=str(tmp_path / "nothing"))
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigError) as told:
        made(dataset_name="sharegpt", dataset_path=missing)
    assert str(told.value).startswith(f"--dataset-path: cannot read {missing!r}: No such file")
    nested = tmp_path / "n.json"
    nested.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not a JSON file: .*recursion"):
        made(dataset_name="sharegpt", dataset_path=str(nested))
    with pytest.raises(ConfigError, match="no request in it"):
        made(**how, dataset_path=written(tmp_path / "e.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        made(**how, dataset_path=str(tmp_path / "b.jsonl"))
    with pytest.raises(ConfigError, match="give --dataset-path"):
        made(**how)
    with pytest.raises(ConfigError, match="random reads no file"):
        made(dataset_path="x")


def test_sharegpt(tmp_path, codec):
    def talk(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": turn} for turn in turns]}

    path = tmp_path / "s.json"
    good = talk("What is the capital of France, please?", "It is Paris, as everyone knows.")
    short, alone = talk("a", "The capital of France is Paris."), talk("only one turn")
    path.write_text(json.dumps([good, short, alone, talk("word " * 3000, "yes it is so")]))
    how = {"dataset_name": "sharegpt", "dataset_path": str(path), "num_prompts": 4}
    requests = made(codec, **how)
    assert {r.prompt for r in requests} == {"What is the capital of France, please?"}
    assert requests[0].output_len == len(codec.encode("It is Paris, as everyone knows."))
    assert made(codec, **how, sharegpt_output_len=3)[0].output_len == 3
    path.write_text(json.dumps([good, {"turns": []}]))
    with pytest.raises(ConfigError, match="conversation 2: 'conversations' is missing"):
        made(codec, **how)
    path.write_text("[")
    with pytest.raises(ConfigError, match="not a JSON file"):
        made(codec, **how)


def test_burstgpt(tmp_path):
    path = written(
        tmp_path / "b.csv", "Timestamp,Model,Request tokens,Response tokens",
        "100,GPT-4,20,5", "130,ChatGPT,9,9", "145.5,GPT-4,8,2", "150,GPT-4,8,0",
    )  # fmt: skip
    how = {"dataset_name": "burstgpt", "dataset_path": path, "num_prompts": 2}
    found = [(r.arrival, r.prompt_len, r.output_len) for r in made(**how)]
    assert found == [(0.0, 20, 5), (45.5, 8, 2)]
    written(tmp_path / "b.csv", "Timestamp,Model,Request tokens,Response tokens", "x,GPT-4,20,5")
    with pytest.raises(ConfigError, match="line 2: could not convert"):
        made(**how)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("column", [0, 2, 3])
def test_numbers_of_burstgpt_that_are_not_finite_are_bad_lines(number, column, tmp_path, caplog):
    bad = ["130", "GPT-4", "9", "9"]
    bad[column] = number
    path = written(
        tmp_path / "b.csv", "Timestamp,Model,Request tokens,Response tokens",
        "100,GPT-4,20,5", ",".join(bad), "145.5,GPT-4,8,2",
    )  # fmt: skip
    how = {"dataset_name": "burstgpt", "dataset_path": path, "num_prompts": 2}
    with pytest.raises(ConfigError, match="line 3: .*(nan|inf).*--bad-lines skip"):
        made(**how)
    with caplog.at_level("WARNING"):
        found = [(r.arrival, r.output_len) for r in made(**how, bad_lines="skip")]
    assert found == [(0.0, 5), (45.5, 2)] and "line 3" in caplog.text


def test_spec_bench(tmp_path):
    path = written(
        tmp_path / "q.jsonl", {"category": "math", "turns": ["one", "two"]},
        {"category": "qa", "turns": ["three"]},
    )  # fmt: skip
    how = {"dataset_name": "spec_bench", "dataset_path": path, "num_prompts": 1}
    assert made(**how, spec_bench_category="qa")[0].prompt == "three"


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_datasets_that_quire_lacks_say_what_to_use(name):
    with pytest.raises(ConfigError, match=f"--dataset-name {name}: .*: .*use"):
        made(dataset_name=name)


def test_unknown_datasets():
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        made(dataset_name="randon")
    assert all(callable(DATASETS.get(name)) for name in DATASETS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_prompts", 0), ("random_output_len", 0), ("random_range_ratio", 1),
        ("random_range_ratio", -0.1), ("prefix_repetition_num_prefixes", 0), ("input_len", 0),
        ("custom_output_len", -2), ("bad_lines", "drop"), ("synthetic_scale", 0), ("seed", -1),
        ("timed_trace_sec_multiplier", float("inf")),
    ],
)  # fmt: skip
def test_options_out_of_range_name_the_flag_and_the_value(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must .*{value}"):
        DatasetOptions(**{name: value})


# ---- traces and stand-ins ------------------------------------------------------------------------


def common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_a_mooncake_trace(tmp_path, codec):
    rows = [(2000, 40, 5, [1, 2, 3]), (1000, 48, 9, [1, 2, 4]), (4500, 20, 2, [7, 8])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = written(tmp_path / "t.jsonl", *(dict(zip(names, row, strict=True)) for row in rows))
    how = {"dataset_name": "timed_trace", "dataset_path": path, "num_prompts": 10}
    requests = made(codec, **how, timed_trace_sec_multiplier=0.001)
    assert [(r.arrival, r.output_len) for r in requests] == [(0.0, 9), (1.0, 5), (3.5, 2)]
    assert [r.prompt_len for r in requests] == [48, 40, 20]
    one, two, three = (codec.encode(r.prompt, add_special_tokens=False) for r in requests)
    assert one[:30] == two[:30], "two blocks of 16 tokens are shared, but for the seams"
    assert one[:4] != three[:4]
    assert len(made(codec, **{**how, "num_prompts": 1})) == 1
    with pytest.raises(ConfigError, match="line 1: 3 hash_ids of 512 .* here at least 14"):
        made(codec, **how, timed_trace_chunk_hash_size=512)
    bad = written(tmp_path / "u.jsonl", {"timestamp": 1, "input_length": 0, "output_length": 1})
    with pytest.raises(ConfigError, match="line 1: .*input_length 0"):
        made(dataset_name="timed_trace", dataset_path=bad)
    with pytest.raises(ConfigError, match="cannot read"):
        made(dataset_name="timed_trace", dataset_path=str(tmp_path / "none"))
    good = {"timestamp": 1, "input_length": 5, "output_length": 1}
    for changes, problem in (
        ({"hash_ids": [[1]]}, "hash_ids must be a list of numbers or texts"),
        ({"hash_ids": 3}, "hash_ids must be a list of numbers or texts"),
        ({"input_length": 99999999999}, "input_length must be at most 10,000,000"),
        ({"input_length": float("inf")}, "infinity"),
        ({"timestamp": 10**400}, "too large"),
    ):
        bad = written(tmp_path / "v.jsonl", good, good | changes)
        with pytest.raises(ConfigError, match=f"line 2: .*{problem}"):
            made(dataset_name="timed_trace", dataset_path=bad)


def test_no_text_is_made_up_for_a_prompt_beyond_all_models(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.workload.timed.MOST_TOKENS", 40)
    write_trace(tmp_path / "t.jsonl", [TraceRequest(0.0, 33, 8)])
    with pytest.raises(ConfigError, match="a request of 41 tokens"):
        made(dataset_name="timed_trace", dataset_path=str(tmp_path / "t.jsonl"))


def test_a_trace_of_our_own(tmp_path, codec):
    path = tmp_path / "t.jsonl"
    lines = [
        TraceRequest(3.0, 40, 8, number=1, priority=2, params={"temperature": 0.5}),
        TraceRequest(5.0, 60, 4, shared_with=1, shared_len=48),
        TraceRequest(6.0, 32, 1, block_hashes=["a", "b"]),
        TraceRequest(7.0, 33, 0, block_hashes=["a", "b"]),
    ]
    write_trace(path, lines)
    how = {"dataset_name": "timed_trace", "dataset_path": str(path), "num_prompts": 10}
    requests = made(codec, **how)
    assert [(r.arrival, r.prompt_len, r.output_len) for r in requests] == [
        (0.0, 40, 8), (2.0, 60, 4), (3.0, 32, 1), (4.0, 33, 1),
    ]  # fmt: skip
    assert requests[0].priority == 2
    assert requests[0].extra == {"temperature": 0.5, "ignore_eos": True}
    texts = [r.prompt for r in requests]
    ids = [codec.encode(text, add_special_tokens=False) for text in texts]
    assert ids[0][:38] == ids[1][:38] and ids[2][:30] == ids[3][:30]
    path.write_text('{"format": "quire-trace", "version": 2}\n')
    with pytest.raises(ConfigError, match="version 2, and this quire reads version 1"):
        made(codec, **how)


SHAPES = {
    # name: (least and most mean prompt, of the output, least share of prompts that is shared)
    "synthetic-sharegpt": (120, 230, 130, 260, 0.0),
    "synthetic-chat": (150, 900, 180, 330, 0.5),
    "synthetic-code": (900, 2200, 10, 40, 0.8),
    "synthetic-rag": (1300, 2400, 110, 200, 0.04),
    "synthetic-agents": (4000, 9000, 100, 220, 0.8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_stand_ins_have_their_shape(name):
    least_in, most_in, least_out, most_out, shared = SHAPES[name]
    requests = made(dataset_name=name, num_prompts=240, seed=3)
    assert len(requests) == 240
    total = sum(r.prompt_len for r in requests)
    assert least_in < total / 240 < most_in
    assert least_out < sum(r.output_len for r in requests) / 240 < most_out
    assert sum(r.shared_prefix for r in requests) / total >= shared
    small = made(dataset_name=name, num_prompts=60, synthetic_scale=0.1)
    assert sum(r.prompt_len for r in small) / 60 < total / 240 / 5
    fixed = made(dataset_name=name, num_prompts=20, output_len=7)
    assert {r.output_len for r in fixed} == {7}


def test_what_stand_ins_share_is_really_there(codec):
    requests = made(codec, dataset_name="synthetic-agents", num_prompts=40, synthetic_scale=0.05)
    for i, request in enumerate(requests[4:], 4):
        best = max(common(request.prompt, other.prompt) for other in requests[:i])
        ids = codec.encode(request.prompt[:best], add_special_tokens=False)
        assert len(ids) > 0.9 * request.shared_prefix * 0.4, "the tools and most of the history"


def test_lists_say_what_is_made_up():
    assert sum(name.startswith("synthetic-") for name in DATASETS) == 5
