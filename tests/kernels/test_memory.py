"""Pieces of large mappings: apart, aligned, alive as long as they are used."""

import gc

import torch

from kernels.cpu.memory import Arena, Recycler


def test_pieces_do_not_overlap_and_outlive_the_arena() -> None:
    arena = Arena()
    sizes = [(3, 5), (1,), (1 << 22,), (1 << 27,), (7, 1)]  # the fourth is larger than a mapping
    pieces = [arena.zeros(size, torch.bfloat16) for size in sizes]
    for value, piece in enumerate(pieces, start=1):
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(value)
    del arena
    gc.collect()
    for value, (size, piece) in enumerate(zip(sizes, pieces, strict=True), start=1):
        assert piece.shape == size
        assert bool((piece == value).all())


def test_the_memory_of_a_large_result_is_used_again_and_never_while_anything_refers_to_it() -> None:
    recycler = Recycler()
    first = recycler.empty((128, 49152), torch.float32)
    row, place = first[5], first.data_ptr()
    row.fill_(7.0)
    del first
    second = recycler.empty((128, 49152), torch.float32)
    second.fill_(1.0)
    assert second.data_ptr() != place
    assert bool((row == 7.0).all())
    del row, second
    third, fourth = (recycler.empty((100, 49152), torch.float32) for _ in range(2))
    assert place in (third.data_ptr(), fourth.data_ptr())
    assert third.data_ptr() != fourth.data_ptr()


def test_results_of_every_shape_and_type_are_whole() -> None:
    recycler = Recycler()
    for shape, dtype in [((3, 1 << 20), torch.bfloat16), ((1 << 20, 2), torch.float32)]:
        tensor = recycler.empty(shape, dtype)
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        tensor.copy_(torch.arange(tensor.numel()).view(shape) % 251)
        assert int(tensor[-1, -1]) == (tensor.numel() - 1) % 251


def test_memory_stays_flat_where_results_of_passes_come_between_blocks_that_stay() -> None:
    recycler, kept, rows = Recycler(), list[torch.Tensor](), [128, 127, 121]
    mappings = set[int]()
    for index in range(60):
        logits = recycler.empty((rows[index % 3], 49152), torch.float32)
        mappings.add(logits.data_ptr())
        kept.append(torch.empty(100, 576))
        del logits
    assert len(mappings) == 1
