"""The policy of an executor: the path that it takes, and the limits of each path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvplan.base.integers import optional_integer
from kvplan.errors import PathError
from kvplan.plan.layers import Cutting

PATHS = ("host", "copy_engine", "copy_engine_2d", "kernel", "staged")
GPU_PATHS = PATHS[1:]
OVERLAPS = ("idle", "decode", "prefill")
MIN_TILE, MAX_TILE = 1 << 10, 128 << 10  # bytes
# A route is the way of a plan's bytes, seen from the GPU whose executor moves them: from the host ("load"), to the host
# ("store"), within the GPU ("device"), to another GPU ("push"), or from another GPU ("pull").
HOST_ROUTES = ("load", "store")
PEER_ROUTES = ("push", "pull")
ROUTES = (*HOST_ROUTES, "device", *PEER_ROUTES)


class KernelSize(NamedTuple):
    """The size of the kernel path's launches for one route.

    Attributes:
        programs: Triton programs; 0 stands for one per SM, and a negative number for that many per SM.
        tile: bytes in flight per program.
        warps: most warps per program.
    """

    programs: int
    tile: int
    warps: int = 32


# Launches of the kernel path if the policy names no number (docs/guides/gpu.md). Without compute: as many programs
# as fill the link with runs of 1 KiB, or the memory of the GPU with runs of any size. Another GPU's memory is
# read at the speed of NVLink by 16 programs; to write it at that speed takes a program per SM (H200).
IDLE_KERNELS = {
    "load": KernelSize(8, 128 << 10), "store": KernelSize(8, 32 << 10), "device": KernelSize(-8, 64 << 10),
    "push": KernelSize(0, 128 << 10), "pull": KernelSize(16, 128 << 10),
}  # fmt: skip
# Beside compute, few: if SMs store to the host faster than the link can send, the whole GPU stalls. Products of
# matrices leave some SMs free, but only whole ones. Six programs of 4 warps share an SM, so 24 programs hold 4 SMs.
BESIDE_KERNELS = {
    "load": KernelSize(4, 128 << 10), "store": KernelSize(2, 32 << 10), "device": KernelSize(24, 16 << 10, 4),
    "push": KernelSize(24, 16 << 10, 4), "pull": KernelSize(24, 16 << 10, 4),
}  # fmt: skip
CHUNK_NBYTES = 42 << 20  # bytes of a chunk of the staged path
# A small transfer is cut into 3 equal chunks of at least 4 MiB. Each chunk costs 20 to 60 us of CPU time. A kernel for
# fewer bytes takes less than 10 us.
SMALL_CHUNKS, SMALL_CHUNK_NBYTES = 3, 4 << 20
# A transfer by layers is cut into at most 8 groups of layers, of at least 16 MiB each. More groups cost the CPU as many
# more copies. But the model waits for the first group before it computes anything, and it computes the last group when
# all bytes have arrived. So these two are halved, and the halves again, if each piece has at least 8 MiB, and 32 KiB of
# each unit: where the host keeps all layers of a block together, the driver takes longer for shorter pieces.
LAYER_GROUPS, LAYER_GROUP_NBYTES = 8, 16 << 20
HALVINGS, HALVED_NBYTES, HALVED_PIECE_NBYTES = 2, 8 << 20, 32 << 10
# If the compute takes twice as long as the copies, fewer groups are enough, each twice as large as the one before. Then
# the compute of a group hides the copies of the next one. Beside compute, long loads were seen at 0.7 of the link's
# rate and more. So the compute must take three times as long as the copies alone. A group costs the thread that
# launches the compute some 0.1 ms: its wait, and its share of the submit (H200, whole engines). Against this stands the
# later arrival of a larger first group.
DOUBLINGS, HIDES, GROUP_SECONDS = (5, 4), 3.0, 1e-4


@dataclass(frozen=True, slots=True)
class Policy:
    """The way in which an executor moves bytes. None leaves a choice to the executor.

    Attributes:
        path: ``"auto"``, or the name of the one path to use: ``"host"``, ``"copy_engine"``, ``"copy_engine_2d"``,
            ``"kernel"`` or ``"staged"``.
        threads: CPU threads of the host path; by default one per core, at most 8.
        max_programs: Triton programs of a kernel, and so the most SMs that it uses. The defaults of the kernel path are
            in ``docs/guides/gpu.md``: for a load 8, or 4 beside compute. By default, a kernel of the staged path uses
            all SMs for a short time.
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

    def kernel(self, route: str, processors: int) -> KernelSize:
        """Return programs, bytes in flight and warps of the kernel path for a route.

        Args:
            route: one of :data:`ROUTES`.
            processors: number of SMs of the GPU.

        >>> Policy().kernel("store", 132).programs, Policy(overlap="decode").kernel("store", 132).programs
        (8, 2)
        >>> Policy(max_programs=3, tile_bytes=1024).kernel("push", 132)
        KernelSize(programs=3, tile=1024, warps=32)
        """
        size = (IDLE_KERNELS if self.overlap == "idle" else BESIDE_KERNELS)[route]
        programs = size.programs if size.programs > 0 else processors * max(-size.programs, 1)
        if self.max_programs is None and self.tile_bytes is None:
            return size._replace(programs=programs)
        # A caller who names programs or a tile means SMs, so each program has as much in flight as it may.
        tile = size.tile if route in HOST_ROUTES else MAX_TILE
        return KernelSize(self.max_programs or programs, self.tile_bytes or tile)


