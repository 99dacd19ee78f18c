"""Sizes of the GPU's benchmarks. Pure, so that they can be looked at without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KIB = 1 << 10
RUN_NBYTES = 8 * KIB  # of one block of one (layer, part): 16 tokens x 2 heads x 128 of bf16
HEADS, MOST_DIM, ITEMSIZE = 2, 128, 2


class Shape(NamedTuple):
    """A block of one (layer, part), in elements of bf16."""

    tokens: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Scale:
    """How large a run of the benchmarks is.

    Attributes:
        layers: of every cache, each of K and V.
        medium, large: blocks of the two whole transfers; pools hold ``large`` blocks.
        kernel_runs, pitched_runs, engine_runs: bytes of the runs of each path's table.
        programs: Triton programs of the kernel's loads.
        frontier_programs: choices for the throttling of stores.
        repeats: of each whole transfer; medians are taken.
        loop_runs: single copies of the baseline that issues one for each run.
        submits: (blocks, repeats) of the submits whose CPU time is taken.
        small: blocks of the small transfers.
        small_repeats: of each.
        rounds: turns that all cases beside compute take.
        warm, alone: iterations of compute before the first that counts, and those that count without a transfer.
        transfers, seconds: each window beside compute has at least these transfers and lasts at least this long.
        features, weights, decode_rounds: an iteration of decode multiplies a batch of 64 by ``weights`` square bf16
            matrices of ``features``, ``decode_rounds`` times over.
        prefill_tokens: rows of the one product of an iteration of prefill.
    """

    layers: int
    medium: int
    large: int
    kernel_runs: tuple[int, ...]
    pitched_runs: tuple[int, ...]
    engine_runs: tuple[int, ...]
    programs: tuple[int, ...]
    frontier_programs: tuple[int, ...]
    repeats: int
    loop_runs: int
    submits: tuple[tuple[int, int], ...]
    small: tuple[int, ...]
    small_repeats: int
    rounds: int
    warm: int
    alone: int
    transfers: int
    seconds: float
    features: int
    weights: int
    decode_rounds: int
    prefill_tokens: int

    @property
    def planes(self) -> int:
        """(layer, part) pairs: runs a block."""
        return self.layers * 2

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block of all layers."""
        return self.planes * RUN_NBYTES

    @property
    def medium_nbytes(self) -> int:
        """Bytes of the medium transfer."""
        return self.medium * self.block_nbytes

    @property
    def large_nbytes(self) -> int:
        """Bytes of the large transfer, and of every buffer."""
        return self.large * self.block_nbytes

    def blocks(self, nbytes: int, run_nbytes: int) -> int:
        """Blocks that make up ``nbytes`` when their runs have ``run_nbytes``."""
        return max(nbytes // (self.planes * run_nbytes), 1)


FULL = Scale(
    layers=80,
    medium=256,
    large=1024,
    kernel_runs=tuple(size * KIB // 2 for size in (1, 2, 4, 8, 16, 32, 64, 128)),
    pitched_runs=tuple(size * KIB for size in (1, 4, 8, 16, 32, 64)),
    engine_runs=tuple(size * KIB for size in (8, 16, 32, 64, 256, 1024)),
    programs=(1, 2, 4, 8, 12),
    frontier_programs=(1, 2, 3, 4),
    repeats=9,
    loop_runs=8192,
    submits=((1, 201), (16, 101), (256, 31), (1024, 11)),
    small=(1, 4, 16, 64),
    small_repeats=51,
    rounds=3,
    warm=60,
    alone=100,
    transfers=4,
    seconds=0.1,
    features=8192,
    weights=4,
    decode_rounds=4,
    prefill_tokens=8192,
)
SMOKE = Scale(
    layers=4,
    medium=32,
    large=128,
    kernel_runs=(KIB // 2, 8 * KIB),
    pitched_runs=(8 * KIB,),
    engine_runs=(8 * KIB, 256 * KIB),
    programs=(2, 12),
    frontier_programs=(1, 4),
    repeats=2,
    loop_runs=64,
    submits=((1, 3), (16, 3)),
    small=(1, 16),
    small_repeats=3,
    rounds=1,
    warm=5,
    alone=5,
    transfers=2,
    seconds=0.005,
    features=2048,
    weights=2,
    decode_rounds=4,
    prefill_tokens=2048,
)


def shape_of(run_nbytes: int) -> Shape:
    """A block of 16 tokens or more whose bytes are one run.

    >>> shape_of(8192), shape_of(512), shape_of(65536)
    (Shape(tokens=16, heads=2, dim=128), Shape(tokens=16, heads=2, dim=8), Shape(tokens=128, heads=2, dim=128))
    """
    dim = min(MOST_DIM, run_nbytes // (16 * HEADS * ITEMSIZE))
    return Shape(run_nbytes // (HEADS * dim * ITEMSIZE), HEADS, dim)


def spell(nbytes: int) -> str:
    """Bytes as people say them.

    >>> spell(512), spell(8192), spell(335544320), spell(1342177280)
    ('512 B', '8 KiB', '336 MB', '1.3 GB')
    """
    if nbytes < KIB:
        return f"{nbytes} B"
    if nbytes < 1 << 20:
        return f"{nbytes >> 10} KiB"
    if nbytes == 1 << 20:
        return "1 MiB"
    if nbytes < 10_000_000:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes < 1_000_000_000 else f"{nbytes / 1e9:.1f} GB"
