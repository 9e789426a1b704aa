"""Pieces of large mappings: apart, aligned, alive as long as they are used."""

import gc

import torch

from kernels.cpu.memory import Arena


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
