"""The format of a journal file: whatever happens to it, nothing is read that was not written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.disk.cipher import file_cipher
from quire.engine.frontend.disk.records import (
    HEADER_BYTES,
    MARK,
    VERSION,
    Damage,
    Header,
    Kind,
    Record,
    encode,
    scan,
)
from quire.engine.frontend.disk.stored import StoredOutput, read_file
from quire.errors import StartupError
from quire.outputs import FinishReason

KEY = bytes(range(32))
Plain = tuple[Kind, int, int, bytes]
RECORDS = st.lists(
    st.tuples(
        st.sampled_from(Kind),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        # Payloads that hold marks look like records from the outside.
        st.one_of(st.binary(max_size=80), st.just(MARK), st.just(MARK * 20)),
    ),
    max_size=12,
    unique_by=lambda one: one[1:3],
)


def written(rows: list[Plain], header: Header) -> bytes:
    cipher = file_cipher(KEY, header) if header.encrypted else None
    return header.encode() + b"".join(encode(Record(*row), header, cipher) for row in rows)


def read(data: bytes) -> tuple[list[Plain], Damage]:
    header, damage = Header.decode(data), Damage()
    cipher = file_cipher(KEY, header) if header.encrypted else None
    found = [(r.kind, r.stream, r.place, r.payload) for r in scan(data, header, damage, cipher)]
    return found, damage


def is_part(found: list[Plain], rows: list[Plain]) -> bool:
    """Whether `found` is `rows` with some left out."""
    rest = iter(rows)
    return all(one in rest for one in found)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.booleans())
def test_what_is_written_is_read(rows: list[Plain], encrypted: bool) -> None:
    found, damage = read(written(rows, Header.new(encrypted)))
    assert found == rows
    assert damage == Damage()


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.booleans(), st.data())
def test_a_torn_end_loses_no_more_than_the_record_it_tears(
    rows: list[Plain], encrypted: bool, data: st.DataObject
) -> None:
    header = Header.new(encrypted)
    whole = written(rows, header)
    cut = data.draw(st.integers(HEADER_BYTES, len(whole)))
    found, damage = read(whole[:cut])
    assert found == rows[: len(found)]
    assert len(written(rows[: len(found) + 1], header)) > cut or found == rows
    assert damage.num_bytes == 0


@settings(max_examples=500, deadline=None)
@given(RECORDS, st.booleans(), st.data())
def test_a_flipped_bit_changes_nothing_that_is_read(
    rows: list[Plain], encrypted: bool, data: st.DataObject
) -> None:
    whole = bytearray(written(rows, Header.new(encrypted)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(HEADER_BYTES, max(HEADER_BYTES, len(whole) - 1)))
        if at < len(whole):
            whole[at] ^= 1 << data.draw(st.integers(0, 7))
    found, _ = read(bytes(whole))
    assert is_part(found, rows)
    assert len(found) >= len(rows) - 4, "each flip costs the record it is in, and no other"


@settings(max_examples=200, deadline=None)
@given(RECORDS, st.binary(max_size=200), st.data())
def test_rubbish_in_the_middle_is_skipped(
    rows: list[Plain], rubbish: bytes, data: st.DataObject
) -> None:
    header = Header.new(False)
    at = data.draw(st.integers(0, len(rows)))
    head, tail = written(rows[:at], header), written(rows[at:], header)[HEADER_BYTES:]
    found, damage = read(head + rubbish + tail)
    assert found == rows
    assert damage.num_bytes + damage.torn_bytes == len(rubbish)


def test_records_of_another_file_are_not_read() -> None:
    """A block of another journal, as a file system may show after a crash."""
    rows: list[Plain] = [(Kind.STEP, 1, place, b"tokens") for place in range(3)]
    mine, other = written(rows, Header.new(False)), written(rows, Header.new(False))
    assert read(mine + other[HEADER_BYTES:])[0] == rows


def test_an_encrypted_file_shows_nothing(tmp_path: Path) -> None:
    secret = b"xylophonic-marmalade"
    whole = written([(Kind.OPEN, 1, 0, secret)], Header.new(True))
    assert secret not in whole
    path = tmp_path / "x.journal"
    path.write_bytes(whole)
    with pytest.raises(StartupError, match="is encrypted: give --journal-key-file"):
        read_file(path, None)
    with pytest.raises(StartupError, match="another key"):
        read_file(path, bytes(32))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"something else entirely, and long enough for a header", "not a journal"),
        (b"QUIREJNL", "ends within its header"),
        (
            Header.new(False).encode().replace(VERSION.to_bytes(2, "little"), b"\x63\0", 1),
            "its format is 99, and this version of quire reads 1",
        ),
    ],
    ids=["another file", "half a header", "another version"],
)
def test_other_files_are_refused_with_a_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "x.journal"
    path.write_bytes(data)
    with pytest.raises(StartupError, match=words):
        read_file(path, None)
    assert path.read_bytes() == data


def test_outputs_come_back_without_times() -> None:
    rng = random.Random(4)
    for _ in range(200):
        scores = [TokenLogprobs([3, 4], [rng.gauss(0, 9), -0.1], 2)]
        output = EngineCoreOutput(
            "a",
            [rng.randrange(9)],
            new_logprobs=rng.choice([None, scores]),
            finish_reason=rng.choice([None, FinishReason.STOP]),
            stop_reason=rng.choice([None, "x", 7]),
            num_cached_tokens=rng.choice([0, 16]),
            queued_ts=rng.choice([0.0, 5.5]),
        )
        stored = StoredOutput.of(0, 1, output)
        expected = EngineCoreOutput(*[getattr(output, f) for f in output.__struct_fields__])
        expected.request_id, expected.queued_ts = "b", 0.0
        assert stored.output("b") == expected
