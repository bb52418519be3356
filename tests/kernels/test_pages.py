"""Memory on large pages: zeros, pieces that do not overlap, and the end of a slab's life."""

import weakref

import pytest
import torch

from quire.kernels.pages import LARGE_PAGE, Slabs, large_pages


@pytest.mark.parametrize("size", [0, 1, 4095, LARGE_PAGE - 1, LARGE_PAGE, 3 * LARGE_PAGE + 5])
def test_zeros_of_any_size(size):
    memory = large_pages(size)
    assert memory.shape == (size,) and memory.dtype == torch.uint8
    assert not memory.any()
    memory.fill_(1)


@pytest.mark.parametrize("size", [LARGE_PAGE, 5 * LARGE_PAGE + 1])
def test_they_begin_with_a_large_page(size):
    assert large_pages(size).data_ptr() % LARGE_PAGE == 0


def test_pieces_begin_with_a_line_and_do_not_overlap():
    slabs = Slabs()
    pieces = [slabs.take(size) for size in (100, 64, 70 << 20, 1, 63 << 20, 2 << 20)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))


def test_what_inference_mode_began_can_be_written_outside_of_it():
    slabs = Slabs()
    with torch.inference_mode():
        first, whole = slabs.take(100), large_pages(100)
    for piece in (first, slabs.take(100), whole):
        piece.zero_()


def test_small_pieces_lie_side_by_side():
    slabs = Slabs()
    first, second = slabs.take(100), slabs.take(100)
    assert second.data_ptr() == first.data_ptr() + 128


def test_a_slab_goes_with_its_last_piece():
    slabs = Slabs()
    piece = slabs.take(10)
    slab = weakref.ref(piece.untyped_storage())
    slabs.take(65 << 20)  # begins another slab
    assert slab()
    storage = piece.untyped_storage()
    assert storage.nbytes() >= 64 << 20
    del piece, storage
    gone = slab() is None  # a failing comparison would print 64 MiB
    assert gone
