"""The policy of an executor: the path that it takes, and the limits of each path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from kvplan.base.values import optional_integer
from kvplan.errors import PathError
from kvplan.plan.layers import even_edges

PATHS = ("host", "copy_engine", "copy_engine_2d", "kernel", "staged")
GPU_PATHS = PATHS[1:]
OVERLAPS = ("idle", "decode", "prefill")
MAX_TILE = 128 << 10  # most bytes in flight per Triton program
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
# A transfer by layers is cut into a group of layers for each 16 MiB, at most 8: each costs the CPU as many more copies.
# But the model waits for the first group before it computes anything, and it computes the last group when all bytes
# have arrived. So these two are halved if there are 8.
LAYER_GROUPS, LAYER_GROUP_NBYTES = 8, 16 << 20
# Settings of earlier versions, and what to do instead.
REPLACED = {
    "tile_bytes": "the executor decides; max_programs limits the SMs that a kernel uses",
    "chunk_bytes": "give staging_bytes, of which a chunk is a part",
    "streams": "nothing to set: the executor decides",
}


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
        staging_bytes: bytes of GPU memory for the ring of the staged path, per direction; by default 84 MiB.
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
    staging_bytes: int | None = None
    overlap: str = "idle"

    def __new__(cls, *_: object, **settings: object) -> Self:
        """Refuse settings of earlier versions, by the name of what replaced them."""
        for name in settings.keys() & REPLACED.keys():
            raise PathError(f"Policy has no {name} any more: {REPLACED[name]}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, known in (("path", ("auto", *PATHS)), ("overlap", OVERLAPS)):
            if (value := getattr(self, name)) not in known:
                raise PathError(f"unknown {name} {value!r}; expected one of {', '.join(map(repr, known))}")
        for name, least, most, words in (
            ("threads", 1, 1 << 16, "one"),
            ("max_programs", 1, 1 << 16, "one"),
            ("staging_bytes", 1 << 10, 1 << 62, "1,024"),
        ):
            number, right = getattr(self, name), f"give at least {words}"
            number = optional_integer(name, number, least=least, most=most, right=right, error=PathError)
            object.__setattr__(self, name, number)

    def kernel(self, route: str, processors: int) -> KernelSize:
        """Return programs, bytes in flight and warps of the kernel path for a route.

        Args:
            route: one of :data:`ROUTES`.
            processors: number of SMs of the GPU.

        >>> Policy().kernel("store", 132).programs, Policy(overlap="decode").kernel("store", 132).programs
        (8, 2)
        >>> Policy(max_programs=3).kernel("push", 132)
        KernelSize(programs=3, tile=131072, warps=32)
        """
        size = (IDLE_KERNELS if self.overlap == "idle" else BESIDE_KERNELS)[route]
        programs = size.programs if size.programs > 0 else processors * max(-size.programs, 1)
        if self.max_programs is None:
            return size._replace(programs=programs)
        # A caller who names programs means SMs, so each program has as much in flight as it may.
        return KernelSize(self.max_programs, size.tile if route in HOST_ROUTES else MAX_TILE)


# The default policy of the adapters for engines, whose model runs during the transfers.
BESIDE_COMPUTE = Policy(overlap="decode")


def layer_edges(nbytes: int, layers: int, group_nbytes: int = LAYER_GROUP_NBYTES) -> tuple[int, ...]:
    """Return the groups of layers that a transfer by layers is cut into.

    Args:
        nbytes: its bytes.
        layers: its layers, of as many bytes each.
        group_nbytes: bytes for each of which there is a group.

    Returns:
        The number of layers before each group, and after the last.

    >>> [layer_edges(mebibytes << 20, 32) for mebibytes in (1, 40, 130)]
    [(0, 32), (0, 16, 32), (0, 2, 4, 8, 12, 16, 20, 24, 28, 30, 32)]
    """
    edges = even_edges(layers, min(LAYER_GROUPS, nbytes // group_nbytes))
    if len(edges) <= LAYER_GROUPS:
        return edges
    return tuple(sorted({*edges, edges[1] // 2, (edges[-2] + layers + 1) // 2}))
