"""The pool of another process: which layouts it has, so that both processes place them alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.workload import Geometry, side_of

if TYPE_CHECKING:
    from torch import Tensor

LAYERS_NAME = "layers"  # the layout of separate allocations, with which the time of a meeting is measured


class PoolSpec(NamedTuple):
    """The memory of the other process.

    Attributes:
        device: ``"cuda:1"`` as the other process sees it, or ``"cpu"``.
        nbytes: bytes of the pool.
        shapes: (bytes per run, runs per block, order of the pool) of each layout.
        layers: number of separate allocations, with which the time of a meeting is measured.
        layer_nbytes: bytes of each of them.
        nixl: whether it makes an agent of NIXL, too.
    """

    device: str
    nbytes: int
    shapes: tuple[tuple[int, int, str], ...]
    layers: int = 80
    layer_nbytes: int = 12 << 20
    nixl: bool = False

    @classmethod
    def of(cls, device: str, nbytes: int, geometries: Iterable[Geometry], *, nixl: bool = False) -> Self:
        """Return the memory that some transfers need."""
        shapes = {(one.run_nbytes, one.block_runs, one.host) for one in geometries}
        return cls(device, nbytes, tuple(sorted(shapes)), nixl=nixl)


def name_of(geometry: Geometry) -> str:
    """Return the name of a transfer's pool on the card of the other process.

    >>> name_of(Geometry("push", "scattered", 8192, 320, 160))
    '8192 x 160, scattered'
    """
    return f"{geometry.run_nbytes} x {geometry.block_runs}, {geometry.host}"


def pool_layouts(flat: Tensor, spec: PoolSpec) -> dict[str, KVLayout]:
    """Return the layouts of a pool by their names; all begin at the same byte."""
    found = {}
    for run_nbytes, block_runs, host in spec.shapes:
        geometry = Geometry("push", host, run_nbytes, block_runs, block_runs)
        blocks = flat.numel() // (run_nbytes * block_runs)
        found[name_of(geometry)] = side_of(flat, geometry, blocks, paged=host == "contiguous").layout
    return found
