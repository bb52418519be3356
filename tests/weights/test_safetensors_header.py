"""Our reader of safetensors headers: agrees with the library, and survives any bytes."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from quire.checkpoint.safetensors import MAX_HEADER, read_header
from quire.errors import ModelLoadError


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "a": torch.zeros(4),
        "c": torch.tensor(3.0),
        "d": torch.zeros(0, 5, dtype=torch.int64),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_it_says_what_the_library_says(good: Path) -> None:
    header = read_header(good)
    with safe_open(good, framework="pt") as file:
        assert set(header) == set(file.keys())
        for name, entry in header.items():
            tensor = file.get_tensor(name)
            assert entry.shape == tuple(tensor.shape)
            assert (entry.numel, entry.nbytes) == (tensor.numel(), tensor.nbytes)
            raw = good.read_bytes()[entry.begin : entry.begin + entry.nbytes]
            assert raw == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert [entry.begin for entry in header.values()] == sorted(e.begin for e in header.values())


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 5000, "not JSON"),
        ([], "not a JSON object"),
        ({"x": 1}, "does not describe tensor 'x'"),
        ({"x": {**ENTRY, "dtype": "F31"}}, "unknown type 'F31'"),
        ({"x": {**ENTRY, "dtype": ["F32"]}}, "unknown type"),
        ({"x": {**ENTRY, "shape": [-2]}}, "impossible shape [-2]"),
        ({"x": {**ENTRY, "shape": [2.0]}}, "impossible shape"),
        ({"x": {**ENTRY, "shape": [1] * 9}}, "impossible shape"),
        ({"x": {**ENTRY, "shape": [2**62, 2**62]}}, "cannot have 8 bytes"),
        ({"x": {**ENTRY, "data_offsets": [8, 0]}}, "impossible data_offsets"),
        ({"x": {**ENTRY, "data_offsets": [0]}}, "impossible data_offsets"),
        ({"x": {**ENTRY, "data_offsets": [8, 16]}}, "begins at byte"),
        ({"x": ENTRY, "y": ENTRY}, "begins at byte"),
        ({"x": {**ENTRY, "shape": [4], "data_offsets": [0, 16]}}, "its tensors end at byte"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"F32","shape":[2],'
         b'"data_offsets":[0,8]}}', "a name twice"),
        ({}, "its tensors end at byte"),
    ],
    ids=str,
)  # fmt: skip
def test_headers_that_are_wrong(tmp_path: Path, header: Any, words: str) -> None:
    path = written(tmp_path / "m.safetensors", header, bytes(8))
    with pytest.raises(ModelLoadError) as caught:
        read_header(path)
    assert words in caught.value.message and str(path) in caught.value.message
    assert "cut short" in caught.value.message


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**40, 2**63, 2**64 - 1])
def test_an_absurd_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + bytes(100))
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match="the header should have"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_header_over_the_limit_is_refused_though_the_file_is_large(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER)  # sparse: takes no room
    with pytest.raises(ModelLoadError, match=f"more than the {MAX_HEADER} allowed"):
        read_header(path)


def test_a_folder_or_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
            read_header(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "F6_E2M3", "X"]) | values,
        "shape": st.lists(st.integers(-1, 2**70), max_size=4) | values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | values,
    }
)


@given(st.binary(max_size=200) | st.builds(
    lambda h, d: len(t := json.dumps(h).encode()).to_bytes(8, "little") + t + d,
    st.dictionaries(st.text(max_size=4), entries | values, max_size=3) | values,
    st.binary(max_size=40),
))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_header_or_one_error(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(data)
    try:
        header = read_header(path)
    except ModelLoadError:
        return
    assert sum(entry.nbytes for entry in header.values()) <= len(data)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_changed_good_file_never_crashes(tmp_path_factory: Any, data: st.DataObject) -> None:
    base = tmp_path_factory.getbasetemp() / "good.safetensors"
    if not base.exists():
        save_file({"a": torch.zeros(4), "bb": torch.zeros(2, 3)}, base)
    raw = bytearray(base.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = base.with_name("changed.safetensors")
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        read_header(path)
    except ModelLoadError as error:
        assert len(error.message) < 1000
