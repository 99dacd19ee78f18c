"""Sizes of the GPU's benchmarks. Pure, so that they can be looked at without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
RUN_NBYTES = 8 * KIB  # of one block of one (layer, part): 16 tokens x 2 heads x 128 of bf16


@dataclass(frozen=True)
class Scale:
    """How large a run of the benchmarks is.

    Attributes:
        layers: of every cache, each of K and V.
        repeats: of each whole transfer; medians are taken.
        submits: (blocks, repeats) of the submits whose CPU time is taken.
        seen: repeats of each small transfer.
        rounds: turns that all cases beside compute take.
        warm, alone, transfers, seconds: see :func:`kvplan.measure.rig.window`.
        features, weights, decode_rounds: an iteration of decode multiplies a batch of 64 by ``weights`` square bf16
            matrices of ``features``, ``decode_rounds`` times over.
        prefill_tokens: rows of the one product of an iteration of prefill.
    """

    layers: int = 80
    repeats: int = 9
    submits: tuple[tuple[int, int], ...] = ((1, 201), (16, 101), (256, 31), (1024, 11))
    seen: int = 101
    rounds: int = 3
    warm: int = 60
    alone: int = 100
    transfers: int = 4
    seconds: float = 0.1
    features: int = 8192
    weights: int = 4
    decode_rounds: int = 4
    prefill_tokens: int = 8192

    @property
    def planes(self) -> int:
        """(layer, part) pairs: runs a block."""
        return self.layers * 2

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block of all layers."""
        return self.planes * RUN_NBYTES

    @property
    def flat_nbytes(self) -> int:
        """Bytes of each flat buffer."""
        raise NotImplementedError


@dataclass(frozen=True)
class HostScale(Scale):
    """Sizes between the host and a GPU.

    Attributes:
        medium, large: blocks of the two whole transfers; pools hold ``large`` blocks.
        kernel_runs, pitched_runs, engine_runs: bytes of the runs of each path's table.
        programs: Triton programs of the kernel's loads.
        loop_runs: single copies of the baseline that issues one for each run.
        small: blocks of the small transfers.
    """

    seen: int = 51
    medium: int = 256
    large: int = 1024
    kernel_runs: tuple[int, ...] = tuple(size * KIB // 2 for size in (1, 2, 4, 8, 16, 32, 64, 128))
    pitched_runs: tuple[int, ...] = tuple(size * KIB for size in (1, 4, 8, 16, 32, 64))
    engine_runs: tuple[int, ...] = tuple(size * KIB for size in (8, 16, 32, 64, 256, 1024))
    programs: tuple[int, ...] = (1, 2, 4, 8, 12)
    loop_runs: int = 8192
    small: tuple[int, ...] = (1, 4, 16, 64)

    @property
    def medium_nbytes(self) -> int:
        """Bytes of the medium transfer."""
        return self.medium * self.block_nbytes

    @property
    def flat_nbytes(self) -> int:
        """Bytes of the large transfer, and of each flat buffer."""
        return self.large * self.block_nbytes


@dataclass(frozen=True)
class PeerScale(Scale):
    """Sizes between GPUs. The caches are of bf16.

    Attributes:
        dim, tokens: of every cache; tokens of a block.
        heads: of the model; a rank holds some of them.
        runs: bytes per run of whole transfers.
        nbytes: bytes per whole transfer.
        blocks: blocks of the buffers, of runs of 8 KiB.
    """

    dim: int = 128
    tokens: int = 16
    heads: int = 8
    runs: tuple[int, ...] = (KIB // 2, 2 * KIB, 8 * KIB, 64 * KIB)
    nbytes: int = 640 * MIB
    blocks: int = 1024

    @property
    def flat_nbytes(self) -> int:
        """Bytes of each flat buffer."""
        return max(self.blocks * self.block_nbytes, self.nbytes)

    def head_blocks(self, heads: int) -> int:
        """Blocks of a rank with so many heads that make up a whole transfer.

        >>> PeerScale().head_blocks(4), PeerScale().head_blocks(1)
        (256, 1024)
        """
        return max(self.nbytes // (self.planes * self.tokens * heads * self.dim * 2), 2)


_TINY = {"layers": 4, "repeats": 3, "seen": 3, "rounds": 1, "warm": 5, "alone": 5, "transfers": 2, "seconds": 0.005,
         "features": 2048, "weights": 2, "prefill_tokens": 2048}  # fmt: skip
HOST_SMOKE = HostScale(
    **_TINY, medium=32, large=128, kernel_runs=(KIB // 2, 8 * KIB), pitched_runs=(8 * KIB,),
    engine_runs=(8 * KIB, 256 * KIB), programs=(2, 12), loop_runs=64, submits=((1, 3), (16, 3)), small=(1, 16),
)  # fmt: skip
PEER_SMOKE = PeerScale(
    **_TINY, dim=8, tokens=4, runs=(KIB // 2, 8 * KIB), nbytes=256 * KIB, blocks=16, submits=((1, 3), (4, 3)),
)  # fmt: skip


def spell(nbytes: int) -> str:
    """Bytes as people say them.

    >>> spell(512), spell(8192), spell(335544320), spell(1342177280)
    ('512 B', '8 KiB', '336 MB', '1.3 GB')
    """
    if nbytes < KIB:
        return f"{nbytes} B"
    if nbytes < MIB:
        return f"{nbytes >> 10} KiB"
    if nbytes == MIB:
        return "1 MiB"
    if nbytes < 10_000_000:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes < 1_000_000_000 else f"{nbytes / 1e9:.1f} GB"