# The default policy of the adapters for engines, whose model runs during the transfers.
BESIDE_COMPUTE = Policy(overlap="decode")


class Hiding(NamedTuple):
    """The compute that waits for the layers of a transfer.

    Attributes:
        seconds: seconds of the compute of all layers.
        copying: seconds of the copies at the link's rate.
    """

    seconds: float
    copying: float


def layer_groups(
    nbytes: int,
    units: int,
    layers: int,
    most: int = LAYER_GROUPS,
    least_nbytes: int = LAYER_GROUP_NBYTES,
    halved_nbytes: int = HALVED_NBYTES,
    piece_nbytes: int = HALVED_PIECE_NBYTES,
    *,
    hiding: Hiding | None = None,
) -> Cutting:
    """Return the groups of layers that a transfer by layers is cut into.

    Args:
        nbytes: its bytes.
        units: its units.
        layers: its layers, of as many bytes each.
        most: most groups of the same size; the first and the last of so many are halved.
        least_nbytes: least bytes of a group that is not halved.
        halved_nbytes: least bytes of a halved group.
        piece_nbytes: least bytes that a halved group, and the first of groups that double, have of each unit.
        hiding: the compute that waits for the layers; None if it is not known.

    >>> [layer_groups(mebibytes << 20, mebibytes // 2, 32)[:2] for mebibytes in (1, 40, 100, 130, 700)]
    [(1, 0), (2, 0), (6, 0), (8, 1), (8, 2)]
    >>> layer_groups(700 << 20, units=1400, layers=32)[:2]  # of 512 KiB
    (8, 1)
    >>> layer_groups(700 << 20, units=700, layers=61)[:2]  # a quarter of 7 layers would be one layer, of 17 KiB
    (8, 1)
    >>> layer_groups(240 << 20, units=384, layers=80, hiding=Hiding(0.015, 0.0045))
    Cutting(groups=4, halvings=0, doubling=True)
    """
    groups = max(min(most, nbytes // max(least_nbytes, 1)), 1)
    usual = Cutting(groups)
    if groups == most and groups > 1:
        usual = _halved(nbytes, units, layers, groups, halved_nbytes, piece_nbytes)
    if hiding is None or groups < min(DOUBLINGS) or layers < 1:
        return usual
    return _doubled(nbytes, units, layers, piece_nbytes, hiding, usual)


def _halved(nbytes: int, units: int, layers: int, groups: int, least_nbytes: int, piece_nbytes: int) -> Cutting:
    """Return groups of the same size. The first and the last are halved while their pieces are large enough."""
    for halvings in range(HALVINGS, 0, -1):
        made = Cutting(groups, halvings)
        if min(made.sizes(layers)) * nbytes >= layers * max(least_nbytes, units * piece_nbytes):
            return made
    return Cutting(groups)


def _doubled(nbytes: int, units: int, layers: int, piece_nbytes: int, hiding: Hiding, usual: Cutting) -> Cutting:
    """Return groups that double, if the compute hides their copies and they pay; otherwise the usual groups."""
    if not 0 < hiding.copying * HIDES <= hiding.seconds:
        return usual
    before = usual.sizes(layers)
    for count in DOUBLINGS:
        made = Cutting(count, doubling=True)
        sizes = made.sizes(layers)
        later = hiding.copying * (sizes[0] - before[0]) / layers
        saved = len(before) - len(sizes)
        if saved > 0 and later < GROUP_SECONDS * saved and sizes[0] * nbytes >= layers * units * piece_nbytes:
            return made
    return usual


def cuttings(most: int = LAYER_GROUPS) -> tuple[Cutting, ...]:
    """Return the groups of layers of all transfers that are not short.

    >>> [tuple(one) for one in cuttings()]
    [(8, 0, False), (8, 1, False), (8, 2, False), (5, 0, True), (4, 0, True)]
    """
    equal = tuple(Cutting(most, halvings) for halvings in range(HALVINGS + 1 if most > 1 else 1))
    double = tuple(Cutting(count, doubling=True) for count in DOUBLINGS)
    return (*equal, *double) if most >= min(DOUBLINGS) else equal
