"""Blocks survive the way to the second tier and back, bit for bit; failures are named."""

from __future__ import annotations

import os

import pytest
import torch

from quire.errors import ConfigError
from quire.worker.kv_transfer import FileStore, KVTransfer, Moved, make_transfer

BLOCKS = 6


def caches(dtype):
    torch.manual_seed(0)
    wide = [torch.randn(BLOCKS, 4, 2, 8).to(dtype) for _ in range(3)]
    # Two layers of different groups share memory.
    return [(wide[0], wide[1]), (wide[0].view(BLOCKS, 4, 2, 8), wide[2])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_file", [False, True])
def test_there_and_back(tmp_path, dtype, in_file):
    kv = caches(dtype)
    before = [t.clone() for pair in kv for t in pair]
    transfer = make_transfer(kv, 3, str(tmp_path) if in_file else None)
    moved = Moved()
    transfer.move_out([(5, 0), (2, 2)], moved)
    for pair in kv:
        for tensor in pair:
            tensor.fill_(float("nan"))
    transfer.move_in([(2, 1), (0, 4)], moved)
    for now, then in zip((t for pair in kv for t in pair), before, strict=True):
        assert torch.equal(now[1], then[2])
        assert torch.equal(now[4], then[5])
        assert now[[0, 2, 3, 5]].isnan().all()
    assert (moved.unwritten, moved.unread) == ([], [])
    assert moved.seconds > 0
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_full_disk_is_told_once(caplog):
    store = FileStore([caches(torch.float32)[0][0]], os.open("/dev/full", os.O_RDWR))
    transfer, moved = KVTransfer(store), Moved()
    transfer.move_out([(1, 0), (2, 1)], moved)
    transfer.move_in([(1, 3), (2, 4)], moved)
    assert moved.unwritten == [0, 1]
    assert moved.unread == [3], "what was not written in this step cannot be read"
    assert len([r for r in caplog.records if "No space left on device" in r.message]) == 1


def test_a_short_file_cannot_be_read(tmp_path):
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    transfer, moved = KVTransfer(FileStore([caches(torch.float32)[0][0]], fd)), Moved()
    transfer.move_in([(3, 1)], moved)
    assert moved.unread == [1]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no file can be made there"):
        make_transfer(caches(torch.float32), 2, str(tmp_path / "nothing"))


def test_no_tier_no_transfer():
    assert make_transfer(caches(torch.float32), 0, None) is None
