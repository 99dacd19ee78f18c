"""Sizes of the benchmarks between GPUs, and their limits. Pure, so that they can be looked at without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.sizes import KIB

ROUTES = ("push", "pull")
# Shares of one large copy of the same run.
WITHIN = {KIB // 2: 0.82, 2 * KIB: 0.86, 8 * KIB: 0.88, 64 * KIB: 0.88}
BETWEEN = {2 * KIB: 0.85, 8 * KIB: 0.92, 64 * KIB: 0.93}  # the better of push and pull
FEW_PROGRAMS, FEW_NBYTES, FEW_SHARE = 16, 8 * KIB, 0.92
HEADS_SHARE = 0.70
FOUR_SHARE = 0.85  # of one pair alone
# Beside decode: GB/s at a slow-down. By choice, the slow-down may be that of one large copy, and a little more.
OVERLAP_GBPS, OVERLAP_SLOWDOWN = 110.0, 1.08
CHOICE_GBPS, CHOICE_MORE = 280.0, 0.12
SEEN_US, SUBMIT_US = 60.0, 30.0


@dataclass(frozen=True)
class Scale:
    """How large a run is. The caches are of bf16, with K and V of each layer.

    Attributes:
        layers, dim, tokens: of every cache; tokens of a block.
        heads: of the model; a rank holds some of them.
        runs: bytes per run of whole transfers.
        nbytes: bytes per whole transfer.
        blocks: blocks of the buffers, of runs of 8 KiB.
        submits: (blocks, repeats) of the submits whose CPU time is taken.
        seen: repeats of the transfer of one block.
        repeats: samples per whole transfer; medians are taken.
        rounds: turns that all cases beside compute take.
        warm, alone, transfers, seconds: see :func:`kvplan.measure.compute.window`.
        features, weights, decode_rounds: see :class:`benchmarks.gpu.sizes.Scale`.
    """

    layers: int = 80
    dim: int = 128
    tokens: int = 16
    heads: int = 8
    runs: tuple[int, ...] = (KIB // 2, 2 * KIB, 8 * KIB, 64 * KIB)
    nbytes: int = 640 << 20
    blocks: int = 1024
    submits: tuple[tuple[int, int], ...] = ((1, 201), (16, 101), (256, 31), (1024, 11))
    seen: int = 101
    repeats: int = 9
    rounds: int = 3
    warm: int = 60
    alone: int = 100
    transfers: int = 4
    seconds: float = 0.1
    features: int = 8192
    weights: int = 4
    decode_rounds: int = 4

    @property
    def planes(self) -> int:
        """(layer, part) pairs: runs a block."""
        return 2 * self.layers

    def head_blocks(self, heads: int) -> int:
        """Blocks of a rank with so many heads that make up a whole transfer.

        >>> Scale().head_blocks(4), Scale().head_blocks(1)
        (256, 1024)
        """
        return max(self.nbytes // (self.planes * self.tokens * heads * self.dim * 2), 2)


FULL = Scale()
SMOKE = Scale(layers=4, dim=8, tokens=4, runs=(KIB // 2, 8 * KIB), nbytes=256 * KIB, blocks=16,
              submits=((1, 3), (4, 3)), seen=3, repeats=3, rounds=1, warm=5, alone=5, transfers=2, seconds=0.005,
              features=2048, weights=2)  # fmt: skip
