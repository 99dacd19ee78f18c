"""The policy of an executor: the path that it takes, and the limits of each path."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.base.integers import optional_integer
from kvplan.errors import PathError

PATHS = ("host", "copy_engine", "copy_engine_2d", "kernel", "staged")
GPU_PATHS = PATHS[1:]
OVERLAPS = ("idle", "decode", "prefill")
MIN_TILE, MAX_TILE = 1 << 10, 128 << 10  # bytes
# Triton programs of the kernel path if the policy names no number (docs/gpu.md). Without compute, as many as fill the
# link with runs of 1 KiB. Beside compute, few: if SMs store faster than the link can send, the whole GPU stalls.
IDLE_PROGRAMS = {"load": 8, "store": 8, "device": 32}
BESIDE_PROGRAMS = {"load": 4, "store": 2, "device": 32}
CHUNK_NBYTES = 42 << 20  # bytes of a chunk of the staged path
# A small transfer is cut into 3 equal chunks of at least 4 MiB. Each chunk costs 20 to 60 us of CPU time. A kernel for
# fewer bytes takes less than 10 us.
SMALL_CHUNKS, SMALL_CHUNK_NBYTES = 3, 4 << 20


@dataclass(frozen=True, slots=True)
class Policy:
    """The way in which an executor moves bytes. None leaves a choice to the executor.

    Attributes:
        path: ``"auto"``, or the name of the one path to use: ``"host"``, ``"copy_engine"``, ``"copy_engine_2d"``,
            ``"kernel"`` or ``"staged"``.
        threads: CPU threads of the host path; by default one per core, at most 8.
        max_programs: Triton programs of a kernel, and so the most SMs that it uses. The default of the kernel path is 8
            if ``overlap`` is ``"idle"``, otherwise 4 for a load and 2 for a store. By default, a kernel of the staged
            path uses all SMs for a short time.
        tile_bytes: bytes in flight per Triton program of the kernel path; a power of two from 1 KiB to 128 KiB.
        staging_bytes: bytes of GPU memory for the ring of the staged path, per direction.
        chunk_bytes: most bytes per chunk of the staged path.
        streams: copy streams of the copy_engine path, 1 to 8; by default 4 for many copies of 28 KiB or more, else 1.
            With 1, a staged load also launches all its kernels in one stream.
        overlap: the compute on the GPU during the transfers. ``"idle"``: none; ``"decode"``: limited by memory;
            ``"prefill"``: limited by the SMs. Beside compute, kernels use fewer SMs, and ``"auto"`` also counts
            the time that compute loses.

    Raises:
        PathError: an unknown path or overlap, or a number out of range.

    >>> Policy(path="host", threads=2).threads
    2
    """

    path: str = "auto"
    threads: int | None = None
    max_programs: int | None = None
    tile_bytes: int | None = None
    staging_bytes: int | None = None
    chunk_bytes: int | None = None
    streams: int | None = None
    overlap: str = "idle"

    def __post_init__(self) -> None:
        if self.path != "auto" and self.path not in PATHS:
            raise PathError(f"unknown path {self.path!r}; expected one of 'auto', {', '.join(map(repr, PATHS))}")
        if self.overlap not in OVERLAPS:
            raise PathError(f"unknown overlap {self.overlap!r}; expected one of {', '.join(map(repr, OVERLAPS))}")
        for name, least, most, why in (
            ("threads", 1, None, "the host path uses at least one"),
            ("max_programs", 1, 1 << 16, "a kernel has at least one program"),
            ("tile_bytes", MIN_TILE, MAX_TILE, f"a tile is a power of two from {MIN_TILE} to {MAX_TILE} bytes"),
            ("staging_bytes", 1 << 10, None, "a ring has at least 1,024 bytes"),
            ("chunk_bytes", 1 << 8, None, "a chunk has at least 256 bytes"),
            ("streams", 1, 8, "the copy engine uses 1 to 8"),
        ):
            value = optional_integer(name, getattr(self, name), least=least, most=most, right=why, error=PathError)
            object.__setattr__(self, name, value)
        if self.tile_bytes is not None and self.tile_bytes & (self.tile_bytes - 1):
            raise PathError(f"tile_bytes is {self.tile_bytes}; it is a power of two")

    def programs(self, direction: str) -> int:
        """Return the number of Triton programs that the kernel path launches for a direction.

        >>> Policy().programs("store"), Policy(overlap="decode").programs("store")
        (8, 2)
        >>> Policy(max_programs=3).programs("load")
        3
        """
        return self.max_programs or (IDLE_PROGRAMS if self.overlap == "idle" else BESIDE_PROGRAMS)[direction]


# The default policy of the adapters for engines, whose model runs during the transfers.
BESIDE_COMPUTE = Policy(overlap="decode")
